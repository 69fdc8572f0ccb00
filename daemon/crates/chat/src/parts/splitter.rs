//! A model's text as it comes, into parts.

use super::marks::{Marked, Marks};
use super::messages::Messages;
use super::{Part, joined};
use crate::tail::Tail;
use crate::tool_calls::forms::Headers;
use crate::tool_calls::{ToolCall, Tools, is_object};

/// Takes text as it comes.
#[derive(Debug)]
pub struct Splitter {
    way: Way,
    /// Whether arguments of calls are streamed.
    in_pieces: bool,
    /// The call whose arguments come, where they are not.
    open: Option<ToolCall>,
    /// Arguments of the last call, as far as they were told.
    told: Option<String>,
    /// Calls whose arguments came to no object.
    broken: usize,
}

#[derive(Debug)]
pub(super) enum Way {
    Marked(Box<Marked>),
    Messages(Messages),
}

impl Splitter {
    /// For a chat with a model of this template, whose prompt ended in `tail`.
    pub fn for_template(source: &str, tail: &Tail, tools: Tools) -> Self {
        let way = match Headers::of(source) {
            Some(headers) => Way::Messages(Messages::new(headers, &tail.text, tools)),
            None => Way::Marked(Box::new(Marked::new(Marks::of(source), tail, tools))),
        };
        Self::of(way)
    }

    /// For text that is handed out as it comes.
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

    /// From now on arguments of calls are streamed as they come, where the form of calls allows.
    pub fn tell_pieces(&mut self) {
        self.in_pieces = true;
        if let Way::Marked(marked) = &mut self.way {
            marked.tell_whole(false);
        }
    }

    /// Whether more arguments may come of the last call.
    pub fn is_calling(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.is_calling(),
            Way::Messages(messages) => messages.is_calling(),
        }
    }

    /// Whether the model thinks at this point.
    pub fn is_thinking(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.is_thinking(),
            Way::Messages(messages) => messages.is_thinking(),
        }
    }

    /// Whether text that has come may still turn out to be said. What may be a thought or belongs
    /// to a call does not count.
    pub fn holds_text(&self) -> bool {
        match &self.way {
            Way::Marked(marked) => marked.holds_text(),
            Way::Messages(messages) => messages.holds_text(),
        }
    }

    /// Calls so far, but those whose arguments ended as no object: a call is one when it can be
    /// made.
    pub fn calls(&self) -> usize {
        self.told_calls() - self.broken
    }

    /// Calls so far, whatever their arguments came to.
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

    /// Follows the arguments of calls that are handed out.
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

    /// No more arguments come of the last call.
    fn end_call(&mut self) {
        let told = self.told.take();
        self.broken += usize::from(told.is_some_and(|told| !is_object(&told)));
    }

    /// Makes whole calls of pieces from `from` on, where calls are given whole.
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
