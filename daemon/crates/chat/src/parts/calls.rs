//! Streams a block of tool calls, in any form.

use serde_json::Value;

use super::Part;
use super::arguments::Objects;
use super::block::Block;
use super::written::Written;
use crate::tool_calls::forms::Form;
use crate::tool_calls::heads::Heads;
use crate::tool_calls::pieces::Pieces;

/// A block of tool calls that is being streamed.
#[derive(Debug)]
pub(super) enum Calls {
    /// The notation of the block is not known yet. The flag says that calls are given whole, so
    /// that only JSON is streamed internally.
    Begin(Form, bool),
    /// The arguments of the calls are JSON text.
    Objects(Objects),
    /// The arguments of the calls have another notation.
    Written(Box<Written>),
}

impl Calls {
    /// A block of calls in a form; `None` if the form has to be parsed as a whole. With `whole`,
    /// forms other than JSON are also parsed as a whole, so that an invalid block becomes text.
    pub(super) fn of(form: Form, whole: bool) -> Option<Self> {
        let in_pieces = match form.pieces {
            Pieces::None => false,
            Pieces::Written(_) => !whole,
            Pieces::Text(_) | Pieces::Tags => true,
        };
        in_pieces.then_some(Self::Begin(form, whole))
    }

    /// Whether a call that counts still expects arguments.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Begin(..) => false,
            Self::Objects(objects) => objects.is_open(),
            Self::Written(written) => written.is_open(),
        }
    }

    /// Whether any call of the block was sent.
    pub(super) fn has_begun(&self) -> bool {
        match self {
            Self::Begin(..) => false,
            Self::Objects(objects) => objects.has_begun(),
            Self::Written(written) => written.has_begun(),
        }
    }

    /// Consumes what it can of `held`, up to and including the closing mark (an empty mark never
    /// occurs). `counted` is asked for each new call whether it counts.
    pub(super) fn take(
        &mut self,
        held: &mut String,
        close: &str,
        tools: &[Value],
        mut counted: impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) -> Block {
        loop {
            match self {
                Self::Begin(form, whole) => match (form.pieces, held.trim_start().chars().next()) {
                    (_, None) => return Block::More,
                    (Pieces::Text(heads), _) => *self = Self::Objects(Objects::new(heads)),
                    (Pieces::Tags, Some('{' | '[')) => {
                        *self = Self::Objects(Objects::new(Heads::Objects));
                    }
                    (Pieces::None, _) => return Block::Whole,
                    (Pieces::Tags | Pieces::Written(_), _) if *whole => return Block::Whole,
                    (Pieces::Tags | Pieces::Written(_), _) => {
                        let Some(written) = Written::of(*form, held) else {
                            return Block::More;
                        };
                        *self = Self::Written(Box::new(written));
                    }
                },
                Self::Objects(objects) => {
                    return objects.take(held, close, tools, &mut counted, into);
                }
                Self::Written(written) => {
                    return written.take(held, close, tools, &mut counted, into);
                }
            }
        }
    }

    /// Handles the end of the output, with the unconsumed text `held`; returns what is left for
    /// other calls. `is_cut` says that the model would have written more.
    pub(super) fn finish(
        &mut self,
        held: &str,
        close: &str,
        is_cut: bool,
        tools: &[Value],
        mut counted: impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) -> String {
        match self {
            Self::Begin(..) => held.to_owned(),
            Self::Objects(objects) => objects.finish(held, close, into),
            Self::Written(written) => {
                written.finish(held, close, is_cut, tools, &mut counted, into);
                String::new()
            }
        }
    }
}
