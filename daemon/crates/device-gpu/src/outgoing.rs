//! Ranges of the arena on their way to the host's memory for good, as KV pages that are written to
//! disk: a copy is queued behind what the compute stream has queued, and the engine thread comes
//! for it when it has ended.
//!
//! ```text
//!   free --begin--> under way --(its event has passed)--end--> free
//! ```
//!
//! The copies are in the order of the compute stream, so the range may be written again as soon as
//! its copy is queued.

use std::time::Duration;

use rocmforge_device::{CopyStart, CopyTicket, Error};
use rocmforge_gpu_driver::{Context, DevicePtr, Event, PinnedBuffer, Stream};

use super::errors::{failed, stream_driver};
use super::wait;

/// Copies that may be under way at once.
const SLOTS: usize = 4;

/// Bytes of a copy at most: a page of 32 positions of a model with 32 layers and 1,024 elements of
/// keys and of values each, in f16.
const SLOT_BYTES: usize = 4 << 20;

/// Copies to the host that are begun and ended apart.
#[derive(Debug)]
pub(super) struct Outgoing {
    slots: Vec<Slot>,
    /// Whether the driver refused memory for them.
    refused: bool,
    next_ticket: u64,
    patience: Duration,
}

#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    done: Event,
    under_way: Option<(CopyTicket, usize)>,
}

impl Outgoing {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            slots: Vec::new(),
            refused: false,
            next_ticket: 0,
            patience,
        }
    }

    /// A slot without a copy, made if there are less than [`SLOTS`].
    fn free_slot(&mut self, context: &Context) -> Option<usize> {
        let free = self.slots.iter().position(|s| s.under_way.is_none());
        if free.is_some() || self.slots.len() == SLOTS || self.refused {
            return free;
        }
        let memory = PinnedBuffer::new(context, SLOT_BYTES);
        match memory.and_then(|memory| Ok((memory, Event::new(context, false)?))) {
            Ok((memory, done)) => {
                self.slots.push(Slot {
                    memory,
                    done,
                    under_way: None,
                });
                Some(self.slots.len() - 1)
            }
            Err(error) => {
                tracing::debug!(%error, "no further pinned memory for copies to the host");
                self.refused = true;
                None
            }
        }
    }

    /// Queues a copy of `bytes` bytes from an address of the arena behind the work of a stream.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn begin(
        &mut self,
        context: &Context,
        (at, bytes): (u64, u64),
        stream: &Stream,
    ) -> Result<CopyStart, Error> {
        if bytes > SLOT_BYTES as u64 || (self.refused && self.slots.is_empty()) {
            return Ok(CopyStart::Unsupported);
        }
        let Some(index) = self.free_slot(context) else {
            let none = self.slots.is_empty();
            return Ok(match none {
                true => CopyStart::Unsupported,
                false => CopyStart::Busy,
            });
        };
        let slot = &mut self.slots[index];
        let driver = stream_driver(stream)?;
        // SAFETY: the source is inside the arena (the caller asked it for the address), the
        // destination is the slot's, which no other copy has and which is looked at only when the
        // event behind the copy has passed.
        unsafe {
            driver.copy_d2h_async(slot.memory.as_ptr(), DevicePtr(at), bytes, stream.handle())
        }
        .map_err(|e| failed("copying a page to the host", e))?;
        drop(driver);
        if let Err(error) = slot.done.record(stream) {
            // Without its event the slot must not be used again before the copy has ended.
            let _ = stream.synchronize();
            return Err(failed("recording an event", error));
        }
        let ticket = CopyTicket(self.next_ticket);
        self.next_ticket += 1;
        slot.under_way = Some((ticket, bytes as usize));
        Ok(CopyStart::Begun(ticket))
    }

    /// Returns the bytes of a copy that has ended; of one that has not, only if the caller `waits`.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn end(
        &mut self,
        ticket: CopyTicket,
        waits: bool,
    ) -> Result<Option<Vec<u8>>, Error> {
        let patience = self.patience;
        let mut slots = self.slots.iter_mut();
        let found = slots.find_map(|slot| match slot.under_way {
            Some((its, bytes)) if its == ticket => Some((slot, bytes)),
            _ => None,
        });
        let Some((slot, bytes)) = found else {
            return Err(Error::Driver {
                operation: "copying a page to the host",
                message: format!("no copy {} is under way", ticket.0),
            });
        };
        if !waits && !slot.done.is_passed().unwrap_or(true) {
            return Ok(None);
        }
        let passed = wait::until_passed(&slot.done, patience);
        if let Err(Error::Lost(loss)) = passed {
            // The slot stays taken: the device may write to it still.
            return Err(Error::Lost(loss));
        }
        slot.under_way = None;
        passed?;
        // SAFETY: the copy into the slot has ended, and no other begins while the slice lives.
        let all = unsafe { slot.memory.as_slice() };
        Ok(Some(all[..bytes].to_vec()))
    }
}
