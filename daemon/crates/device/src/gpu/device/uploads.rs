//! Uploads: pieces of tensors on their way from a file into a slab.
//!
//! ```text
//!                     registered window --+
//!   file mapping --+                      +--copy stream--> raw slot --repack stream--> slab
//!                  +-> pinned ring piece -+
//! ```
//!
//! Staging threads take pieces in order. Each makes its piece readable for the copy engine (registers the window, or
//! fills a pinned piece) and then queues the copy and the repacking under one lock, the [`Lane`]. When the last piece of
//! an upload is queued, its event is recorded; operations wait for that event on the device, the host for nothing but
//! the queueing. Whether the file was still the same, and whether all scales are finite, is looked at when the event has
//! passed.
//!
//! ```text
//!   queued --(all pieces queued on the device)--> enqueued --(event passed)--> settled: right, or an error
//! ```
//!
//! *Invariant:* a slab is written by the repack stream only, after the operations that were queued before the upload
//! began. *Invariant:* the queue's lock and the lane's are never held together.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocmforge_gguf::MappedFile;
use rocmforge_kernels::gpu::ops::weights::{self, Weights};
use rocmforge_kernels::host::reference;

use crate::error::Error;
use crate::gpu::{Context, Event, PinnedBuffer, Stream};
use crate::segment::{Placed, Role};
use crate::{Outline, Upload, UploadTicket};

use super::fixed::{FLAGS, Fixed, SLOTS};
use super::kernels::Kernels;
use super::pace::Stopwatch;
use super::ring::Ring;
use super::windows::{Held, WINDOW_BYTES, WindowKey, Windows};
use super::{failed, wait};

/// What one staging thread does at a time.
#[derive(Debug)]
enum Piece {
    /// Rows of a matrix.
    Rows { tensor: usize, rows: Range<u64> },
    /// All vectors of the segment: small, and kept as f32.
    Vectors,
}

#[derive(Debug)]
struct Job {
    ticket: UploadTicket,
    upload: Upload,
    /// Address of the slab.
    slab: u64,
    pieces: Vec<Piece>,
    next: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    /// What the operations before the upload had queued.
    before: Event,
    /// The end of the upload on the device.
    done: Event,
    /// Which flag its repacking raises for a scale that is not finite.
    flag: u64,
    windows: Mutex<Vec<WindowKey>>,
}

impl Job {
    fn is_enqueued(&self) -> bool {
        self.ended.load(Ordering::Acquire) == self.pieces.len()
    }

    fn take_error(&self) -> Option<Error> {
        lock(&self.error).take()
    }

    fn fail(&self, error: Error) {
        self.failed.store(true, Ordering::Relaxed);
        lock(&self.error).get_or_insert(error);
    }
}

/// The streams that uploads are queued on, and which slot is next.
#[derive(Debug)]
struct Lane {
    copy: Stream,
    repack: Stream,
    next_slot: usize,
    /// The upload whose slab the repack stream has last waited for.
    behind: Option<UploadTicket>,
    /// For each slot: its copy has ended, its repacking has ended.
    filled: Vec<Event>,
    drained: Vec<Event>,
    /// Seconds a byte of a copy.
    pace: Stopwatch,
}

impl Lane {
    fn synchronize(&self) -> Result<(), crate::gpu::Error> {
        self.copy
            .synchronize()
            .and_then(|()| self.repack.synchronize())
    }
}

#[derive(Debug)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    /// Windows of files that threads register while there are no jobs, by number.
    ahead: VecDeque<(Arc<MappedFile>, u64)>,
    /// Whether a thread is at that.
    registering: bool,
    /// What [`Windows::queued`] said when that thread last looked.
    queued_before: u64,
    /// Until when it waits after that changed.
    rest_until: Instant,
    ending: bool,
}

/// Most windows that wait to be registered ahead of need.
const AHEAD_MAX: usize = 4096;

/// How long nothing must have been queued on the device before windows are registered ahead of need.
const REST: Duration = Duration::from_millis(4);

#[derive(Debug)]
struct Shared {
    kernels: Arc<Kernels>,
    windows: Windows,
    ring: Ring,
    lane: Mutex<Lane>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Addresses of the fixed block's parts.
    fixed: Mutex<Fixed>,
    /// u32 a flag, copied back when an upload ends.
    flags: PinnedBuffer,
}

/// How uploads are set up.
#[derive(Debug, Clone, Copy)]
pub(super) struct UploadsConfig {
    pub(super) threads: usize,
    pub(super) ring_pieces: usize,
    pub(super) ring_piece_bytes: usize,
    pub(super) registered_bytes_max: u64,
    pub(super) patience: Duration,
}

/// The staging threads and the uploads that are not settled.
#[derive(Debug)]
pub(super) struct Uploads {
    shared: Arc<Shared>,
    context: Context,
    threads: Vec<JoinHandle<()>>,
    under_way: HashMap<UploadTicket, Arc<Job>>,
    /// Waited for by operations; their end has not been looked at.
    settling: Vec<Arc<Job>>,
    /// Results that [`Uploads::finished`] has yet to tell.
    results: Vec<(UploadTicket, Result<(), Error>)>,
    next_ticket: u64,
    patience: Duration,
}

impl Uploads {
    pub(super) fn start(
        context: &Context,
        kernels: Arc<Kernels>,
        config: UploadsConfig,
    ) -> Result<Self, Error> {
        let stream = || {
            Stream::new(context, crate::gpu::Priority::Normal)
                .map_err(|e| failed("making a stream", e))
        };
        let event = || Event::new(context, false).map_err(|e| failed("making an event", e));
        let lane = Lane {
            copy: stream()?,
            repack: stream()?,
            next_slot: 0,
            behind: None,
            filled: (0..SLOTS).map(|_| event()).collect::<Result<_, _>>()?,
            drained: (0..SLOTS).map(|_| event()).collect::<Result<_, _>>()?,
            pace: Stopwatch::new(context)?,
        };
        let shared = Arc::new(Shared {
            kernels,
            windows: Windows::new(context, config.registered_bytes_max),
            ring: Ring::new(
                context,
                config.ring_pieces,
                config.ring_piece_bytes,
                config.patience,
            )?,
            lane: Mutex::new(lane),
            queue: Mutex::new(Queue {
                jobs: VecDeque::new(),
                ahead: VecDeque::new(),
                registering: false,
                queued_before: 0,
                rest_until: Instant::now(),
                ending: false,
            }),
            changed: Condvar::new(),
            fixed: Mutex::default(),
            flags: PinnedBuffer::new(context, FLAGS as usize * 4)
                .map_err(|e| failed("allocating pinned memory", e))?,
        });
        let mut uploads = Self {
            shared,
            context: context.clone(),
            threads: Vec::new(),
            under_way: HashMap::new(),
            settling: Vec::new(),
            results: Vec::new(),
            next_ticket: 0,
            patience: config.patience,
        };
        for i in 0..config.threads {
            let shared = Arc::clone(&uploads.shared);
            let thread = std::thread::Builder::new()
                .name(format!("staging-{i}"))
                .spawn(move || serve(&shared));
            uploads.threads.push(thread.map_err(|e| {
                Error::Config(format!("a staging thread could not be started: {e}"))
            })?);
        }
        Ok(uploads)
    }

    /// Tells where the fixed block's parts are, as addresses. Nothing may be under way.
    pub(super) fn set_fixed(&mut self, addresses: Fixed) {
        *lock(&self.shared.fixed) = addresses;
    }

    /// Keeps registrations from delaying other calls while it lives.
    pub(super) fn hold(&self) -> Held<'_> {
        self.shared.windows.hold()
    }

    /// Bytes a second of a copy by itself, once one was measured.
    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        lock(&self.shared.lane).pace.rate()
    }

    /// Starts an upload into the slab at an address, behind what `compute` has queued.
    pub(super) fn begin(
        &mut self,
        upload: Upload,
        slab: u64,
        compute: &Stream,
    ) -> Result<UploadTicket, Error> {
        let slot_bytes = lock(&self.shared.fixed).slot_bytes;
        let pieces = pieces(&upload, slot_bytes)?;
        if self.under_way.len() + self.settling.len() >= FLAGS as usize {
            self.settle_all()?;
        }
        let event = || Event::new(&self.context, false).map_err(|e| failed("making an event", e));
        let before = event()?;
        before
            .record(compute)
            .map_err(|e| failed("recording an event", e))?;
        let ticket = UploadTicket(self.next_ticket);
        self.next_ticket += 1;
        let job = Arc::new(Job {
            ticket,
            slab,
            pieces,
            next: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            before,
            done: event()?,
            flag: ticket.0 % FLAGS,
            windows: Mutex::default(),
            upload,
        });
        lock(&self.shared.queue).jobs.push_back(Arc::clone(&job));
        self.shared.changed.notify_all();
        self.under_way.insert(ticket, job);
        Ok(ticket)
    }

    /// Uploads that have ended since the last call.
    pub(super) fn finished(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        let passed = |job: &Job| {
            job.is_enqueued()
                && (job.failed.load(Ordering::Relaxed) || job.done.is_passed().unwrap_or(true))
        };
        let ended: Vec<_> = self
            .under_way
            .extract_if(|_, job| passed(job))
            .map(|(_, job)| job)
            .collect();
        for job in ended {
            let result = self.settle(&job);
            self.results.push((job.ticket, result));
        }
        let settled: Vec<_> = self.settling.extract_if(.., |job| passed(job)).collect();
        for job in settled {
            let result = self.settle(&job);
            self.results.push((job.ticket, result));
        }
        std::mem::take(&mut self.results)
    }

    /// Lets `compute` wait for an upload; the host waits until it is queued.
    pub(super) fn wait(&mut self, ticket: UploadTicket, compute: &Stream) -> Result<(), Error> {
        let job = self
            .under_way
            .remove(&ticket)
            .expect("a ticket is waited for once");
        self.until_enqueued(&job);
        tracing::trace!(ticket = ticket.0, "an upload is queued");
        if job.failed.load(Ordering::Relaxed) {
            return self.settle(&job);
        }
        if let Err(error) = compute.wait(&job.done) {
            // Nobody asks for it again, and its slab goes to others: the host waits in the stream's place.
            self.settle(&job)?;
            return Err(failed("waiting for an upload", error));
        }
        self.settling.push(job);
        Ok(())
    }

    /// After the compute stream was waited for: looks at the uploads that its operations used. The first error comes
    /// back; [`Uploads::finished`] tells which uploads they were.
    pub(super) fn settle_used(&mut self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for job in std::mem::take(&mut self.settling) {
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
        for job in jobs.iter().chain(&self.settling) {
            self.until_enqueued(job);
            if !job.failed.load(Ordering::Relaxed) {
                wait::until_passed(&job.done, self.patience)?;
            } else if let Err(error) = lock(&self.shared.lane).synchronize() {
                // Pieces before the one that failed may be queued still.
                return Err(failed("waiting for an upload", error));
            }
        }
        for job in std::mem::take(&mut self.settling) {
            let result = self.settle(&job);
            self.results.push((job.ticket, result));
        }
        Ok(())
    }

    /// Lets idle threads register the windows that a model's uploads will read, in their order.
    pub(super) fn register_ahead(&mut self, model: &Outline<'_>) {
        let tensors = model.segments.iter().flat_map(|(_, l)| &l.tensors);
        let matrices = tensors.filter(|t| t.desc.role == Role::Matrix);
        let mut next = 0;
        let mut queue = lock(&self.shared.queue);
        for Placed { desc, .. } in matrices {
            let first = desc.offset / WINDOW_BYTES;
            let end = (desc.offset + desc.bytes).div_ceil(WINDOW_BYTES);
            for number in first.max(next)..end {
                if queue.ahead.len() < AHEAD_MAX {
                    queue.ahead.push_back((Arc::clone(model.file), number));
                }
            }
            next = next.max(end);
        }
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// A file will not be read any more.
    pub(super) fn forget(&mut self, file: &Arc<MappedFile>) {
        let others = |(of, _): &(Arc<MappedFile>, u64)| !Arc::ptr_eq(of, file);
        lock(&self.shared.queue).ahead.retain(others);
        self.shared.windows.forget(file);
    }

    /// Lets `stream` wait for all uploads that are queued; the host waits for the queueing.
    pub(super) fn order_before(&mut self, stream: &Stream) -> Result<(), Error> {
        for job in self.under_way.values().chain(&self.settling) {
            self.until_enqueued(job);
            if !job.failed.load(Ordering::Relaxed) {
                stream
                    .wait(&job.done)
                    .map_err(|e| failed("waiting for an upload", e))?;
            }
        }
        Ok(())
    }

    fn until_enqueued(&self, job: &Job) {
        let mut queue = lock(&self.shared.queue);
        while !job.is_enqueued() {
            queue = self
                .shared
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The result of an upload whose event has passed, or which failed before.
    fn settle(&self, job: &Job) -> Result<(), Error> {
        let mut result = match job.take_error() {
            None => Ok(()),
            Some(error) => {
                // Pieces that were queued before the error must not land in memory that others get.
                let lane = lock(&self.shared.lane);
                let waited = lane.synchronize();
                Err(match waited {
                    Err(lost) if lost.is_lost() => failed("waiting for an upload", lost),
                    _ => error,
                })
            }
        };
        self.shared.windows.release(&lock(&job.windows));
        if result.is_ok() {
            // It has passed, unless the driver failed to say so when it was asked before.
            result = wait::until_passed(&job.done, self.patience).and_then(|()| self.verify(job));
        }
        result
    }

    fn verify(&self, job: &Job) -> Result<(), Error> {
        job.upload
            .file
            .check_unchanged()
            .map_err(|source| Error::Read {
                tensor: first_name(&job.upload),
                source,
            })?;
        // SAFETY: the flag lies inside the buffer, and the copy into it has ended: the job's event has passed.
        let flag = unsafe {
            self.shared
                .flags
                .as_ptr()
                .cast::<u32>()
                .add(job.flag as usize)
                .read_volatile()
        };
        if flag & 1 != 0 {
            return Err(Error::NotFinite {
                tensor: format!("one of those from {} on", first_name(&job.upload)),
            });
        }
        Ok(())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        lock(&self.shared.queue).ending = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a staging thread panicked");
            }
        }
        let lane = lock(&self.shared.lane);
        // Pinned memory and registrations go next; a lost device ends this at once.
        let _ = lane.synchronize();
    }
}

fn first_name(upload: &Upload) -> String {
    upload
        .layout
        .tensors
        .first()
        .map(|t| t.desc.name.clone())
        .unwrap_or_default()
}

/// Cuts an upload into pieces that fit a slot.
fn pieces(upload: &Upload, slot_bytes: u64) -> Result<Vec<Piece>, Error> {
    let mut pieces = Vec::new();
    let mut vectors = false;
    for (tensor, placed) in upload.layout.tensors.iter().enumerate() {
        let desc = &placed.desc;
        if desc.role == Role::Vector {
            vectors = true;
            continue;
        }
        let row_bytes = desc.bytes / desc.rows.max(1);
        if row_bytes > slot_bytes {
            return Err(desc.wrong_shape(format!(
                "a row has {row_bytes} bytes and staging {slot_bytes}; raise the budget"
            )));
        }
        let step = (slot_bytes / row_bytes.max(1)).max(1);
        let mut row = 0;
        while row < desc.rows {
            let end = desc.rows.min(row + step);
            pieces.push(Piece::Rows {
                tensor,
                rows: row..end,
            });
            row = end;
        }
    }
    if vectors {
        pieces.insert(0, Piece::Vectors);
    }
    Ok(pieces)
}

/// A staging thread's life.
fn serve(shared: &Shared) {
    loop {
        let (job, index) = {
            let mut queue = lock(&shared.queue);
            loop {
                if queue.ending {
                    return;
                }
                match queue.jobs.front() {
                    Some(job) => {
                        let index = job.next.fetch_add(1, Ordering::Relaxed);
                        if index < job.pieces.len() {
                            break (Arc::clone(job), index);
                        }
                        queue.jobs.pop_front();
                    }
                    None if !queue.registering && !queue.ahead.is_empty() => {
                        queue = register_one(shared, queue);
                    }
                    None => {
                        queue = shared
                            .changed
                            .wait(queue)
                            .unwrap_or_else(PoisonError::into_inner);
                    }
                }
            }
        };
        if !job.failed.load(Ordering::Relaxed)
            && let Err(error) = bring(shared, &job, &job.pieces[index])
        {
            job.fail(error);
        }
        finish_piece(shared, &job);
    }
}

/// Registers the first window of those that may be registered ahead of need, unless the device has work: a driver that
/// registers keeps everything else waiting.
fn register_one<'a>(shared: &'a Shared, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
    queue.registering = true;
    let queued = shared.windows.queued();
    if queued != queue.queued_before {
        queue.queued_before = queued;
        queue.rest_until = Instant::now() + REST;
    }
    let rest = queue.rest_until.saturating_duration_since(Instant::now());
    if !rest.is_zero() {
        let waited = shared.changed.wait_timeout(queue, rest);
        queue = waited.unwrap_or_else(PoisonError::into_inner).0;
    } else if let Some((file, number)) = queue.ahead.pop_front() {
        drop(queue);
        shared.windows.register_ahead(&file, number);
        queue = lock(&shared.queue);
    }
    queue.registering = false;
    queue
}

/// Counts a piece as ended, and closes the upload with the last one: before it counts, so that whoever sees the upload
/// enqueued sees its event.
fn finish_piece(shared: &Shared, job: &Job) {
    let lane = lock(&shared.lane);
    if job.ended.load(Ordering::Acquire) + 1 == job.pieces.len()
        && !job.failed.load(Ordering::Relaxed)
        && let Err(error) = close(shared, job, &lane)
    {
        job.fail(error);
    }
    job.ended.fetch_add(1, Ordering::AcqRel);
    drop(lane);
    // The lock orders this with a waiter that has just looked.
    drop(lock(&shared.queue));
    shared.changed.notify_all();
}

/// Copies the upload's flag back and records its event.
fn close(shared: &Shared, job: &Job, lane: &Lane) -> Result<(), Error> {
    let flags = lock(&shared.fixed).flags;
    let driver = shared.flags_driver(lane)?;
    let to = shared.flags.as_ptr().wrapping_add(job.flag as usize * 4);
    // SAFETY: both places lie in memory that lives as long as the streams; each upload under way has its own flag.
    unsafe {
        driver.copy_d2h_async(
            to,
            crate::gpu::DevicePtr(flags + job.flag * 4),
            4,
            lane.repack.handle(),
        )
    }
    .and_then(|()| {
        // SAFETY: as above; the next upload with this flag finds it cleared.
        unsafe {
            driver.memset_async(
                crate::gpu::DevicePtr(flags + job.flag * 4),
                0,
                4,
                lane.repack.handle(),
            )
        }
    })
    .and_then(|()| job.done.record(&lane.repack))
    .map_err(|e| failed("ending an upload", e))
}

impl Shared {
    fn flags_driver<'a>(&self, lane: &'a Lane) -> Result<crate::gpu::Call<'a>, Error> {
        lane.repack
            .context()
            .driver()
            .map_err(|e| failed("binding the device", e))
    }
}

/// Brings one piece to the device: makes it readable, queues its copy and its repacking.
fn bring(shared: &Shared, job: &Job, piece: &Piece) -> Result<(), Error> {
    match piece {
        Piece::Vectors => bring_vectors(shared, job),
        Piece::Rows { tensor, rows } => {
            let placed = &job.upload.layout.tensors[*tensor];
            let row_bytes = placed.desc.bytes / placed.desc.rows.max(1);
            let start = placed.desc.offset + rows.start * row_bytes;
            let bytes = (rows.end - rows.start) * row_bytes;
            // Registered windows, one after another.
            let mut parts: Vec<(*const u8, u64)> = Vec::new();
            let mut at = start;
            while at < start + bytes {
                let mut used = lock(&job.windows).clone();
                let known = used.len();
                let found = shared.windows.address(&job.upload.file, at, &mut used)?;
                if used.len() > known {
                    note_window(shared, job, used[known]);
                }
                let Some((ptr, left)) = found else {
                    break;
                };
                let n = left.min(start + bytes - at);
                parts.push((ptr, n));
                at += n;
            }
            if at < start + bytes && shared.windows.takes(&job.upload.file) {
                // Later uploads shall find it registered; others come first, since this one has been read by then.
                let window = (Arc::clone(&job.upload.file), at / WINDOW_BYTES);
                let other =
                    |w: &(Arc<MappedFile>, u64)| w.1 != window.1 || !Arc::ptr_eq(&w.0, &window.0);
                let mut queue = lock(&shared.queue);
                queue.ahead.retain(other);
                if queue.ahead.len() < AHEAD_MAX {
                    queue.ahead.push_back(window);
                }
            }
            if at == start + bytes {
                job.upload.file.count_read(bytes);
                let _held = shared.windows.hold();
                let lane = &mut lock(&shared.lane);
                return queue_rows(shared, lane, job, placed, rows.clone(), &parts);
            }
            bring_through_ring(shared, job, placed, rows.clone(), start, row_bytes)
        }
    }
}

/// Notes that the upload uses a window; a second note of the same by another thread is taken back.
fn note_window(shared: &Shared, job: &Job, key: WindowKey) {
    let mut windows = lock(&job.windows);
    if windows.contains(&key) {
        drop(windows);
        shared.windows.release(&[key]);
    } else {
        windows.push(key);
    }
}

/// Reads rows into pinned pieces and queues them from there.
fn bring_through_ring(
    shared: &Shared,
    job: &Job,
    placed: &Placed,
    rows: Range<u64>,
    start: u64,
    row_bytes: u64,
) -> Result<(), Error> {
    let per_piece = (shared.ring.piece_bytes() as u64 / row_bytes).max(1);
    let mut row = rows.start;
    while row < rows.end {
        let end = rows.end.min(row + per_piece);
        let offset = start + (row - rows.start) * row_bytes;
        let bytes = (end - row) * row_bytes;
        let piece = shared.ring.take()?;
        if bytes > piece.bytes as u64 {
            shared.ring.give_unused(piece);
            return Err(Error::Config(format!(
                "a row of '{}' is larger than a piece of pinned memory",
                placed.desc.name
            )));
        }
        // SAFETY: the piece is this thread's until it is given back, and `bytes` long at least.
        let target = unsafe { std::slice::from_raw_parts_mut(piece.ptr, bytes as usize) };
        if let Err(source) = job.upload.file.read_into(offset, target) {
            shared.ring.give_unused(piece);
            return Err(Error::Read {
                tensor: placed.desc.name.clone(),
                source,
            });
        }
        let _held = shared.windows.hold();
        // Given back under the lock that the copy is queued under: the piece's event is that copy's.
        let mut lane = lock(&shared.lane);
        let queued = queue_rows(
            shared,
            &mut lane,
            job,
            placed,
            row..end,
            &[(piece.ptr, bytes)],
        );
        let given = shared.ring.give(piece, &lane.copy);
        drop(lane);
        queued.and(given)?;
        row = end;
    }
    Ok(())
}

/// Queues the copy of rows into a slot and their repacking into the slab.
fn queue_rows(
    shared: &Shared,
    lane: &mut Lane,
    job: &Job,
    placed: &Placed,
    rows: Range<u64>,
    parts: &[(*const u8, u64)],
) -> Result<(), Error> {
    let fixed = *lock(&shared.fixed);
    let desc = &placed.desc;
    let ty = desc.weight_type()?;
    let slot = lane.next_slot;
    lane.next_slot = (slot + 1) % SLOTS;
    let slot_at = fixed.slots + slot as u64 * fixed.slot_bytes;
    let flag = fixed.flags + job.flag * 4;
    let wrong = |e| failed("queueing an upload", e);
    let context = lane.repack.context().clone();
    let driver = context.driver().map_err(wrong)?;
    let copy = &lane.copy;
    copy.wait(&lane.drained[slot]).map_err(wrong)?;
    let timed = lane.pace.begin(copy);
    let mut at = slot_at;
    for &(ptr, bytes) in parts {
        // SAFETY: the source is registered or pinned and stays so until the job has settled, respectively the piece's
        // event has passed; the slot is drained and `bytes` fit it (the pieces were cut so).
        unsafe { driver.copy_h2d_async(crate::gpu::DevicePtr(at), ptr, bytes, copy.handle()) }
            .map_err(wrong)?;
        at += bytes;
    }
    // A launch may have to compile its kernel first, which is no call of the driver.
    drop(driver);
    lane.filled[slot].record(copy).map_err(wrong)?;
    if timed {
        let bytes = at - slot_at;
        lane.pace.end(copy, bytes);
    }
    lane.repack.wait(&lane.filled[slot]).map_err(wrong)?;
    if lane.behind != Some(job.ticket) {
        // Once for all that follows of this upload.
        lane.repack.wait(&job.before).map_err(wrong)?;
        lane.behind = Some(job.ticket);
    }
    let to = Weights {
        ty,
        at: job.slab + placed.at,
        rows: desc.rows,
        cols: desc.cols,
    };
    let launch = weights::repack(to, slot_at, rows.start, rows.end - rows.start, flag)
        .map_err(|e| super::launch_error(&e))?;
    // SAFETY: the slot holds the rows when the launch begins, the slab is the upload's alone.
    let launched = unsafe { shared.kernels.launch(&launch, &lane.repack) };
    lane.drained[slot].record(&lane.repack).map_err(wrong)?;
    launched
}

/// Converts the segment's vectors to f32 and queues their copies into the slab.
fn bring_vectors(shared: &Shared, job: &Job) -> Result<(), Error> {
    let vectors = job
        .upload
        .layout
        .tensors
        .iter()
        .filter(|t| t.desc.role == Role::Vector);
    for placed in vectors {
        let desc = &placed.desc;
        let ty = desc.weight_type()?;
        let mut values = vec![0.0f32; desc.cols as usize];
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
        for (i, part) in values.chunks(shared.ring.piece_bytes() / 4).enumerate() {
            let at = job.slab + placed.at + (i * shared.ring.piece_bytes()) as u64;
            let piece = shared.ring.take()?;
            // SAFETY: the piece is this thread's, and long enough.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr().cast(), piece.ptr, size_of_val(part));
            }
            let lane = lock(&shared.lane);
            let driver = shared.flags_driver(&lane)?;
            let queued = lane.repack.wait(&job.before).and_then(|()| {
                // SAFETY: the piece is left alone until its event has passed; the slab is the upload's alone.
                unsafe {
                    driver.copy_h2d_async(
                        crate::gpu::DevicePtr(at),
                        piece.ptr,
                        size_of_val(part) as u64,
                        lane.repack.handle(),
                    )
                }
            });
            let given = shared.ring.give(piece, &lane.repack);
            queued
                .map_err(|e| failed("queueing an upload", e))
                .and(given)?;
        }
    }
    Ok(())
}

/// Nothing is done under these locks that could leave a half-made state behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
