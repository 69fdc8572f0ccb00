//! `POST /v1/responses`, without a memory of earlier ones: every request brings its whole
//! conversation.
//!
//! The answer is a list of items: what the model thinks (`reasoning`), says (`message`) and calls
//! (`function_call`). In a stream each item is opened, filled and closed before the next one opens:
//!
//! ```text
//! response.created response.in_progress
//!   (response.output_item.added [response.content_part.added] ...delta* ...done
//!    response.output_item.done)*
//! response.completed | response.incomplete | response.failed
//! ```

mod events;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_service::failure::Failure;
use serde_json::{Value, json};

use self::events::{Answer, ResponseEvents};
use self::request::ResponsesRequest;
use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::reply;
use super::super::start;
use super::logprobs;
use rocmforge_service::answers::Ended;
use rocmforge_service::parts::Part;
use rocmforge_service::tool_calls::ToolCall;

/// The handler.
pub(in super::super) async fn responses(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/responses", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: ResponsesRequest = call.read(request).await?;
    let streams = asked.stream == Some(true);
    let described = Answer {
        id: format!("resp_{}", fresh_id()),
        created: unix_seconds(),
        model: asked.model.clone(),
        echo: asked.echo(),
    };
    let scores = asked.scores();
    let (conversation, violations) = asked.conversation()?;
    let scored = scores.is_some();
    let mut generation = match start::chat(call, conversation, violations).await {
        // Agents compact their conversation when they find this inside of a stream, and give up at
        // a status.
        Err(failure) if streams && failure.reason() == "CONTEXT_EXCEEDED" => {
            return Ok(reply::failed_stream(
                ResponseEvents::new(described, None),
                &failure,
            ));
        }
        started => started?,
    };
    let model = generation.model().filter(|_| scored).cloned();
    if streams {
        let events = ResponseEvents::new(described, model);
        return reply::stream(generation, events, call).await;
    }
    generation.score_text_only();
    let (parts, ended) = generation.collect().await?;
    let logprobs = match &model {
        Some(model) => logprobs::of_text(model, &ended.scores),
        None => json!([]),
    };
    let last = parts.len();
    let output: Vec<_> = (1..)
        .zip(parts)
        .filter_map(|(nth, part)| item(part, item_status(&ended, nth == last), &logprobs))
        .collect();
    answer(&described.whole(status(&ended), &output, Some(&ended)))
}

/// A part as a whole item.
fn item(part: Part, status: &str, logprobs: &Value) -> Option<Value> {
    Some(match part {
        Part::Text(text) => {
            let text = output_text(&text, logprobs);
            message(&item_id("msg"), status, &[text])
        }
        Part::Reasoning(text) => reasoning(&item_id("rs"), status, &text),
        Part::Call(call) => function_call(&item_id("fc"), &item_id("call"), status, &call),
        // Calls are told whole here.
        Part::Arguments(_) => return None,
    })
}

fn item_id(kind: &str) -> String {
    format!("{kind}_{}", fresh_id())
}

fn message(id: &str, status: &str, content: &[Value]) -> Value {
    json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
}

fn output_text(text: &str, logprobs: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn reasoning(id: &str, status: &str, text: &str) -> Value {
    let content: Vec<_> = match text {
        "" => Vec::new(),
        text => vec![json!({"type": "reasoning_text", "text": text})],
    };
    json!({
        "type": "reasoning",
        "id": id,
        "status": status,
        "summary": [],
        "content": content,
        "encrypted_content": null,
    })
}

fn function_call(id: &str, call_id: &str, status: &str, call: &ToolCall) -> Value {
    json!({
        "type": "function_call",
        "id": id,
        "call_id": call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    })
}

/// How an answer ended, in this route's words.
fn status(ended: &Ended) -> &'static str {
    if ended.is_cut() {
        "incomplete"
    } else {
        "completed"
    }
}

/// How an item ended: only the last one may have been cut.
fn item_status(ended: &Ended, is_last: bool) -> &'static str {
    if is_last && ended.cuts_part {
        "incomplete"
    } else {
        "completed"
    }
}
