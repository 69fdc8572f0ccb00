//! One file of a model: opened, told apart from others, and asked whether it is still what it was.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use nix::sys::statfs::fstatfs;

use crate::Error;

use super::direct::Direct;
use super::samples::{BLOCK, Samples, Seen};

/// How often content is compared again for a ctime that moved meanwhile.
const LOOKS_MAX: usize = 4;
/// How long content is waited for of a file that another machine or process answers for.
const FAR_WAIT_MAX: Duration = Duration::from_secs(10);
/// Bytes that are read when a file is opened; whoever opens it reads them next.
const READ_AT_OPEN: u64 = 4 * BLOCK;

/// What makes a file the one that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The device that the file is on.
    pub dev: u64,
    /// The file's inode on its device.
    pub inode: u64,
    /// The file's length in bytes.
    pub size: u64,
    /// Modification time of the file, in nanoseconds since 1970. A user who may write the file may
    /// also set it.
    pub mtime_ns: i128,
    /// When anything of it was last changed, by the system's own clock, in nanoseconds since 1970.
    pub ctime_ns: i128,
}

impl Identity {
    /// The identity of a file by its metadata.
    pub fn of(meta: &Metadata) -> Identity {
        Identity {
            dev: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether both are of one inode, whatever it has.
    pub fn is_same_inode(&self, other: &Identity) -> bool {
        (self.dev, self.inode) == (other.dev, other.inode)
    }

    /// Whether both identities are of the same file with the same content, judged by its times.
    fn is_like(&self, other: &Identity) -> bool {
        let without = |identity: &Identity| Identity {
            ctime_ns: 0,
            ..*identity
        };
        without(self) == without(other)
    }
}

fn ns(secs: i64, ns: i64) -> i128 {
    i128::from(secs) * 1_000_000_000 + i128::from(ns)
}

/// Nanoseconds since 1970, up to the year 2262.
fn to_i64(ns: i128) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: i128| {
            let (secs, ns) = (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000));
            format!("{secs}.{ns:09}")
        };
        write!(
            f,
            "{} bytes, inode {}:{}, modified at {}, changed at {}",
            self.size,
            self.dev,
            self.inode,
            seconds(self.mtime_ns),
            seconds(self.ctime_ns)
        )
    }
}

/// A regular file, opened read only, and its place among the files of a model.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Identity of the file when it was opened, without the ctime, which is in `ctime_ns`.
    pub(super) identity: Identity,
    /// The ctime up to which the content is known to be the same.
    ctime_ns: AtomicI64,
    /// Whether the content was found to differ. The lock is held while content is compared.
    is_other: Mutex<bool>,
    /// Whether the last look at the file found a change.
    has_changed: AtomicBool,
    pub(super) samples: Arc<Samples>,
    /// Whether a thread compares the content of a file that may not answer.
    is_compared: Arc<AtomicBool>,
    /// The offset of its first byte.
    pub(super) base: u64,
    /// Opened when it is first asked for.
    direct: OnceLock<Option<Direct>>,
    /// Whether another process or machine answers for it.
    pub(super) is_far: bool,
    /// Whether the part is anonymous memory of this process instead of a file.
    pub(super) is_memory: bool,
}

/// The numbers of file systems whose files a server or a process answers for, as `statfs` has them:
/// FUSE (virtiofs too), NFS, SMB in its three forms, Ceph, 9p, AFS in both, Lustre, GPFS, BeeGFS,
/// OrangeFS, Coda, shared folders of VirtualBox.
///
/// Source: `include/uapi/linux/magic.h` of the kernel; Lustre, GPFS, BeeGFS and VirtualBox from
/// their own headers.
const FAR: [u32; 15] = [
    0x6573_5546,
    0x6969,
    0x517b,
    0xfe53_4d42,
    0xff53_4d42,
    0x00c3_6400,
    0x0102_1997,
    0x5346_414f,
    0x6b41_4653,
    0x0bd0_0bd0,
    0x4750_4653,
    0x1983_0326,
    0x2003_0528,
    0x7375_7245,
    0x786f_4256,
];

impl Part {
    /// See [`MappedFile::open`](super::MappedFile::open).
    pub(super) fn open(path: &Path) -> Result<Part, Error> {
        let failed = |op| {
            move |source| Error::Io {
                op,
                path: path.to_owned(),
                source,
            }
        };
        // Looked at before it is opened, because opening some devices has effects; and again after,
        // because the name may have been given to something else in between.
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
        let identity = Identity::of(&meta);
        // One that does not say what it is has somebody else to ask.
        let system = fstatfs(&file).map(|found| found.filesystem_type().0 as u32);
        let samples = Samples::new(identity.size);
        // What cannot be read here fails where it is read.
        if let Ok(seen) = samples.read(&file, 0, READ_AT_OPEN.min(identity.size)) {
            samples.keep(seen);
        }
        Ok(Part {
            is_far: system.map_or(true, |number| FAR.contains(&number)),
            ctime_ns: AtomicI64::new(to_i64(identity.ctime_ns)),
            is_other: Mutex::new(false),
            has_changed: AtomicBool::new(false),
            samples: Arc::new(samples),
            is_compared: Arc::default(),
            identity,
            file,
            path: path.to_owned(),
            base: 0,
            direct: OnceLock::new(),
            is_memory: false,
        })
    }

    /// Memory of this process that has a descriptor, whose content is complete, at an offset.
    pub(super) fn of_memory(file: File, path: PathBuf, base: u64) -> io::Result<Part> {
        let identity = Identity::of(&file.metadata()?);
        Ok(Part {
            is_far: false,
            ctime_ns: AtomicI64::new(to_i64(identity.ctime_ns)),
            is_other: Mutex::new(false),
            has_changed: AtomicBool::new(false),
            samples: Arc::new(Samples::new(identity.size)),
            is_compared: Arc::default(),
            identity,
            file,
            path,
            base,
            direct: OnceLock::new(),
            is_memory: true,
        })
    }

    /// What reads it past the page cache; `None` where nothing does.
    pub(super) fn direct(&self) -> Option<&Direct> {
        let find = || Direct::of(self).filter(|_| !self.is_memory);
        self.direct.get_or_init(find).as_ref()
    }

    /// One past the offset of its last byte.
    pub(super) fn end(&self) -> u64 {
        self.base + self.identity.size
    }

    /// Identity of the file when it was opened, with the ctime that is accepted now.
    pub(super) fn identity(&self) -> Identity {
        Identity {
            ctime_ns: i128::from(self.ctime_ns.load(Ordering::Relaxed)),
            ..self.identity
        }
    }

    /// Whether the last look at the file found a change.
    pub(super) fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed)
    }

    /// Asks the system whether the file is still the one that was opened: one fstat.
    ///
    /// Where the ctime moved and the mtime did not, what was read of the content is compared with
    /// what is there now: see [`samples`](super::samples).
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
        if !self.has_changed() && self.look()? == self.identity() {
            return Ok(());
        }
        let looked = self.look_closely();
        let has_changed = matches!(looked, Err(Error::Changed { .. }));
        self.has_changed.store(has_changed, Ordering::Relaxed);
        looked
    }

    /// [`check_unchanged`](Self::check_unchanged) behind a read: what was seen is what the file had
    /// if it is unchanged.
    pub(super) fn check_read(&self, seen: Vec<Seen>) -> Result<(), Error> {
        self.check_unchanged()?;
        self.keep(seen);
        Ok(())
    }

    /// Remembers what was read, where the file is known to be unchanged since.
    pub(super) fn keep(&self, seen: Vec<Seen>) {
        self.samples.keep(seen);
    }

    /// What of `bytes`, which were read at `offset`, is to be remembered.
    pub(super) fn seen(&self, offset: u64, bytes: &[u8]) -> Vec<Seen> {
        self.samples.of(offset - self.base, bytes)
    }

    /// Remembers what the file has in all blocks that `range` touches.
    pub(super) fn remember(&self, range: Range<u64>) -> Result<(), Error> {
        let (start, end) = (range.start - self.base, range.end - self.base);
        let seen = self.samples.read(&self.file, start, end);
        self.check_read(seen.map_err(|e| self.unreadable(e))?)
    }

    fn look(&self) -> Result<Identity, Error> {
        let meta = self.file.metadata().map_err(|e| self.failed("stat", e))?;
        Ok(Identity::of(&meta))
    }

    fn look_closely(&self) -> Result<(), Error> {
        let mut is_other = self.is_other.lock().unwrap_or_else(PoisonError::into_inner);
        // What another thread has accepted meanwhile may be newer than the look before.
        let (mut now, was) = (self.look()?, self.identity());
        for _ in 0..LOOKS_MAX {
            if *is_other || !now.is_like(&was) {
                break;
            }
            if now == was {
                return Ok(());
            }
            *is_other = !self.is_content().map_err(|e| self.failed("read", e))?;
            let then = std::mem::replace(&mut now, self.look()?);
            if now == then && !*is_other {
                self.ctime_ns.store(to_i64(now.ctime_ns), Ordering::Relaxed);
                return Ok(());
            }
        }
        Err(Error::Changed {
            path: self.path.clone(),
            was: Box::new(was),
            now: Box::new(now),
        })
    }

    /// Whether what was read of the content is there still.
    fn is_content(&self) -> io::Result<bool> {
        if !self.is_far {
            return self.samples.agree(&self.file);
        }
        // On a thread of its own, which nobody joins: such a read may never end. One of a file at
        // once, however long it takes.
        let took_long = || Err(ErrorKind::TimedOut.into());
        if self.is_compared.swap(true, Ordering::Relaxed) {
            return took_long();
        }
        let (samples, file) = (Arc::clone(&self.samples), self.file.try_clone());
        let is_compared = Arc::clone(&self.is_compared);
        let (tell, told) = mpsc::sync_channel(1);
        let compare = move || {
            let agree = file.and_then(|file| samples.agree(&file));
            is_compared.store(false, Ordering::Relaxed);
            // Nobody listens any more where it took too long.
            let _ = tell.send(agree);
        };
        let thread = std::thread::Builder::new().name("compare".to_owned());
        if let Err(error) = thread.spawn(compare) {
            self.is_compared.store(false, Ordering::Relaxed);
            return Err(error);
        }
        told.recv_timeout(FAR_WAIT_MAX)
            .unwrap_or_else(|_| took_long())
    }

    pub(super) fn failed(&self, op: &'static str, source: io::Error) -> Error {
        Error::Io {
            op,
            path: self.path.clone(),
            source,
        }
    }

    /// The error for a range that could not be read: that the file changed, if it did, else the
    /// system's error.
    pub(super) fn unreadable(&self, source: io::Error) -> Error {
        match self.check_unchanged() {
            Err(changed) => changed,
            Ok(()) => self.failed("read", source),
        }
    }

    /// Fills `dst` from an offset on, all of it in this file.
    pub(super) fn read(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        let read = self.file.read_exact_at(dst, offset - self.base);
        read.map_err(|e| self.unreadable(e))
    }

    /// Whether the byte at an offset can be read without waiting for a disk; true if the file
    /// system does not report it.
    pub(super) fn has_at_once(&self, offset: u64) -> bool {
        let mut byte = 0u8;
        let into = libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let Ok(offset) = libc::off_t::try_from(offset - self.base) else {
            return false;
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: it writes the one byte that it is told of, which lives until it has returned.
        let read = unsafe { libc::preadv2(fd, &raw const into, 1, offset, libc::RWF_NOWAIT) };
        match read {
            1 => true,
            0 => false,
            _ => io::Error::last_os_error().kind() != ErrorKind::WouldBlock,
        }
    }

    /// The error for a page that the guard had to make up.
    pub(super) fn broken(&self) -> Error {
        self.unreadable(io::Error::from_raw_os_error(libc::EIO))
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
