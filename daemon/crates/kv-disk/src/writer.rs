//! The thread that reads the index, and writes entries.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant, SystemTime};

use crate::files::{FileInfo, SegmentFile};
use crate::format::{
    Found, RECORD_HEADER, SEGMENT_HEADER, Scanned, read_payload, record_header, scan,
    segment_header,
};
use crate::index::{ENTRIES_MAX, Entry, Index, Key, Location, ModelTag, SEGMENTS_MAX};
use crate::store::{Shared, Status};

/// Longest pause after failures.
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Longest sleep at a time, for the limit of bytes in a second.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// What the thread is asked for.
pub(crate) enum Job {
    /// Write an entry of the index, of so many bytes.
    Put { key: Key, bytes: u64 },
    /// Delete the entries of a model, or all.
    Clear { model: Option<ModelTag> },
    /// Put the owner's note in the place of the one before.
    Note(Vec<u8>),
    /// Report that all before is done.
    Flush { done: Sender<()> },
}

/// The segment that is written to.
struct Active {
    number: u64,
    file: Box<dyn SegmentFile>,
    end: u64,
}

/// The state of the thread.
pub(crate) struct Writer<'a> {
    shared: &'a Arc<Shared>,
    active: Option<Active>,
    /// How long the next failure pauses writing.
    pause: Duration,
    /// When what was written may have been, at the limit of bytes in a second.
    written_until: Instant,
}

/// The name of a segment's file.
fn name_of(number: u64) -> String {
    format!("kv-{number:016x}.seg")
}

/// The number of a segment by its file's name.
fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("kv-")?.strip_suffix(".seg")?;
    let number = u64::from_str_radix(digits, 16).ok()?;
    (name_of(number) == name && number < u64::MAX).then_some(number)
}

impl<'a> Writer<'a> {
    pub(crate) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            active: None,
            pause: shared.options.pause,
            written_until: Instant::now(),
        }
    }

    /// The thread.
    pub(crate) fn run(mut self, jobs: &Receiver<Job>) {
        self.read_index();
        for job in jobs {
            match job {
                Job::Put { key, bytes } => {
                    self.put(&key, bytes);
                    self.shared.state().status.queued_bytes -= bytes;
                    self.hold_rate(bytes);
                }
                Job::Clear { model } => self.clear(model),
                // The one before is there still, and a newer one comes.
                Job::Note(note) => {
                    if let Err(error) = self.shared.files.set_note(&note) {
                        tracing::debug!(%error, "the KV store's note is not written");
                    }
                }
                Job::Flush { done } => {
                    let _ = done.send(());
                }
            }
            self.shared.state().jobs -= 1;
        }
        self.seal();
    }

    /// Waits as long as the limit of bytes in a second wants.
    fn hold_rate(&mut self, bytes: u64) {
        let rate = self.shared.options.write_bytes_per_s.max(1) as f64;
        let now = Instant::now();
        let from = self.written_until.max(now);
        self.written_until = from + Duration::from_secs_f64(bytes as f64 / rate);
        loop {
            let left = self.written_until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.shared.state().is_closing {
                return;
            }
            std::thread::sleep(left.min(SLEEP_MAX));
        }
    }

    /// Writes an entry, if it is still wanted and writing is not paused.
    fn put(&mut self, key: &Key, bytes: u64) {
        let entry = self.shared.state().index.get(key).cloned();
        let Some(entry) = entry else {
            return;
        };
        let Location::Queued(payload) = &entry.location else {
            return;
        };
        if self.is_paused() {
            let mut state = self.shared.state();
            state.index.forget(key);
            state.status.refused += 1;
            return;
        }
        match self.append(key, &entry, payload) {
            Ok(()) => {
                self.pause = self.shared.options.pause;
                let status = &mut self.shared.state().status;
                status.written += 1;
                status.written_bytes += bytes;
            }
            Err(error) => {
                self.shared.state().index.forget(key);
                self.failed(&error);
            }
        }
    }

    fn is_paused(&self) -> bool {
        self.shared.state().is_paused()
    }

    /// A write failed: nothing is written for a while.
    fn failed(&mut self, error: &io::Error) {
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_MAX);
        let mut state = self.shared.state();
        state.paused_until = Some(Instant::now() + pause);
        state.status.write_errors += 1;
        drop(state);
        tracing::warn!(%error, pause_s = pause.as_secs_f64(), "writing to the KV store is paused");
    }

    /// Writes a record behind the others.
    fn append(&mut self, key: &Key, entry: &Entry, payload: &[u8]) -> io::Result<()> {
        let bytes = RECORD_HEADER + payload.len() as u64;
        let most = self.shared.options.segment_bytes();
        let is_full = |active: &Active| active.end > SEGMENT_HEADER && active.end + bytes > most;
        if self.active.as_ref().is_some_and(is_full) {
            self.seal();
        }
        self.make_room(bytes + SEGMENT_HEADER)?;
        let mut active = match self.active.take() {
            Some(active) => active,
            None => self.begin_segment()?,
        };
        let place = (active.number, active.end);
        let header = record_header(place, key, (entry.kind, entry.model), payload);
        let written = active
            .file
            .write_at(&header, active.end)
            .and_then(|()| active.file.write_at(payload, active.end + RECORD_HEADER));
        let mut state = self.shared.state();
        if let Err(error) = written {
            // The segment ends here, with the records before.
            let cut = active.file.truncate(active.end);
            let left = if cut.is_ok() { 0 } else { bytes };
            state.index.set_bytes(active.number, active.end + left);
            return Err(error);
        }
        let location = Location::Written {
            segment: active.number,
            offset: active.end,
            bytes: payload.len() as u32,
        };
        active.end += bytes;
        state.index.set_bytes(active.number, active.end);
        // If it was cleared meanwhile, the command is still to come, and finds it.
        let entry = Entry {
            location,
            ..entry.clone()
        };
        state.index.note_model(active.number, entry.model);
        state.index.written(active.number, *key, entry);
        state.index.touch(active.number);
        drop(state);
        self.active = Some(active);
        Ok(())
    }

    fn begin_segment(&mut self) -> io::Result<Active> {
        let number = self.shared.state().index.next_number();
        let name = name_of(number);
        let file = self.shared.files.create(&name)?;
        if let Err(error) = file.write_at(&segment_header(number), 0) {
            drop(file);
            let _ = self.shared.files.remove(&name);
            return Err(error);
        }
        let mut state = self.shared.state();
        let index = &mut state.index;
        index.add_segment(number, name, SEGMENT_HEADER, SystemTime::now());
        index.touch(number);
        Ok(Active {
            number,
            file,
            end: SEGMENT_HEADER,
        })
    }

    /// Ends the segment that is written to.
    fn seal(&mut self) {
        if let Some(active) = self.active.take()
            && let Err(error) = active.file.sync()
        {
            self.failed(&error);
        }
    }

    /// Deletes segment files until `bytes` more fit the budget.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        loop {
            let but = self.active.as_ref().map(|active| active.number);
            let mut state = self.shared.state();
            let index = &state.index;
            if index.bytes() + bytes <= self.shared.options.budget
                && index.segments() < SEGMENTS_MAX
            {
                return Ok(());
            }
            let Some(oldest) = index.oldest(but) else {
                drop(state);
                if self.active.is_none() {
                    return Err(io::ErrorKind::FileTooLarge.into());
                }
                self.seal();
                continue;
            };
            let name = state.index.drop_segment(oldest);
            state.status.dropped_segments += 1;
            drop(state);
            name.into_iter().for_each(|name| self.remove(&name));
        }
    }

    fn remove(&mut self, name: &str) {
        match self.shared.files.remove(name) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.failed(&error),
        }
    }

    /// Deletes the entries of a model, or all.
    fn clear(&mut self, model: Option<ModelTag>) {
        self.seal();
        let segments = self.shared.state().index.segments_of(model);
        for (number, others) in segments {
            for key in others {
                self.move_entry(&key, number);
            }
            let name = self.shared.state().index.drop_segment(number);
            name.into_iter().for_each(|name| self.remove(&name));
        }
    }

    /// Writes an entry of a segment again. Where that fails, it goes with the segment.
    fn move_entry(&mut self, key: &Key, number: u64) {
        let (entry, name) = {
            let mut state = self.shared.state();
            let name = state.index.segment(number).map(|s| s.name.clone());
            (state.index.get(key).cloned(), name)
        };
        let (Some(entry), Some(name)) = (entry, name) else {
            return;
        };
        let Location::Written { offset, .. } = entry.location else {
            return;
        };
        let file = self.shared.files.open(&name);
        let read = file.and_then(|file| read_payload(&*file, (number, offset), key));
        let moved = match read {
            Ok(Some((_, payload))) if !self.is_paused() => self.append(key, &entry, &payload),
            Ok(_) => return,
            Err(error) => {
                self.shared.state().status.read_errors += 1;
                tracing::warn!(%error, "an entry of the KV store cannot be read");
                return;
            }
        };
        if let Err(error) = moved {
            self.failed(&error);
        }
    }

    /// Reads the index from the files, the newest first.
    fn read_index(&mut self) {
        let listed = self.shared.files.list().unwrap_or_else(|error| {
            tracing::warn!(%error, "the KV store cannot be read; it begins empty");
            self.shared.state().status.read_errors += 1;
            Vec::new()
        });
        let mut segments: Vec<(u64, FileInfo)> = Vec::new();
        for file in listed {
            match number_of(&file.name).filter(|_| file.is_regular) {
                Some(number) => segments.push((number, file)),
                None => self.shared.state().status.skipped.foreign += 1,
            }
        }
        segments.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
        let mut ends = VecDeque::new();
        for (number, file) in &segments {
            ends.push_back(self.read_segment(*number, file));
        }
        let mut state = self.shared.state();
        segments.sort_by_key(|(number, file)| (file.modified, *number));
        for (number, _) in segments.iter().filter(|(_, file)| file.bytes > 0) {
            if state.index.has_entries(*number) {
                state.index.touch(*number);
            }
        }
        state.status.is_ready = true;
        let skipped = state.status.skipped;
        tracing::info!(
            entries = state.index.len(),
            bytes = state.index.bytes(),
            skipped = skipped.all(),
            "the KV store is open"
        );
        drop(state);
        self.active = ends.pop_front().flatten();
        if let Err(error) = self.make_room(0) {
            tracing::debug!(%error, "the KV store is above its budget");
        }
    }

    /// Reads the index of a segment. The segment itself, if more may be written behind it.
    fn read_segment(&mut self, number: u64, info: &FileInfo) -> Option<Active> {
        let mut state = self.shared.state();
        let name = info.name.clone();
        state
            .index
            .add_segment(number, name, info.bytes, info.modified);
        drop(state);
        let file = match self.shared.files.open(&info.name) {
            Ok(file) => file,
            Err(error) => {
                let mut state = self.shared.state();
                state.status.read_errors += 1;
                state.index.note_unread(number);
                tracing::warn!(file = info.name, %error, "a segment of the KV store is skipped");
                return None;
            }
        };
        let mut found = Vec::new();
        let scanned = scan(&*file, number, info.bytes, |record| {
            found.push(record);
            found.len() < ENTRIES_MAX
        });
        let mut state = self.shared.state();
        found
            .into_iter()
            .for_each(|record| note_found(&mut state.index, number, record));
        if !matches!(scanned, Scanned::Whole | Scanned::Torn(_)) {
            state.index.note_unread(number);
        }
        let end = end_of(&scanned, info, &mut state.status)?;
        let is_newest = state.index.next_number() == number + 1;
        drop(state);
        let goes_on = is_newest
            && end >= SEGMENT_HEADER
            && end < self.shared.options.segment_bytes()
            && (end == info.bytes || file.truncate(end).is_ok());
        if goes_on {
            self.shared.state().index.set_bytes(number, end);
        }
        goes_on.then_some(Active { number, file, end })
    }
}

/// Notes a record of a segment. A newer segment's entry stays.
fn note_found(index: &mut Index, number: u64, record: Found) {
    let entry = Entry {
        location: Location::Written {
            segment: number,
            offset: record.offset,
            bytes: record.bytes,
        },
        model: record.model,
        kind: record.kind,
    };
    index.note_model(number, record.model);
    if index.get(&record.key).is_none() && index.len() < ENTRIES_MAX {
        index.written(number, record.key, entry);
    }
}

/// Where the records of a segment end, if more may be written behind them; counts what is wrong
/// with it.
fn end_of(scanned: &Scanned, info: &FileInfo, status: &mut Status) -> Option<u64> {
    let skipped = &mut status.skipped;
    match *scanned {
        Scanned::Whole => return Some(info.bytes),
        Scanned::Torn(end) => {
            skipped.torn += 1;
            return Some(end);
        }
        Scanned::Damaged(_) => skipped.damaged += 1,
        Scanned::OtherVersion(version) => {
            skipped.other_version += 1;
            tracing::warn!(
                file = info.name,
                version,
                "a segment of another format is skipped"
            );
        }
        Scanned::Foreign => skipped.foreign += 1,
        Scanned::Unreadable => status.read_errors += 1,
    }
    None
}
