//! What a file is for, by the first keys of its header: a look that is cheap enough for every file
//! of a directory.
//!
//! Converters write `general.*` in front of the vocabulary, so a look reads [`GLANCE_BYTES`] of a
//! file, and up to [`GLANCE_BYTES_MAX`] only where these keys have not come by then. Whether a file
//! is a part of a model (`split.count`) is written behind the vocabulary: that takes the whole
//! header.

use std::io::{self, Read};

use crate::gguf::{Gguf, Keep};
use crate::limits::MAX_HEADER_BYTES;
use crate::other_use::OtherUse;
use crate::parse::{Parser, Step};
use crate::{Error, MappedFile};

/// Bytes that a look reads of each file.
const GLANCE_BYTES: u64 = 64 << 10;
/// Bytes that a look reads where the first ones do not say what the file is.
const GLANCE_BYTES_MAX: u64 = 1 << 20;

/// What the beginning of a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glance {
    /// `general.architecture`, if it has come, of at most 64 characters.
    pub architecture: Option<String>,
    /// What the file is, if it is no model.
    pub other_use: Option<OtherUse>,
    /// Number of parts of the split model to which the file belongs; 1 for a file that is not
    /// split, or if the header was not read that far.
    pub split_count: u64,
}

impl Glance {
    /// What a header says. Where `is_part_named` the file's name is that of a part, of which the
    /// first may have no tensors.
    pub fn of(gguf: &Gguf, is_part_named: bool) -> Glance {
        Glance::with(gguf, gguf.tensors().len() as u64, is_part_named)
    }

    fn of_other(other: OtherUse) -> Glance {
        Glance {
            architecture: None,
            other_use: Some(other),
            split_count: 1,
        }
    }

    fn with(gguf: &Gguf, n_tensors: u64, is_part_named: bool) -> Glance {
        let text = |key| gguf.str(key).ok().flatten();
        let has = |key| gguf.value(key).is_some();
        let (kind, architecture) = (text("general.type"), text("general.architecture"));
        let split_count = gguf.u64("split.count").ok().flatten().unwrap_or(1);
        let is_part = is_part_named && split_count > 1;
        let other_use = match (kind, architecture) {
            (Some("adapter"), _) => Some(OtherUse::Adapter),
            (Some("imatrix"), _) => Some(OtherUse::Imatrix),
            (Some("mmproj" | "clip" | "clip-vision"), _) | (_, Some("clip")) => {
                Some(OtherUse::Projector)
            }
            (_, Some("controlvector")) => Some(OtherUse::ControlVector),
            // Files from before `general.type`.
            _ if has("adapter.type") => Some(OtherUse::Adapter),
            _ if has("imatrix.chunk_count") || has("imatrix.datasets") => Some(OtherUse::Imatrix),
            _ if has("clip.has_vision_encoder") || has("clip.has_audio_encoder") => {
                Some(OtherUse::Projector)
            }
            _ if n_tensors == 0 && !is_part => Some(OtherUse::Vocabulary),
            _ => None,
        };
        Glance {
            architecture: architecture.map(|name| name.chars().take(64).collect()),
            other_use,
            split_count: split_count.max(1),
        }
    }

    /// Looks at a file of `file_len` bytes, read from its start; of a file with a part's name at
    /// its whole header. `None` where it cannot be read as a GGUF file, and what
    /// it is instead is not known: an open says why.
    ///
    /// # Errors
    /// Those of reading.
    pub fn read(
        file: &mut impl Read,
        file_len: u64,
        is_part_named: bool,
    ) -> io::Result<Option<Glance>> {
        let mut parser = Parser::new(file_len);
        let mut header = Vec::new();
        let mut want = GLANCE_BYTES;
        loop {
            let more = want.saturating_sub(header.len() as u64);
            let read = file.by_ref().take(more).read_to_end(&mut header)?;
            let need = match parser.advance(&header) {
                Ok(Step::Done) => None,
                Ok(Step::More(need)) => Some(need),
                Err(_) => return Ok(OtherUse::of_beginning(&header).map(Glance::of_other)),
            };
            let ends = need.is_none() || read == 0 || want >= MAX_HEADER_BYTES;
            if is_part_named && !ends {
                want = need.unwrap_or(0).max(2 * want).min(MAX_HEADER_BYTES);
                continue;
            }
            let so_far = parser.so_far(&header);
            // An older file has no type; its architecture stands in front all the same.
            let is_known = so_far.value("general.architecture").is_some()
                || so_far.value("general.type").is_some();
            if ends || is_known || want >= GLANCE_BYTES_MAX {
                let n_tensors = parser.n_tensors();
                return Ok(Some(Glance::with(&so_far, n_tensors, is_part_named)));
            }
            want = GLANCE_BYTES_MAX;
        }
    }
}

impl MappedFile {
    /// How many parts the model has that this file is of, as its header says (`split.count`); 1 for
    /// a whole file. Of a file that was joined of several the first one's.
    ///
    /// # Errors
    /// Every [`Error`] of the header group, and those of reading.
    pub fn split_count(&self) -> Result<u64, Error> {
        let gguf = Gguf::open_part(self, self.first_part(), Keep::All)?;
        Ok(gguf.u64("split.count")?.unwrap_or(1).max(1))
    }

    /// The offsets of the first file.
    pub(crate) fn first_part(&self) -> std::ops::Range<u64> {
        let first = self.parts().next().map(|(_, range)| range);
        first.unwrap_or(0..self.len())
    }
}
