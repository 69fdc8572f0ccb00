//! The walk over a header's bytes (GGUF spec, "File Structure").
//!
//! The parser is handed the bytes there are and either finishes or says how long the header must at
//! least be, judging by the counts and lengths it has seen. So a reader that follows it never
//! touches a byte of tensor data, however large the file, and a lying count is refused before
//! more is read or allocated for it than the file could hold.
//!
//! ```text
//! Start -> Keys -> (Elements -> Keys)* -> Tensors -> Done
//! ```
//!
//! *Invariants:* `pos` never passes the end of the bytes given; a record is taken whole or not at
//! all, so the walk resumes at the record where it stopped; what follows `pos` takes at least
//! `least_rest` bytes (tests `pieces_come_to_the_whole_and_never_reach_behind_the_header`,
//! `arbitrary_bytes_never_panic`).

mod extent;
mod large;
mod read;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::gguf::{Entry, Gguf};
use crate::known;
use crate::limits::{
    DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_ARRAY_DEPTH, MAX_DIMS, MAX_HEADER_BYTES, MAX_KEY_BYTES,
    MAX_KEYS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS, MAX_TOLERATED, MIN_ALIGNMENT,
};
use crate::value::ValueType;
use crate::{Error, OtherUse, TensorType};

use extent::{Record, place, refuse_overlap};
use read::{
    Frame, Stop, array_head, limit, odd_bool, string_len, strings, take, text, u32_at, u64_at,
    value_type,
};

const MAGIC: [u8; 4] = *b"GGUF";
/// Magic, version and the two counts.
const START_BYTES: u64 = 24;
/// Key length, one byte of key, value type, one byte of value.
const LEAST_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// Name length, one byte of name, dimension count, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 1 + 4 + 4 + 8;
/// Type and count of an array.
const ARRAY_HEAD_BYTES: u64 = 4 + 8;

/// Result of [`Parser::advance`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The header is complete.
    Done,
    /// The header is at least this many bytes long, no more than the file, and more than were
    /// given.
    More(u64),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Keys,
    Elements,
    Tensors,
    Done,
}

#[derive(Debug)]
pub(crate) struct Parser {
    file_len: u64,
    pos: usize,
    stage: Stage,
    version: u32,
    n_tensors: u64,
    n_keys: u64,
    entries: Vec<Entry>,
    by_key: HashMap<Box<str>, u32>,
    /// Arrays open around `pos`, outermost first; they belong to the last entry.
    frames: Vec<Frame>,
    records: Vec<Record>,
    by_name: HashMap<Box<str>, u32>,
    tolerated: Vec<String>,
    /// Whether the walk stops before large arrays, to have known ones passed over.
    recognises: bool,
    /// Whether the parser has to stop before the elements of the current array.
    is_before_large: bool,
    /// Bytes of the file in front of `pos` that are none of those given.
    passed: u64,
}

impl Parser {
    pub(crate) fn new(file_len: u64) -> Parser {
        Parser {
            file_len,
            pos: 0,
            stage: Stage::Start,
            version: 0,
            n_tensors: 0,
            n_keys: 0,
            entries: Vec::new(),
            by_key: HashMap::new(),
            frames: Vec::new(),
            records: Vec::new(),
            by_name: HashMap::new(),
            tolerated: Vec::new(),
            recognises: false,
            is_before_large: false,
            passed: 0,
        }
    }

    /// Bytes walked of those given; all of them are the header's once the walk is done.
    pub(crate) fn header_len(&self) -> usize {
        self.pos
    }

    /// Tensors that the file says it has; 0 before its first bytes.
    pub(crate) fn n_tensors(&self) -> u64 {
        self.n_tensors
    }

    /// The keys walked so far, of `bytes` as they were given last, and no tensors.
    pub(crate) fn so_far(&self, bytes: &[u8]) -> Gguf {
        let mut entries = self.entries.clone();
        let mut by_key = self.by_key.clone();
        // The array that is being walked has no end yet.
        if self.stage == Stage::Elements
            && let Some(last) = entries.pop()
        {
            by_key.remove(&last.key);
        }
        Gguf {
            version: self.version,
            alignment: DEFAULT_ALIGNMENT,
            data_start: 0,
            header: bytes[..self.pos].to_vec(),
            entries,
            by_key,
            passed: self.passed,
            tensors: Vec::new(),
            by_name: HashMap::new(),
            tolerated: Vec::new(),
        }
    }

    /// Walks on. `bytes` is the start of the file and no shorter than in the call before.
    pub(crate) fn advance(&mut self, bytes: &[u8]) -> Result<Step, Error> {
        loop {
            if let Some(step) = self.advance_to_large(bytes)? {
                return Ok(step);
            }
        }
    }

    /// Walks on; `None` before the elements of a large array, once, where the walk stops at these.
    pub(crate) fn advance_to_large(&mut self, bytes: &[u8]) -> Result<Option<Step>, Error> {
        // No position beyond the limit is ever reached, so every one fits 32 bits.
        let bytes = &bytes[..bytes.len().min(MAX_HEADER_BYTES as usize)];
        match self.walk(bytes) {
            Ok(()) => Ok(Some(Step::Done)),
            Err(Stop::Large) => Ok(None),
            Err(Stop::Bad(error)) => Err(error),
            Err(Stop::Need(need)) => {
                let need = need.saturating_add(self.least_rest());
                let end = need.saturating_add(self.passed);
                if end > self.file_len {
                    return Err(self.truncated(end, self.file_len));
                }
                if end > MAX_HEADER_BYTES {
                    return Err(Error::Limit {
                        what: "the length of the header".into(),
                        offset: self.pos as u64,
                        found: end,
                        max: MAX_HEADER_BYTES,
                    });
                }
                Ok(Some(Step::More(need)))
            }
        }
    }

    /// The error for a header of which `need` bytes are needed and `available` are there.
    pub(crate) fn truncated(&self, need: u64, available: u64) -> Error {
        let what = match self.stage {
            Stage::Start => "its first 24 bytes".to_owned(),
            Stage::Keys => format!("metadata key {} of {}", self.entries.len() + 1, self.n_keys),
            Stage::Elements => format!("the array of metadata key \"{}\"", self.current_key()),
            Stage::Tensors | Stage::Done => format!(
                "the record of tensor {} of {}",
                self.records.len() + 1,
                self.n_tensors
            ),
        };
        Error::Truncated {
            what,
            offset: self.pos as u64,
            need,
            available,
        }
    }

    fn current_key(&self) -> &str {
        self.entries.last().map_or("", |entry| &entry.key)
    }

    /// The fewest bytes that must follow the record at `pos`.
    fn least_rest(&self) -> u64 {
        let (mut keys, mut tensors) = (
            self.n_keys - self.entries.len() as u64,
            self.n_tensors - self.records.len() as u64,
        );
        // The record at `pos` is counted by what it asked for.
        match self.stage {
            Stage::Keys => keys = keys.saturating_sub(1),
            Stage::Tensors => tensors = tensors.saturating_sub(1),
            Stage::Start | Stage::Elements | Stage::Done => {}
        }
        let mut least = keys * LEAST_KEY_BYTES + tensors * LEAST_TENSOR_BYTES;
        if let Some((innermost, outer)) = self.frames.split_last() {
            least += match innermost.ty.reserve_bytes() {
                Some(_) => 0, // taken in one piece
                None => innermost.left.saturating_sub(1) * innermost.ty.least_bytes(),
            };
            least += outer
                .iter()
                .map(|frame| frame.left * frame.ty.least_bytes())
                .sum::<u64>();
        }
        least
    }

    fn walk(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        loop {
            match self.stage {
                Stage::Start => self.start(bytes)?,
                Stage::Keys if (self.entries.len() as u64) < self.n_keys => self.key(bytes)?,
                Stage::Keys => self.stage = Stage::Tensors,
                Stage::Elements if std::mem::take(&mut self.is_before_large) => {
                    return Err(Stop::Large);
                }
                Stage::Elements => self.elements(bytes)?,
                Stage::Tensors if (self.records.len() as u64) < self.n_tensors => {
                    self.tensor(bytes)?
                }
                Stage::Tensors => self.stage = Stage::Done,
                Stage::Done => return Ok(()),
            }
        }
    }

    fn start(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        // A file too short for the rest still deserves to hear that it is no GGUF.
        let first = if self.file_len < START_BYTES {
            4
        } else {
            START_BYTES
        };
        let magic = take::<4>(bytes, 0).map_err(|_| Stop::Need(first))?;
        if magic != MAGIC {
            let error = OtherUse::of_beginning(bytes)
                .map_or(Error::BadMagic, |what| Error::Mishap { what });
            return Err(error.into());
        }
        let version = u32_at(bytes, 4).map_err(|_| Stop::Need(START_BYTES))?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=255) => {
                return Err(Error::BigEndian {
                    version: version.swap_bytes(),
                }
                .into());
            }
            found => return Err(Error::Version { found }.into()),
        }
        let n_tensors = u64_at(bytes, 8).map_err(|_| Stop::Need(START_BYTES))?;
        let n_keys = u64_at(bytes, 16)?;
        limit(n_tensors, MAX_TENSORS, 8, || "the number of tensors".into())?;
        limit(n_keys, MAX_KEYS, 16, || {
            "the number of metadata keys".into()
        })?;
        let need = START_BYTES + n_keys * LEAST_KEY_BYTES + n_tensors * LEAST_TENSOR_BYTES;
        if need > self.file_len {
            let what = format!("its {n_keys} metadata keys and {n_tensors} tensor records");
            let (offset, available) = (START_BYTES, self.file_len);
            return Err(Error::Truncated {
                what,
                offset,
                need,
                available,
            }
            .into());
        }
        (self.version, self.n_tensors, self.n_keys) = (version, n_tensors, n_keys);
        self.pos = START_BYTES as usize;
        self.stage = Stage::Keys;
        Ok(())
    }

    /// A key, its value type, and its value; of an array the head only.
    fn key(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let index = self.entries.len() as u64;
        let offset = self.pos as u64;
        let len = u64_at(bytes, self.pos)?;
        limit(len, MAX_KEY_BYTES, offset, || {
            format!("the length of metadata key {index}")
        })?;
        let (key, at) = text(bytes, self.pos + 8, len, 4 + 1)?;
        // llama.cpp takes names that no reader asks for as they are.
        let is_name = !key.is_empty() && std::str::from_utf8(key).is_ok();
        let key = &*String::from_utf8_lossy(key);
        if !is_name {
            self.tolerate(|| {
                let what = if key.is_empty() { "empty" } else { "not UTF-8" };
                format!("metadata key {index} at byte {offset} is {what}; it is not read")
            });
        } else if self.by_key.contains_key(key) {
            return Err(Error::DuplicateKey {
                key: key.to_owned(),
                offset,
            }
            .into());
        }
        let ty = value_type(key, bytes, at)?;
        let at = at + 4;
        let mut entry = Entry {
            key: key.into(),
            ty,
            bytes: at..at,
            array: None,
            content: None,
            is_kept: true,
        };
        let next = self.value(&mut entry, bytes)?;
        self.pos = entry.bytes.end;
        if is_name {
            self.by_key.insert(entry.key.clone(), index as u32);
        }
        self.entries.push(entry);
        self.stage = next;
        Ok(())
    }

    /// Notes where the value of an entry ends, of an array the head only; what comes behind it.
    fn value(&mut self, entry: &mut Entry, bytes: &[u8]) -> Result<Stage, Stop> {
        let (key, ty, at) = (&*entry.key, entry.ty, entry.bytes.start);
        match ty {
            ValueType::String => {
                let len = string_len(key, bytes, at)?;
                let (value, end) = text(bytes, at + 8, len, 0)?;
                entry.bytes.end = end;
                if std::str::from_utf8(value).is_err() {
                    self.tolerate(|| {
                        format!("the text of metadata key \"{key}\" at byte {at} is not UTF-8")
                    });
                }
            }
            ValueType::Array => {
                let frame = array_head(key, bytes, at)?;
                let start = at + ARRAY_HEAD_BYTES as usize;
                entry.bytes = start..start;
                entry.array = Some((frame.ty, frame.left as usize));
                self.is_before_large = self.recognises
                    && known::is_of_vocabulary(&entry.key)
                    && known::is_large(frame.ty, frame.left);
                self.frames.push(frame);
                return Ok(Stage::Elements);
            }
            _ => {
                let size = ty.reserve_bytes().unwrap_or(0);
                let Some(value) = bytes.get(at..at + size) else {
                    return Err(Stop::Need((at + size) as u64));
                };
                if ty == ValueType::Bool {
                    let odd = odd_bool(value);
                    self.tolerate_bool(key, at, odd);
                }
                entry.bytes.end = at + size;
            }
        }
        Ok(Stage::Keys)
    }

    /// The elements of the arrays in `frames`.
    fn elements(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let Some(entry) = self.entries.last_mut() else {
            return Ok(());
        };
        let mut odd = None;
        while let Some(depth) = self.frames.len().checked_sub(1) {
            let frame = &mut self.frames[depth];
            if frame.left == 0 {
                self.frames.pop();
                continue;
            }
            match frame.ty {
                ValueType::String => {
                    strings(&entry.key, bytes, &mut self.pos, &mut frame.left)?;
                }
                ValueType::Array => {
                    let head = array_head(&entry.key, bytes, self.pos)?;
                    if depth + 2 > MAX_ARRAY_DEPTH {
                        return Err(Error::NestedTooDeep {
                            key: entry.key.to_string(),
                            offset: self.pos as u64,
                        }
                        .into());
                    }
                    frame.left -= 1;
                    self.pos += ARRAY_HEAD_BYTES as usize;
                    self.frames.push(head);
                }
                ty => {
                    // At most 2^24 elements of 8 bytes: no overflow.
                    let end = self.pos + frame.left as usize * ty.reserve_bytes().unwrap_or(0);
                    let Some(values) = bytes.get(self.pos..end) else {
                        return Err(Stop::Need(end as u64));
                    };
                    odd = match ty {
                        ValueType::Bool => odd.or(odd_bool(values).map(|(i, b)| (self.pos + i, b))),
                        _ => odd,
                    };
                    frame.left = 0;
                    self.pos = end;
                }
            }
        }
        entry.bytes.end = self.pos;
        if let Some((ty, count)) = entry.array
            && self.recognises
            && known::is_of_vocabulary(&entry.key)
            && known::is_large(ty, count as u64)
        {
            entry.content = Some(known::note(ty, count as u64, &bytes[entry.bytes.clone()]));
        }
        let key = entry.key.clone();
        self.stage = Stage::Keys;
        self.tolerate_bool(&key, 0, odd);
        Ok(())
    }

    /// Notes what is wrong with the file and does not keep it from being read.
    fn tolerate(&mut self, what: impl FnOnce() -> String) {
        if self.tolerated.len() < MAX_TOLERATED {
            self.tolerated.push(what());
        }
    }

    /// Notes a bool that is neither 0 nor 1, if there is one, so far behind `at`.
    fn tolerate_bool(&mut self, key: &str, at: usize, odd: Option<(usize, u8)>) {
        if let Some((i, found)) = odd {
            self.tolerate(|| {
                let offset = at + i;
                format!("metadata key \"{key}\" has a bool of {found} at byte {offset}; it counts as true")
            });
        }
    }

    /// A tensor's name, which no other has, and where it ends.
    fn tensor_name<'b>(&self, bytes: &'b [u8]) -> Result<(&'b str, usize), Stop> {
        let index = self.records.len() as u64;
        let offset = self.pos as u64;
        let len = u64_at(bytes, self.pos)?;
        limit(len, MAX_TENSOR_NAME_BYTES, offset, || {
            format!("the length of the name of tensor {index}")
        })?;
        let (name, at) = text(bytes, self.pos + 8, len, 4 + 4 + 8)?;
        let bad = |reason| Error::BadTensorName {
            index,
            offset,
            reason,
        };
        let tensor = std::str::from_utf8(name).map_err(|_| bad("not UTF-8"))?;
        if tensor.is_empty() {
            return Err(bad("empty").into());
        }
        if self.by_name.contains_key(tensor) {
            return Err(Error::DuplicateTensor {
                tensor: tensor.to_owned(),
                offset,
            }
            .into());
        }
        Ok((tensor, at))
    }

    /// A tensor's record: name, dimensions, type, offset.
    fn tensor(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let (tensor, at) = self.tensor_name(bytes)?;
        let n_dims = u32_at(bytes, at)?;
        if n_dims > MAX_DIMS {
            return Err(Error::TooManyDims {
                tensor: tensor.to_owned(),
                offset: at as u64,
                found: n_dims,
            }
            .into());
        }
        let at = at + 4;
        let end = at + 8 * n_dims as usize + 4 + 8;
        if bytes.len() < end {
            return Err(Stop::Need(end as u64));
        }
        let mut dims = [1; 4];
        for (i, dim) in dims.iter_mut().take(n_dims as usize).enumerate() {
            *dim = u64_at(bytes, at + 8 * i)?;
        }
        if dims.contains(&0) {
            return Err(Error::ZeroDim {
                tensor: tensor.to_owned(),
                dims,
            }
            .into());
        }
        let ty = tensor_type(tensor, u32_at(bytes, end - 12)?)?;
        let record = Record {
            name: tensor.into(),
            dims,
            n_dims,
            ty,
            offset: u64_at(bytes, end - 8)?,
        };
        let index = self.records.len() as u32;
        self.by_name.insert(record.name.clone(), index);
        self.records.push(record);
        self.pos = end;
        Ok(())
    }

    /// Checks the tensors against each other and the file, and puts everything together.
    /// `header` is the bytes walked.
    pub(crate) fn finish(self, header: Vec<u8>) -> Result<Gguf, Error> {
        assert!(
            self.stage == Stage::Done && header.len() == self.pos,
            "finish is called once the walk is done"
        );
        let mut gguf = Gguf {
            version: self.version,
            alignment: DEFAULT_ALIGNMENT,
            data_start: 0,
            header,
            entries: self.entries,
            by_key: self.by_key,
            passed: self.passed,
            tensors: Vec::new(),
            by_name: self.by_name,
            tolerated: self.tolerated,
        };
        if let Some(alignment) = gguf.u64("general.alignment")? {
            if !alignment.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&alignment)
            {
                return Err(Error::Alignment { found: alignment });
            }
            gguf.alignment = alignment;
        }
        gguf.data_start = gguf.header_bytes().next_multiple_of(gguf.alignment);
        let (alignment, data_start) = (gguf.alignment, gguf.data_start);
        gguf.tensors = self
            .records
            .into_iter()
            .map(|record| place(record, alignment, data_start, self.file_len))
            .collect::<Result<_, _>>()?;
        refuse_overlap(&gguf.tensors)?;
        Ok(gguf)
    }
}

/// The type of this number.
fn tensor_type(tensor: &str, id: u32) -> Result<TensorType, Error> {
    let tensor = || tensor.to_owned();
    TensorType::from_u32(id).ok_or_else(|| match TensorType::removed_name(id) {
        Some(name) => Error::RemovedTensorType {
            tensor: tensor(),
            found: id,
            name,
        },
        None => Error::UnknownTensorType {
            tensor: tensor(),
            found: id,
        },
    })
}
