//! Handling of memory that the driver refuses while the engine works, because another process took
//! it.
//!
//! The arena was taken at start, but a driver needs memory of its own besides: for a kernel's code,
//! a graph, a vendor's library. When it refuses, a part of the arena goes back to it: the budget
//! shrinks, all weights are evicted (and uploaded again as they are needed; KV pages are kept
//! through the host's memory), and the pass is done again.
//!
//! ```text
//! refused --(each request of the pass fits what would be left, alone)--> less, and the pass again;
//!      |                                                    those that do not fit beside
//!      |                                                    the others are preempted
//!      +--(one does not)--> it fails, with the numbers; the others go on
//! ```
//!
//! How much goes, and how often, is the scheduler's (`scheduler/src/pressure.rs`).

use std::time::Duration;

use rocmforge_device::{Loss, LossKind};
use rocmforge_scheduler::{SeqId, shrunk_budget};
use rocmforge_tensor_cache::Slab;

use crate::actor::engine::Engine;
use crate::actor::gather::ALONE_AFTER;
use crate::api::error::Error;
use crate::api::refusal::Refusal;
use crate::request::task::Task;

/// Maximum number of times that a request is recomputed because free memory is not contiguous.
const COMPACTIONS_MAX: u32 = 4;

/// Number of other requests' passes before a request that was preempted for want of contiguous
/// memory is admitted again. Without the delay it would be admitted at once, because enough bytes
/// are free, and might fail the same way again and again.
const PASSES_AFTER_YIELD: u32 = 8;

impl Engine {
    /// After a failed pass of these requests: if the driver refused memory, gives it some of the
    /// arena's, so that the pass can be repeated. A request that could not even run alone in what
    /// would be left fails, as do all of them if the error was another.
    pub(crate) fn do_again(&mut self, seqs: &[SeqId], error: Error) {
        let refused = self.memory.store.take_refused_bytes();
        let suspended = !self.requests.suspended.is_empty();
        let had_no_room = refused.is_none() && matches!(error, Error::Exhausted { .. });
        let times = match had_no_room {
            true => self.note_no_room(seqs),
            false => 0,
        };
        if suspended && had_no_room && times < ALONE_AFTER {
            // What is in the way ends, and until then only small passes begin beside it.
            self.requests.suspended.note_crowded();
            if self.space.computing {
                self.start_states_over(seqs);
            }
            return;
        }
        let computing = self.space.computing;
        self.finish_passes();
        self.space.computing = computing;
        let Some(refused) = refused else {
            return self.do_again_as_it_is(seqs, had_no_room.then_some(times), error);
        };
        self.free_scratch();
        self.stop_drafting(|_| true);
        let refusals = self.requests.scheduler.memory_refused(seqs.iter().copied());
        let before = self.memory.budget();
        let align = rocmforge_device::ALIGNMENT;
        let after = shrunk_budget(before, refused, refusals.saturating_sub(1), align);
        let too_large: Vec<(SeqId, u64)> = self.scheduling(after, |scheduler, view| {
            let alone = |&seq: &SeqId| (seq, scheduler.needed_alone(seq, view));
            seqs.iter()
                .map(alone)
                .filter(|(_, need)| *need > after)
                .collect()
        });
        for &(seq, need) in &too_large {
            let name = self.requests.tasks[&seq].loaded.name().to_owned();
            let free = self.memory.store.device.free_bytes().unwrap_or(0);
            let message = format!(
                "the driver refuses memory ({error}); {free} bytes are free; of the budget of {before} bytes {after} would \
                 be left, and the request of '{name}' needs {need}; end other users of the device's memory, ask for fewer \
                 tokens, unpin, or use a smaller model"
            );
            let refusal = Refusal::NoDeviceMemory {
                message,
                need,
                budget: after,
            };
            self.end(seq, refusal.into());
        }
        if too_large.len() == seqs.len() {
            return;
        }
        // Who does not fit any more yields, or is refused; what the others have computed is kept.
        self.admit_within(after);
        self.start_states_over(seqs);
        let keep = self.kept();
        if let Err(lost) = self.shrink(after, &keep, &error) {
            for &seq in seqs {
                self.end(seq, lost.clone());
            }
        }
    }

    /// Handles a failed pass of these requests if the driver did not refuse memory: makes room and
    /// repeats the pass if it lacked contiguous memory, else ends the requests with the error.
    fn do_again_as_it_is(&mut self, seqs: &[SeqId], no_room: Option<u32>, error: Error) {
        if let Some(times) = no_room
            && (self.gathers(times)
                || self.yield_one()
                || self.compact(seqs)
                || self.stop_drafting(|_| true))
        {
            if self.space.computing {
                self.start_states_over(seqs);
            }
            return;
        }
        for &seq in seqs {
            let task = self.requests.tasks.get(&seq);
            if !(no_room.is_some() && task.is_some_and(Task::may_end_here)) {
                self.end(seq, error.clone());
            } else if let Some(task) = self.requests.tasks.remove(&seq) {
                self.requests.scheduler.end(seq);
                self.end_for_room(task);
            }
        }
    }

    /// Resets sequences with recurrent states after a failed pass, so that they are recomputed: the
    /// pass may have changed their states in part.
    fn start_states_over(&mut self, seqs: &[SeqId]) {
        for &seq in seqs {
            let Some(task) = self.requests.tasks.get(&seq).filter(|t| t.n_past > 0) else {
                continue;
            };
            if task.loaded.model().plan().state_elements > 0 {
                self.requests.scheduler.start_over(seq);
                self.start_over(seq);
            }
        }
    }

    /// Preempts one request because less memory is free than the sums say. Returns whether there
    /// was one to preempt.
    fn yield_one(&mut self) -> bool {
        let mut actions = Vec::new();
        let Some(seq) = self.requests.scheduler.yield_one(&mut actions) else {
            return false;
        };
        tracing::debug!(?seq, "a request yields: the ledger had no room");
        self.start_over(seq);
        if let Some(task) = self.requests.tasks.get_mut(&seq) {
            // What it computes again may find its room.
            task.no_room = (0, 0);
        }
        self.requests.passes_before_admission = PASSES_AFTER_YIELD;
        true
    }

    /// If free memory would suffice but is not contiguous: restarts the only running request, so
    /// that its blocks lie side by side. Returns whether that is worth a try.
    fn compact(&mut self, seqs: &[SeqId]) -> bool {
        let &[seq] = seqs else {
            return false;
        };
        let Some(task) = self.requests.tasks.get_mut(&seq) else {
            return false;
        };
        if task.compactions >= COMPACTIONS_MAX {
            return false;
        }
        task.compactions += 1;
        let comes_back = task.compactions == 1;
        tracing::debug!(
            ?seq,
            "a request is recomputed: its blocks left no contiguous memory"
        );
        self.free_scratch();
        self.requests.scheduler.start_over(seq);
        self.start_over(seq);
        // Once it may begin with what it had, in other places; if that does not
        // help, it computes all of it.
        if comes_back {
            self.memory.give_up_all();
        } else if let Err(error) = self.memory.clear(None) {
            // All of the arena is free but for what is pinned: what it reserves lies side by side.
            self.lose(&error);
        }
        true
    }

    /// Handles memory that the driver refused to a preload: the budget shrinks.
    ///
    /// # Errors
    /// The upload's error, if it was another; [`Error::Precondition`] with the numbers if running
    /// work needs what would go.
    pub(crate) fn shrink_for_preload(&mut self, error: Error) -> Result<(), Error> {
        let Some(refused) = self.memory.store.take_refused_bytes() else {
            return Err(error);
        };
        self.finish_passes();
        self.free_scratch();
        let before = self.memory.budget();
        let after = shrunk_budget(before, refused, 0, rocmforge_device::ALIGNMENT);
        let need = self.room_for_running(after).max(before / 2);
        if after < need {
            return Err(Refusal::NoDeviceMemory {
                message: format!(
                    "the driver refuses memory ({error}); of the budget of {before} bytes {after} would be left, too \
                     little for a preload; end other users of the device's memory"
                ),
                need,
                budget: after,
            }
            .into());
        }
        let keep = self.kept();
        self.shrink(after, &keep, &error)
    }

    /// Slabs of the KV pages and recurrent states of running requests, whose content has to
    /// survive.
    fn kept(&self) -> Vec<Slab> {
        let held = |task: &Task| {
            let plan = task.loaded.model().plan();
            task.memory.slabs(&self.memory, plan).collect::<Vec<_>>()
        };
        let mut slabs: Vec<Slab> = self.requests.tasks.values().flat_map(held).collect();
        // What requests share is kept once.
        slabs.sort_unstable_by_key(|s| s.offset);
        slabs.dedup_by_key(|s| s.offset);
        slabs
    }

    fn shrink(&mut self, after: u64, keep: &[Slab], why: &Error) -> Result<(), Error> {
        let before = self.memory.budget();
        let budget = self.renew(after, after, keep)?;
        self.guards.budget_wanted = None;
        tracing::warn!(
            reason = %why,
            before_bytes = before,
            budget_bytes = budget,
            free_bytes = self.memory.store.free_bytes,
            "the driver refuses memory: the budget shrinks, and all weights are uploaded again; `rocmforgectl cache budget` raises it again"
        );
        // Published with the next turn: the request under way is not among the running ones here.
        self.requests.changed = true;
        Ok(())
    }

    /// Records that the engine cannot go on after an error: as the device loss that the store has
    /// detected, if that caused it.
    pub(crate) fn lose(&mut self, error: &Error) {
        let seen = self.memory.store.lost().cloned();
        self.guards.lost = Some(seen.unwrap_or_else(|| Loss::unknown(error.to_string())));
    }

    /// Reallocates the arena ([`crate::memory::Memory::renew`]). If that fails, the device counts
    /// as lost.
    fn renew(&mut self, bytes: u64, otherwise: u64, keep: &[Slab]) -> Result<u64, Error> {
        let renewed = self.memory.renew(bytes, otherwise, keep);
        self.memory.store.take_refused_bytes();
        renewed.inspect_err(|error| {
            let seen = self.memory.store.lost().cloned();
            let loss = seen.unwrap_or_else(|| Loss::new(LossKind::NoMemory, error.to_string()));
            self.guards.lost = Some(loss.during("the arena cannot be taken again"));
        })
    }

    /// Raises the budget if the driver has no memory for a new arena beside the old one: returns
    /// the old arena to the driver first, if that would help.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`] with the numbers; the budget is then what it was, or what the driver
    /// gave.
    pub(crate) fn grow_anew(&mut self, wanted: u64) -> Result<(), Error> {
        let before = self.memory.budget();
        let free = self.memory.store.device.free_bytes().unwrap_or(0);
        let held = self.memory.store.device.memory_use().unwrap_or_default();
        let refused = |now: u64| Error::Exhausted {
            message: format!(
                "a budget of {wanted} bytes cannot be had now: {free} bytes are free on the device and {} are held; it is \
                 {now} bytes now; ask for less, or end other users of the device's memory",
                held.allocated_bytes
            ),
            retry_after: Duration::from_secs(1),
        };
        if free + held.allocated_bytes < wanted {
            return Err(refused(before));
        }
        self.free_scratch();
        let keep = self.kept();
        let had = self.renew(wanted, before, &keep)?;
        if had < wanted {
            return Err(refused(had));
        }
        Ok(())
    }

    /// If a smaller arena could not be allocated beside the old one, so that the old one is still
    /// held: returns it to the driver and allocates a smaller one.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub(crate) fn give_back_unused(&mut self) -> Result<(), Error> {
        // What suspended passes have would not be kept.
        if !self.requests.suspended.is_empty() || !self.memory.store.holds_unused() {
            return Ok(());
        }
        self.free_scratch();
        let keep = self.kept();
        let budget = self.renew(self.memory.budget(), self.memory.budget(), &keep)?;
        tracing::info!(
            budget_bytes = budget,
            "memory above the budget went back to the driver; weights are uploaded again"
        );
        Ok(())
    }
}
