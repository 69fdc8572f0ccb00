//! What a file's bytes were where they were read first, to be compared when its ctime has moved.
//!
//! A ctime moves by much that leaves the content alone (permissions set anew, a link, a backup that
//! puts times of reading back), and by a rewrite in place whose time of writing was put back, and
//! nothing but the content tells the two apart. So some blocks are remembered by a digest:
//!
//! ```text
//!   block:   |d|d|d|d|d|d|d|d|....x......|..x........|.........x.|x..........|
//!             the first 8 MiB  1024 equal stretches of the rest, a block of each
//! ```
//!
//! Which block of a stretch it is, and the key of the digests, are drawn at random for each file
//! that is opened, so that nobody can write around them. A block is remembered when it is first
//! read, by bytes that were read anyway: a cold file costs no read more, and one that is looked at
//! again as many as were remembered, [`COMPARED_MAX`] at most behind the first 8 MiB.
//!
//! What this holds: of what was read, a change in the first 8 MiB is found for certain; one of a
//! share `p` of the rest is missed with a probability of about `(1 - p)^n`, where `n` of the
//! stretches were read, or 512 of more. Another model, and a file that was scrambled, differ in
//! nearly every block. A change of some bytes behind the first 8 MiB is found by luck alone. What
//! nobody has read yet may change: it is read as it is then.

use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::quality::RandomState;

/// Bytes of a block.
pub(super) const BLOCK: u64 = 4096;
/// Blocks at the file's beginning of which each is remembered.
const DENSE_MAX: u64 = (8 << 20) / BLOCK;
/// Stretches of the rest, of which a block each is remembered.
const STRETCHES_MAX: u64 = 1024;
/// Blocks of stretches that are compared at most: reads far from each other, of a disk perhaps.
const COMPARED_MAX: u64 = 512;

/// A place and its digest.
pub(super) type Seen = (usize, u64);

/// Digests of a file's blocks.
#[derive(Debug)]
pub(super) struct Samples {
    keys: RandomState,
    size: u64,
    dense: u64,
    stretches: u64,
    /// Digests of the dense blocks, then of the stretches; 0 for blocks that were not read.
    digests: Box<[AtomicU64]>,
}

impl Samples {
    /// Samples of a file of `size` bytes, before any is read.
    pub(super) fn new(size: u64) -> Samples {
        let blocks = size.div_ceil(BLOCK);
        let dense = blocks.min(DENSE_MAX);
        let stretches = (blocks - dense).min(STRETCHES_MAX);
        Samples {
            keys: RandomState::default(),
            size,
            dense,
            stretches,
            digests: (0..dense + stretches).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.digests[..])
    }

    /// Blocks behind the dense ones.
    fn rest(&self) -> u64 {
        self.size.div_ceil(BLOCK) - self.dense
    }

    /// The block that a place stands for.
    fn block(&self, place: u64) -> u64 {
        let Some(stretch) = place.checked_sub(self.dense) else {
            return place;
        };
        let begin = |stretch: u64| {
            let blocks = u128::from(stretch) * u128::from(self.rest());
            (blocks / u128::from(self.stretches)) as u64 // at most the rest
        };
        let (start, end) = (begin(stretch), begin(stretch + 1));
        self.dense + start + self.keys.hash_one(stretch) % (end - start)
    }

    /// The bytes of the file that a block has.
    fn bytes_of(&self, block: u64) -> std::ops::Range<u64> {
        block * BLOCK..self.size.min((block + 1) * BLOCK)
    }

    /// The places whose blocks may touch these bytes, and few others.
    fn places(&self, start: u64, end: u64) -> impl Iterator<Item = u64> + use<> {
        let (first, last) = (start / BLOCK, end.div_ceil(BLOCK));
        let stretch = |block: u64| {
            let behind = u128::from(block.saturating_sub(self.dense)) * u128::from(self.stretches);
            (behind / u128::from(self.rest().max(1))) as u64 // at most the stretches
        };
        let (from, to) = match last > self.dense {
            true => (stretch(first).saturating_sub(1), stretch(last) + 1),
            false => (0, 0),
        };
        let dense = self.dense;
        let stretches = from..to.min(self.stretches);
        (first.min(dense)..last.min(dense)).chain(stretches.map(move |stretch| dense + stretch))
    }

    fn digest(&self, bytes: &[u8]) -> u64 {
        let mut hasher = self.keys.build_hasher();
        hasher.write(bytes);
        hasher.finish().max(1)
    }

    /// The places in `start..end` that were not read yet, with their bytes in the file.
    pub(super) fn unread(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (usize, std::ops::Range<u64>)> {
        let unread = |place: &u64| self.digests[*place as usize].load(Ordering::Relaxed) == 0;
        self.places(start, end).filter(unread).map(|place| {
            let block = self.block(place);
            (place as usize, self.bytes_of(block))
        })
    }

    /// What of `bytes`, which lie at `offset`, was not read yet. It counts once the file is known
    /// to have been unchanged behind the read: see [`keep`](Self::keep).
    pub(super) fn of(&self, offset: u64, bytes: &[u8]) -> Vec<Seen> {
        let end = offset + bytes.len() as u64;
        self.unread(offset, end)
            .filter(|(_, at)| at.start >= offset && at.end <= end)
            .map(|(place, at)| {
                let at = (at.start - offset) as usize..(at.end - offset) as usize;
                (place, self.digest(&bytes[at]))
            })
            .collect()
    }

    /// As [`of`](Self::of), of all blocks that `start..end` touches, read from the file.
    pub(super) fn read(&self, file: &File, start: u64, end: u64) -> io::Result<Vec<Seen>> {
        let mut block = [0; BLOCK as usize];
        let touched = |at: &std::ops::Range<u64>| at.start < end && at.end > start;
        self.unread(start, end)
            .filter(|(_, at)| touched(at))
            .map(|(place, at)| {
                let bytes = &mut block[..(at.end - at.start) as usize];
                file.read_exact_at(bytes, at.start)?;
                Ok((place, self.digest(bytes)))
            })
            .collect()
    }

    /// Remembers what was read.
    pub(super) fn keep(&self, seen: Vec<Seen>) {
        for (place, digest) in seen {
            // The first one stays, whoever was faster.
            let place = &self.digests[place];
            let _ = place.compare_exchange(0, digest, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Reads what is remembered again; whether it is what it was.
    pub(super) fn agree(&self, file: &File) -> io::Result<bool> {
        let digests = || {
            let loaded = self.digests.iter().map(|d| d.load(Ordering::Relaxed));
            (0u64..).zip(loaded).filter(|&(_, digest)| digest != 0)
        };
        let stretches = digests().filter(|&(place, _)| place >= self.dense).count() as u64;
        // Others each time, if these are not all.
        let lot = RandomState::default();
        let is_drawn = |place: u64| {
            place < self.dense
                || stretches <= COMPARED_MAX
                || lot.hash_one(place) % stretches < COMPARED_MAX
        };
        let mut block = [0; BLOCK as usize];
        for (place, digest) in digests().filter(|&(place, _)| is_drawn(place)) {
            let at = self.bytes_of(self.block(place));
            let bytes = &mut block[..(at.end - at.start) as usize];
            match file.read_exact_at(bytes, at.start) {
                Ok(()) if self.digest(bytes) == digest => {}
                Ok(()) => return Ok(false),
                // Cut short.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places whose blocks lie whole in a range are those that a look at all of them finds.
    #[test]
    fn a_range_finds_the_places_in_it() {
        let small = [1, 4095, 4096, 4097, 8 << 20];
        let large = [(8 << 20) + 1, (8 << 20) + 5000, 13 << 20, 5 << 30, 1 << 50];
        for size in small.into_iter().chain(large) {
            let samples = Samples::new(size);
            let n = samples.digests.len() as u64;
            let all: Vec<_> = (0..n).map(|p| samples.bytes_of(samples.block(p))).collect();
            assert!(all.iter().all(|at| at.start < at.end && at.end <= size));
            assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
            let keys = RandomState::default();
            for i in 0..2000u64 {
                let start = keys.hash_one(i) % size;
                let len = keys.hash_one(!i) % (size - start).min(1 << (10 + i % 30));
                let end = match i % 7 {
                    0 => size,
                    _ => start + len,
                };
                let inside = |at: &std::ops::Range<u64>| at.start >= start && at.end <= end;
                let found: Vec<_> = samples.unread(start, end).map(|(_, at)| at).collect();
                let found: Vec<_> = found.iter().filter(|at| inside(at)).collect();
                let expected: Vec<_> = all.iter().filter(|at| inside(at)).collect();
                assert_eq!(found, expected, "{start}..{end} of {size}");
            }
        }
    }

    /// The stated odds, with room for luck: a hundredth of the rest is missed twice in a thousand
    /// times.
    #[test]
    fn a_change_of_a_share_is_found_as_often_as_stated() {
        let file = tempfile::tempfile().unwrap();
        let size = (8 << 20) + (64 << 20);
        file.set_len(size).unwrap();
        let samples = Samples::new(size);
        samples.keep(samples.read(&file, 0, size).unwrap());
        assert!(samples.agree(&file).unwrap());
        let dirty = vec![1; size as usize / 100];
        let start = 30 << 20;
        file.write_all_at(&dirty, start).unwrap();
        let found = (0..200).filter(|_| !samples.agree(&file).unwrap()).count();
        assert!(found > 180, "{found} of 200");
    }
}
