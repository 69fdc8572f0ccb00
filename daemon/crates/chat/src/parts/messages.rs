//! Parses output as messages with headers. gpt-oss names a channel, and the tool in a call:
//!
//! ```text
//! <|channel|>analysis<|message|>...<|end|>                             what it thinks
//! <|start|>assistant<|channel|>final<|message|>...                     what it says
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
//! ```
//!
//! Muse Glimmer names who a message is to:
//!
//! ```text
//!  to=self<|message|>...<|eom|>                                        what it thinks
//! <|start|>assistant to=user<|message|>...<|eot|>                      what it says
//! <|start|>assistant to=f<|message|><atem:function_calls>...<|eot|>    what it calls
//!
//! header --"<|message|>"--> body --an end, and a header--> body
//! ```
//!
//! The templates end in `<|start|>assistant`, so that an output begins inside of a header. A mark
//! that ends a body counts if a header or nothing follows it; else it is text, as are outputs
//! without a header ([`headers`]).

use super::{CALL_MAX_BYTES, Part};
use crate::tool_calls::forms::Headers;
use crate::tool_calls::headers::{self, CHANNEL, ENDS, Fit, START, TO, fit};
use crate::tool_calls::texts::{self, Texts, partial};
use crate::tool_calls::{ToolCall, Tools, is_object, tagged};

/// Prefix of the tags in Muse Glimmer's calls.
const INVOKES: &str = "atem:";

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Header,
    Thinking,
    Saying,
    /// Inside of a message that calls the tool with this name.
    Calling(String),
}

/// Parser of an output of messages with headers.
#[derive(Debug)]
pub(super) struct Messages {
    headers: Headers,
    state: State,
    /// The part of a header with which the prompt ends.
    opened: String,
    held: String,
    /// Number of bytes of `held` that contain no mark that counts.
    seen: usize,
    /// Whether a call has begun whose arguments are streamed.
    in_call: bool,
    /// State of strings in the call's arguments, for escapes.
    texts: Texts,
    tools: Tools,
    calls: usize,
}

impl Messages {
    /// A parser for the output after a prompt that ends in `tail`.
    pub(super) fn new(headers: Headers, tail: &str, tools: Tools) -> Self {
        // A prompt that goes on with a message has opened its body.
        let begun = headers::last_of(tail).unwrap_or_default();
        let (state, opened) = match fit(begun) {
            Fit::Whole(n) if !ENDS.iter().any(|end| begun[n..].trim_end().ends_with(end)) => {
                (state_of(headers, &begun[..n]), "")
            }
            Fit::Whole(_) | Fit::No => (State::Header, ""),
            Fit::Begins => (State::Header, begun),
        };
        Self {
            headers,
            state,
            opened: opened.to_owned(),
            held: String::new(),
            seen: 0,
            in_call: false,
            texts: Texts::default(),
            tools,
            calls: 0,
        }
    }

    pub(super) fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the last call still expects arguments.
    pub(super) fn is_calling(&self) -> bool {
        self.in_call
    }

    /// Whether received text may still become a text part.
    pub(super) fn holds_text(&self) -> bool {
        match self.state {
            State::Thinking => false,
            State::Calling(_) if self.in_call => false,
            State::Header | State::Saying | State::Calling(_) => !self.held.is_empty(),
        }
    }

    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        self.held.push_str(text);
        while self.step(into) {}
    }

    pub(super) fn finish(&mut self, is_cut: bool, into: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        if self.state == State::Header {
            // A header without its message says nothing.
            let begun = held.trim_start();
            let is_role = self.opened.is_empty() && "assistant".starts_with(begun);
            if !(begun.starts_with("<|") || begun.starts_with(TO) || is_role) {
                hand_out(Part::Text, &held, into);
            }
            return;
        }
        let end = self.end_of(&held).map_or(held.len(), |(at, _)| at);
        let mut body = &held[..end];
        let calls = matches!(self.state, State::Calling(_));
        if calls {
            let begun = ENDS.iter().map(|mark| partial(body, mark)).max();
            body = &body[..body.len() - begun.unwrap_or(0)];
        }
        if calls && is_cut && !self.in_call {
            // The notation of a call that is cut is no text, and one that has not come to its
            // arguments is no call without any.
            if self.headers == Headers::Recipients {
                body = tagged::coming::whole_invokes(body, INVOKES, &self.tools.described);
            }
            if body.trim().is_empty() {
                return;
            }
        }
        self.end(body, into);
        self.in_call = false;
    }

    /// The first mark that may end the body, with its offset.
    fn end_of(&self, held: &str) -> Option<(usize, &'static str)> {
        let from = self.seen;
        ENDS.into_iter()
            .filter_map(|mark| Some((from + held[from..].find(mark)?, mark)))
            .min()
    }

    /// Performs one state transition. Returns whether another may follow.
    fn step(&mut self, into: &mut Vec<Part>) -> bool {
        if self.state == State::Header {
            let text = format!("{}{}", self.opened, self.held);
            match fit(&text) {
                Fit::Begins => return false,
                Fit::Whole(n) => {
                    self.state = state_of(self.headers, &text[..n]);
                    self.held = text[n..].to_owned();
                }
                Fit::No => self.state = State::Saying,
            }
            self.opened.clear();
            return true;
        }
        let Some((at, mark)) = self.end_of(&self.held) else {
            let keep = ENDS.iter().map(|mark| partial(&self.held, mark)).max();
            self.seen = self.held.len() - keep.unwrap_or(0);
            self.say(into);
            return false;
        };
        let header = if mark == START { at } else { at + mark.len() };
        match fit(&self.held[header..]) {
            Fit::Whole(n) => {
                let rest = self.held.split_off(header + n);
                let body = std::mem::replace(&mut self.held, rest);
                self.end(&body[..at], into);
                self.state = state_of(self.headers, &body[header..]);
                (self.seen, self.in_call) = (0, false);
                true
            }
            Fit::Begins => {
                self.seen = at;
                self.say(into);
                false
            }
            Fit::No => {
                self.seen = at + mark.len();
                self.say(into);
                true
            }
        }
    }

    /// Outputs the received part of a body, unless it is a call that is given whole.
    fn say(&mut self, into: &mut Vec<Part>) {
        let part = match self.state {
            State::Thinking => Part::Reasoning,
            State::Saying => Part::Text,
            State::Calling(_)
                if self.headers == Headers::Channels
                    && (self.in_call || self.seen <= CALL_MAX_BYTES) =>
            {
                let held = self.held.len();
                self.arguments(self.seen, into);
                self.seen -= held - self.held.len();
                return;
            }
            State::Calling(_) if self.seen > CALL_MAX_BYTES => {
                self.state = State::Saying;
                Part::Text
            }
            State::Calling(_) | State::Header => return,
        };
        let rest = self.held.split_off(self.seen);
        let body = std::mem::replace(&mut self.held, rest);
        self.seen = 0;
        hand_out(part, &body, into);
    }

    /// Streams the arguments of a call, up to the offset `ready`, without surrounding white space.
    fn arguments(&mut self, ready: usize, into: &mut Vec<Part>) {
        let counts = self.calls == 0 || !self.tools.single;
        let State::Calling(name) = &self.state else {
            return;
        };
        if !self.in_call {
            // What is no object is no call's.
            if !self.held[..ready].trim_start().starts_with('{') || !counts {
                return;
            }
            self.in_call = true;
            self.texts = Texts::default();
            self.calls += 1;
            into.push(Part::Call(ToolCall {
                name: name.clone(),
                arguments: String::new(),
            }));
            let space = self.held.len() - self.held.trim_start().len();
            self.held.drain(..space);
            return self.arguments(ready - space, into);
        }
        let ready = self.held[..ready].trim_end().len();
        let rest = self.held.split_off(ready);
        let told = std::mem::replace(&mut self.held, rest);
        hand_out(Part::Arguments, &self.texts.escape(&told), into);
    }

    /// Handles the end of a body.
    fn end(&mut self, body: &str, into: &mut Vec<Part>) {
        match &self.state {
            State::Header => {}
            State::Thinking => hand_out(Part::Reasoning, body, into),
            State::Saying => hand_out(Part::Text, body, into),
            State::Calling(_) if self.in_call => {
                let rest = self.texts.escape(body.trim_end());
                hand_out(Part::Arguments, &rest, into);
            }
            State::Calling(name) => match called(self.headers, name, body, &self.tools) {
                Some(calls) => {
                    for call in calls {
                        if self.calls == 0 || !self.tools.single {
                            self.calls += 1;
                            into.push(Part::Call(call));
                        }
                    }
                }
                None => hand_out(Part::Text, body, into),
            },
        }
    }
}

/// The calls in a message to a tool; `None` if it has none.
fn called(headers: Headers, name: &str, body: &str, tools: &Tools) -> Option<Vec<ToolCall>> {
    match headers {
        Headers::Channels => {
            let arguments = match body.trim() {
                "" => "{}".into(),
                body => texts::escaped(body),
            };
            is_object(&arguments).then(|| {
                vec![ToolCall {
                    name: name.to_owned(),
                    arguments: arguments.into_owned(),
                }]
            })
        }
        Headers::Recipients => tagged::invokes(body, INVOKES, &tools.described),
    }
}

/// The kind of a message, by its header.
fn state_of(headers: Headers, header: &str) -> State {
    let word = |text: &str| {
        let end = text.find(|c: char| c.is_whitespace() || c == '<');
        text[..end.unwrap_or(text.len())].to_owned()
    };
    let (before_name, said_to) = match headers {
        Headers::Channels => ("to=functions.", ""),
        Headers::Recipients => (TO, "user"),
    };
    match header.split_once(before_name).map(|(_, rest)| word(rest)) {
        Some(name) if name == said_to => return State::Saying,
        Some(name) if name == "self" && headers == Headers::Recipients => return State::Thinking,
        Some(name) => return State::Calling(name),
        None => {}
    }
    let channel = header.rsplit_once(CHANNEL).map_or("", |(_, rest)| rest);
    match channel.split_whitespace().next() {
        Some(word) if word.starts_with("analysis") => State::Thinking,
        _ => State::Saying,
    }
}

fn hand_out(part: fn(String) -> Part, text: &str, into: &mut Vec<Part>) {
    if !text.is_empty() {
        into.push(part(text.to_owned()));
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
