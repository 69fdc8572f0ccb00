//! `POST /v1/responses`. The last responses of each client are kept, so that a request may refer to
//! them and their items ([`memory`]), unless `store` is false.
//!
//! The output is a list of items: reasoning (`reasoning`), text (`message`) and calls
//! (`function_call`). A requested summary of the reasoning is the reasoning itself. In a stream
//! each item is opened, filled and closed before the next one opens:
//!
//! ```text
//! response.created response.in_progress
//!   (response.output_item.added [response.content_part.added] ...delta* ...done
//!    [response.content_part.done] response.output_item.done)*
//! response.completed | response.incomplete | response.failed
//! ```

mod events;
pub(in super::super) mod kept;
mod memory;
mod recent;
mod request;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::parts::Part;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{Failure, Reason};
use rocmforge_service::answers::Ended;
use rocmforge_service::peer::Peer;
use serde::Serialize;
use serde_json::Value;

use self::events::{Answer, ResponseEvents, Whole};
pub(in super::super) use self::memory::Memory;
use self::memory::{Input, Kept};
use self::request::ResponsesRequest;
use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::count::{self, Counted};
use super::super::reply;
use super::super::start;
use super::logprobs::OfText;

/// Handler of `POST /v1/responses`.
pub(in super::super) async fn responses(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/responses", &request);
    let result = complete(&call, &http.memory, request).await;
    call.respond(result)
}

/// Handler of `POST /v1/responses/input_tokens`, which counts tokens.
pub(in super::super) async fn count_tokens(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/responses/input_tokens", &request);
    let result = async {
        let counted = Counted::openai(request.uri());
        let mut asked: ResponsesRequest = call.read(request).await?;
        asked.model = call.meant(asked.model).await?;
        asked.refuse_unsupported()?;
        let input = recalled(&call, &http.memory, &mut asked).await?;
        let (conversation, violations) = asked.conversation(input.items)?;
        count::input_tokens(&call, conversation, violations, counted).await
    };
    let result = result.await;
    call.respond(result)
}

/// Maximum bytes of earlier responses that are parsed on the async thread.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// The request's input, with the stored items that it refers to.
async fn recalled(
    call: &Call,
    memory: &Memory,
    asked: &mut ResponsesRequest,
) -> Result<Input, Failure> {
    let peer = call.arrival.peer();
    let input = asked.take_input();
    let recalled = memory.recall(peer, asked.previous()?, input)?;
    match recalled.bytes() {
        0..=INLINE_MAX_BYTES => recalled.read(),
        bytes => {
            call.service
                .text
                .run(peer, bytes, move |_| recalled.read())
                .await
        }
    }
}

async fn complete(
    call: &Call,
    memory: &Arc<Memory>,
    request: Request,
) -> Result<Response, Failure> {
    let mut asked: ResponsesRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    asked.refuse_unsupported()?;
    let streams = asked.stream == Some(true);
    let input = recalled(call, memory, &mut asked).await?;
    let keeping = asked.is_kept().then(|| Keeping {
        memory: Arc::clone(memory),
        peer: call.arrival.peer(),
        previous: asked.previous_id().map(str::to_owned),
        input: Value::from(&input.items[input.earlier..])
            .to_string()
            .into(),
    });
    let described = Answer {
        keeping,
        id: format!("resp_{}", fresh_id()),
        created: unix_seconds(),
        model: asked.model.clone(),
        echo: asked.echo(),
        names: asked.names(),
        summarises: asked.summarises(),
    };
    let scores = asked.scores();
    let (conversation, violations) = asked.conversation(input.items)?;
    let scored = scores.is_some();
    let mut generation = match start::chat(call, conversation, violations).await {
        // Agents compact their conversation when they find this inside of a stream, and give up at
        // a status.
        Err(failure) if streams && failure.reason() == Reason::ContextExceeded => {
            return Ok(reply::failed_stream(
                ResponseEvents::new(described, None),
                &failure,
            ));
        }
        started => started?,
    };
    let model = generation.model().filter(|_| scored).cloned();
    generation.score_text_only();
    generation.bound_scores();
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
    let shown: Vec<_> = output
        .iter()
        .map(|item| item.shown(model.as_deref()))
        .collect();
    let whole = described.whole(status(&ended), &shown, Some(&ended));
    if let Some(keeping) = &described.keeping {
        keeping.keep(&described.id, &whole, &output);
    }
    answer(&whole)
}

/// How a response is stored for `previous_response_id`.
#[derive(Debug)]
struct Keeping {
    memory: Arc<Memory>,
    peer: Peer,
    /// Id of the response that this one continues.
    previous: Option<String>,
    /// The request's own items, a JSON list.
    input: Box<str>,
}

impl Keeping {
    /// Stores a response with these output items.
    fn keep(&self, id: &str, whole: &Whole<'_>, output: &[Item]) {
        let Ok(text) = serde_json::to_string(whole) else {
            return;
        };
        let items = output.iter().filter_map(|item| {
            let item_id = match item {
                Item::Message { id, .. } => id,
                Item::Other(value) => value["id"].as_str()?,
            };
            let text = serde_json::to_string(&item.shown(None)).ok()?;
            Some((item_id.to_owned(), text))
        });
        let kept = Kept {
            previous: self.previous.clone(),
            input: self.input.clone(),
            whole: text.into(),
        };
        self.memory.keep(self.peer, id, kept, items.collect());
    }
}

fn item_id(kind: &str) -> String {
    format!("{kind}_{}", fresh_id())
}

/// An item of a response's output.
#[derive(Debug)]
enum Item {
    Message {
        id: String,
        status: &'static str,
        text: String,
        /// Log-probabilities of the item's tokens, if requested.
        scores: Vec<TokenScore>,
    },
    Other(Value),
}

impl Item {
    /// The item as it is serialized, with log-probabilities if `scored` names the model.
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
    /// The content of the message: one text, or none at its start.
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

/// Log-probabilities of a text; an empty list if they are not wanted.
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

/// The status of a response by how its generation ended.
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
