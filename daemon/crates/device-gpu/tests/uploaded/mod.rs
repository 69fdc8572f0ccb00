//! An upload from its begin to its end, for tests that look at what came of it.

use std::sync::Arc;

use rocmforge_device::{Device, SegmentLayout, Upload};
use rocmforge_device_gpu::GpuDevice;
use rocmforge_gguf::MappedFile;

/// Uploads a segment to `slab` and has it waited for.
pub(crate) fn upload(
    device: &mut GpuDevice,
    file: &Arc<MappedFile>,
    layout: &Arc<SegmentLayout>,
    slab: u64,
) {
    let ticket = device
        .begin_upload(Upload {
            file: Arc::clone(file),
            layout: Arc::clone(layout),
            slab,
        })
        .unwrap();
    device.wait_upload(ticket).unwrap();
}
