//! Reads parts of a model's file into the page cache ahead of their upload, while other models run.

use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::PreloadRoom;
use crate::api::error::Error;
use crate::guards::file_watch::Waiting;
use crate::model::fetcher::{ASLEEP_MAX, Fetch};
use crate::store::Store;

/// A file that is read into the page cache while other models run.
#[derive(Debug)]
pub(crate) struct FileFetch {
    pub(crate) fetch: Fetch,
    /// Makes the status show that the file is waited for.
    _waiting: Waiting,
}

impl Store {
    /// Starts to read what an absent segment of a preload needs into the page cache, if uploading
    /// it directly would make `others` wait. `None` if that is not needed, or if `room` has no
    /// place for the segment.
    pub(crate) fn fetch(
        &self,
        segment: SegmentId,
        others: bool,
        room: PreloadRoom,
    ) -> Result<Option<FileFetch>, Error> {
        let source = &self.sources[&segment.model];
        let file = &source.file;
        let is_there = || {
            let mut ranges = source.ranges(segment.index);
            !others || file.is_direct() || ranges.all(|range| file.seems_cached(range))
        };
        let end = self.cache.usage().total() + self.segment_bytes(segment);
        let has_no_room = room != PreloadRoom::Any && end > self.budget();
        if has_no_room || self.cache.holds(segment) || !file.is_far() && is_there() {
            return Ok(None);
        }
        let fetch = source.bring(segment.index, ASLEEP_MAX)?;
        Ok(Some(self.file_fetch(segment.model, fetch)))
    }

    /// A fetch of a model's file that the model's requests wait for.
    pub(crate) fn file_fetch(&self, model: ModelId, fetch: Fetch) -> FileFetch {
        FileFetch {
            fetch,
            _waiting: self.wait_in_background(model),
        }
    }

    /// Makes the status show that the model's requests wait for its file.
    pub(crate) fn wait_in_background(&self, model: ModelId) -> Waiting {
        let source = &self.sources[&model];
        self.files
            .begin_in_background(&source.name, source.file.path())
    }

    /// Whether a fetch has completed.
    pub(crate) fn is_fetched(&self, model: ModelId, fetch: &FileFetch) -> Result<bool, Error> {
        let came = self.sources[&model].ended(&fetch.fetch, ASLEEP_MAX);
        came.map_or(Ok(false), |came| came.map(|()| true))
    }

    /// The absent segments that a pass of a model uses, as many as the budget and half of the free
    /// host memory hold.
    pub(crate) fn absent(&self, model: ModelId, experts: bool) -> Vec<u32> {
        let source = &self.sources[&model];
        let mut room = match rocmforge_device::host_available_bytes() {
            0 => self.budget(),
            available => self.budget().min(available / 2),
        };
        let mut segments = Vec::new();
        for (index, kind) in (0..).zip(source.kinds()) {
            let segment = SegmentId { model, index };
            let is_used = experts || *kind == SegmentKind::Ordered;
            if !is_used || self.cache.holds(segment) {
                continue;
            }
            let Some(left) = room.checked_sub(self.segment_bytes(segment)) else {
                break;
            };
            room = left;
            segments.push(index);
        }
        segments
    }
}
