//! GGUF files: bytes to a checked header and tensor table, and files that are read safely
//! while others may change them.
//!
//! ```no_run
//! use std::path::Path;
//! use rocmforge_gguf::{Gguf, MappedFile};
//!
//! let file = MappedFile::open(Path::new("model.gguf"))?;
//! let gguf = Gguf::open(&file)?; // the header only
//! let n_layer = gguf.u64("llama.block_count")?;
//! if let Some(tensor) = gguf.tensor("token_embd.weight") {
//!     let first = file.with_range(tensor.range(), |bytes| bytes[0])?;
//! }
//! # Ok::<(), rocmforge_gguf::Error>(())
//! ```
//!
//! # The format
//!
//! Source: the GGUF specification (`docs/gguf.md` of the ggml repository), sections "File
//! Structure" and "General"; block sizes from ggml's `ggml-common.h`. Everything is little endian
//! and unaligned up to the tensor data:
//!
//! ```text
//! "GGUF"  u32 version  u64 tensors  u64 keys
//! keys x    { u64 length, key, u32 type, value }
//! tensors x { u64 length, name, u32 n_dims, n_dims x u64, u32 type,
//!             u64 offset from the tensor data's start }
//! zeros up to the next multiple of general.alignment (32 where the key is absent)
//! tensor data, each tensor at a multiple of the alignment
//! ```
//!
//! Versions 2 and 3 differ only in that 3 may be big endian, which is refused here. Version 1
//! (32-bit lengths) is refused. Dimensions are in ggml's order: the first is the contiguous one,
//! so a matrix of `n_out` rows and `n_in` columns has the dimensions `[n_in, n_out]`, and
//! quantized blocks run along `n_in`.
//!
//! # What is checked
//!
//! Every count, length and offset before it is used, against the file's length and the bounds in
//! [`limits`]; keys and tensor names occur once; a tensor's rows are whole blocks, its size does
//! not overflow, its data is aligned, lies inside of the file and shares no byte with another's.
//! What the keys *mean* is the model's affair.
//!
//! # Map of the crate
//!
//! - [`Gguf`], [`TensorInfo`]: the result; typed getters by key, tensors by name.
//! - `parse`: the walk over the bytes, which asks for no byte that is not the header's.
//! - `known`: large arrays that were read before, which are not kept in memory once more.
//! - [`MappedFile`]: the one place that maps files; populate, SIGBUS guard, identity, `pread`,
//!   direct reads, several files as one.
//! - [`Glance`]: what a file is for, by the beginning of its header.
//! - [`PartName`], `split`: models in several files, their names and what their headers must agree
//!   in.
//! - [`mod@write`]: a writer for tests and tools, of files right and wrong.
//!
//! *Invariant:* `unsafe` occurs below `mapped` only (`deny(unsafe_code)`). *Invariant:* files,
//! ranges and errors are `Send + Sync`, as the compiler checks. Nothing here starts a thread or
//! holds a lock while it reads.
#![deny(unsafe_code)]

mod error;
mod gguf;
mod glance;
mod known;
pub mod limits;
mod mapped;
mod other_use;
mod parse;
mod split;
mod value;
pub mod write;

pub use error::{Described, Error};
pub use gguf::{Gguf, TensorInfo};
pub use glance::Glance;
pub use mapped::{Identity, MappedFile, MappedRange, ReadMode};
pub use other_use::OtherUse;
pub use rocmforge_ops::TensorType;
pub use split::PartName;
pub use value::{Array, Strings, Value, ValueType};

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<MappedFile>();
    shared::<MappedRange>();
    shared::<Gguf>();
    shared::<Error>();
};
