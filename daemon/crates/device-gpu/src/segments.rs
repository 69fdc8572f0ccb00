//! Where the tensors of a segment lie in its slab.

use rocmforge_device::{Error, Role, SegmentLayout, TensorDesc, wrong_shape};
use rocmforge_kernels_gpu as gpu_kernels;

/// See [`Device::layout`].
pub(super) fn layout(tensors: &[TensorDesc]) -> Result<SegmentLayout, Error> {
    SegmentLayout::place(tensors, |desc| {
        let ty = desc.ty;
        match desc.role {
            Role::Matrix => gpu_kernels::device_bytes(ty, desc.rows, desc.cols)
                .map_err(|e| wrong_shape(desc, e.to_string())),
            Role::Vector => Ok(desc.rows * desc.cols * 4),
        }
    })
}
