//! What can go wrong, with the numbers that say what to do about it.

use crate::{ModelId, SegmentId};

/// A refusal. Nothing was changed and no action was emitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model was never registered, or was unregistered.
    #[error("{0} is not registered")]
    UnknownModel(ModelId),
    /// The model has fewer segments.
    #[error("{segment} does not exist: the model has {segments}")]
    UnknownSegment {
        /// The segment that was requested.
        segment: SegmentId,
        /// Number of the model's segments.
        segments: u32,
    },
    /// The number is taken.
    #[error("{0} is already registered: unregister it first")]
    AlreadyRegistered(ModelId),
    /// A list or a size outside the limits of this crate.
    #[error("{what} is {value}, outside 1 to {max}")]
    OutOfRange {
        /// Name of the value.
        what: &'static str,
        /// The rejected value.
        value: u64,
        /// The named maximum.
        max: u64,
    },
    /// No release of anything would make room: the budget, less what is pinned, is
    /// smaller than the request.
    #[error(
        "{need} bytes can never fit: the budget is {budget} bytes, of which {pinned} are pinned; raise the budget{}",
        if *.pinned > 0 { " or unpin something" } else { "" }
    )]
    NeverFits {
        /// Bytes asked for, rounded to the alignment.
        need: u64,
        /// The budget.
        budget: u64,
        /// Bytes of all pinned segments.
        pinned: u64,
    },
    /// Everything that is in the way is in use now: wait for an upload or a release, then ask
    /// again.
    #[error(
        "no room for {need} bytes in one piece now: the longest has {available} of a budget of {budget} bytes \
         (in use {in_use}, in flight {in_flight}, pinned {pinned}, KV, scratch and staging {blocks}); \
         try again when a running request has ended"
    )]
    NoRoom {
        /// Bytes asked for, rounded to the alignment.
        need: u64,
        /// The longest contiguous range that evicting everything evictable would give.
        available: u64,
        /// The budget.
        budget: u64,
        /// Resident bytes that passes hold.
        in_use: u64,
        /// Bytes of uploads under way.
        in_flight: u64,
        /// Resident bytes that are pinned, in use or not.
        pinned: u64,
        /// Bytes of blocks.
        blocks: u64,
    },
    /// The model cannot go while something of it is held.
    #[error(
        "{model} is busy: {in_use} segments in use, {in_flight} in flight, {blocks} blocks; retry when its requests are done"
    )]
    Busy {
        /// The model that is busy.
        model: ModelId,
        /// Segments that passes hold.
        in_use: u32,
        /// Segments whose upload is under way.
        in_flight: u32,
        /// Blocks that it owns.
        blocks: u32,
    },
    /// The model cannot go while it is pinned.
    #[error("{model} has {segments} pinned segments: unpin it first")]
    Pinned {
        /// The model that is pinned.
        model: ModelId,
        /// Number of pinned segments.
        segments: u32,
    },
}
