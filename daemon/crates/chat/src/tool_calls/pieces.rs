//! Which forms of calls can be streamed as they come, and by what they are read.

use super::heads::Heads;

/// How calls are streamed as they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pieces {
    /// Calls are not given in pieces.
    None,
    /// Arguments are JSON text, which is told as it stands.
    Text(Heads),
    /// Parameters stand between tags; or it is JSON objects.
    Tags,
    /// Arguments are written in another way than JSON.
    Written(Notation),
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
