//! One file of a model: opened, told apart from others, and asked whether it is still what it was.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

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

/// A regular file, opened read only, and its place among the files of a model.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    /// The offset of its first byte.
    pub(super) base: u64,
}

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
        Ok(Part {
            identity: Identity::of(&meta),
            file,
            path: path.to_owned(),
            base: 0,
        })
    }

    /// One past the offset of its last byte.
    pub(super) fn end(&self) -> u64 {
        self.base + self.identity.size
    }

    /// Asks the system whether the file is still the one that was opened: one fstat.
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
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

    pub(super) fn failed(&self, op: &'static str, source: io::Error) -> Error {
        Error::Io {
            op,
            path: self.path.clone(),
            source,
        }
    }

    /// The error for a range that could not be read: that the file changed, if it did, else what the system said.
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
