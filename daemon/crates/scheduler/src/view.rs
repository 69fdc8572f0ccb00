//! The state that the scheduler decides on: the budget, the models, and the sizes of sequences and
//! passes.

use crate::promise::{Promise, slack_us};
use crate::sequence::ModelId;

/// Bytes of the budget that sequences and passes need.
pub trait Costs {
    /// Bytes of the KV pages and states of a sequence with `positions` positions, rounded as the
    /// ledger rounds them.
    ///
    /// Must not fall where `positions` rises.
    fn kv_bytes(&self, model: ModelId, positions: u32) -> u64;

    /// Bytes of the scratch of a pass of `rows` rows that computes the logits of `outputs` rows at
    /// a time.
    ///
    /// Must not fall where `rows` or `outputs` rises. Both are at least 1.
    fn scratch_bytes(&self, model: ModelId, rows: u32, outputs: u32) -> u64;
}

/// A model's present state, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelView {
    /// Id of the model.
    pub model: ModelId,
    /// Bytes of the model's largest segment that is not pinned: one such segment at a time must be
    /// resident.
    pub segment_bytes: u64,
    /// Maximum number of rows of one pass; at least 1.
    pub rows_max: u32,
    /// Maximum number of prompt rows in a pass while other sequences decode; at least 1. It bounds
    /// the time between tokens.
    pub shared_rows: u32,
    /// Maximum number of rows whose logits are computed at a time; at least 1.
    pub outputs_max: u32,
    /// Whether all of the model's segments can be resident at once. If not, each of its passes
    /// uploads what is absent.
    pub fits: bool,
    /// Bytes that the model's next pass uploads beyond what each of its passes uploads.
    pub switch_bytes: u64,
    /// Whether the model's suspended pass waits for an upload, so that it cannot continue yet.
    pub waits: bool,
    /// Microseconds of the longest uninterruptible part of the model's next or suspended pass, if
    /// known, else 0.
    pub piece_us: u64,
    /// Promises to the model's running sequences.
    pub promise: Option<Promise>,
}

/// The state that the scheduler decides on.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The budget in bytes.
    pub budget_bytes: u64,
    /// Bytes of the budget that no sequence can have: pinned weights and the device's own block.
    pub held_bytes: u64,
    /// Bytes of weights that stay resident while sequences with a promised gap run. A sequence that
    /// runs alone need not leave room for them.
    pub kept_bytes: u64,
    /// Views of models, at least of those that have sequences.
    pub models: &'a [ModelView],
    /// Sizes of sequences and passes.
    pub costs: &'a dyn Costs,
    /// Maximum number of sequences in one pass; at least 1.
    pub spans_max: u32,
    /// Upload rate of the link, in bytes per millisecond.
    pub link_bytes_per_ms: u64,
    /// Bytes that a further pass may take beside the suspended ones, for its scratch, its largest
    /// segment and its KV pages. Not used while no pass is suspended.
    pub beside_bytes: u64,
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View")
            .field("budget_bytes", &self.budget_bytes)
            .field("held_bytes", &self.held_bytes)
            .field("kept_bytes", &self.kept_bytes)
            .field("models", &self.models)
            .field("spans_max", &self.spans_max)
            .finish_non_exhaustive()
    }
}

impl View<'_> {
    /// The view of a model that has sequences.
    ///
    /// # Panics
    /// The model is not in `models`: the engine forgot it.
    pub(crate) fn model(&self, model: ModelId) -> &ModelView {
        self.models
            .iter()
            .find(|m| m.model == model)
            .expect("the view has every model that has sequences")
    }

    /// Microseconds of the upload that a switch to this model needs, at most `most`.
    pub(crate) fn switch_us(&self, model: ModelId, most: u64) -> u64 {
        let bytes = self.model(model).switch_bytes.saturating_mul(1000);
        bytes.div_ceil(self.link_bytes_per_ms.max(1)).min(most)
    }
}

impl View<'_> {
    /// Microseconds until a promised pass of any model but `except` has to begin; `None` if no such
    /// pass can run.
    #[must_use]
    pub fn slack_us(&self, except: ModelId) -> Option<u64> {
        slack_us(self.promises(except))
    }

    fn promises(&self, except: ModelId) -> impl Iterator<Item = Promise> {
        let others = self
            .models
            .iter()
            .filter(move |m| m.model != except && !m.waits);
        others.filter_map(|m| m.promise)
    }

    /// Whether any model has promises.
    pub(crate) fn has_promises(&self) -> bool {
        self.models.iter().any(|m| m.promise.is_some())
    }
}
