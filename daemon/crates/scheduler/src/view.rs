//! What the scheduler is shown before it decides: the budget, the models and what things cost.

use crate::promise::{Promise, slack_us};
use crate::sequence::ModelId;

/// What sequences and passes cost in bytes of the budget.
pub trait Costs {
    /// Bytes of the KV pages and states of a sequence with so many positions, rounded as the ledger
    /// rounds them.
    ///
    /// Must not fall where `positions` rises.
    fn kv_bytes(&self, model: ModelId, positions: u32) -> u64;

    /// Bytes of the scratch of a pass of so many rows that computes the logits of `outputs` rows at
    /// a time.
    ///
    /// Must not fall where `rows` or `outputs` rises. Both are at least 1.
    fn scratch_bytes(&self, model: ModelId, rows: u32, outputs: u32) -> u64;
}

/// A model as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelView {
    /// Id of the model.
    pub model: ModelId,
    /// Bytes of the largest of its segments that is not pinned: one at a time must be resident.
    pub segment_bytes: u64,
    /// Rows of one pass at most; at least 1.
    pub rows_max: u32,
    /// Rows of prompts in a pass while other sequences decode; at least 1. It limits the time
    /// between tokens.
    pub shared_rows: u32,
    /// Rows of logits that are computed at a time at most; at least 1.
    pub outputs_max: u32,
    /// Whether all its segments can be resident at once. If not, each of its passes uploads what is
    /// absent.
    pub fits: bool,
    /// Bytes that its next pass uploads beyond what each of its passes uploads.
    pub switch_bytes: u64,
    /// Whether its suspended pass waits for an upload, so that it cannot go on yet.
    pub waits: bool,
    /// Microseconds of the longest part of its next pass, or of its suspended one, that cannot be
    /// stopped, as far as that is known.
    pub piece_us: u64,
    /// Promises to the model's running sequences.
    pub promise: Option<Promise>,
}

/// What the scheduler is shown.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Bytes of the budget.
    pub budget_bytes: u64,
    /// Bytes of it that no sequence can have: pinned weights, the block that the device keeps for
    /// itself.
    pub held_bytes: u64,
    /// Bytes of weights that are not evicted while sequences run that were promised a gap. What
    /// runs alone need not leave room for them.
    pub kept_bytes: u64,
    /// Views of models, at least of those that have sequences.
    pub models: &'a [ModelView],
    /// What sequences and passes cost.
    pub costs: &'a dyn Costs,
    /// Sequences of one pass at most; at least 1.
    pub spans_max: u32,
    /// Upload rate of the link, in bytes per millisecond.
    pub link_bytes_per_ms: u64,
    /// Bytes that a further pass may take beside the suspended ones: for its scratch, its largest
    /// segment and the KV pages of its rows. Not looked at while no pass is suspended.
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
    /// A model that has sequences.
    ///
    /// # Panics
    /// It is not among the models: the engine forgot one.
    pub(crate) fn model(&self, model: ModelId) -> &ModelView {
        self.models
            .iter()
            .find(|m| m.model == model)
            .expect("the view has every model that has sequences")
    }

    /// Microseconds of the upload that a switch to this model takes.
    pub(crate) fn switch_us(&self, model: ModelId, most: u64) -> u64 {
        let bytes = self.model(model).switch_bytes.saturating_mul(1000);
        bytes.div_ceil(self.link_bytes_per_ms.max(1)).min(most)
    }
}

impl View<'_> {
    /// Microseconds that may pass before a promised pass of another model than this one has to
    /// begin; `None` if there is none that can run.
    #[must_use]
    pub fn slack_us(&self, except: ModelId) -> Option<u64> {
        slack_us(self.promises(except))
    }

    /// The slack right after all promised requests had their tokens: the longest that it ever is.
    #[must_use]
    pub fn slack_most_us(&self, except: ModelId) -> Option<u64> {
        slack_us(self.promises(except).map(|p| Promise {
            due_us: p.gap_us,
            ..p
        }))
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
