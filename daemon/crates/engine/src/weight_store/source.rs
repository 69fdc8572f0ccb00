//! Where a model's segments come from.

use std::sync::Arc;

use rocmforge_device::{ALIGNMENT, SegmentLayout};
use rocmforge_gguf::MappedFile;
use rocmforge_ops::SegmentKind;

/// Where a model's segments come from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) file: Arc<MappedFile>,
    pub(crate) layouts: Vec<Arc<SegmentLayout>>,
    /// How passes use the segments.
    pub(super) kinds: Vec<SegmentKind>,
    /// Bytes of all segments on the device.
    pub(crate) bytes: u64,
    pub(super) pinned_bytes: u64,
    pub(super) largest_unpinned: u64,
}

impl Source {
    pub(crate) fn new(
        name: String,
        file: Arc<MappedFile>,
        layouts: Vec<Arc<SegmentLayout>>,
        kinds: Vec<SegmentKind>,
    ) -> Self {
        let aligned = |l: &Arc<SegmentLayout>| l.bytes.next_multiple_of(ALIGNMENT);
        Self {
            name,
            file,
            bytes: layouts.iter().map(aligned).sum(),
            layouts,
            kinds,
            pinned_bytes: 0,
            largest_unpinned: 0,
        }
    }
}
