//! Errors of the driver and of the kernels' builders, as those of a device.

use rocmforge_device::{Error, Loss};
use rocmforge_gpu_driver::{self as gpu, Call, Stream, blas};
use rocmforge_kernels_gpu as kernels;

/// A driver's error as a device's.
pub(super) fn failed(operation: &'static str, error: gpu::Error) -> Error {
    if let Some(kind) = error.loss() {
        return Error::Lost(Loss::new(kind, format!("{operation}: {error}")));
    }
    if error.is_out_of_memory() {
        return Error::Memory {
            kind: "device",
            bytes: 0,
            message: format!("{operation}: {error}"),
        };
    }
    Error::Driver {
        operation,
        message: error.to_string(),
    }
}

/// A builder's error as a device's.
pub(super) fn launch_error(error: &kernels::Error) -> Error {
    if let kernels::Error::NoKernel { .. } | kernels::Error::TooLarge { .. } = error {
        return Error::NoKernel(error.to_string());
    }
    Error::Driver {
        operation: "preparing a launch",
        message: error.to_string(),
    }
}

/// The driver with a stream's context bound to this thread.
pub(super) fn stream_driver(stream: &Stream) -> Result<Call<'_>, Error> {
    stream
        .context()
        .driver()
        .map_err(|e| failed("binding the device", e))
}

/// The error of a vendor's library for products.
pub(super) fn product_error(error: blas::Error) -> Error {
    match error {
        blas::Error::Config(message) => Error::Config(message),
        blas::Error::Memory(message) => Error::Memory {
            kind: "device",
            bytes: 0,
            message,
        },
        blas::Error::Driver(message) => Error::Driver {
            operation: "matrix product",
            message,
        },
    }
}
