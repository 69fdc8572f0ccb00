//! What can keep an operation from becoming a launch.

use crate::WeightType;

/// Errors of the launch builders.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No kernel of this shape is built.
    #[error("no GPU kernel for {what}: built are {built}")]
    NoKernel {
        /// The operation and its shape.
        what: String,
        /// What there is.
        built: &'static str,
    },
    /// The row length is not a whole number of quantized blocks.
    #[error(
        "{ty} rows must have a multiple of {block} columns, this matrix has {cols}: the file is malformed"
    )]
    Block {
        /// Type of the weights.
        ty: WeightType,
        /// Columns asked for.
        cols: u64,
        /// Columns in a block of this type.
        block: usize,
    },
    /// More than the arguments of a kernel can count.
    #[error("{what} is {value}, a GPU kernel takes at most {max}")]
    TooLarge {
        /// What.
        what: &'static str,
        /// Value of the shape.
        value: u64,
        /// The most there may be.
        max: u64,
    },
}

/// `value` as the u32 that kernels count in.
///
/// # Errors
/// [`Error::TooLarge`].
pub(crate) fn count(what: &'static str, value: u64) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::TooLarge {
        what,
        value,
        max: u64::from(u32::MAX),
    })
}
