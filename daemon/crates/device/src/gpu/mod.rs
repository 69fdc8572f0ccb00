//! The GPU device, over the driver of either vendor (crate `rocmforge-gpu-driver`).

#![expect(unsafe_code, reason = "drivers are called through pointers")]

pub mod ceilings;
pub mod device;

pub use device::{GpuConfig, GpuDevice, UploadWay};
