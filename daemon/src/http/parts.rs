//! A model's text, taken apart into what it thinks, what it says and what it calls.
//!
//! ```text
//!        "<think>"            "</think>"          "<tool_call>"
//! begin ----------> thinking ------------> saying <--------------> calling
//!   |  anything else                         ^     "</tool_call>"
//!   +----------------------------------------+
//! ```
//!
//! Where the template has opened the thinking itself, an answer begins there. Text that may be the
//! beginning of a mark is held back until it is known.

use rocmforge_engine::LoadedModel;
use serde_json::Value;

use super::tool_calls::{self, ToolCall, Tools};

const THINK_OPEN: &str = "<think>";
const THINK_CLOSE: &str = "</think>";
/// Longest call; what is longer is text.
const CALL_MAX_BYTES: usize = 1 << 20;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// What the model thinks.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// What it calls.
    Call(ToolCall),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Begin,
    Thinking,
    Saying,
    Calling,
}

/// Takes text as it comes.
#[derive(Debug)]
pub(super) struct Splitter {
    state: State,
    /// Text that is not yet handed out.
    held: String,
    /// Whitespace at the beginning of a part is left out.
    at_start: bool,
    /// The whitespace before a call, which counts only where it turns out to be none.
    gap: String,
    tools: Tools,
    calls: usize,
}

impl Splitter {
    /// For a chat with `model` whose prompt ended in `tail`.
    pub(super) fn for_chat(model: &LoadedModel, tail: &str, tools: Tools) -> Self {
        let source = model.template().and_then(|template| template.source().ok());
        let thinks = source.is_some_and(|source| source.contains(THINK_CLOSE));
        let state = if thinks && tail.ends_with(THINK_OPEN) {
            State::Thinking
        } else if thinks {
            State::Begin
        } else {
            State::Saying
        };
        Self {
            state,
            held: String::new(),
            at_start: state == State::Thinking,
            gap: String::new(),
            tools,
            calls: 0,
        }
    }

    /// For text that is handed out as it comes.
    pub(super) fn plain() -> Self {
        Self {
            state: State::Saying,
            held: String::new(),
            at_start: false,
            gap: String::new(),
            tools: Tools::default(),
            calls: 0,
        }
    }

    /// Whether the model thinks at this point.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// Calls so far.
    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    fn takes_calls(&self) -> bool {
        !self.tools.described.is_empty()
    }

    /// More text.
    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        if self.state == State::Saying && !self.takes_calls() && !self.at_start {
            if !text.is_empty() {
                into.push(Part::Text(text.to_owned()));
            }
            return;
        }
        self.held.push_str(text);
        while self.step(into) {}
    }

    /// The end: what is held back is what it seems.
    pub(super) fn finish(&mut self, into: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Thinking => self.reasoning(held.trim_end(), into),
            State::Begin | State::Saying => self.text(&held, into),
            State::Calling => {
                // A call whose end is missing, as where a stop string or the length cut it.
                if !self.call(&held, into) {
                    self.no_call(&held, into);
                }
            }
        }
    }

    /// One transition; whether there may be another.
    fn step(&mut self, into: &mut Vec<Part>) -> bool {
        match self.state {
            State::Begin => {
                let seen = self.held.trim_start();
                if let Some(rest) = seen.strip_prefix(THINK_OPEN) {
                    self.held = rest.to_owned();
                    self.enter(State::Thinking, true);
                    return true;
                }
                if THINK_OPEN.starts_with(seen) {
                    return false;
                }
                self.enter(State::Saying, false);
                true
            }
            State::Thinking => {
                if let Some((thought, rest)) = self.held.split_once(THINK_CLOSE) {
                    let (thought, rest) = (thought.trim_end().to_owned(), rest.to_owned());
                    self.reasoning(&thought, into);
                    self.held = rest;
                    self.enter(State::Saying, true);
                    return true;
                }
                let keep = partial(&self.held, THINK_CLOSE);
                let ready = self.held.len() - keep;
                // The line end before the mark is no thought.
                let ready = self.held[..ready].trim_end().len();
                let rest = self.held.split_off(ready);
                let thought = std::mem::replace(&mut self.held, rest);
                self.reasoning(&thought, into);
                false
            }
            State::Saying if !self.takes_calls() => {
                let text = std::mem::take(&mut self.held);
                self.text(&text, into);
                false
            }
            State::Saying => {
                if let Some((text, rest)) = self.held.split_once(tool_calls::OPEN) {
                    let said = text.trim_end().to_owned();
                    self.gap = text[said.len()..].to_owned();
                    self.held = rest.to_owned();
                    self.text(&said, into);
                    self.enter(State::Calling, false);
                    return true;
                }
                let keep = partial(&self.held, tool_calls::OPEN);
                let ready = self.held.len() - keep;
                // The line end before a call is no text.
                let ready = self.held[..ready].trim_end().len();
                let rest = self.held.split_off(ready);
                let text = std::mem::replace(&mut self.held, rest);
                self.text(&text, into);
                false
            }
            State::Calling => {
                if let Some((block, rest)) = self.held.split_once(tool_calls::CLOSE) {
                    let (block, rest) = (block.to_owned(), rest.to_owned());
                    self.held = rest;
                    let is_call = self.call(&block, into);
                    self.enter(State::Saying, is_call);
                    if !is_call {
                        self.no_call(&format!("{block}{}", tool_calls::CLOSE), into);
                    }
                    return true;
                }
                if self.held.len() > CALL_MAX_BYTES {
                    let block = std::mem::take(&mut self.held);
                    self.enter(State::Saying, false);
                    self.no_call(&block, into);
                }
                false
            }
        }
    }

    fn enter(&mut self, state: State, at_start: bool) {
        self.state = state;
        self.at_start = at_start;
    }

    /// `text` without the whitespace that begins a part.
    fn started<'t>(&mut self, text: &'t str) -> &'t str {
        if !self.at_start {
            return text;
        }
        let text = text.trim_start();
        self.at_start = text.is_empty();
        text
    }

    fn text(&mut self, text: &str, into: &mut Vec<Part>) {
        let text = self.started(text);
        if !text.is_empty() {
            into.push(Part::Text(text.to_owned()));
        }
    }

    fn reasoning(&mut self, text: &str, into: &mut Vec<Part>) {
        let text = self.started(text);
        if !text.is_empty() {
            into.push(Part::Reasoning(text.to_owned()));
        }
    }

    /// What looked like a call is text.
    fn no_call(&mut self, block: &str, into: &mut Vec<Part>) {
        let gap = std::mem::take(&mut self.gap);
        self.text(&format!("{gap}{}{block}", tool_calls::OPEN), into);
    }

    fn call(&mut self, block: &str, into: &mut Vec<Part>) -> bool {
        let tools: &[Value] = &self.tools.described;
        let Some(call) = tool_calls::parse(block, tools) else {
            return false;
        };
        if self.calls == 0 || !self.tools.single {
            self.calls += 1;
            into.push(Part::Call(call));
        }
        true
    }
}

/// Bytes at the end of `text` that may begin `mark`.
fn partial(text: &str, mark: &str) -> usize {
    let most = text.len().min(mark.len() - 1);
    (1..=most)
        .rev()
        .find(|&n| text.as_bytes().ends_with(&mark.as_bytes()[..n]))
        .unwrap_or(0)
}

/// Parts of one kind in a row, as one.
pub(super) fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut whole: Vec<Part> = Vec::new();
    for part in parts {
        match (whole.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (_, part) => whole.push(part),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `text` in pieces of every size gives the same.
    fn split(state: State, with_tools: bool, text: &str) -> Vec<Part> {
        let described = tool_calls::described("f", None, &json!({}));
        let all: Vec<Vec<Part>> = (1..=text.len().max(1))
            .map(|size| {
                let tools = Tools {
                    described: if with_tools {
                        vec![described.clone()]
                    } else {
                        vec![]
                    },
                    single: false,
                    forced: None,
                };
                let mut splitter = Splitter {
                    state,
                    at_start: state == State::Thinking,
                    tools,
                    ..Splitter::plain()
                };
                let mut parts = Vec::new();
                let characters: Vec<char> = text.chars().collect();
                for piece in characters.chunks(size) {
                    splitter.push(&piece.iter().collect::<String>(), &mut parts);
                }
                splitter.finish(&mut parts);
                joined(parts)
            })
            .collect();
        assert!(all.iter().all(|parts| *parts == all[0]), "{all:?}");
        all[0].clone()
    }

    fn text(text: &str) -> Part {
        Part::Text(text.into())
    }

    fn thought(text: &str) -> Part {
        Part::Reasoning(text.into())
    }

    fn call(arguments: &str) -> Part {
        Part::Call(ToolCall {
            name: "f".into(),
            arguments: arguments.into(),
        })
    }

    #[test]
    fn thinking_is_told_from_saying() {
        let answer = "<think>\nhm <b> \u{e9}.\n</think>\n\nYes, a < b.";
        let parts = split(State::Begin, false, answer);
        assert_eq!(parts, [thought("hm <b> \u{e9}."), text("Yes, a < b.")]);
        let parts = split(State::Thinking, false, "hm.\n</think>\n\nYes.");
        assert_eq!(parts, [thought("hm."), text("Yes.")]);
        let parts = split(State::Begin, false, "<think>\n\n</think>\n\nYes.");
        assert_eq!(parts, [text("Yes.")]);
        let parts = split(State::Begin, false, "<thin air> </think>");
        assert_eq!(parts, [text("<thin air> </think>")]);
        let parts = split(State::Thinking, false, "cut off </thi");
        assert_eq!(parts, [thought("cut off </thi")]);
        assert_eq!(split(State::Begin, false, "<think"), [text("<think")]);
    }

    #[test]
    fn calls_are_told_from_text() {
        let one = r#"<tool_call>{"name": "f", "arguments": {"a":1}}</tool_call>"#;
        let answer = format!("<think>x</think>I look.\n{one}\n{one}\nDone.");
        let parts = split(State::Begin, true, &answer);
        let expected = [
            thought("x"),
            text("I look."),
            call(r#"{"a":1}"#),
            call(r#"{"a":1}"#),
            text("Done."),
        ];
        assert_eq!(parts, expected);
        let cut = &one[..one.len() - "</tool_call>".len()];
        assert_eq!(split(State::Saying, true, cut), [call(r#"{"a":1}"#)]);
        let none = "a <tool_call>nothing</tool_call> b";
        assert_eq!(
            split(State::Saying, true, none),
            [text("a <tool_call>nothing</tool_call> b")]
        );
        assert_eq!(
            split(State::Saying, false, one),
            [text(one)],
            "without tools it is text"
        );
    }

    #[test]
    fn only_the_first_call_counts_where_one_is_asked_for() {
        let mut splitter = Splitter::plain();
        splitter.tools = Tools {
            described: vec![tool_calls::described("f", None, &json!({}))],
            single: true,
            forced: None,
        };
        let mut parts = Vec::new();
        let one = r#"<tool_call>{"name": "f"}</tool_call>"#;
        splitter.push(&format!("{one}{one}"), &mut parts);
        splitter.finish(&mut parts);
        assert_eq!(parts, [call("{}")]);
        assert_eq!(splitter.calls(), 1);
    }
}
