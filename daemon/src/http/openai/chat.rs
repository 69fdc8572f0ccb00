//! `POST /v1/chat/completions`.
//!
//! A stream is, as OpenAI's own: the role; the answer in pieces; the reason of its end, with an
//! empty delta; the usage, with no choices, if it was asked for; `[DONE]`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_service::check::Violations;
use rocmforge_service::failure::{self, Failure};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::error::Dialect;
use super::super::parts::Part;
use super::super::prompt::{
    TextOr, WireMessage, WireSampling, messages, refuse_unsupported, says_something, wants_format,
};
use super::super::reply::{Ended, Events, Generation, SSE, SSE_HEARTBEAT, event, stream};
use super::super::start::{self, Conversation};
use super::super::tool_calls::{self, ToolCall};
use super::{StreamOptions, finish_reason, name, usage};

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default)]
    model: String,
    messages: Vec<WireMessage>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    // Refused where they ask for anything.
    n: Option<i64>,
    logprobs: Option<Value>,
    top_logprobs: Option<i64>,
    logit_bias: Option<Value>,
    response_format: Option<Value>,
    functions: Option<Value>,
    function_call: Option<Value>,
    modalities: Option<Vec<String>>,
    audio: Option<Value>,
    web_search_options: Option<Value>,
    grammar: Option<Value>,
    json_schema: Option<Value>,
}

impl ChatRequest {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const ONE: &str = "one answer is made a request; leave it unset, or send several requests";
        const LOGPROBS: &str =
            "log-probabilities of generated tokens are not implemented; leave it unset";
        const BIAS: &str = "not implemented; leave it unset";
        const FORMAT: &str =
            "answers cannot be held to a format yet; leave it unset, or give type text";
        const FUNCTIONS: &str = "replaced by tools; send tools";
        const TEXT: &str = "the models here write text only; leave it unset, or give [\"text\"]";
        let says = |value: &Option<Value>| says_something(value.as_ref());
        let modalities = self.modalities.as_ref();
        let speaks = modalities.is_some_and(|list| list.iter().any(|mode| mode != "text"));
        let calls = says(&self.function_call) && self.function_call != Some(json!("none"));
        refuse_unsupported(&[
            ("n", self.n.is_some_and(|n| n != 1), ONE),
            ("logprobs", says(&self.logprobs), LOGPROBS),
            (
                "top_logprobs",
                self.top_logprobs.is_some_and(|n| n > 0),
                LOGPROBS,
            ),
            ("logit_bias", says(&self.logit_bias), BIAS),
            (
                "response_format",
                wants_format(self.response_format.as_ref()),
                FORMAT,
            ),
            ("grammar", says(&self.grammar), FORMAT),
            ("json_schema", says(&self.json_schema), FORMAT),
            ("functions", says(&self.functions), FUNCTIONS),
            ("function_call", calls, FUNCTIONS),
            ("modalities", speaks, TEXT),
            ("audio", says(&self.audio) && speaks, TEXT),
            ("web_search_options", says(&self.web_search_options), BIAS),
        ])
    }

    /// More variables for the template.
    fn kwargs(&mut self) -> Map<String, Value> {
        let mut kwargs = self.chat_template_kwargs.take().unwrap_or_default();
        if let Some(effort) = self.reasoning_effort.take() {
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
            } else {
                kwargs.entry("reasoning_effort").or_insert(effort.into());
            }
        }
        kwargs
    }
}

/// The handler.
pub(in super::super) async fn chat(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/chat/completions", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let mut asked: ChatRequest = call.read(request).await?;
    asked.refuse_unsupported()?;
    let kwargs = asked.kwargs();
    let tools = tool_calls::checked(
        asked.tools,
        asked.tool_choice.as_ref(),
        asked.parallel_tool_calls,
    )?;
    let mut violations = Violations::named(name);
    let max_tokens = asked.max_completion_tokens.or(asked.max_tokens);
    let sampling = asked
        .sampling
        .fields(max_tokens, asked.stop, &mut violations);
    let conversation = Conversation {
        model: asked.model.clone(),
        messages: messages(asked.messages)?,
        tools,
        kwargs,
        sampling,
        n_ctx: None,
        field: "messages",
    };
    let generation = start::chat(call, conversation, violations).await?;
    let chunks = Chunks {
        id: format!("chatcmpl-{}", fresh_id()),
        created: unix_seconds(),
        model: asked.model,
        request_id: call.id.as_str().to_owned(),
        with_usage: asked
            .stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
        calls: 0,
    };
    if asked.stream == Some(true) {
        stream(generation, chunks, call).await
    } else {
        whole(generation, &chunks).await
    }
}

async fn whole(generation: Generation, chunks: &Chunks) -> Result<Response, Failure> {
    let (parts, ended) = generation.collect().await?;
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(text) => content.push_str(&text),
            Part::Reasoning(text) => reasoning.push_str(&text),
            Part::Call(call) => calls.push(tool_call(&call)),
        }
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.into();
    }
    answer(&json!({
        "id": chunks.id,
        "object": "chat.completion",
        "created": chunks.created,
        "model": chunks.model,
        "choices": [{
            "index": 0,
            "message": message,
            "logprobs": null,
            "finish_reason": finish_reason(&ended),
        }],
        "usage": usage(&ended),
        "system_fingerprint": null,
    }))
}

fn tool_call(call: &ToolCall) -> Value {
    json!({
        "id": format!("call_{}", fresh_id()),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// The chunks of a stream.
#[derive(Debug)]
struct Chunks {
    id: String,
    created: u64,
    model: String,
    request_id: String,
    with_usage: bool,
    calls: usize,
}

impl Chunks {
    fn chunk(&self, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn delta(&self, delta: &Value, finish: Option<&str>, out: &mut String) {
        let choice = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
        event(None, &self.chunk(&choice), out);
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, out: &mut String) {
        self.delta(&json!({"role": "assistant", "content": ""}), None, out);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        let delta = match part {
            Part::Text(text) => json!({"content": text}),
            Part::Reasoning(text) => json!({"reasoning_content": text}),
            Part::Call(call) => {
                let mut call = tool_call(&call);
                call["index"] = self.calls.into();
                self.calls += 1;
                json!({"tool_calls": [call]})
            }
        };
        self.delta(&delta, None, out);
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        self.delta(&json!({}), Some(finish_reason(ended)), out);
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

/// INVALID_ARGUMENT where a request has no prompt.
pub(super) fn no_prompt(field: &str) -> Failure {
    failure::invalid(field, "empty; give a text or token ids")
}
