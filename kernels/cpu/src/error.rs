//! What can be wrong with a matrix or with the choice of an instruction set.

use super::WeightType;

/// Errors of the host kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The row length is not a whole number of quantized blocks.
    #[error(
        "{ty} rows must have a multiple of {block} columns, this matrix has {cols}: the file is malformed"
    )]
    Block {
        /// Type of the weights.
        ty: WeightType,
        /// Columns asked for.
        cols: usize,
        /// Columns in a block of this type.
        block: usize,
    },
    /// A matrix without rows or columns, or one whose size does not fit an address.
    #[error(
        "a {ty} matrix of {rows} rows and {cols} columns has no usable size: the file is malformed"
    )]
    Shape {
        /// Type of the weights.
        ty: WeightType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// A buffer does not have the length that the shape asks for.
    #[error("{what} has {actual} bytes where {ty} weights of this shape need {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Type of the weights.
        ty: WeightType,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// A scale (or, in an unquantized type, a weight) is NaN or infinite.
    #[error(
        "row {row} of a {ty} matrix has a scale or weight that is not finite: the file is damaged, fetch or convert it again"
    )]
    NotFinite {
        /// Type of the weights.
        ty: WeightType,
        /// The first such row.
        row: usize,
    },
    /// ROCMFORGE_ISA names no instruction set.
    #[error(
        "ROCMFORGE_ISA={name:?} is not known: use scalar, avx2, avxvnni or avx512, or unset it"
    )]
    UnknownIsa {
        /// The value found.
        name: String,
    },
    /// ROCMFORGE_ISA names an instruction set that this CPU lacks.
    #[error(
        "ROCMFORGE_ISA={asked} but this CPU only has {best}: unset it or choose {best} or less"
    )]
    IsaUnavailable {
        /// The instruction set asked for.
        asked: &'static str,
        /// The best that the CPU has.
        best: &'static str,
    },
}
