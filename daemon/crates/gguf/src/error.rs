//! The one error type of this crate. Messages name the file's part, what was found, what
//! is allowed and what to do.

use std::io;
use std::path::PathBuf;

use crate::{Identity, OtherUse, TensorType, ValueType, limits};

/// Why a file or a range of it cannot be used.
///
/// The first group concerns the file, the second the header's bytes, the third a getter's
/// expectation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the file failed; `op` says which.
    #[error("cannot {op} {path}", path = path.display())]
    Io {
        /// What was attempted, as a verb: "open", "read", ...
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The path names something that is not a regular file.
    #[error("{path} is a {kind}, not a regular file: give the path of a .gguf file", path = path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// Kind of the file: "directory", "FIFO", ...
        kind: &'static str,
    },
    /// The file has no bytes.
    #[error("{path} is empty (0 bytes): the download or copy did not finish; fetch the file again", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is not what it was when it was opened; whatever was read from it is not to be
    /// trusted.
    #[error(
        "{path} changed while it was in use (was {was}, now {now})",
        path = path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// Identity of the file when it was opened.
        was: Box<Identity>,
        /// Identity of the file when the change was noticed.
        now: Box<Identity>,
    },
    /// A range reaches outside of the file as it was when it was opened.
    #[error("bytes {start}..{end} are outside of {path} ({len} bytes)", path = path.display())]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// First byte asked for.
        start: u64,
        /// One past the last byte asked for.
        end: u64,
        /// Length of the file.
        len: u64,
    },
    /// More parts than [`limits::MAX_PARTS`].
    #[error("{path} is one of {found} parts: at most {max} are read; merge them into fewer files", path = path.display(), max = limits::MAX_PARTS)]
    TooManyParts {
        /// The first part.
        path: PathBuf,
        /// Number of parts by the file's name.
        found: u64,
    },
    /// A part of a split model that does not belong to the others.
    #[error("{path}: {problem}", path = path.display())]
    Split {
        /// The part.
        path: PathBuf,
        /// What is wrong with the part, and what to do.
        problem: String,
    },
    /// A part of a split model whose header cannot be used.
    #[error("in {path}", path = path.display())]
    Part {
        /// The part.
        path: PathBuf,
        /// What is wrong with the part.
        source: Box<Error>,
    },

    /// The first four bytes are not `GGUF`. The message does not show them: the client may have no
    /// right to read the file.
    #[error(
        "not a GGUF file: it does not begin with \"GGUF\"; give a .gguf file, or convert the model to one"
    )]
    BadMagic,
    /// What stands in the place of a file that was not fetched.
    #[error("not a GGUF file: it is {what}")]
    Mishap {
        /// The kind of file that it is instead.
        what: OtherUse,
    },
    /// A version whose bytes are swapped: a file for big-endian machines.
    #[error(
        "big-endian GGUF (version {version}): only little-endian files can be read; convert it with gguf_convert_endian.py"
    )]
    BigEndian {
        /// The version, read in the file's own byte order.
        version: u32,
    },
    /// A version that this parser does not know.
    #[error(
        "GGUF version {found} is not supported: versions 2 and 3 are; convert the model again with a current converter"
    )]
    Version {
        /// The version found.
        found: u32,
    },
    /// The file ends inside its header.
    #[error(
        "the file ends inside {what}: at byte {offset} the header needs at least {need} bytes and {available} are there; \
         the file was cut short, fetch it again"
    )]
    Truncated {
        /// The part that was being read.
        what: String,
        /// Offset at which the truncated element begins.
        offset: u64,
        /// The least length with which the header could be complete.
        need: u64,
        /// The length there is.
        available: u64,
    },
    /// A count or length above its named bound in [`limits`].
    #[error(
        "{what} at byte {offset} is {found}, above the limit of {max}: the file is damaged or not meant for this program"
    )]
    Limit {
        /// What was counted, with the key or tensor if there is one.
        what: String,
        /// Where the number stands.
        offset: u64,
        /// The number.
        found: u64,
        /// The bound.
        max: u64,
    },
    /// A key that occurs twice.
    #[error("metadata key \"{key}\" occurs twice, the second time at byte {offset}")]
    DuplicateKey {
        /// The key.
        key: String,
        /// Where the second one begins.
        offset: u64,
    },
    /// A value type outside of the specification.
    #[error(
        "metadata key \"{key}\" has value type {found} at byte {offset}: types 0 to 12 are defined"
    )]
    UnknownValueType {
        /// The key.
        key: String,
        /// Where the type stands.
        offset: u64,
        /// The type's number.
        found: u32,
    },
    /// Arrays nested deeper than [`limits::MAX_ARRAY_DEPTH`].
    #[error("metadata key \"{key}\" nests arrays deeper than {max} at byte {offset}", max = limits::MAX_ARRAY_DEPTH)]
    NestedTooDeep {
        /// The key.
        key: String,
        /// Where the array one too deep begins.
        offset: u64,
    },
    /// `general.alignment` is not a power of two within bounds.
    #[error(
        "general.alignment is {found}: it must be a power of two from {min} to {max}",
        min = limits::MIN_ALIGNMENT,
        max = limits::MAX_ALIGNMENT
    )]
    Alignment {
        /// The alignment found.
        found: u64,
    },
    /// A tensor name that is empty or not UTF-8.
    #[error("the name of tensor {index} at byte {offset} is {reason}")]
    BadTensorName {
        /// Index of the tensor, from 0.
        index: u64,
        /// Where the record begins.
        offset: u64,
        /// What is wrong with the name.
        reason: &'static str,
    },
    /// A tensor name that occurs twice.
    #[error("tensor \"{tensor}\" occurs twice, the second time at byte {offset}")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// Where the second record begins.
        offset: u64,
    },
    /// More than [`limits::MAX_DIMS`] dimensions.
    #[error("tensor \"{tensor}\" has {found} dimensions at byte {offset}: at most {max} are defined", max = limits::MAX_DIMS)]
    TooManyDims {
        /// The tensor.
        tensor: String,
        /// Where the number stands.
        offset: u64,
        /// The number of dimensions.
        found: u32,
    },
    /// A dimension of zero.
    #[error("tensor \"{tensor}\" has a dimension of zero: {dims:?} (fastest first)")]
    ZeroDim {
        /// The tensor.
        tensor: String,
        /// The tensor's dimensions, fastest first.
        dims: [u64; 4],
    },
    /// Dimensions whose product does not fit 63 bits.
    #[error("the size of tensor \"{tensor}\" overflows: {dims:?} (fastest first) of {ty}")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// The tensor's dimensions, fastest first.
        dims: [u64; 4],
        /// The tensor's type.
        ty: TensorType,
    },
    /// A tensor type number that nobody has defined.
    #[error(
        "tensor \"{tensor}\" has type number {found}, which is not a known ggml type: quantize the model to another one"
    )]
    UnknownTensorType {
        /// The tensor.
        tensor: String,
        /// The number.
        found: u32,
    },
    /// A tensor type that ggml once had and took out of the format.
    #[error(
        "tensor \"{tensor}\" has type {name} ({found}), which was removed from the format: convert or quantize the model again"
    )]
    RemovedTensorType {
        /// The tensor.
        tensor: String,
        /// The number.
        found: u32,
        /// The name it had.
        name: &'static str,
    },
    /// Rows that are not a whole number of blocks.
    #[error("tensor \"{tensor}\" has rows of {row} elements: {ty} stores blocks of {block}", block = ty.block_size())]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// The tensor's type.
        ty: TensorType,
        /// Elements in a row (its first, fastest dimension).
        row: u64,
    },
    /// A tensor that does not begin at a multiple of the alignment.
    #[error(
        "tensor \"{tensor}\" begins {offset} bytes into the tensor data, which is not a multiple of the alignment {alignment}"
    )]
    UnalignedTensor {
        /// The tensor.
        tensor: String,
        /// The tensor's offset in the tensor data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that reaches past the end of the file.
    #[error(
        "tensor \"{tensor}\" ({bytes} bytes, {offset} bytes into the tensor data, which begins at byte {data_start}) reaches past \
         the end of the file at {file_len}: the file was cut short, fetch it again"
    )]
    TensorPastEnd {
        /// The tensor.
        tensor: String,
        /// The tensor's offset in the tensor data.
        offset: u64,
        /// The tensor's length.
        bytes: u64,
        /// Where the tensor data begins.
        data_start: u64,
        /// The length of the file.
        file_len: u64,
    },
    /// Two tensors that share bytes.
    #[error(
        "tensors \"{first}\" (ends at byte {first_end}) and \"{second}\" (begins at byte {second_start}) overlap"
    )]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// End of the first tensor in the file.
        first_end: u64,
        /// The second tensor's name.
        second: String,
        /// Start of the second tensor in the file.
        second_start: u64,
    },

    /// A key that is there with another type than the caller needs.
    #[error("metadata key \"{key}\" is {found}, where {expected} is needed")]
    WrongType {
        /// The key.
        key: String,
        /// What the caller needs.
        expected: &'static str,
        /// What the file has.
        found: Described,
    },
    /// A number that does not fit what the caller needs.
    #[error("metadata key \"{key}\" is {value}, which does not fit {expected}")]
    ValueRange {
        /// The key.
        key: String,
        /// The number.
        value: i128,
        /// The type that the caller needs.
        expected: &'static str,
    },
    /// A string that the caller needs as text and that is not UTF-8.
    #[error("metadata key \"{key}\" is not valid UTF-8 from byte {valid_up_to} of its text on")]
    NotUtf8 {
        /// The key.
        key: String,
        /// Bytes of the text before the first that is not UTF-8.
        valid_up_to: usize,
    },
    /// The array was recognised as one that was read before, and its bytes are not kept.
    #[error(
        "the value of metadata key \"{key}\" was recognised and not kept: open the file with all of its header"
    )]
    NotKept {
        /// The key.
        key: String,
    },
}

impl Error {
    /// True if the file contradicts itself, as one does that is damaged or was converted wrongly,
    /// and the message does not say what to do.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Error::Part { source, .. } => source.is_damage(),
            Error::DuplicateKey { .. }
            | Error::UnknownValueType { .. }
            | Error::NestedTooDeep { .. }
            | Error::Alignment { .. }
            | Error::BadTensorName { .. }
            | Error::DuplicateTensor { .. }
            | Error::TooManyDims { .. }
            | Error::ZeroDim { .. }
            | Error::SizeOverflow { .. }
            | Error::PartialBlock { .. }
            | Error::UnalignedTensor { .. }
            | Error::Overlap { .. }
            | Error::WrongType { .. }
            | Error::ValueRange { .. }
            | Error::NotUtf8 { .. } => true,
            _ => false,
        }
    }
}

/// The type of a metadata value in words: "u32", "an array of 7 strings".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Described {
    /// A scalar or a string.
    One(ValueType),
    /// An array and its length.
    Array(ValueType, u64),
}

impl std::fmt::Display for Described {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Described::One(ty) => write!(f, "of type {ty}"),
            Described::Array(ty, len) => write!(f, "an array of {len} {ty}"),
        }
    }
}
