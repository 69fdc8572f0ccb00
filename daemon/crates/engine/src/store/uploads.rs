//! Uploads, from the cache's action to the resident segment.
//!
//! ```text
//!   begin --> uploaded (the device has it) ------------------------------> there, or failed
//!        \--> brought (threads of a remote file read it) --came--> uploaded --/
//!                     \--the file is silent, or cannot be read--> failed
//! ```

use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::{Upload, UploadTicket};
use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId, Slab};

use crate::api::error::Error;
use crate::guards::file_watch::Waiting;
use crate::model::fetcher::{Fetch, SILENT_AFTER};
use crate::model::loaded::from_fault;
use crate::store::{Source, Store};

/// Maximum number of segments that are remembered as arrived.
const ARRIVED_MAX: usize = 4096;

/// Maximum number of uploads whose end is remembered as outstanding; older ones have long ended.
const SETTLING_MAX: usize = 4096;

/// State of an upload that the cache asked for.
#[derive(Debug)]
pub(super) enum UnderWay {
    /// The segment's part of a remote file is read into the page cache.
    Brought { fetch: Fetch, slab: Slab },
    /// The device uploads the segment; it is read from the file of the model `from`.
    Uploaded { ticket: UploadTicket, from: ModelId },
}

impl Store {
    /// Begins an upload. If it cannot begin, the cache is told that it failed.
    pub(crate) fn begin(&mut self, segment: SegmentId, slab: Slab) -> Result<(), Error> {
        let is_cold = self.is_cold(segment);
        self.reasons.begun(segment, slab.bytes, is_cold);
        let asked = self.clock.now();
        let begun = match self.sources.get(&segment.model) {
            Some(source) if source.file.is_far() => {
                source.bring(segment.index, SILENT_AFTER).map(|fetch| {
                    let brought = UnderWay::Brought { fetch, slab };
                    self.under_way.insert(segment, brought);
                })
            }
            Some(_) => self.upload(segment, slab),
            None => Err(Error::Internal("an upload of no model".to_owned())),
        };
        let took = self.clock.now() - asked;
        self.reasons.note_wait(segment, took, is_cold);
        if begun.is_err() {
            self.reasons.ended(segment, 0);
            self.cache.upload_failed(segment);
        }
        begun
    }

    /// Whether the page cache lacks the file range of a segment, judged by its first and last byte.
    fn is_cold(&self, segment: SegmentId) -> bool {
        let Some(source) = self.sources.get(&segment.model) else {
            return false;
        };
        let ranges = || {
            source
                .ranges(segment.index)
                .filter(|range| !range.is_empty())
        };
        let first = ranges().next().map(|range| range.start);
        // What is read ahead of a file has the beginning of the next segment.
        let last = ranges().last().map(|range| range.end - 1);
        let is_absent = |at: u64| !source.file.seems_cached(at..at + 1);
        source.file.is_far() || [first, last].into_iter().flatten().any(is_absent)
    }

    /// The segment from whose file an upload is read: one with the same content that is in the page
    /// cache, if this one's is not.
    fn read_from(&self, segment: SegmentId) -> SegmentId {
        let mut others = self.cache.members(segment).skip(1).peekable();
        if others.peek().is_none() || !self.is_cold(segment) {
            return segment;
        }
        let has_changed = |id: &SegmentId| {
            let source = self.sources.get(&id.model);
            source.is_none_or(|source| source.file.has_changed())
        };
        let warm = others.find(|id| !has_changed(id) && !self.is_cold(*id));
        warm.unwrap_or(segment)
    }

    /// Records that an upload has completed.
    fn came(&mut self, segment: SegmentId) {
        self.cache.uploaded(segment);
        let source = self.sources.get(&segment.model);
        let kind = source.and_then(|source| source.kinds.get(segment.index as usize));
        if kind == Some(&SegmentKind::Ordered) && self.arrived.len() < ARRIVED_MAX {
            self.arrived.push(segment);
        }
    }

    /// Gives an upload to the device.
    fn upload(&mut self, segment: SegmentId, slab: Slab) -> Result<(), Error> {
        let from = self.read_from(segment);
        let source = &self.sources[&from.model];
        let upload = Upload {
            file: Arc::clone(&source.file),
            layout: Arc::clone(&source.layouts[from.index as usize]),
            slab: slab.offset,
        };
        let from = from.model;
        // It looks at the file, and may wait for a place in a queue of others.
        let _waiting = self.wait_for_file(from);
        let begun = self.device.begin_upload(upload);
        let ticket = begun.map_err(|e| self.device_error(Some(from), e))?;
        let now = self.clock.now();
        self.timetable.begun(segment, slab.bytes, now);
        self.tickets.insert(ticket, segment);
        self.under_way
            .insert(segment, UnderWay::Uploaded { ticket, from });
        Ok(())
    }

    /// Makes the status show that the engine waits for a model's file, until the result is dropped.
    pub(crate) fn wait_for_file(&self, model: ModelId) -> Option<Waiting> {
        let source = self.sources.get(&model)?;
        Some(self.files.begin(&source.name, source.file.path()))
    }

    /// Waits until a segment is resident, if it is in flight.
    pub(crate) fn wait(&mut self, segment: SegmentId) -> Result<(), Error> {
        let segment = self.cache.holder(segment);
        if !self.under_way.contains_key(&segment) {
            return Ok(());
        }
        let begun = self.clock.now();
        let is_cold = self.reasons.is_cold(segment);
        let came = self.wait_for(segment);
        let bytes = came.as_ref().map_or(0, |()| self.segment_bytes(segment));
        self.reasons.ended(segment, bytes);
        let took = self.clock.now() - begun;
        self.reasons.note_wait(segment, took, is_cold);
        came
    }

    fn wait_for(&mut self, segment: SegmentId) -> Result<(), Error> {
        if let Some(UnderWay::Brought { .. }) = self.under_way.get(&segment) {
            self.wait_for_fetch(segment)?;
        }
        let Some(UnderWay::Uploaded { ticket, from }) = self.under_way.remove(&segment) else {
            return Ok(());
        };
        self.tickets.remove(&ticket);
        let waiting = self.wait_for_file(from);
        let ended = self.device.wait_upload(ticket);
        drop(waiting);
        match ended {
            Ok(()) => {
                if self.settling.len() >= SETTLING_MAX {
                    self.settling.clear();
                }
                self.settling.insert(ticket, segment);
                self.came(segment);
                Ok(())
            }
            Err(error) => {
                self.cache.upload_failed(segment);
                Err(self.device_error(Some(from), error))
            }
        }
    }

    /// Waits for the read of a segment's range from a remote file, and gives the upload to the
    /// device.
    fn wait_for_fetch(&mut self, segment: SegmentId) -> Result<(), Error> {
        let Some(UnderWay::Brought { fetch, slab }) = self.under_way.remove(&segment) else {
            return Ok(());
        };
        let waiting = self.wait_for_file(segment.model);
        let came = self.sources[&segment.model].wait(fetch);
        drop(waiting);
        let begun = came.and_then(|()| self.upload(segment, slab));
        if begun.is_err() {
            self.cache.upload_failed(segment);
        }
        begun
    }

    /// Waits for one of the uploads in flight, preferably one that the device has.
    pub(crate) fn wait_any(&mut self) {
        let of_device = |way: &UnderWay| matches!(way, UnderWay::Uploaded { .. });
        let first = self.under_way.iter().max_by_key(|(_, way)| of_device(way));
        if let Some((&segment, _)) = first
            && let Err(error) = self.wait(segment)
        {
            tracing::warn!(%segment, error = %crate::api::error::chain(&error), "an upload ahead of need failed");
        }
    }

    /// Abandons an upload; waits for it if the device has begun it.
    pub(crate) fn drop_upload(&mut self, segment: SegmentId) {
        match self.under_way.get(&segment) {
            Some(UnderWay::Brought { .. }) => {
                self.under_way.remove(&segment);
                self.reasons.ended(segment, 0);
                self.cache.upload_failed(segment);
            }
            // Whether it came or failed: it is no longer under way.
            _ => {
                let _ = self.wait(segment);
            }
        }
    }

    /// Gives the device the uploads whose remote file ranges have been read, and fails those whose
    /// reads failed.
    fn go_on_with_fetches(&mut self) {
        let fetched = self
            .under_way
            .iter()
            .filter_map(|(&segment, way)| match way {
                UnderWay::Brought { fetch, slab } => {
                    let came = self.sources[&segment.model].ended(fetch, SILENT_AFTER)?;
                    Some((segment, *slab, came))
                }
                UnderWay::Uploaded { .. } => None,
            });
        let fetched: Vec<_> = fetched.collect();
        for (segment, slab, came) in fetched {
            self.under_way.remove(&segment);
            if let Err(error) = came.and_then(|()| self.upload(segment, slab)) {
                tracing::warn!(%segment, error = %crate::api::error::chain(&error), "an upload ahead of need failed");
                self.cache.upload_failed(segment);
            }
        }
    }

    /// Notes uploads that have ended; see [`Memory::collect`](crate::memory::Memory::collect).
    pub(crate) fn collect_uploads(&mut self) {
        self.go_on_with_fetches();
        for (ticket, result) in self.device.finished_uploads() {
            let Some(segment) = self.tickets.remove(&ticket) else {
                let segment = self.settling.remove(&ticket);
                if let (Some(segment), Err(error)) = (segment, result) {
                    self.note_loss(&error);
                    tracing::warn!(%segment, error = %crate::api::error::chain(&error), "an upload turned out to have failed");
                    self.spoiled.push(segment);
                }
                continue;
            };
            self.under_way.remove(&segment);
            let bytes = result.as_ref().map_or(0, |()| self.segment_bytes(segment));
            self.reasons.ended(segment, bytes);
            match result {
                Ok(()) => self.came(segment),
                Err(error) => {
                    self.note_loss(&error);
                    tracing::warn!(%segment, error = %crate::api::error::chain(&error), "an upload ahead of need failed");
                    self.cache.upload_failed(segment);
                }
            }
        }
    }

    /// The models of segments whose content turned out to be bad on the device.
    pub(crate) fn spoiled_models(&self) -> Vec<ModelId> {
        let cache = &self.cache;
        let users = |&segment: &SegmentId| cache.members(cache.holder(segment));
        self.spoiled
            .iter()
            .flat_map(users)
            .map(|id| id.model)
            .collect()
    }

    /// Evicts segments with bad content once they are not in use.
    pub(crate) fn evict_spoiled(&mut self) {
        if self.spoiled.is_empty() {
            return;
        }
        let mut spoiled = std::mem::take(&mut self.spoiled);
        spoiled.retain(|&segment| {
            self.sources.contains_key(&segment.model)
                && !self.cache.evict_corrupt(segment, &mut self.actions)
        });
        self.spoiled = spoiled;
    }

    /// Abandons all uploads of a model.
    pub(crate) fn drop_uploads(&mut self, model: ModelId) {
        let of_model = self.under_way.keys().filter(|s| s.model == model);
        let of_model: Vec<SegmentId> = of_model.copied().collect();
        for segment in of_model {
            self.drop_upload(segment);
        }
    }
}

impl Source {
    /// Starts to read a segment's range of a remote file into the page cache.
    pub(crate) fn bring(&self, segment: u32, patience: Duration) -> Result<Fetch, Error> {
        let fetch = self.fetcher.begin(self.ranges(segment), patience);
        fetch.map_err(|fault| from_fault(&self.name, self.file.path(), fault))
    }

    fn wait(&self, fetch: Fetch) -> Result<(), Error> {
        let came = self.fetcher.wait(fetch, SILENT_AFTER);
        came.map_err(|fault| from_fault(&self.name, self.file.path(), fault))
    }

    /// The result of a read into the page cache, if it has ended.
    pub(crate) fn ended(&self, fetch: &Fetch, patience: Duration) -> Option<Result<(), Error>> {
        let came = self.fetcher.ended(fetch, patience)?;
        Some(came.map_err(|fault| from_fault(&self.name, self.file.path(), fault)))
    }

    /// Reads the ranges of segments of a remote file into the page cache, and waits for them.
    pub(crate) fn bring_all(&self, segments: impl Iterator<Item = u32>) -> Result<(), Error> {
        if !self.file.is_far() {
            return Ok(());
        }
        let fetches: Result<Vec<Fetch>, Error> =
            segments.map(|s| self.bring(s, SILENT_AFTER)).collect();
        fetches?.into_iter().try_for_each(|fetch| self.wait(fetch))
    }
}
