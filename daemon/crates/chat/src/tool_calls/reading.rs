//! What is known of calls while their block still comes, in forms whose arguments are not JSON.
//!
//! *Invariant:* what is told of a call's arguments is a beginning of what the form's parser makes
//! of the block, if it takes it, whatever follows (tests
//! `pieces_make_the_whole_however_a_text_is_split`,
//! `notations_in_values_are_read_as_the_parser_reads_them`). Where that cannot be known, nothing
//! more is told. Of a block that the parser refuses (Gemma 4, LFM2) what was told stays, and the
//! call that broke it is no object.

use serde_json::Value;

use super::gemma;
use super::known::Known;
use super::pieces::{Notation, Pieces};
use super::python::coming as python;
use super::tagged::coming::Tagged;

/// A block of calls, as far as it is known.
#[derive(Debug)]
pub(crate) enum Reading {
    /// The notation cannot be given in pieces.
    None,
    /// Parameters stand between tags.
    Tagged(Box<Tagged>),
    /// Gemma's.
    Gemma(gemma::Coming),
    /// Python's.
    Python(python::Coming),
}

impl Reading {
    /// A block that begins with `text`; nothing while that is too short to tell.
    pub(crate) fn of(pieces: Pieces, text: &str) -> Option<Self> {
        match pieces {
            Pieces::Tags => Tagged::of_block(text).map(|tagged| Self::Tagged(Box::new(tagged))),
            Pieces::Written(Notation::Invokes(prefix)) => {
                Some(Self::Tagged(Box::new(Tagged::invokes(prefix))))
            }
            Pieces::Written(Notation::Gemma) => Some(Self::Gemma(gemma::Coming::default())),
            Pieces::Written(Notation::Python) => Some(Self::Python(python::Coming::default())),
            Pieces::None | Pieces::Text(_) => Some(Self::None),
        }
    }

    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Tells what is known by `block`, which has what it had before, and more.
    pub(crate) fn read(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) {
        match self {
            Self::None => {}
            Self::Tagged(tagged) => tagged.read(block, tools, tell),
            Self::Gemma(gemma) => gemma.read(block, tools, tell),
            Self::Python(python) => python.read(block, tools, tell),
        }
    }
}
