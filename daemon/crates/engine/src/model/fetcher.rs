//! Reads ranges of a file into the page cache, with threads for which nobody waits without limit:
//! what the engine thread is about to read of files on network file systems such as NFS or FUSE,
//! and what a model needs that was not used for a while ([`crate::features::background_load`]).
//!
//! ```text
//!   engine thread                 the file's threads, 4 at most
//!   begin(ranges) ----pieces--->  MappedFile::bring
//!   wait(fetch)   <---all came--
//!        |
//!        +-- nothing came for as long as the asker has patience: silent. Others with no more
//!            patience are refused at once from then on, until something comes.
//! ```
//!
//! The kernel does not let a read be abandoned. So a read that hangs keeps its thread, and the file
//! open, until the server responds or the process ends; the engine goes on with other models. Pages
//! may leave the page cache again before they are used. Then the engine thread waits for the file
//! after all, which `file_watch` reports.
//!
//! *Invariant:* a thread of a file touches nothing but the file's pages, so what asked for them may
//! be gone when they come (it has the file and a list of ranges, and no handle of anything else).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_gguf::{Error as GgufError, MappedFile};

/// Time without a byte after which a file counts as not responding, if requests of all models wait
/// for it.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(10);

/// Timeout while no other request waits: disks that were asleep spin up within it.
pub(crate) const ASLEEP_MAX: Duration = Duration::from_secs(30);

/// Number of bytes that are read at a time: a slow network transfers them well within
/// [`SILENT_AFTER`].
const PIECE_BYTES: u64 = 1 << 20;

/// Maximum number of threads that read one file.
const THREADS: usize = 4;

/// How long a thread without work waits before it ends.
const IDLE: Duration = Duration::from_secs(30);

/// Reads ranges of one model's file into the page cache, by threads.
#[derive(Debug)]
pub(crate) struct Fetcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    file: Arc<MappedFile>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Pieces that no thread has taken yet, with the read that they belong to.
    pieces: VecDeque<(Range<u64>, Arc<ReadJob>)>,
    threads: usize,
    /// Number of threads that read.
    reading: usize,
    /// Time at which the last piece was read, or the first was requested.
    came: Instant,
    /// Whether nobody holds the fetcher any more, so that its threads end.
    is_left: bool,
}

/// Ranges of a file that are read together.
#[derive(Debug)]
struct ReadJob {
    /// Number of pieces that are not read yet, and the first error.
    left: Mutex<(usize, Option<GgufError>)>,
    is_dropped: AtomicBool,
}

/// Ranges that are being read into the page cache. Dropping the value cancels the reads.
#[derive(Debug)]
pub(crate) struct Fetch(Arc<ReadJob>);

/// Why ranges of a file were not read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// No byte was read for this time.
    Silent(Duration),
    Read(GgufError),
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.is_dropped.store(true, Ordering::Relaxed);
    }
}

impl Fetcher {
    pub(crate) fn new(file: &Arc<MappedFile>) -> Self {
        Self(Arc::new(Shared {
            file: Arc::clone(file),
            state: Mutex::new(State {
                pieces: VecDeque::new(),
                threads: 0,
                reading: 0,
                came: Instant::now(),
                is_left: false,
            }),
            changed: Condvar::new(),
        }))
    }

    /// Starts to read ranges; those for which all models wait are read before others. Without
    /// ranges, only checks whether the file is unchanged.
    pub(crate) fn begin(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        patience: Duration,
    ) -> Result<Fetch, Fault> {
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for Range { start, end } in ranges {
            let starts = (start..end).step_by(PIECE_BYTES as usize);
            pieces.extend(starts.map(|at| at..end.min(at + PIECE_BYTES)));
        }
        if pieces.is_empty() {
            pieces.push(0..0);
        }
        let asked = Arc::new(ReadJob {
            left: Mutex::new((pieces.len(), None)),
            is_dropped: AtomicBool::new(false),
        });
        let fetch = Fetch(Arc::clone(&asked));
        let mut state = lock(&self.0.state);
        if let Some(since) = state.silence(patience) {
            return Err(Fault::Silent(since));
        }
        if state.reading == 0 && state.pieces.is_empty() {
            state.came = Instant::now();
        }
        let all = pieces.into_iter().map(|piece| (piece, Arc::clone(&asked)));
        match patience < ASLEEP_MAX {
            true => all.rev().for_each(|piece| state.pieces.push_front(piece)),
            false => state.pieces.extend(all),
        }
        self.0.have_threads(&mut state);
        drop(state);
        self.0.changed.notify_all();
        Ok(fetch)
    }

    /// Waits until the ranges are in the page cache, at most while bytes arrive within `patience`
    /// of each other.
    pub(crate) fn wait(&self, fetch: Fetch, patience: Duration) -> Result<(), Fault> {
        let mut state = lock(&self.0.state);
        loop {
            if let Some(result) = fetch.result() {
                return result;
            }
            if let Some(since) = state.silence(patience) {
                return Err(Fault::Silent(since));
            }
            let left = patience.saturating_sub(state.came.elapsed());
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The result of reading ranges, if it has ended.
    pub(crate) fn ended(&self, fetch: &Fetch, patience: Duration) -> Option<Result<(), Fault>> {
        fetch.result().or_else(|| {
            let since = lock(&self.0.state).silence(patience)?;
            Some(Err(Fault::Silent(since)))
        })
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        lock(&self.0.state).is_left = true;
        self.0.changed.notify_all();
    }
}

impl Fetch {
    fn result(&self) -> Option<Result<(), Fault>> {
        let mut left = lock(&self.0.left);
        (left.0 == 0).then(|| {
            left.1
                .take()
                .map_or(Ok(()), |error| Err(Fault::Read(error)))
        })
    }
}

impl State {
    /// Time without a byte, if it exceeds `patience`.
    fn silence(&self, patience: Duration) -> Option<Duration> {
        let waits = self.reading > 0 || !self.pieces.is_empty();
        let since = self.came.elapsed();
        (waits && since >= patience).then_some(since)
    }
}

impl Shared {
    /// Starts threads for pieces that no thread has taken.
    fn have_threads(self: &Arc<Self>, state: &mut State) {
        while state.threads < THREADS && state.threads - state.reading < state.pieces.len() {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("fetch".to_owned());
            if let Err(error) = thread.spawn(move || shared.serve()) {
                tracing::warn!(%error, "a file is read by the engine itself: no thread for it");
                if state.threads == 0 {
                    // Whoever reads what did not come waits for it then.
                    for (_, asked) in state.pieces.drain(..) {
                        lock(&asked.left).0 -= 1;
                    }
                }
                return;
            }
            state.threads += 1;
        }
    }

    /// The main loop of a reading thread.
    fn serve(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some((piece, asked)) = state.pieces.pop_front() {
                state.reading += 1;
                drop(state);
                let came = match asked.is_dropped.load(Ordering::Relaxed) {
                    true => Ok(()),
                    false if piece.is_empty() => self.file.check_unchanged(),
                    false => self.file.bring(piece),
                };
                state = lock(&self.state);
                state.reading -= 1;
                state.came = Instant::now();
                let mut left = lock(&asked.left);
                left.0 -= 1;
                left.1 = left.1.take().or(came.err());
                drop(left);
                self.changed.notify_all();
                continue;
            }
            if state.is_left {
                break;
            }
            let waited = self.changed.wait_timeout(state, IDLE);
            let (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = now;
            if timeout.timed_out() && state.pieces.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }
}

/// Locks a mutex, also a poisoned one: no code under these locks can leave an inconsistent state
/// behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
