//! Errors of the cache, with the numbers that say what to do about them.

use crate::{ModelId, SegmentId};

/// An error of the cache. Nothing was changed and no action was emitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model was never registered, or was unregistered.
    #[error("{0} is not registered")]
    UnknownModel(ModelId),
    /// The model has no segment with this index.
    #[error("{segment} does not exist: the model has {segments}")]
    UnknownSegment {
        /// The segment that was requested.
        segment: SegmentId,
        /// Number of the model's segments.
        segments: u32,
    },
    /// A model with this id is registered already.
    #[error("{0} is already registered: unregister it first")]
    AlreadyRegistered(ModelId),
    /// A list or a size outside the limits of this crate.
    #[error("{what} is {value}, outside 1 to {max}")]
    OutOfRange {
        /// Name of the rejected value.
        what: &'static str,
        /// The rejected value.
        value: u64,
        /// Maximum of the value.
        max: u64,
    },
    /// No release would make enough room: the budget without pinned segments is smaller than the
    /// request.
    #[error(
        "{need} bytes can never fit: the budget is {budget} bytes, of which {pinned} are pinned; raise the budget{}",
        if *.pinned > 0 { " or unpin something" } else { "" }
    )]
    NeverFits {
        /// Bytes requested, rounded up to the alignment.
        need: u64,
        /// The budget in bytes.
        budget: u64,
        /// Bytes of all pinned segments.
        pinned: u64,
    },
    /// Everything in the way is in use now: wait for an upload or a release, then retry.
    #[error(
        "no room for {need} bytes in one piece now: the longest has {available} of a budget of {budget} bytes \
         (in use {in_use}, in flight {in_flight}, pinned {pinned}, KV, scratch and staging {blocks}); \
         try again when a running request has ended"
    )]
    NoRoom {
        /// Bytes requested, rounded up to the alignment.
        need: u64,
        /// The longest contiguous range that evicting everything evictable would give.
        available: u64,
        /// The budget in bytes.
        budget: u64,
        /// Bytes of resident segments that passes use.
        in_use: u64,
        /// Bytes of segments in flight.
        in_flight: u64,
        /// Bytes of resident pinned segments, in use or not.
        pinned: u64,
        /// Bytes of all blocks.
        blocks: u64,
    },
    /// The model cannot be unregistered while a segment is in use or in flight, or it owns a block.
    #[error(
        "{model} is busy: {in_use} segments in use, {in_flight} in flight, {blocks} blocks; retry when its requests are done"
    )]
    Busy {
        /// The model that is busy.
        model: ModelId,
        /// Number of the model's segments that passes use.
        in_use: u32,
        /// Number of the model's segments in flight.
        in_flight: u32,
        /// Number of blocks that the model owns.
        blocks: u32,
    },
    /// The model cannot be unregistered while segments of it are pinned.
    #[error("{model} has {segments} pinned segments: unpin it first")]
    Pinned {
        /// The model that is pinned.
        model: ModelId,
        /// Number of pinned segments.
        segments: u32,
    },
}
