//! Kernels that run on the CPU.

pub mod ops;
mod pool;

pub use pool::{MAX_POOL_THREADS, Pool, PoolError};
