//! The driver's layer over a fake HIP runtime.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod gpu_driver;
