//! Errors of the driver and of the kernels' builders, as those of a device.

use rocmforge_kernels_gpu as kernels;

use crate::Loss;
use crate::error::Error;
use crate::gpu::{self, Call, Stream};

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
