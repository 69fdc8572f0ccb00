//! Reads the beginnings of files' headers to find what the files are for; each is cached while the
//! file is unchanged.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use nix::fcntl::OFlag;
use rocmforge_gguf::Glance;

use super::FILES_MAX;

/// Identity of a file's state: device, inode, length, times of its last changes, and whether its
/// name is that of a part.
type Identity = (u64, u64, u64, i128, i128, bool);

/// Cache of the headers that were read.
#[derive(Debug, Default)]
pub(super) struct Headers(Mutex<HashMap<Identity, Option<Glance>>>);

impl Headers {
    /// The purpose of a file by its header; `None` if it is not a GGUF file. Opens regular files
    /// only, and reads a bounded part.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub(super) fn glance(&self, real: &Path, is_part_named: bool) -> io::Result<Option<Glance>> {
        let mut options = OpenOptions::new();
        // What was swapped for it may be a FIFO.
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let file = options.read(true).custom_flags(flags.bits()).open(real);
        let mut file = file?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Ok(None);
        }
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        let identity = (
            found.dev(),
            found.ino(),
            found.len(),
            ns(found.mtime(), found.mtime_nsec()),
            ns(found.ctime(), found.ctime_nsec()),
            is_part_named,
        );
        if let Some(known) = self.known().get(&identity) {
            return Ok(known.clone());
        }
        let glance = Glance::read(&mut file, found.len(), is_part_named)?;
        let mut known = self.known();
        // Those that are gone are forgotten with the others, which are read once more.
        if known.len() >= 4 * FILES_MAX {
            known.clear();
        }
        known.insert(identity, glance.clone());
        Ok(glance)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<Identity, Option<Glance>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
