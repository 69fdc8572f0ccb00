//! What the scheduler answers: what has changed for sequences, and the next pass.

use crate::error::Refusal;
use crate::sequence::{ModelId, SeqId};

/// What was decided about a sequence, to be carried out in the order of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The sequence runs from now on. If computed positions can be reused,
    /// [`crate::Scheduler::reused`] is called before the next pass is asked for.
    Admitted(SeqId),
    /// The sequence is preempted: its KV cache is returned, and it continues later with its tokens.
    Yielded(SeqId),
    /// The sequence ends: it cannot run. The scheduler has forgotten it.
    Refused {
        /// The sequence that is rejected.
        seq: SeqId,
        /// The reason.
        why: Refusal,
    },
    /// The sequence ends: its deadline is over. The scheduler has forgotten it.
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

/// A pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassPlan {
    /// The model.
    pub model: ModelId,
    /// Sequences that decode, then those whose prompt is computed.
    pub spans: Vec<SpanPlan>,
    /// How many of the spans decode: each is one row and its drafts.
    pub decode_spans: usize,
    /// Rows of all spans.
    pub rows: u32,
    /// Rows of logits that the scratch holds at a time; at least 1.
    pub outputs_at_a_time: u32,
    /// Bytes of the scratch.
    pub scratch_bytes: u64,
    /// Bytes that scratch may have: a block that is already taken can be kept if it is no larger.
    pub scratch_bytes_max: u64,
    /// The next pass is expected to be of this model, too.
    pub expects_next: bool,
}

/// What runs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A pass begins.
    Pass(PassPlan),
    /// The suspended pass of this model goes on.
    GoOn(ModelId),
}

/// What a pass did for one of its spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanResult {
    /// The sequence of the span.
    pub seq: SeqId,
    /// Rows whose KV counts: all, or, where drafts were wrong, those up to the last right one.
    pub rows: u32,
    /// Tokens that are known now beyond those before.
    pub appended: u32,
    /// Whether the sequence is over; the scheduler forgets it.
    pub ended: bool,
}
