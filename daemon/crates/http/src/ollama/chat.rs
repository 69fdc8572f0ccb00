//! `POST /api/chat`: a line of JSON for each piece, the last with `done` and the counts. Streams by
//! default.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::parts::Part;
use rocmforge_chat::tool_calls::ToolCall;
use rocmforge_chat::tools;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{Failure, Violations};
use rocmforge_service::answers::Ended;
use rocmforge_tokenizer::Ending;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer};
use super::super::error::Dialect;
use super::super::format;
use super::super::prompt::{WireMessage, messages, model_name};
use super::super::reply::{Events, stream};
use super::super::sampling::whole_number;
use super::super::start::Conversation;
use super::keep_alive::{self, Keep, KeepAlives, Using};
use super::logprobs::{self, Logprobs};
use super::{NDJSON, Options, counts, fit, line, merge, name, thinking, time};

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    messages: Vec<WireMessage>,
    stream: Option<bool>,
    #[serde(default)]
    options: Option<Options>,
    tools: Option<Vec<Value>>,
    think: Option<Value>,
    keep_alive: Option<Value>,
    format: Option<Value>,
    logprobs: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    top_logprobs: Option<i64>,
}

/// Handler of `POST /api/chat`.
pub(in super::super) async fn chat(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /api/chat", &request);
    let result = complete(&call, &http.keep_alives, request).await;
    call.respond(result)
}

async fn complete(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    request: Request,
) -> Result<Response, Failure> {
    let mut asked: ChatRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let keep = keep_alive::read(asked.keep_alive.as_ref())?;
    let mut lines = Lines {
        model: asked.model.clone(),
        request_id: call.id.as_str().to_owned(),
        calls: 0,
        logprobs: Logprobs::default(),
        using: None,
    };
    if asked.messages.is_empty() {
        let done = only_the_model(call, keep_alives, &asked.model, keep).await?;
        let mut last = lines.line(&json!({"role": "assistant", "content": ""}));
        merge(&mut last, done);
        return answer(&last);
    }
    let options = asked.options.unwrap_or_default();
    options.refuse_unsupported()?;
    let mut violations = Violations::named(name);
    let (mut sampling, n_ctx) = options.fields(&mut violations);
    sampling.decoding.logprobs = logprobs::wanted(asked.logprobs, asked.top_logprobs);
    sampling.decoding.format = format::of_ollama(asked.format)?;
    let conversation = Conversation {
        model: asked.model,
        messages: messages(asked.messages)?,
        tools: tools::checked(asked.tools, None, None)?,
        kwargs: thinking(asked.think.as_ref()),
        documents: Vec::new(),
        ending: Ending::Answer,
        is_quiet: false,
        sampling,
        n_ctx,
        choices: 1,
        field: "messages",
    };
    let generation = fit::chat(call, conversation, violations).await?;
    let model = generation.model();
    lines.using = model.map(|model| keep_alives.begin(model.name(), keep));
    lines.logprobs = Logprobs::by(model);
    if asked.stream != Some(false) {
        return stream(generation, lines, call).await;
    }
    let (parts, mut ended) = generation.collect().await?;
    lines.logprobs.take(std::mem::take(&mut ended.scores));
    let (mut content, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(text) => content.push_str(&text),
            Part::Reasoning(text) => thought.push_str(&text),
            Part::Call(call) => match tool_call(&call, calls.len()) {
                Some(told) => calls.push(told),
                None => content.push_str(&call.as_text()),
            },
            // Calls are told whole here.
            Part::Arguments(_) => {}
        }
    }
    let mut message = json!({"role": "assistant", "content": content});
    if !thought.is_empty() {
        message["thinking"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    let mut whole = lines.line(&message);
    whole["done"] = true.into();
    merge(&mut whole, counts(&ended));
    answer(&lines.logprobs.beside(whole))
}

/// Handles a request without messages, which loads the model or frees its weights.
pub(super) async fn only_the_model(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    model: &str,
    keep: Option<Keep>,
) -> Result<Value, Failure> {
    let reason = if keep.is_some_and(Keep::is_none) {
        call.service.check_there("model", model).await?;
        let there = call.service.available_as(model).await?;
        if let Some(status) = there.loaded() {
            let name = status.model.name();
            keep_alives.let_go(&call.service.engine, name).await;
        }
        "unload"
    } else {
        let loaded = call.model(model).await?;
        drop(keep_alives.begin(loaded.name(), keep));
        "load"
    };
    Ok(json!({"done": true, "done_reason": reason}))
}

/// A call in Ollama's format: the arguments as an object, and the call's index in the function.
/// `None` if the arguments are not valid, for example because the output was cut: clients would
/// call the tool without arguments.
fn tool_call(call: &ToolCall, index: usize) -> Option<Value> {
    let arguments: Map<String, Value> = serde_json::from_str(&call.arguments).ok()?;
    Some(json!({
        "id": format!("call_{}", fresh_id()),
        "function": {"index": index, "name": call.name, "arguments": arguments},
    }))
}

/// Writer of the lines of a stream.
#[derive(Debug)]
struct Lines {
    model: String,
    request_id: String,
    /// Number of tool calls that were sent.
    calls: usize,
    logprobs: Logprobs,
    /// Marks the model as in use until the stream ends.
    using: Option<Using>,
}

impl Lines {
    fn line(&self, message: &Value) -> Value {
        json!({
            "model": self.model,
            "created_at": time::now(),
            "message": message,
            "done": false,
        })
    }

    fn tell(&mut self, message: &Value, out: &mut String) {
        let line = self.line(message);
        self.logprobs.line(line, out);
    }

    /// Writes a line with an empty text, as a heartbeat.
    fn tell_nothing(&mut self, out: &mut String) {
        self.tell(&json!({"role": "assistant", "content": ""}), out);
    }
}

impl Events for Lines {
    const CONTENT_TYPE: &'static str = NDJSON;

    fn begin(&mut self, _: &mut String) {}

    fn scores(&mut self, scores: Vec<TokenScore>) {
        // Those of marks, and of text that was held back, come with what is behind them.
        self.logprobs.take(scores);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        let message = match part {
            Part::Text(text) => json!({"role": "assistant", "content": text}),
            Part::Reasoning(text) => {
                json!({"role": "assistant", "content": "", "thinking": text})
            }
            Part::Call(call) => match tool_call(&call, self.calls) {
                Some(told) => {
                    self.calls += 1;
                    json!({"role": "assistant", "content": "", "tool_calls": [told]})
                }
                None => json!({"role": "assistant", "content": call.as_text()}),
            },
            Part::Arguments(_) => return,
        };
        self.tell(&message, out);
    }

    fn heartbeat(&mut self, out: &mut String) {
        self.tell_nothing(out);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        let mut last = self.line(&json!({"role": "assistant", "content": ""}));
        last["done"] = true.into();
        merge(&mut last, counts(ended));
        self.logprobs.line(last, out);
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        line(&Dialect::Ollama.body(failure, &self.request_id), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_an_answer_are_told_apart() {
        let mut lines = Lines {
            model: "m".to_owned(),
            request_id: String::new(),
            calls: 0,
            logprobs: Logprobs::default(),
            using: None,
        };
        let mut out = String::new();
        // The arguments of the second are cut.
        for (name, arguments) in [
            ("f", r#"{"a": 1}"#),
            ("h", r#"{"a": "#),
            ("g", r#"{"a": 1}"#),
        ] {
            let call = ToolCall {
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            };
            lines.part(Part::Call(call), &mut out);
        }
        let told = out.lines().map(|line| {
            let value: Value = serde_json::from_str(line).unwrap();
            value["message"]["tool_calls"][0].clone()
        });
        let mut told: Vec<Value> = told.collect();
        // What is no call that can be made is text.
        assert!(
            told.remove(1).is_null()
                && out.contains(r#"{\"name\": \"h\", \"arguments\": {\"a\": "#),
            "{out}"
        );
        for (at, (call, name)) in told.iter().zip(["f", "g"]).enumerate() {
            let function = json!({"index": at, "name": name, "arguments": {"a": 1}});
            assert_eq!(call["function"], function);
        }
        assert_ne!(told[0]["id"], told[1]["id"]);
        assert!(told[0]["id"].is_string());
    }
}
