//! Reads that are begun and ended apart: what a pass found is copied to the host behind its work,
//! and whoever began the read does something else until it has come.
//!
//! ```text
//!   free --time_from_here--> timed --+
//!     |                              v
//!     +---------begin----------> under way --end--> free
//! ```
//!
//! The copies are in the order of the compute stream, so what later work writes where they read
//! changes nothing.

use std::time::Duration;

use rocmforge_device::{Error, ReadTicket};
use rocmforge_gpu_driver::{Context, DevicePtr, Event, PinnedBuffer, Stream};

use super::errors::{failed, stream_driver};
use super::uploads::UploadMark;
use super::wait;

/// Reads that may be under way at once.
const SLOTS: usize = 8;

/// Bytes of one of them at most: ids and logits of 64 tokens for each of 128 rows.
const SLOT_BYTES: usize = 64 << 10;

/// Reads that are begun and ended apart, if any are.
#[derive(Debug)]
pub(super) struct Reads {
    places: Option<Places>,
    /// Whether the driver refused memory for reads.
    refused: bool,
    patience: Duration,
}

/// The places of reads.
#[derive(Debug)]
pub(super) struct Places {
    memory: PinnedBuffer,
    slots: Vec<Slot>,
    /// The slot whose read is to tell how long the device took from its first event on.
    timed: Option<usize>,
    next_ticket: u64,
    patience: Duration,
}

#[derive(Debug)]
struct Slot {
    begun: Event,
    done: Event,
    under_way: Option<UnderWay>,
}

/// A read that was begun.
#[derive(Debug)]
struct UnderWay {
    ticket: ReadTicket,
    bytes: usize,
    /// Elements that are wanted of a row.
    of_row: usize,
    /// `Slot::begun` was recorded for it.
    timed: bool,
    /// What uploads it is behind, and what the stream had queued.
    uploads: UploadMark,
    queued: u64,
}

/// A read that has come.
#[derive(Debug)]
pub(super) struct Come {
    pub(super) bytes: Vec<u8>,
    /// Elements of a row.
    pub(super) of_row: usize,
    /// How long the device took from [`Places::time_from_here`] on.
    pub(super) took: Option<Duration>,
    pub(super) uploads: UploadMark,
    /// What the stream had queued that has ended with it.
    pub(super) queued: u64,
}

impl Reads {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            places: None,
            refused: false,
            patience,
        }
    }

    /// The places, made when they are needed first; `None` where reads are waited for. Pinned
    /// memory is the host's, and a pass is not to fail for want of it.
    pub(super) fn places(&mut self, context: &Context) -> Option<&mut Places> {
        if self.places.is_none() && !self.refused {
            match Places::new(context, self.patience) {
                Ok(places) => self.places = Some(places),
                Err(error) => {
                    tracing::warn!(%error, "what passes find is waited for, also beside others");
                    self.refused = true;
                }
            }
        }
        self.places.as_mut()
    }

    /// Whether a read has ended, with success or an error; [`Self::end`] returns which.
    pub(super) fn has_come(&self, ticket: ReadTicket) -> bool {
        let places = self.places.as_ref();
        places.is_none_or(|places| places.has_come(ticket))
    }

    /// Waits for a read.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn end(&mut self, ticket: ReadTicket) -> Result<Come, Error> {
        let Some(places) = &mut self.places else {
            return Err(unknown(ticket));
        };
        places.end(ticket)
    }

    /// Nothing is timed: other work comes between.
    pub(super) fn forget_time(&mut self) {
        if let Some(places) = &mut self.places {
            places.timed = None;
        }
    }
}

fn unknown(ticket: ReadTicket) -> Error {
    Error::Driver {
        operation: "reading from the device",
        message: format!("no read {} is under way", ticket.0),
    }
}

impl Places {
    fn new(context: &Context, patience: Duration) -> Result<Self, Error> {
        let event = || Event::new(context, true).map_err(|e| failed("making an event", e));
        let slot = |_| {
            Ok(Slot {
                begun: event()?,
                done: event()?,
                under_way: None,
            })
        };
        Ok(Self {
            memory: PinnedBuffer::new(context, SLOTS * SLOT_BYTES)
                .map_err(|e| failed("allocating pinned memory", e))?,
            slots: (0..SLOTS).map(slot).collect::<Result<_, Error>>()?,
            timed: None,
            next_ticket: 0,
            patience,
        })
    }

    fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.under_way.is_none())
    }

    /// The next read that is begun tells how long the device took from here on.
    pub(super) fn time_from_here(&mut self, stream: &Stream) -> Result<(), Error> {
        self.timed = self.free_slot();
        let Some(slot) = self.timed else {
            return Ok(());
        };
        let recorded = self.slots[slot].begun.record(stream);
        recorded.map_err(|e| failed("recording an event", e))
    }

    /// Whether a read of so many bytes could begin.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        bytes <= SLOT_BYTES && self.free_slot().is_some()
    }

    /// Begins to copy from an address of the arena, behind what a stream has queued; `None` where
    /// [`Places::has_room`] says no.
    pub(super) fn begin(
        &mut self,
        stream: &Stream,
        (at, bytes): (u64, usize),
        (of_row, uploads): (usize, UploadMark),
    ) -> Result<Option<ReadTicket>, Error> {
        let timed = self.timed.take();
        let slot = timed.or_else(|| self.free_slot());
        let Some(slot) = slot.filter(|_| bytes <= SLOT_BYTES) else {
            return Ok(None);
        };
        let to = self.memory.as_ptr().wrapping_add(slot * SLOT_BYTES);
        let driver = stream_driver(stream)?;
        // SAFETY: the source is inside the arena (the caller asked it for the address), the
        // destination inside the slot's part, which no other read has and which is looked at
        // only when the event behind the copy has passed.
        unsafe { driver.copy_d2h_async(to, DevicePtr(at), bytes as u64, stream.handle()) }
            .map_err(|e| failed("reading from the device", e))?;
        drop(driver);
        let of = &mut self.slots[slot];
        of.done
            .record(stream)
            .map_err(|e| failed("recording an event", e))?;
        let ticket = ReadTicket(self.next_ticket);
        self.next_ticket += 1;
        of.under_way = Some(UnderWay {
            ticket,
            bytes,
            of_row,
            timed: timed.is_some(),
            uploads,
            queued: stream.queued(),
        });
        Ok(Some(ticket))
    }

    fn slot_of(&self, ticket: ReadTicket) -> Option<usize> {
        let is_it = |slot: &Slot| slot.under_way.as_ref().is_some_and(|u| u.ticket == ticket);
        self.slots.iter().position(is_it)
    }

    fn has_come(&self, ticket: ReadTicket) -> bool {
        let slot = self.slot_of(ticket);
        slot.is_none_or(|slot| self.slots[slot].done.is_passed().unwrap_or(true))
    }

    /// Waits for a read. Its place is free again, unless the device is lost.
    fn end(&mut self, ticket: ReadTicket) -> Result<Come, Error> {
        let Some(at) = self.slot_of(ticket) else {
            return Err(unknown(ticket));
        };
        let passed = wait::until_passed(&self.slots[at].done, self.patience);
        if let Err(Error::Lost(loss)) = passed {
            return Err(Error::Lost(loss));
        }
        let slot = &mut self.slots[at];
        let Some(UnderWay {
            bytes,
            of_row,
            timed,
            uploads,
            queued,
            ..
        }) = slot.under_way.take()
        else {
            unreachable!("it was found by its read");
        };
        passed?;
        let took = match timed {
            true => slot.done.elapsed_ms_since(&slot.begun).ok(),
            false => None,
        };
        // SAFETY: the copy into the slot has ended, and no other begins while the slice lives.
        let all = unsafe { self.memory.as_slice() };
        Ok(Come {
            bytes: all[at * SLOT_BYTES..][..bytes].to_vec(),
            took: took.and_then(|ms| Duration::try_from_secs_f32(ms / 1e3).ok()),
            of_row,
            uploads,
            queued,
        })
    }
}
