//! How far a block of calls has come.

/// What came of the text so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// The bytes may continue the block.
    More,
    /// The block has no call that can be given in pieces, from its start on.
    Whole,
    /// The block has ended. What is left of the text comes behind it, but for the text of calls
    /// that have to be read as a whole.
    Ended(String),
}
