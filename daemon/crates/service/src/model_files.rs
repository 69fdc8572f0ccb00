//! Decides which files a client may load: regular files below one of the model directories, after
//! links are resolved.
//!
//! The file is opened first, as a bare reference that neither reads nor blocks (`O_PATH`), and
//! judged by what was opened: its real path as the kernel knows it, its type, its inode. A link or
//! directory swapped meanwhile can therefore not lead elsewhere. The mapping that follows has to be
//! of the same inode.
//!
//! A split model is opened by its first part; the others are looked for beside it and judged like
//! it.
//!
//! *Invariant:* no reply reveals whether something outside of the model directories exists (test
//! `what_exists_outside_and_what_does_not_look_the_same`).

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use rocmforge_gguf::{MappedFile, PartName, ReadMode};

mod dirs;
mod headers;
mod hub;
mod links;
mod list;
mod unserved;

pub use dirs::{DirState, ModelDirError, ModelDirs};
pub(crate) use hub::HubPlace;
pub(crate) use list::Found;
pub use list::ModelFile;
pub use unserved::Unserved;

/// Maximum number of listed files.
pub const FILES_MAX: usize = 4096;
/// Maximum length of a path in bytes, the same as the system's.
pub const MODEL_PATH_MAX: usize = 4096;
/// Number of attempts to open a file that is replaced meanwhile.
const OPEN_TRIES: u32 = 3;

/// A count followed by "is" or "are".
fn are(n: usize) -> String {
    match n {
        1 => "1 is".to_owned(),
        n => format!("{n} are"),
    }
}

/// Why a model file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// The string cannot be a path.
    #[error("{message}")]
    BadPath {
        /// What is wrong with the path, and what is allowed.
        message: String,
    },
    /// The file is, or may be, outside of the model directories.
    #[error("{}: not below a model directory once links are resolved ({}); move the file there, or start the daemon with another --model-dir", path.display(), List(dirs))]
    Outside {
        /// The path in the request.
        path: PathBuf,
        /// The model directories.
        dirs: Vec<PathBuf>,
    },
    /// No model directory is configured.
    #[error(
        "the daemon opens no files because it was started without a model directory; start it with --model-dir DIR (model_dir in the file)"
    )]
    NoModelDir,
    /// A model directory in which the file may lie has not responded yet, or is missing.
    #[error("the model directory {} {why}, then try again", dir.display())]
    DirSilent {
        /// The model directory that does not respond.
        dir: PathBuf,
        /// What is wrong with the directory, and what to do.
        why: String,
    },
    /// There is no file at the path.
    #[error(
        "no such file; tried {}; give the path of a file below a model directory",
        List(tried)
    )]
    NotFound {
        /// The paths that were tried.
        tried: Vec<PathBuf>,
    },
    /// Parts of a split model are not beside the others.
    #[error(
        "{} is one of {count} parts of a model, of which {} not there: {}; put what is missing beside it",
        path.display(), are(missing.len()), List(missing)
    )]
    MissingParts {
        /// The path in the request.
        path: PathBuf,
        /// Number of parts of the model, according to the part's name.
        count: u32,
        /// Paths of the missing parts.
        missing: Vec<PathBuf>,
    },
    /// The path is a part of a split model other than the first.
    #[error("{} is part {number} of {count} of a model; give the first part: {}", path.display(), first.display())]
    NotFirstPart {
        /// The path in the request.
        path: PathBuf,
        /// Number of the part, from 1.
        number: u32,
        /// Number of parts of the model.
        count: u32,
        /// Path of the model's first part.
        first: PathBuf,
    },
    /// The path is not a regular file.
    #[error("{} is {kind}, not a regular file; give the path of a .gguf file", path.display())]
    NotAFile {
        /// The path in the request.
        path: PathBuf,
        /// What the path is instead, such as a directory.
        kind: &'static str,
    },
    /// The daemon's user may not read the file.
    #[error("{} may not be read by the daemon's user {user}; change its mode or owner", path.display())]
    Unreadable {
        /// The path in the request.
        path: PathBuf,
        /// User id of the daemon.
        user: u32,
    },
    /// The file is being replaced repeatedly.
    #[error("{} is being replaced while it is opened; load it when it stays", path.display())]
    Replaced {
        /// The path in the request.
        path: PathBuf,
    },
    /// The file is empty.
    #[error("{} is empty: the download or copy did not finish; fetch the file again", path.display())]
    Empty {
        /// The path in the request.
        path: PathBuf,
    },
    /// The process, or the system, has too many files open.
    #[error("{} cannot be opened now: too many files are open; unload models, or raise the limit (ulimit -n, LimitNOFILE= in the unit)", path.display())]
    TooManyFiles {
        /// The path in the request.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{} cannot be opened: {message}; check the disk or the mount that it lies on", path.display())]
    Io {
        /// The path in the request.
        path: PathBuf,
        /// The system's error message.
        message: String,
    },
}

struct List<'a>(&'a [PathBuf]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, path) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{}", path.display())?;
        }
        Ok(())
    }
}

/// The error for a failed system call that has no variant of its own.
fn io_error(path: &Path, error: &io::Error) -> ModelFileError {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENAMETOOLONG) => ModelFileError::BadPath {
            message:
                "a part of the path is longer than the file system allows, 255 bytes as a rule"
                    .to_owned(),
        },
        Some(Errno::EMFILE | Errno::ENFILE) => ModelFileError::TooManyFiles {
            path: path.to_owned(),
        },
        _ => ModelFileError::Io {
            path: path.to_owned(),
            message: error.to_string(),
        },
    }
}

impl ModelDirs {
    /// Opens and maps the file, and the other parts if it is the first part of a split model. A
    /// relative path is looked for below each model directory in turn. Blocks on the file system;
    /// call it on a blocking thread.
    ///
    /// # Errors
    /// [`ModelFileError`].
    pub fn open(&self, path: &Path) -> Result<MappedFile, ModelFileError> {
        let bytes = path.as_os_str().as_encoded_bytes();
        if bytes.is_empty() || bytes.len() > MODEL_PATH_MAX {
            return Err(ModelFileError::BadPath {
                message: format!(
                    "the path has {} bytes; 1 to {MODEL_PATH_MAX} are allowed",
                    bytes.len()
                ),
            });
        }
        if bytes.contains(&0) {
            return Err(ModelFileError::BadPath {
                message: "the path has a zero byte; give it without".to_owned(),
            });
        }
        if self.is_empty() {
            return Err(ModelFileError::NoModelDir);
        }
        self.ask_again();
        let silent = |dir: &Path| ModelFileError::DirSilent {
            dir: dir.to_owned(),
            why: self.why_silent(dir),
        };
        if path.is_absolute() {
            return match self.silent_above(path) {
                Some(dir) => Err(silent(dir)),
                None => self.open_model(path),
            };
        }
        let mut tried = Vec::new();
        let mut refused = self.silent().next().map(silent);
        for dir in self.real() {
            match self.open_model(&dir.join(path)) {
                Ok(file) => return Ok(file),
                Err(ModelFileError::NotFound { tried: one }) => tried.extend(one),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or(ModelFileError::NotFound { tried }))
    }

    /// Opens all parts of a model, each of which has to be a file that could be opened by itself.
    /// Part names follow the path in the request, not the targets of links.
    fn open_model(&self, path: &Path) -> Result<MappedFile, ModelFileError> {
        let Some(name) = PartName::of(path) else {
            return self.open_absolute(path, ReadMode::Map);
        };
        // Mapped once all are there.
        let first = self.open_absolute(path, ReadMode::Pread)?;
        // A model that was merged or quantized anew under the name of a part is a whole one, as for
        // llama.cpp; a header that cannot be read is told of when the model is made.
        if matches!(first.split_count(), Ok(1)) {
            tracing::warn!(
                path = ?path,
                "the file has the name of part {} of {}, and is whole by its header; it is opened as one file",
                name.number(),
                name.count()
            );
            return self.open_absolute(path, ReadMode::Map);
        }
        if name.number() != 1 {
            return Err(ModelFileError::NotFirstPart {
                path: path.to_owned(),
                number: name.number(),
                count: name.count(),
                first: name.path(1),
            });
        }
        let refused = |error: rocmforge_gguf::Error| ModelFileError::Io {
            path: path.to_owned(),
            message: error.to_string(),
        };
        let (mut parts, mut missing) = (vec![first], Vec::new());
        let paths = name.paths().map_err(|error| ModelFileError::BadPath {
            message: error.to_string(),
        })?;
        for part in paths.skip(1) {
            match self.open_absolute(&part, ReadMode::Pread) {
                Ok(part) => parts.push(part),
                Err(ModelFileError::NotFound { .. }) => missing.push(part),
                Err(error) => return Err(error),
            }
        }
        if !missing.is_empty() {
            return Err(ModelFileError::MissingParts {
                path: path.to_owned(),
                count: name.count(),
                missing,
            });
        }
        MappedFile::join(parts, ReadMode::Map).map_err(refused)
    }

    fn open_absolute(&self, path: &Path, mode: ReadMode) -> Result<MappedFile, ModelFileError> {
        for _ in 0..OPEN_TRIES {
            if let Some(file) = self.open_once(path, mode)? {
                return Ok(file);
            }
        }
        Err(ModelFileError::Replaced {
            path: path.to_owned(),
        })
    }

    /// Opens and maps a file once; `None` if it was replaced between the check and the mapping.
    fn open_once(&self, path: &Path, mode: ReadMode) -> Result<Option<MappedFile>, ModelFileError> {
        let io_error = |error: io::Error| io_error(path, &error);
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags((OFlag::O_PATH | OFlag::O_CLOEXEC).bits());
        let reference = match options.open(path) {
            Ok(reference) => reference,
            Err(error) => return Err(self.explain(path, error)),
        };
        let real = std::fs::read_link(format!("/proc/self/fd/{}", reference.as_raw_fd()))
            .map_err(io_error)?;
        if !self.holds(&real) {
            return Err(self.outside(path));
        }
        let found = reference.metadata().map_err(io_error)?;
        if found.nlink() == 0 {
            return Ok(None);
        }
        let kind = found.file_type();
        if !kind.is_file() {
            let kind = if kind.is_dir() {
                "a directory"
            } else if kind.is_fifo() {
                "a FIFO"
            } else if kind.is_socket() {
                "a socket"
            } else {
                "a device"
            };
            return Err(ModelFileError::NotAFile {
                path: path.to_owned(),
                kind,
            });
        }
        // Asked here, so that the answer rests on the error of the system and not on
        // another crate's words for it.
        if let Err(error) = std::fs::File::open(format!("/proc/self/fd/{}", reference.as_raw_fd()))
        {
            return Err(match error.kind() {
                io::ErrorKind::PermissionDenied => self.unreadable(path),
                _ => io_error(error),
            });
        }
        let file = match MappedFile::open_with(&real, mode) {
            Ok(file) => file,
            Err(rocmforge_gguf::Error::Empty { .. }) => {
                return Err(ModelFileError::Empty {
                    path: path.to_owned(),
                });
            }
            // It was a regular file a moment ago, so that the name has been given to something
            // else.
            Err(rocmforge_gguf::Error::NotRegular { .. }) => return Ok(None),
            Err(rocmforge_gguf::Error::Io { source, .. }) => return Err(io_error(source)),
            Err(error) => {
                return Err(ModelFileError::Io {
                    path: path.to_owned(),
                    message: error.to_string(),
                });
            }
        };
        let mapped = file.identity();
        Ok((mapped.dev == found.dev() && mapped.inode == found.ino()).then_some(file))
    }

    /// The reason for which `path` cannot be opened, without revealing anything outside: follows
    /// the path from the model directory as long as every step stays below one.
    fn explain(&self, path: &Path, error: io::Error) -> ModelFileError {
        let below = self.known().find_map(|(given, real)| {
            let rest = path
                .strip_prefix(real)
                .or_else(|_| path.strip_prefix(given))
                .ok()?;
            Some((real, rest))
        });
        let Some((dir, rest)) = below else {
            return self.outside(path);
        };
        let mut at = dir.to_owned();
        for step in rest.components() {
            match step {
                Component::Normal(name) => at.push(name),
                Component::ParentDir => at.push(".."),
                Component::CurDir | Component::RootDir | Component::Prefix(_) => continue,
            }
            match at.canonicalize() {
                Ok(real) if self.holds(&real) => at = real,
                Ok(_) => return self.outside(path),
                // A link that cannot be followed may point anywhere.
                Err(_) if at.symlink_metadata().is_ok_and(|found| found.is_symlink()) => {
                    return self.outside(path);
                }
                Err(step_error) => {
                    return match step_error.kind() {
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                            ModelFileError::NotFound {
                                tried: vec![path.to_owned()],
                            }
                        }
                        io::ErrorKind::PermissionDenied => self.unreadable(path),
                        _ => io_error(path, &step_error),
                    };
                }
            }
        }
        // Every step exists now; the error came from a race or from the last open.
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ModelFileError::NotFound {
                tried: vec![path.to_owned()],
            },
            io::ErrorKind::PermissionDenied => self.unreadable(path),
            _ => io_error(path, &error),
        }
    }

    fn outside(&self, path: &Path) -> ModelFileError {
        ModelFileError::Outside {
            path: path.to_owned(),
            dirs: self.named().map(Path::to_owned).collect(),
        }
    }

    fn unreadable(&self, path: &Path) -> ModelFileError {
        ModelFileError::Unreadable {
            path: path.to_owned(),
            user: nix::unistd::geteuid().as_raw(),
        }
    }
}
