//! Lets passes with promised tokens go first when they would be late otherwise, and reserves a pass
//! and memory for them beside others ([`crate::promise`]).

use crate::config::Config;
use crate::promise::{Promise, slack_us};
use crate::scheduler::Scheduler;
use crate::sequence::{ModelId, Sequence};
use crate::turns::Candidate;
use crate::view::View;

impl Scheduler {
    /// Maximum number of models whose sequences may be promised gaps at the same time, so that each
    /// of their passes can run beside those of others.
    #[must_use]
    pub fn promising_models_max(config: &Config) -> usize {
        config.passes_max - 1
    }

    /// The model to run when it is `model`'s turn: that one, or a model whose promised tokens would
    /// be late behind one uninterruptible piece of it.
    pub(crate) fn before_promises(
        &self,
        model: ModelId,
        able: &[Candidate],
        view: &View<'_>,
    ) -> ModelId {
        if !view.has_promises() {
            return model;
        }
        let is_able = |model: ModelId| able.iter().any(|c| c.model == model);
        let of_able = view.models.iter().filter(|m| is_able(m.model));
        let promised = of_able.filter_map(|m| Some((m.promise?, m.model)));
        let others = promised.clone().filter(|(_, other)| *other != model);
        let Some(slack) = slack_us(others.clone().map(|(promise, _)| promise)) else {
            return model;
        };
        let own = view.model(model);
        if own.piece_us <= slack {
            return model;
        }
        // Behind promises that cannot be held it would be passed over without end.
        if self.turns.is_passed_over_too_long(model, &self.config) {
            return model;
        }
        // What fits into no slack would be put off for ever, and the promise be broken all the
        // same: the turns stand.
        let most = slack_us(others.map(|(promise, _)| Promise {
            due_us: promise.gap_us,
            ..promise
        }));
        if most.is_some_and(|most| own.piece_us > most) {
            return model;
        }
        let first = promised.min_by_key(|(promise, model)| (promise.due_us, *model));
        first.map_or(model, |(_, first)| first)
    }

    /// Number of promised passes of other models that may have to begin beside a pass of this one,
    /// and the bytes that the largest of them needs.
    pub(crate) fn promised_beside(&self, model: ModelId, view: &View<'_>) -> (usize, u64) {
        let others = view
            .models
            .iter()
            .filter(|m| m.promise.is_some() && m.model != model && !self.is_suspended(m.model));
        let bytes = others.clone().map(|m| {
            let decodes = |s: &&Sequence| s.arrival.model == m.model;
            let rows = self.running_sequences().filter(decodes).count() as u32;
            let rows = rows.clamp(1, m.rows_max.max(1));
            let outputs = rows.min(m.outputs_max.max(1));
            m.segment_bytes + view.costs.scratch_bytes(m.model, rows, outputs)
        });
        (others.count(), bytes.max().unwrap_or(0))
    }
}
