//! Every bound this crate puts on a file, by name. A value above its bound is refused with
//! [`Error::Limit`] (or the more specific error named below) before anything is allocated for it.
//!
//! [`Error::Limit`]: crate::Error::Limit

/// Bytes of header (everything before the tensor data) that a file may have; the header is copied
/// into memory. A vocabulary of 262,144 tokens with merges takes about 16 MiB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Metadata key-value pairs in a file.
pub const MAX_KEYS: u64 = 1 << 16;

/// Tensors in a file. Unmerged experts of the largest published models come to about 47,000.
pub const MAX_TENSORS: u64 = 1 << 18;

/// Bytes of a metadata key (GGUF spec, `gguf_metadata_kv_t`).
pub const MAX_KEY_BYTES: u64 = 65_535;

/// Bytes of a tensor name (GGUF spec, `gguf_tensor_info_t`).
pub const MAX_TENSOR_NAME_BYTES: u64 = 64;

/// Bytes of one string value or one string in an array.
pub const MAX_STRING_BYTES: u64 = 64 << 20;

/// Elements of one metadata array.
pub const MAX_ARRAY_LEN: u64 = 1 << 24;

/// How deep arrays may nest: 1 is an array of scalars or strings.
pub const MAX_ARRAY_DEPTH: usize = 4;

/// Dimensions of a tensor (`GGML_MAX_DIMS`).
pub const MAX_DIMS: u32 = 4;

/// `general.alignment` where the file does not say (GGUF spec, "General").
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// Smallest `general.alignment` (GGUF spec: a multiple of 8). Outside of the
/// bounds: `Error::Alignment`.
pub const MIN_ALIGNMENT: u64 = 8;

/// Largest `general.alignment`.
pub const MAX_ALIGNMENT: u64 = 1 << 20;

/// Remarks on what is wrong with a file and tolerated that are kept.
pub const MAX_TOLERATED: usize = 16;

/// Live file mappings of a process that the SIGBUS guard can watch. A file opened beyond
/// them is read with `pread`.
pub const MAX_MAPPINGS: usize = 1024;

/// Parts of a split model. Each keeps a file open.
pub const MAX_PARTS: usize = 256;

/// Bytes at a multiple of which each part of a split model begins. Large, so that no window of a
/// device's uploads has pages of two files: some drivers refuse to register such.
pub const PART_ALIGNMENT: u64 = 32 << 20;

/// What a direct read is a multiple of, in its offset in the file, its length and its address.
/// Files that need more are read through the page cache.
pub const DIRECT_ALIGNMENT: usize = 4096;

// Blocks are counted from a part's start.
const _: () = assert!(PART_ALIGNMENT.is_multiple_of(DIRECT_ALIGNMENT as u64));

// A header is addressed with 32-bit offsets inside the parser.
const _: () = assert!(MAX_HEADER_BYTES <= u32::MAX as u64);
