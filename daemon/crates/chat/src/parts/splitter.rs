//! Splits streamed output into parts.

use super::marks::{Marked, Marks};
use super::messages::Messages;
use super::{Part, joined};
use crate::tail::Tail;
use crate::tool_calls::forms::Headers;
use crate::tool_calls::{ToolCall, Tools, is_object};

/// Splits streamed output into reasoning, text and tool calls.
#[derive(Debug)]
pub struct Splitter {
    way: Way,
    /// Whether arguments of calls are streamed.
    in_pieces: bool,
    /// The current call, if its arguments are not streamed to the client.
    open: Option<ToolCall>,
    /// The arguments of the last call so far.
    told: Option<String>,
    /// Number of calls whose arguments are not a JSON object.
    broken: usize,
}

#[derive(Debug)]
pub(super) enum Way {
    Marked(Box<Marked>),
    Messages(Messages),
}

impl Splitter {
    /// A splitter for a model with this template source, after a prompt that ended in `tail`.
    pub fn for_template(source: &str, tail: &Tail, tools: Tools) -> Self {
        let way = match Headers::of(source) {
            Some(headers) => Way::Messages(Messages::new(headers, &tail.text, tools)),
            None => Way::Marked(Box::new(Marked::new(Marks::of(source), tail, tools))),
        };
        Self::of(way)
    }

    /// A splitter that passes all output through as text.
    pub fn plain() -> Self {
        Self::of(Way::Marked(Box::new(Marked::plain())))
    }

    pub(super) fn of(mut way: Way) -> Self {
        if let Way::Marked(marked) = &mut way {
            marked.tell_whole(true);
        }
        Self {
            way,
            in_pieces: false,
            open: None,
            told: None,
            broken: 0,
        }
    }

    /// Streams arguments of calls from now on, if the form of calls allows that.
    pub fn tell_pieces(&mut self) {
        self.in_pieces = true;
        if let Way::Marked(marked) = &mut self.way {
            marked.tell_whole(false);
        }
    }

    /// Whether the last call still expects arguments.
    pub fn is_calling(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.is_calling(),
            Way::Messages(messages) => messages.is_calling(),
        }
    }

    /// Whether the output is inside of reasoning at this point.
    pub fn is_thinking(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.is_thinking(),
            Way::Messages(messages) => messages.is_thinking(),
        }
    }

    /// Whether received text may still become a text part; text that may be reasoning or belongs to
    /// a call does not count.
    pub fn holds_text(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.holds_text(),
            Way::Messages(messages) => messages.holds_text(),
        }
    }

    /// Number of calls so far, without those whose arguments are not a JSON object.
    pub fn calls(&self) -> usize {
        self.told_calls() - self.broken
    }

    /// Number of calls so far, whatever their arguments.
    pub fn told_calls(&self) -> usize {
        match &self.way {
            Way::Marked(marked) => marked.calls(),
            Way::Messages(messages) => messages.calls(),
        }
    }

    /// Takes further output text.
    pub fn push(&mut self, text: &str, into: &mut Vec<Part>) {
        let from = into.len();
        match &mut self.way {
            Way::Marked(marked) => marked.push(text, into),
            Way::Messages(messages) => messages.push(text, into),
        }
        let is_calling = self.is_calling();
        self.make_whole(from, is_calling, into);
        self.follow(&into[from..]);
    }

    /// Ends the output: what was held back is given out as it is. `is_cut` says that the output was
    /// cut.
    pub fn finish(&mut self, is_cut: bool, into: &mut Vec<Part>) {
        let from = into.len();
        match &mut self.way {
            Way::Marked(marked) => marked.finish(is_cut, into),
            Way::Messages(messages) => messages.finish(is_cut, into),
        }
        self.make_whole(from, false, into);
        self.follow(&into[from..]);
        self.end_call();
    }

    /// Tracks the arguments of calls in these parts.
    fn follow(&mut self, parts: &[Part]) {
        for part in parts {
            match (part, &mut self.told) {
                (Part::Call(call), _) => {
                    self.end_call();
                    self.told = Some(call.arguments.clone());
                }
                (Part::Arguments(more), Some(told)) => told.push_str(more),
                _ => {}
            }
        }
    }

    /// Ends the last call: no more arguments follow.
    fn end_call(&mut self) {
        let told = self.told.take();
        self.broken += usize::from(told.is_some_and(|told| !is_object(&told)));
    }

    /// Joins the pieces of calls in the parts from index `from` on, if calls are given whole.
    fn make_whole(&mut self, from: usize, goes_on: bool, into: &mut Vec<Part>) {
        let has_calls = |part: &Part| matches!(part, Part::Call(_) | Part::Arguments(_));
        if self.in_pieces || self.open.is_none() && !into[from..].iter().any(has_calls) {
            return;
        }
        let parts = into.split_off(from);
        let begun = self.open.take().map(Part::Call);
        into.extend(joined(begun.into_iter().chain(parts).collect()));
        if goes_on && let Some(Part::Call(call)) = into.pop_if(|last| has_calls(last)) {
            self.open = Some(call);
        }
    }
}

#[cfg(test)]
#[path = "pieces_tests.rs"]
mod pieces_tests;
