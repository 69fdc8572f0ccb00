//! Which model's turn it is: the one that is furthest behind, once it is further behind than a
//! switch to it costs.
//!
//! A model's *service* counts the passes that it had, long ones more. The next pass is of the model
//! with the least sum of its service, what a switch to it has to upload (in passes), and, if only
//! batch sequences have something to compute there, a lag. So resident models take turns pass by
//! pass, and models that push each other out take turns whose length follows from what they upload.
//! A model that is passed over too often has its turn whatever it costs.

use std::collections::BTreeMap;

use crate::config::Config;
use crate::sequence::ModelId;
use crate::view::View;

/// Rows of a pass that count as another pass.
const ROWS_PER_PASS: u32 = 128;

/// A model that has something to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) model: ModelId,
    /// Whether an interactive sequence of it has.
    pub(crate) interactive: bool,
}

/// What a model had.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    service: u64,
    /// The number of the last pass at which it was a candidate.
    seen_at: u64,
    /// The number of its last pass, or of the first one for which it was a candidate since.
    since: u64,
}

/// The turns of the models.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    turns: BTreeMap<ModelId, Turn>,
    /// The service that the model of the last pass had before it: where newcomers start.
    time: u64,
    /// The model of the last pass.
    last: Option<ModelId>,
}

impl Turns {
    /// A model is no more.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.turns.remove(&model);
        if self.last == Some(model) {
            self.last = None;
        }
    }

    /// Nothing is to be computed, so nobody is behind.
    pub(crate) fn idle(&mut self) {
        self.turns.clear();
        self.time = 0;
    }

    /// Notes who is a candidate for pass number `pass`, so that nobody saves up turns while he has
    /// no use for them.
    pub(crate) fn note(&mut self, candidates: &[Candidate], pass: u64) {
        for candidate in candidates {
            let turn = self.turns.entry(candidate.model).or_default();
            if turn.seen_at + 1 < pass || turn.seen_at == 0 {
                turn.service = turn.service.max(self.time);
                turn.since = pass;
            }
            turn.seen_at = pass;
        }
    }

    /// Whose turn pass number `pass` is; `ahead` is what one of them is taken to have had beyond
    /// its service.
    pub(crate) fn pick(
        &self,
        candidates: &[Candidate],
        pass: u64,
        ahead: Option<(ModelId, u64)>,
        (view, config): (&View<'_>, &Config),
    ) -> Option<ModelId> {
        let key = |c: &Candidate| {
            let turn = self.turns.get(&c.model).copied().unwrap_or_default();
            let extra = ahead.filter(|a| a.0 == c.model).map(|a| a.1);
            let waited = pass.saturating_sub(turn.since);
            let overdue = extra.is_none() && waited >= config.model_patience_passes;
            let stays = match ahead {
                Some((model, _)) => model == c.model,
                None => self.last == Some(c.model),
            };
            let switch = match stays {
                true => 0,
                false => view.switch_passes(c.model, config.switch_passes_max),
            };
            let lag = match c.interactive {
                true => 0,
                false => config.batch_lag_passes,
            };
            let service = turn.service + extra.unwrap_or(0) + switch + lag;
            let order = if overdue { turn.since } else { service };
            (!overdue, order, turn.since, c.model)
        };
        candidates.iter().min_by_key(|c| key(c)).map(|c| c.model)
    }

    /// What a pass of so many rows counts.
    pub(crate) fn cost(rows: u32) -> u64 {
        u64::from(1 + rows / ROWS_PER_PASS)
    }

    /// Pass number `pass` is of this model and has so many rows.
    pub(crate) fn charge(&mut self, model: ModelId, rows: u32, pass: u64) {
        let turn = self.turns.entry(model).or_default();
        self.time = self.time.max(turn.service);
        turn.service += Turns::cost(rows);
        turn.since = pass;
        self.last = Some(model);
    }
}
