//! The host device's kernels: quantized matrix products, the other operations of a pass, and the
//! threads that share them out.
//!
//! A weight matrix goes through three forms. In the *file* its rows lie one after the other, each a
//! run of quantized blocks. [`PackedMatrix::pack`] rearranges it at upload, byte for byte of the
//! same size, so that sixteen rows advance together through one vector register. [`mat_mul`] then
//! multiplies the packed form with [`Activations`].
//!
//! *Invariant:* products have one scheme of arithmetic (see [`matmul`]) for every instruction set,
//! every number of tokens and every division of the rows among workers: the same bits from all of
//! them (`tests/matmul.rs`). The other operations ([`ops`]) have that for every division of the
//! rows; between instruction sets their last bits differ.
//!
//! *Invariant:* `unsafe` appears only where vectors are (`simd`, `ops`: intrinsics behind a
//! proof of detection), where workers write parts of one output ([`RowsOut`], states of [`ops`]),
//! and in the pool.
//!
//! Nothing here but [`Pool`] owns a thread; every other function runs on its caller's.

#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod activations;
mod codebook;
mod error;
mod formats;
mod isa;
pub mod matmul;
pub mod ops;
mod pack;
mod pool;
pub mod reference;
mod simd;

pub use activations::{ActivationForm, Activations};
pub use error::Error;
pub use isa::Isa;
pub use matmul::{RowsOut, mat_mul, mat_mul_all, mat_mul_tokens};
pub use pack::{PackedMatrix, ROW_GROUP};
use pool::SyncPtr;
pub use pool::{MAX_POOL_THREADS, Pool, PoolError, SPIN as POOL_SPIN};
pub use rocmforge_ops::WeightType;
