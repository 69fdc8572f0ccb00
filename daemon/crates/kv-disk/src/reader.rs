//! The thread that reads entries.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use crate::files::SegmentFile;
use crate::format::read_payload;
use crate::index::{Key, Location};
use crate::store::Shared;

/// Bytes that a fetch is ahead of who takes its entries.
const AHEAD_BYTES: u64 = 32 << 20;

/// Entries that a fetch is ahead, at most.
const AHEAD_MAX: u64 = 64;

/// How often a used file's time of modification is renewed.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// What the thread is asked for.
pub(crate) struct Job {
    keys: Vec<Key>,
    out: SyncSender<Option<Vec<u8>>>,
}

/// Entries that are being read. Dropping it ends the reading.
#[derive(Debug)]
pub struct Fetch {
    entries: Receiver<Option<Vec<u8>>>,
    left: usize,
}

/// What a fetch has next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// No further entry was read yet.
    Pending,
    /// The payload of the next entry.
    Entry(Vec<u8>),
    /// The next entry cannot be read. The fetch has ended.
    Failed,
    /// All entries of the request were read.
    Done,
}

/// A fetch of keys whose largest entry has so many bytes, and who reads it.
pub(crate) fn job(keys: Vec<Key>, largest: u64) -> (Job, Fetch) {
    let ahead = (AHEAD_BYTES / largest.max(1)).clamp(1, AHEAD_MAX);
    let (out, entries) = sync_channel(ahead as usize);
    let left = keys.len();
    (Job { keys, out }, Fetch { entries, left })
}

impl Fetch {
    /// The next entry, without waiting for it.
    pub fn poll(&mut self) -> Next {
        if self.left == 0 {
            return Next::Done;
        }
        match self.entries.try_recv() {
            Ok(Some(payload)) => {
                self.left -= 1;
                Next::Entry(payload)
            }
            Err(TryRecvError::Empty) => Next::Pending,
            Ok(None) | Err(TryRecvError::Disconnected) => Next::Failed,
        }
    }
}

/// The segment that was read last.
struct Opened {
    segment: u64,
    file: Box<dyn SegmentFile>,
}

/// The thread.
pub(crate) fn run(shared: &Arc<Shared>, jobs: &Receiver<Job>) {
    for Job { keys, out } in jobs {
        // A file is kept open for one fetch alone: it may be deleted behind that.
        let mut opened = None;
        let mut keys = VecDeque::from(keys);
        while let Some(key) = keys.pop_front() {
            let payload = read(shared, &key, &mut opened);
            let failed = payload.is_none();
            if out.send(payload).is_err() || failed {
                break;
            }
        }
    }
}

/// The payload of an entry, if it is there and sound.
fn read(shared: &Shared, key: &Key, opened: &mut Option<Opened>) -> Option<Vec<u8>> {
    let location = shared.state().index.get(key).map(|e| e.location.clone())?;
    let (segment, offset) = match location {
        Location::Queued(payload) => return Some(payload.to_vec()),
        Location::Written {
            segment, offset, ..
        } => (segment, offset),
    };
    let began = Instant::now();
    let payload = read_written(shared, key, (segment, offset), opened);
    let took = began.elapsed();
    let mut state = shared.state();
    match payload {
        Ok(Some(payload)) => {
            state.status.read += 1;
            state.status.read_bytes += payload.len() as u64;
            state.status.read_time += took;
            state.index.touch(segment);
            return Some(payload);
        }
        Ok(None) => state.status.skipped.damaged += 1,
        // The segment was deleted meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            state.status.read_errors += 1;
            tracing::warn!(%error, "an entry of the KV store cannot be read");
        }
    }
    state.index.forget_at(key, segment);
    None
}

fn read_written(
    shared: &Shared,
    key: &Key,
    (segment, offset): (u64, u64),
    opened: &mut Option<Opened>,
) -> io::Result<Option<Vec<u8>>> {
    let opened = match opened {
        Some(opened) if opened.segment == segment => opened,
        _ => opened.insert(open(shared, segment)?),
    };
    let found = read_payload(&*opened.file, (segment, offset), key)?;
    Ok(found.map(|(_, payload)| payload))
}

/// Opens a segment, and notes its use in the file.
fn open(shared: &Shared, number: u64) -> io::Result<Opened> {
    let now = SystemTime::now();
    let (name, touches) = {
        let mut state = shared.state();
        let segment = state.index.segment(number);
        let segment = segment.ok_or(io::ErrorKind::NotFound)?;
        let age = now.duration_since(segment.touched).unwrap_or_default();
        let touches = age >= TOUCH_EVERY;
        if touches {
            segment.touched = now;
        }
        (segment.name.clone(), touches)
    };
    let file = shared.files.open(&name)?;
    if touches && let Err(error) = file.touch(now) {
        tracing::debug!(%error, "a segment's use is not noted");
    }
    Ok(Opened {
        segment: number,
        file,
    })
}
