//! Files read through a shared read-only mapping, safely even though they may change under us.
//!
//! A range is used in four steps: its pages are faulted in with `MADV_POPULATE_READ`, which reports what would be a
//! SIGBUS as an error; the reader runs on it; a SIGBUS that arrives all the same, because the file shrank in between, is
//! caught by the [guard], which puts zeros in the hole and marks the mapping broken; and afterwards the mark and the
//! file's [`Identity`] are checked before the reader's result counts. Where a file cannot be mapped, or too many already
//! are, the same ranges go through `pread` into a buffer.
//!
//! *Invariants:* nothing writes to the file or to the mapping; a mapping is in the guard's table from before its first read
//! until after its last; a result that was computed from bytes that may not be the file's never leaves
//! [`MappedFile::with_range`] as `Ok`. Any thread may read; there is no lock.
//!
//! What remains is the reader's part: while it runs, the bytes may change (a rewrite in place shows through a shared
//! mapping). It must not rely on two reads of one byte giving the same, and must not index by what it read without a
//! check. A reader that copies or decodes numbers does neither.
#![allow(
    unsafe_code,
    reason = "this module and its guard are the only ones that map files"
)]

mod guard;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memmap2::{Advice, Mmap};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::Error;

/// What makes a file the one that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The device that the file is on.
    pub dev: u64,
    /// Its inode there.
    pub inode: u64,
    /// Its length in bytes.
    pub size: u64,
    /// When it was last written, in nanoseconds since 1970.
    pub mtime_ns: i128,
}

impl Identity {
    fn of(meta: &Metadata) -> Identity {
        Identity {
            dev: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            mtime_ns: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (secs, ns) = (
            self.mtime_ns.div_euclid(1_000_000_000),
            self.mtime_ns.rem_euclid(1_000_000_000),
        );
        write!(
            f,
            "{} bytes, inode {}:{}, modified at {secs}.{ns:09}",
            self.size, self.dev, self.inode
        )
    }
}

/// How a file's bytes are to be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// A mapping where the system gives one, `pread` otherwise.
    #[default]
    Map,
    /// `pread` always.
    Pread,
}

#[derive(Debug)]
enum Backing {
    Map(Guarded),
    Pread,
}

/// A mapping and its place in the guard's table.
#[derive(Debug)]
struct Guarded {
    // Fields drop in this order: the guard forgets the range before the range is unmapped.
    slot: guard::Registration,
    map: Mmap,
}

/// A regular file, opened read only, whose ranges can be read from several threads at once.
#[derive(Debug)]
pub struct MappedFile {
    backing: Backing,
    file: File,
    path: PathBuf,
    identity: Identity,
    bytes_read: AtomicU64,
}

/// Set once the kernel has said that it does not know `MADV_POPULATE_READ` (before Linux 5.14).
static NO_POPULATE: AtomicBool = AtomicBool::new(false);

impl MappedFile {
    /// Opens the regular file at `path`. Never blocks, whatever the path names, and opens nothing but regular files.
    ///
    /// # Errors
    /// [`Error::Io`] where the file is missing or not permitted, [`Error::NotRegular`], [`Error::Empty`].
    pub fn open(path: &Path) -> Result<MappedFile, Error> {
        MappedFile::open_with(path, ReadMode::Map)
    }

    /// As [`open`](Self::open), with a choice of how to read.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: &Path, mode: ReadMode) -> Result<MappedFile, Error> {
        let failed = |op| {
            move |source| Error::Io {
                op,
                path: path.to_owned(),
                source,
            }
        };
        // Looked at before it is opened, because opening some devices has effects; and again after, because the name may
        // have been given to something else in between.
        let check = |meta: &Metadata| match kind_unless_regular(meta) {
            Some(kind) => Err(Error::NotRegular {
                path: path.to_owned(),
                kind,
            }),
            None => Ok(()),
        };
        check(&std::fs::metadata(path).map_err(failed("open"))?)?;
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path)
            .map_err(failed("open"))?;
        let meta = file.metadata().map_err(failed("stat"))?;
        check(&meta)?;
        if meta.len() == 0 {
            return Err(Error::Empty {
                path: path.to_owned(),
            });
        }
        let backing = match mode {
            ReadMode::Map => map_guarded(&file, meta.len()).map_or(Backing::Pread, Backing::Map),
            ReadMode::Pread => Backing::Pread,
        };
        Ok(MappedFile {
            backing,
            file,
            path: path.to_owned(),
            identity: Identity::of(&meta),
            bytes_read: AtomicU64::new(0),
        })
    }

    /// Length of the file in bytes when it was opened; never 0.
    #[expect(
        clippy::len_without_is_empty,
        reason = "an empty file cannot be opened"
    )]
    pub fn len(&self) -> u64 {
        self.identity.size
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file was when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether ranges come from a mapping (otherwise from `pread`).
    pub fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Map(_))
    }

    /// Bytes of all ranges read so far, by either way; ranges read twice count twice.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Faults `range` in, runs `read` on its bytes, then checks that the file is still the one that was opened. What
    /// `read` computed, and whatever else it wrote, counts only if `Ok` comes back: on a file that changes meanwhile it
    /// may have seen changed bytes or zeros.
    ///
    /// Without a mapping the range is copied to memory first: read large tensors in pieces, with
    /// [`for_each_chunk`](Self::for_each_chunk) or [`read_into`](Self::read_into).
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Changed`] where the file was cut short or rewritten; [`Error::Io`] where the
    /// storage failed. After a `Changed` or a failed page the file stays unusable: open it again.
    pub fn with_range<R>(
        &self,
        range: Range<u64>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        let len = self.check_range(&range)?;
        let result = match &self.backing {
            Backing::Map(Guarded { slot, map }) => {
                let start = range.start as usize; // below the mapping's length, which is a usize
                if slot.is_broken() {
                    return Err(self.unreadable(io::Error::from_raw_os_error(libc::EIO)));
                }
                populate(map, start, len).map_err(|e| self.unreadable(e))?;
                let result = read(&map[start..start + len]);
                if slot.is_broken() {
                    return Err(self.unreadable(io::Error::from_raw_os_error(libc::EIO)));
                }
                result
            }
            Backing::Pread => {
                let mut buffer = Vec::new();
                buffer
                    .try_reserve_exact(len)
                    .map_err(|_| self.failed("read", io::ErrorKind::OutOfMemory.into()))?;
                buffer.resize(len, 0);
                self.file
                    .read_exact_at(&mut buffer, range.start)
                    .map_err(|e| self.unreadable(e))?;
                read(&buffer)
            }
        };
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        self.check_unchanged()?;
        Ok(result)
    }

    /// Fills `dst` with the bytes from `offset` on. On an error the content of `dst` is not to be used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn read_into(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        if let Backing::Map(_) = self.backing {
            let end = offset.saturating_add(dst.len() as u64);
            return self.with_range(offset..end, |bytes| dst.copy_from_slice(bytes));
        }
        self.check_range(&(offset..offset.saturating_add(dst.len() as u64)))?;
        self.file
            .read_exact_at(dst, offset)
            .map_err(|e| self.unreadable(e))?;
        self.bytes_read
            .fetch_add(dst.len() as u64, Ordering::Relaxed);
        self.check_unchanged()
    }

    /// Fills each of `parts` with the bytes from its offset on, for many small parts far from each other: each is one read of the
    /// file, and the file is checked once. On an error their content is not to be used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn read_each<'a>(
        &self,
        parts: impl IntoIterator<Item = (u64, &'a mut [u8])>,
    ) -> Result<(), Error> {
        let mut bytes = 0;
        for (offset, dst) in parts {
            self.check_range(&(offset..offset.saturating_add(dst.len() as u64)))?;
            self.file
                .read_exact_at(dst, offset)
                .map_err(|e| self.unreadable(e))?;
            bytes += dst.len() as u64;
        }
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        self.check_unchanged()
    }

    /// Runs `read` on pieces of `range` in order, each of `chunk_bytes` but for a shorter last one, with the piece's
    /// offset in the file. Each piece is checked as in [`with_range`](Self::with_range); the first that fails ends it.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range); a range outside of the file before anything is read.
    ///
    /// # Panics
    /// If `chunk_bytes` is 0.
    pub fn for_each_chunk(
        &self,
        range: Range<u64>,
        chunk_bytes: usize,
        mut read: impl FnMut(u64, &[u8]),
    ) -> Result<(), Error> {
        assert!(chunk_bytes > 0, "a chunk has at least one byte");
        self.check_range(&range)?;
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at.saturating_add(chunk_bytes as u64));
            self.with_range(at..end, |bytes| read(at, bytes))?;
            at = end;
        }
        Ok(())
    }

    /// The pages that hold `range`, for a reader that is not the CPU: a copy engine that a driver has been told about
    /// them. `Ok(None)` where there is no mapping. Nothing is faulted in here; whoever pins the pages does that, and
    /// is refused where a page cannot be had.
    ///
    /// What was copied counts only if [`MappedRange::check`] says so after the copy has ended.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Changed`] or [`Error::Io`] where the mapping is known to be broken.
    pub fn mapped_range(self: &Arc<Self>, range: Range<u64>) -> Result<Option<MappedRange>, Error> {
        self.check_range(&range)?;
        let Backing::Map(Guarded { slot, .. }) = &self.backing else {
            return Ok(None);
        };
        if slot.is_broken() {
            return Err(self.unreadable(io::Error::from_raw_os_error(libc::EIO)));
        }
        let page = guard::page_bytes() as u64;
        let start = range.start - range.start % page;
        Ok(Some(MappedRange {
            file: Arc::clone(self),
            start: start as usize, // below the mapping's length, which is a usize
            len: (range.end - start).next_multiple_of(page) as usize,
        }))
    }

    /// Counts bytes that were read otherwise than through this file's own methods.
    pub fn count_read(&self, bytes: u64) {
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Asks the system whether the file is still the one that was opened: one fstat.
    ///
    /// # Errors
    /// [`Error::Changed`] where it is not, [`Error::Io`] where the system does not answer.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        let now = Identity::of(&self.file.metadata().map_err(|e| self.failed("stat", e))?);
        if now == self.identity {
            return Ok(());
        }
        Err(Error::Changed {
            path: self.path.clone(),
            was: Box::new(self.identity),
            now: Box::new(now),
        })
    }

    /// Starts reading `range` ahead and does not wait for it. A hint: what lies outside of the file is left out, and
    /// failures show when the range is read.
    pub fn will_need(&self, range: Range<u64>) {
        let (start, end) = (range.start.min(self.len()), range.end.min(self.len()));
        if start >= end {
            return;
        }
        if let Backing::Map(Guarded { map, .. }) = &self.backing {
            let _ = map.advise_range(Advice::WillNeed, start as usize, (end - start) as usize);
            return;
        }
        if let (Ok(start), Ok(len)) = (i64::try_from(start), i64::try_from(end - start)) {
            let _ = posix_fadvise(
                &self.file,
                start,
                len,
                PosixFadviseAdvice::POSIX_FADV_WILLNEED,
            );
        }
    }

    /// Whether the system holds all of `range` in its page cache, as far as it tells: a reader would not wait for a disk.
    /// False where there is no mapping, or for a range outside of the file.
    pub fn is_cached(&self, range: Range<u64>) -> bool {
        let Backing::Map(Guarded { map, .. }) = &self.backing else {
            return false;
        };
        if self.check_range(&range).is_err() {
            return false;
        }
        let page = guard::page_bytes();
        let (start, end) = (range.start as usize, range.end as usize); // below the mapping's length, which is a usize
        let first = start - start % page;
        let mut states = vec![0u8; (end - first).div_ceil(page)];
        // SAFETY: the pages are of a mapping that `self` keeps, and there is a byte for each of them; nothing is read.
        let told = unsafe {
            libc::mincore(
                map.as_ptr().wrapping_add(first).cast_mut().cast(),
                end - first,
                states.as_mut_ptr().cast(),
            )
        };
        told == 0 && states.iter().all(|state| state & 1 != 0)
    }

    /// The length of `range`, if it lies inside of the file.
    fn check_range(&self, range: &Range<u64>) -> Result<usize, Error> {
        let out_of_range = || Error::OutOfRange {
            path: self.path.clone(),
            start: range.start,
            end: range.end,
            len: self.len(),
        };
        if range.start > range.end || range.end > self.len() {
            return Err(out_of_range());
        }
        usize::try_from(range.end - range.start).map_err(|_| out_of_range())
    }

    fn failed(&self, op: &'static str, source: io::Error) -> Error {
        Error::Io {
            op,
            path: self.path.clone(),
            source,
        }
    }

    /// The error for a range that could not be read: that the file changed, if it did, else what the system said.
    fn unreadable(&self, source: io::Error) -> Error {
        match self.check_unchanged() {
            Err(changed) => changed,
            Ok(()) => self.failed("read", source),
        }
    }
}

/// Whole pages of a mapping, kept mapped as long as this lives. See [`MappedFile::mapped_range`].
#[derive(Clone, Debug)]
pub struct MappedRange {
    file: Arc<MappedFile>,
    start: usize,
    len: usize,
}

impl MappedRange {
    /// The first page's address. Reading there is the holder's risk: the file may shrink.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.file.backing {
            Backing::Map(Guarded { map, .. }) => map.as_ptr().wrapping_add(self.start),
            Backing::Pread => std::ptr::null(),
        }
    }

    /// Offset of the first page in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.start as u64
    }

    /// Bytes, whole pages; the last one may reach beyond the file's end, where it reads as zeros.
    #[expect(clippy::len_without_is_empty, reason = "for symmetry with its file")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The file.
    pub fn file(&self) -> &Arc<MappedFile> {
        &self.file
    }

    /// Whether what was copied out of the pages until now is the file's content as it was opened.
    ///
    /// # Errors
    /// [`Error::Changed`] where the file was cut short or rewritten, [`Error::Io`] where a page could not be had.
    pub fn check(&self) -> Result<(), Error> {
        if let Backing::Map(Guarded { slot, .. }) = &self.file.backing
            && slot.is_broken()
        {
            return Err(self
                .file
                .unreadable(io::Error::from_raw_os_error(libc::EIO)));
        }
        self.file.check_unchanged()
    }
}

/// What the file is, unless it is a regular one.
fn kind_unless_regular(meta: &Metadata) -> Option<&'static str> {
    let ty = meta.file_type();
    match () {
        () if ty.is_file() => None,
        () if ty.is_dir() => Some("directory"),
        () if ty.is_fifo() => Some("FIFO"),
        () if ty.is_socket() => Some("socket"),
        () if ty.is_block_device() => Some("block device"),
        () if ty.is_char_device() => Some("character device"),
        () => Some("special file"),
    }
}

/// Maps the file and registers the mapping; `None` where either cannot be done, and `pread` has to do.
fn map_guarded(file: &File, len: u64) -> Option<Guarded> {
    let len = usize::try_from(len).ok()?;
    // SAFETY: `Mmap::map` asks that the file not change while a slice of the mapping is alive. That cannot be promised for
    // a file of others. Slices are only lent to `with_range`'s reader, as bytes, for which every value is valid; a
    // change in content is told to the caller as an error after the reader ran (module docs), and a page that vanishes
    // raises SIGBUS, which the guard registered below turns into zeros.
    let map = unsafe { memmap2::MmapOptions::new().len(len).map(file) }.ok()?;
    let slot = guard::register(&map)?;
    Some(Guarded { slot, map })
}

/// Makes the pages of a range present, or says why that cannot be.
fn populate(map: &Mmap, start: usize, len: usize) -> io::Result<()> {
    if len == 0 || NO_POPULATE.load(Ordering::Relaxed) {
        return Ok(());
    }
    loop {
        match map.advise_range(Advice::PopulateRead, start, len) {
            Ok(()) => return Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => continue,
                // A kernel that does not know it. The guard alone has to do.
                Some(libc::EINVAL) => {
                    NO_POPULATE.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                _ => return Err(e),
            },
        }
    }
}
