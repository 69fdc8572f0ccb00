//! Messages with headers. gpt-oss names a channel, and a tool where it calls one:
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
//! header --"<|message|>"--> body --an end--> header
//! ```
//!
//! The templates end in `<|start|>assistant`, so that an answer begins inside of a header.

use super::{Part, partial};
use crate::tool_calls::forms::Headers;
use crate::tool_calls::{ToolCall, Tools, tagged};

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
/// What ends a body; the first of them also begins what follows it.
const ENDS: [&str; 6] = [
    START,
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|eom|>",
    "<|eot|>",
];
/// Longest header, and longest call; what is longer is text.
const HEADER_MAX_BYTES: usize = 4096;
const CALL_MAX_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Header,
    Thinking,
    Saying,
    /// Calls the tool of this name.
    Calling(String),
}

/// Takes text as it comes.
#[derive(Debug)]
pub(super) struct Messages {
    headers: Headers,
    state: State,
    held: String,
    /// Arguments of the call are told as they come; it has begun.
    in_call: bool,
    tools: Tools,
    calls: usize,
}

impl Messages {
    /// Behind a prompt that ends in `tail`.
    pub(super) fn new(headers: Headers, tail: &str, tools: Tools) -> Self {
        // A prompt that goes on with a message has opened its body.
        let begun = tail.rfind(START).map(|at| &tail[at..]);
        let opened = begun.and_then(|begun| begun.split_once(MESSAGE));
        let state = match opened {
            Some((header, body)) if !ENDS.iter().any(|end| body.contains(end)) => {
                state_of(headers, header)
            }
            _ => State::Header,
        };
        Self {
            headers,
            state,
            held: String::new(),
            in_call: false,
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

    /// Whether more arguments may come of the last call.
    pub(super) fn is_calling(&self) -> bool {
        self.in_call
    }

    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        self.held.push_str(text);
        while self.step(into) {}
    }

    pub(super) fn finish(&mut self, is_cut: bool, into: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            // A header without its message says nothing, unless it is none.
            State::Header if held.contains("<|") || "assistant".starts_with(held.trim()) => {}
            State::Header => hand_out(Part::Text, &held, into),
            // The notation of a call that is cut is no text.
            State::Calling(_) if is_cut && self.headers == Headers::Recipients => {
                let mut parts = Vec::new();
                self.end(&held, &mut parts);
                into.extend(
                    parts
                        .into_iter()
                        .filter(|part| matches!(part, Part::Call(_))),
                );
            }
            State::Calling(_) => {
                let begun = ENDS.iter().map(|mark| partial(&held, mark)).max();
                self.end(&held[..held.len() - begun.unwrap_or(0)], into);
            }
            _ => self.end(&held, into),
        }
        self.in_call = false;
    }

    /// One transition; whether there may be another.
    fn step(&mut self, into: &mut Vec<Part>) -> bool {
        if self.state == State::Header {
            if let Some((header, rest)) = self.held.split_once(MESSAGE) {
                self.state = state_of(self.headers, header);
                self.held = rest.to_owned();
                return true;
            }
            // What is longer is no header of these.
            if self.held.len() > HEADER_MAX_BYTES {
                self.state = State::Saying;
                return true;
            }
            return false;
        }
        let end = ENDS
            .iter()
            .filter_map(|mark| Some((self.held.find(mark)?, mark.len())))
            .min();
        if let Some((at, len)) = end {
            let rest = self.held.split_off(at + len);
            let body = std::mem::replace(&mut self.held, rest);
            self.end(&body[..at], into);
            (self.state, self.in_call) = (State::Header, false);
            return true;
        }
        let keep = ENDS.iter().map(|mark| partial(&self.held, mark)).max();
        let ready = self.held.len() - keep.unwrap_or(0);
        let as_part = match self.state {
            State::Thinking => Part::Reasoning,
            State::Saying => Part::Text,
            State::Calling(_) if self.headers == Headers::Channels => {
                self.arguments(ready, into);
                return false;
            }
            State::Calling(_) if self.held.len() > CALL_MAX_BYTES => Part::Text,
            State::Calling(_) | State::Header => return false,
        };
        if matches!(self.state, State::Calling(_)) {
            self.state = State::Saying;
        }
        let rest = self.held.split_off(ready);
        let body = std::mem::replace(&mut self.held, rest);
        hand_out(as_part, &body, into);
        false
    }

    /// Tells the arguments of a call, up to `ready`, as they come. Space around them is none of
    /// theirs.
    fn arguments(&mut self, ready: usize, into: &mut Vec<Part>) {
        let counts = self.calls == 0 || !self.tools.single;
        let State::Calling(name) = &self.state else {
            return;
        };
        if !self.in_call {
            if self.held[..ready].trim().is_empty() || !counts {
                return;
            }
            self.in_call = true;
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
        hand_out(Part::Arguments, &told, into);
    }

    /// The end of a body.
    fn end(&mut self, body: &str, into: &mut Vec<Part>) {
        match &self.state {
            State::Header => {}
            State::Thinking => hand_out(Part::Reasoning, body, into),
            State::Saying => hand_out(Part::Text, body, into),
            State::Calling(_) if self.in_call => {
                hand_out(Part::Arguments, body.trim_end(), into);
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

/// The calls that a message to a tool has; nothing where it has none.
fn called(headers: Headers, name: &str, body: &str, tools: &Tools) -> Option<Vec<ToolCall>> {
    match headers {
        Headers::Channels => {
            let arguments = match body.trim() {
                "" => "{}",
                body => body,
            };
            Some(vec![ToolCall {
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            }])
        }
        Headers::Recipients => tagged::invokes(body, "atem:", &tools.described),
    }
}

/// What a message is, by its header.
fn state_of(headers: Headers, header: &str) -> State {
    let word = |text: &str| {
        let end = text.find(|c: char| c.is_whitespace() || c == '<');
        text[..end.unwrap_or(text.len())].to_owned()
    };
    let (before_name, said_to) = match headers {
        Headers::Channels => ("to=functions.", ""),
        Headers::Recipients => ("to=", "user"),
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
mod tests {
    use serde_json::json;

    use super::super::joined;
    use super::*;
    use crate::tool_calls;

    /// The same whatever the pieces.
    fn split(headers: Headers, tail: &str, text: &str) -> Vec<Part> {
        let parameters = json!({"properties": {"a": {"type": "integer"}}});
        let tools = Tools {
            described: vec![tool_calls::described("f", None, &parameters)],
            ..Tools::default()
        };
        let characters: Vec<char> = text.chars().collect();
        let all: Vec<Vec<Part>> = (1..=characters.len())
            .map(|size| {
                let mut messages = Messages::new(headers, tail, tools.clone());
                let mut parts = Vec::new();
                for piece in characters.chunks(size) {
                    messages.push(&piece.iter().collect::<String>(), &mut parts);
                }
                messages.finish(false, &mut parts);
                joined(parts)
            })
            .collect();
        assert!(all.iter().all(|parts| *parts == all[0]), "{all:?}");
        all[0].clone()
    }

    fn call(name: &str, arguments: &str) -> Part {
        Part::Call(ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        })
    }

    #[test]
    fn channels_are_told_apart() {
        let parts = split(
            Headers::Channels,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm < 5.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        );
        let (hm, yes) = ("Hm < 5.".to_owned(), "Yes.".to_owned());
        assert_eq!(parts, [Part::Reasoning(hm.clone()), Part::Text(yes)]);
        let cut = split(
            Headers::Channels,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm < 5.",
        );
        assert_eq!(cut, [Part::Reasoning(hm)]);
        let open = "<|start|>assistant<|channel|>final<|message|>Once";
        assert_eq!(
            split(Headers::Channels, open, " upon"),
            [Part::Text(" upon".to_owned())]
        );
        assert!(split(Headers::Channels, "<|start|>assistant", "<|channel|>ana").is_empty());
    }

    #[test]
    fn a_call_that_is_cut_has_what_came_of_it() {
        let cut = |headers: Headers, text: &str| {
            let mut messages = Messages::new(headers, "<|start|>assistant", Tools::default());
            let mut parts = Vec::new();
            messages.push(text, &mut parts);
            messages.finish(true, &mut parts);
            joined(parts)
        };
        let begun = " to=functions.f<|channel|>commentary<|message|>{\"a\": 1";
        let expected = [call("f", "{\"a\": 1")];
        assert_eq!(cut(Headers::Channels, begun), expected);
        assert_eq!(cut(Headers::Channels, &format!("{begun}<|ca")), expected);
        let begun = " to=f<|message|><atem:function_calls>\n<atem:inv";
        assert!(cut(Headers::Recipients, begun).is_empty());
    }

    #[test]
    fn calls_have_their_names_from_the_header() {
        let parts = split(
            Headers::Channels,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
             <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        );
        let thought = Part::Reasoning("I look.".to_owned());
        assert_eq!(parts, [thought, call("f", "{\"a\": 1}")]);
        let before = "<|start|>assistant to=functions.g<|channel|>commentary<|message|>";
        assert_eq!(split(Headers::Channels, "", before), [call("g", "{}")]);
        let preamble = split(
            Headers::Channels,
            "",
            "<|channel|>commentary<|message|>I will look.<|end|>",
        );
        assert_eq!(preamble, [Part::Text("I will look.".to_owned())]);
    }

    #[test]
    fn recipients_are_told_apart() {
        let recipients = |tail: &str, text: &str| split(Headers::Recipients, tail, text);
        let start = "<|start|>assistant";
        let (hm, yes) = ("Hm < 5.".to_owned(), "Yes.".to_owned());
        let thought = " to=self<|message|>Hm < 5.<|eom|><|start|>assistant";
        let parts = recipients(start, &format!("{thought} to=user<|message|>Yes.<|eot|>"));
        assert_eq!(
            parts,
            [Part::Reasoning(hm.clone()), Part::Text(yes.clone())]
        );
        assert_eq!(
            recipients(start, "<|message|>Yes."),
            [Part::Text(yes.clone())]
        );
        let open = "<|start|>user<|message|>a<|eot|><|start|>assistant to=user<|message|>Once";
        assert_eq!(recipients(open, "Yes."), [Part::Text(yes)]);
        let calls = "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"a\">1</atem:parameter>\n\
                     </atem:invoke>\n</atem:function_calls>";
        let two =
            format!("{thought} to=f<|message|>{calls}<|eom|>{start} to=f<|message|>{calls}<|eot|>");
        let called = call("f", "{\"a\":1}");
        assert_eq!(
            recipients(start, &two),
            [Part::Reasoning(hm), called.clone(), called]
        );
        // What is no call is what it says.
        let none = recipients(start, " to=f<|message|>a = 1<|eot|>");
        assert_eq!(none, [Part::Text("a = 1".to_owned())]);
    }
}
