//! The host device's kernels: quantized matrix products on the CPU.
//!
//! A weight matrix goes through three forms. In the *file* its rows lie one after the other, each a run of quantized
//! blocks. [`PackedMatrix::pack`] rearranges it at upload, byte for byte of the same size, so that sixteen rows advance
//! together through one vector register. [`mat_mul`] then multiplies the packed form with [`Activations`].
//!
//! *Invariant:* one scheme of arithmetic (see [`matmul`]) holds for every instruction set, every number of tokens and
//! every division of the rows among workers; results are bit-identical across all of them.
//!
//! *Invariant:* `unsafe` appears only in `simd` (intrinsics behind a proof of detection) and in [`RowsOut`] (columns
//! shared by workers).
//!
//! Nothing here owns a thread; every function runs on its caller's.

pub mod activations;
mod error;
mod formats;
mod isa;
pub mod matmul;
mod pack;
pub mod reference;
mod simd;
mod weight_type;

pub use activations::{ActivationForm, Activations};
pub use error::Error;
pub use isa::Isa;
pub use matmul::{RowsOut, mat_mul, mat_mul_all};
pub use pack::{PackedMatrix, ROW_GROUP};
pub use weight_type::WeightType;
