//! A segment's tensors: where they are in the file, and where a device puts them in a slab.

use rocmforge_ops::TensorDesc;

use crate::error::Error;

/// The refusal of a tensor's shape.
pub fn wrong_shape(desc: &TensorDesc, message: String) -> Error {
    Error::Shape {
        tensor: desc.name.clone(),
        ty: desc.ty.name().to_owned(),
        cols: desc.cols,
        rows: desc.rows,
        message,
    }
}

/// A tensor's place inside its segment's slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedTensor {
    /// The tensor.
    pub desc: TensorDesc,
    /// Offset in the slab in bytes, a multiple of [`crate::ALIGNMENT`].
    pub at: u64,
    /// Bytes on the device.
    pub device_bytes: u64,
}

/// All tensors of a segment with their places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentLayout {
    /// The tensors, in the order that the plan's operations name them.
    pub tensors: Vec<PlacedTensor>,
    /// Bytes of the slab.
    pub bytes: u64,
}

impl SegmentLayout {
    /// Places tensors one after another; `device_bytes` tells each one's size on the device.
    ///
    /// # Errors
    /// The first of `device_bytes`.
    pub fn place<E>(
        tensors: &[TensorDesc],
        mut device_bytes: impl FnMut(&TensorDesc) -> Result<u64, E>,
    ) -> Result<Self, E> {
        let mut at = 0;
        let mut placed = Vec::with_capacity(tensors.len());
        for desc in tensors {
            let device_bytes = device_bytes(desc)?;
            placed.push(PlacedTensor {
                desc: desc.clone(),
                at,
                device_bytes,
            });
            at = (at + device_bytes).next_multiple_of(crate::ALIGNMENT);
        }
        Ok(Self {
            tensors: placed,
            bytes: at,
        })
    }
}
