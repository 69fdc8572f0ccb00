//! Failures for files and model directories that do not respond or cannot be read.

use std::path::Path;
use std::time::Duration;

use rocmforge_failure::{Failure, Reason};

/// Delay after which a request may be sent again.
pub(super) const RETRY: Duration = Duration::from_secs(5);

/// UNAVAILABLE: no byte of a file was read for the time `since`.
pub(crate) fn file_silent(path: &Path, since: Duration) -> Failure {
    let (path, seconds) = (path.display().to_string(), since.as_secs());
    Failure::new(Reason::ModelFileSilent)
        .with("path", &path)
        .with("seconds", seconds.to_string())
        .retry(RETRY)
        .says(&format!(
            "the file has not answered for {seconds} s: {path}; check the server or the mount that it lies on, then \
             load it again"
        ))
}

/// UNAVAILABLE: it is unknown whether there is a model of this name, since a model directory has
/// not responded yet.
pub(crate) fn directory_silent(name: &str, dir: &Path, why: &str) -> Failure {
    let dir = dir.display().to_string();
    Failure::new(Reason::ModelDirSilent)
        .with("model", name)
        .with("dir", &dir)
        .retry(RETRY)
        .says(&format!(
            "no model '{name}' is loaded, and the model directory {dir} {why}, then ask again"
        ))
}

/// Adds to a failure that it may be due to a model directory that cannot be read.
pub(crate) fn beside_unreadable(failure: Failure, dir: &Path, why: &str) -> Failure {
    let dir = dir.display().to_string();
    // In front: what there is besides may be long.
    let message = format!("the model directory {dir} {why}; {}", failure.message());
    failure.with("dir", &dir).says(&message)
}
