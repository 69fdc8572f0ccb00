//! The cache's records of segments, models and blocks, and their share in the ledger.

use std::collections::BTreeSet;

use crate::forecast::{History, Score};
use crate::stream_order::StreamOrder;
use crate::{BlockKind, Counters, ModelId, SegmentSpec, SegmentState, Slab, Usage};

/// Role of a segment in a group of segments of the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The segment is in no group.
    Alone,
    /// The segment holds the slab that the group shares.
    Holder,
    /// The segment uses the holder's slab.
    Borrower,
}

#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) spec: SegmentSpec,
    /// Length of the segment's slab in bytes: `spec.bytes` rounded up to the alignment.
    pub(crate) bytes: u64,
    pub(crate) state: SegmentState,
    pub(crate) refs: u32,
    pub(crate) pinned: bool,
    pub(crate) role: Role,
    /// Number of borrowers of the slab that are in use.
    pub(crate) lent_refs: u32,
    /// Number of borrowers of the slab that are pinned.
    pub(crate) lent_pins: u32,
    /// Whether the segment was uploaded by a prefetch and has not been acquired since.
    pub(crate) fresh: bool,
    /// For experts: index of the pass's next segment at the last use, which shows where the
    /// expert's layer lies.
    pub(crate) place: u32,
    /// For experts: score of recency and frequency.
    pub(crate) score: Score,
}

impl Segment {
    pub(crate) fn is_idle(&self) -> bool {
        self.role != Role::Borrower
            && self.refs + self.lent_refs == 0
            && matches!(self.state, SegmentState::Resident(_))
    }

    pub(crate) fn is_evictable(&self) -> bool {
        self.is_idle() && !self.stays()
    }

    /// Whether the segment, or a borrower of its slab, is pinned.
    pub(crate) fn stays(&self) -> bool {
        self.pinned || self.lent_pins > 0
    }
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) segments: Vec<Segment>,
    /// Indices of the segments that are not experts.
    pub(crate) ordered: Vec<u32>,
    pub(crate) sizes: StreamOrder,
    /// Experts that hold a slab, by score, the coldest first.
    pub(crate) experts: BTreeSet<(u64, u32)>,
    pub(crate) bytes: u64,
    pub(crate) usage: Usage,
    pub(crate) counters: Counters,
    /// Number of segments that are in use.
    pub(crate) held: u32,
    /// Number of uploads, evictions and moves of the model's segments so far.
    pub(crate) changes: u64,
    pub(crate) blocks: u32,
    /// Index of the segment that the current pass uses next.
    pub(crate) cursor: Option<u32>,
    /// Whether the pass under way uses nearly all experts, so that experts of its later layers
    /// count as needed.
    pub(crate) uses_all_experts: bool,
    /// Whether the current pass has used its tied segments for the second time.
    pub(crate) tied_done: bool,
    /// Whether another pass of the model is expected soon.
    pub(crate) expects_next_pass: bool,
    /// Whether a request of the model has begun and not ended.
    pub(crate) in_request: bool,
    pub(crate) requests: u64,
    pub(crate) passes: u64,
    /// Number of passes before the last request.
    pub(crate) passes_before: u64,
    /// Pass clock at the begin of the last pass.
    pub(crate) begun: u64,
    pub(crate) history: History,
    /// The model's place in the order of models that requests wait for; `None` if none waits for
    /// it.
    pub(crate) awaited: Option<u32>,
    /// Whether the model's segments are evicted only if nothing else can be (promised gaps).
    pub(crate) kept: bool,
}

impl Model {
    pub(crate) fn has_experts(&self) -> bool {
        self.ordered.len() < self.segments.len()
    }
}

pub(crate) struct Block {
    pub(crate) kind: BlockKind,
    pub(crate) owner: Option<ModelId>,
    pub(crate) slab: Slab,
}

/// Adds (`sign` 1) or subtracts (-1) a segment's bytes in the sum over all models, in which a
/// shared slab counts once.
pub(crate) fn tally_total(usage: &mut Usage, found: &Segment, sign: i64) {
    if found.role != Role::Borrower {
        return tally(usage, found, sign);
    }
    let add = |sum: &mut u64, value: u64| *sum = sum.wrapping_add_signed(sign * value as i64);
    if matches!(found.state, SegmentState::Resident(_)) {
        add(&mut usage.borrowed, found.bytes);
    }
    if found.pinned {
        add(&mut usage.segments_pinned, 1);
    }
}

/// Adds (`sign` 1) or subtracts (-1) a segment's bytes in its model's sum.
pub(crate) fn tally(usage: &mut Usage, found: &Segment, sign: i64) {
    let add = |sum: &mut u64, value: u64| *sum = sum.wrapping_add_signed(sign * value as i64);
    match found.state {
        SegmentState::Absent => {}
        SegmentState::InFlight(_) => {
            add(&mut usage.in_flight, found.bytes);
            add(&mut usage.segments_in_flight, 1);
        }
        SegmentState::Resident(_) => {
            add(&mut usage.resident, found.bytes);
            add(&mut usage.segments_resident, 1);
            if found.refs + found.lent_refs > 0 {
                add(&mut usage.in_use, found.bytes);
            }
            if found.stays() {
                add(&mut usage.pinned, found.bytes);
            }
            if found.role == Role::Borrower {
                add(&mut usage.borrowed, found.bytes);
            }
        }
    }
    if found.pinned {
        add(&mut usage.segments_pinned, 1);
    }
}
