//! Kernels: SIMD for the CPU; HIP sources.
