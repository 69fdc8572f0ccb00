//! Memory that sequences and passes need of the budget.
//!
//! One pass runs at a time, so its model's largest segment and its scratch are needed once, and the
//! KV of all running sequences. Scratch has an eighth of the budget; it gives way to KV, down to
//! passes of [`Config::least_rows`] rows.
//!
//! [`Config::least_rows`]: crate::Config::least_rows

use crate::error::Demand;
use crate::scheduler::Scheduler;
use crate::sequence::{ModelId, Sequence};
use crate::view::{ModelView, View};

/// Scratch usually has one part in this many of the budget.
const SCRATCH_PART: u64 = 8;

/// For how much scratch room is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScratchTarget {
    /// Scratch for passes of the usual length.
    Usual,
    /// Scratch for the shortest passes that are worth reading all weights.
    Least,
    /// Scratch for one row at a time, which lets running sequences come to their end.
    Single,
}

/// Number of rows of a pass, and number of its rows of logits that are computed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: u32,
    pub(crate) outputs: u32,
}

impl Shape {
    /// The longest pass of a model, not longer than this one, whose scratch takes at most `usual`
    /// bytes if that suffices for `least` rows, and at most `room` bytes if that suffices for one
    /// row.
    pub(crate) fn within(
        mut self,
        view: &View<'_>,
        model: &ModelView,
        least: u32,
        (usual, room): (u64, u64),
    ) -> Shape {
        let bytes = |rows, outputs| view.costs.scratch_bytes(model.model, rows, outputs);
        self.outputs = self.outputs.clamp(1, model.outputs_max.max(1));
        self.rows = self.rows.clamp(1, model.rows_max.max(1));
        let least = least.clamp(1, model.rows_max.max(1));
        let target = usual.max(bytes(least, 1)).min(room);
        // Logits are computed a few rows at a time before a pass becomes shorter: that reads the
        // head again, not all.
        let logits = |shape: Shape| bytes(shape.rows, shape.outputs) - bytes(shape.rows, 1);
        while self.outputs > 1
            && bytes(self.rows, self.outputs) > target
            && logits(self) > target / 4
        {
            self.outputs /= 2;
        }
        while self.rows > least && bytes(self.rows, self.outputs) > target {
            self.rows = (self.rows / 2).max(least);
        }
        while self.outputs > 1 && bytes(self.rows, self.outputs) > target {
            self.outputs /= 2;
        }
        while self.rows > 1 && bytes(self.rows, self.outputs) > room {
            self.rows /= 2;
        }
        self
    }
}

/// What the sequences of one model add to a demand for memory.
struct Share {
    model: ModelId,
    rows: u32,
    outputs: u32,
    least: u32,
    /// Rows of the shortest pass that each of the sequences can have.
    single: u32,
    /// Number of positions that the last sequence was promised, and their bytes; cached because
    /// sequences of one length often come together.
    last_kv: (u32, u64),
    /// For the last sequence: maximum rows of its shortest pass, and the result.
    last_least: (u32, u32),
}

impl Scheduler {
    /// Rows of the shortest pass that is worth its cost; fewer for a shorter prompt, or if their
    /// scratch would exceed its usual part. Does not depend on anything that changes while a
    /// sequence runs. `last` caches the previous answer of the model.
    fn least_rows(
        &self,
        s: &Sequence,
        promised: u32,
        last: &mut (u32, u32),
        view: &View<'_>,
    ) -> u32 {
        if s.arrival.whole {
            return s.rows_least();
        }
        let model = view.model(s.arrival.model);
        let most = self.config.least_rows.min(model.rows_max).min(promised);
        let most = most.min(s.arrival.tokens).max(1);
        if last.0 == most {
            return last.1.max(s.rows_least());
        }
        let usual = view.budget_bytes / SCRATCH_PART;
        let mut rows = most;
        while rows > 1 && view.costs.scratch_bytes(model.model, rows, 1) > usual {
            rows /= 2;
        }
        *last = (most, rows);
        rows.max(s.rows_least())
    }

    /// The largest [`Scheduler::least_rows`] of a model's running sequences; 1 if there are none.
    pub(crate) fn least_rows_of(&self, model: ModelId, view: &View<'_>) -> u32 {
        let mut last = (0, 0);
        self.running_sequences()
            .filter(|s| s.arrival.model == model)
            .map(|s| self.least_rows(s, s.promised, &mut last, view))
            .max()
            .unwrap_or(1)
    }

    /// Memory that the running sequences need, with another one that is promised this many
    /// positions.
    pub(crate) fn demand<'a>(
        &'a self,
        running: impl Iterator<Item = &'a Sequence>,
        another: Option<(&'a Sequence, u32)>,
        target: ScratchTarget,
        view: &View<'_>,
    ) -> Demand {
        let mut demand = Demand {
            held_bytes: view.held_bytes,
            ..Demand::default()
        };
        let mut shares: Vec<Share> = Vec::new();
        let mut n = 0;
        for (s, promised) in running.map(|s| (s, s.promised)).chain(another) {
            let id = s.arrival.model;
            n += 1;
            let at = shares
                .iter()
                .position(|share| share.model == id)
                .unwrap_or_else(|| {
                    demand.segment_bytes = demand.segment_bytes.max(view.model(id).segment_bytes);
                    shares.push(Share {
                        model: id,
                        rows: 0,
                        outputs: 0,
                        least: 1,
                        single: 1,
                        last_kv: (0, view.costs.kv_bytes(id, 0)),
                        last_least: (0, 0),
                    });
                    shares.len() - 1
                });
            let share = &mut shares[at];
            if share.last_kv.0 != promised {
                share.last_kv = (promised, view.costs.kv_bytes(id, promised));
            }
            demand.kv_bytes = demand.kv_bytes.saturating_add(share.last_kv.1);
            share.rows = share.rows.saturating_add(s.ahead());
            share.outputs += 1;
            let least = self.least_rows(s, promised, &mut share.last_least, view);
            share.least = share.least.max(least);
            share.single = share.single.max(s.rows_least());
        }
        if n > 1 {
            demand.held_bytes += view.kept_bytes;
        }
        let usual = view.budget_bytes / SCRATCH_PART;
        for share in shares {
            let model = view.model(share.model);
            let shape = match target {
                ScratchTarget::Usual => {
                    let wanted = Shape {
                        rows: share.rows.max(share.least),
                        outputs: share.outputs,
                    };
                    wanted.within(view, model, share.least, (usual, u64::MAX))
                }
                ScratchTarget::Least => Shape {
                    rows: share.least,
                    outputs: 1,
                },
                ScratchTarget::Single => Shape {
                    rows: share.single,
                    outputs: 1,
                },
            };
            let bytes = view
                .costs
                .scratch_bytes(share.model, shape.rows, shape.outputs);
            demand.scratch_bytes = demand.scratch_bytes.max(bytes);
        }
        demand
    }

    /// Minimum memory that one sequence needs alone. One that has begun may continue with single
    /// rows.
    pub(crate) fn demand_alone(&self, s: &Sequence, promised: u32, view: &View<'_>) -> Demand {
        let nobody = std::iter::empty();
        let target = match s.begun {
            true => ScratchTarget::Single,
            false => ScratchTarget::Least,
        };
        self.demand(nobody, Some((s, promised)), target, view)
    }

    /// Minimum memory that all running sequences need together.
    pub(crate) fn demand_running(&self, view: &View<'_>) -> Demand {
        let target = match self.running.len() {
            0 | 1 => ScratchTarget::Single,
            _ => ScratchTarget::Least,
        };
        self.demand(self.running_sequences(), None, target, view)
    }

    /// Maximum and usual bytes of scratch for a pass of a model. `alone` says that no sequence
    /// waits for a token while a prompt is computed.
    pub(crate) fn scratch_room(
        &self,
        model: &ModelView,
        alone: bool,
        view: &View<'_>,
    ) -> (u64, u64) {
        let beside = Demand {
            segment_bytes: model.segment_bytes,
            scratch_bytes: 0,
            ..self.demand_running(view)
        };
        let room = view.budget_bytes.saturating_sub(beside.total());
        let mut usual = view.budget_bytes / SCRATCH_PART;
        if alone && !model.fits {
            // Each pass uploads what is absent: longer and fewer ones are worth some of the room.
            usual = usual.max(room / 2);
        }
        (usual, room)
    }
}
