//! A segment's tensors: where they are in the file, and where a device puts them in a slab.

use rocmforge_gguf::TensorType;
use rocmforge_kernels::host::WeightType;

use crate::error::Error;

/// How a tensor is used, which decides its form on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix of a product, kept in its quantized type, repacked for the device's kernels.
    Matrix,
    /// A norm's weight or a bias, kept as f32 whatever its type in the file.
    Vector,
}

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDesc {
    /// Its name in the file, for messages.
    pub name: String,
    /// Its type in the file.
    pub ty: TensorType,
    /// Rows (outputs of a product); 1 for a vector. The second dimension in ggml's order.
    pub rows: u64,
    /// Elements a row (inputs of a product), contiguous in the file. The first dimension in ggml's order.
    pub cols: u64,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
    /// Its bytes in the file.
    pub bytes: u64,
    /// How it is used.
    pub role: Role,
}

impl TensorDesc {
    /// The kernels' name for its type.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where no kernel computes with it.
    pub(crate) fn weight_type(&self) -> Result<WeightType, Error> {
        crate::weight_type(self.ty).ok_or_else(|| Error::Unsupported {
            operation: "layout",
            tensor: self.name.clone(),
            ty: self.ty.name().to_owned(),
            supported: crate::supported_types(),
        })
    }

    /// The refusal of its shape.
    pub(crate) fn wrong_shape(&self, message: String) -> Error {
        Error::Shape {
            tensor: self.name.clone(),
            ty: self.ty.name().to_owned(),
            cols: self.cols,
            rows: self.rows,
            message,
        }
    }
}

/// A tensor's place inside its segment's slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
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
    pub tensors: Vec<Placed>,
    /// Bytes of the slab.
    pub bytes: u64,
}

impl SegmentLayout {
    /// Places tensors one after another; `device_bytes` tells each one's size on the device.
    pub(crate) fn place<E>(
        tensors: &[TensorDesc],
        mut device_bytes: impl FnMut(&TensorDesc) -> Result<u64, E>,
    ) -> Result<Self, E> {
        let mut at = 0;
        let mut placed = Vec::with_capacity(tensors.len());
        for desc in tensors {
            let device_bytes = device_bytes(desc)?;
            placed.push(Placed {
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
