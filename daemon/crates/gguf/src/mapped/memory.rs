//! Bytes that this process keeps in memory behind the files of a model, and that are read as these
//! are: what it made itself, and uploads with the model's tensors.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::Error;
use crate::limits::PART_ALIGNMENT;

use super::part::Part;
use super::{Backing, MappedFile, ReadMode};

/// Bytes that are collected before they are written.
const WRITE_BYTES: usize = 1 << 20;

impl MappedFile {
    /// Bytes of memory that keep the files apart from changed ones, none of their content, and
    /// those that are kept in memory behind them.
    pub fn memory_bytes(&self) -> usize {
        let content = |part: &Part| match part.is_memory {
            true => part.identity.size as usize,
            false => 0,
        };
        let bytes = |part: &Part| size_of::<Part>() + part.samples.memory_bytes() + content(part);
        self.parts.iter().map(bytes).sum()
    }

    /// The offset at which bytes in memory would begin ([`MappedFile::with_memory`]); `None` where
    /// the files leave no room for any.
    pub fn memory_start(&self) -> Option<u64> {
        self.len().checked_next_multiple_of(PART_ALIGNMENT)
    }

    /// The files with bytes behind them that `write` gives and this process keeps in memory, from
    /// [`MappedFile::memory_start`] on. Neither the model's size nor its identity counts them.
    ///
    /// # Errors
    /// [`Error::Io`] where there is no memory for them, or what `write` fails with.
    pub fn with_memory(
        self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<MappedFile, Error> {
        let made = make(write).and_then(|file| {
            let base = self
                .memory_start()
                .ok_or(io::Error::from(io::ErrorKind::FileTooLarge))?;
            Part::of_memory(file, self.path().to_owned(), base)
        });
        let part = made.map_err(|source| Error::Io {
            op: "keep in memory what belongs to",
            path: self.path().to_owned(),
            source,
        })?;
        let mode = match self.backing {
            Backing::Map(_) => ReadMode::Map,
            Backing::Pread => ReadMode::Pread,
        };
        let mut parts = self.parts;
        parts.push(part);
        Ok(MappedFile::of(parts, mode))
    }
}

fn make(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<File> {
    let memory = memfd_create(c"rocmforge", MFdFlags::MFD_CLOEXEC)?;
    let mut file = BufWriter::with_capacity(WRITE_BYTES, File::from(memory));
    write(&mut file)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)
}
