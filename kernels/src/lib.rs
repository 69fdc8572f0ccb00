//! Kernels: SIMD for the CPU; HIP sources.

pub mod host;
