//! Uploads: pieces of tensors on their way from a file into a slab.
//!
//! ```text
//!                     registered window --+
//!   file mapping --+                      +--copy streams--> raw slot --repack stream--> slab
//!                  +-> pinned ring piece -+
//! ```
//!
//! A card that shares the machine's memory repacks without the slot where that is as fast
//! (`in_place.rs`).
//!
//! Staging threads (`staging.rs`) take pieces (`job.rs`) in order from the queue
//! (`queue.rs`). Each makes its piece readable for the copy engine (registers the window, or
//! fills a pinned piece) and then queues the copy and the repacking under one lock, the
//! lane's (`lane.rs`). The engine thread, where it waits for an upload, takes pieces too.
//! When the last piece of an upload is queued, its event is recorded; operations wait for
//! that event on the device, the host for nothing but the queueing. Whether the file was
//! still the same, and whether all scales are finite, is looked at when the event has passed.
//! This file: the owner, which the engine thread calls.
//!
//! ```text
//!   queued --(all pieces queued on the device)--> enqueued
//!          --(event passed)--> settled: right, or an error
//! ```
//!
//! *Invariant:* an upload writes its slab on the repack stream only, after the operations that were
//! queued before it began (`Before`). *Threads:* nobody holds the queue's lock and the lane's
//! together.

mod events;
mod in_place;
mod job;
mod lane;
mod queue;
mod staging;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rocmforge_device::{Error, ModelPlanView, PlacedTensor, Role, Upload, UploadTicket};
use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::{Context, Stream};

use super::holds::{Held, Holds};
use super::kernels::Kernels;
use super::reserve::{DeviceReserve, FLAGS};
use super::ring::Ring;
use super::windows::{WINDOW_BYTES, Windows, key_of};
use super::{failed, wait};
use events::{Before, Events};
use job::Job;
use lane::{Flags, Lane};
use queue::Queue;
use staging::Staging;

/// How uploads are set up.
#[derive(Debug, Clone, Copy)]
pub(super) struct UploadsConfig {
    pub(super) threads: usize,
    pub(super) ring_pieces: usize,
    pub(super) ring_piece_bytes: usize,
    pub(super) registered_bytes_max: u64,
    pub(super) copy_streams: usize,
    pub(super) patience: Duration,
}

/// Uploads that have not ended of which a look asks the driver, at most: some more than there are
/// copies at once.
const AT_ONCE: usize = 6;

/// A point in the work of the compute stream: uploads that it was made to wait for lie before it or
/// behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UploadMark(u64);

/// The staging threads and the uploads that are not settled.
#[derive(Debug)]
pub(super) struct Uploads {
    staging: Arc<Staging>,
    flags: Arc<Flags>,
    events: Events,
    /// What the last upload comes behind, and [`Stream::queued`] of then.
    before: Option<(u64, Before)>,
    threads: Vec<JoinHandle<()>>,
    /// Segments that an upload was begun of, by their files' numbers and first bytes.
    seen: HashSet<(usize, u64)>,
    under_way: BTreeMap<UploadTicket, Arc<Job>>,
    /// Waited for by operations; their end has not been looked at.
    settling: Vec<(UploadMark, Arc<Job>)>,
    /// Marks that were given out.
    marks: u64,
    /// Results that [`Uploads::finished`] has yet to tell.
    results: Vec<(UploadTicket, Result<(), Error>)>,
    next_ticket: u64,
    /// Bytes of a slot of the reserve.
    slot_bytes: u64,
    patience: Duration,
    /// Bytes a second of a copy, as of the last look.
    rate: Option<f64>,
    /// [`Uploads::notes`] as of the last look.
    notes: Mutex<Vec<String>>,
}

impl Uploads {
    pub(super) fn start(
        context: &Context,
        kernels: Arc<Kernels>,
        config: UploadsConfig,
    ) -> Result<Self, Error> {
        let flags = Arc::new(Flags::new(context)?);
        let staging = Arc::new(Staging {
            windows: Windows::new(context, config.registered_bytes_max),
            ring: Ring::new(
                context,
                config.ring_pieces,
                config.ring_piece_bytes,
                config.patience,
            )?,
            lane: Mutex::new(Lane::new(
                context,
                kernels,
                Arc::clone(&flags),
                config.copy_streams,
                config.patience,
            )?),
            queue: Queue::new(),
        });
        let mut uploads = Self {
            staging,
            flags,
            events: Events::new(context),
            before: None,
            rate: None,
            notes: Mutex::default(),
            seen: HashSet::new(),
            threads: Vec::new(),
            under_way: BTreeMap::new(),
            settling: Vec::new(),
            marks: 0,
            results: Vec::new(),
            next_ticket: 0,
            slot_bytes: 0,
            patience: config.patience,
        };
        for i in 0..config.threads {
            let staging = Arc::clone(&uploads.staging);
            let thread = std::thread::Builder::new()
                .name(format!("staging-{i}"))
                .spawn(move || staging.serve());
            uploads.threads.push(thread.map_err(|e| {
                Error::Config(format!("a staging thread could not be started: {e}"))
            })?);
        }
        Ok(uploads)
    }

    /// Tells where the reserve's parts are, as addresses. Nothing may be under way.
    pub(super) fn set_reserve(&mut self, addresses: DeviceReserve) {
        self.slot_bytes = addresses.slot_bytes;
        lock(&self.staging.lane).reserve = addresses;
    }

    /// Keeps registrations from delaying other calls while it lives.
    pub(super) fn hold(&self) -> Held<'_> {
        self.staging.windows.holds().hold()
    }

    /// Who queues something on the device, for whom pinning and registrations wait.
    pub(super) fn holds(&self) -> &Arc<Holds> {
        self.staging.windows.holds()
    }

    /// Bytes a second of a copy by itself, once one was measured. A thread that copies holds the
    /// lane for long: what was known before says it meanwhile.
    pub(super) fn bytes_per_s(&mut self) -> Option<f64> {
        if let Ok(mut lane) = self.staging.lane.try_lock() {
            self.rate = lane.pace.rate();
        }
        self.rate
    }

    /// What was found of reading the host's memory in place, for people; while a thread copies, as
    /// of the last look.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = lock(&self.notes);
        if let Ok(lane) = self.staging.lane.try_lock() {
            *notes = lane.ways.notes();
        }
        notes.clone()
    }

    /// Whether all uploads have ended.
    pub(super) fn is_idle(&self) -> bool {
        let settling = self.settling.iter().map(|(_, job)| job);
        let mut jobs = self.under_way.values().chain(settling);
        jobs.all(|job| job.has_ended())
    }

    /// Starts an upload into the slab at an address, behind what `compute` has queued.
    pub(super) fn begin(
        &mut self,
        upload: Upload,
        slab: u64,
        compute: &Stream,
    ) -> Result<UploadTicket, Error> {
        if self.under_way.len() + self.settling.len() >= FLAGS as usize {
            self.settle_all()?;
        }
        let ticket = UploadTicket(self.next_ticket);
        let before = self.behind(compute)?;
        let done = self.events.take()?;
        let first = upload.layout.tensors.iter().map(|t| t.desc.offset).min();
        let segment = (key_of(&upload.file), first.unwrap_or_default());
        let is_again = !self.seen.insert(segment);
        let job = Job::new(
            ticket,
            upload,
            slab,
            is_again,
            self.slot_bytes,
            before,
            done,
        )?;
        self.next_ticket += 1;
        let job = Arc::new(job);
        self.staging.queue.push(Arc::clone(&job));
        self.under_way.insert(ticket, job);
        Ok(ticket)
    }

    /// An event behind all that `compute` has queued: one for uploads that begin one after another.
    fn behind(&mut self, compute: &Stream) -> Result<Before, Error> {
        let queued = compute.queued();
        if let Some((then, before)) = &self.before
            && *then == queued
        {
            return Ok(before.clone());
        }
        let before = Before::new(self.events.take()?);
        before
            .record(compute)
            .map_err(|e| failed("recording an event", e))?;
        self.before = Some((queued, before.clone()));
        Ok(before)
    }

    /// Uploads that have ended since the last call.
    pub(super) fn finished(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        // They end about as they began, and the driver is asked of each.
        let (mut ended, mut others) = (Vec::new(), 0);
        let queued = self.under_way.iter().filter(|(_, job)| job.is_enqueued());
        for (&ticket, job) in queued {
            match job.has_ended() {
                true => ended.push(ticket),
                false => others += 1,
            }
            if others >= AT_ONCE {
                break;
            }
        }
        let ended = ended.iter().filter_map(|at| self.under_way.remove(at));
        let settled = self.settling.extract_if(.., |(_, job)| job.has_ended());
        let ended: Vec<_> = ended.chain(settled.map(|(_, job)| job)).collect();
        for job in ended {
            let result = self.settle(&job);
            self.results.push((job.ticket, result));
        }
        std::mem::take(&mut self.results)
    }

    /// Whether the host would not wait in [`Uploads::wait`].
    pub(super) fn is_queued(&self, ticket: UploadTicket) -> bool {
        let job = self.under_way.get(&ticket);
        job.is_some_and(|job| job.is_enqueued())
    }

    /// Lets `compute` wait for an upload; the host waits until it is queued.
    pub(super) fn wait(&mut self, ticket: UploadTicket, compute: &Stream) -> Result<(), Error> {
        let job = self
            .under_way
            .remove(&ticket)
            .expect("a ticket is waited for once");
        self.until_enqueued(&job);
        tracing::trace!(ticket = ticket.0, "an upload is queued");
        if job.has_failed() {
            return self.settle(&job);
        }
        if let Err(error) = compute.wait(&job.done) {
            // Nobody asks for it again, and its slab goes to others: the host
            // waits in the stream's place.
            self.settle(&job)?;
            return Err(failed("waiting for an upload", error));
        }
        self.settling.push((UploadMark(self.marks), job));
        Ok(())
    }

    /// A mark behind all uploads that the compute stream was made to wait for.
    pub(super) fn mark(&mut self) -> UploadMark {
        self.marks += 1;
        UploadMark(self.marks)
    }

    /// After the compute stream was waited for: looks at the uploads that its operations used. The
    /// first error comes back; [`Uploads::finished`] says which uploads they were.
    pub(super) fn settle_used(&mut self) -> Result<(), Error> {
        let mark = self.mark();
        self.settle_before(mark)
    }

    /// [`Uploads::settle_used`] of the uploads before a mark, whose operations have ended.
    pub(super) fn settle_before(&mut self, mark: UploadMark) -> Result<(), Error> {
        let mut outcome = Ok(());
        let before = self.settling.extract_if(.., |(at, _)| *at < mark);
        let before: Vec<_> = before.map(|(_, job)| job).collect();
        for job in before {
            let result = self.settle(&job);
            let told = match &result {
                Ok(()) => Ok(()),
                // The text is what counts for whoever drops the segment.
                Err(error) => Err(Error::Driver {
                    operation: "an upload",
                    message: error.to_string(),
                }),
            };
            self.results.push((job.ticket, told));
            outcome = outcome.and(result);
        }
        outcome
    }

    /// Waits until every upload is on the device, so that memory can be moved about.
    pub(super) fn settle_all(&mut self) -> Result<(), Error> {
        let jobs: Vec<_> = self.under_way.values().cloned().collect();
        for job in jobs.iter().chain(self.settling.iter().map(|(_, job)| job)) {
            self.until_enqueued(job);
            if !job.has_failed() {
                wait::until_passed(&job.done, self.patience)?;
            } else if let Err(error) = lock(&self.staging.lane).synchronize() {
                // Pieces before the one that failed may be queued still.
                return Err(failed("waiting for an upload", error));
            }
        }
        for (_, job) in std::mem::take(&mut self.settling) {
            let result = self.settle(&job);
            self.results.push((job.ticket, result));
        }
        Ok(())
    }

    /// Lets idle threads register the windows that a model's uploads will read, in their order.
    pub(super) fn register_ahead(&mut self, model: &ModelPlanView<'_>) {
        let tensors = model.layouts.iter().flat_map(|l| &l.tensors);
        let matrices = tensors.filter(|t| t.desc.role == Role::Matrix);
        // Those of adapters lie behind all others, whatever their segment.
        let mut matrices: Vec<&PlacedTensor> = matrices.collect();
        matrices.sort_by_key(|t| t.desc.offset);
        let mut next = 0;
        let numbers = matrices.into_iter().flat_map(|PlacedTensor { desc, .. }| {
            let first = (desc.offset / WINDOW_BYTES).max(next);
            let end = (desc.offset + desc.bytes).div_ceil(WINDOW_BYTES);
            next = next.max(end);
            first..end
        });
        let windows = numbers.map(|number| (Arc::clone(model.file), number));
        self.staging.queue.register(windows);
    }

    /// A file will not be read any more.
    pub(super) fn forget(&mut self, file: &Arc<MappedFile>) {
        self.seen.retain(|(of, _)| *of != key_of(file));
        self.staging.queue.forget(file);
        self.staging.windows.forget(file);
    }

    /// Lets `stream` wait for all uploads that are queued; the host waits for the queueing.
    pub(super) fn order_before(&mut self, stream: &Stream) -> Result<(), Error> {
        let settling = self.settling.iter().map(|(_, job)| job);
        for job in self.under_way.values().chain(settling) {
            self.until_enqueued(job);
            if !job.has_failed() {
                stream
                    .wait(&job.done)
                    .map_err(|e| failed("waiting for an upload", e))?;
            }
        }
        Ok(())
    }

    fn until_enqueued(&self, job: &Job) {
        self.staging.until_enqueued(job);
    }

    /// The result of an upload whose event has passed, or which failed before.
    fn settle(&self, job: &Job) -> Result<(), Error> {
        let mut ended = match job.progress.take_error() {
            // It has passed, unless the driver failed to say so when it was asked before.
            None => wait::until_passed(&job.done, self.patience),
            Some(error) => Err(error),
        };
        // Its slab and its windows go to others: what was queued before an error must
        // not be under way then. A device that is lost may never come to its end, and
        // nothing of it goes to anybody.
        if ended.as_ref().is_err_and(|e| !matches!(e, Error::Lost(_)))
            && let Err(lost) = lock(&self.staging.lane).synchronize()
            && lost.is_lost()
        {
            ended = Err(failed("waiting for an upload", lost));
        }
        if !matches!(ended, Err(Error::Lost(_))) {
            job.release_windows(&self.staging.windows);
        }
        let ended = ended.and_then(|()| self.verify(job));
        if matches!(&ended, Err(e) if !matches!(e, Error::Lost(_))) {
            let cleared = lock(&self.staging.lane).clear_flag(job);
            if let Err(error) = cleared {
                tracing::warn!(%error, "the flag of an upload that failed could not be cleared");
            }
        }
        ended
    }

    fn verify(&self, job: &Job) -> Result<(), Error> {
        job.upload
            .file
            .check_unchanged()
            .map_err(|source| Error::Read {
                tensor: job.first_name(),
                source,
            })?;
        if self.flags.is_raised(job) {
            return Err(Error::NotFinite {
                tensor: format!("one of those from {} on", job.first_name()),
            });
        }
        Ok(())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        self.staging.queue.end();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a staging thread panicked");
            }
        }
        let lane = lock(&self.staging.lane);
        // Pinned memory and registrations go next; a lost device ends this at once.
        let _ = lane.synchronize();
    }
}

/// Nothing is done under these locks that could leave a half-made state behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
