//! The scheduler's results: changes of sequences, and the next pass.

use crate::error::Refusal;
use crate::sequence::{ModelId, SeqId};

/// A change of a sequence that the engine has to carry out, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The sequence runs from now on. If computed positions can be reused,
    /// [`crate::Scheduler::reused`] is called before the next pass is asked for.
    Admitted(SeqId),
    /// The sequence is preempted: the engine frees its KV cache and keeps its tokens, and it is
    /// resumed later.
    Yielded(SeqId),
    /// The sequence ends: it cannot run. The scheduler has forgotten it.
    Refused {
        /// The sequence that is rejected.
        seq: SeqId,
        /// The reason.
        why: Refusal,
    },
    /// The sequence ends: its deadline has passed. The scheduler has forgotten it.
    Expired(SeqId),
}

/// The rows of one sequence in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanPlan {
    /// The sequence of the rows.
    pub seq: SeqId,
    /// The position of the first row.
    pub first_position: u32,
    /// Number of rows; rows beyond the known tokens are draft tokens.
    pub rows: u32,
    /// Number of last rows whose logits are wanted.
    pub outputs: u32,
}

/// The plan of a pass: the rows of its sequences, and its scratch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassPlan {
    /// The model that the pass runs.
    pub model: ModelId,
    /// Spans of the sequences that decode, then of those whose prompt is computed.
    pub spans: Vec<SpanPlan>,
    /// Number of spans that decode: each has one row and draft tokens.
    pub decode_spans: usize,
    /// Number of rows of all spans.
    pub rows: u32,
    /// Maximum number of rows whose logits the scratch holds at a time; at least 1.
    pub outputs_at_a_time: u32,
    /// Bytes of the pass's scratch.
    pub scratch_bytes: u64,
    /// Maximum bytes of the scratch: an allocated block up to this size can be reused.
    pub scratch_bytes_max: u64,
    /// Whether the next pass is expected to be of this model, too.
    pub expects_next: bool,
}

/// What the engine runs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A pass begins.
    Pass(PassPlan),
    /// The suspended pass of this model continues.
    GoOn(ModelId),
}

/// What a pass computed of one of its spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanResult {
    /// The sequence of the span.
    pub seq: SeqId,
    /// Number of rows whose KV is valid: all, or up to the last accepted draft token.
    pub rows: u32,
    /// Number of tokens that became known by the pass.
    pub appended: u32,
    /// Whether the sequence is over; the scheduler forgets it.
    pub ended: bool,
}
