//! Text with marks around what the model thinks and calls, as in most families.
//!
//! ```text
//!        "<think>"            "</think>"          "<tool_call>"
//! begin ----------> thinking ------------> saying <--------------> calling
//!   |  anything else                         ^     "</tool_call>"
//!   +----------------------------------------+
//! ```
//!
//! The marks are the template's ([`forms`](crate::tool_calls::forms)). A form without an opening
//! mark has calls where the answer begins with `{` or `[`, and nothing else beside them.
//!
//! Where the template has opened the thinking itself, an answer begins there. Text that may be the
//! beginning of a mark is held back until it is known.

use serde_json::Value;

use super::{Part, partial};
use crate::tool_calls::Tools;
use crate::tool_calls::forms::{Form, Thinking};

/// Longest call; what is longer is text.
const CALL_MAX_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Begin,
    Thinking,
    Saying,
    Calling,
}

/// Takes text as it comes.
#[derive(Debug)]
pub(super) struct Marked {
    state: State,
    /// How calls are written, where there are tools.
    form: Option<Form>,
    thinking: Option<Thinking>,
    /// Text that is not yet handed out.
    held: String,
    /// Whitespace at the beginning of a part is left out.
    at_start: bool,
    /// The whitespace before a call, which counts only where it turns out to be none.
    gap: String,
    /// Something was said.
    said: bool,
    tools: Tools,
    calls: usize,
}

impl Marked {
    /// For a chat whose prompt ended in `tail`.
    pub(super) fn new(
        form: Option<Form>,
        thinking: Option<Thinking>,
        tail: &str,
        tools: Tools,
    ) -> Self {
        let state = match thinking {
            Some(thinking) if tail.ends_with(thinking.open) => State::Thinking,
            Some(_) => State::Begin,
            None => State::Saying,
        };
        Self {
            state,
            form: form.filter(|_| !tools.described.is_empty()),
            thinking,
            held: String::new(),
            at_start: state == State::Thinking,
            gap: String::new(),
            said: false,
            tools,
            calls: 0,
        }
    }

    /// For text that is handed out as it comes.
    pub(super) fn plain() -> Self {
        Self::new(None, None, "", Tools::default())
    }

    /// Whether the model thinks at this point.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// Calls so far.
    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// More text.
    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        if self.state == State::Saying && self.form.is_none() && !self.at_start {
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
                let open = self.thinking.map_or("", |thinking| thinking.open);
                let seen = self.held.trim_start();
                if let Some(rest) = seen.strip_prefix(open).filter(|_| !open.is_empty()) {
                    self.held = rest.to_owned();
                    self.enter(State::Thinking, true);
                    return true;
                }
                if !open.is_empty() && open.starts_with(seen) {
                    return false;
                }
                self.enter(State::Saying, false);
                true
            }
            State::Thinking => {
                let close = self.thinking.map_or("", |thinking| thinking.close);
                if let Some((thought, rest)) = self.held.split_once(close) {
                    let (thought, rest) = (thought.trim_end().to_owned(), rest.to_owned());
                    self.reasoning(&thought, into);
                    self.held = rest;
                    self.enter(State::Saying, true);
                    return true;
                }
                let thought = self.without_partial(close);
                self.reasoning(&thought, into);
                false
            }
            State::Saying => {
                let Some(form) = self.form else {
                    let text = std::mem::take(&mut self.held);
                    self.text(&text, into);
                    return false;
                };
                if form.open.is_empty() {
                    return self.may_be_all(into);
                }
                if let Some((text, rest)) = self.held.split_once(form.open) {
                    let said = text.trim_end().to_owned();
                    self.gap = text[said.len()..].to_owned();
                    self.held = rest.to_owned();
                    self.text(&said, into);
                    self.enter(State::Calling, false);
                    return true;
                }
                let text = self.without_partial(form.open);
                self.text(&text, into);
                false
            }
            State::Calling => {
                let close = self.form.map_or("", |form| form.close);
                let closed = self.held.split_once(close).filter(|_| !close.is_empty());
                if let Some((block, rest)) = closed {
                    let (block, rest) = (block.to_owned(), rest.to_owned());
                    self.held = rest;
                    let is_call = self.call(&block, into);
                    self.enter(State::Saying, is_call);
                    if !is_call {
                        self.no_call(&format!("{block}{close}"), into);
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

    /// Text that has come, but for the end that may begin `mark`, and the space before that, which is
    /// no text then.
    fn without_partial(&mut self, mark: &str) -> String {
        let ready = self.held.len() - partial(&self.held, mark);
        let ready = self.held[..ready].trim_end().len();
        let rest = self.held.split_off(ready);
        std::mem::replace(&mut self.held, rest)
    }

    /// The beginning of an answer that is calls, or text, as a whole.
    fn may_be_all(&mut self, into: &mut Vec<Part>) -> bool {
        const TAG: &str = "<|python_tag|>";
        let seen = self.held.trim_start();
        if !self.said && (seen.is_empty() || TAG.starts_with(seen)) {
            return false;
        }
        if !self.said && (seen.starts_with(['{', '[']) || seen.starts_with(TAG)) {
            self.enter(State::Calling, false);
            return true;
        }
        let text = std::mem::take(&mut self.held);
        self.text(&text, into);
        false
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
            self.said = true;
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
        let open = self.form.map_or("", |form| form.open);
        self.text(&format!("{gap}{open}{block}"), into);
    }

    fn call(&mut self, block: &str, into: &mut Vec<Part>) -> bool {
        let tools: &[Value] = &self.tools.described;
        let Some(calls) = self.form.and_then(|form| (form.parse)(block, tools)) else {
            return false;
        };
        for call in calls {
            if self.calls == 0 || !self.tools.single {
                self.calls += 1;
                into.push(Part::Call(call));
            }
        }
        true
    }
}

#[cfg(test)]
#[path = "marks_tests.rs"]
mod tests;
