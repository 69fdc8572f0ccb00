//! Acts on what the guards find: the budget follows memory that other processes want, and the
//! device is checked after the machine slept.

use std::time::Duration;

use rocmforge_device::Loss;

use crate::actor::engine::Engine;
use crate::guards::host_pressure::{self, Look};
use crate::guards::keep_free::{self, Change};

impl Engine {
    /// Checks the device if the machine slept: a GPU's memory may be lost although every call
    /// works. Returns whether the device was lost; if not, it keeps what it holds.
    pub(crate) fn check_after_sleep(&mut self) -> bool {
        let Some(slept) = self.guards.sleep.slept() else {
            return false;
        };
        match self.memory.store.check() {
            Ok(()) => {
                tracing::info!(
                    seconds = slept.as_secs(),
                    "the machine slept; the device holds what it held"
                );
                false
            }
            Err(error) => {
                let loss = match error {
                    rocmforge_device::Error::Lost(loss) => loss,
                    other => Loss::unknown(other.to_string()),
                };
                let slept = format!("after {} s of sleep", slept.as_secs());
                self.guards.lost = Some(loss.during(slept));
                true
            }
        }
    }

    /// Checks, between two passes, whether other processes want memory.
    pub(crate) fn watch_while_busy(&mut self) {
        self.watch_others();
        self.watch_memory(keep_free::WHILE_BUSY);
        self.watch_host();
    }

    /// Checks, while there is no work, whether other processes want memory. Returns whether there
    /// is more to do now.
    pub(crate) fn watch_while_idle(&mut self) -> bool {
        let yielded = self.watch_others();
        let changed = self.watch_memory(keep_free::WHILE_IDLE / 2) || yielded;
        self.watch_host() || changed || self.lost().is_some()
    }

    /// Checks the device's free memory if `every` has passed since the last check, and gives memory
    /// back or takes it again. Returns whether the budget has changed.
    fn watch_memory(&mut self, every: Duration) -> bool {
        let now = self.now();
        // A shrink that running work holds up goes on by itself.
        let rests = self.guards.budget_wanted.is_some() || self.guards.release.before().is_some();
        let rests = rests || self.guards.yields();
        if rests || !self.guards.keep_free.is_due(now, every) {
            return false;
        }
        // Where nobody counts, the attempt shows it: there only a cut at the start is taken back.
        let free = self.memory.store.count_free_bytes_now().unwrap_or(u64::MAX);
        let before = self.memory.budget();
        let change = self.guards.keep_free.change(free, before, now);
        let (wanted, words) = match change {
            Change::None => return false,
            Change::Shrink(by) => (
                before - by,
                "other processes use the GPU: memory is given back",
            ),
            Change::Grow(by) => (
                before + by,
                "other processes have left the GPU: memory is taken again",
            ),
        };
        let wanted = wanted & !(rocmforge_device::ALIGNMENT - 1);
        if let Err(error) = self.change_budget(wanted) {
            // What is free by its count the driver does not give: later, maybe.
            match self.guards.keep_free.was_refused(now) {
                true => {
                    tracing::warn!(%error, wanted_bytes = wanted, "the budget could not be changed for what is kept free");
                }
                false => tracing::debug!(%error, wanted_bytes = wanted, "memory is refused still"),
            }
            return false;
        }
        self.guards.keep_free.was_changed(change);
        let free_now = self.memory.store.count_free_bytes_now();
        tracing::info!(
            target: "memory",
            keep_free_bytes = self.guards.keep_free.bytes(),
            free_bytes = (free < u64::MAX).then_some(free),
            free_bytes_now = free_now,
            budget_before_bytes = before,
            budget_bytes = wanted,
            took_ms = (self.now() - now).as_secs_f64() * 1e3,
            "{words}"
        );
        self.publish(true);
        true
    }

    /// Checks whether the machine is short of host memory, if a check is due, and gives some back
    /// or allows the engine to take it again. Returns whether anything has changed.
    pub(crate) fn watch_host(&mut self) -> bool {
        let before = self.memory.host_bytes();
        let began = self.now();
        let watch = self.guards.host_pressure.as_mut();
        let Some(Look { stalled, change }) = watch.and_then(|watch| watch.look(before, began))
        else {
            return false;
        };
        let (limit, words) = match change {
            host_pressure::Change::None => return false,
            host_pressure::Change::Shrink(limit) => {
                (limit, "the machine is short of memory: some is given back")
            }
            host_pressure::Change::Grow(limit) => {
                (limit, "memory of the machine may be taken again")
            }
        };
        self.memory.limit_host(limit);
        tracing::info!(
            target: "memory",
            stalled_percent = stalled,
            held_before_bytes = before,
            held_bytes = self.memory.host_bytes(),
            host_budget_bytes = limit,
            took_ms = (self.now() - began).as_secs_f64() * 1e3,
            "{words}"
        );
        self.publish(true);
        true
    }
}
