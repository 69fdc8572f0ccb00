//! `POST /v1/completions`: a text, or token ids, continued.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_service::check::Violations;
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::prompt::Prompt;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::error::Dialect;
use super::super::parts::Part;
use super::super::prompt::{
    TextOr, WireSampling, refuse_unsupported, says_something, wants_format,
};
use super::super::reply::{Ended, Events, SSE, SSE_HEARTBEAT, event, stream};
use super::super::start::{self, Continuation};
use super::chat::no_prompt;
use super::{StreamOptions, finish_reason, name, usage};

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default)]
    model: String,
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    // Refused where they ask for anything.
    n: Option<i64>,
    best_of: Option<i64>,
    echo: Option<bool>,
    logprobs: Option<i64>,
    logit_bias: Option<Value>,
    suffix: Option<String>,
    response_format: Option<Value>,
}

impl CompletionRequest {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const ONE: &str = "one answer is made a request; leave it unset, or send several requests";
        const LATER: &str = "not implemented; leave it unset";
        let suffix = self.suffix.as_ref().is_some_and(|text| !text.is_empty());
        refuse_unsupported(&[
            ("n", self.n.is_some_and(|n| n != 1), ONE),
            ("best_of", self.best_of.is_some_and(|n| n != 1), ONE),
            ("echo", self.echo == Some(true), LATER),
            ("logprobs", self.logprobs.is_some(), LATER),
            (
                "logit_bias",
                says_something(self.logit_bias.as_ref()),
                LATER,
            ),
            ("suffix", suffix, LATER),
            (
                "response_format",
                wants_format(self.response_format.as_ref()),
                LATER,
            ),
        ])
    }
}

/// A prompt: a text, ids, or a list of one of these.
fn prompt(value: Value) -> Result<Prompt, Failure> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(Prompt::Text {
            text,
            add_special: true,
            parse_special: true,
        }),
        Value::Array(mut list) if !list.is_empty() => {
            if list[0].is_number() {
                let ids = list
                    .iter()
                    .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                let ids: Option<Vec<u32>> = ids.collect();
                return ids.map(Prompt::Ids).ok_or_else(|| {
                    failure::invalid("prompt", "a list of ids has whole numbers from 0 only")
                });
            }
            if list.len() > 1 {
                return Err(failure::unsupported_field(
                    "prompt",
                    "one prompt is continued a request; send several requests",
                ));
            }
            prompt(list.swap_remove(0))
        }
        _ => Err(no_prompt("prompt")),
    }
}

/// The handler.
pub(in super::super) async fn completions(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/completions", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: CompletionRequest = call.read(request).await?;
    asked.refuse_unsupported()?;
    let mut violations = Violations::named(name);
    let sampling = asked
        .sampling
        .fields(asked.max_tokens, asked.stop, &mut violations);
    let continuation = Continuation {
        model: asked.model.clone(),
        prompt: prompt(asked.prompt)?,
        sampling,
        n_ctx: None,
        field: "prompt",
    };
    let generation = start::text(call, continuation, violations).await?;
    let chunks = Chunks {
        id: format!("cmpl-{}", fresh_id()),
        created: unix_seconds(),
        model: asked.model,
        request_id: call.id.as_str().to_owned(),
        with_usage: asked
            .stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
    };
    if asked.stream == Some(true) {
        return stream(generation, chunks, call).await;
    }
    let (parts, ended) = generation.collect().await?;
    let text: String = parts.into_iter().filter_map(text_of).collect();
    let mut whole = chunks.chunk(&chunks.choices(&text, Some(finish_reason(&ended))));
    whole["usage"] = usage(&ended);
    answer(&whole)
}

fn text_of(part: Part) -> Option<String> {
    match part {
        Part::Text(text) => Some(text),
        Part::Reasoning(_) | Part::Call(_) => None,
    }
}

/// The chunks of a stream.
#[derive(Debug)]
struct Chunks {
    id: String,
    created: u64,
    model: String,
    request_id: String,
    with_usage: bool,
}

impl Chunks {
    fn choices(&self, text: &str, finish: Option<&str>) -> Value {
        json!([{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}])
    }

    fn chunk(&self, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, _: &mut String) {}

    fn part(&mut self, part: Part, out: &mut String) {
        if let Some(text) = text_of(part) {
            event(None, &self.chunk(&self.choices(&text, None)), out);
        }
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        let choices = self.choices("", Some(finish_reason(ended)));
        event(None, &self.chunk(&choices), out);
        if self.with_usage {
            let mut last = self.chunk(&json!([]));
            last["usage"] = usage(ended);
            event(None, &last, out);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        event(None, &Dialect::OpenAi.body(failure, &self.request_id), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_or_ids() {
        assert!(matches!(prompt(json!("a")), Ok(Prompt::Text { text, .. }) if text == "a"));
        assert!(matches!(prompt(json!(["a"])), Ok(Prompt::Text { text, .. }) if text == "a"));
        assert!(matches!(prompt(json!([1, 2])), Ok(Prompt::Ids(ids)) if ids == [1, 2]));
        assert!(matches!(prompt(json!([[1, 2]])), Ok(Prompt::Ids(ids)) if ids == [1, 2]));
        for refused in [
            json!(""),
            json!([]),
            json!(null),
            json!([1, -2]),
            json!([1, "a"]),
            json!(["a", "b"]),
        ] {
            assert!(prompt(refused.clone()).is_err(), "{refused}");
        }
    }
}
