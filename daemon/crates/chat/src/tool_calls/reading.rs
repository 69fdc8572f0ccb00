//! Reads calls before their block is complete, in formats whose arguments are not JSON.
//!
//! *Invariant:* the arguments sent so far are a prefix of what the format's parser makes of the
//! whole block, if it accepts it, whatever follows (tests
//! `pieces_make_the_whole_however_a_text_is_split`,
//! `notations_in_values_are_read_as_the_parser_reads_them`). If that cannot be known, nothing more
//! is sent. If the parser rejects a block (Gemma 4, LFM2), what was sent stays, and the call that
//! broke it has no valid object.

use serde_json::Value;

use super::gemma;
use super::known::Known;
use super::pieces::{Notation, Pieces};
use super::python::coming as python;
use super::tagged::coming::Tagged;

/// A streaming reader of a block of calls.
#[derive(Debug)]
pub(crate) enum Reading {
    /// The notation cannot be streamed.
    None,
    /// Parameters stand between tags.
    Tagged(Box<Tagged>),
    /// Gemma's notation.
    Gemma(gemma::Coming),
    /// Python's notation.
    Python(python::Coming),
}

impl Reading {
    /// A reader for a block that begins with `text`; `None` while that is too short to decide.
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

    /// Appends to `tell` what is known by `block`, which is the earlier block with more text.
    pub(crate) fn read(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) {
        match self {
            Self::None => {}
            Self::Tagged(tagged) => tagged.read(block, tools, tell),
            Self::Gemma(gemma) => gemma.read(block, tools, tell),
            Self::Python(python) => python.read(block, tools, tell),
        }
    }
}
