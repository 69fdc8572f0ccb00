//! Reads past the page cache: from the disk into the reader's own memory.
//!
//! What is read once and does not fit the page cache drives out what others have there, and the
//! page cache reads a cold file in small steps. A file that [`MappedFile::prefer_direct`] was
//! called for is read otherwise where that is told here: what the page cache holds is taken from
//! there, all else by `O_DIRECT`, in whole blocks around the bytes that are wanted.
//!
//! ```text
//!   file:    |....block....|....block....|....block....|
//!   range:            [==============]
//!   buffer:  |.........[==============]......|          of whole blocks, the wanted bytes inside
//! ```
//!
//! *Invariant:* a direct read leaves the page cache as it was. *Invariant:* the second descriptor
//! is of the same inode and is read only; whether the file is still the one that was opened is
//! asked after a direct read as after others (both in `tests/direct.rs`).

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::atomic::Ordering;

use crate::Error;
use crate::limits::DIRECT_ALIGNMENT;

use super::part::Part;
use super::{Backing, MappedFile, pages, streamed};

/// Ranges above this are lent from the mapping: no buffer is kept for them.
const LENT_MAX_BYTES: usize = 16 << 20;

thread_local! {
    /// What this thread's direct reads are lent from.
    static LENT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A second descriptor of a file, whose reads go past the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// Whether the system reports which pages of the file are cached.
    tells_cached: bool,
}

impl Direct {
    /// `None` where the file system has no direct reads, or not of blocks that small.
    pub(super) fn of(part: &Part) -> Option<Direct> {
        // By its descriptor: its name may be another file's by now.
        let flags = libc::O_DIRECT | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(format!("/proc/self/fd/{}", part.file.as_raw_fd()))
            .ok()?;
        let found = file.metadata().ok()?;
        if (found.dev(), found.ino()) != (part.identity.dev, part.identity.inode) {
            return None;
        }
        if alignment(&file).is_some_and(|bytes| bytes == 0 || bytes > DIRECT_ALIGNMENT) {
            return None;
        }
        Some(Direct {
            tells_cached: pages::tells_cached(&part.file, part.identity.size),
            file,
        })
    }

    /// Reads blocks from `start` on until `need` bytes of `blocks` are filled: less than
    /// whole ones at the file's end.
    fn fill(&self, start: u64, blocks: &mut [u8], need: usize) -> io::Result<()> {
        let mut done = 0;
        loop {
            match self.file.read_at(&mut blocks[done..], start + done as u64) {
                Ok(n) if done + n >= need => return Ok(()),
                // Reads go on at a block. A part of one is the file's end.
                Ok(n) if n < DIRECT_ALIGNMENT => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n - n % DIRECT_ALIGNMENT,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// Alignment of direct reads of a file (offset, length and address); 0 if the file does not support
/// them, `None` if the kernel does not report it (before Linux 6.1).
fn alignment(file: &File) -> Option<usize> {
    // SAFETY: of a struct of integers, for which zeros are valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the empty name ends with a zero and stands for the file
    // itself, and `found` is the struct that is filled.
    let told = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut found,
        )
    };
    if told != 0 || found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let (memory, offset) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
    Some(match memory.min(offset) {
        0 => 0,
        _ => memory.max(offset) as usize,
    })
}

impl MappedFile {
    /// From now on, what the page cache does not hold is read directly by
    /// [`read_around`](Self::read_around) and, in ranges up to 16 MiB, by
    /// [`with_range`](Self::with_range). False, and nothing changes, where the file system of a
    /// part has no direct reads.
    pub fn prefer_direct(&self) -> bool {
        let able = self.files().iter().all(|part| part.direct().is_some());
        if able {
            self.direct.store(true, Ordering::Relaxed);
        }
        able
    }

    /// Whether what the page cache does not hold is read directly.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Bytes of the ranges that were read directly; they are part of
    /// [`bytes_read`](Self::bytes_read).
    pub fn direct_bytes(&self) -> u64 {
        self.direct_bytes.load(Ordering::Relaxed)
    }

    /// Reads the blocks around `range` from the disk to the start of `buffer`, past the page cache.
    /// Returns where in `buffer` the wanted bytes begin, or `None`, and nothing is read, where the
    /// file system does not do that or the buffer does not fit: it begins at a multiple of
    /// [`DIRECT_ALIGNMENT`] and has room for the blocks, for which `2 * DIRECT_ALIGNMENT` beyond
    /// the range is enough. What lies around the wanted bytes is not to be used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn read_direct(
        &self,
        range: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, Error> {
        let (part, len) = self.part_of(&range)?;
        let Some(direct) = part.direct() else {
            return Ok(None);
        };
        if len == 0 {
            return Ok(Some(0));
        }
        let offset = range.start - part.base;
        let lead = (offset % DIRECT_ALIGNMENT as u64) as usize;
        let bytes = (lead + len).next_multiple_of(DIRECT_ALIGNMENT);
        let is_aligned = (buffer.as_ptr() as usize).is_multiple_of(DIRECT_ALIGNMENT);
        if !is_aligned || bytes > buffer.len() {
            return Ok(None);
        }
        let read = direct.fill(offset - lead as u64, &mut buffer[..bytes], lead + len);
        match read.as_ref().map_err(io::Error::raw_os_error) {
            Ok(()) => {}
            // Not into this memory, which is a driver's.
            Err(Some(libc::EFAULT)) => return Ok(None),
            // It was opened so, but is not read so.
            Err(Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                self.direct.store(false, Ordering::Relaxed);
                return Ok(None);
            }
            Err(_) => read.map_err(|e| part.unreadable(e))?,
        }
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        self.direct_bytes.fetch_add(len as u64, Ordering::Relaxed);
        part.check_read(part.seen(range.start, &buffer[lead..lead + len]))?;
        Ok(Some(lead))
    }

    /// Reads `range` to `buffer`, directly or not as [`prefer_direct`](Self::prefer_direct) has it,
    /// and returns where in `buffer` it begins. A buffer as for [`read_direct`](Self::read_direct)
    /// is filled by the disk itself, any other that the range fits with a copy between. What is
    /// copied goes past this processor's cache: the buffer is for a copy engine. On an error its
    /// content is not to be used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    ///
    /// # Panics
    /// If the range does not fit.
    pub fn read_around(&self, range: Range<u64>, buffer: &mut [u8]) -> Result<usize, Error> {
        let (part, len) = self.part_of(&range)?;
        assert!(len <= buffer.len(), "a range fits its buffer");
        if self.is_for_direct(part, &range)
            && let Some(start) = self.read_direct(range.clone(), buffer)?
        {
            return Ok(start);
        }
        self.fill(range.start, &mut buffer[..len], streamed::copy)?;
        Ok(0)
    }

    /// [`with_range`](Self::with_range) by a direct read into this thread's buffer. `Err` gives the
    /// reader back where the range is to be had otherwise.
    pub(super) fn with_direct<R, F: FnOnce(&[u8]) -> R>(
        &self,
        range: &Range<u64>,
        read: F,
    ) -> Result<Result<R, Error>, F> {
        if !self.is_direct() {
            return Err(read);
        }
        let (part, len) = match self.part_of(range) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error)),
        };
        if len > LENT_MAX_BYTES || !self.is_for_direct(part, range) {
            return Err(read);
        }
        // The reader may come back here: it finds a buffer of its own.
        let mut buffer = LENT.take();
        let bytes = len + 3 * DIRECT_ALIGNMENT;
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let skip = buffer.as_ptr().align_offset(DIRECT_ALIGNMENT);
        let result = match self.read_direct(range.clone(), &mut buffer[skip..]) {
            Ok(Some(start)) => Ok(Ok(read(&buffer[skip + start..][..len]))),
            Ok(None) => Err(read),
            Err(error) => Ok(Err(error)),
        };
        LENT.set(buffer);
        result
    }

    /// Whether a range is to be read directly. If the kernel does not report what is cached,
    /// nothing counts as cached.
    fn is_for_direct(&self, part: &Part, range: &Range<u64>) -> bool {
        let tells = || part.direct().is_some_and(|direct| direct.tells_cached);
        self.is_direct() && !(tells() && self.is_cached(range.clone()))
    }

    /// Bytes of the pages of `range` that are in the page cache, as far as the system reports; 0
    /// where there is no mapping.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn cached_bytes(&self, range: Range<u64>) -> Result<u64, Error> {
        let (_, len) = self.part_of(&range)?;
        Ok(match &self.backing {
            Backing::Map(guarded) => guarded.pages.cached_bytes(range.start as usize, len),
            Backing::Pread => 0,
        })
    }
}
