//! A staging thread: takes pieces, makes each readable for the copy engine, and
//! queues it on the [`Lane`].
//!
//! *Threads:* nobody holds the queue's lock and the lane's together.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocmforge_device::{Error, PlacedTensor, Role};
use rocmforge_gguf::limits::DIRECT_ALIGNMENT;
use rocmforge_gpu_driver::DevicePtr;
use rocmforge_kernels_cpu::reference;

use crate::ring::Ring;
use crate::windows::{Part, WINDOW_BYTES, Windows};

use super::in_place::Source;
use super::job::{Job, Piece};
use super::lane::{Lane, Rows};
use super::lock;
use super::queue::Queue;

/// How long an owner leaves its upload to a thread that is awake: what takes longer is
/// read from a disk, or by many.
const OTHERS: Duration = Duration::from_micros(200);

/// What the threads and their owner share.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) windows: Windows,
    pub(super) ring: Ring,
    pub(super) lane: Mutex<Lane>,
    pub(super) queue: Queue,
}

impl Staging {
    /// A thread's life.
    pub(super) fn serve(&self) {
        let mut was_awake = false;
        while let Some((job, index)) = self.queue.next(&self.windows, was_awake) {
            self.work(&job, index);
            was_awake = true;
        }
    }

    /// Waits until an upload is enqueued. Works on its pieces and those before it
    /// meanwhile, unless a thread is at that: one that has to be woken begins later, and
    /// one that is awake needs the lane.
    pub(super) fn until_enqueued(&self, wanted: &Job) {
        let begin = Instant::now();
        while self.queue.is_awake() && begin.elapsed() < OTHERS {
            if wanted.is_enqueued() {
                return;
            }
            std::hint::spin_loop();
        }
        while let Some((job, index)) = self.queue.next_before(wanted) {
            self.work(&job, index);
        }
        self.queue.until_enqueued(wanted);
    }

    fn work(&self, job: &Job, index: usize) {
        job.progress.attempt(|| self.bring(job, job.piece(index)));
        self.finish_piece(job);
    }

    /// Counts a piece as ended, and closes the upload with the last one: before it counts, so that
    /// whoever sees the upload enqueued sees its event.
    fn finish_piece(&self, job: &Job) {
        let lane = lock(&self.lane);
        if job.progress.is_at_last()
            && !job.has_failed()
            && let Err(error) = lane.close(job)
        {
            job.progress.fail(error);
        }
        let enqueued = job.progress.end();
        drop(lane);
        if enqueued {
            self.queue.enqueued();
        }
    }

    /// Brings one piece to the device.
    fn bring(&self, job: &Job, piece: &Piece) -> Result<(), Error> {
        match piece {
            Piece::Vectors => self.vectors(job),
            Piece::Matrices => self.matrices(job),
            Piece::Rows { tensor, rows } => {
                let placed = &job.upload.layout.tensors[*tensor];
                self.rows(job, placed, rows.clone())
            }
        }
    }

    /// All matrices of a small upload: together where their windows are registered, which takes a
    /// third of the driver's calls.
    fn matrices(&self, job: &Job) -> Result<(), Error> {
        let tensors = &job.upload.layout.tensors;
        let mut all = Vec::with_capacity(tensors.len());
        for placed in tensors {
            let rows = 0..placed.desc.rows;
            match self.registered(job, placed.desc.offset, placed.desc.bytes)? {
                Ok(parts) => all.push(Rows {
                    placed,
                    rows,
                    parts,
                    source: Source::File,
                }),
                Err(_) => {
                    let mut tensors = tensors.iter();
                    return tensors.try_for_each(|p| self.rows(job, p, 0..p.desc.rows));
                }
            }
        }
        self.queue.note_copied(false);
        let bytes = tensors.iter().map(|t| t.desc.bytes).sum();
        job.upload.file.count_read(bytes);
        let _held = self.windows.holds().hold();
        lock(&self.lane).rows(job, &all)
    }

    /// What registered windows have of a range of the file, one part after another; or the first
    /// byte that is in none.
    fn registered(
        &self,
        job: &Job,
        start: u64,
        bytes: u64,
    ) -> Result<Result<Vec<Part>, u64>, Error> {
        let mut parts = Vec::new();
        let mut at = start;
        while at < start + bytes {
            let Some(part) = job.window(&self.windows, at)? else {
                return Ok(Err(at));
            };
            let bytes = part.bytes.min(start + bytes - at);
            parts.push(Part { bytes, ..part });
            at += bytes;
        }
        Ok(Ok(parts))
    }

    /// Rows from registered windows, or through the ring where one of them is not registered.
    fn rows(&self, job: &Job, placed: &PlacedTensor, rows: Range<u64>) -> Result<(), Error> {
        let row_bytes = placed.desc.bytes / placed.desc.rows.max(1);
        let start = placed.desc.offset + rows.start * row_bytes;
        let bytes = (rows.end - rows.start) * row_bytes;
        match self.registered(job, start, bytes)? {
            Ok(parts) => {
                job.upload.file.count_read(bytes);
                let _held = self.windows.holds().hold();
                let rows = Rows {
                    placed,
                    rows,
                    parts,
                    source: Source::File,
                };
                lock(&self.lane).rows(job, &[rows])
            }
            Err(at) => {
                if self.windows.takes(&job.upload.file) {
                    // Later uploads shall find it registered; others come first, since this
                    // one has been read by then.
                    let window = (Arc::clone(&job.upload.file), at / WINDOW_BYTES);
                    self.queue.register_last(window);
                }
                self.rows_through_ring(job, placed, rows, start, row_bytes)
            }
        }
    }

    /// Reads rows into pinned pieces and queues them from there. What is read directly comes in
    /// whole blocks, for which a piece is not filled up.
    fn rows_through_ring(
        &self,
        job: &Job,
        placed: &PlacedTensor,
        rows: Range<u64>,
        start: u64,
        row_bytes: u64,
    ) -> Result<(), Error> {
        self.queue.note_copied(true);
        let around = match job.upload.file.is_direct() {
            true => 2 * DIRECT_ALIGNMENT,
            false => 0,
        };
        let room = self.ring.piece_bytes().saturating_sub(around) as u64;
        // Pieces of about the same size: a small one at the end would cost a
        // disk as much as a large one.
        let (all, most) = (rows.end - rows.start, (room / row_bytes).max(1));
        let per_piece = all.div_ceil(all.div_ceil(most).max(1));
        let mut row = rows.start;
        while row < rows.end {
            let end = rows.end.min(row + per_piece);
            let offset = start + (row - rows.start) * row_bytes;
            let bytes = (end - row) * row_bytes;
            let piece = self.ring.take()?;
            if bytes > piece.bytes as u64 {
                self.ring.give_unused(piece);
                return Err(Error::Config(format!(
                    "a row of '{}' is larger than a piece of pinned memory",
                    placed.desc.name
                )));
            }
            // SAFETY: the piece is this thread's until it is given back, and `piece.bytes` long.
            let target = unsafe { std::slice::from_raw_parts_mut(piece.ptr, piece.bytes) };
            let read = job.upload.file.read_around(offset..offset + bytes, target);
            let begin = match read {
                Ok(begin) => begin,
                Err(source) => {
                    self.ring.give_unused(piece);
                    return Err(Error::Read {
                        tensor: placed.desc.name.clone(),
                        source,
                    });
                }
            };
            let _held = self.windows.holds().hold();
            // Given back under the lock that its reading is queued under: the
            // piece's event is behind that.
            let mut lane = lock(&self.lane);
            let host = piece.ptr.wrapping_add(begin).cast_const();
            let part = Part {
                host,
                bytes,
                // Memory that the driver has allocated has one address for all.
                device: Some(DevicePtr(host as u64)),
            };
            let rows = Rows {
                placed,
                rows: row..end,
                parts: vec![part],
                source: Source::Pinned,
            };
            let queued = lane.rows(job, &[rows]);
            let given = self.ring.give(piece, lane.last_reader());
            drop(lane);
            queued.and(given)?;
            row = end;
        }
        Ok(())
    }

    /// Converts the segment's vectors to f32 and queues their copies into the slab.
    fn vectors(&self, job: &Job) -> Result<(), Error> {
        let tensors = job.upload.layout.tensors.iter();
        for placed in tensors.filter(|t| t.desc.role == Role::Vector) {
            let desc = &placed.desc;
            let ty = desc.ty;
            let mut values = vec![0.0f32; (desc.rows * desc.cols) as usize];
            let range = desc.offset..desc.offset + desc.bytes;
            let read = job
                .upload
                .file
                .with_range(range, |bytes| reference::dequantize(ty, bytes, &mut values));
            read.map_err(|source| Error::Read {
                tensor: desc.name.clone(),
                source,
            })?
            .map_err(|e| Error::Config(format!("'{}': {e}", desc.name)))?;
            if values.iter().any(|v| !v.is_finite()) {
                return Err(Error::NotFinite {
                    tensor: desc.name.clone(),
                });
            }
            // A vector may be longer than a piece of a small ring.
            for (i, part) in values.chunks(self.ring.piece_bytes() / 4).enumerate() {
                let at = job.slab + placed.at + (i * self.ring.piece_bytes()) as u64;
                let piece = self.ring.take()?;
                // SAFETY: the piece is this thread's, and long enough.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        part.as_ptr().cast(),
                        piece.ptr,
                        size_of_val(part),
                    );
                }
                let lane = lock(&self.lane);
                let queued = lane.vector(job, at, piece.ptr, size_of_val(part) as u64);
                let given = self.ring.give(piece, &lane.repack);
                queued.and(given)?;
            }
        }
        Ok(())
    }
}
