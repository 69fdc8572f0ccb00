//! gpt-oss's messages: each has a channel, and may have a recipient.
//!
//! ```text
//! <|channel|>analysis<|message|>...<|end|>                             what it thinks
//! <|start|>assistant<|channel|>final<|message|>...                     what it says
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
//!
//! header --"<|message|>"--> body --"<|end|>", "<|call|>", "<|return|>"--> header
//! ```
//!
//! The template ends in `<|start|>assistant`, so that an answer begins inside of a header.

use super::{Part, partial};
use crate::tool_calls::ToolCall;

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
/// What ends a body; the first of them also begins what follows it.
const ENDS: [&str; 4] = [START, "<|end|>", "<|call|>", "<|return|>"];
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
pub(super) struct Harmony {
    state: State,
    held: String,
    single: bool,
    calls: usize,
}

impl Harmony {
    /// Behind a prompt that ends in `tail`.
    pub(super) fn new(tail: &str, single: bool) -> Self {
        // A prompt that goes on with a message has opened its body.
        let state = match (tail.rfind(MESSAGE), tail.rfind(CHANNEL)) {
            (Some(message), Some(channel)) if message > channel && !tail.ends_with("<|end|>") => {
                let header = &tail[channel..message];
                match tail[message..].contains(START) {
                    true => State::Header,
                    false => state_of(header),
                }
            }
            _ => State::Header,
        };
        Self {
            state,
            held: String::new(),
            single,
            calls: 0,
        }
    }

    pub(super) fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        self.held.push_str(text);
        while self.step(into) {}
    }

    pub(super) fn finish(&mut self, into: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            // A header without its message says nothing, unless it is none.
            State::Header if held.contains("<|") || "assistant".starts_with(held.trim()) => {}
            State::Header => hand_out(Part::Text, &held, into),
            _ => self.end(&held, into),
        }
    }

    /// One transition; whether there may be another.
    fn step(&mut self, into: &mut Vec<Part>) -> bool {
        if self.state == State::Header {
            if let Some((header, rest)) = self.held.split_once(MESSAGE) {
                self.state = state_of(header);
                self.held = rest.to_owned();
                return true;
            }
            // What has no channel is no header of these.
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
            self.state = State::Header;
            return true;
        }
        let keep = ENDS.iter().map(|mark| partial(&self.held, mark)).max();
        let ready = self.held.len() - keep.unwrap_or(0);
        let as_part = match self.state {
            State::Thinking => Part::Reasoning,
            State::Saying => Part::Text,
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

    /// The end of a body.
    fn end(&mut self, body: &str, into: &mut Vec<Part>) {
        match &self.state {
            State::Header => {}
            State::Thinking => hand_out(Part::Reasoning, body, into),
            State::Saying => hand_out(Part::Text, body, into),
            State::Calling(name) => {
                if self.calls == 0 || !self.single {
                    self.calls += 1;
                    let arguments = match body.trim() {
                        "" => "{}",
                        body => body,
                    };
                    into.push(Part::Call(ToolCall {
                        name: name.clone(),
                        arguments: arguments.to_owned(),
                    }));
                }
            }
        }
    }
}

/// What a message is, by its header.
fn state_of(header: &str) -> State {
    let recipient = header.split_once("to=functions.").map(|(_, rest)| rest);
    if let Some(rest) = recipient {
        let end = rest.find(|c: char| c.is_whitespace() || c == '<');
        let name = &rest[..end.unwrap_or(rest.len())];
        return State::Calling(name.to_owned());
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
    use super::super::joined;
    use super::*;

    /// The same whatever the pieces.
    fn split(tail: &str, text: &str) -> Vec<Part> {
        let characters: Vec<char> = text.chars().collect();
        let all: Vec<Vec<Part>> = (1..=characters.len())
            .map(|size| {
                let mut harmony = Harmony::new(tail, false);
                let mut parts = Vec::new();
                for piece in characters.chunks(size) {
                    harmony.push(&piece.iter().collect::<String>(), &mut parts);
                }
                harmony.finish(&mut parts);
                joined(parts)
            })
            .collect();
        assert!(all.iter().all(|parts| *parts == all[0]), "{all:?}");
        all[0].clone()
    }

    #[test]
    fn channels_are_told_apart() {
        let parts = split(
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm < 5.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        );
        let (hm, yes) = ("Hm < 5.".to_owned(), "Yes.".to_owned());
        assert_eq!(parts, [Part::Reasoning(hm.clone()), Part::Text(yes)]);
        let cut = split(
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm < 5.",
        );
        assert_eq!(cut, [Part::Reasoning(hm)]);
        let open = "<|start|>assistant<|channel|>final<|message|>Once";
        assert_eq!(split(open, " upon"), [Part::Text(" upon".to_owned())]);
        assert!(split("<|start|>assistant", "<|channel|>ana").is_empty());
    }

    #[test]
    fn calls_have_their_names_from_the_header() {
        let call = |name: &str, arguments: &str| {
            Part::Call(ToolCall {
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            })
        };
        let parts = split(
            "<|start|>assistant",
            "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
             <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        );
        let thought = Part::Reasoning("I look.".to_owned());
        assert_eq!(parts, [thought, call("f", "{\"a\": 1}")]);
        let before = "<|start|>assistant to=functions.g<|channel|>commentary<|message|>";
        assert_eq!(split("", before), [call("g", "{}")]);
        let preamble = split("", "<|channel|>commentary<|message|>I will look.<|end|>");
        assert_eq!(preamble, [Part::Text("I will look.".to_owned())]);
    }
}
