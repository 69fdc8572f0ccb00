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
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_service::failure::Failure;
use rocmforge_service::parts::Part;
use serde::Serialize;
use serde_json::Value;

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
    generation.score_text_only();
    if streams {
        generation.tell_pieces();
        let events = ResponseEvents::new(described, model);
        return reply::stream(generation, events, call).await;
    }
    let (parts, mut ended) = generation.collect().await?;
    let mut scores = std::mem::take(&mut ended.text_scores).into_iter();
    let last = parts.len();
    let output: Vec<Item> = (1..)
        .zip(parts)
        .filter_map(|(nth, part)| {
            let scores = match &part {
                Part::Text(_) => scores.next(),
                _ => None,
            };
            let status = item_status(&ended, nth == last);
            described.item(part, status, scores.unwrap_or_default())
        })
        .collect();
    let output: Vec<_> = output
        .iter()
        .map(|item| item.shown(model.as_deref()))
        .collect();
    answer(&described.whole(status(&ended), &output, Some(&ended)))
}

fn item_id(kind: &str) -> String {
    format!("{kind}_{}", fresh_id())
}

/// An item of the output.
#[derive(Debug)]
enum Item {
    Message {
        id: String,
        status: &'static str,
        text: String,
        /// Of its tokens, where they are wanted.
        scores: Vec<TokenScore>,
    },
    Other(Value),
}

impl Item {
    /// As it is told, with log-probabilities by a model where they are wanted.
    fn shown<'a>(&'a self, scored: Option<&'a LoadedModel>) -> Shown<'a> {
        match self {
            Self::Message {
                id,
                status,
                text,
                scores,
            } => Shown::Message(message(
                id,
                status,
                vec![OutputText::of(text, scored, scores)],
            )),
            Self::Other(value) => Shown::Other(value),
        }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Shown<'a> {
    Message(Message<'a>),
    Other(&'a Value),
}

#[derive(Serialize)]
struct Message<'a> {
    r#type: &'static str,
    id: &'a str,
    status: &'a str,
    role: &'static str,
    /// One, or none where it begins.
    content: Vec<OutputText<'a>>,
}

fn message<'a>(id: &'a str, status: &'a str, content: Vec<OutputText<'a>>) -> Message<'a> {
    Message {
        r#type: "message",
        id,
        status,
        role: "assistant",
        content,
    }
}

#[derive(Serialize)]
struct OutputText<'a> {
    r#type: &'static str,
    text: &'a str,
    annotations: [(); 0],
    logprobs: Logprobs<'a>,
}

impl<'a> OutputText<'a> {
    fn of(text: &'a str, scored: Option<&'a LoadedModel>, scores: &'a [TokenScore]) -> Self {
        Self {
            r#type: "output_text",
            text,
            annotations: [],
            logprobs: Logprobs::of(scored, scores),
        }
    }
}

/// What is not wanted is an empty list.
#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum Logprobs<'a> {
    Of(OfText<'a>),
    None([(); 0]),
}

impl<'a> Logprobs<'a> {
    fn of(scored: Option<&'a LoadedModel>, scores: &'a [TokenScore]) -> Self {
        match scored {
            Some(model) => Self::Of(OfText { model, scores }),
            None => Self::None([]),
        }
    }
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
