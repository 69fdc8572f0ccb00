//! The threads of the host device: a fixed set that shares out the items of one operation at a
//! time.
//!
//! A pass is hundreds of operations of 10 us to 10 ms, one after the other, so what counts is how
//! soon the workers start: they spin for [`SPIN`] after a job and only then park, which makes the
//! start of the next operation of a pass cheap and lets an idle daemon use no CPU.
//!
//! ```text
//!   worker:  spinning --(a job opens)--> joined --(items exhausted)--> spinning
//!               ^                                                          |
//!               |                                                    (SPIN passes)
//!               |                                                          v
//!               +----------------(unparked by the next job)------------- parked
//! ```
//!
//! Items are handed out in chunks from a shared counter, not in equal shares: on a machine that
//! other processes use too, an equal share waits for the core that was taken away.
//!
//! *Invariants* (`pool/tests.rs`, also under Miri: `.ci/miri`):
//! - The job lives on the caller's stack. A worker reads it only between a successful join (which
//!   fails once the job is closed) and its leave; the caller closes the job and waits for the
//!   joined ones before it returns.
//! - A worker that is late does not hold up the caller: the caller works too, and a job that is
//!   already done closes without the late one.
//! - One shared job at a time: a second thread with one waits. What one chunk covers runs on its
//!   caller at once; a call from inside a job panics.
//!
//! Owner: the engine thread of the host device; workers never touch anything but
//! the closure they are given.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most threads of one pool, the caller included.
pub const MAX_POOL_THREADS: usize = 1024;

/// The most items of one [`Pool::run`]: leaves the shared counter far from wrapping around.
const MAX_ITEMS: usize = 1 << 48;

/// How long a worker looks for the next job before it parks, unless the pool was made otherwise.
pub const SPIN: Duration = Duration::from_micros(80);

/// How long a waiting caller spins before it offers its core to others between looks.
const WAIT_SPIN: Duration = Duration::from_micros(50);

/// Looks at the shared state between two readings of the clock.
const LOOKS_PER_CLOCK: u32 = 32;

/// `Shared::state`: the low half counts the joined workers, this bit says that the job takes more
/// of them, and the bits above it number the job.
const OPEN: u64 = 1 << 32;
const EPOCH_ONE: u64 = 1 << 33;
const JOINED_MASK: u64 = OPEN - 1;

/// Why a [`Pool`] could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// More threads than [`MAX_POOL_THREADS`].
    #[error(
        "a pool of {asked} threads was asked for, the most is {MAX_POOL_THREADS}: lower --threads"
    )]
    TooManyThreads {
        /// The number asked for.
        asked: usize,
    },
    /// The system refused a thread.
    #[error(
        "thread {index} of {asked} could not be started: lower --threads or raise the process limit"
    )]
    Spawn {
        /// Which worker, from 1 (0 is the caller).
        index: usize,
        /// The number of threads asked for, the caller included.
        asked: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

thread_local! {
    /// Whether this thread is inside a job of any pool.
    static INSIDE_JOB: Cell<bool> = const { Cell::new(false) };
}

/// What the workers are asked to do: `body(worker_index)`, once for each worker that joins.
#[derive(Clone, Copy)]
struct Job {
    body: *const (dyn Fn(usize) + Sync),
}

#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// Number of the job, open bit, count of joined workers; see [`OPEN`].
    state: Padded<AtomicU64>,
    /// Written by the caller while no job is open and nobody is joined; read by joined workers
    /// only.
    job: UnsafeCell<Option<Job>>,
    /// One flag for each worker: true from before its last check of `state` until it is awake
    /// again.
    parked: Vec<Padded<AtomicBool>>,
    shutdown: AtomicBool,
    /// How long a worker looks for the next job before it parks.
    spin: Duration,
    /// The first panic of the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: every field but `job` is Send + Sync by itself. `job` is written only by the thread that
// holds `Pool::caller` while the state is closed with nobody joined, and read only by workers that
// joined, which happens after the write (release store of `state`, acquire in the join) and ends
// before the next write (release in the leave, acquire in the wait at the end of `dispatch`). The
// closure behind the pointer is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer inside `job` is only used under that protocol,
// whichever thread it is on.
unsafe impl Send for Shared {}

/// A fixed set of threads, the caller included, that runs one operation at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the thread whose job is running.
    caller: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts `threads - 1` workers; the caller of each operation is the remaining one.
    ///
    /// # Errors
    /// More threads than [`MAX_POOL_THREADS`], or the system refuses a thread
    /// (those already started end).
    pub fn new(threads: NonZeroUsize) -> Result<Pool, PoolError> {
        Self::with_spin(threads, SPIN)
    }

    /// [`Pool::new`] whose workers look for the next job for so long before they park: where jobs
    /// come at intervals, waking many threads one after another may take longer than the job.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn with_spin(threads: NonZeroUsize, spin: Duration) -> Result<Pool, PoolError> {
        let asked = threads.get();
        if asked > MAX_POOL_THREADS {
            return Err(PoolError::TooManyThreads { asked });
        }
        let shared = Arc::new(Shared {
            state: Padded(AtomicU64::new(0)),
            job: UnsafeCell::new(None),
            parked: (1..asked).map(|_| Padded(AtomicBool::new(false))).collect(),
            shutdown: AtomicBool::new(false),
            spin,
            panic: Mutex::new(None),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(asked - 1),
            caller: Mutex::new(()),
        };
        for index in 1..asked {
            let shared = Arc::clone(&pool.shared);
            // On an error `pool` drops here, which ends the workers that did start.
            let worker = std::thread::Builder::new()
                .name(format!("host-{index}"))
                .spawn(move || worker_loop(&shared, index))
                .map_err(|source| PoolError::Spawn {
                    index,
                    asked,
                    source,
                })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// How many threads work on an operation, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f` with disjoint ranges that cover `0..n_items`, each of at most `chunk` items (0
    /// counts as 1), from all threads of the pool, and returns when all of them are done. With one
    /// thread, or when one chunk covers everything, `f` runs on the caller alone.
    ///
    /// # Panics
    /// With the payload of `f` if a call of it panics; ranges not yet handed out are then skipped
    /// and the pool stays usable. Also when called from inside a job of any pool (that would wait
    /// for itself), or with 2^48 items or more.
    pub fn run(&self, n_items: usize, chunk: usize, f: impl Fn(Range<usize>) + Sync) {
        self.run_beside(n_items, chunk, f, || ());
    }

    /// [`Pool::run`] whose caller does `own` first, while the other threads begin.
    ///
    /// # Panics
    /// As [`Pool::run`]; also with the payload of `own` if that panics.
    pub fn run_beside(
        &self,
        n_items: usize,
        chunk: usize,
        f: impl Fn(Range<usize>) + Sync,
        own: impl FnOnce(),
    ) {
        assert!(
            n_items < MAX_ITEMS,
            "{n_items} items in one operation, the limit is {MAX_ITEMS}"
        );
        let chunk = chunk.clamp(1, n_items.max(1));
        let next = Padded(AtomicUsize::new(0));
        let stop = StopOnUnwind {
            next: &next.0,
            n_items,
        };
        let body = |_worker: usize| {
            let stop = stop.arm();
            loop {
                let start = next.0.fetch_add(chunk, Ordering::Relaxed);
                if start >= n_items {
                    break;
                }
                f(start..n_items.min(start + chunk));
            }
            std::mem::forget(stop);
        };
        if self.workers.is_empty() || n_items <= chunk {
            let _inside = Inside::enter();
            own();
            body(0);
        } else {
            self.dispatch(&body, own, None);
        }
    }

    /// Calls `f(worker_index)` once on every thread of the pool, the caller being 0, and
    /// returns when all of them are done. For per-thread set-up; unlike [`Pool::run`] it waits
    /// for the slowest thread to wake.
    ///
    /// # Panics
    /// As [`Pool::run`]; every thread still makes its call.
    pub fn broadcast(&self, f: impl Fn(usize) + Sync) {
        let arrived = AtomicUsize::new(0);
        let body = |worker: usize| {
            // A thread that panics has arrived too.
            let result = catch_unwind(AssertUnwindSafe(|| f(worker)));
            arrived.fetch_add(1, Ordering::Release);
            if let Err(payload) = result {
                resume_unwind(payload);
            }
        };
        self.dispatch(&body, || (), Some(&arrived));
    }

    /// Splits `out`, `[rows][width]`, into blocks of at most `chunk_rows` rows and calls
    /// `f(rows, block)` for each of them from all threads.
    ///
    /// # Panics
    /// As [`Pool::run`]; also when `width` is zero or does not divide the length of `out`.
    pub fn run_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        chunk_rows: usize,
        f: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        assert!(
            width > 0 && out.len().is_multiple_of(width),
            "{} elements are no rows of {width}",
            out.len()
        );
        let rows = out.len() / width;
        let base = SyncPtr(out.as_mut_ptr());
        self.run(rows, chunk_rows, |range| {
            // SAFETY: range lies in 0..rows, so the block lies inside `out`; ranges of
            // one run are disjoint, so no two blocks overlap, and `out` stays mutably
            // borrowed until run returns.
            let block = unsafe {
                std::slice::from_raw_parts_mut(
                    base.get().add(range.start * width),
                    range.len() * width,
                )
            };
            f(range, block);
        });
    }

    /// Opens `body` to the workers, does `own` and then `body` on this thread too, and waits for
    /// those that joined; with `arrived`, first waits until every thread has counted itself there.
    fn dispatch(
        &self,
        body: &(dyn Fn(usize) + Sync),
        own: impl FnOnce(),
        arrived: Option<&AtomicUsize>,
    ) {
        let inside = Inside::enter();
        let guard: MutexGuard<'_, ()> = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is read by joined workers only, and
        // this function does not return (nor unwind: all calls of outside code below are
        // caught) before they have left.
        let body_ptr: *const (dyn Fn(usize) + Sync) = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(std::ptr::from_ref(body))
        };
        let job = shared.job.get();
        // SAFETY: `caller` is held and the last job was closed and left by everyone,
        // so nobody reads the cell.
        unsafe { *job = Some(Job { body: body_ptr }) };
        let previous = shared.state.0.load(Ordering::Relaxed);
        debug_assert_eq!(previous & (OPEN | JOINED_MASK), 0, "a job was left open");
        shared
            .state
            .0
            .store(previous.wrapping_add(EPOCH_ONE) | OPEN, Ordering::SeqCst);
        for (flag, worker) in shared.parked.iter().zip(&self.workers) {
            if flag.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(own));
        let result = catch_unwind(AssertUnwindSafe(|| body(0))).and(own);
        if let Some(arrived) = arrived {
            wait_until(|| arrived.load(Ordering::Acquire) == self.threads());
        }
        shared.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(|| shared.state.0.load(Ordering::Acquire) & JOINED_MASK == 0);
        let theirs = shared
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(guard);
        drop(inside);
        if let Some(payload) = result.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches what its jobs throw, so there is nothing to learn from the join.
            let _ = worker.join();
        }
    }
}

/// A pointer that the closures of one job share; they use disjoint parts behind it.
pub(crate) struct SyncPtr<T>(pub(crate) *mut T);

impl<T> SyncPtr<T> {
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: the pointer comes from a slice that is mutably borrowed for the whole job, the threads
// form disjoint sub-slices from it, and T may be sent to them.
unsafe impl<T: Send> Sync for SyncPtr<T> {}

/// Marks the thread as inside a job and unmarks it on the way out, unwinding included.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        assert!(
            !INSIDE_JOB.replace(true),
            "a pool was called from inside a job: operations do not nest, split the work before dispatching it"
        );
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE_JOB.set(false);
    }
}

/// Exhausts the shared counter when a chunk panics, so that the other threads stop early.
struct StopOnUnwind<'a> {
    next: &'a AtomicUsize,
    n_items: usize,
}

struct Armed<'a>(&'a StopOnUnwind<'a>);

impl StopOnUnwind<'_> {
    fn arm(&self) -> Armed<'_> {
        Armed(self)
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.0.next.fetch_max(self.0.n_items, Ordering::Relaxed);
    }
}

fn wait_until(done: impl Fn() -> bool) {
    let mut looks = 0u32;
    let mut since = None;
    while !done() {
        looks += 1;
        if !looks.is_multiple_of(LOOKS_PER_CLOCK) {
            std::hint::spin_loop();
        } else if since.get_or_insert_with(Instant::now).elapsed() > WAIT_SPIN {
            std::thread::yield_now();
        }
    }
}

fn worker_loop(shared: &Shared, index: usize) {
    INSIDE_JOB.set(true);
    let mut seen = 0u64;
    while let Some(state) = next_job(shared, index, seen) {
        seen = state & !(OPEN | JOINED_MASK);
        if !join(shared, seen) {
            continue;
        }
        // SAFETY: this worker has joined, so the caller does not touch the cell until it leaves.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job {
            let result = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: the closure lives on the stack of the caller, who waits
                // for this worker to leave.
                let body = unsafe { &*job.body };
                body(index);
            }));
            if let Err(payload) = result {
                shared
                    .panic
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(payload);
            }
        }
        shared.state.0.fetch_sub(1, Ordering::Release);
    }
}

/// Counts this worker in, unless the job `epoch` was closed meanwhile.
fn join(shared: &Shared, epoch: u64) -> bool {
    let mut state = shared.state.0.load(Ordering::Relaxed);
    loop {
        if state & OPEN == 0 || state & !(OPEN | JOINED_MASK) != epoch {
            return false;
        }
        match shared.state.0.compare_exchange_weak(
            state,
            state + 1,
            Ordering::Acquire,
            Ordering::Relaxed,
        ) {
            Ok(_) => return true,
            Err(now) => state = now,
        }
    }
}

/// Waits for an open job other than number `seen`: spins first, then parks. None at shutdown.
fn next_job(shared: &Shared, index: usize, seen: u64) -> Option<u64> {
    let ready = |order: Ordering| {
        let state = shared.state.0.load(order);
        (state & OPEN != 0 && state & !(OPEN | JOINED_MASK) != seen).then_some(state)
    };
    let parked = &shared.parked[index - 1].0;
    let mut since = Instant::now();
    let mut looks = 0u32;
    loop {
        if let Some(state) = ready(Ordering::Relaxed) {
            return Some(state);
        }
        looks += 1;
        if !looks.is_multiple_of(LOOKS_PER_CLOCK) {
            std::hint::spin_loop();
            continue;
        }
        if shared.shutdown.load(Ordering::SeqCst) {
            return None;
        }
        if since.elapsed() < shared.spin {
            continue;
        }
        // The flag first, then a last look: the caller publishes first and then reads the flag, so
        // one of the two sees the other.
        parked.store(true, Ordering::SeqCst);
        while ready(Ordering::SeqCst).is_none() && !shared.shutdown.load(Ordering::SeqCst) {
            std::thread::park();
        }
        parked.store(false, Ordering::SeqCst);
        since = Instant::now();
    }
}

#[cfg(test)]
mod tests;
