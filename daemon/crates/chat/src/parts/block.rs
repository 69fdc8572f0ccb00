//! Progress of reading a block of tool calls.

/// Result of reading more of a block of tool calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// The bytes may continue the block.
    More,
    /// The block has no call that can be given in pieces, from its start on.
    Whole,
    /// The block has ended; this text follows it, or is the text of calls that have to be parsed as
    /// a whole.
    Ended(String),
}
