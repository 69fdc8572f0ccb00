//! What a device can fail with.

use crate::Loss;

/// An error of a device. `Display` never repeats its source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No kernel computes with the tensor's type.
    #[error(
        "{operation}: tensor '{tensor}' has type {ty}, which this device cannot compute with; supported: {supported}"
    )]
    Unsupported {
        /// The operation that was requested.
        operation: &'static str,
        /// The tensor.
        tensor: String,
        /// The tensor's type.
        ty: String,
        /// The types that work.
        supported: String,
    },
    /// No kernel for an operation of a plan.
    #[error("{0}; run this model with --device host")]
    NoKernel(String),
    /// A shape that the tensor's type forbids.
    #[error("tensor '{tensor}' [{cols}, {rows}] of type {ty}: {message}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// The tensor's type.
        ty: String,
        /// Elements a row.
        cols: u64,
        /// Rows.
        rows: u64,
        /// What is wrong with the shape.
        message: String,
    },
    /// The file could not be read.
    #[error("reading tensor '{tensor}'")]
    Read {
        /// The tensor.
        tensor: String,
        /// Why the file could not be read.
        #[source]
        source: rocmforge_gguf::Error,
    },
    /// A tensor whose values are not finite.
    #[error(
        "tensor '{tensor}' has a scale or value that is NaN or infinite; the file is damaged or was converted wrongly: fetch or convert it again"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
    },
    /// The system or the driver refused memory.
    #[error(
        "{bytes} bytes of {kind} memory were refused: {message}; end other users of that memory, or lower the budget"
    )]
    Memory {
        /// Kind of memory: device memory or pinned host memory.
        kind: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// What the system said.
        message: String,
    },
    /// A setting of the environment that cannot be used.
    #[error("{0}")]
    Config(String),
    /// A call of the driver failed and the device is sound: a bug of ours, or a
    /// driver that cannot do it.
    #[error("{operation}: {message}")]
    Driver {
        /// The operation that failed.
        operation: &'static str,
        /// What the driver said.
        message: String,
    },
    /// The device is closed, and the operation needs it open.
    #[error("{0}: the GPU is closed until the next request")]
    Closed(&'static str),
    /// The device has failed for good.
    #[error("the device is lost: {0}")]
    Lost(Loss),
}
