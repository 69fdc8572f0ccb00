//! Parses output with marks around reasoning and tool calls, as in most families.
//!
//! ```text
//!        "<think>"            "</think>"          "<tool_call>"
//! begin ----------> thinking ------------> saying <--------------> calling
//!   |  anything else                         ^     "</tool_call>"
//!   +----------------------------------------+
//! ```
//!
//! Marks around all of the text, which some families have, are removed. The marks are the
//! template's ([`forms`](crate::tool_calls::forms)). A form without an opening mark has calls where
//! the answer begins with `{` or `[`, and nothing else beside them.
//!
//! Calls of forms with [`Form::pieces`] are streamed (by [`Calls`]), others are given whole. A call
//! that the end of the output cuts keeps the arguments so far, or is dropped: its notation is never
//! text.
//!
//! If the template has opened the reasoning itself, an output begins inside of it. Text that may be
//! the beginning of a mark is held back until it is known.

use serde_json::Value;

use super::block::Block;
use super::calls::Calls;
use super::{CALL_MAX_BYTES, Part};
use crate::tail::Tail;
use crate::tool_calls::forms::{self, Form, Frame, Thinking};
use crate::tool_calls::json::json_calls;
use crate::tool_calls::texts::partial;
use crate::tool_calls::{ToolCall, Tools};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Begin,
    Thinking,
    Saying,
    Calling,
}

/// The marks around the parts of an output, by the model's template.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Marks {
    /// Marks and format of tool calls; `None` if the model writes none.
    pub(super) form: Option<Form>,
    /// Marks around reasoning.
    pub(super) thinking: Option<Thinking>,
    /// Marks around all of the text.
    pub(super) frame: Option<Frame>,
}

impl Marks {
    pub(super) fn of(source: &str) -> Self {
        Self {
            form: forms::of(source),
            thinking: Thinking::of(source),
            frame: Frame::of(source),
        }
    }
}

/// A kind of mark in an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Call,
    FrameOpen,
    FrameClose,
}

/// Parser of an output with marks.
#[derive(Debug)]
pub(super) struct Marked {
    state: State,
    /// Format of tool calls, if the request has tools.
    form: Option<Form>,
    thinking: Option<Thinking>,
    frame: Option<Frame>,
    /// Whether the frame's opening mark was read, and its closing one was not.
    in_frame: bool,
    /// Whether text begins after the frame's opening mark.
    begins_frame: bool,
    /// Received text that was not processed yet.
    held: String,
    /// Offset in `held` up to which there is no mark that closes calls.
    searched: usize,
    /// The current block of calls, while it is streamed.
    block: Option<Calls>,
    /// Whether white space is skipped, because a part begins.
    at_start: bool,
    /// White space before a call, which is text only if the call turns out to be none.
    gap: String,
    /// Whether any text was output.
    said: bool,
    /// Whether calls are given whole, so that an invalid one may still become text.
    whole: bool,
    tools: Tools,
    calls: usize,
}

impl Marked {
    /// A parser for the output after a prompt that ended in `tail`.
    pub(super) fn new(marks: Marks, tail: &Tail, tools: Tools) -> Self {
        let Marks {
            form,
            thinking,
            frame,
        } = marks;
        let state = match thinking {
            Some(thinking) if tail.text.ends_with(thinking.open) => State::Thinking,
            Some(_) => State::Begin,
            None => State::Saying,
        };
        // A message that goes on is inside of its frame, which a template may leave out: the model
        // closes it all the same.
        let is_opened = frame.is_some_and(|frame| tail.text.ends_with(frame.open));
        let begins_frame = frame.is_some() && (is_opened || !tail.continues);
        Self {
            state,
            form: form.filter(|_| !tools.described.is_empty()),
            thinking,
            frame,
            in_frame: is_opened || frame.is_some() && tail.continues,
            begins_frame,
            held: String::new(),
            searched: 0,
            block: None,
            at_start: state == State::Thinking || begins_frame,
            gap: String::new(),
            said: false,
            whole: false,
            tools,
            calls: 0,
        }
    }

    /// A parser that passes all output through as text.
    pub(super) fn plain() -> Self {
        Self::new(Marks::default(), &Tail::default(), Tools::default())
    }

    /// Sets whether calls are given whole.
    pub(super) fn tell_whole(&mut self, whole: bool) {
        self.whole = whole;
    }

    /// Whether the output is inside of reasoning at this point.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// Number of calls so far.
    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the last call still expects arguments.
    pub(super) fn is_calling(&self) -> bool {
        self.block.as_ref().is_some_and(Calls::is_open)
    }

    /// Whether received text may still become a text part.
    pub(super) fn holds_text(&self) -> bool {
        match self.state {
            State::Begin => !self.held.is_empty(),
            State::Thinking => false,
            State::Saying if self.at_start => !self.held.trim_start().is_empty(),
            State::Saying => !self.held.is_empty(),
            State::Calling => match self.block.as_ref().is_some_and(Calls::has_begun) {
                // Where nothing closes calls, text may follow them.
                true => {
                    self.form.is_some_and(|form| form.close.is_empty()) && !self.held.is_empty()
                }
                // With the mark in front of it, where it is no call.
                false => true,
            },
        }
    }

    /// Processes further output.
    pub(super) fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        let may_have_marks = self.form.is_some() || self.frame.is_some() || self.at_start;
        if self.state == State::Saying && !may_have_marks {
            if !text.is_empty() {
                into.push(Part::Text(text.to_owned()));
            }
            return;
        }
        self.held.push_str(text);
        while self.step(into) {}
    }

    /// Handles the end of the output: held text becomes what it seems to be. `is_cut` says that the
    /// model would have written more.
    pub(super) fn finish(&mut self, is_cut: bool, into: &mut Vec<Part>) {
        let mut held = std::mem::take(&mut self.held);
        match self.state {
            State::Thinking => self.reasoning(held.trim_end(), into),
            State::Begin | State::Saying => {
                let open = self.form.map_or("", |form| form.open);
                // One byte of a mark may be anything.
                let begun = partial(&held, open);
                if is_cut && begun > 1 {
                    held.truncate(held[..held.len() - begun].trim_end().len());
                }
                self.text(&held, into);
            }
            State::Calling => {
                let has_begun = self.block.as_ref().is_some_and(Calls::has_begun);
                if is_cut && self.whole && !has_begun {
                    // What has come of a call that is cut is never text.
                    let close = self.form.map_or("", |form| form.close);
                    self.block = self.form.and_then(|form| Calls::of(form, false));
                    self.held = held;
                    self.pieces(close, into);
                    held = std::mem::take(&mut self.held);
                }
                self.finish_calls(&held, is_cut, into);
            }
        }
    }

    /// Ends calls whose closing mark is missing, for example because a stop string or the length
    /// limit cut the output.
    fn finish_calls(&mut self, held: &str, is_cut: bool, into: &mut Vec<Part>) {
        let (open, close) = self.form.map_or(("", ""), |form| (form.open, form.close));
        if let Some(mut block) = self.block.take()
            && block.has_begun()
        {
            let tools: &[Value] = &self.tools.described;
            let counted = counter(&mut self.calls, self.tools.single);
            let rest = block.finish(held, close, is_cut, tools, counted, into);
            return match close.is_empty() {
                true => self.behind(&rest, open, is_cut, into),
                false => self.other_calls(&rest, into),
            };
        }
        let block = &held[..held.len() - partial(held, close)];
        let in_tags = self.form.is_some_and(|form| form.in_tags);
        let is_json = block.trim_start().starts_with(['{', '[']);
        // Between tags a cut value looks whole, and a tool is not to be run with the beginning of a
        // path.
        let may_be_whole = !(is_cut && in_tags && !is_json);
        if may_be_whole && self.call(block, into) {
            return;
        }
        // Where nothing opens calls, it may be what was asked for.
        if !is_cut || open.is_empty() || !forms::may_begin_call(block, &self.tools.described) {
            self.no_call(held, into);
        }
    }

    /// Processes the rest after a call of a form without a closing mark: other calls with their
    /// marks, or text.
    fn behind(&mut self, rest: &str, open: &str, is_cut: bool, into: &mut Vec<Part>) {
        // Some models close their calls all the same.
        let closing = open.replacen("<|", "<|/", 1);
        let begun = if is_cut { partial(rest, open) } else { 0 };
        // One byte of a mark may be anything.
        let rest = &rest[..rest.len() - if begun > 1 { begun } else { 0 }];
        for piece in rest.split(open) {
            let piece = piece.trim().trim_start_matches([']', '}']);
            let piece = piece.trim().trim_start_matches(&closing);
            let piece = piece.trim().trim_end_matches(&closing).trim();
            if piece.is_empty() || self.call(piece, into) {
                continue;
            }
            let before = self.calls;
            self.other_calls(piece, into);
            let is_begun = is_cut && forms::may_begin_call(piece, &self.tools.described);
            if self.calls == before && !is_begun {
                self.text(piece, into);
            }
        }
    }

    /// Performs one state transition. Returns whether another may follow.
    fn step(&mut self, into: &mut Vec<Part>) -> bool {
        match self.state {
            State::Begin => self.open_thinking(),
            State::Thinking => self.take_thought(into),
            State::Saying => self.take_said(into),
            State::Calling => self.take_block(into),
        }
    }

    /// Consumes the opening mark of reasoning, or decides that there is none.
    fn open_thinking(&mut self) -> bool {
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
        self.enter(State::Saying, self.begins_frame);
        true
    }

    /// Consumes reasoning up to its closing mark.
    fn take_thought(&mut self, into: &mut Vec<Part>) -> bool {
        let close = self.thinking.map_or("", |thinking| thinking.close);
        if let Some((thought, rest)) = self.held.split_once(close) {
            let (thought, rest) = (thought.trim_end().to_owned(), rest.to_owned());
            self.reasoning(&thought, into);
            self.held = rest;
            self.enter(State::Saying, true);
            return true;
        }
        let thought = self.without(partial(&self.held, close));
        self.reasoning(&thought, into);
        false
    }

    /// Consumes text up to a mark.
    fn take_said(&mut self, into: &mut Vec<Part>) -> bool {
        if self.form.is_some_and(|form| form.open.is_empty()) {
            return self.may_be_all(into);
        }
        let marks = self.marks();
        let found = marks
            .iter()
            .filter_map(|&(mark, written)| Some((self.held.find(written)?, mark, written)))
            // What follows a text opens no frame.
            .filter(|&(at, mark, _)| mark != Mark::FrameOpen || self.held[..at].trim().is_empty())
            .min_by_key(|&(at, ..)| at);
        let Some((at, mark, written)) = found else {
            let text = match marks
                .iter()
                .map(|(_, mark)| partial(&self.held, mark))
                .max()
            {
                Some(held) => self.without(held),
                None => std::mem::take(&mut self.held),
            };
            self.text(&text, into);
            return false;
        };
        let rest = self.held.split_off(at + written.len());
        let text = std::mem::replace(&mut self.held, rest);
        let said = text[..at].trim_end();
        self.gap = text[said.len()..at].to_owned();
        self.text(said, into);
        match mark {
            Mark::Call => self.enter(State::Calling, false),
            Mark::FrameOpen | Mark::FrameClose => {
                self.in_frame = mark == Mark::FrameOpen;
                self.at_start = true;
            }
        }
        true
    }

    /// Consumes a block of calls up to its closing mark.
    fn take_block(&mut self, into: &mut Vec<Part>) -> bool {
        let close = self.form.map_or("", |form| form.close);
        if let Some(again) = self.pieces(close, into) {
            return again;
        }
        let from = match self.held.is_char_boundary(self.searched) {
            true => self.searched,
            false => 0,
        };
        let closed = self.held[from..].find(close).filter(|_| !close.is_empty());
        self.searched = self.held.len() - partial(&self.held, close);
        if let Some(n) = closed {
            let rest = self.held.split_off(from + n + close.len());
            let mut block = std::mem::replace(&mut self.held, rest);
            block.truncate(from + n);
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

    /// Streams calls. Returns whether another transition may follow; `None` if the block has to be
    /// parsed as a whole.
    fn pieces(&mut self, close: &str, into: &mut Vec<Part>) -> Option<bool> {
        let block = self.block.as_mut()?;
        let tools: &[Value] = &self.tools.described;
        let counted = counter(&mut self.calls, self.tools.single);
        match block.take(&mut self.held, close, tools, counted, into) {
            Block::More if block.has_begun() => {
                if self.held.len() > CALL_MAX_BYTES {
                    self.held.clear();
                }
                Some(false)
            }
            Block::More => None,
            Block::Whole => {
                self.block = None;
                None
            }
            Block::Ended(rest) => {
                self.other_calls(&rest, into);
                self.enter(State::Saying, true);
                Some(true)
            }
        }
    }

    /// Parses calls after a streamed one as a whole, if there are any.
    fn other_calls(&mut self, rest: &str, into: &mut Vec<Part>) {
        let rest = rest.trim().trim_end_matches(']');
        let calls = json_calls(&format!("[{rest}]"), &[]);
        let calls = calls.or_else(|| json_calls(rest, &[]));
        self.count(calls.unwrap_or_default(), into);
    }

    /// The marks that may follow in text.
    fn marks(&self) -> Vec<(Mark, &'static str)> {
        let call = self.form.map(|form| (Mark::Call, form.open));
        let frame = self.frame.and_then(|frame| match self.in_frame {
            true => Some((Mark::FrameClose, frame.close)),
            false => (!self.said).then_some((Mark::FrameOpen, frame.open)),
        });
        call.into_iter().chain(frame).collect()
    }

    /// The held text without its last `held` bytes, which may begin a mark, and without white space
    /// before them.
    fn without(&mut self, held: usize) -> String {
        let ready = self.held.len() - held;
        let ready = self.held[..ready].trim_end().len();
        let rest = self.held.split_off(ready);
        std::mem::replace(&mut self.held, rest)
    }

    /// Decides whether an output that may consist of calls only is calls or text.
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
        self.searched = 0;
        let form = self.form.filter(|_| state == State::Calling);
        self.block = form.and_then(|form| Calls::of(form, self.whole));
    }

    /// `text` without leading white space if it begins a part.
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

    /// Outputs a block that looked like a call as text.
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
        self.count(calls, into);
        true
    }

    /// Outputs those of the complete calls that count.
    fn count(&mut self, calls: Vec<ToolCall>, into: &mut Vec<Part>) {
        for call in calls {
            if self.calls == 0 || !self.tools.single {
                self.calls += 1;
                into.push(Part::Call(call));
            }
        }
    }
}

/// A function that decides for each new call whether it counts.
fn counter(calls: &mut usize, single: bool) -> impl FnMut() -> bool {
    move || {
        let counts = *calls == 0 || !single;
        *calls += usize::from(counts);
        counts
    }
}

#[cfg(test)]
#[path = "marks_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "continued_tests.rs"]
mod continued_tests;
