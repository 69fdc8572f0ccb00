//! Numbers, strings and array heads at a position of the header, each checked before it is
//! believed.

use crate::Error;
use crate::limits::{MAX_ARRAY_LEN, MAX_STRING_BYTES};
use crate::value::ValueType;

/// Why the walk stopped: at an error, or at the end of the bytes given.
pub(super) enum Stop {
    Bad(Error),
    /// Bytes from the start of the file that the current record needs.
    Need(u64),
    /// Before the elements of an array that may be known.
    Large,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Bad(error)
    }
}

/// An array whose elements are being walked.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) ty: ValueType,
    pub(super) left: u64,
}

/// `N` bytes at `at`, or what length they need.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Stop> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => Ok(*chunk),
        None => Err(Stop::Need((at + N) as u64)),
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Stop> {
    take(bytes, at).map(u32::from_le_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Stop> {
    take(bytes, at).map(u64::from_le_bytes)
}

pub(super) fn limit(
    found: u64,
    max: u64,
    offset: u64,
    what: impl FnOnce() -> String,
) -> Result<(), Error> {
    if found > max {
        Err(Error::Limit {
            what: what(),
            offset,
            found,
            max,
        })
    } else {
        Ok(())
    }
}

/// `len` bytes at `at` and the position behind them; `behind` bytes must follow and are
/// asked for together with these.
pub(super) fn text(bytes: &[u8], at: usize, len: u64, behind: u64) -> Result<(&[u8], usize), Stop> {
    let end = at + len as usize; // `len` was held against a limit far below 2^32
    match bytes.get(at..end) {
        Some(text) => Ok((text, end)),
        None => Err(Stop::Need(end as u64 + behind)),
    }
}

pub(super) fn value_type(key: &str, bytes: &[u8], at: usize) -> Result<ValueType, Stop> {
    let found = u32_at(bytes, at)?;
    ValueType::from_u32(found).ok_or_else(|| {
        Error::UnknownValueType {
            key: key.to_owned(),
            offset: at as u64,
            found,
        }
        .into()
    })
}

pub(super) fn string_len(key: &str, bytes: &[u8], at: usize) -> Result<u64, Stop> {
    let len = u64_at(bytes, at)?;
    limit(len, MAX_STRING_BYTES, at as u64, || {
        format!("the length of a string of metadata key \"{key}\"")
    })?;
    Ok(len)
}

pub(super) fn array_head(key: &str, bytes: &[u8], at: usize) -> Result<Frame, Stop> {
    let ty = value_type(key, bytes, at)?;
    let left = u64_at(bytes, at + 4)?;
    limit(left, MAX_ARRAY_LEN, at as u64 + 4, || {
        format!("the length of an array of metadata key \"{key}\"")
    })?;
    Ok(Frame { ty, left })
}

/// A bool that is neither 0 nor 1: its place among `values`, and its byte.
pub(super) fn odd_bool(values: &[u8]) -> Option<(usize, u8)> {
    let at = values.iter().position(|&byte| byte > 1)?;
    Some((at, values[at]))
}

/// Walks up to `left` strings from `pos`; the hot loop of every large header.
pub(super) fn strings(
    key: &str,
    bytes: &[u8],
    pos: &mut usize,
    left: &mut u64,
) -> Result<(), Stop> {
    while *left > 0 {
        let len = match bytes.get(*pos..).and_then(|rest| rest.first_chunk()) {
            Some(chunk) => u64::from_le_bytes(*chunk),
            None => return Err(Stop::Need(*pos as u64 + 8)),
        };
        // One comparison covers what is there and, since less is there than 2^64, overflow.
        if len > (bytes.len() - *pos - 8) as u64 || len > MAX_STRING_BYTES {
            string_len(key, bytes, *pos)?;
            return Err(Stop::Need(*pos as u64 + 8 + len));
        }
        *pos += 8 + len as usize;
        *left -= 1;
    }
    Ok(())
}
