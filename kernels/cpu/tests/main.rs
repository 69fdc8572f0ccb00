//! Kernels of the CPU against plain arithmetic.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod formats;
mod matmul;
mod matrices;
