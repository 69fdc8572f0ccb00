//! Uploads of the host device: pieces of tensors are read from the file and repacked into the
//! arena.
//!
//! An upload is cut into pieces of about [`PIECE_BYTES`], a small one into smaller ones. Staging
//! threads take them in order; when the engine waits for uploads, its thread and the compute pool
//! take pieces of those too, since nothing else is to be done meanwhile.
//!
//! ```text
//!   queued --(pieces taken one by one)--> running --(last piece ends)--> finished
//!          --(result taken)--> gone
//! ```
//!
//! The queue's lock is held to look at it, never while a piece is worked on.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rocmforge_device::progress::Progress;
use rocmforge_device::{Error, PlacedTensor, Role, Upload, UploadTicket};
use rocmforge_kernels_cpu::{Error as KernelError, Isa, Pool, reference};

use super::arena::Arena;

/// Bytes of the file in one piece, about: large enough that a call of the
/// system costs nothing beside it.
const PIECE_BYTES: usize = 1 << 20;

/// Least bytes of a piece of a small upload, an expert's, which has about as many pieces as its
/// waiter has threads.
const PIECE_BYTES_LEAST: usize = 128 << 10;

/// A run of row groups of one tensor.
#[derive(Debug)]
struct Piece {
    tensor: usize,
    groups: Range<usize>,
}

#[derive(Debug)]
struct Job {
    ticket: UploadTicket,
    upload: Upload,
    pieces: Vec<Piece>,
    progress: Progress,
}

impl Job {
    fn result(&self) -> Result<(), Error> {
        self.progress.take_error().map_or(Ok(()), Err)
    }

    /// Works on one piece; false if none is left to take.
    fn work(&self, shared: &Shared) -> bool {
        let Some(index) = self.progress.take() else {
            return false;
        };
        self.progress
            .attempt(|| self.bring(&self.pieces[index], shared));
        if self.progress.end() {
            // The lock orders this with a waiter that has just looked.
            drop(lock(&shared.queue));
            shared.changed.notify_all();
        }
        true
    }

    fn bring(&self, piece: &Piece, shared: &Shared) -> Result<(), Error> {
        let placed = &self.upload.layout.tensors[piece.tensor];
        let at = self.upload.slab + placed.at;
        let outcome = match placed.desc.role {
            Role::Matrix => self.bring_matrix(placed, piece, at, shared)?,
            Role::Vector => self.bring_vector(placed, at, shared)?,
        };
        outcome.map_err(|_| Error::NotFinite {
            tensor: placed.desc.name.clone(),
        })
    }

    fn bring_matrix(
        &self,
        placed: &PlacedTensor,
        piece: &Piece,
        at: u64,
        shared: &Shared,
    ) -> Result<Result<(), KernelError>, Error> {
        let matrix = super::packed(&placed.desc, shared.isa)?;
        let from = matrix.file_range(piece.groups.clone());
        let to = matrix.packed_range(piece.groups.clone());
        let target = shared.arena.bytes_mut(at + to.start as u64, to.len());
        self.read(placed, from, |bytes| {
            matrix.pack(bytes, piece.groups.clone(), target)
        })
    }

    fn bring_vector(
        &self,
        placed: &PlacedTensor,
        at: u64,
        shared: &Shared,
    ) -> Result<Result<(), KernelError>, Error> {
        let ty = placed.desc.ty;
        let target = shared
            .arena
            .floats_mut(at, (placed.desc.rows * placed.desc.cols) as usize);
        let name = placed.desc.name.clone();
        let read = self.read(placed, 0..placed.desc.bytes as usize, |bytes| {
            reference::dequantize(ty, bytes, target).map(|()| target.iter().all(|x| x.is_finite()))
        })?;
        match read {
            Ok(true) => Ok(Ok(())),
            Ok(false) => Err(Error::NotFinite { tensor: name }),
            Err(error) => Ok(Err(error)),
        }
    }

    fn read<R>(
        &self,
        placed: &PlacedTensor,
        range: Range<usize>,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        let start = placed.desc.offset;
        let range = start + range.start as u64..start + range.end as u64;
        let read = self.upload.file.with_range(range, f);
        read.map_err(|source| Error::Read {
            tensor: placed.desc.name.clone(),
            source,
        })
    }
}

#[derive(Debug)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    ending: bool,
}

#[derive(Debug)]
struct Shared {
    arena: Arc<Arena>,
    isa: Isa,
    queue: Mutex<Queue>,
    /// A job was queued, a job was finished, or the end.
    changed: Condvar,
}

/// The staging threads and the uploads under way.
#[derive(Debug)]
pub(super) struct Staging {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    under_way: HashMap<UploadTicket, Arc<Job>>,
    next_ticket: u64,
    /// Threads of the pool that waits.
    waiters: usize,
}

impl Staging {
    pub(super) fn start(
        arena: Arc<Arena>,
        isa: Isa,
        threads: usize,
        waiters: usize,
    ) -> Result<Self, Error> {
        let queue = Mutex::new(Queue {
            jobs: VecDeque::new(),
            ending: false,
        });
        let shared = Arc::new(Shared {
            arena,
            isa,
            queue,
            changed: Condvar::new(),
        });
        let mut staging = Self {
            shared,
            threads: Vec::new(),
            under_way: HashMap::new(),
            next_ticket: 0,
            waiters,
        };
        for i in 0..threads {
            let shared = Arc::clone(&staging.shared);
            let thread = std::thread::Builder::new()
                .name(format!("staging-{i}"))
                .spawn(move || serve(&shared));
            staging.threads.push(thread.map_err(|e| {
                Error::Config(format!("a staging thread could not be started: {e}"))
            })?);
        }
        Ok(staging)
    }

    pub(super) fn begin(&mut self, upload: Upload) -> Result<UploadTicket, Error> {
        let mut pieces = Vec::new();
        let each = usize::try_from(upload.layout.bytes).unwrap_or(usize::MAX) / self.waiters;
        let piece_bytes = each.clamp(PIECE_BYTES_LEAST, PIECE_BYTES);
        for (tensor, placed) in upload.layout.tensors.iter().enumerate() {
            if placed.desc.role == Role::Vector {
                pieces.push(Piece {
                    tensor,
                    groups: 0..1,
                });
                continue;
            }
            let matrix = super::packed(&placed.desc, self.shared.isa)?;
            let step = (piece_bytes / matrix.group_bytes().max(1)).max(1);
            let groups = matrix.row_groups();
            pieces.extend((0..groups).step_by(step).map(|g| Piece {
                tensor,
                groups: g..groups.min(g + step),
            }));
        }
        let ticket = UploadTicket(self.next_ticket);
        self.next_ticket += 1;
        let job = Arc::new(Job {
            ticket,
            upload,
            progress: Progress::new(pieces.len()),
            pieces,
        });
        // Without staging threads nobody takes from the queue.
        if !self.threads.is_empty() {
            lock(&self.shared.queue).jobs.push_back(Arc::clone(&job));
            self.shared.changed.notify_all();
        }
        self.under_way.insert(ticket, job);
        Ok(ticket)
    }

    pub(super) fn finished(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        let done: Vec<_> = self
            .under_way
            .extract_if(|_, job| job.progress.has_ended())
            .collect();
        done.into_iter()
            .map(|(ticket, job)| (ticket, job.result()))
            .collect()
    }

    /// Waits for uploads; what came of each.
    pub(super) fn wait(&mut self, tickets: &[UploadTicket], pool: &Pool) -> Vec<Result<(), Error>> {
        let jobs = tickets.iter().map(|ticket| {
            let job = self.under_way.remove(ticket);
            job.expect("a ticket is waited for once")
        });
        let jobs: Vec<Arc<Job>> = jobs.collect();
        let shared = &self.shared;
        pool.run(pool.threads(), 1, |_| {
            for job in &jobs {
                while job.work(shared) {}
            }
        });
        let mut queue = lock(&shared.queue);
        while !jobs.iter().all(|job| job.progress.has_ended()) {
            queue = shared
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        jobs.iter().map(|job| job.result()).collect()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        lock(&self.shared.queue).ending = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a staging thread panicked");
            }
        }
    }
}

/// A staging thread's life.
fn serve(shared: &Shared) {
    loop {
        let job = {
            let mut queue = lock(&shared.queue);
            loop {
                if queue.ending {
                    return;
                }
                // Jobs whose pieces are all taken have nothing left for anyone.
                while queue
                    .jobs
                    .front()
                    .is_some_and(|job| job.progress.is_taken())
                {
                    queue.jobs.pop_front();
                }
                match queue.jobs.front() {
                    Some(job) => break Arc::clone(job),
                    None => {
                        queue = shared
                            .changed
                            .wait(queue)
                            .unwrap_or_else(PoisonError::into_inner)
                    }
                }
            }
        };
        tracing::trace!(ticket = job.ticket.0, "staging");
        while job.work(shared) {}
    }
}

/// Nothing is done under these locks that could leave a half-made state behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
