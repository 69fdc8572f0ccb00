//! Writes the events of a response's stream, and the final response.

use std::sync::Arc;

use rocmforge_chat::parts::Part;
use rocmforge_chat::tool_calls::{ToolCall, is_object};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::Failure;
use rocmforge_service::answers::Ended;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::super::error::Dialect;
use super::super::super::reply::{Events, SSE, SSE_HEARTBEAT};
use super::super::super::sse;
use super::tools::{self, Names};
use super::{Item, Keeping, Logprobs, OutputText, Shown, item_id, item_status, message, status};

/// Fields of a response besides its output.
#[derive(Debug)]
pub(super) struct Answer {
    /// How the response is stored, if it is.
    pub(super) keeping: Option<Keeping>,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    /// Fields of the request that the response repeats.
    pub(super) echo: Value,
    /// Names of tools in the response.
    pub(super) names: Names,
    /// Whether reasoning is returned as a summary, too.
    pub(super) summarises: bool,
}

/// A whole response, as it is serialized.
#[derive(Serialize)]
pub(super) struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'a str,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    model: &'a str,
    output: &'a [Shown<'a>],
    usage: Option<Value>,
    #[serde(flatten)]
    echo: &'a Value,
}

impl Answer {
    /// The whole response with these output items.
    pub(super) fn whole<'a>(
        &'a self,
        status: &'a str,
        output: &'a [Shown<'a>],
        ended: Option<&Ended>,
    ) -> Whole<'a> {
        let is_cut = status == "incomplete";
        Whole {
            id: &self.id,
            object: "response",
            created_at: self.created,
            status,
            error: None,
            incomplete_details: is_cut.then(|| json!({"reason": "max_output_tokens"})),
            model: &self.model,
            output,
            usage: ended.map(usage),
            echo: &self.echo,
        }
    }

    /// Converts a part to a complete output item.
    pub(super) fn item(
        &self,
        part: Part,
        status: &'static str,
        scores: Vec<TokenScore>,
    ) -> Option<Item> {
        Some(match part {
            Part::Text(text) => Item::Message {
                id: item_id("msg"),
                status,
                text,
                scores,
            },
            Part::Reasoning(text) => Item::Other(self.reasoning(&item_id("rs"), status, &text)),
            Part::Call(call) => Item::Other(self.function_call(status, &call)),
            // Calls of a whole answer are whole.
            Part::Arguments(_) => return None,
        })
    }

    fn reasoning(&self, id: &str, status: &str, text: &str) -> Value {
        let list = |kind: &str, wanted: bool| match wanted && !text.is_empty() {
            true => json!([{"type": kind, "text": text}]),
            false => json!([]),
        };
        json!({
            "type": "reasoning",
            "id": id,
            "status": status,
            "summary": list("summary_text", self.summarises),
            "content": list("reasoning_text", true),
            "encrypted_content": null,
        })
    }

    fn function_call(&self, status: &str, call: &ToolCall) -> Value {
        let status = call_status(status, &call.arguments);
        if self.names.is_custom(&call.name) {
            return json!({
                "type": "custom_tool_call",
                "id": item_id("ctc"),
                "call_id": item_id("call"),
                "name": call.name,
                "input": tools::custom_input(&call.arguments),
                "status": status,
            });
        }
        let mut item = json!({
            "type": "function_call",
            "id": item_id("fc"),
            "call_id": item_id("call"),
            "arguments": call.arguments,
            "status": status,
        });
        self.names.put(&call.name, &mut item);
        item
    }
}

/// Status of a call's item: `status` unless its arguments are no JSON object, which makes it
/// incomplete.
fn call_status<'s>(status: &'s str, arguments: &str) -> &'s str {
    match status == "completed" && !is_object(arguments) {
        true => "incomplete",
        false => status,
    }
}

fn usage(ended: &Ended) -> Value {
    json!({
        "input_tokens": ended.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ended.reused_tokens},
        "output_tokens": ended.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": ended.all.reasoning_tokens},
        "total_tokens": ended.prompt_tokens + ended.generated_tokens,
    })
}

/// The item that is currently streamed.
#[derive(Debug)]
enum Open {
    Message {
        id: String,
        text: String,
        scores: Vec<TokenScore>,
    },
    Reasoning {
        id: String,
        text: String,
    },
    Call {
        item: Value,
        arguments: String,
    },
}

/// A stream event, as it is serialized.
#[derive(Serialize)]
struct Event<'a, D> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    data: D,
}

/// Appends an event with the next sequence number.
fn write(sequence: &mut u64, name: &str, data: impl Serialize, out: &mut String) {
    let event = Event {
        r#type: name,
        sequence_number: *sequence,
        data,
    };
    *sequence += 1;
    sse::event(Some(name), &event, out);
}

/// Event data about an item.
#[derive(Serialize)]
struct AboutItem<'a> {
    output_index: usize,
    item: Shown<'a>,
}

/// Event data about an item's text.
#[derive(Serialize)]
struct AboutText<'a, M> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
    #[serde(flatten)]
    more: M,
}

#[derive(Serialize)]
struct Delta<'a> {
    delta: &'a str,
    logprobs: Logprobs<'a>,
}

#[derive(Serialize)]
struct TextDone<'a> {
    text: &'a str,
    logprobs: Logprobs<'a>,
}

#[derive(Serialize)]
struct PartOf<'a> {
    part: OutputText<'a>,
}

#[derive(Serialize)]
struct ResponseOf<'a> {
    response: Whole<'a>,
}

/// Whether an item is a call of a custom tool, which takes text.
fn is_custom(item: &Value) -> bool {
    item["type"] == "custom_tool_call"
}

/// The single part of a reasoning item.
fn reasoning_part(text: &str) -> Value {
    json!({"part": {"type": "reasoning_text", "text": text}})
}

/// Writer of the events of a response.
#[derive(Debug)]
pub(super) struct ResponseEvents {
    answer: Answer,
    open: Option<Open>,
    /// Items that are complete.
    output: Vec<Item>,
    sequence: u64,
    /// The model, if log-probabilities are wanted.
    scored: Option<Arc<LoadedModel>>,
    /// Log-probabilities of tokens whose text comes next.
    scores: Vec<TokenScore>,
}

impl ResponseEvents {
    pub(super) fn new(answer: Answer, scored: Option<Arc<LoadedModel>>) -> Self {
        Self {
            scored,
            scores: Vec::new(),
            answer,
            open: None,
            output: Vec::new(),
            sequence: 0,
        }
    }

    fn send(&mut self, name: &str, data: impl Serialize, out: &mut String) {
        write(&mut self.sequence, name, data, out);
    }

    /// Writes an event that contains the whole response so far.
    fn send_response(
        &mut self,
        name: &str,
        status: &str,
        ended: Option<&Ended>,
        error: Option<Value>,
        out: &mut String,
    ) {
        let output: Vec<_> = self
            .output
            .iter()
            .map(|item| item.shown(self.scored.as_deref()))
            .collect();
        let response = self.answer.whole(status, &output, ended);
        // Known before its client knows of it.
        if let Some(keeping) = self.answer.keeping.as_ref().filter(|_| ended.is_some()) {
            keeping.keep(&self.answer.id, &response, &self.output);
        }
        let response = Whole { error, ..response };
        write(&mut self.sequence, name, ResponseOf { response }, out);
    }

    /// Index of the item that is open, or of the next one.
    fn index(&self) -> usize {
        self.output.len()
    }

    fn item_added(&mut self, item: Shown<'_>, out: &mut String) {
        let about = AboutItem {
            output_index: self.index(),
            item,
        };
        self.send("response.output_item.added", about, out);
    }

    fn item_done(&mut self, item: Item, out: &mut String) {
        let scored = self.scored.clone();
        let about = AboutItem {
            output_index: self.index(),
            item: item.shown(scored.as_deref()),
        };
        self.send("response.output_item.done", about, out);
        self.output.push(item);
    }

    /// Writes an event about the text of the open item.
    fn about_text(&mut self, name: &str, id: &str, more: impl Serialize, out: &mut String) {
        let about = AboutText {
            item_id: id,
            output_index: self.index(),
            content_index: 0,
            more,
        };
        self.send(name, about, out);
    }

    fn close(&mut self, status: &'static str, out: &mut String) {
        match self.open.take() {
            None => {}
            Some(Open::Message { id, text, scores }) => {
                let scored = self.scored.clone();
                let part = || OutputText::of(&text, scored.as_deref(), &scores);
                let done = TextDone {
                    text: &text,
                    logprobs: part().logprobs,
                };
                self.about_text("response.output_text.done", &id, done, out);
                let done = PartOf { part: part() };
                self.about_text("response.content_part.done", &id, done, out);
                let item = Item::Message {
                    id,
                    status,
                    text,
                    scores,
                };
                self.item_done(item, out);
            }
            Some(Open::Reasoning { id, text }) => {
                let done = json!({"text": text});
                self.about_text("response.reasoning_text.done", &id, done, out);
                let done = reasoning_part(&text);
                self.about_text("response.content_part.done", &id, done, out);
                if self.answer.summarises {
                    let done = json!({"text": text});
                    self.about_summary("response.reasoning_summary_text.done", &id, done, out);
                    let done = json!({"part": {"type": "summary_text", "text": text}});
                    self.about_summary("response.reasoning_summary_part.done", &id, done, out);
                }
                let item = self.answer.reasoning(&id, status, &text);
                self.item_done(Item::Other(item), out);
            }
            Some(Open::Call {
                mut item,
                arguments,
            }) if is_custom(&item) => {
                // It comes inside of JSON, and is known when that is whole.
                let input = tools::custom_input(&arguments);
                let about = |key: &str| json!({"item_id": item["id"], "output_index": self.index(), key: input});
                let (delta, done) = (about("delta"), about("input"));
                self.send("response.custom_tool_call_input.delta", delta, out);
                self.send("response.custom_tool_call_input.done", done, out);
                item["status"] = call_status(status, &arguments).into();
                item["input"] = input.into();
                self.item_done(Item::Other(item), out);
            }
            Some(Open::Call {
                mut item,
                arguments,
            }) => {
                let done = json!({
                    "item_id": item["id"], "output_index": self.index(), "name": item["name"],
                    "arguments": arguments,
                });
                self.send("response.function_call_arguments.done", done, out);
                item["status"] = call_status(status, &arguments).into();
                item["arguments"] = arguments.into();
                self.item_done(Item::Other(item), out);
            }
        }
    }

    /// Writes an event about the summary of the open reasoning item.
    fn about_summary(&mut self, name: &str, id: &str, more: Value, out: &mut String) {
        let mut data = json!({"item_id": id, "output_index": self.index(), "summary_index": 0});
        if let (Value::Object(data), Value::Object(more)) = (&mut data, more) {
            data.extend(more);
        }
        self.send(name, data, out);
    }

    fn text(&mut self, delta: &str, out: &mut String) {
        if !matches!(self.open, Some(Open::Message { .. })) {
            self.close("completed", out);
            let id = item_id("msg");
            let added = message(&id, "in_progress", Vec::new());
            self.item_added(Shown::Message(added), out);
            let part = OutputText::of("", None, &[]);
            self.about_text("response.content_part.added", &id, PartOf { part }, out);
            self.open = Some(Open::Message {
                id,
                text: String::new(),
                scores: Vec::new(),
            });
        }
        let scored = self.scored.clone();
        if let Some(Open::Message {
            id,
            mut text,
            mut scores,
        }) = self.open.take()
        {
            let before = scores.len();
            text.push_str(delta);
            scores.append(&mut self.scores);
            let logprobs = Logprobs::of(scored.as_deref(), &scores[before..]);
            let more = Delta { delta, logprobs };
            self.about_text("response.output_text.delta", &id, more, out);
            self.open = Some(Open::Message { id, text, scores });
        }
    }

    fn thought(&mut self, delta: &str, out: &mut String) {
        if !matches!(self.open, Some(Open::Reasoning { .. })) {
            self.close("completed", out);
            let id = item_id("rs");
            let item = self.answer.reasoning(&id, "in_progress", "");
            self.item_added(Shown::Other(&item), out);
            if self.answer.summarises {
                let part = json!({"part": {"type": "summary_text", "text": ""}});
                self.about_summary("response.reasoning_summary_part.added", &id, part, out);
            }
            // Clients add deltas to a part that they know.
            let part = reasoning_part("");
            self.about_text("response.content_part.added", &id, part, out);
            self.open = Some(Open::Reasoning {
                id,
                text: String::new(),
            });
        }
        if let Some(Open::Reasoning { id, text }) = &mut self.open {
            text.push_str(delta);
            let id = id.clone();
            self.about_text(
                "response.reasoning_text.delta",
                &id,
                json!({"delta": delta}),
                out,
            );
            if self.answer.summarises {
                let delta = json!({"delta": delta});
                self.about_summary("response.reasoning_summary_text.delta", &id, delta, out);
            }
        }
    }

    fn arguments(&mut self, delta: &str, out: &mut String) {
        let index = self.index();
        if let Some(Open::Call { item, arguments }) = &mut self.open
            && !delta.is_empty()
        {
            arguments.push_str(delta);
            if is_custom(item) {
                return;
            }
            let data = json!({"item_id": item["id"], "output_index": index, "delta": delta});
            self.send("response.function_call_arguments.delta", data, out);
        }
    }
}

impl Events for ResponseEvents {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            self.send_response(name, "in_progress", None, None, out);
        }
    }

    fn scores(&mut self, scores: Vec<TokenScore>) {
        self.scores.extend(scores);
    }

    fn unsaid(&mut self) {
        self.scores.clear();
    }

    fn part(&mut self, part: Part, out: &mut String) {
        if !matches!(part, Part::Text(_)) {
            self.scores.clear();
        }
        match part {
            Part::Text(text) => self.text(&text, out),
            Part::Reasoning(text) => self.thought(&text, out),
            Part::Call(call) => {
                self.close("completed", out);
                let begun = ToolCall {
                    name: call.name,
                    arguments: String::new(),
                };
                let item = self.answer.function_call("in_progress", &begun);
                self.item_added(Shown::Other(&item), out);
                let arguments = String::new();
                self.open = Some(Open::Call { item, arguments });
                self.arguments(&call.arguments, out);
            }
            Part::Arguments(more) => self.arguments(&more, out),
        }
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        self.close(item_status(ended, true), out);
        let status = status(ended);
        self.send_response(
            &format!("response.{status}"),
            status,
            Some(ended),
            None,
            out,
        );
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        let error = Dialect::OpenAi.body(failure, "");
        let error = json!({
            "code": error["error"]["code"], "message": error["error"]["message"],
        });
        self.send_response("response.failed", "failed", None, Some(error), out);
    }
}
