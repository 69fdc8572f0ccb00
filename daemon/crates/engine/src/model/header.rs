//! Reads a model's header and vocabulary, sharing what models of other files have read before.

use std::path::Path;

use rocmforge_gguf::{Gguf, Glance, MappedFile};
use rocmforge_model::Model;
use rocmforge_tokenizer::Tokenizer;

use crate::api::error::{Error, from_gguf, from_model, from_tokenizer};

/// Maximum number of remarks on a file's defects in one line of the log.
const REMARKS_MAX: usize = 8;

/// Reads a file's header. Keys that it shares with headers read before are not stored again.
pub(super) fn open(name: &str, file: &MappedFile) -> Result<Gguf, Error> {
    Gguf::open_recognising(file).map_err(|e| from_gguf(name, file.path(), e))
}

/// The tokenizer of a file: shared with another model that has the same tokens, or made from the
/// whole header, which is read for that if necessary.
pub(super) fn tokenizer(
    name: &str,
    file: &MappedFile,
    gguf: &mut Gguf,
) -> Result<Tokenizer, Error> {
    let failed = |e| from_tokenizer(file.path(), &e);
    if let Some(shared) = Tokenizer::shared(gguf).map_err(failed)? {
        return Ok(shared);
    }
    if !gguf.is_whole() {
        *gguf = Gguf::open(file).map_err(|e| from_gguf(name, file.path(), e))?;
    }
    Tokenizer::from_gguf(gguf).map_err(failed)
}

/// Rejects files of the same format that are not models (adapters, projectors), and architectures
/// that do not work. Called before the tokenizer is made, which most of these files lack.
pub(super) fn refuse_other_kinds(gguf: &Gguf, path: &Path) -> Result<(), Error> {
    let glance = Glance::of(gguf, false);
    match glance.other_use {
        Some(other) => Err(Error::Unsupported(format!(
            "{}: it is {other}",
            path.display()
        ))),
        None => Model::check_architecture(gguf).map_err(|error| from_model(path, error)),
    }
}

/// Logs a file's defects that are tolerated, once for each load.
pub(super) fn tell_tolerated(
    name: &str,
    path: &Path,
    gguf: &Gguf,
    tokenizer: &Tokenizer,
    model: &Model,
) {
    let remarks = [gguf.tolerated(), tokenizer.tolerated(), model.tolerated()].concat();
    let Some((first, others)) = remarks.split_first() else {
        return;
    };
    let mut told = first.clone();
    for remark in others.iter().take(REMARKS_MAX - 1) {
        told += "; ";
        told += remark;
    }
    if remarks.len() > REMARKS_MAX {
        told += &format!("; and {} more", remarks.len() - REMARKS_MAX);
    }
    tracing::warn!(
        model = name,
        path = ?path,
        "the model is loaded although its file has this error: {told}"
    );
}
