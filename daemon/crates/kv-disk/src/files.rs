//! The files of a store: a directory that one process has for itself.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file whose lock the owner of a directory holds.
const LOCK: &str = "lock";

/// The file of the owner's note, and the one that takes its place.
const NOTE: &str = "note";
const NEW_NOTE: &str = "note.new";

/// Bytes of a note at most.
pub const NOTE_MAX: usize = 256 << 10;

/// Permissions of segment files.
const FILE_MODE: u32 = 0o600;

/// Permissions of the directory.
const DIRECTORY_MODE: u32 = 0o700;

/// Why a directory cannot be used for KV cache.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has the store open.
    #[error(
        "{} is in use by another process: give each daemon a directory of its own",
        .0.display()
    )]
    InUse(PathBuf),
    /// Other users could read prompts in it.
    #[error(
        "{} has mode {mode:04o}: other users could read prompts; run chmod 700 on it",
        path.display()
    )]
    Readable {
        /// The directory.
        path: PathBuf,
        /// The directory's permissions.
        mode: u32,
    },
    /// The path is not a directory, or it cannot be created or written to.
    #[error("{}: {error}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// What the system reports.
        error: io::Error,
    },
}

/// A file of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileInfo {
    /// The file's name without the directory.
    pub name: String,
    /// The file's length in bytes.
    pub bytes: u64,
    /// Modification time of the file.
    pub modified: SystemTime,
    /// Whether the entry of the directory is a regular file.
    pub is_regular: bool,
}

/// A directory of segment files. Tests inject faults here.
pub trait Files: Send + Sync {
    /// All files but the lock and the note.
    ///
    /// # Errors
    /// What the system reports.
    fn list(&self) -> io::Result<Vec<FileInfo>>;

    /// Creates a file that must not exist.
    ///
    /// # Errors
    /// What the system reports.
    fn create(&self, name: &str) -> io::Result<Box<dyn SegmentFile>>;

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// What the system reports.
    fn open(&self, name: &str) -> io::Result<Box<dyn SegmentFile>>;

    /// Deletes a file.
    ///
    /// # Errors
    /// What the system reports.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The owner's note, if there is one.
    ///
    /// # Errors
    /// What the system reports; [`io::ErrorKind::InvalidData`] of one that is too long.
    fn note(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Puts a note in the place of the one before.
    ///
    /// # Errors
    /// What the system reports; the one before is there then.
    fn set_note(&self, _note: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// An open segment file.
pub trait SegmentFile: Send {
    /// Reads all of `into` from an offset.
    ///
    /// # Errors
    /// What the system reports; [`io::ErrorKind::UnexpectedEof`] where the file is shorter.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at an offset.
    ///
    /// # Errors
    /// What the system reports; a part may be written then.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Cuts the file.
    ///
    /// # Errors
    /// What the system reports.
    fn truncate(&self, bytes: u64) -> io::Result<()>;

    /// Waits until the file's bytes are on the disk.
    ///
    /// # Errors
    /// What the system reports.
    fn sync(&self) -> io::Result<()>;

    /// Notes a use of the file in its time of modification.
    ///
    /// # Errors
    /// What the system reports.
    fn touch(&self, at: SystemTime) -> io::Result<()>;
}

/// A directory of the file system, locked while this value lives.
#[derive(Debug)]
pub struct DirectoryFiles {
    path: PathBuf,
    _lock: File,
}

impl DirectoryFiles {
    /// Makes the directory with mode 0700 if there is none, and locks it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |error| OpenError::Io {
            path: path.to_owned(),
            error,
        };
        if !path.exists() {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(DIRECTORY_MODE);
            builder.create(path).map_err(failed)?;
        }
        let found = path.metadata().map_err(failed)?;
        if !found.is_dir() {
            return Err(failed(io::ErrorKind::NotADirectory.into()));
        }
        let mode = found.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(OpenError::Readable {
                path: path.to_owned(),
                mode,
            });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = options.mode(FILE_MODE).open(path.join(LOCK));
        let lock = lock.map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }
}

impl Files for DirectoryFiles {
    fn list(&self) -> io::Result<Vec<FileInfo>> {
        let mut found = Vec::new();
        for entry in self.path.read_dir()? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if [LOCK, NOTE, NEW_NOTE].contains(&&*name) {
                continue;
            }
            // Links are not followed.
            let meta = entry.metadata()?;
            found.push(FileInfo {
                name,
                bytes: meta.len(),
                modified: meta.modified()?,
                is_regular: meta.is_file(),
            });
        }
        Ok(found)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let file = options.mode(FILE_MODE).open(self.path.join(name))?;
        // Whatever the umask was.
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        Ok(Box::new(file))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        let path = self.path.join(name);
        if !path.symlink_metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Box::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn note(&self) -> io::Result<Option<Vec<u8>>> {
        let path = self.path.join(NOTE);
        let file = match path.symlink_metadata() {
            Ok(found) if found.is_file() => File::open(path)?,
            Ok(_) => return Err(io::ErrorKind::InvalidInput.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.take(NOTE_MAX as u64 + 1).read_to_end(&mut bytes)?;
        match bytes.len() > NOTE_MAX {
            true => Err(io::ErrorKind::InvalidData.into()),
            false => Ok(Some(bytes)),
        }
    }

    fn set_note(&self, note: &[u8]) -> io::Result<()> {
        let new = self.path.join(NEW_NOTE);
        // One that another process left half written, or a link that somebody made.
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let file = options.mode(FILE_MODE).open(&new)?;
        file.write_all_at(note, 0)?;
        std::fs::rename(new, self.path.join(NOTE))
    }
}

impl SegmentFile for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn touch(&self, at: SystemTime) -> io::Result<()> {
        self.set_modified(at)
    }
}
