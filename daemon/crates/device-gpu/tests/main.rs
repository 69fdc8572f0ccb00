//! Devices without a card: the GPU device on a fake HIP runtime, and operations compared.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod fake_device;
mod gpu_aside;
mod gpu_closed;
mod gpu_in_place;
mod gpu_uploads;
mod others;
mod parity;
mod reads;
mod rows;
mod uploaded;
