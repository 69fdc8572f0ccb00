//! One file of a model: opened, told apart from others, and asked whether it is still what it was.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nix::sys::statfs::fstatfs;

use crate::Error;

use super::direct::Direct;

/// What makes a file the one that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The device that the file is on.
    pub dev: u64,
    /// Its inode there.
    pub inode: u64,
    /// Its length in bytes.
    pub size: u64,
    /// When it was last written, in nanoseconds since 1970; whoever may write it may also set this.
    pub mtime_ns: i128,
    /// When anything of it was last changed, by the system's own clock, in nanoseconds since 1970.
    pub ctime_ns: i128,
}

impl Identity {
    fn of(meta: &Metadata) -> Identity {
        Identity {
            dev: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether both are of one file of one content, as far as its own times say.
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

/// What of a file may change and move its ctime though its content stays: permissions, owner,
/// links, name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    links: u64,
    name: Option<PathBuf>,
}

impl Attributes {
    fn of(file: &File, meta: &Metadata) -> Attributes {
        Attributes {
            mode: meta.mode(),
            uid: meta.uid(),
            gid: meta.gid(),
            links: meta.nlink(),
            // Where it is now, or that it is nowhere, as the system knows it; unknown without
            // /proc.
            name: std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok(),
        }
    }
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
    /// As it was opened, but for the ctime, which is in `known`.
    pub(super) identity: Identity,
    /// The ctime up to which the content is known to be the same, and the attributes then.
    known: Mutex<(i128, Attributes)>,
    /// The offset of its first byte.
    pub(super) base: u64,
    /// Opened when it is first asked for.
    direct: OnceLock<Option<Direct>>,
    /// Whether another process or machine answers for it.
    pub(super) is_far: bool,
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
        Ok(Part {
            is_far: system.map_or(true, |number| FAR.contains(&number)),
            known: Mutex::new((identity.ctime_ns, Attributes::of(&file, &meta))),
            identity,
            file,
            path: path.to_owned(),
            base: 0,
            direct: OnceLock::new(),
        })
    }

    /// What reads it past the page cache; `None` where nothing does.
    pub(super) fn direct(&self) -> Option<&Direct> {
        self.direct.get_or_init(|| Direct::of(self)).as_ref()
    }

    /// One past the offset of its last byte.
    pub(super) fn end(&self) -> u64 {
        self.base + self.identity.size
    }

    /// What it was when it was opened, with the ctime that is accepted now.
    pub(super) fn identity(&self) -> Identity {
        Identity {
            ctime_ns: self.known().0,
            ..self.identity
        }
    }

    /// Held for moments, by whoever looks at the file, and for longer only where its ctime moved.
    fn known(&self) -> MutexGuard<'_, (i128, Attributes)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the system whether the file is still the one that was opened: one fstat.
    ///
    /// A ctime that moved with the mtime where it was is a rewrite whose time was put back, unless
    /// a change of permissions, owner, links or name explains it. (One that comes together with
    /// such a change is not told from it.)
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
        let look = || self.file.metadata().map_err(|e| self.failed("stat", e));
        if Identity::of(&look()?) == self.identity() {
            return Ok(());
        }
        let mut known = self.known();
        // Looked at again: what another thread has accepted meanwhile may be newer than that look.
        let meta = look()?;
        let (now, was) = (
            Identity::of(&meta),
            Identity {
                ctime_ns: known.0,
                ..self.identity
            },
        );
        if now == was {
            return Ok(());
        }
        if now.is_like(&was) {
            let attributes = Attributes::of(&self.file, &meta);
            if attributes != known.1 {
                *known = (now.ctime_ns, attributes);
                return Ok(());
            }
        }
        Err(Error::Changed {
            path: self.path.clone(),
            was: Box::new(was),
            now: Box::new(now),
        })
    }

    pub(super) fn failed(&self, op: &'static str, source: io::Error) -> Error {
        Error::Io {
            op,
            path: self.path.clone(),
            source,
        }
    }

    /// The error for a range that could not be read: that the file changed, if it did, else what
    /// the system said.
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

    /// Whether the byte at an offset can be read without waiting for a disk, or the file system
    /// does not tell.
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
