//! Errors of the driver and of the kernels' builders, and what the system says, as those of a
//! device.

use rocmforge_device::{Error, Loss, LossKind, Said};
use rocmforge_gpu_driver::{self as gpu, Call, KernelView, Stream, blas};
use rocmforge_kernels_gpu as kernels;

/// A card's loss as a device's.
fn loss_kind(kind: gpu::LossKind) -> LossKind {
    match kind {
        gpu::LossKind::Hang => LossKind::Hang,
        gpu::LossKind::SchedulerHang => LossKind::SchedulerHang,
        gpu::LossKind::Reset => LossKind::Reset,
        gpu::LossKind::Gone => LossKind::Gone,
        gpu::LossKind::Fault => LossKind::Fault,
        gpu::LossKind::Hardware => LossKind::Hardware,
        gpu::LossKind::Unknown => LossKind::Unknown,
    }
}

/// How the device was lost by what a driver's error tells, if it was.
pub(super) fn lost_as(error: &gpu::Error) -> Option<LossKind> {
    error.loss().map(loss_kind)
}

/// What the system has to say of a card that was lost.
pub(super) fn said(system: &KernelView) -> Option<Said> {
    let gpu::Said { kind, words } = system.says()?;
    let kind = loss_kind(kind);
    Some(Said { kind, words })
}

/// A driver's error as a device's.
pub(super) fn failed(operation: &'static str, error: gpu::Error) -> Error {
    if let Some(kind) = lost_as(&error) {
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
