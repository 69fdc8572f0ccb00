//! Files read through a shared read-only mapping, safely even though they may change under us.
//!
//! A range is used in four steps: its pages are faulted in with `MADV_POPULATE_READ`, which reports
//! what would be a SIGBUS as an error; the reader runs on it; a SIGBUS that arrives all the same,
//! because the file shrank in between, is caught by the [guard], which puts zeros in the hole and
//! marks the mapping broken; and afterwards the mark and the file's [`Identity`] are checked before
//! the reader's result counts. Where a file cannot be mapped, or too many already are, the same
//! ranges go through `pread` into a buffer. Of a file that the page cache has no room for, what is
//! not there is read past it ([direct]).
//!
//! *Invariants:* nothing writes to the file or to the mapping; a mapping is in the guard's table
//! from before its first read until after its last; a result that was computed from bytes that
//! may not be the file's, as far as its size, its times and [samples] of it tell, never leaves
//! [`MappedFile::with_range`] as `Ok` (the order of `Guarded`'s fields; `tests/mapped.rs`,
//! `tests/rewritten.rs`). Any thread may read; no lock is held while it does.
//!
//! What remains is the reader's part: while it runs, the bytes may change (a rewrite in place shows
//! through a shared mapping). It must not rely on two reads of one byte giving the same, and must
//! not index by what it read without a check. A reader that copies or decodes numbers does neither.
#![allow(
    unsafe_code,
    reason = "this module and its guard are the only ones that map files"
)]

mod direct;
mod guard;
mod memory;
mod pages;
mod part;
mod pieces;
mod samples;
mod streamed;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::Error;
use crate::limits::{MAX_PARTS, PART_ALIGNMENT};

use pages::Pages;
use part::Part;

pub use part::Identity;

/// How a file's bytes are read: through a mapping or by read calls.
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
    pages: Pages,
}

/// Regular files, opened read only, whose ranges can be read from several threads at once: one
/// file, or the parts of a split model one behind the other.
///
/// An offset counts from the first file's start. Each part begins at the next multiple of
/// [`PART_ALIGNMENT`] behind the one before it; what lies between belongs to no range, and a range
/// lies in one part.
#[derive(Debug)]
pub struct MappedFile {
    backing: Backing,
    /// The parts of the model in the order of their offsets; at least one.
    parts: Vec<Part>,
    bytes_read: AtomicU64,
    /// Whether what is not cached is read past the page cache.
    direct: AtomicBool,
    direct_bytes: AtomicU64,
}

impl MappedFile {
    /// Opens the regular file at `path`. Waits for no FIFO or device, and refuses what is not a
    /// regular file.
    ///
    /// # Errors
    /// [`Error::Io`] where the file is missing or not permitted,
    /// [`Error::NotRegular`], [`Error::Empty`].
    pub fn open(path: &Path) -> Result<MappedFile, Error> {
        MappedFile::open_with(path, ReadMode::Map)
    }

    /// As [`open`](Self::open), with a choice of how to read.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: &Path, mode: ReadMode) -> Result<MappedFile, Error> {
        Ok(MappedFile::of(vec![Part::open(path)?], mode))
    }

    /// The parts of a split model as one, in their order. Their own mappings go.
    ///
    /// # Errors
    /// [`Error::TooManyParts`]; [`Error::Split`] for sizes that no address space has.
    ///
    /// # Panics
    /// If there is none.
    pub fn join(files: Vec<MappedFile>, mode: ReadMode) -> Result<MappedFile, Error> {
        let mut parts: Vec<Part> = files.into_iter().flat_map(|file| file.parts).collect();
        assert!(!parts.is_empty(), "a model has at least one file");
        let found = parts.len() as u64;
        if found > MAX_PARTS as u64 {
            return Err(Error::TooManyParts {
                path: parts.swap_remove(0).path,
                found,
            });
        }
        let mut base = 0u64;
        for part in &mut parts {
            part.base = base;
            let end = base.checked_add(part.identity.size);
            let next = end.and_then(|end| end.checked_next_multiple_of(PART_ALIGNMENT));
            let Some(next) = next else {
                return Err(Error::Split {
                    path: part.path.clone(),
                    problem: "the sizes of the parts up to this one overflow 64 bits".to_owned(),
                });
            };
            base = next;
        }
        Ok(MappedFile::of(parts, mode))
    }

    fn of(parts: Vec<Part>, mode: ReadMode) -> MappedFile {
        let backing = match mode {
            ReadMode::Map => map_guarded(&parts).map_or(Backing::Pread, Backing::Map),
            ReadMode::Pread => Backing::Pread,
        };
        MappedFile {
            backing,
            parts,
            bytes_read: AtomicU64::new(0),
            direct: AtomicBool::new(false),
            direct_bytes: AtomicU64::new(0),
        }
    }

    fn first(&self) -> &Part {
        &self.parts[0]
    }

    /// The parts that are files, and not bytes that this process keeps in memory.
    fn files(&self) -> &[Part] {
        let is_file = |part: &Part| !part.is_memory;
        &self.parts[..self.parts.partition_point(is_file)]
    }

    /// One past the last offset; never 0. Of a single file, its length in bytes when it was opened.
    #[expect(
        clippy::len_without_is_empty,
        reason = "an empty file cannot be opened"
    )]
    pub fn len(&self) -> u64 {
        self.parts.last().map_or(0, Part::end)
    }

    /// The sum of the files' lengths in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.files().iter().map(|part| part.identity.size).sum()
    }

    /// The path that was opened, of the first part.
    pub fn path(&self) -> &Path {
        &self.first().path
    }

    /// The path and the offsets of each file.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (&Path, Range<u64>)> {
        self.files()
            .iter()
            .map(|part| (part.path.as_path(), part.base..part.end()))
    }

    /// What the first part was when it was opened.
    pub fn identity(&self) -> Identity {
        self.first().identity()
    }

    /// The path of each file, and what it was when it was opened.
    pub fn identities(&self) -> impl ExactSizeIterator<Item = (&Path, Identity)> {
        let parts = self.files().iter();
        parts.map(|part| (part.path.as_path(), part.identity()))
    }

    /// Whether a file has no name any more: its bytes on the disk are free once it is closed.
    /// Blocks on the file system of one that is far.
    pub fn is_deleted(&self) -> bool {
        let is_deleted = |part: &Part| part.file.metadata().is_ok_and(|found| found.nlink() == 0);
        self.files().iter().any(is_deleted)
    }

    /// Modification time of the part that was modified last, in nanoseconds since 1970.
    pub fn mtime_ns(&self) -> i128 {
        let times = self.files().iter().map(|part| part.identity.mtime_ns);
        times.max().unwrap_or_default()
    }

    /// Whether both are the same files, part by part, as they were opened and not changed between
    /// the two. Bytes that are kept in memory behind them are not compared.
    pub fn is_same_as(&self, other: &MappedFile) -> bool {
        // Of thousands of models all but one are other files: that is seen at the first part.
        let is_same = |(a, b): (&Part, &Part)| a.identity() == b.identity() && a.path == b.path;
        is_same((self.first(), other.first()))
            && self.files().len() == other.files().len()
            && self.files().iter().zip(other.files()).all(is_same)
    }

    /// One past the last offset of the part that holds `offset`; `None` where none does.
    pub fn part_end(&self, offset: u64) -> Option<u64> {
        let part = self.part_at(offset);
        (part.base..part.end())
            .contains(&offset)
            .then(|| part.end())
    }

    /// Whether another process or machine answers for a part, which may keep a reader waiting
    /// without end.
    pub fn is_far(&self) -> bool {
        self.parts.iter().any(|part| part.is_far)
    }

    /// Whether ranges come from a mapping (otherwise from `pread`).
    pub fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Map(_))
    }

    /// Bytes of all ranges read so far, by either way; ranges read twice count twice.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Faults `range` in, runs `read` on its bytes, then checks that the file is still the one that
    /// was opened. What `read` computed, and whatever else it wrote, counts only if `Ok` comes
    /// back: on a file that changes meanwhile it may have seen changed bytes or zeros.
    ///
    /// Without a mapping the range is copied to memory first: read large tensors in pieces, or with
    /// [`read_into`](Self::read_into).
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Changed`] where the file was cut short or rewritten;
    /// [`Error::Io`] where the storage failed. A part that has `Changed`, or whose mapping met a
    /// page that failed, stays unusable: open the file again.
    pub fn with_range<R>(
        &self,
        range: Range<u64>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        let read = match self.with_direct(&range, read) {
            Ok(done) => return done,
            Err(read) => read,
        };
        let (part, len) = self.part_of(&range)?;
        let (result, seen) = match &self.backing {
            Backing::Map(Guarded { slot, pages }) => {
                let start = range.start as usize; // below the mapping's length, which is a usize
                if slot.is_broken() {
                    return Err(self.broken());
                }
                pages.populate(start, len).map_err(|e| part.unreadable(e))?;
                let bytes = pages.bytes(start, len);
                let result = (read(bytes), part.seen(range.start, bytes));
                if slot.is_broken() {
                    return Err(self.broken());
                }
                result
            }
            Backing::Pread => {
                let mut buffer = Vec::new();
                buffer
                    .try_reserve_exact(len)
                    .map_err(|_| part.failed("read", io::ErrorKind::OutOfMemory.into()))?;
                buffer.resize(len, 0);
                part.read(range.start, &mut buffer)?;
                (read(&buffer), part.seen(range.start, &buffer))
            }
        };
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        part.check_read(seen)?;
        Ok(result)
    }

    /// [`with_range`](Self::with_range) for readers that come often, from several threads at
    /// once, to pages that are there: faults nothing in first, and does not look whether the file
    /// has changed. The caller does so, by [`check_unchanged`](Self::check_unchanged), before he
    /// uses what the reads gave.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range), but for a file that was rewritten in place.
    pub fn with_range_unchecked<R>(
        &self,
        range: Range<u64>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        let Backing::Map(Guarded { slot, pages }) = &self.backing else {
            return self.with_range(range, read);
        };
        let (_, len) = self.part_of(&range)?;
        let result = match slot.is_broken() {
            true => None,
            false => Some(read(pages.bytes(range.start as usize, len))),
        };
        match result {
            Some(result) if !slot.is_broken() => {
                self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
                Ok(result)
            }
            _ => Err(self.broken()),
        }
    }

    /// Fills `dst` with the bytes from `offset` on. On an error the content of `dst` is not to be
    /// used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn read_into(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        self.fill(offset, dst, |bytes, dst| dst.copy_from_slice(bytes))
    }

    /// [`read_into`](Self::read_into), with what copies out of a mapping.
    fn fill(
        &self,
        offset: u64,
        dst: &mut [u8],
        copy: impl FnOnce(&[u8], &mut [u8]),
    ) -> Result<(), Error> {
        if let Backing::Map(_) = self.backing {
            let end = offset.saturating_add(dst.len() as u64);
            return self.with_range(offset..end, |bytes| copy(bytes, dst));
        }
        let (part, _) = self.part_of(&(offset..offset.saturating_add(dst.len() as u64)))?;
        part.read(offset, dst)?;
        self.bytes_read
            .fetch_add(dst.len() as u64, Ordering::Relaxed);
        part.check_read(part.seen(offset, dst))
    }

    /// Fills each of `pieces` with the bytes from its offset on, for many small ones far from each
    /// other: each is one read of a file, and the files are checked once. On an error their content
    /// is not to be used.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn read_each<'a>(
        &self,
        pieces: impl IntoIterator<Item = (u64, &'a mut [u8])>,
    ) -> Result<(), Error> {
        let mut bytes = 0;
        for (offset, dst) in pieces {
            let (part, _) = self.part_of(&(offset..offset.saturating_add(dst.len() as u64)))?;
            part.read(offset, dst)?;
            bytes += dst.len() as u64;
        }
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        self.check_unchanged()
    }

    /// The pages that hold `range`, for a reader that is not the CPU: a copy engine that a driver
    /// has been told about them. `Ok(None)` where there is no mapping. Nothing is faulted in here;
    /// whoever pins the pages does that, and is refused where a page cannot be had.
    ///
    /// What was copied counts only if [`MappedRange::check`] says so after the copy has ended.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Changed`] or [`Error::Io`] where the
    /// mapping is known to be broken.
    pub fn mapped_range(self: &Arc<Self>, range: Range<u64>) -> Result<Option<MappedRange>, Error> {
        self.part_of(&range)?;
        let Backing::Map(Guarded { slot, .. }) = &self.backing else {
            return Ok(None);
        };
        if slot.is_broken() {
            return Err(self.broken());
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

    /// Asks the system whether the files are still those that were opened: one fstat each.
    ///
    /// # Errors
    /// [`Error::Changed`] for the first that is not, [`Error::Io`] where the system does not
    /// answer.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(Part::check_unchanged)
    }

    /// Whether the last look at one of the files found that it is another now.
    pub fn has_changed(&self) -> bool {
        self.parts.iter().any(Part::has_changed)
    }

    /// Remembers what the file has in `range`, which was read, for the day on which its ctime
    /// moves: otherwise only what one read had of a whole block is.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub(crate) fn remember(&self, range: Range<u64>) -> Result<(), Error> {
        let (part, _) = self.part_of(&range)?;
        part.remember(range)
    }

    /// Brings `range` into the page cache, and waits for it.
    ///
    /// # Errors
    /// As [`with_range`](Self::with_range).
    pub fn bring(&self, range: Range<u64>) -> Result<(), Error> {
        // A kernel that cannot be asked for pages is made to bring them.
        self.with_range(range, |bytes| {
            let firsts = bytes.iter().step_by(guard::page_bytes());
            firsts.for_each(|first| _ = std::hint::black_box(*first));
        })
    }

    /// Starts reading `range` ahead and does not wait for it. A hint: what lies outside of the part
    /// in which it begins is left out, and failures show when the range is read.
    pub fn will_need(&self, range: Range<u64>) {
        let part = self.part_at(range.start);
        let (start, end) = (range.start.max(part.base), range.end.min(part.end()));
        if start >= end {
            return;
        }
        if let Backing::Map(Guarded { pages, .. }) = &self.backing {
            pages.will_need(start as usize, (end - start) as usize);
            return;
        }
        if let (Ok(start), Ok(len)) = (i64::try_from(start - part.base), i64::try_from(end - start))
        {
            let _ = posix_fadvise(
                &part.file,
                start,
                len,
                PosixFadviseAdvice::POSIX_FADV_WILLNEED,
            );
        }
    }

    /// Whether the page cache holds all of `range`, so that a reader would not wait for a disk, as
    /// far as the kernel reports it. False if there is no mapping, or if no part contains the
    /// range.
    pub fn is_cached(&self, range: Range<u64>) -> bool {
        let Backing::Map(Guarded { pages, .. }) = &self.backing else {
            return false;
        };
        match self.part_of(&range) {
            Ok((_, len)) => pages.are_cached(range.start as usize, len),
            Err(_) => false,
        }
    }

    /// Whether the page cache holds `range`, judged by a sample of its bytes; true if the kernel
    /// does not report it. Unlike [`is_cached`](Self::is_cached) it also works for files of other
    /// users. False for a range that no part contains.
    pub fn seems_cached(&self, range: Range<u64>) -> bool {
        const STEP: usize = 4 << 20;
        let Ok((part, len)) = self.part_of(&range) else {
            return false;
        };
        let last = len.checked_sub(1);
        let mut sample = (0..len).step_by(STEP).chain(last);
        sample.all(|at| part.has_at_once(range.start + at as u64))
    }

    /// The last part that begins at `offset` or before it.
    fn part_at(&self, offset: u64) -> &Part {
        let behind = self.parts.partition_point(|part| part.base <= offset);
        &self.parts[behind.max(1) - 1]
    }

    /// The part in which `range` lies whole, and its length.
    fn part_of(&self, range: &Range<u64>) -> Result<(&Part, usize), Error> {
        let part = self.part_at(range.start);
        let out_of_range = || Error::OutOfRange {
            path: part.path.clone(),
            start: range.start,
            end: range.end,
            len: part.end(),
        };
        if range.start > range.end || range.end > part.end() {
            return Err(out_of_range());
        }
        let len = usize::try_from(range.end - range.start).map_err(|_| out_of_range())?;
        Ok((part, len))
    }

    /// The error for a page that the guard had to replace: it names the part of the model that
    /// changed.
    fn broken(&self) -> Error {
        let changed = self
            .parts
            .iter()
            .find_map(|part| part.check_unchanged().err());
        changed.unwrap_or_else(|| self.first().broken())
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
            Backing::Map(Guarded { pages, .. }) => pages.at(self.start),
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
    /// [`Error::Changed`] where the file was cut short or rewritten, [`Error::Io`]
    /// where a page could not be had.
    pub fn check(&self) -> Result<(), Error> {
        let Backing::Map(Guarded { slot, pages }) = &self.file.backing else {
            return self.file.check_unchanged();
        };
        let start = self.start as u64;
        let part = self.file.part_at(start);
        let len = part.end().min(start + self.len as u64) - start;
        let seen = part.seen(start, pages.bytes(self.start, len as usize));
        if slot.is_broken() {
            return Err(self.file.broken());
        }
        self.file.check_unchanged()?;
        part.keep(seen);
        Ok(())
    }
}

/// Maps the files and registers the mapping; `None` where either cannot be done, and `pread` has to
/// do.
fn map_guarded(parts: &[Part]) -> Option<Guarded> {
    if !guard::install() {
        return None;
    }
    let files: Vec<_> = parts
        .iter()
        .map(|part| (part.base, &part.file, part.identity.size))
        .collect();
    let pages = Pages::map(&files)?;
    let slot = guard::register(&pages)?;
    Some(Guarded { slot, pages })
}
