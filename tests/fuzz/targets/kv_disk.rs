//! Segment files of the KV cache on disk. An input is a file, with the number of its name before
//! it.
//!
//! Whatever it has, its records lie inside of it, one behind another; each is read whole or
//! refused; and the bytes behind the last of them make no difference. Checksums count as right
//! here.
#![no_main]

use std::io;
use std::time::SystemTime;

use libfuzzer_sys::fuzz_target;
use rocmforge_kv_disk::{Found, Key, Scanned, SegmentFile, read_payload, scan};

struct Bytes<'a>(&'a [u8]);

impl SegmentFile for Bytes<'_> {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let from = self.0.get(offset as usize..).unwrap_or_default();
        let from = from.get(..into.len());
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        unreachable!("a scan writes nothing")
    }

    fn truncate(&self, _: u64) -> io::Result<()> {
        unreachable!("a scan cuts nothing")
    }

    fn sync(&self) -> io::Result<()> {
        unreachable!("a scan waits for nothing")
    }

    fn touch(&self, _: SystemTime) -> io::Result<()> {
        unreachable!("a scan is no use")
    }
}

/// The records of a file, and how the scan ended.
fn records(bytes: &[u8], number: u64) -> (Vec<Found>, Scanned) {
    let mut found = Vec::new();
    let scanned = scan(&Bytes(bytes), number, bytes.len() as u64, |record| {
        found.push(record);
        true
    });
    (found, scanned)
}

fuzz_target!(|data: &[u8]| {
    let Some((number, bytes)) = data.split_first() else {
        return;
    };
    let number = u64::from(*number);
    let (found, scanned) = records(bytes, number);
    let file = Bytes(bytes);
    let mut end = 32;
    for record in &found {
        assert_eq!(record.offset, end, "records have no gaps");
        end += 88 + u64::from(record.bytes);
        assert!(end <= bytes.len() as u64, "a record lies in its file");
        let place = (number, record.offset);
        let read = read_payload(&file, place, &record.key).expect("it is there");
        let (again, payload) = read.expect("its checksum counts as right");
        assert_eq!((again, payload.len()), (*record, record.bytes as usize));
        let other = Key {
            slot: !record.key.slot,
            ..record.key
        };
        let refused = read_payload(&file, place, &other).expect("it is there");
        assert!(refused.is_none(), "another entry is not this one");
    }
    match scanned {
        Scanned::Whole => assert_eq!(end, bytes.len() as u64),
        Scanned::Torn(at) | Scanned::Damaged(at) if at > 0 => assert_eq!(at, end),
        _ => assert!(found.is_empty()),
    }
    if !found.is_empty() {
        let (short, ended) = records(&bytes[..end as usize], number);
        assert_eq!((short, ended), (found, Scanned::Whole));
    }
});
