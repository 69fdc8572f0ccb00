//! Whether what is uploaded is repacked out of the host's memory, without a copy into a slot.
//!
//! A card that shares the machine's memory can read rows where the host has them, so that a copy
//! into a slot is one too many. But its units may read that memory uncached, and repacking reads
//! single bytes. So the first large rows are brought both ways, alone, and the faster way stays.
//! Memory of the driver's and pages of files are tried apart: they are mapped differently.
//!
//! ```text
//!   untried --(large rows)--> in place: kernels read what the host has, and were as fast
//!                        +--> copied
//! ```
//!
//! *Invariant:* rows that were tried are on the device by way of a slot in the end, so what goes
//! wrong while they are tried costs time, not weights.

use std::time::{Duration, Instant};

use rocmforge_device::Error;
use rocmforge_gpu_driver::{DeviceAttributes, DevicePtr, Event, PinnedBuffer};
use rocmforge_kernels_gpu::ops::rows;
use rocmforge_ops::WeightType;

use crate::{failed, launch_error, stream_driver, wait};

use super::job::Job;
use super::lane::{Lane, Rows};

/// Rows that are tried have at least so many bytes: with fewer, calls of the driver count.
const TRIED_MIN_BYTES: u64 = 1 << 20;

/// Bytes of the rows that a kernel reads to compare them.
const LOOK_BYTES: u64 = 64 << 10;

/// Tries of each way, of which the best counts.
const TRIES: usize = 3;

/// The host's memory that rows lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The driver's.
    Pinned,
    /// Registered pages of a file.
    File,
}

/// How rows get into the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Both ways are to be timed and compared.
    Untried,
    /// Through a slot.
    Copied,
    /// A kernel reads the rows in host memory.
    InPlace,
}

/// The ways of both kinds of memory, and what was found of them.
#[derive(Debug)]
pub(super) struct Ways {
    pinned: Way,
    file: Way,
    notes: Vec<String>,
}

impl Ways {
    /// For a card that nothing is known of yet.
    pub(super) fn of(card: &DeviceAttributes) -> Self {
        let way = match card.integrated {
            true => Way::Untried,
            false => Way::Copied,
        };
        Self {
            pinned: way,
            file: way,
            notes: Vec::new(),
        }
    }

    /// Which way was found faster, as text for users.
    pub(super) fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// The way of rows of one source that are brought together.
    pub(super) fn of_rows(&self, some: &[Rows<'_>]) -> Way {
        if !some.iter().all(|rows| single(rows).is_some()) {
            return Way::Copied;
        }
        let way = match some[0].source {
            Source::Pinned => self.pinned,
            Source::File => self.file,
        };
        match way {
            Way::Untried if bytes_of(some) < TRIED_MIN_BYTES => Way::Copied,
            way => way,
        }
    }

    fn settle(&mut self, source: Source, way: Way, why: &str) {
        let (of, memory) = match source {
            Source::Pinned => (&mut self.pinned, "pinned memory"),
            Source::File => (&mut self.file, "registered files"),
        };
        *of = way;
        let how = match way {
            Way::InPlace => "read in place",
            _ => "copied first",
        };
        let note = format!("weights in {memory} are {how}: {why}");
        tracing::info!("{note}");
        self.notes.push(note);
    }
}

/// Where kernels read rows, if they are in one part and the place is known and aligned as repacking
/// asks for; a file's need not be.
pub(super) fn single(rows: &Rows<'_>) -> Option<DevicePtr> {
    let alignment = match rows.placed.desc.ty {
        WeightType::F32 => 4,
        _ => 2,
    };
    match rows.parts[..] {
        [part] => part.device.filter(|at| at.0.is_multiple_of(alignment)),
        _ => None,
    }
}

fn bytes_of(some: &[Rows<'_>]) -> u64 {
    let parts = some.iter().flat_map(|rows| &rows.parts);
    parts.map(|part| part.bytes).sum()
}

impl Lane {
    /// Brings rows both ways and settles which one their memory's rows come by.
    pub(super) fn try_both(&mut self, job: &Job, some: &[Rows<'_>]) -> Result<(), Error> {
        let source = some[0].source;
        let tried = self.compare(job, some);
        let (way, why) = match tried {
            Ok(found) => found,
            Err(Error::Lost(lost)) => return Err(Error::Lost(lost)),
            Err(error) => {
                // A copy that nothing waits for may be under way.
                self.synchronize()
                    .map_err(|e| failed("waiting for an upload", e))?;
                (Way::Copied, error.to_string())
            }
        };
        self.ways.settle(source, way, &why);
        // The last word is the slot's, whatever became of the rest.
        self.through_slot(job, some)?;
        self.passed()
    }

    /// The faster way, and why; the rows are in the slab by either.
    fn compare(&mut self, job: &Job, some: &[Rows<'_>]) -> Result<(Way, String), Error> {
        // Once without a clock: the kernel is loaded, and what the upload comes behind has passed.
        self.through_slot(job, some)?;
        self.passed()?;
        if !self.kernels_see(&some[0], self.last_slot())? {
            return Ok((Way::Copied, "kernels read other bytes there".to_owned()));
        }
        self.in_place(job, some)?;
        self.passed()?;
        let (mut copied, mut in_place) = (Duration::MAX, Duration::MAX);
        for _ in 0..TRIES {
            let begin = Instant::now();
            self.through_slot(job, some)?;
            self.passed()?;
            copied = copied.min(begin.elapsed());
            let begin = Instant::now();
            self.in_place(job, some)?;
            self.passed()?;
            in_place = in_place.min(begin.elapsed());
        }
        let rate = |took: Duration| bytes_of(some) as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        let rates = format!(
            "{:.1} GB/s in place, {:.1} GB/s through a copy",
            rate(in_place),
            rate(copied)
        );
        let way = match in_place <= copied {
            true => Way::InPlace,
            false => Way::Copied,
        };
        Ok((way, rates))
    }

    /// Whether a kernel reads the same as the last copy brought into its slot, of the first bytes
    /// of rows. Nothing may be under way.
    fn kernels_see(&self, rows: &Rows<'_>, in_slot: DevicePtr) -> Result<bool, Error> {
        let wrong = |e| failed("looking at the host's memory", e);
        let from = single(rows).expect("rows of one part that kernels can read");
        // The kernel reads words.
        let skipped = from.0.next_multiple_of(4) - from.0;
        let bytes = (rows.parts[0].bytes - skipped).min(LOOK_BYTES) & !3;
        let to = self.next_slot();
        let index = to.offset(LOOK_BYTES);
        let launch = rows::gather(from.0 + skipped, index.0, 1, bytes / 4, to.0)
            .map_err(|e| launch_error(&e))?;
        // SAFETY: the slot is drained and larger than what is looked at.
        unsafe { stream_driver(&self.repack)?.memset_async(index, 0, 4, self.repack.handle()) }
            .map_err(wrong)?;
        // SAFETY: the host's bytes stay until the caller's rows have passed; `to` is in the slot.
        unsafe { self.kernels.launch(&launch, &self.repack) }?;
        let context = self.repack.context();
        let mut back = PinnedBuffer::new(context, 2 * bytes as usize).map_err(wrong)?;
        let driver = stream_driver(&self.repack)?;
        for (i, slot) in [in_slot.offset(skipped), to].into_iter().enumerate() {
            let place = back.as_ptr().wrapping_add(i * bytes as usize);
            // SAFETY: the buffer has room for both, and is dropped behind the wait below.
            unsafe { driver.copy_d2h_async(place, slot, bytes, self.repack.handle()) }
                .map_err(wrong)?;
        }
        drop(driver);
        self.passed()?;
        // SAFETY: both copies have ended.
        let (copied, read) = unsafe { back.as_mut_slice() }.split_at(bytes as usize);
        Ok(copied == read)
    }

    /// Waits for all that the repack stream has queued, and so for the copies that it waits for.
    fn passed(&self) -> Result<(), Error> {
        let event = Event::new(self.repack.context(), false);
        let event = event.map_err(|e| failed("making an event", e))?;
        event
            .record(&self.repack)
            .map_err(|e| failed("recording an event", e))?;
        wait::until_passed(&event, self.patience)
    }
}
