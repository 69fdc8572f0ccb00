//! `POST /v1/responses`, without a memory of earlier ones: every request brings its whole
//! conversation.
//!
//! The answer is a list of items: what the model thinks (`reasoning`), says (`message`) and calls
//! (`function_call`). Where a summary of the thinking is asked for, it is the thinking itself. In a
//! stream each item is opened, filled and closed before the next one opens:
//!
//! ```text
//! response.created response.in_progress
//!   (response.output_item.added [response.content_part.added] ...delta* ...done
//!    response.output_item.done)*
//! response.completed | response.incomplete | response.failed
//! ```

mod events;
mod request;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_service::failure::Failure;
use serde::Serialize;
use serde_json::{Value, json};

use self::events::{Answer, ResponseEvents};
use self::request::ResponsesRequest;
use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::reply;
use super::super::start;
use super::logprobs::OfText;
use rocmforge_service::answers::Ended;

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
        names: asked.names(),
        summarises: asked.summarises(),
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
        generation.tell_pieces();
        let events = ResponseEvents::new(described, model);
        return reply::stream(generation, events, call).await;
    }
    generation.score_text_only();
    let (parts, ended) = generation.collect().await?;
    let logprobs = model.as_ref().map(|model| OfText {
        model,
        scores: &ended.scores,
    });
    let last = parts.len();
    let output = (1..).zip(parts).filter_map(|(nth, part)| {
        let status = item_status(&ended, nth == last);
        described.item(part, status, logprobs)
    });
    let mut rest = described.whole(status(&ended), &[], Some(&ended));
    if let Value::Object(rest) = &mut rest {
        rest.remove("output");
    }
    answer(&Whole {
        output: output.collect(),
        rest,
    })
}

/// A whole response.
#[derive(Serialize)]
struct Whole<'a> {
    output: Vec<Item<'a>>,
    #[serde(flatten)]
    rest: Value,
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

/// An item of a whole response.
#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Message(Message<'a>),
    Other(Value),
}

#[derive(Serialize)]
struct Message<'a> {
    r#type: &'static str,
    id: String,
    status: &'a str,
    role: &'static str,
    content: [OutputText<'a>; 1],
}

#[derive(Serialize)]
struct OutputText<'a> {
    r#type: &'static str,
    text: String,
    annotations: [(); 0],
    logprobs: Logprobs<'a>,
}

/// What is not wanted is an empty list.
#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs<'a> {
    Of(OfText<'a>),
    None([(); 0]),
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
