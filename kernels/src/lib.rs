//! Kernels: SIMD for the CPU; HIP sources and their launches for GPUs.

#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod gpu;
pub mod host;
