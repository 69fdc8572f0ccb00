//! The streams of uploads: copies into slots, repacking out of them, and the end of an upload.
//!
//! ```text
//!   copy streams, in turn:  wait for drained[slot] | copy rows            | record filled[slot]
//!   repack stream:          wait for filled[slot]  | repack into the slab | record drained[slot]
//! ```
//!
//! A stream of AMD's has one copy engine. With two of them the next copy begins before the first
//! has ended. One that is timed is alone: the rate of a copy beside another would be half of the
//! link's.
//!
//! A card that shares the machine's memory may read rows where the host has them, without a slot:
//! then the repack stream waits for nothing but what the upload comes behind (`in_place.rs`).
//!
//! *Invariant:* what is queued here is queued by one thread at a time: the lane is behind a lock.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::{Error, PlacedTensor};
use rocmforge_gpu_driver::{Context, DevicePtr, Event, PinnedBuffer, Priority, Stream};
use rocmforge_kernels_gpu::ops::weights::{self, Weights};

use crate::kernels::Kernels;
use crate::pace::Stopwatch;
use crate::reserve::{DeviceReserve, FLAGS, SLOTS};
use crate::windows::Part;
use crate::{failed, launch_error, stream_driver};

use super::events::Before;
use super::in_place::{self, Source, Way, Ways};
use super::job::Job;

/// Most copy streams: a copy that is timed waits for the one before alone.
const COPY_STREAMS_MAX: usize = 2;

/// The streams that uploads are queued on, and which slot is next.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) kernels: Arc<Kernels>,
    /// At least one.
    copies: Vec<Stream>,
    /// Which of them has the last copy, and the slot of that.
    last: (usize, usize),
    /// Whether the last rows were read by the repack stream itself.
    was_in_place: bool,
    /// Whether that is timed, so that the next one comes behind it.
    alone: bool,
    pub(super) repack: Stream,
    /// Addresses of the reserve's parts.
    pub(super) reserve: DeviceReserve,
    next_slot: usize,
    /// What the repack stream has last waited for.
    behind: Option<Before>,
    /// For each slot: its copy has ended, its repacking has ended.
    filled: Vec<Event>,
    drained: Vec<Event>,
    /// Seconds a byte of a copy, or of repacking without one.
    pub(super) pace: Stopwatch,
    flags: Arc<Flags>,
    /// What is read where the host has it.
    pub(super) ways: Ways,
    /// How long a trial may take.
    pub(super) patience: Duration,
}

/// Rows of a matrix that are readable for the copy engine.
#[derive(Debug)]
pub(super) struct Rows<'a> {
    pub(super) placed: &'a PlacedTensor,
    pub(super) rows: Range<u64>,
    /// One part after the other.
    pub(super) parts: Vec<Part>,
    pub(super) source: Source,
}

impl Rows<'_> {
    /// Bytes of a slot that the rows take.
    pub(super) fn slot_bytes(&self) -> u64 {
        in_slot(self.parts.iter().map(|part| part.bytes).sum())
    }
}

/// Bytes of a slot that so many bytes of a matrix take.
pub(super) fn in_slot(bytes: u64) -> u64 {
    bytes.next_multiple_of(16)
}

/// What uploads' flags were, u32 each, copied back when an upload ends.
#[derive(Debug)]
pub(super) struct Flags(PinnedBuffer);

impl Flags {
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        PinnedBuffer::new(context, FLAGS as usize * 4)
            .map(Self)
            .map_err(|e| failed("allocating pinned memory", e))
    }

    /// The place of an upload's flag.
    fn place(&self, job: &Job) -> *mut u8 {
        self.0.as_ptr().wrapping_add(job.flag as usize * 4)
    }

    /// Whether an upload, whose event has passed, had a scale that is not finite.
    pub(super) fn is_raised(&self, job: &Job) -> bool {
        // SAFETY: the flag lies inside the buffer, and the copy into it has ended:
        // the job's event has passed.
        let flag = unsafe { self.place(job).cast::<u32>().read_volatile() };
        flag & 1 != 0
    }
}

impl Lane {
    pub(super) fn new(
        context: &Context,
        kernels: Arc<Kernels>,
        flags: Arc<Flags>,
        copy_streams: usize,
        patience: Duration,
    ) -> Result<Self, Error> {
        let stream =
            || Stream::new(context, Priority::Normal).map_err(|e| failed("making a stream", e));
        let event = || Event::new(context, false).map_err(|e| failed("making an event", e));
        Ok(Self {
            kernels,
            copies: (0..copy_streams.clamp(1, COPY_STREAMS_MAX))
                .map(|_| stream())
                .collect::<Result<_, _>>()?,
            last: (0, 0),
            was_in_place: false,
            alone: false,
            repack: stream()?,
            reserve: DeviceReserve::default(),
            next_slot: 0,
            behind: None,
            filled: (0..SLOTS).map(|_| event()).collect::<Result<_, _>>()?,
            drained: (0..SLOTS).map(|_| event()).collect::<Result<_, _>>()?,
            pace: Stopwatch::new(context)?,
            flags,
            ways: Ways::of(context.attributes()),
            patience,
        })
    }

    /// Waits for all streams, also where waiting for one fails.
    pub(super) fn synchronize(&self) -> Result<(), rocmforge_gpu_driver::Error> {
        let mut outcome = Ok(());
        for stream in self.copies.iter().chain([&self.repack]) {
            outcome = outcome.and(stream.synchronize());
        }
        outcome
    }

    /// The stream that reads the rows that were queued last.
    pub(super) fn last_reader(&self) -> &Stream {
        match self.was_in_place {
            true => &self.repack,
            false => &self.copies[self.last.0],
        }
    }

    /// The slot that the last copies went to.
    pub(super) fn last_slot(&self) -> DevicePtr {
        DevicePtr(self.slot_at(self.last.1))
    }

    /// The slot that the next copies go to.
    pub(super) fn next_slot(&self) -> DevicePtr {
        DevicePtr(self.slot_at(self.next_slot))
    }

    fn slot_at(&self, slot: usize) -> u64 {
        self.reserve.slots + slot as u64 * self.reserve.slot_bytes
    }

    /// Brings rows to their places in the slab. [`Rows::slot_bytes`] of all fit a slot.
    pub(super) fn rows(&mut self, job: &Job, some: &[Rows<'_>]) -> Result<(), Error> {
        match self.ways.of_rows(some) {
            Way::Copied => self.through_slot(job, some),
            Way::InPlace => self.in_place(job, some),
            Way::Untried => self.try_both(job, some),
        }
    }

    /// Queues the copies of rows into one slot and their repacking into the slab.
    pub(super) fn through_slot(&mut self, job: &Job, some: &[Rows<'_>]) -> Result<(), Error> {
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % SLOTS;
        let slot_at = self.slot_at(slot);
        let slot_end = slot_at + self.reserve.slot_bytes;
        let wrong = |e| failed("queueing an upload", e);
        let context = self.repack.context().clone();
        let driver = context.driver().map_err(wrong)?;
        let (before, slot_before) = self.last;
        self.last = ((before + 1) % self.copies.len(), slot);
        self.was_in_place = false;
        let copy = &self.copies[self.last.0];
        copy.wait(&self.drained[slot]).map_err(wrong)?;
        if self.copies.len() > 1 && (self.alone || self.pace.is_due()) {
            copy.wait(&self.filled[slot_before]).map_err(wrong)?;
        }
        let timed = self.pace.begin(copy);
        self.alone = timed;
        let mut first = slot_at;
        for rows in some {
            let mut at = first;
            for part in &rows.parts {
                assert!(at + part.bytes <= slot_end, "a slot has room");
                // SAFETY: the source is registered or pinned and stays so until the job has
                // settled, respectively the piece's event has passed; the slot is drained
                // and has room.
                unsafe {
                    driver.copy_h2d_async(DevicePtr(at), part.host, part.bytes, copy.handle())
                }
                .map_err(wrong)?;
                at += part.bytes;
            }
            first += rows.slot_bytes();
        }
        // A launch may have to compile its kernel first, which is no call of the driver.
        drop(driver);
        self.filled[slot].record(copy).map_err(wrong)?;
        if timed {
            self.pace.end(copy, first - slot_at);
        }
        self.repack.wait(&self.filled[slot]).map_err(wrong)?;
        self.come_behind(job)?;
        let mut outcome = Ok(());
        let mut first = slot_at;
        for rows in some {
            outcome = outcome.and_then(|()| self.repack_from(job, rows, DevicePtr(first)));
            first += rows.slot_bytes();
        }
        self.drained[slot].record(&self.repack).map_err(wrong)?;
        outcome
    }

    /// Queues the repacking of rows out of the host's memory; each has one part, whose place for
    /// kernels is known.
    pub(super) fn in_place(&mut self, job: &Job, some: &[Rows<'_>]) -> Result<(), Error> {
        self.was_in_place = true;
        self.come_behind(job)?;
        let timed = self.pace.begin(&self.repack);
        let mut outcome = Ok(());
        for rows in some {
            let from = in_place::single(rows).expect("rows of one part that kernels can read");
            outcome = outcome.and_then(|()| self.repack_from(job, rows, from));
        }
        if timed {
            self.pace
                .end(&self.repack, some.iter().map(Rows::slot_bytes).sum());
        }
        outcome
    }

    /// Lets the repack stream wait for what the upload comes behind: once for all uploads that come
    /// behind the same.
    fn come_behind(&mut self, job: &Job) -> Result<(), Error> {
        if !self.behind.as_ref().is_some_and(|b| b.is(&job.before)) {
            self.repack
                .wait(&job.before)
                .map_err(|e| failed("queueing an upload", e))?;
            self.behind = Some(job.before.clone());
        }
        Ok(())
    }

    /// Queues the repacking of rows that lie at an address of the device's.
    fn repack_from(&self, job: &Job, rows: &Rows<'_>, from: DevicePtr) -> Result<(), Error> {
        let desc = &rows.placed.desc;
        let to = Weights {
            ty: desc.ty,
            at: job.slab + rows.placed.at,
            rows: desc.rows,
            cols: desc.cols,
        };
        let Range { start, end } = rows.rows;
        let flag = self.reserve.flags + job.flag * 4;
        let launch =
            weights::repack(to, from.0, start, end - start, flag).map_err(|e| launch_error(&e))?;
        // SAFETY: the rows are there when the launch begins: the slot is filled, or the host's
        // memory holds them and stays until the stream has passed; the slab is the upload's alone.
        unsafe { self.kernels.launch(&launch, &self.repack) }
    }

    /// Queues the copy of a vector's part to its address in the slab. `part` is pinned memory that
    /// is left alone until the event that the caller records behind this has passed.
    pub(super) fn vector(
        &self,
        job: &Job,
        at: u64,
        part: *const u8,
        bytes: u64,
    ) -> Result<(), Error> {
        let driver = stream_driver(&self.repack)?;
        self.repack
            .wait(&job.before)
            .and_then(|()| {
                // SAFETY: the source is left alone, as the caller promises; the
                // slab is the upload's alone.
                unsafe { driver.copy_h2d_async(DevicePtr(at), part, bytes, self.repack.handle()) }
            })
            .map_err(|e| failed("queueing an upload", e))
    }

    /// Copies the upload's flag back and records its event.
    pub(super) fn close(&self, job: &Job) -> Result<(), Error> {
        let flag = DevicePtr(self.reserve.flags + job.flag * 4);
        let stream = self.repack.handle();
        let driver = stream_driver(&self.repack)?;
        // SAFETY: both places lie in memory that lives as long as the streams; each upload
        // under way has its own flag.
        unsafe { driver.copy_d2h_async(self.flags.place(job), flag, 4, stream) }
            .and_then(|()| job.done.record(&self.repack))
            .map_err(|e| failed("ending an upload", e))
    }

    /// Clears the flag of an upload that may have raised it: the next one with this flag finds it
    /// so.
    pub(super) fn clear_flag(&self, job: &Job) -> Result<(), Error> {
        let flag = DevicePtr(self.reserve.flags + job.flag * 4);
        let driver = stream_driver(&self.repack)?;
        // SAFETY: the place lies in memory that lives as long as the stream, and
        // is no other upload's yet.
        unsafe { driver.memset_async(flag, 0, 4, self.repack.handle()) }
            .map_err(|e| failed("ending an upload", e))
    }
}
