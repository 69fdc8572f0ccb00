//! What is kept of each segment, model and block, and what a segment counts for in the ledger.

use std::collections::BTreeSet;

use crate::forecast::{History, Score};
use crate::stream_order::StreamOrder;
use crate::{BlockKind, Counters, ModelId, SegmentSpec, SegmentState, Slab, Usage};

/// What a segment is in a group of the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The segment is in no group.
    Alone,
    /// The segment's slab is that of others too.
    Holder,
    /// The segment uses the slab of another one.
    Borrower,
}

#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) spec: SegmentSpec,
    /// Length of its slab: `spec.bytes` rounded to the alignment.
    pub(crate) bytes: u64,
    pub(crate) state: SegmentState,
    pub(crate) refs: u32,
    pub(crate) pinned: bool,
    pub(crate) role: Role,
    /// Borrowers of its slab that are in use.
    pub(crate) lent_refs: u32,
    /// Borrowers of its slab that are pinned.
    pub(crate) lent_pins: u32,
    /// A prefetch uploaded it and no acquire has used it yet.
    pub(crate) fresh: bool,
    /// Experts only: the next index of the pass when it was used last, which
    /// says where its layer lies.
    pub(crate) place: u32,
    /// Experts only.
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
    /// Experts that hold a slab, the coldest first.
    pub(crate) experts: BTreeSet<(u64, u32)>,
    pub(crate) bytes: u64,
    pub(crate) usage: Usage,
    pub(crate) counters: Counters,
    /// How many segments have references.
    pub(crate) held: u32,
    /// Counts what became resident, went, or moved.
    pub(crate) changes: u64,
    pub(crate) blocks: u32,
    /// The next index that the pass under way will use.
    pub(crate) cursor: Option<u32>,
    /// Whether the pass under way uses nearly all experts, so that experts of its later layers
    /// count as needed.
    pub(crate) uses_all_experts: bool,
    /// The pass under way has used its tied segments for the second time.
    pub(crate) tied_done: bool,
    /// Another pass is expected soon.
    pub(crate) expects_next_pass: bool,
    /// A request began and has not ended: it is in a pass, or expects one.
    pub(crate) in_request: bool,
    pub(crate) requests: u64,
    pub(crate) passes: u64,
    /// Passes before the last request.
    pub(crate) passes_before: u64,
    /// The pass clock when the last pass began.
    pub(crate) begun: u64,
    pub(crate) history: History,
    /// The model's place among the models that requests wait for.
    pub(crate) awaited: Option<u32>,
    /// Whether the model's segments are evicted only where nothing else can be (promised gaps).
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

/// Adds (`sign` 1) or takes away (-1) what a segment counts for in the sum of all models, where
/// bytes of a slab count once.
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

/// Adds (`sign` 1) or takes away (-1) what a segment counts for in its model.
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
