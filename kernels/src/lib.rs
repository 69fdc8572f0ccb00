//! Kernels: SIMD for the CPU; HIP sources and their launches for GPUs.

pub mod gpu;
pub mod host;
