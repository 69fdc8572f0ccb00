//! The store: what its owner calls, and what its threads share.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::files::{DirectoryFiles, Files, NOTE_MAX, OpenError};
use crate::format::{PAYLOAD_MAX, RECORD_HEADER, SEGMENT_HEADER};
use crate::index::{Entry, Index, Key, Kind, Location, ModelTag};
use crate::reader::{self, Fetch, Job as Read};
use crate::writer::{Job as Write, Writer};

/// The part of the budget that a segment file has: what is deleted at once.
const SEGMENT_PART: u64 = 64;

/// The part of the budget that an entry may have.
const ENTRY_PART: u64 = 4;

/// Least bytes of a segment file.
const SEGMENT_BYTES_MIN: u64 = 64 << 10;

/// Fetches that may wait for the reader.
const FETCHES_MAX: usize = 64;

/// How long closing a store waits for its threads.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of a store.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of all segment files at most.
    pub budget: u64,
    /// Bytes that may wait to be written.
    pub queue_bytes: u64,
    /// Maximum write rate, in bytes a second.
    pub write_bytes_per_s: u64,
    /// How long writing pauses after the first failure. Each further failure doubles it.
    pub pause: Duration,
}

impl Options {
    /// The usual limits within a budget.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self {
            budget,
            queue_bytes: 256 << 20,
            write_bytes_per_s: 512 << 20,
            pause: Duration::from_secs(1),
        }
    }

    /// Bytes of a segment file at most.
    pub(crate) fn segment_bytes(&self) -> u64 {
        (self.budget / SEGMENT_PART).max(SEGMENT_BYTES_MIN)
    }

    /// Bytes of an entry's payload at most.
    pub(crate) fn payload_max(&self) -> u64 {
        let most = (self.budget / ENTRY_PART).saturating_sub(SEGMENT_HEADER + RECORD_HEADER);
        most.min(PAYLOAD_MAX)
    }
}

/// Files that were skipped when the store was opened, by reason, and records that were damaged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Segments whose last record was incomplete: the process ended while it wrote.
    pub torn: u64,
    /// Segments and records with a wrong checksum.
    pub damaged: u64,
    /// Files that are no segments.
    pub foreign: u64,
    /// Segments of another version of the format.
    pub other_version: u64,
}

impl Skipped {
    /// The sum.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.torn + self.damaged + self.foreign + self.other_version
    }
}

/// The state of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether the index is complete.
    pub is_ready: bool,
    /// The index is being read, or something waits to be written or deleted.
    pub is_busy: bool,
    /// Writing is paused after a failure.
    pub is_paused: bool,
    /// Bytes of all segment files.
    pub bytes: u64,
    /// Bytes that there may be.
    pub budget: u64,
    /// Entries.
    pub entries: u64,
    /// Segment files.
    pub segments: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
    /// Entries that were written.
    pub written: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Entries that were read.
    pub read: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Time spent reading the files.
    pub read_time: Duration,
    /// Entries that were not written: the queue was full, or writing was paused.
    pub refused: u64,
    /// Segments that were deleted to make room.
    pub dropped_segments: u64,
    /// Counts of files and entries that were skipped.
    pub skipped: Skipped,
    /// Writes that failed.
    pub write_errors: u64,
    /// Reads that failed.
    pub read_errors: u64,
}

/// What the threads share.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) status: Status,
    /// Jobs of the writer that are not done.
    pub(crate) jobs: u64,
    /// Time until which writing is paused.
    pub(crate) paused_until: Option<Instant>,
    /// Threads are to end once the queue is empty.
    pub(crate) is_closing: bool,
}

impl State {
    /// Whether writing is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused_until
            .is_some_and(|until| Instant::now() < until)
    }
}

pub(crate) struct Shared {
    pub(crate) files: Box<dyn Files>,
    pub(crate) options: Options,
    state: Mutex<State>,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread of the store, and the channel that closes when it has ended.
struct Thread {
    handle: JoinHandle<()>,
    ended: Receiver<()>,
}

impl Thread {
    fn start(
        name: &str,
        shared: Arc<Shared>,
        run: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (end, ended) = mpsc::channel();
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                run(&shared);
                // Before the end is known, so that the directory is free then.
                drop(shared);
                drop(end);
            })?;
        Ok(Self { handle, ended })
    }

    /// Waits for the end, unless a disk that does not answer holds the thread.
    fn join(self) {
        if self.ended.recv_timeout(CLOSE_TIMEOUT) == Err(RecvTimeoutError::Disconnected) {
            let _ = self.handle.join();
        }
    }
}

/// An open store. Dropping it writes what is queued, and closes it.
pub struct Store {
    shared: Arc<Shared>,
    writes: Option<Sender<Write>>,
    reads: Option<SyncSender<Read>>,
    threads: Vec<Thread>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the store of a directory, and makes it if there is none. The index is read in the
    /// background ([`Status::is_ready`]).
    ///
    /// # Errors
    /// [`OpenError`] if the directory cannot be used, or another process has it. Damaged files are
    /// no error.
    pub fn open(directory: &Path, options: Options) -> Result<Self, OpenError> {
        let files = DirectoryFiles::open(directory)?;
        Self::on(Box::new(files), options).map_err(|error| OpenError::Io {
            path: directory.to_owned(),
            error,
        })
    }

    /// Opens a store over given files.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn on(files: Box<dyn Files>, options: Options) -> std::io::Result<Self> {
        let budget = options.budget;
        let shared = Arc::new(Shared {
            files,
            options,
            state: Mutex::default(),
        });
        shared.state().status.budget = budget;
        let (writes, to_write) = mpsc::channel();
        let (reads, to_read) = sync_channel(FETCHES_MAX);
        let writer = Thread::start("kv-write", Arc::clone(&shared), move |shared| {
            Writer::new(shared).run(&to_write);
        })?;
        let reader = Thread::start("kv-read", Arc::clone(&shared), move |shared| {
            reader::run(shared, &to_read);
        })?;
        Ok(Self {
            shared,
            writes: Some(writes),
            reads: Some(reads),
            threads: vec![writer, reader],
        })
    }

    /// Whether an entry is written, or waits for that. Counts as a use of its segment.
    pub fn touch(&self, key: &Key) -> bool {
        self.shared.state().index.touch_entry(key)
    }

    /// Bytes of an entry's payload, if there is one.
    pub fn bytes_of(&self, key: &Key) -> Option<u64> {
        self.shared.state().index.get(key).map(Entry::bytes)
    }

    /// Queues an entry to be written. Whether it is in the store now; not if the queue is full,
    /// writing is paused, or it is too large.
    pub fn put(&self, key: Key, kind: Kind, model: ModelTag, payload: Vec<u8>) -> bool {
        let bytes = payload.len() as u64;
        let mut state = self.shared.state();
        let is_paused = state.is_paused();
        let State { index, status, .. } = &mut *state;
        if index.touch_entry(&key) {
            return true;
        }
        let queued = status.queued_bytes + bytes;
        let has_room = queued <= self.shared.options.queue_bytes
            && bytes <= self.shared.options.payload_max()
            && !is_paused;
        let entry = Entry {
            location: Location::Queued(Arc::new(payload)),
            model,
            kind,
        };
        if !has_room || !index.queue(key, entry) {
            status.refused += 1;
            return false;
        }
        status.queued_bytes = queued;
        drop(state);
        let sent = self.send(Write::Put { key, bytes });
        if !sent {
            let mut state = self.shared.state();
            state.index.forget(&key);
            state.status.queued_bytes -= bytes;
        }
        sent
    }

    /// Whether the write queue has room for `bytes` more.
    pub fn has_room(&self, bytes: u64) -> bool {
        let state = self.shared.state();
        let queued = state.status.queued_bytes + bytes;
        !state.is_paused() && queued <= self.shared.options.queue_bytes
    }

    /// Begins to read entries, in this order. `None` while too many fetches wait.
    pub fn fetch(&self, keys: Vec<Key>) -> Option<Fetch> {
        let largest = {
            let state = self.shared.state();
            let bytes = keys.iter().filter_map(|key| state.index.get(key));
            bytes.map(Entry::bytes).max().unwrap_or(0)
        };
        let (job, fetch) = reader::job(keys, largest);
        let sent = self.reads.as_ref().map(|reads| reads.try_send(job).is_ok());
        (sent == Some(true)).then_some(fetch)
    }

    /// Deletes the entries of a model, or all. Entries of other models in the same segments are
    /// written again. Done in the background; [`Store::flush`] waits for it.
    pub fn clear(&self, model: Option<ModelTag>) {
        self.shared.state().index.forget_queued(model);
        self.send(Write::Clear { model });
    }

    /// The note that the directory's owner left, this process or one before. None where it cannot
    /// be read.
    pub fn note(&self) -> Option<Vec<u8>> {
        self.shared.files.note().ok().flatten()
    }

    /// Has a note written in the background, in the place of the one before. One of more than
    /// [`NOTE_MAX`](crate::NOTE_MAX) bytes is not.
    pub fn set_note(&self, note: Vec<u8>) {
        if note.len() <= NOTE_MAX {
            self.send(Write::Note(note));
        }
    }

    /// Hands a job to the writer. Whether it took it.
    fn send(&self, job: Write) -> bool {
        self.shared.state().jobs += 1;
        let writes = self.writes.as_ref();
        let sent = writes.is_some_and(|writes| writes.send(job).is_ok());
        if !sent {
            self.shared.state().jobs -= 1;
        }
        sent
    }

    /// Waits until what was queued before is written or refused.
    pub fn flush(&self) {
        let (done, ended) = mpsc::channel();
        if self.send(Write::Flush { done }) {
            let _ = ended.recv();
        }
    }

    /// The state of the store.
    pub fn status(&self) -> Status {
        let state = self.shared.state();
        Status {
            is_busy: state.jobs > 0 || !state.status.is_ready,
            is_paused: state.is_paused(),
            bytes: state.index.bytes(),
            entries: state.index.len() as u64,
            segments: state.index.segments() as u64,
            ..state.status
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.state().is_closing = true;
        self.writes = None;
        self.reads = None;
        for thread in self.threads.drain(..) {
            thread.join();
        }
    }
}
