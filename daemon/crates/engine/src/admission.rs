//! Which requests may run: those whose KV pages, with scratch and the largest segment beside them, fit the budget.
//!
//! A request with `max_tokens` is promised all the positions that it can come to. One without is promised a while
//! ([`PROMISE_TOKENS`] beyond its prompt), and more as it goes on. Promises are sums, nothing is reserved by them; the
//! pages are taken as the sequence grows.

use std::time::Duration;

use rocmforge_ops::RowCounts;
use rocmforge_tensor_cache::ModelId;

use crate::actor::Engine;
use crate::error::Error;
use crate::kv;
use crate::refusal::Refusal;
use crate::task::{Task, Work};

/// Positions beyond its prompt that a request without `max_tokens` is promised at a time.
pub(crate) const PROMISE_TOKENS: usize = 256;

/// Most rows of logits that a scoring computes at a time.
const OUTPUT_ROWS_MAX: u64 = 16;

/// Tokens of a prompt in one pass while other requests run too, so that they wait less.
const SHARED_CHUNK: usize = 128;

/// Tokens of a pass below which a want of room makes no prompt's passes: it would read all weights for less and less.
const TIGHT_CHUNK: usize = 16;

/// How much scratch some requests are to have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scratch {
    /// Enough for passes of the length that is worth its bytes.
    Usual,
    /// Less where the KV leaves less, down to passes of [`TIGHT_CHUNK`] tokens.
    Tight,
}

/// The room in which a request runs.
#[derive(Clone, Copy)]
struct Room {
    /// Bytes of the budget.
    budget: u64,
    /// What of it is left beside all but scratch.
    spare: u64,
    /// Whether nothing else runs.
    alone: bool,
}

/// What the cache needs at the least for some requests, in bytes.
struct Need {
    /// The KV of all positions that they are promised.
    kv: u64,
    /// The largest segment that one of them must have.
    segment: u64,
    pinned: u64,
    /// The block that the device keeps for itself.
    fixed: u64,
    /// The scratch of the one that takes most, or what is taken already.
    scratch: u64,
}

impl Need {
    fn beside_scratch(&self) -> u64 {
        self.kv + self.segment + self.pinned + self.fixed
    }

    fn total(&self) -> u64 {
        self.beside_scratch() + self.scratch
    }
}

impl Engine {
    /// Starts waiting requests, first come first served, while they fit.
    pub(crate) fn admit(&mut self) {
        while self.running.len() < self.config.max_sequences.get() {
            let Some(task) = self.waiting.front() else {
                return;
            };
            let budget = self.budget();
            if !self.running.is_empty() {
                // Nobody's passes become shorter for the sake of one who can wait.
                let all = self.running.iter().chain([task]);
                if self.need(all, budget, Scratch::Usual).total() > budget {
                    return;
                }
            } else if self.need_with(task) > budget {
                let mut task = self.waiting.pop_front().expect("looked at above");
                if !self.shrink_promise(&mut task) {
                    let error = self.never_fits(&task);
                    self.finish(task, Some(error));
                    continue;
                }
                self.start(task);
                continue;
            }
            let task = self.waiting.pop_front().expect("looked at above");
            self.start(task);
        }
    }

    fn start(&mut self, task: Task) {
        self.running.push_back(task);
        self.requests_changed = true;
    }

    /// Promises a running request more positions, if they fit.
    pub(crate) fn extend_promise(
        &mut self,
        task: &mut Task,
        positions: usize,
    ) -> Result<(), Error> {
        if positions <= task.promised {
            return Ok(());
        }
        let before = task.promised;
        task.promised = (positions + PROMISE_TOKENS).min(task.n_ctx);
        if self.need_with(task) > self.budget() {
            task.promised = positions;
        }
        if self.need_with(task) > self.budget() {
            // A long prompt may have taken more than this step needs.
            self.free_scratch();
        }
        let (need, budget) = (self.need_with(task), self.budget());
        if need > budget {
            task.promised = before;
            return Err(Error::Exhausted {
                message: format!(
                    "no room for the KV of position {positions}: running requests need {need} bytes of a budget of {budget}; \
                     retry when others have ended, or ask for fewer tokens"
                ),
                retry_after: Duration::from_secs(1),
            });
        }
        Ok(())
    }

    /// What the cache needs at the least for the running requests and one more.
    pub(crate) fn need_with(&self, task: &Task) -> u64 {
        self.need_with_in(task, self.budget())
    }

    /// The same in another budget. A need above the budget is what there would have to be.
    pub(crate) fn need_with_in(&self, task: &Task, budget: u64) -> u64 {
        let all = self.running.iter().chain([task]);
        self.need(all, budget, Scratch::Tight).total()
    }

    /// What the cache needs at the least for one request in a budget.
    pub(crate) fn need_alone_in(&self, task: &Task, budget: u64) -> u64 {
        self.need([task].into_iter(), budget, Scratch::Tight)
            .total()
    }

    /// The smallest budget of at least `wanted` bytes in which the running requests can go on.
    pub(crate) fn room_for_running(&self, wanted: u64) -> u64 {
        let mut budget = wanted;
        loop {
            let need = self.need(self.running.iter(), budget, Scratch::Tight);
            if need.total() <= budget {
                return budget;
            }
            // In a larger budget passes may be longer, up to a length, so this comes to an end.
            budget = need.total();
        }
    }

    fn need<'a>(
        &'a self,
        tasks: impl Iterator<Item = &'a Task> + Clone,
        budget: u64,
        scratch: Scratch,
    ) -> Need {
        let mut need = self.need_beside_scratch(tasks.clone());
        let spare = budget.saturating_sub(need.beside_scratch());
        for task in tasks {
            // What it would take alone; beside others it takes less.
            let room = Room {
                budget,
                spare,
                alone: true,
            };
            let (rows, outputs) = self.rows(task, room, scratch);
            let scratch = self.scratch_bytes(task.model, rows.min(task.ahead()), outputs);
            need.scratch = need.scratch.max(scratch);
        }
        need.scratch = need.scratch.max(self.scratch.map_or(0, |s| s.1));
        need
    }

    fn need_beside_scratch<'a>(&'a self, tasks: impl Iterator<Item = &'a Task>) -> Need {
        let mut need = Need {
            kv: 0,
            segment: 0,
            pinned: self.residency.pinned_bytes(),
            fixed: self.residency.fixed_bytes,
            scratch: 0,
        };
        for task in tasks {
            let plan = task.loaded.model().plan();
            need.kv += kv::bytes_for(plan, task.promised, self.prefill_chunk.get());
            need.segment = need
                .segment
                .max(self.residency.largest_unpinned(task.model));
        }
        need
    }

    /// Whether a request without `max_tokens`, alone, can run with fewer positions than it could come to.
    fn shrink_promise(&self, task: &mut Task) -> bool {
        let open_ended = matches!(&task.work, Work::Generate(g) if g.max_tokens.is_none());
        if !open_ended {
            return false;
        }
        task.promised = (task.tokens.len() + 1).min(task.n_ctx);
        self.need_with(task) <= self.budget()
    }

    /// Why a request that nothing runs beside can never run. The parts are those of the sum.
    fn never_fits(&self, task: &Task) -> Error {
        let need = self.need([task].into_iter(), self.budget(), Scratch::Tight);
        let message = format!(
            "the request needs {} bytes of the cache and its budget is {}: {} for the KV of {} tokens, {} for scratch, {} \
             for the largest segment of '{}', {} pinned, {} for the device's own staging; ask for fewer tokens, unpin, or \
             raise the budget (rocmforgectl cache budget)",
            need.total(),
            self.budget(),
            need.kv,
            task.promised,
            need.scratch,
            need.segment,
            task.loaded.name(),
            need.pinned,
            need.fixed,
        );
        Refusal::NeverFits {
            message,
            need: need.total(),
            budget: self.budget(),
            pinned: need.pinned,
        }
        .into()
    }

    pub(crate) fn budget(&self) -> u64 {
        self.residency.budget()
    }

    /// Rows of the next pass of a request that is not among the running ones, and rows of logits.
    pub(crate) fn rows_of_step(&self, task: &Task) -> (usize, u64) {
        let taken = self.need_beside_scratch(self.running.iter().chain([task]));
        let budget = self.budget();
        let room = Room {
            budget,
            spare: budget.saturating_sub(taken.beside_scratch()),
            alone: self.running.is_empty(),
        };
        let (rows, outputs) = self.rows(task, room, Scratch::Tight);
        (rows.min(task.ahead()), outputs)
    }

    /// Rows of a pass of this request, and rows of logits.
    fn rows(&self, task: &Task, room: Room, scratch: Scratch) -> (usize, u64) {
        let outputs = match task.work {
            Work::Generate(_) => 1,
            Work::Score(_) => {
                let row = u64::from(task.loaded.model().hparams().n_vocab) * 4;
                (room.budget / 32 / row).clamp(1, OUTPUT_ROWS_MAX)
            }
        };
        let most = self.prefill_chunk.get();
        let (mut rows, mut scratch_max) = (most, room.budget / 8);
        if !room.alone {
            rows = rows.min(SHARED_CHUNK);
        } else if !self.residency.cache.fits(task.model) {
            // Each pass uploads what is absent: longer and fewer ones are worth some of the room.
            scratch_max = scratch_max.max(room.spare / 2);
        }
        let takes = |rows| self.scratch_bytes(task.model, rows, outputs);
        while rows > 1 && takes(rows) > scratch_max {
            rows /= 2;
        }
        if scratch == Scratch::Tight {
            while rows / 2 >= TIGHT_CHUNK && takes(rows) > room.spare {
                rows /= 2;
            }
        }
        (rows, outputs)
    }

    /// Bytes of the scratch block for passes of so many rows.
    pub(crate) fn scratch_bytes(&self, model: ModelId, rows: usize, outputs: u64) -> u64 {
        let plan = self.entry(model).loaded.model().plan();
        let layout = plan.scratch(RowCounts {
            tokens: rows as u64,
            outputs,
        });
        layout.bytes + self.residency.device.workspace_bytes(&layout)
    }
}
