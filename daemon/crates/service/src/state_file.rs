//! Files that keep state over restarts: read up to a maximum size, and replaced atomically.
//!
//! *Invariant:* a reader finds the old content or the new one, whenever the writer is killed.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The content of a file; `None` if it does not exist. Blocks.
///
/// # Errors
/// An error of the file system, or the file has more than `max_bytes`.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match OpenOptions::new()
        .read(true)
        // A FIFO would be waited for.
        .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(io::Error::other(format!("more than {max_bytes} bytes")));
    }
    Ok(Some(bytes))
}

/// Replaces a file atomically; only its owner may read it. Blocks.
///
/// # Errors
/// An error of the file system; the old content stays.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let beside = beside(path, ".new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

/// The path with `suffix` appended to its file name.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut beside = OsString::from(path);
    beside.push(suffix);
    PathBuf::from(beside)
}
