//! Writing GGUF: for tests, benchmarks and tools.
//!
//! [`GgufWriter`] lays a file out as the specification asks. Its `raw` hooks put in what the
//! specification forbids, so that readers' refusals can be tested: a false count, a value of any
//! type number, a tensor record that lies.

use std::io::{self, Write};
use std::path::Path;

use crate::limits::DEFAULT_ALIGNMENT;
use crate::{Error, Gguf, TensorType, ValueType};

/// A metadata value to write.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    missing_docs,
    reason = "the variants are named after ValueType's, which are documented"
)]
pub enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Vec<u8>),
    /// Elements must all be of the given type.
    Array(ValueType, Vec<MetaValue>),
    /// An array given as its encoded elements: type, count, bytes. The quick way for large ones.
    Encoded(ValueType, u64, Vec<u8>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl From<&str> for MetaValue {
    fn from(text: &str) -> MetaValue {
        MetaValue::String(text.into())
    }
}

macro_rules! from_number {
    ($($t:ty => $variant:ident),*) => { $(
        impl From<$t> for MetaValue {
            fn from(x: $t) -> MetaValue { MetaValue::$variant(x) }
        }
        impl From<&[$t]> for MetaValue {
            fn from(xs: &[$t]) -> MetaValue {
                MetaValue::Encoded(ValueType::$variant, xs.len() as u64, xs.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
        }
    )* };
}
from_number!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, u64 => U64, i64 => I64, f64 => F64);

impl From<bool> for MetaValue {
    fn from(x: bool) -> MetaValue {
        MetaValue::Bool(x)
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for MetaValue {
    /// An array of strings.
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> MetaValue {
        let (mut count, mut bytes) = (0, Vec::new());
        for string in strings {
            put_string(&mut bytes, string.as_ref());
            count += 1;
        }
        MetaValue::Encoded(ValueType::String, count, bytes)
    }
}

impl MetaValue {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            MetaValue::U8(_) => ValueType::U8,
            MetaValue::I8(_) => ValueType::I8,
            MetaValue::U16(_) => ValueType::U16,
            MetaValue::I16(_) => ValueType::I16,
            MetaValue::U32(_) => ValueType::U32,
            MetaValue::I32(_) => ValueType::I32,
            MetaValue::F32(_) => ValueType::F32,
            MetaValue::Bool(_) => ValueType::Bool,
            MetaValue::String(_) => ValueType::String,
            MetaValue::Array(..) | MetaValue::Encoded(..) => ValueType::Array,
            MetaValue::U64(_) => ValueType::U64,
            MetaValue::I64(_) => ValueType::I64,
            MetaValue::F64(_) => ValueType::F64,
        }
    }

    /// Appends the value, without its type, to `out`.
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            MetaValue::U8(x) => out.extend(x.to_le_bytes()),
            MetaValue::I8(x) => out.extend(x.to_le_bytes()),
            MetaValue::U16(x) => out.extend(x.to_le_bytes()),
            MetaValue::I16(x) => out.extend(x.to_le_bytes()),
            MetaValue::U32(x) => out.extend(x.to_le_bytes()),
            MetaValue::I32(x) => out.extend(x.to_le_bytes()),
            MetaValue::F32(x) => out.extend(x.to_le_bytes()),
            MetaValue::U64(x) => out.extend(x.to_le_bytes()),
            MetaValue::I64(x) => out.extend(x.to_le_bytes()),
            MetaValue::F64(x) => out.extend(x.to_le_bytes()),
            MetaValue::Bool(x) => out.push(u8::from(*x)),
            MetaValue::String(text) => put_string(out, text),
            MetaValue::Array(ty, elements) => {
                put_array_head(out, *ty, elements.len() as u64);
                for element in elements {
                    assert_eq!(
                        element.value_type(),
                        *ty,
                        "elements of an array have the array's type"
                    );
                    element.encode(out);
                }
            }
            MetaValue::Encoded(ty, count, bytes) => {
                put_array_head(out, *ty, *count);
                out.extend_from_slice(bytes);
            }
        }
    }
}

fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text);
}

fn put_array_head(out: &mut Vec<u8>, ty: ValueType, count: u64) {
    out.extend((ty as u32).to_le_bytes());
    out.extend(count.to_le_bytes());
}

/// A tensor's record as it will be written; fields may be made to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// The name.
    pub name: Vec<u8>,
    /// The dimensions, fastest first; their number is written as it is.
    pub dims: Vec<u64>,
    /// ggml's type number.
    pub ty: u32,
    /// Bytes from the start of the tensor data.
    pub offset: u64,
}

/// Takes a whole file apart as gguf-split does: into as many parts as there are counts, each with
/// the next so many tensors, and the metadata in the first. The keys of [`GgufWriter::part`] are
/// left to the caller.
///
/// # Errors
/// As [`Gguf::parse`].
///
/// # Panics
/// If the counts are not of all tensors.
pub fn split(whole: &[u8], counts: &[usize]) -> Result<Vec<GgufWriter>, Error> {
    let gguf = Gguf::parse(whole, whole.len() as u64)?;
    assert_eq!(
        counts.iter().sum::<usize>(),
        gguf.tensors.len(),
        "each tensor has its part"
    );
    let mut first = GgufWriter::new();
    for entry in &gguf.entries {
        // An array's type and count stand before its elements.
        let head = entry.array.map_or(0, |_| 4 + 8);
        let value = entry.bytes.start - head..entry.bytes.end;
        first = first.raw_key(entry.key.as_bytes(), entry.ty as u32, &whole[value]);
    }
    first.alignment = gguf.alignment;
    let mut tensors = gguf.tensors.iter();
    let part = |(number, &count)| {
        let empty = if number == 0 {
            first.clone()
        } else {
            GgufWriter::new()
        };
        tensors.by_ref().take(count).fold(empty, |part, tensor| {
            let bytes = &whole[tensor.offset as usize..][..tensor.bytes as usize];
            part.tensor(&tensor.name, tensor.shape(), tensor.ty, bytes)
        })
    };
    Ok(counts.iter().enumerate().map(part).collect())
}

/// Builds a GGUF file from metadata and tensors.
///
/// ```
/// use rocmforge_gguf::write::{GgufWriter, MetaValue};
/// use rocmforge_gguf::{Gguf, TensorType};
///
/// let file = GgufWriter::new()
///     .key("general.architecture", "llama")
///     .key("llama.block_count", 1u32)
///     .key("tokenizer.ggml.tokens", ["<s>", "a"].iter().collect::<MetaValue>())
///     .tensor("output_norm.weight", &[2], TensorType::F32, vec![0; 8])
///     .to_bytes();
/// let gguf = Gguf::parse(&file, file.len() as u64)?;
/// assert_eq!(gguf.u64("llama.block_count")?, Some(1));
/// # Ok::<(), rocmforge_gguf::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: u64,
    n_keys: u64,
    keys: Vec<u8>,
    tensors: Vec<RawTensor>,
    data: Vec<u8>,
    claimed_keys: Option<u64>,
    claimed_tensors: Option<u64>,
}

impl Default for GgufWriter {
    fn default() -> GgufWriter {
        GgufWriter::new()
    }
}

impl GgufWriter {
    /// A file of version 3 and alignment 32 with nothing in it.
    pub fn new() -> GgufWriter {
        GgufWriter {
            version: 3,
            alignment: DEFAULT_ALIGNMENT,
            n_keys: 0,
            keys: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
            claimed_keys: None,
            claimed_tensors: None,
        }
    }

    /// Sets the version; any number is written as it is.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets the alignment and writes `general.alignment`. Call it before adding tensors.
    ///
    /// # Panics
    /// If `alignment` is 0, or tensors were added already.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        assert!(
            alignment > 0 && self.tensors.is_empty(),
            "the alignment is set before tensors are added"
        );
        self.alignment = alignment.into();
        self.key("general.alignment", alignment)
    }

    /// Adds a key and its value.
    #[must_use]
    pub fn key(self, key: &str, value: impl Into<MetaValue>) -> Self {
        let value = value.into();
        let mut bytes = Vec::new();
        value.encode(&mut bytes);
        self.raw_key(key.as_bytes(), value.value_type() as u32, &bytes)
    }

    /// Adds a tensor: `dims` in ggml's order, fastest first. The data is aligned, and `bytes`
    /// need not fit the dimensions.
    #[must_use]
    pub fn tensor(
        mut self,
        name: &str,
        dims: &[u64],
        ty: TensorType,
        bytes: impl AsRef<[u8]>,
    ) -> Self {
        let offset = (self.data.len() as u64).next_multiple_of(self.alignment);
        self.data.resize(offset as usize, 0);
        self.data.extend_from_slice(bytes.as_ref());
        self.raw_tensor(RawTensor {
            name: name.into(),
            dims: dims.into(),
            ty: ty.id(),
            offset,
        })
    }

    /// Adds a tensor of zeros of the size that its dimensions and type ask for.
    ///
    /// # Panics
    /// If a row is not a whole number of blocks.
    #[must_use]
    pub fn zeros(self, name: &str, dims: &[u64], ty: TensorType) -> Self {
        let row = ty
            .row_bytes(dims[0])
            .expect("a row is a whole number of blocks");
        let bytes = row * dims[1..].iter().product::<u64>();
        self.tensor(name, dims, ty, vec![0; bytes as usize])
    }

    /// Adds the keys by which a part of a split model says its place: its number from 0, how many
    /// parts there are, and how many tensors they have together.
    #[must_use]
    pub fn part(self, number: u16, count: u16, tensors: i32) -> Self {
        self.key("split.no", number)
            .key("split.count", count)
            .key("split.tensors.count", tensors)
    }

    /// Adds a key with any bytes as key, type number and value.
    #[must_use]
    pub fn raw_key(mut self, key: &[u8], ty: u32, value: &[u8]) -> Self {
        put_string(&mut self.keys, key);
        self.keys.extend(ty.to_le_bytes());
        self.keys.extend_from_slice(value);
        self.n_keys += 1;
        self
    }

    /// Adds a tensor's record and no data.
    #[must_use]
    pub fn raw_tensor(mut self, tensor: RawTensor) -> Self {
        self.tensors.push(tensor);
        self
    }

    /// Appends bytes to the tensor data.
    #[must_use]
    pub fn raw_data(mut self, bytes: &[u8]) -> Self {
        self.data.extend_from_slice(bytes);
        self
    }

    /// Claims these counts of tensors and keys instead of the true ones.
    #[must_use]
    pub fn raw_counts(mut self, tensors: Option<u64>, keys: Option<u64>) -> Self {
        (self.claimed_tensors, self.claimed_keys) = (tensors, keys);
        self
    }

    /// The header: everything before the padding that leads to the tensor data.
    pub fn header(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24 + self.keys.len() + 96 * self.tensors.len());
        out.extend(*b"GGUF");
        out.extend(self.version.to_le_bytes());
        out.extend(
            self.claimed_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        out.extend(self.claimed_keys.unwrap_or(self.n_keys).to_le_bytes());
        out.extend_from_slice(&self.keys);
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                out.extend(dim.to_le_bytes());
            }
            out.extend(tensor.ty.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        if !self.tensors.is_empty() || !self.data.is_empty() {
            out.resize(
                (out.len() as u64).next_multiple_of(self.alignment) as usize,
                0,
            );
            out.extend_from_slice(&self.data);
        }
        out
    }

    /// Writes the file to `path`, replacing what is there.
    ///
    /// # Errors
    /// What creating or writing the file gives.
    pub fn write_to(&self, path: &Path) -> io::Result<()> {
        let mut file = std::fs::File::create(path)?;
        file.write_all(&self.to_bytes())
    }
}
