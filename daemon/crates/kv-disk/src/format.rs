//! The bytes of a segment file. All integers are little-endian.
//!
//! ```text
//!   segment: header (32 bytes), then records until the end
//!   header:  magic "RFKVDISK", version u32, 0 u32, number u64, 0 u32, CRC-32 of all before
//!   record:  header (88 bytes), payload
//!   header:  magic "KVRC", slot u16, kind u8, 0 u8, payload bytes u32, model [16], scope [16],
//!            digest [32], CRC-32 of the payload, CRC-32 of the segment's number, the record's
//!            offset and all before
//! ```
//!
//! The last checksum binds a record to its place: bytes of another segment, or of another offset,
//! are no record here.

use crate::files::SegmentFile;
use crate::index::{Key, Kind, ModelTag};

/// Version of the format. A file of another version is skipped.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes of a segment's header.
pub(crate) const SEGMENT_HEADER: u64 = 32;

/// Bytes of a record's header.
pub(crate) const RECORD_HEADER: u64 = 88;

/// Maximum number of bytes of a payload.
pub(crate) const PAYLOAD_MAX: u64 = 1 << 30;

const SEGMENT_MAGIC: &[u8; 8] = b"RFKVDISK";
const RECORD_MAGIC: &[u8; 4] = b"KVRC";

/// Where the fields of a record's header begin.
mod at {
    pub(super) const SLOT: usize = 4;
    pub(super) const KIND: usize = 6;
    pub(super) const LEN: usize = 8;
    pub(super) const MODEL: usize = 12;
    pub(super) const SCOPE: usize = 28;
    pub(super) const DIGEST: usize = 44;
    pub(super) const PAYLOAD_CRC: usize = 76;
    pub(super) const ZERO: usize = 80;
    pub(super) const CRC: usize = 84;
}

/// A record that a scan has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The entry's name.
    pub key: Key,
    /// What the payload is.
    pub kind: Kind,
    /// The model that it belongs to.
    pub model: ModelTag,
    /// Where the record's header begins.
    pub offset: u64,
    /// Bytes of the payload.
    pub bytes: u32,
    /// Checksum of the payload.
    pub(crate) payload_crc: u32,
}

/// How the scan of a segment ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scanned {
    /// All bytes of the segment file are valid records.
    Whole,
    /// The last record is incomplete; records end at this offset.
    Torn(u64),
    /// A record's header is damaged at this offset. What follows is not read.
    Damaged(u64),
    /// The file is a segment of another version of the format.
    OtherVersion(u32),
    /// The file is not a segment, or not the one that its name claims.
    Foreign,
    /// The file cannot be read.
    Unreadable,
}

/// Whether a checksum is right. Fuzzers see what is behind it.
fn is_right(found: u32, computed: u32) -> bool {
    cfg!(fuzzing) || found == computed
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// The header of a segment.
pub(crate) fn segment_header(number: u64) -> [u8; SEGMENT_HEADER as usize] {
    let mut header = [0; SEGMENT_HEADER as usize];
    header[..8].copy_from_slice(SEGMENT_MAGIC);
    header[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&number.to_le_bytes());
    let crc = crc32fast::hash(&header[..28]);
    header[28..].copy_from_slice(&crc.to_le_bytes());
    header
}

/// Checks the header of a segment; `None` if it is the one of `number`.
fn check_segment(header: &[u8; SEGMENT_HEADER as usize], number: u64) -> Option<Scanned> {
    if &header[..8] != SEGMENT_MAGIC {
        return Some(Scanned::Foreign);
    }
    if !is_right(u32_at(header, 28), crc32fast::hash(&header[..28])) {
        // A later format may have other fields behind the version.
        let version = u32_at(header, 8);
        return Some(match version {
            FORMAT_VERSION => Scanned::Damaged(0),
            other => Scanned::OtherVersion(other),
        });
    }
    match u32_at(header, 8) {
        FORMAT_VERSION if u64::from_le_bytes(array(header, 16)) == number => None,
        FORMAT_VERSION => Some(Scanned::Foreign),
        other => Some(Scanned::OtherVersion(other)),
    }
}

/// What a record header's checksum is of.
fn record_crc(segment: u64, offset: u64, header: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&segment.to_le_bytes());
    hasher.update(&offset.to_le_bytes());
    hasher.update(&header[..at::CRC]);
    hasher.finalize()
}

/// The header of a record at a place.
pub(crate) fn record_header(
    (segment, offset): (u64, u64),
    key: &Key,
    (kind, model): (Kind, ModelTag),
    payload: &[u8],
) -> [u8; RECORD_HEADER as usize] {
    let mut header = [0; RECORD_HEADER as usize];
    header[..4].copy_from_slice(RECORD_MAGIC);
    header[at::SLOT..at::KIND].copy_from_slice(&key.slot.to_le_bytes());
    header[at::KIND] = kind.byte();
    header[at::LEN..at::MODEL].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[at::MODEL..at::SCOPE].copy_from_slice(&model.0);
    header[at::SCOPE..at::DIGEST].copy_from_slice(&key.scope);
    header[at::DIGEST..at::PAYLOAD_CRC].copy_from_slice(&key.digest);
    let crc = crc32fast::hash(payload);
    header[at::PAYLOAD_CRC..at::ZERO].copy_from_slice(&crc.to_le_bytes());
    let crc = record_crc(segment, offset, &header);
    header[at::CRC..].copy_from_slice(&crc.to_le_bytes());
    header
}

/// The record that a header at a place describes; `None` if it is damaged.
pub(crate) fn read_record(
    (segment, offset): (u64, u64),
    header: &[u8; RECORD_HEADER as usize],
) -> Option<Found> {
    let bytes = u32_at(header, at::LEN);
    let is_sound = &header[..4] == RECORD_MAGIC
        && is_right(u32_at(header, at::CRC), record_crc(segment, offset, header))
        && u64::from(bytes) <= PAYLOAD_MAX;
    if !is_sound {
        return None;
    }
    Some(Found {
        key: Key {
            scope: array(header, at::SCOPE),
            digest: array(header, at::DIGEST),
            slot: u16::from_le_bytes(array(header, at::SLOT)),
        },
        kind: Kind::of(header[at::KIND])?,
        model: ModelTag(array(header, at::MODEL)),
        offset,
        bytes,
        payload_crc: u32_at(header, at::PAYLOAD_CRC),
    })
}

/// Reads the headers of a segment of `bytes` bytes, and hands each record to `found`, until that
/// returns false. Payloads are not read.
pub fn scan(
    file: &dyn SegmentFile,
    number: u64,
    bytes: u64,
    mut found: impl FnMut(Found) -> bool,
) -> Scanned {
    let mut header = [0; SEGMENT_HEADER as usize];
    if bytes < SEGMENT_HEADER {
        return Scanned::Torn(0);
    }
    if file.read_at(&mut header, 0).is_err() {
        return Scanned::Unreadable;
    }
    if let Some(other) = check_segment(&header, number) {
        return other;
    }
    let mut offset = SEGMENT_HEADER;
    let mut header = [0; RECORD_HEADER as usize];
    while offset < bytes {
        if bytes - offset < RECORD_HEADER {
            return Scanned::Torn(offset);
        }
        if file.read_at(&mut header, offset).is_err() {
            return Scanned::Unreadable;
        }
        let Some(record) = read_record((number, offset), &header) else {
            return Scanned::Damaged(offset);
        };
        let end = offset + RECORD_HEADER + u64::from(record.bytes);
        if end > bytes {
            return Scanned::Torn(offset);
        }
        if !found(record) {
            return Scanned::Whole;
        }
        offset = end;
    }
    Scanned::Whole
}

/// Reads the payload of the record at an offset of a segment; `None` if it is not the entry of
/// `key` or is damaged.
///
/// # Errors
/// What the system reports.
pub fn read_payload(
    file: &dyn SegmentFile,
    (segment, offset): (u64, u64),
    key: &Key,
) -> std::io::Result<Option<(Found, Vec<u8>)>> {
    let mut header = [0; RECORD_HEADER as usize];
    file.read_at(&mut header, offset)?;
    let record = read_record((segment, offset), &header).filter(|record| record.key == *key);
    let Some(record) = record else {
        return Ok(None);
    };
    let mut payload = vec![0; record.bytes as usize];
    file.read_at(&mut payload, offset + RECORD_HEADER)?;
    let is_sound = is_right(record.payload_crc, crc32fast::hash(&payload));
    Ok(is_sound.then_some((record, payload)))
}
