//! Kernels that run on the CPU.

pub mod ops;
mod pool;

use pool::SyncPtr;
pub use pool::{MAX_POOL_THREADS, Pool, PoolError};
