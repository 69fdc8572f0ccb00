//! Gives device memory up while another process uses the GPU, and takes it again when that has
//! gone.
//!
//! The budget shrinks in one step to the configured size, or to what running work needs to go on;
//! weights that no longer fit are streamed or computed on the CPU. A request that arrives meanwhile
//! and needs more gets as much as it needs alone, and no more. If nothing is to be kept, the device
//! is released while there is no work, and opened for the next request.

use std::time::Duration;

use rocmforge_gpu_driver::others::OwnUse;

use crate::actor::engine::Engine;
use crate::guards::yield_to::{Reason, Turn};

/// How long there has to be no work before the device is closed again after a request, while
/// another process uses it.
const CLOSED_AFTER: Duration = Duration::from_secs(2);

/// While memory is given up, the budget grows for running work by at least one part in this many of
/// its size.
const GROWN_PART: u64 = 8;

/// For how long after the end of work a GPU may still include it in its reported utilization.
const COUNTED: Duration = Duration::from_secs(2);

impl Engine {
    /// Handles what the watch saw of other processes on the GPU. Returns whether this changed the
    /// budget.
    pub(crate) fn watch_others(&mut self) -> bool {
        // Asked between any two passes, and off unless set.
        if self.guards.others.is_none() {
            return false;
        }
        let device = &self.memory.store.device;
        let held = device.memory_use().map_or(0, |held| held.allocated_bytes);
        let rests = device.is_closed() && !self.guards.yields();
        let (now, budget) = (self.now(), self.budget_that_comes_back());
        let own = OwnUse {
            bytes: held,
            is_working: !self.requests.is_empty() || self.guards.release.idle_for(now) < COUNTED,
        };
        let Some((watch, guard)) = &mut self.guards.others else {
            return false;
        };
        watch.tell((!rests).then_some(own));
        let seen = watch.take(held, now);
        // A look that was under way when the device was closed is no look without it.
        let Some(seen) = seen.filter(|_| !rests) else {
            return false;
        };
        match guard.see(seen, budget, now) {
            Turn::Stay => {
                if guard.is_news() {
                    self.publish(true);
                }
                return self.close_while_yielding();
            }
            Turn::Begin(reason) => self.begin_yielding(reason),
            Turn::End => self.end_yielding(budget),
        }
        self.publish(true);
        true
    }

    /// The budget, in bytes, once nothing is released or given up for other processes.
    pub(crate) fn budget_that_comes_back(&self) -> u64 {
        let yielding = self.guards.others.as_ref();
        let yielding = yielding.and_then(|(_, guard)| guard.before());
        let released = self.guards.release.before();
        let wanted = self.guards.budget_wanted;
        yielding
            .or(released)
            .or(wanted)
            .unwrap_or(self.memory.budget())
    }

    fn begin_yielding(&mut self, reason: Reason) {
        let began = self.now();
        let before = self.memory.budget();
        let outcome = self.fit_yielded(true);
        if let Err(error) = outcome {
            tracing::warn!(%error, "memory could not be given up for another process as a whole");
        }
        let (grown_bytes, busy_percent) = match reason {
            Reason::Growth(bytes) => (Some(bytes), None),
            Reason::Busy(percent) => (None, Some(percent)),
        };
        tracing::info!(
            target: "memory",
            grown_bytes,
            busy_percent,
            budget_before_bytes = before,
            budget_bytes = self.memory.budget(),
            closed = self.memory.store.device.is_closed(),
            free_bytes = self.memory.store.count_free_bytes_now(),
            took_ms = (self.now() - began).as_secs_f64() * 1e3,
            "another process uses the GPU: memory is given up (yield_to)"
        );
    }

    fn end_yielding(&mut self, before: u64) {
        if self.guards.release.before().is_some() {
            tracing::info!(target: "memory", "the other process has left the GPU; the next request takes memory again");
            return;
        }
        let began = self.now();
        let missing = self.take_again(before);
        tracing::info!(
            target: "memory",
            budget_bytes = self.memory.budget(),
            missing_bytes = missing,
            took_ms = (self.now() - began).as_secs_f64() * 1e3,
            "the other process has left the GPU: memory is taken again"
        );
    }

    /// Adapts the budget to the size configured for yielding and to what work needs: downwards at
    /// the beginning (`shrinks`) and while there is no work, else only upwards.
    ///
    /// # Errors
    /// The budget cannot be changed.
    fn fit_yielded(&mut self, shrinks: bool) -> Result<(), crate::api::error::Error> {
        let yielding = self.guards.others.as_ref();
        let yielding = yielding.and_then(|(_, guard)| Some((guard.to(), guard.before()?)));
        let Some((to, before)) = yielding else {
            return Ok(());
        };
        if self.guards.release.before().is_some() {
            return Ok(());
        }
        let is_idle = self.is_idle() && self.draining.is_none();
        if is_idle && to == 0 {
            return self.release_memory(false).map(|_| ());
        }
        let needed = self.needed_while_yielding(before).max(to);
        let wanted = needed.max(self.least_budget()).min(before);
        let wanted = wanted
            .next_multiple_of(rocmforge_device::ALIGNMENT)
            .min(before);
        let budget = self.memory.budget();
        if shrinks || is_idle {
            if wanted != self.guards.budget_wanted.unwrap_or(budget) {
                self.change_budget(wanted)?;
            }
            return Ok(());
        }
        if wanted > budget && self.may_take_while_yielding(wanted) {
            self.grow_while_yielding(wanted, before)?;
        }
        Ok(())
    }

    /// Raises the budget to `wanted` bytes, and at least by one [`GROWN_PART`]th: a budget that
    /// grew with each KV page of a request would end the passes under way each time.
    ///
    /// # Errors
    /// The budget cannot be changed.
    fn grow_while_yielding(
        &mut self,
        wanted: u64,
        before: u64,
    ) -> Result<(), crate::api::error::Error> {
        let budget = self.memory.budget();
        let ample = (budget + budget / GROWN_PART) & !(rocmforge_device::ALIGNMENT - 1);
        let ample = ample.min(before);
        if ample > wanted && self.change_budget(ample).is_ok() {
            return Ok(());
        }
        let grown = self.change_budget(wanted).map(|_| ());
        let now = self.now();
        if let (Err(_), Some((_, guard))) = (&grown, &mut self.guards.others) {
            guard.was_refused(wanted, now);
        }
        grown
    }

    /// Whether a request for `bytes` may be tried: the driver did not refuse as much a moment ago.
    fn may_take_while_yielding(&self, bytes: u64) -> bool {
        let guard = self.guards.others.as_ref();
        guard.is_none_or(|(_, guard)| guard.may_take(bytes, self.now()))
    }

    /// Raises the budget, while memory is given up, to what each waiting request needs alone.
    pub(crate) fn make_room_while_yielding(&mut self) {
        if self.guards.yields()
            && let Err(error) = self.fit_yielded(false)
        {
            // The request is refused with the numbers then.
            tracing::warn!(%error, "a request needs more memory than is kept while another process uses the GPU");
        }
    }

    /// The smallest budget, in bytes, in which each present request could run alone.
    fn needed_while_yielding(&mut self, before: u64) -> u64 {
        let seqs: Vec<_> = self.requests.tasks.keys().copied().collect();
        self.scheduling(before, |scheduler, view| {
            let needs = seqs.iter().map(|seq| scheduler.needed_alone(*seq, view));
            needs.max().unwrap_or(0)
        })
    }

    /// Gives memory up again that a request needed meanwhile, and closes the device if nothing is
    /// to be kept. Returns whether that was done.
    fn close_while_yielding(&mut self) -> bool {
        let now = self.now();
        let is_due = self.guards.yields()
            && self.requests.is_empty()
            && self.guards.release.idle_for(now) >= CLOSED_AFTER;
        let (before, was_closed) = (self.memory.budget(), self.memory.store.device.is_closed());
        if is_due && let Err(error) = self.fit_yielded(true) {
            tracing::warn!(%error, "memory could not be given up for another process as a whole");
        }
        let changed =
            before != self.memory.budget() || was_closed != self.memory.store.device.is_closed();
        if changed {
            self.publish(true);
        }
        changed
    }
}
