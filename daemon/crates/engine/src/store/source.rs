//! A model's file as the source of its segments, with their ranges and sizes.

use std::ops::Range;
use std::sync::Arc;

use rocmforge_device::{ALIGNMENT, SegmentLayout};
use rocmforge_gguf::MappedFile;
use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::{SegmentState, SegmentStatus};
use crate::model::fetcher::Fetcher;
use crate::model::loaded::LoadedModel;
use crate::store::Store;

/// A model's file as the source of its segments.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) file: Arc<MappedFile>,
    pub(super) fetcher: Arc<Fetcher>,
    pub(crate) layouts: Vec<Arc<SegmentLayout>>,
    /// How passes use each segment (in order, by routing, or rarely).
    pub(super) kinds: Vec<SegmentKind>,
    /// Bytes of all of the model's segments on the device.
    pub(crate) bytes: u64,
    pub(super) pinned_bytes: u64,
    pub(super) largest_unpinned: u64,
    /// The status list of the model while none of its segments is resident; snapshots share it.
    pub(crate) absent: Arc<[SegmentStatus]>,
    /// Number of the device's opening ([`Store::openings`]) at which the model was last prepared.
    pub(crate) prepared_at: u64,
}

impl Source {
    pub(crate) fn new(
        loaded: &LoadedModel,
        layouts: Vec<Arc<SegmentLayout>>,
        kinds: Vec<SegmentKind>,
    ) -> Self {
        let absent = |l: &Arc<SegmentLayout>| SegmentStatus {
            bytes: l.bytes,
            state: SegmentState::Absent,
            pinned: false,
            in_use: false,
        };
        let aligned = |l: &Arc<SegmentLayout>| l.bytes.next_multiple_of(ALIGNMENT);
        Self {
            name: loaded.name().to_owned(),
            file: Arc::clone(loaded.file()),
            fetcher: Arc::clone(loaded.fetcher()),
            bytes: layouts.iter().map(aligned).sum(),
            absent: layouts.iter().map(absent).collect(),
            layouts,
            kinds,
            pinned_bytes: 0,
            largest_unpinned: 0,
            prepared_at: 0,
        }
    }

    /// File ranges of a segment's tensors.
    pub(crate) fn ranges(&self, segment: u32) -> impl Iterator<Item = Range<u64>> {
        let tensors = &self.layouts[segment as usize].tensors;
        let tensors = tensors.iter().map(|placed| &placed.desc);
        tensors.map(|t| t.offset..t.offset + t.bytes)
    }

    /// How passes use each segment.
    pub(crate) fn kinds(&self) -> &[SegmentKind] {
        &self.kinds
    }
}

impl Store {
    /// Size of a segment on the device, in bytes.
    pub(crate) fn segment_bytes(&self, segment: SegmentId) -> u64 {
        self.sources[&segment.model].layouts[segment.index as usize].bytes
    }

    /// Bytes of the largest segment of a model that is not pinned, which must be free for the model
    /// to run.
    pub(crate) fn largest_unpinned(&self, model: ModelId) -> u64 {
        self.sources[&model].largest_unpinned
    }

    /// Bytes of all segments of a model on the device.
    pub(crate) fn model_bytes(&self, model: ModelId) -> u64 {
        self.sources[&model].bytes
    }

    /// Bytes of all segments of some models on the device; shared slabs count once.
    pub(crate) fn bytes_of(&self, models: &[ModelId]) -> u64 {
        let sum: u64 = models.iter().map(|&id| self.model_bytes(id)).sum();
        sum - self.cache.shared_among(models)
    }

    /// Bytes of all pinned segments, resident or not.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.sources.values().map(|s| s.pinned_bytes).sum()
    }

    /// Bytes of a model's pinned segments, resident or not.
    pub(crate) fn model_pinned_bytes(&self, model: ModelId) -> u64 {
        self.sources[&model].pinned_bytes
    }
}
