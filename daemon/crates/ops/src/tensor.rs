//! A tensor of a file as a plan names it.

use crate::WeightType;

/// Index of a tensor in the segment of the step that runs.
pub type TensorIndex = usize;

/// How a tensor is used, which decides its form on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A matrix of a product, kept in its quantized type, repacked for the device's kernels.
    Matrix,
    /// A norm's weight, a bias or another small operand, kept as f32 whatever its type in the file.
    Vector,
}

/// Consecutive rows of a tensor in a file: all of them, or the slice that an operation uses (the
/// keys of a fused query-key-value matrix, one expert of a three-dimensional tensor).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDesc {
    /// The tensor's name in the file, for messages.
    pub name: String,
    /// The tensor's type in the file.
    pub ty: WeightType,
    /// Rows (outputs of a product); 1 for a vector. The second dimension in ggml's order.
    pub rows: u64,
    /// Elements a row (inputs of a product), contiguous in the file. The first
    /// dimension in ggml's order.
    pub cols: u64,
    /// Offset of the tensor in the file, in bytes.
    pub offset: u64,
    /// The tensor's bytes in the file.
    pub bytes: u64,
    /// Role of the tensor.
    pub role: Role,
}

impl TensorDesc {
    /// Rows `first..first + rows` of the tensor.
    ///
    /// # Panics
    /// When it has fewer rows.
    #[must_use]
    pub fn slice(&self, first: u64, rows: u64) -> Self {
        assert!(
            first + rows <= self.rows,
            "rows {first}..{first}+{rows} of '{}', which has {}",
            self.name,
            self.rows
        );
        let row_bytes = self.bytes / self.rows;
        Self {
            name: self.name.clone(),
            rows,
            offset: self.offset + first * row_bytes,
            bytes: rows * row_bytes,
            ..*self
        }
    }
}
