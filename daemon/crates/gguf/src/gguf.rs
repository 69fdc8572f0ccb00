//! A parsed header: the metadata by key, the tensor table by name.
//!
//! *Invariant:* everything here was checked by [`parse`](crate::parse) against the length of the
//! file; a [`Gguf`] owns a copy of the header's bytes and never refers to the file again
//! (`Parser::finish` alone makes one that leaves this crate).

use std::collections::HashMap;
use std::ops::Range;

use crate::error::Described;
use crate::known::{self, Content};
use crate::parse::{Parser, Step};
use crate::value::{Array, Strings, Value, ValueType, decode};
use crate::{Error, MappedFile, TensorType, split};

/// A tensor's entry in the header: name, shape, type, and place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Elements along each dimension in ggml's order, the fastest (contiguous) first, padded
    /// with 1.
    pub dims: [u64; 4],
    /// How many of `dims` the file states.
    pub n_dims: u32,
    /// The type of the elements.
    pub ty: TensorType,
    /// Where the data begins, in bytes from the start of the file; of a split model as
    /// [`MappedFile`] counts.
    pub offset: u64,
    /// Bytes of data.
    pub bytes: u64,
}

impl TensorInfo {
    /// The stated dimensions, fastest first.
    pub fn shape(&self) -> &[u64] {
        &self.dims[..self.n_dims as usize]
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// The data's place in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// Where a key's value stands in the header.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    pub(crate) ty: ValueType,
    /// Range of the value's bytes after its type number; for arrays, of the elements after their
    /// type and count.
    pub(crate) bytes: Range<usize>,
    /// For arrays: element type and count.
    pub(crate) array: Option<(ValueType, usize)>,
    /// Digest of the header's bytes, if one was made.
    pub(crate) content: Option<Content>,
    /// Whether the bytes are there: those of an array that was read before may not be.
    pub(crate) is_kept: bool,
}

/// What of a header stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    All,
    /// Keep all values but large arrays that were read before.
    Unknown,
}

/// The checked header of a GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) data_start: u64,
    pub(crate) header: Vec<u8>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) by_key: HashMap<Box<str>, u32>,
    /// Bytes of the header in the file that are not in `header`.
    pub(crate) passed: u64,
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) by_name: HashMap<Box<str>, u32>,
    pub(crate) tolerated: Vec<String>,
}

impl Gguf {
    /// Parses a header from `bytes`, the start of a file that is `file_len` bytes long. `bytes`
    /// needs to reach to the end of the tensor table and may be the whole file.
    ///
    /// # Errors
    /// Every [`Error`] of the header group; [`Error::Truncated`] also where `bytes` is too short.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Gguf, Error> {
        let bytes = match usize::try_from(file_len) {
            Ok(file_len) if file_len < bytes.len() => &bytes[..file_len],
            _ => bytes,
        };
        let mut parser = Parser::new(file_len);
        match parser.advance(bytes)? {
            Step::Done => {
                let end = parser.header_len();
                parser.finish(bytes[..end].to_vec())
            }
            Step::More(need) => Err(parser.truncated(need, bytes.len() as u64)),
        }
    }

    /// Parses the header of `file`; of a split model those of all parts, which become one. Reads
    /// the headers' bytes and no others: the parser asks only for bytes that must still belong to
    /// the header, judging by the counts and lengths read so far.
    ///
    /// # Errors
    /// Every [`Error`] of the header group; [`Error::Split`] where parts do not belong together or
    /// are not all there, [`Error::Part`] for the header of one; [`Error::Changed`] and
    /// [`Error::Io`] from reading.
    pub fn open(file: &MappedFile) -> Result<Gguf, Error> {
        Gguf::open_as(file, Keep::All)
    }

    /// As [`open`](Self::open), but large arrays with the content of one that was opened so before
    /// are not kept: getters fail with [`Error::NotKept`], and
    /// [`digest_of_value`](Self::digest_of_value) says what they have. Bytes behind a header may be
    /// read where it begins as another one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_recognising(file: &MappedFile) -> Result<Gguf, Error> {
        match Gguf::open_as(file, Keep::Unknown) {
            Err(error @ (Error::Io { .. } | Error::Changed { .. })) => Err(error),
            // It would name bytes by where they are without what was passed over.
            Err(_) => Gguf::open(file),
            opened => opened,
        }
    }

    fn open_as(file: &MappedFile, keep: Keep) -> Result<Gguf, Error> {
        if file.parts().len() == 1 {
            let gguf = Gguf::open_part(file, file.first_part(), keep)?;
            split::refuse_part(file.path(), &gguf)?;
            return Ok(gguf);
        }
        let parts = file.parts().map(|(path, range)| {
            let gguf = Gguf::open_part(file, range, keep);
            Ok((path, gguf.map_err(|e| split::in_part(path, e))?))
        });
        split::merge(parts.collect::<Result<_, Error>>()?)
    }

    /// The header of the file that lies at `range`; offsets of its tensors count from the first
    /// part's start.
    pub(crate) fn open_part(
        file: &MappedFile,
        range: Range<u64>,
        keep: Keep,
    ) -> Result<Gguf, Error> {
        let file_len = range.end - range.start;
        let mut parser = match keep {
            Keep::All => Parser::new(file_len),
            Keep::Unknown => Parser::recognising(file_len),
        };
        let mut header = Vec::new();
        loop {
            match parser.advance_to_large(&header)? {
                Some(Step::Done) => break,
                Some(Step::More(need)) => {
                    let have = header.len();
                    header.resize((need as usize).max(have + 1), 0);
                    let at = range.start + parser.passed() + have as u64;
                    file.read_unmapped(at, &mut header[have..])?;
                }
                None => {
                    let at = range.start + parser.passed() + parser.header_len() as u64;
                    let Some(array) = parser.large() else {
                        continue;
                    };
                    if let Some(found) = known::recognise(file, at..range.end, array)? {
                        header.truncate(parser.header_len());
                        parser.pass_over(found.len, found.content);
                    }
                }
            }
        }
        header.truncate(parser.header_len());
        let mut gguf = parser.finish(header)?;
        file.remember(range.start..range.start + gguf.header_bytes())?;
        for tensor in &mut gguf.tensors {
            tensor.offset += range.start;
        }
        Ok(gguf)
    }

    /// Adds another part's tensors, of names that are not there.
    pub(crate) fn extend(&mut self, tensors: Vec<TensorInfo>) {
        for tensor in tensors {
            let index = self.tensors.len() as u32; // at most MAX_TENSORS
            self.by_name.insert(tensor.name.as_str().into(), index);
            self.tensors.push(tensor);
        }
    }

    /// What is wrong with the file and does not keep it from being read, at most
    /// [`MAX_TOLERATED`](crate::limits::MAX_TOLERATED) remarks.
    pub fn tolerated(&self) -> &[String] {
        &self.tolerated
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// `general.alignment`, or its default of 32.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Bytes from the start of the file to the end of the tensor table.
    pub fn header_bytes(&self) -> u64 {
        self.header.len() as u64 + self.passed
    }

    /// Bytes of the header that are kept in memory.
    pub fn kept_bytes(&self) -> usize {
        self.header.len()
    }

    /// Whether all of the header is kept.
    pub fn is_whole(&self) -> bool {
        self.passed == 0
    }

    /// Where the tensor data begins: the end of the header rounded up to the alignment.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// The tensor table in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i as usize])
    }

    /// The keys in the file's order, but for those that are no text.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let entries = self.entries.iter().zip(0..);
        let named = entries.filter(|(entry, index)| self.by_key.get(&entry.key) == Some(index));
        named.map(|(entry, _)| &*entry.key)
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        self.by_key.get(key).map(|&i| &self.entries[i as usize])
    }

    /// The value of `key`, of whatever type it is; `None` also for an array that was not kept.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        let entry = self.entry(key).filter(|entry| entry.is_kept);
        entry.map(|entry| self.value_of(entry))
    }

    /// Fingerprint of the value of `key`, valid in this process, also for values that are not kept:
    /// the number of its type (of an array, of its elements), the count of elements, and a digest
    /// of its bytes.
    pub fn digest_of_value(&self, key: &str) -> Option<[u8; 18]> {
        let entry = self.entry(key)?;
        let (element, count) = match entry.array {
            Some((ty, count)) => (ty as u8, count as u64),
            // No array of one element is taken for the element.
            None => (u8::MAX, 1),
        };
        let made = || Content::of(&self.header[entry.bytes.clone()]);
        let mut digest = [0; 18];
        digest[..2].copy_from_slice(&[entry.ty as u8, element]);
        digest[2..10].copy_from_slice(&count.to_le_bytes());
        digest[10..].copy_from_slice(&entry.content.unwrap_or_else(made).to_bytes());
        Some(digest)
    }

    /// The place of a value that is kept.
    fn kept(&self, key: &str) -> Result<Option<&Entry>, Error> {
        match self.entry(key) {
            Some(entry) if !entry.is_kept => Err(Error::NotKept {
                key: key.to_owned(),
            }),
            entry => Ok(entry),
        }
    }

    fn value_of(&self, entry: &Entry) -> Value<'_> {
        let bytes = &self.header[entry.bytes.clone()];
        match entry.array {
            Some((ty, len)) => Value::Array(Array { ty, len, bytes }),
            None => {
                decode(entry.ty, bytes)
                    .expect("the parser has walked this value")
                    .0
            }
        }
    }

    fn wrong_type(&self, entry: &Entry, expected: &'static str) -> Error {
        let found = match entry.array {
            Some((ty, len)) => Described::Array(ty, len as u64),
            None => Described::One(entry.ty),
        };
        Error::WrongType {
            key: entry.key.to_string(),
            expected,
            found,
        }
    }

    /// The text of `key`; `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no string, [`Error::NotUtf8`] where it is no text.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        match self.value_of(entry) {
            Value::String(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(e) => Err(Error::NotUtf8 {
                    key: key.to_owned(),
                    valid_up_to: e.valid_up_to(),
                }),
            },
            _ => Err(self.wrong_type(entry, "a string")),
        }
    }

    /// The text of `key` for people, what is no UTF-8 replaced; `None` where it is absent or no
    /// string.
    pub fn str_lossy(&self, key: &str) -> Option<std::borrow::Cow<'_, str>> {
        match self.value(key)? {
            Value::String(bytes) => Some(String::from_utf8_lossy(bytes)),
            _ => None,
        }
    }

    fn integer<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<T>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        let Some(value) = self.value_of(entry).as_integer() else {
            return Err(self.wrong_type(entry, expected));
        };
        match T::try_from(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(Error::ValueRange {
                key: key.to_owned(),
                value,
                expected,
            }),
        }
    }

    /// The number at `key`, of any integer type whose value fits; `Ok(None)` where the key is
    /// absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no integer, [`Error::ValueRange`] where it does not fit.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.integer(key, "an unsigned 64-bit integer")
    }

    /// As [`u64`](Self::u64), in 32 bits.
    ///
    /// # Errors
    /// As [`u64`](Self::u64).
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.integer(key, "an unsigned 32-bit integer")
    }

    /// As [`u64`](Self::u64), signed.
    ///
    /// # Errors
    /// As [`u64`](Self::u64).
    pub fn i64(&self, key: &str) -> Result<Option<i64>, Error> {
        self.integer(key, "a signed 64-bit integer")
    }

    /// The number at `key`, an f32 or an f64 (rounded); `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is neither.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        match self.value_of(entry) {
            Value::F32(x) => Ok(Some(x)),
            Value::F64(x) => Ok(Some(x as f32)),
            _ => Err(self.wrong_type(entry, "a floating-point number")),
        }
    }

    /// The bool at `key`; `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        match self.value_of(entry) {
            Value::Bool(x) => Ok(Some(x)),
            _ => Err(self.wrong_type(entry, "a bool")),
        }
    }

    /// The array of strings at `key`; `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Strings<'_>>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        match entry.array {
            Some((ValueType::String, len)) => Ok(Some(Strings {
                len,
                bytes: &self.header[entry.bytes.clone()],
            })),
            _ => Err(self.wrong_type(entry, "an array of strings")),
        }
    }

    fn integers<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<Vec<T>>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        let Value::Array(array) = self.value_of(entry) else {
            return Err(self.wrong_type(entry, expected));
        };
        let mut numbers = Vec::with_capacity(array.len());
        for value in array.iter() {
            let Some(value) = value.as_integer() else {
                return Err(self.wrong_type(entry, expected));
            };
            match T::try_from(value) {
                Ok(x) => numbers.push(x),
                Err(_) => {
                    return Err(Error::ValueRange {
                        key: key.to_owned(),
                        value,
                        expected,
                    });
                }
            }
        }
        Ok(Some(numbers))
    }

    /// The array of integers at `key`, of any integer type whose values fit;
    /// `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no array of integers, [`Error::ValueRange`]
    /// where an element does not fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, Error> {
        if let Some(array) = self.array_of(key, ValueType::I32) {
            let (words, _) = array.bytes.as_chunks::<4>();
            return Ok(Some(
                words.iter().map(|word| i32::from_le_bytes(*word)).collect(),
            ));
        }
        self.integers(key, "an array of signed 32-bit integers")
    }

    /// The array of bytes at `key`; `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no array of 8-bit integers.
    pub fn bytes(&self, key: &str) -> Result<Option<Vec<u8>>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        let kinds = [ValueType::U8, ValueType::I8];
        let mut arrays = kinds.into_iter().map(|kind| self.array_of(key, kind));
        match arrays.find_map(|array| array) {
            Some(array) => Ok(Some(array.bytes.to_vec())),
            None => Err(self.wrong_type(entry, "an array of 8-bit integers")),
        }
    }

    /// As [`i32s`](Self::i32s), unsigned.
    ///
    /// # Errors
    /// As [`i32s`](Self::i32s).
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>, Error> {
        self.integers(key, "an array of unsigned 32-bit integers")
    }

    /// The array of f32 or f64 (rounded) at `key`; `Ok(None)` where the key is absent.
    ///
    /// # Errors
    /// [`Error::WrongType`] where it is no array of floating-point numbers.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        let Some(entry) = self.kept(key)? else {
            return Ok(None);
        };
        let Value::Array(array) = self.value_of(entry) else {
            return Err(self.wrong_type(entry, "an array of f32"));
        };
        match array.ty {
            ValueType::F32 => Ok(Some(
                array
                    .bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| f32::from_le_bytes(*word))
                    .collect(),
            )),
            ValueType::F64 => Ok(Some(
                array
                    .bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| f64::from_le_bytes(*word) as f32)
                    .collect(),
            )),
            _ => Err(self.wrong_type(entry, "an array of f32")),
        }
    }

    fn array_of(&self, key: &str, ty: ValueType) -> Option<Array<'_>> {
        match self.value(key) {
            Some(Value::Array(array)) if array.ty == ty => Some(array),
            _ => None,
        }
    }
}
