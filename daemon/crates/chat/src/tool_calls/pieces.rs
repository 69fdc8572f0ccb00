//! Which formats of calls can be streamed, and which reader they need.

use super::heads::Heads;

/// How calls are streamed as they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pieces {
    /// Calls are only given whole.
    None,
    /// Arguments are JSON text, which is sent as written.
    Text(Heads),
    /// Parameters are between tags, or calls are JSON objects.
    Tags,
    /// Arguments are in a notation other than JSON.
    Written(Notation),
}

/// Notations of calls that can be streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notation {
    /// `<invoke name="f">`, with a prefix in each tag.
    Invokes(&'static str),
    /// Gemma's notation.
    Gemma,
    /// Python's notation.
    Python,
}
