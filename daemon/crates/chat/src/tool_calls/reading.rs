//! What is known of calls while their block still comes, in forms whose arguments are not JSON.
//!
//! *Invariant:* what is told of a call's arguments is a beginning of what the form's parser makes
//! of the block, if it takes it, whatever follows (tests
//! `pieces_make_the_whole_however_a_text_is_split`,
//! `notations_in_values_are_read_as_the_parser_reads_them`). Where that cannot be known, nothing
//! more is told. Of a block that the parser refuses (Gemma 4, LFM2) what was told stays, and the
//! call that broke it is no object.

use serde_json::Value;

use super::forms::Pieces;
use super::gemma;
use super::python::coming as python;
use super::tagged::coming::Tagged;

/// Longest name, and what stands around it, that is waited for; what is longer only the whole
/// block tells.
pub(crate) const NAME_MAX_BYTES: usize = 256;

/// The next piece of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// A call of this tool begins.
    Call(String),
    /// More of its arguments, as JSON.
    More(String),
    /// The call's arguments are complete.
    End,
}

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

/// How calls are written that are read while they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notation {
    /// `<invoke name="f">`, with a prefix in each tag.
    Invokes(&'static str),
    /// Gemma's.
    Gemma,
    /// Python's.
    Python,
}

/// The JSON of a call's arguments, written as its parts are known.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// Keys so far; the first of a name counts.
    keys: Vec<String>,
}

impl Arguments {
    /// A call begins. Its arguments are never told as nothing, which may pass for an empty object.
    pub(crate) fn begin(&mut self, name: &str, tell: &mut Vec<Known>) {
        self.keys.clear();
        tell.push(Known::Call(name.to_owned()));
        tell.push(Known::More("{".to_owned()));
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|known| known == key)
    }

    /// A key, and what stands before its value.
    pub(crate) fn key(&mut self, key: &str, tell: &mut Vec<Known>) {
        let before = if self.keys.is_empty() { "" } else { "," };
        tell.push(Known::More(format!("{before}{}:", Value::from(key))));
        self.keys.push(key.to_owned());
    }

    /// The end of the object.
    pub(crate) fn end(&mut self, tell: &mut Vec<Known>) {
        tell.extend([Known::More("}".to_owned()), Known::End]);
    }
}

/// `text` as a part of a text in JSON.
pub(crate) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
