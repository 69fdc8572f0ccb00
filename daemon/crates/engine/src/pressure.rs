//! Memory that the driver refuses while the engine works, because another process took it.
//!
//! The arena was taken at start, but a driver needs memory of its own besides: for a kernel's code, a recording, a vendor's
//! library. When it refuses, a part of the arena goes back to it: the budget shrinks, all weights go (they come again as
//! they are needed; KV pages are kept through the host's memory), and the step is done again.
//!
//! ```text
//!   refused --(what runs fits what would be left)--> renewed with less --> the step again
//!      |
//!      +--(it does not)--> the request fails, with the numbers; others go on
//! ```
//!
//! *Invariant:* a request's step is done again at most [`REFUSALS_MAX`] times for want of memory.

use std::time::Duration;

use rocmforge_tensor_cache::Slab;

use crate::actor::Engine;
use crate::error::Error;
use crate::refusal::Refusal;
use crate::task::Task;

/// Most times that a request's step is done again.
const REFUSALS_MAX: u32 = 12;

/// The part of the budget that goes the first time, at the least; twice as much the next time, up to half.
const STEP: u64 = 16;

/// What is left of a budget when the driver refused so many bytes (0 if it did not say), after `refusals` before.
fn less(budget: u64, refused: u64, refusals: u32) -> u64 {
    let part = (STEP >> refusals.min(3)).max(2);
    let step = refused.max(budget / part).max(1);
    let step = step.next_multiple_of(rocmforge_device::ALIGNMENT);
    budget.saturating_sub(step)
}

impl Engine {
    /// After a failed step of a request that is not among the running ones: if the driver refused memory, gives it some
    /// of the arena's, so that the step can be done again.
    ///
    /// # Errors
    /// The step's error, if it was another; [`Error::Precondition`] with the numbers if the request could not even run
    /// alone in what would be left, [`Error::Exhausted`] if only beside others it cannot.
    pub(crate) fn shrink_for(&mut self, task: &mut Task, error: Error) -> Result<(), Error> {
        let Some(refused) = self.residency.take_refused() else {
            return Err(error);
        };
        self.free_scratch();
        let before = self.budget();
        let after = less(before, refused, task.refusals);
        let need = self.need_with_in(task, after);
        let (alone, name) = (self.need_alone_in(task, after), task.loaded.name());
        let free = self.residency.device.free_bytes().unwrap_or(0);
        let numbers = format!(
            "the driver refuses memory ({error}); {free} bytes are free; of the budget of {before} bytes {after} would be \
             left, and the request of '{name}' needs {alone}"
        );
        if after < alone {
            return Err(Refusal::NoDeviceMemory {
                message: format!(
                    "{numbers}; end other users of the device's memory, ask for fewer tokens, unpin, or use a smaller \
                     model"
                ),
                need: alone,
                budget: after,
            }
            .into());
        }
        if after < need || task.refusals >= REFUSALS_MAX {
            return Err(Error::Exhausted {
                message: format!("{numbers}, {need} with the others that run"),
                retry_after: Duration::from_secs(1),
            });
        }
        task.refusals += 1;
        let keep: Vec<Slab> = self
            .running
            .iter()
            .chain(std::iter::once(&*task))
            .flat_map(|t| t.memory.slabs(&self.residency))
            .collect();
        self.shrink(after, &keep, &error)
    }

    /// The same for an upload of a preload.
    ///
    /// # Errors
    /// As [`Engine::shrink_for`].
    pub(crate) fn shrink_for_preload(&mut self, error: Error) -> Result<(), Error> {
        let Some(refused) = self.residency.take_refused() else {
            return Err(error);
        };
        self.free_scratch();
        let before = self.budget();
        let after = less(before, refused, 0);
        if after < self.room_for_running(after).max(before / 2) {
            return Err(Refusal::NoDeviceMemory {
                message: format!(
                    "the driver refuses memory ({error}); of the budget of {before} bytes {after} would be left, too \
                     little for a preload; end other users of the device's memory"
                ),
                need: self.room_for_running(after).max(before / 2),
                budget: after,
            }
            .into());
        }
        self.shrink(after, &self.kept_of_running(), &error)
    }

    /// KV pages of what runs.
    fn kept_of_running(&self) -> Vec<Slab> {
        self.running
            .iter()
            .flat_map(|t| t.memory.slabs(&self.residency))
            .collect()
    }

    /// Scratch holds nothing between two steps.
    pub(crate) fn free_scratch(&mut self) {
        if let Some((block, _)) = self.scratch.take() {
            self.residency.free(block);
        }
    }

    fn shrink(&mut self, after: u64, keep: &[Slab], why: &Error) -> Result<(), Error> {
        let before = self.budget();
        let budget = self.renew(after, after, keep)?;
        self.budget_wanted = None;
        tracing::warn!(
            reason = %why,
            before_bytes = before,
            budget_bytes = budget,
            free_bytes = self.residency.free_bytes,
            "the driver refuses memory: the budget shrinks, and all weights are loaded anew; `rocmforgectl cache budget` raises it again"
        );
        // Published with the next turn: the request under way is not among the running ones here.
        self.requests_changed = true;
        Ok(())
    }

    /// Takes the arena anew. An arena that cannot be had again is the device's loss.
    fn renew(&mut self, bytes: u64, otherwise: u64, keep: &[Slab]) -> Result<u64, Error> {
        let renewed = self.residency.renew(bytes, otherwise, keep);
        self.residency.take_refused();
        renewed.inspect_err(|error| {
            self.lost = Some(format!("the arena cannot be taken again: {error}"));
        })
    }

    /// Raises the budget where the driver had no room for the new arena beside the old one: gives the old one back
    /// first, if that would help.
    ///
    /// # Errors
    /// [`Error::Exhausted`] with the numbers; the budget is then what it was, or what there is.
    pub(crate) fn grow_anew(&mut self, wanted: u64) -> Result<(), Error> {
        let before = self.budget();
        let free = self.residency.device.free_bytes().unwrap_or(0);
        let held = self.residency.device.memory_use().unwrap_or_default();
        let refused = |now: u64| Error::Exhausted {
            message: format!(
                "a budget of {wanted} bytes cannot be had now: {free} bytes are free on the device and {} are held; it is \
                 {now} bytes now",
                held.allocated_bytes
            ),
            retry_after: Duration::from_secs(1),
        };
        if free + held.allocated_bytes < wanted {
            return Err(refused(before));
        }
        self.free_scratch();
        let keep = self.kept_of_running();
        let had = self.renew(wanted, before, &keep)?;
        if had < wanted {
            return Err(refused(had));
        }
        Ok(())
    }

    /// Where a smaller arena could not be made beside the old one, and so the old one is still held: gives it back and
    /// takes a smaller one.
    ///
    /// # Errors
    /// The loss of the device.
    pub(crate) fn give_back_unused(&mut self) -> Result<(), Error> {
        if !self.residency.holds_unused() {
            return Ok(());
        }
        self.free_scratch();
        let keep = self.kept_of_running();
        let budget = self.renew(self.budget(), self.budget(), &keep)?;
        tracing::info!(
            budget_bytes = budget,
            "memory above the budget went back to the driver; weights are loaded anew"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{REFUSALS_MAX, less};

    #[test]
    fn a_budget_shrinks_by_what_was_refused_but_not_by_crumbs() {
        assert_eq!(less(16 << 20, 0, 0), 15 << 20);
        assert_eq!(less(16 << 20, 1000, 0), 15 << 20);
        assert_eq!(less(16 << 20, 3 << 20, 0), 13 << 20);
        assert_eq!(less(16 << 20, (3 << 20) + 1, 0), (13 << 20) - 256);
        assert_eq!(less(16 << 20, 0, 1), 14 << 20);
        assert_eq!(less(16 << 20, 0, 100), 8 << 20);
        assert_eq!(less(1 << 20, 1 << 30, 0), 0);
        assert_eq!(less(0, 0, 0), 0);
    }

    #[test]
    fn shrinking_ends() {
        let mut budget = 1 << 40;
        for refusals in 0..REFUSALS_MAX {
            let after = less(budget, 0, refusals);
            assert!(after < budget, "{refusals}");
            budget = after;
        }
        assert!(budget < 1 << 32, "{budget}");
    }
}
