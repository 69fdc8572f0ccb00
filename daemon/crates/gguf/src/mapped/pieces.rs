//! Reads into memory that is used again, which remember what they saw of a file's blocks.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::Error;

use super::MappedFile;
use super::samples::BLOCK;

impl MappedFile {
    /// Hands `range` over in pieces of `piece_bytes` from its start, the last one shorter. What
    /// `each` made of them counts only if `Ok` comes back.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub(crate) fn in_pieces(
        &self,
        range: Range<u64>,
        piece_bytes: usize,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        let (part, len) = self.part_of(&range)?;
        let (mut buffer, mut seen) = (Vec::new(), Vec::new());
        for start in range.clone().step_by(piece_bytes) {
            let end = range.end.min(start + piece_bytes as u64);
            // Whole blocks: what is remembered of them need not be read once more.
            let from = start - (start - part.base) % BLOCK;
            let to = (end - part.base).next_multiple_of(BLOCK) + part.base;
            buffer.resize((to.min(part.end()) - from) as usize, 0);
            part.read(from, &mut buffer)?;
            seen.extend(part.seen(from, &buffer));
            each(&buffer[(start - from) as usize..(end - from) as usize]);
        }
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        part.check_read(seen)
    }

    /// Fills `dst` with the bytes from `offset` on by a read of the file: pages of a mapping count
    /// as memory of the process as long as the file is open.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub(crate) fn read_unmapped(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        let (part, len) = self.part_of(&(offset..offset.saturating_add(dst.len() as u64)))?;
        part.read(offset, dst)?;
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        part.check_read(part.seen(offset, dst))
    }
}
