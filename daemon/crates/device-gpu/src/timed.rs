//! How long the device takes for what is queued between two moments, and whether it has done it:
//! events around it, which nobody waits for.

use std::time::Duration;

use rocmforge_device::{Error, Throughput, TimedTicket, TimedWork, Timing};
use rocmforge_gpu_driver::{Context, Event, Stream};

use super::reserve::SLOTS as UPLOAD_SLOTS;
use super::{GpuDevice, failed};

/// Parts of the work that may be under way at once. What is queued beyond them is not timed.
const SLOTS: usize = 32;

/// The parts of the work that are timed.
#[derive(Debug, Default)]
pub(super) struct TimedParts {
    /// Made when they are needed first.
    slots: Vec<Slot>,
    next_ticket: u64,
}

#[derive(Debug)]
struct Slot {
    begun: Event,
    done: Event,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Begun(u64),
    Ended(u64),
}

impl Slot {
    fn new(context: &Context) -> Result<Self, Error> {
        let event = || Event::new(context, true).map_err(|e| failed("making an event", e));
        Ok(Self {
            begun: event()?,
            done: event()?,
            state: State::Free,
        })
    }
}

impl TimedParts {
    /// Begins a part behind what the stream has queued; `None` where it cannot be timed. Errors of
    /// the driver show in the work itself.
    pub(super) fn begin(&mut self, context: &Context, stream: &Stream) -> Option<TimedTicket> {
        let free = self.slots.iter().position(|slot| slot.state == State::Free);
        let at = match free {
            Some(at) => at,
            None if self.slots.len() < SLOTS => {
                self.slots.push(Slot::new(context).ok()?);
                self.slots.len() - 1
            }
            None => return None,
        };
        let slot = &mut self.slots[at];
        slot.begun.record(stream).ok()?;
        slot.state = State::Begun(self.next_ticket);
        self.next_ticket += 1;
        Some(TimedTicket(self.next_ticket - 1))
    }

    fn slot(&mut self, state: State) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.state == state)
    }

    /// Ends a part behind what the stream has queued.
    pub(super) fn end(&mut self, ticket: TimedTicket, stream: &Stream) {
        if let Some(slot) = self.slot(State::Begun(ticket.0)) {
            slot.state = match slot.done.record(stream) {
                Ok(()) => State::Ended(ticket.0),
                Err(_) => State::Free,
            };
        }
    }

    /// Whether the device has done a part that was ended, and how long it took. Its place is free
    /// then.
    pub(super) fn look(&mut self, ticket: TimedTicket) -> TimedWork {
        let Some(slot) = self.slot(State::Ended(ticket.0)) else {
            return TimedWork::Done(None);
        };
        match slot.done.is_passed() {
            Ok(false) => TimedWork::UnderWay,
            passed => {
                slot.state = State::Free;
                let ms = slot.done.elapsed_ms_since(&slot.begun).ok();
                let ms = ms.filter(|_| passed.is_ok());
                TimedWork::Done(ms.and_then(|ms| Duration::try_from_secs_f32(ms / 1e3).ok()))
            }
        }
    }
}

impl Timing for GpuDevice {
    fn pace(&mut self, rows: usize) -> Option<Throughput> {
        let reserve = self.reserve?;
        Some(Throughput {
            computed_bytes_per_s: self.runs.rate(rows)?,
            upload_bytes_per_s: self.uploads.bytes_per_s()?,
            ahead_bytes: UPLOAD_SLOTS as u64 * reserve.slot_bytes,
        })
    }

    fn begin_timed(&mut self) -> Option<TimedTicket> {
        self.timed.begin(&self.context, &self.compute)
    }

    fn end_timed(&mut self, ticket: TimedTicket) {
        self.timed.end(ticket, &self.compute);
    }

    fn look_at_timed(&mut self, ticket: TimedTicket) -> TimedWork {
        self.timed.look(ticket)
    }
}
