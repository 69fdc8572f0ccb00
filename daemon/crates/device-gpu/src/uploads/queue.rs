//! What staging threads wait for: pieces of uploads, and without any, windows
//! to register ahead of need.
//!
//! The lock is held to look at the queue, never while a piece is worked on or a window registered.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_gguf::MappedFile;

use crate::windows::Windows;

use super::job::Job;
use super::lock;

/// Most windows that wait to be registered ahead of need.
const AHEAD_MAX: usize = 4096;

/// How long nothing must have been queued on the device before windows are
/// registered ahead of need.
const REST: Duration = Duration::from_millis(4);

/// An upload of so many bytes is a matter of microseconds to queue from registered windows:
/// one thread is woken for it.
const SMALL_BYTES: u64 = 8 << 20;

/// So many small uploads wait for a thread that is awake, where they have to be copied by
/// it. From registered windows all do: what is left to do is to call the driver, which
/// threads do one after another.
const SOON: usize = 2;

/// How long the end of pieces that others have taken is looked for without sleep: to be woken
/// takes longer than most need.
const SPIN: Duration = Duration::from_micros(200);

/// How long a thread without pieces looks for more before it sleeps: some layers' time in a
/// pass that misses experts.
const AWAKE: Duration = Duration::from_micros(500);

/// A window of a file, by number.
pub(super) type FileWindow = (Arc<MappedFile>, u64);

/// The threads' queue.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// A job was queued, there are windows to register, or the end: for the threads.
    work: Condvar,
    /// An upload is enqueued on the device, or a window was registered: for the owner.
    done: Condvar,
    /// Uploads that were queued, for the thread that looks without the lock.
    pushed: AtomicU64,
    /// Whether the last piece had to be copied by its thread.
    copied: AtomicBool,
    /// Threads that are at a piece, or have just been and look for the next
    /// one. Changes under the lock.
    awake: AtomicUsize,
}

#[derive(Debug)]
struct State {
    jobs: VecDeque<Arc<Job>>,
    /// Windows of files that threads register while there are no jobs.
    ahead: VecDeque<FileWindow>,
    /// Whether a thread is at that, and the file whose window it has taken.
    registering: bool,
    taken: Option<Arc<MappedFile>>,
    /// What [`Windows::queued`] said when that thread last looked.
    queued_before: u64,
    /// Until when it waits after that changed.
    rest_until: Instant,
    ending: bool,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                jobs: VecDeque::new(),
                ahead: VecDeque::new(),
                registering: false,
                taken: None,
                queued_before: 0,
                rest_until: Instant::now(),
                ending: false,
            }),
            work: Condvar::new(),
            done: Condvar::new(),
            pushed: AtomicU64::new(0),
            copied: AtomicBool::new(true),
            awake: AtomicUsize::new(0),
        }
    }

    /// Queues an upload's pieces.
    pub(super) fn push(&self, job: Arc<Job>) {
        let small = job.upload.layout.bytes <= SMALL_BYTES;
        let mut state = lock(&self.state);
        state.jobs.push_back(job);
        let copied = self.copied.load(Ordering::Relaxed);
        let soon = self.is_awake() && (!copied || state.jobs.len() <= SOON);
        drop(state);
        self.pushed.fetch_add(1, Ordering::Release);
        // Threads that are woken for nothing stand in the way of the one that is not.
        match small {
            true if soon => {}
            true => self.work.notify_one(),
            false => self.work.notify_all(),
        }
    }

    /// A piece was copied by its thread, or did not have to be.
    pub(super) fn note_copied(&self, copied: bool) {
        self.copied.store(copied, Ordering::Relaxed);
    }

    /// Whether a thread is at a piece, or looks for the next one.
    pub(super) fn is_awake(&self) -> bool {
        self.awake.load(Ordering::Relaxed) > 0
    }

    /// The next piece of an upload or of one before it, for its owner to work on while it
    /// waits; `None` if all are taken.
    pub(super) fn next_before(&self, wanted: &Job) -> Option<(Arc<Job>, usize)> {
        let mut state = lock(&self.state);
        while !wanted.progress.is_taken() {
            let job = state.jobs.front()?;
            if let Some(index) = job.progress.take() {
                return Some((Arc::clone(job), index));
            }
            state.jobs.pop_front();
        }
        None
    }

    /// Lets the threads end once they come for another piece.
    pub(super) fn end(&self) {
        lock(&self.state).ending = true;
        self.work.notify_all();
    }

    /// Waits for the next piece, and registers windows meanwhile; `None` at the end. A thread that
    /// asks again has ended the piece that it got before.
    pub(super) fn next(&self, windows: &Windows, was_awake: bool) -> Option<(Arc<Job>, usize)> {
        let mut state = lock(&self.state);
        // One thread looks for more for a while: the uploads of a layer's
        // experts come one after another.
        let alone = self.awake.load(Ordering::Relaxed) == 1;
        if was_awake && alone && state.jobs.is_empty() && !state.ending {
            let pushed = self.pushed.load(Ordering::Acquire);
            drop(state);
            let begin = Instant::now();
            while self.pushed.load(Ordering::Acquire) == pushed && begin.elapsed() < AWAKE {
                std::hint::spin_loop();
            }
            state = lock(&self.state);
        }
        self.awake
            .fetch_sub(usize::from(was_awake), Ordering::Relaxed);
        loop {
            if state.ending {
                return None;
            }
            match state.jobs.front() {
                Some(job) => {
                    if let Some(index) = job.progress.take() {
                        let job = Arc::clone(job);
                        self.awake.fetch_add(1, Ordering::Relaxed);
                        return Some((job, index));
                    }
                    state.jobs.pop_front();
                }
                None if !state.registering && !state.ahead.is_empty() => {
                    state = self.register_one(windows, state);
                }
                None => state = wait(&self.work, state),
            }
        }
    }

    /// Registers the first window of those that may be registered ahead of need, unless the device
    /// has work: a driver that registers keeps everything else waiting.
    fn register_one<'a>(
        &'a self,
        windows: &Windows,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        state.registering = true;
        let queued = windows.holds().queued();
        if queued != state.queued_before {
            state.queued_before = queued;
            state.rest_until = Instant::now() + REST;
        }
        let rest = state.rest_until.saturating_duration_since(Instant::now());
        if !rest.is_zero() {
            let waited = self.work.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        } else if let Some((file, number)) = state.ahead.pop_front() {
            state.taken = Some(Arc::clone(&file));
            drop(state);
            windows.register_ahead(&file, number);
            state = lock(&self.state);
            state.taken = None;
            self.done.notify_all();
        }
        state.registering = false;
        state
    }

    /// Wakes those that wait for an upload to be enqueued, after its last piece was counted.
    pub(super) fn enqueued(&self) {
        // The lock orders this with a waiter that has just looked.
        drop(lock(&self.state));
        self.done.notify_all();
    }

    /// Waits until all pieces of an upload are queued on the device.
    pub(super) fn until_enqueued(&self, job: &Job) {
        let begin = Instant::now();
        while begin.elapsed() < SPIN {
            if job.is_enqueued() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        while !job.is_enqueued() {
            state = wait(&self.done, state);
        }
    }

    /// Lets idle threads register windows, in their order.
    pub(super) fn register(&self, windows: impl Iterator<Item = FileWindow>) {
        let mut state = lock(&self.state);
        let room = AHEAD_MAX.saturating_sub(state.ahead.len());
        state.ahead.extend(windows.take(room));
        drop(state);
        self.work.notify_all();
    }

    /// Lets idle threads register a window after all others.
    pub(super) fn register_last(&self, window: FileWindow) {
        let other = |w: &FileWindow| w.1 != window.1 || !Arc::ptr_eq(&w.0, &window.0);
        let mut state = lock(&self.state);
        state.ahead.retain(other);
        if state.ahead.len() < AHEAD_MAX {
            state.ahead.push_back(window);
        }
    }

    /// No window of a file is registered ahead of need any more; one that a thread is at is waited
    /// for, since nobody would give it back.
    pub(super) fn forget(&self, file: &Arc<MappedFile>) {
        let mut state = lock(&self.state);
        state.ahead.retain(|(of, _)| !Arc::ptr_eq(of, file));
        while state.taken.as_ref().is_some_and(|of| Arc::ptr_eq(of, file)) {
            state = wait(&self.done, state);
        }
    }
}

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rocmforge_fake_hip::Fake;
    use rocmforge_gpu_driver::{Context, Libraries, Vendor, open};

    use super::*;

    /// Once a file was forgotten while a thread registered a window of it,
    /// which then stayed registered.
    #[test]
    fn a_file_that_is_forgotten_while_it_is_registered_keeps_no_window() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let windows = Windows::new(&context, 1 << 30);
        let queue = Queue::new();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1; 64 << 10]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| queue.next(&windows, false).is_none());
            for _ in 0..100 {
                let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
                // What is queued on the device keeps a registration waiting for a while.
                let held = windows.holds().hold();
                lock(&queue.state).queued_before = windows.holds().queued();
                queue.register(std::iter::once((Arc::clone(&mapped), 0)));
                while !lock(&queue.state).ahead.is_empty() {
                    std::thread::yield_now();
                }
                queue.forget(&mapped);
                windows.forget(&mapped);
                drop(held);
                assert_eq!(fake.live().registrations, 0);
                assert_eq!(Arc::strong_count(&mapped), 1, "nobody is at it");
            }
            queue.end();
        });
        assert!(fake.calls("hipHostRegister") > 0, "some were registered");
    }
}
