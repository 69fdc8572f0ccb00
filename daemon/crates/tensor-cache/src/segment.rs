//! Types of the cache's interface: names of models, segments and blocks, the caller's arguments and
//! the results.

use std::fmt;

/// Id of a model, chosen by the engine. It may be reused after `unregister`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub u32);

/// A segment of a model: the unit that is uploaded and evicted whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId {
    /// The model that the segment belongs to.
    pub model: ModelId,
    /// Index of the segment in the order of a pass, and in the list given to `register`.
    pub index: u32,
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "model {}", self.0)
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {} of {}", self.index, self.model)
    }
}

/// Id of a block: memory that is not weights, reserved in the ledger. Never reused in the life of a
/// cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub(crate) u64);

/// What a block is used for; it only decides where its bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockKind {
    /// KV cache and states of sequences.
    Kv,
    /// Activations and other working memory.
    Scratch,
    /// Staging buffers for uploads.
    Staging,
}

/// A contiguous range of the arena, `offset .. offset + bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slab {
    /// First byte, counted from the start of the arena; a multiple of the alignment.
    pub offset: u64,
    /// Length: the size asked for, rounded up to the alignment.
    pub bytes: u64,
}

impl Slab {
    /// End of the slab: one past its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// How passes use a segment, and whether its place in a pass is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SegmentKind {
    /// Used once in every pass, in the order of the indices: a part of a layer, the output head.
    #[default]
    Ordered,
    /// Used at its index, and once more after the last segment: an embedding
    /// that is also the output head.
    OrderedTied,
    /// Used in some passes, as the router decides: evicted by recency and frequency.
    Expert,
}

/// Size and kind of a segment, as given to `register`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSpec {
    /// Size on the device in bytes, before rounding to the alignment. Not 0.
    pub bytes: u64,
    /// How passes use the segment.
    pub kind: SegmentKind,
}

impl SegmentSpec {
    /// A segment of `bytes` bytes that every pass uses at its place.
    pub fn ordered(bytes: u64) -> SegmentSpec {
        SegmentSpec {
            bytes,
            kind: SegmentKind::Ordered,
        }
    }

    /// A segment of `bytes` bytes that some passes use (an expert).
    pub fn expert(bytes: u64) -> SegmentSpec {
        SegmentSpec {
            bytes,
            kind: SegmentKind::Expert,
        }
    }
}

/// How the segments to evict are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The resident segment whose next use is farthest, by what is known of passes
    /// and predicted of requests.
    #[default]
    PassAware,
    /// The least recently used segment. For comparison: over a cycle larger
    /// than the cache it never hits.
    Lru,
}

/// Why a segment was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EvictionCause {
    /// A segment of another model took the segment's memory.
    OtherModel,
    /// A segment of the same model took the segment's memory: the model does not fit beside other
    /// memory in use.
    OwnPass,
    /// KV cache or states took the segment's memory.
    Kv,
    /// Scratch took the segment's memory.
    Scratch,
    /// The budget shrank.
    Budget,
    /// `clear` evicted the segment.
    Clear,
    /// The segment's model was unregistered.
    Unload,
    /// The segment's content turned out to be bad.
    Spoiled,
    /// A segment of another model has the same content: one slab is enough for both.
    Shared,
}

impl EvictionCause {
    /// All causes.
    pub const ALL: [EvictionCause; 9] = [
        EvictionCause::OtherModel,
        EvictionCause::OwnPass,
        EvictionCause::Kv,
        EvictionCause::Scratch,
        EvictionCause::Budget,
        EvictionCause::Clear,
        EvictionCause::Unload,
        EvictionCause::Spoiled,
        EvictionCause::Shared,
    ];

    /// The cause's name in logs, metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            EvictionCause::OtherModel => "other_model",
            EvictionCause::OwnPass => "own_pass",
            EvictionCause::Kv => "kv",
            EvictionCause::Scratch => "scratch",
            EvictionCause::Budget => "budget",
            EvictionCause::Clear => "clear",
            EvictionCause::Unload => "unload",
            EvictionCause::Spoiled => "spoiled",
            EvictionCause::Shared => "shared",
        }
    }
}

/// An action that the engine must carry out, in the order in which they were appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The segment is no longer on the device. Its slab is free once the event
    /// of its last use has passed.
    Evict {
        /// The segment that is evicted.
        segment: SegmentId,
        /// Slab of the segment before the eviction.
        slab: Slab,
        /// Cause of the eviction.
        cause: EvictionCause,
    },
    /// Copy an idle resident segment; the ranges may overlap (`memmove`). What ran before
    /// must have finished with `from`, and what is written later to the bytes of `from`
    /// must come after the copy.
    Move {
        /// The segment that moves.
        segment: SegmentId,
        /// Slab of the segment before the move.
        from: Slab,
        /// Slab of the segment after the move.
        to: Slab,
    },
    /// Upload the segment into the slab, then call `uploaded` or `upload_failed`.
    Upload {
        /// The segment that is uploaded.
        segment: SegmentId,
        /// Slab of the segment.
        slab: Slab,
    },
}

/// The result of `acquire`. In all three cases the segment is in use until `release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// The segment is resident.
    Resident(Slab),
    /// An upload that began earlier is in flight: wait for it.
    InFlight(Slab),
    /// An `Action::Upload` was emitted by this call: carry it out, then wait for it.
    Started(Slab),
}

impl Acquired {
    /// The slab of the segment, valid until `release`; its content is complete once the upload is.
    pub fn slab(&self) -> Slab {
        match *self {
            Acquired::Resident(slab) | Acquired::InFlight(slab) | Acquired::Started(slab) => slab,
        }
    }
}

/// What the engine knows about a pass when it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassHint {
    /// Another pass of this model is expected soon after this one: a decode step that is not the
    /// last, a prompt's chunk, another sequence of the same model. If that turns out wrong, call
    /// `request_end`.
    pub expects_next_pass: bool,
}

/// State of a segment: absent, in flight, or resident at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    /// The segment is not on the device.
    Absent,
    /// The segment is being uploaded into this slab.
    InFlight(Slab),
    /// The segment is on the device, in this slab.
    Resident(Slab),
}

impl SegmentState {
    /// The segment's slab, whether or not its upload is complete.
    pub fn slab(&self) -> Option<Slab> {
        match *self {
            SegmentState::Absent => None,
            SegmentState::InFlight(slab) | SegmentState::Resident(slab) => Some(slab),
        }
    }
}

/// The state of one segment, for status calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentStatus {
    /// Size of the segment in bytes, as registered.
    pub bytes: u64,
    /// How passes use the segment.
    pub kind: SegmentKind,
    /// Residency of the segment.
    pub residency: SegmentState,
    /// Number of references to the segment now.
    pub refs: u32,
    /// Whether the segment is pinned: it is not evicted.
    pub pinned: bool,
    /// Whether the segment shares the slab of another model's equal segment, or would when
    /// resident.
    pub borrowed: bool,
}

/// Why a segment stayed through `clear`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptBecause {
    /// A forward pass uses the segment.
    InUse,
    /// The segment's upload is in flight.
    InFlight,
    /// The segment is pinned.
    Pinned,
}

/// The result of `clear`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Bytes of the slabs that were evicted.
    pub freed: u64,
    /// Number of evicted segments.
    pub segments: u64,
    /// Segments that stayed resident, with the reason.
    pub kept: Vec<(SegmentId, KeptBecause)>,
}

/// The result of `set_budget`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetBudget {
    /// Whether everything now lies inside the new budget. If not, the rest follows as segments and
    /// blocks are released; call `finish_shrink` then.
    pub reached: bool,
    /// Bytes of the ledger in use now.
    pub used: u64,
}
