//! Metadata values as views of the copied header (GGUF spec, `gguf_metadata_value_t`).
//!
//! *Invariant:* a view is only made of bytes that the parser has walked, so decoding cannot run
//! past the end (tests `mutated_files_never_panic`, `arbitrary_bytes_never_panic`).

use std::fmt;

/// The type of a metadata value or of an array's elements, as the file numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ValueType {
    /// Unsigned 8-bit integer.
    U8 = 0,
    /// Signed 8-bit integer.
    I8 = 1,
    /// Unsigned 16-bit integer.
    U16 = 2,
    /// Signed 16-bit integer.
    I16 = 3,
    /// Unsigned 32-bit integer.
    U32 = 4,
    /// Signed 32-bit integer.
    I32 = 5,
    /// IEEE 754 binary32.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// A 64-bit length and that many bytes, UTF-8 by the specification.
    String = 8,
    /// An element type, a 64-bit count, and the elements.
    Array = 9,
    /// Unsigned 64-bit integer.
    U64 = 10,
    /// Signed 64-bit integer.
    I64 = 11,
    /// IEEE 754 binary64.
    F64 = 12,
}

impl ValueType {
    /// The type with the file's number `id`.
    pub const fn from_u32(id: u32) -> Option<ValueType> {
        Some(match id {
            0 => ValueType::U8,
            1 => ValueType::I8,
            2 => ValueType::U16,
            3 => ValueType::I16,
            4 => ValueType::U32,
            5 => ValueType::I32,
            6 => ValueType::F32,
            7 => ValueType::Bool,
            8 => ValueType::String,
            9 => ValueType::Array,
            10 => ValueType::U64,
            11 => ValueType::I64,
            12 => ValueType::F64,
            _ => return None,
        })
    }

    /// Bytes of a value of fixed size; `None` for strings and arrays.
    pub const fn reserve_bytes(self) -> Option<usize> {
        Some(match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
            ValueType::String | ValueType::Array => return None,
        })
    }

    /// The fewest bytes that a value can take in a file.
    pub(crate) const fn least_bytes(self) -> u64 {
        match self.reserve_bytes() {
            Some(bytes) => bytes as u64,
            None if matches!(self, ValueType::String) => 8,
            None => 12,
        }
    }

    /// The name: "u32", "string", ...
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A metadata value. Strings are bytes: the specification asks for UTF-8, real
/// files do not always comply.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    missing_docs,
    reason = "the variants are named after ValueType's, which are documented"
)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value<'_> {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value as an integer, where it is one of any width (bools are not).
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(x) => x.into(),
            Value::I8(x) => x.into(),
            Value::U16(x) => x.into(),
            Value::I16(x) => x.into(),
            Value::U32(x) => x.into(),
            Value::I32(x) => x.into(),
            Value::U64(x) => x.into(),
            Value::I64(x) => x.into(),
            _ => return None,
        })
    }
}

/// An array of metadata values: its element type, its length, and the elements
/// as they stand in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    pub(crate) ty: ValueType,
    pub(crate) len: usize,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, little endian, one after the other without padding.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements in order; strings and nested arrays are decoded on the way.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (ty, mut rest) = (self.ty, self.bytes);
        (0..self.len).map_while(move |_| {
            let (value, tail) = decode(ty, rest)?;
            rest = tail;
            Some(value)
        })
    }
}

fn u64_at(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (head, tail) = bytes.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*head), tail))
}

/// Decodes one value of type `ty` from the start of `bytes`; gives it and the bytes after it.
pub(crate) fn decode(ty: ValueType, bytes: &[u8]) -> Option<(Value<'_>, &[u8])> {
    macro_rules! number {
        ($variant:ident, $t:ty) => {{
            let (head, tail) = bytes.split_first_chunk()?;
            (Value::$variant(<$t>::from_le_bytes(*head)), tail)
        }};
    }
    Some(match ty {
        ValueType::U8 => number!(U8, u8),
        ValueType::I8 => number!(I8, i8),
        ValueType::U16 => number!(U16, u16),
        ValueType::I16 => number!(I16, i16),
        ValueType::U32 => number!(U32, u32),
        ValueType::I32 => number!(I32, i32),
        ValueType::F32 => number!(F32, f32),
        ValueType::U64 => number!(U64, u64),
        ValueType::I64 => number!(I64, i64),
        ValueType::F64 => number!(F64, f64),
        ValueType::Bool => {
            let (&byte, tail) = bytes.split_first()?;
            (Value::Bool(byte != 0), tail)
        }
        ValueType::String => {
            let (len, tail) = u64_at(bytes)?;
            let (text, tail) = tail.split_at_checked(usize::try_from(len).ok()?)?;
            (Value::String(text), tail)
        }
        ValueType::Array => {
            let (id, tail) = bytes.split_first_chunk::<4>()?;
            let ty = ValueType::from_u32(u32::from_le_bytes(*id))?;
            let (len, tail) = u64_at(tail)?;
            let len = usize::try_from(len).ok()?;
            let (elements, tail) = tail.split_at_checked(elements_bytes(ty, len, tail)?)?;
            (
                Value::Array(Array {
                    ty,
                    len,
                    bytes: elements,
                }),
                tail,
            )
        }
    })
}

/// Bytes that `len` elements of type `ty` take at the start of `bytes`.
fn elements_bytes(ty: ValueType, len: usize, bytes: &[u8]) -> Option<usize> {
    if let Some(each) = ty.reserve_bytes() {
        return len.checked_mul(each);
    }
    let mut rest = bytes;
    for _ in 0..len {
        rest = decode(ty, rest)?.1;
    }
    Some(bytes.len() - rest.len())
}

/// An array of strings.
#[derive(Clone, Copy, Debug)]
pub struct Strings<'a> {
    pub(crate) len: usize,
    /// Each string's length, and its bytes.
    pub(crate) bytes: &'a [u8],
}

impl<'a> Strings<'a> {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All strings in order, as the file has them (not necessarily UTF-8).
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.bytes;
        (0..self.len).map(move |_| {
            let (len, behind) = u64_at(rest).expect("the parser has walked these strings");
            let (string, behind) = behind.split_at(len as usize);
            rest = behind;
            string
        })
    }
}
