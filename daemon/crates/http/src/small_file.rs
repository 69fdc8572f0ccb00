//! Reads small files that settings name: tokens, certificates, keys.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Reads a regular file of at most `most` bytes. For a secret file, `if_open` is the advice to log
/// if every user can read it.
///
/// # Errors
/// A message with the file's path.
pub(super) fn read(path: &Path, most: u64, if_open: Option<&str>) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("{shown} cannot be read: {error}");
    // A FIFO would be waited for.
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)
        .map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(format!("{shown} is not a regular file; name one that is"));
    }
    if let Some(what_to_do) = if_open
        && found.permissions().mode() & 0o007 != 0
    {
        return Err(format!("{shown} is open to every user; {what_to_do}"));
    }
    let mut bytes = Vec::new();
    file.take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > most {
        return Err(format!(
            "{shown} has more than {most} bytes, so it is another file; name the right one"
        ));
    }
    Ok(bytes)
}
