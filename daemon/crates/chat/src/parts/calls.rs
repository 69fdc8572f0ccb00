//! A block of calls that is told while it comes, however its form writes them.

use serde_json::Value;

use super::Part;
use super::arguments::Objects;
use super::block::Block;
use super::written::Written;
use crate::tool_calls::forms::Form;
use crate::tool_calls::heads::Heads;
use crate::tool_calls::pieces::Pieces;

/// A block of calls, while it comes.
#[derive(Debug)]
pub(super) enum Calls {
    /// How its calls are written is not known yet. Whether calls are given whole, so that only JSON
    /// is read as it comes.
    Begin(Form, bool),
    /// The arguments of the calls are JSON text.
    Objects(Objects),
    /// The arguments of the calls have another notation.
    Written(Box<Written>),
}

impl Calls {
    /// Calls of a form; nothing where they are read as a whole. Where they are given `whole`, those
    /// are that are no JSON: a block of them that is not valid is text then.
    pub(super) fn of(form: Form, whole: bool) -> Option<Self> {
        let in_pieces = match form.pieces {
            Pieces::None => false,
            Pieces::Written(_) => !whole,
            Pieces::Text(_) | Pieces::Tags => true,
        };
        in_pieces.then_some(Self::Begin(form, whole))
    }

    /// Whether arguments are open of a call that counts.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Begin(..) => false,
            Self::Objects(objects) => objects.is_open(),
            Self::Written(written) => written.is_open(),
        }
    }

    /// Whether any call of the block was given out.
    pub(super) fn has_begun(&self) -> bool {
        match self {
            Self::Begin(..) => false,
            Self::Objects(objects) => objects.has_begun(),
            Self::Written(written) => written.has_begun(),
        }
    }

    /// Takes what it can of `held`, up to and with the closing mark; an empty one never comes.
    /// `counted` says of each call that begins whether it counts.
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

    /// The end of all text, `held` behind what was taken: what is left of it for other calls.
    /// `is_cut` says that the model would have written more.
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
