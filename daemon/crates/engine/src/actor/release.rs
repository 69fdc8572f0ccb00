//! Gives the device's memory back while there are no requests, and takes it again.

use std::time::{Duration, Instant};

use crate::actor::engine::Engine;
use crate::api::error::Error;
use crate::api::refusal::Refusal;
use crate::api::{Command, GenerateEvent, PreloadEvent, PreloadRoom, Released};
use crate::guards::budget::{self, BUDGET_MIN};
use crate::guards::power_log::BEHIND_RELEASE;
use crate::pass::backlog::Backlog;
use crate::request::encode;

type DeviceError = rocmforge_device::Error;

/// The budget is lowered by one part in this many at a time while it cannot be taken back as a
/// whole.
const LESS_PART: u64 = 8;

impl Engine {
    /// Gives the device's memory back at a client's command; preloads under way end. With `host`,
    /// or if so configured, host memory is given back as well.
    ///
    /// # Errors
    /// [`Refusal::InUse`] while requests run or wait; the device is lost.
    pub(crate) fn release_asked(&mut self, host: bool) -> Result<Released, Error> {
        let requests = self.requests.all().count() + self.requests.images.waiting(|_| true);
        if requests > 0 {
            let message = format!(
                "memory cannot be released while requests run or wait, of which there are {requests}: try again when they \
                 have ended, or lower the budget (rocmforgectl cache budget)"
            );
            return Err(Refusal::InUse { message }.into());
        }
        let gone = || Error::Unavailable {
            message: "the device's memory was released; preload the model again".to_owned(),
            retry_after: Duration::from_secs(1),
        };
        self.preloads.end(|_| true, gone);
        let host = host || self.guards.release.takes_host();
        self.release_memory(host)
    }

    /// Gives back all memory of the device except pinned weights and the device's own block.
    pub(crate) fn release_memory(&mut self, host: bool) -> Result<Released, Error> {
        let (began, before) = (self.now(), self.budget_that_comes_back());
        if !self.memory.store.device.is_closed() {
            self.note_power(Duration::ZERO, "the GPU as its memory is released");
        }
        let held_before = self.held_bytes();
        // Noted first: if a step fails, the next request still takes the memory again.
        self.guards.release.released(before);
        self.memory.write_all_notes();
        // First, so that no page is copied to where it would be dropped.
        let closed = host.then(|| self.memory.close_host());
        let evicted = match self.memory.store.device.is_closed() {
            true => Ok(()),
            false => self.evict_for_release(before),
        };
        let host_freed_bytes = closed.map_or(0, |closed| self.memory.open_host(closed));
        evicted?;
        let closed = self.close_device();
        if closed {
            self.note_power(BEHIND_RELEASE, "the GPU some seconds after it was closed");
        }
        let held = self.held_bytes();
        let released = Released {
            freed_bytes: held_before.saturating_sub(held),
            kept_bytes: held,
            budget_bytes: self.guards.release.before().unwrap_or(before),
            host_freed_bytes,
        };
        tracing::info!(
            target: "memory",
            freed_bytes = released.freed_bytes,
            kept_bytes = held,
            host_freed_bytes,
            budget_bytes = released.budget_bytes,
            closed,
            power_state = self.memory.store.device.power_state(),
            free_bytes = self.memory.store.count_free_bytes_now(),
            took_ms = (self.now() - began).as_secs_f64() * 1e3,
            "the device's memory is released; the next request takes it again"
        );
        Ok(released)
    }

    /// Evicts weights, moves KV pages to host memory and disk, and shrinks the budget to what
    /// stays.
    fn evict_for_release(&mut self, before: u64) -> Result<(), Error> {
        self.free_scratch();
        self.memory.store.wait_all();
        while self.memory.give_up_draft_kv() {}
        self.change_budget(self.least_budget().min(before))?;
        // Not the whole of `Memory::clear`, which drops the pages in host memory, too.
        self.memory.store.clear(None)?;
        Ok(())
    }

    /// Closes the device, unless pinned weights are on it or it has no context to close. Returns
    /// whether it is closed.
    pub(crate) fn close_device(&mut self) -> bool {
        self.memory.collect();
        if !self.memory.store.is_empty() {
            let pinned_bytes = self.memory.store.cache.usage().pinned;
            tracing::info!(target: "memory", pinned_bytes, "the device stays open: something is on it");
            self.guards.release.close_ended();
            return false;
        }
        // What the eviction began to copy to disk would go with the device.
        self.memory.end_copies(true);
        let aside = self.memory.host_kv.highest();
        let closed = self.memory.store.close_device(aside);
        let is_closed = self.memory.store.device.is_closed();
        if is_closed {
            // What it timed is known to nobody any more.
            self.space.backlog = Backlog::default();
            self.memory.host_kv.device_was_closed();
        }
        match closed {
            Ok(_) => self.guards.release.close_ended(),
            Err(error) => {
                tracing::warn!(%error, is_closed, "the GPU could not be closed as a whole; that is tried again later");
                let now = self.now();
                self.guards.release.close_failed(now);
            }
        }
        is_closed
    }

    /// Opens the device if it is closed. Returns whether it was closed.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it is still closed, and the next request tries again; the
    /// device is lost.
    pub(crate) fn open_device(&mut self) -> Result<bool, Error> {
        let began = self.now();
        let power_state = self.memory.store.device.power_state();
        let opened = self.memory.store.open_device();
        let opened = opened.map_err(|error| match error {
            DeviceError::Lost(_) => self.memory.store.device_error(None, error),
            _ => Error::Unavailable {
                message: format!(
                    "the GPU was closed while nobody used it, and cannot be opened again: {error}; the next request tries again"
                ),
                retry_after: Duration::from_secs(1),
            },
        });
        match &opened {
            Ok(true) => {
                let took_ms = (self.now() - began).as_secs_f64() * 1e3;
                tracing::info!(target: "memory", took_ms, power_state, "the GPU is open again");
                self.note_power(Duration::ZERO, "the GPU as it is opened again");
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the GPU is closed still"),
        }
        opened
    }

    /// Has the GPU's power draw logged once `after` has passed, with `words` to say when.
    fn note_power(&self, after: Duration, words: &'static str) {
        let places = &self.config.places;
        self.guards.power.note(places, after, words);
    }

    /// Bytes of device memory that the process holds, by the driver's count; the cache's sum if the
    /// driver does not count.
    fn held_bytes(&self) -> u64 {
        let store = &self.memory.store;
        let usage = || store.cache.usage().resident + store.cache.usage().blocks();
        let held = store.device.memory_use();
        held.map_or_else(usage, |held| held.allocated_bytes)
    }

    /// The smallest budget, in bytes: pinned weights and the device's own block.
    pub(crate) fn least_budget(&self) -> u64 {
        let least = self.memory.store.reserve_bytes() + self.memory.store.pinned_bytes();
        let least = least.next_multiple_of(rocmforge_device::ALIGNMENT);
        least.max(BUDGET_MIN)
    }

    /// Releases the device's memory if there was no request for the configured time.
    pub(crate) fn release_when_idle(&mut self, now: Instant) {
        let left = self.guards.release.due_in(now);
        if !left.is_some_and(|left| left.is_zero()) {
            return;
        }
        let is_idle = self.is_idle() && self.draining.is_none();
        if self.guards.release.before().is_some() {
            match is_idle {
                true => {
                    self.close_device();
                    self.publish(true);
                }
                false => self.guards.release.close_failed(now),
            }
            return;
        }
        if !is_idle {
            return self.guards.release.note_work(now);
        }
        if let Err(error) = self.release_memory(self.guards.release.takes_host()) {
            tracing::warn!(%error, "the device's memory could not be released as a whole");
        }
        self.publish(true);
    }

    /// Handles an unpin while the device's memory is released: evicts the unpinned weights, too,
    /// and closes the device.
    pub(crate) fn release_unpinned(&mut self) {
        let is_released = self.guards.release.before().is_some();
        let is_open = !self.memory.store.device.is_closed();
        let may_go = is_released && is_open && self.is_idle() && self.draining.is_none();
        if may_go && let Err(error) = self.release_memory(false) {
            tracing::warn!(%error, "the device's memory could not be released as a whole");
        }
    }

    /// Whether there are no requests and no background work. A request that waits for its reader,
    /// an image or a file counts as work.
    pub(crate) fn is_idle(&self) -> bool {
        let images = self.requests.images.waiting(|_| true);
        self.requests.is_empty()
            && images == 0
            && self.preloads.is_empty()
            && !self.waits_for_files()
    }

    /// Takes released device memory again if a command needs it: as much as is free, if other
    /// processes have taken some of it.
    ///
    /// # Errors
    /// As [`Engine::open_device`].
    pub(crate) fn wake_for(&mut self, command: &Command) -> Result<(), Error> {
        let wakes = match command {
            Command::Generate { .. } | Command::Score { .. } | Command::Embed { .. } => {
                self.guards.release.before().is_none() || self.is_sound(command)
            }
            Command::ReadImage { .. } => true,
            // What goes into free room alone is not worth it.
            Command::Preload { room, .. } => *room != PreloadRoom::Free,
            Command::Pin { pinned, .. } => *pinned,
            _ => false,
        };
        if wakes && self.draining.is_none() {
            let now = self.now();
            self.guards.release.note_work(now);
            self.take_released()?;
        }
        Ok(())
    }

    /// Whether a command passes the checks that need no device, so that it is worth taking the
    /// device's memory again.
    fn is_sound(&self, command: &Command) -> bool {
        let (model, ids, beyond, n_ctx) = match command {
            Command::Generate { request, .. } => {
                (&request.model, &request.prompt, 0, request.n_ctx)
            }
            Command::Score { request, .. } if request.ids.len() < 2 => return false,
            Command::Score { request, .. } => (&request.model, &request.ids, 1, None),
            Command::Embed { request, .. } => {
                return self.check(&request.model, &request.ids, 0, None).is_ok();
            }
            _ => return true,
        };
        encode::refuse_text(model).is_ok() && self.check(model, ids, beyond, n_ctx).is_ok()
    }

    /// Takes the device's memory again for requests that exist although it is released, such as one
    /// whose hung file came back.
    pub(crate) fn wake_for_requests(&mut self) {
        if self.guards.release.before().is_some()
            && !self.requests.is_empty()
            && let Err(error) = self.take_released()
        {
            self.end_those(|_| Some(error.clone()));
        }
    }

    fn take_released(&mut self) -> Result<(), Error> {
        let Some(wanted) = self.guards.release.before() else {
            return Ok(());
        };
        let began = self.now();
        self.open_device()?;
        self.guards.release.take_before();
        if self.guards.yields() {
            // Requests get what they need of it, and not what another process is to have.
            return Ok(());
        }
        let missing = self.take_again(wanted);
        let budget = self.memory.budget();
        let took_ms = (self.now() - began).as_secs_f64() * 1e3;
        match missing > 0 {
            true => tracing::warn!(
                target: "memory",
                budget_bytes = budget,
                wanted_bytes = wanted,
                took_ms,
                "others hold memory that was released: the budget is smaller, and grows as they free it"
            ),
            false => tracing::info!(
                target: "memory",
                budget_bytes = budget,
                took_ms,
                "the released memory is taken again"
            ),
        }
        self.publish(true);
        Ok(())
    }

    /// Raises the budget to `wanted` bytes or, if others hold some of that, to what is free.
    /// Returns the missing bytes, which are taken when they become free.
    pub(crate) fn take_again(&mut self, wanted: u64) -> u64 {
        let least = self.memory.budget();
        let mut budget = self.budget_beside_others(wanted);
        while let Err(error) = self.change_budget(budget) {
            let less = budget - budget / LESS_PART;
            budget = less & !(rocmforge_device::ALIGNMENT - 1);
            tracing::debug!(%error, "the memory cannot be had as a whole; trying {budget} bytes");
            if budget <= self.memory.budget().max(least) || self.lost().is_some() {
                break;
            }
        }
        let missing = wanted.saturating_sub(self.memory.budget());
        self.guards.keep_free.budget_was_cut(missing);
        missing
    }

    /// The part of a budget of `wanted` bytes that leaves free what is to be kept free, but at
    /// least the part that stays whatever others want.
    fn budget_beside_others(&mut self, wanted: u64) -> u64 {
        let Some(free) = self.memory.store.count_free_bytes_now() else {
            return wanted;
        };
        let least = self.memory.budget();
        let info = self.memory.store.device.info();
        // There the system would swap instead of refusing.
        let wanted = match info.machine_memory {
            true => wanted.min(least + budget::beside_system(free, info.memory_bytes)),
            false => wanted,
        };
        let most = self.guards.keep_free.most(free, least, wanted);
        (most & !(rocmforge_device::ALIGNMENT - 1)).max(least.min(wanted))
    }
}

/// Rejects a command that needs the device with the error that keeps the device closed.
pub(crate) fn refuse(command: Command, error: Error) {
    // Whoever asked may have given up. The channels of events are new and have room.
    match command {
        Command::Generate { events, .. } => {
            let _ = events.try_send(GenerateEvent::Failed(error));
        }
        Command::Preload { events, .. } => {
            let _ = events.try_send(PreloadEvent::Failed(error));
        }
        Command::Score { reply, .. } => {
            let _ = reply.send(Err(error));
        }
        Command::Embed { reply, .. } => {
            let _ = reply.send(Err(error));
        }
        Command::ReadImage { reply, .. } => {
            let _ = reply.send(Err(error));
        }
        Command::Pin { reply, .. } => {
            let _ = reply.send(Err(error));
        }
        // No other wakes it.
        _ => tracing::error!(%error, "a command is not carried out"),
    }
}
