//! Addresses with files in them: one range that is reserved once, and each file mapped at its place
//! in it.
//!
//! *Invariants:* the range is unmapped when this is dropped and not before; what lies behind a
//! file's last page, up to the next file, is reserved and cannot be read (`PROT_NONE` in
//! `Pages::map`), and [`MappedFile`](super::MappedFile) lends no range that reaches there (test
//! `no_range_reaches_out_of_its_part`).

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use super::guard::page_bytes;

/// Set once the kernel has said that it does not know `MADV_POPULATE_READ` (before Linux 5.14).
pub(super) static NO_POPULATE: AtomicBool = AtomicBool::new(false);

/// A reserved range of addresses, read only.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<u8>,
    /// Whole pages.
    len: usize,
}

// SAFETY: the range belongs to this value alone, is only ever read, and is unmapped by whoever
// drops it.
unsafe impl Send for Pages {}
// SAFETY: as above; shared references read bytes, for which every value is valid.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps each file, with its length in bytes, at its offset from the range's start, a multiple
    /// of the page size. Offsets rise and no file reaches the next one's. `None` where the system
    /// refuses.
    pub(super) fn map(files: &[(u64, &File, u64)]) -> Option<Pages> {
        let page = page_bytes();
        let (last, _, last_len) = files.last()?;
        let whole = usize::try_from(last.checked_add(*last_len)?)
            .ok()?
            .checked_next_multiple_of(page)?;
        // SAFETY: a new range at an address that the kernel chooses; no memory of ours is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        let pages = Pages {
            start: NonNull::new(start.cast())?,
            len: whole,
        };
        for (offset, file, len) in files {
            let (offset, len) = (usize::try_from(*offset).ok()?, usize::try_from(*len).ok()?);
            assert!(
                offset.is_multiple_of(page) && offset + len <= pages.len,
                "a file lies at a page inside of the range"
            );
            // SAFETY: the pages replaced are of the range reserved above, of which nobody knows
            // yet. A mapping of a file of others may change or lose pages while it is read: its
            // bytes are only lent to `with_range`'s reader, every value of a byte is valid, a
            // change is told to the caller as an error after the reader ran, and a page that
            // vanishes raises SIGBUS, which the guard turns into zeros (module docs of `mapped`).
            let got = unsafe {
                libc::mmap(
                    pages.at(offset).cast_mut().cast(),
                    len,
                    libc::PROT_READ,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    file.as_raw_fd(),
                    0,
                )
            };
            if got == libc::MAP_FAILED {
                return None;
            }
        }
        Some(pages)
    }

    /// Bytes, whole pages.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of an offset.
    pub(super) fn at(&self, offset: usize) -> *const u8 {
        self.start.as_ptr().wrapping_add(offset).cast_const()
    }

    /// Bytes of one file. The caller answers for the range lying in one.
    pub(super) fn bytes(&self, start: usize, len: usize) -> &[u8] {
        assert!(
            start <= self.len && len <= self.len - start,
            "a range lies inside of the mapping"
        );
        // SAFETY: the range is mapped readable as long as `self` lives, but for what lies between
        // files, which `MappedFile::part_of` keeps ranges from; bytes may be any. On changes under
        // the reader: see `map`.
        unsafe { std::slice::from_raw_parts(self.at(start), len) }
    }

    fn advise(&self, start: usize, len: usize, advice: i32) -> io::Result<()> {
        let first = start - start % page_bytes();
        // SAFETY: the pages are of this range, and neither advice that is given changes what they
        // hold.
        let done = unsafe {
            libc::madvise(
                self.at(first).cast_mut().cast::<c_void>(),
                start + len - first,
                advice,
            )
        };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Makes the pages of a range present, or says why that cannot be.
    pub(super) fn populate(&self, start: usize, len: usize) -> io::Result<()> {
        if len == 0 || NO_POPULATE.load(Ordering::Relaxed) {
            return Ok(());
        }
        loop {
            match self.advise(start, len, libc::MADV_POPULATE_READ) {
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

    /// Starts reading a range ahead. A hint.
    pub(super) fn will_need(&self, start: usize, len: usize) {
        let _ = self.advise(start, len, libc::MADV_WILLNEED);
    }

    /// Whether all pages of a range are in the page cache, as far as the system reports.
    pub(super) fn are_cached(&self, start: usize, len: usize) -> bool {
        let states = self.cached(start, len);
        states.is_some_and(|states| states.iter().all(|state| state & 1 != 0))
    }

    /// Bytes of the pages of a range that are in the page cache, as far as the system reports.
    pub(super) fn cached_bytes(&self, start: usize, len: usize) -> u64 {
        let states = self.cached(start, len).unwrap_or_default();
        let pages = states.iter().filter(|&state| state & 1 != 0).count();
        (pages * page_bytes()) as u64
    }

    /// A byte for each page of a range, whose lowest bit says whether the page is in the page
    /// cache.
    fn cached(&self, start: usize, len: usize) -> Option<Vec<u8>> {
        let page = page_bytes();
        let first = start - start % page;
        let end = start + len;
        let mut states = vec![0u8; (end - first).div_ceil(page)];
        // SAFETY: the pages are of this range, and there is a byte for each of them; nothing is
        // read.
        let told = unsafe {
            libc::mincore(
                self.at(first).cast_mut().cast(),
                end - first,
                states.as_mut_ptr().cast(),
            )
        };
        (told == 0).then_some(states)
    }
}

/// Whether the system reports which pages of a file are cached: of files that this process neither
/// owns nor may write, Linux says that all are. So it is asked about a page far behind the
/// file's end, which cannot be.
pub(super) fn tells_cached(file: &File, len: u64) -> bool {
    const FAR: u64 = 1 << 30;
    let offset = len.checked_next_multiple_of(FAR).map(|end| end + FAR);
    let Some(offset) = offset.and_then(|offset| libc::off_t::try_from(offset).ok()) else {
        return false;
    };
    let page = page_bytes();
    // SAFETY: a new mapping at an address that the kernel chooses, which nobody reads.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            page,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset,
        )
    };
    if at == libc::MAP_FAILED {
        return false;
    }
    let mut state = 1u8;
    // SAFETY: the page was mapped above, and there is a byte for it; nothing is read.
    let told = unsafe { libc::mincore(at, page, &raw mut state) };
    // SAFETY: mapped above, and this function's alone.
    unsafe { libc::munmap(at, page) };
    told == 0 && state & 1 == 0
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range was reserved by `map`, is this value's alone, and nobody has a
        // reference into it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
