//! Failures for paths of model files that cannot be opened.

use std::path::Path;
use std::time::Duration;

use rocmforge_failure::{Failure, Reason};

use super::silent::RETRY;
use crate::model_files::{ModelFileError, Unserved};

/// The failure for a link: PERMISSION_DENIED if it leads out of the model directories, NOT_FOUND if
/// it leads nowhere.
pub(crate) fn leads_away(path: &Path, why: &Unserved) -> Failure {
    let path = path.display().to_string();
    let text = format!("{path} is not opened: {why}");
    let failure = match why.directory() {
        Some(_) => Failure::new(Reason::OutsideModelDirs)
            .with("path", &path)
            .with("flag", "--model-dir"),
        None => Failure::new(Reason::NoSuchFile).with("tried", &path),
    };
    failure.about("file", &path, &text).says(&text)
}

/// Converts an error of opening a model file to a failure.
pub fn from_model_file(error: &ModelFileError) -> Failure {
    let text = error.to_string();
    let file = |reason, path: &Path| {
        let path = path.display().to_string();
        Failure::new(reason)
            .with("path", &path)
            .about("file", &path, &text)
    };
    let failure = match error {
        ModelFileError::BadPath { message } => Failure::new(Reason::InvalidField)
            .with("field", "path")
            .field("path", message),
        ModelFileError::Outside { path, dirs: _ } => {
            file(Reason::OutsideModelDirs, path).with("flag", "--model-dir")
        }
        ModelFileError::NoModelDir => Failure::new(Reason::NoModelDir).with("flag", "--model-dir"),
        ModelFileError::DirSilent { dir, why: _ } => Failure::new(Reason::ModelDirSilent)
            .with("dir", dir.display().to_string())
            .retry(RETRY),
        ModelFileError::NotFound { tried } => {
            let tried: Vec<String> = tried
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            let tried = tried.join(", ");
            Failure::new(Reason::NoSuchFile)
                .with("tried", &tried)
                .about("file", &tried, "no such file")
        }
        ModelFileError::MissingParts { path, missing, .. } => {
            let missing: Vec<String> = missing.iter().map(|p| p.display().to_string()).collect();
            file(Reason::MissingParts, path).with("missing", missing.join(", "))
        }
        ModelFileError::NotFirstPart { path, first, .. } => file(Reason::NotFirstPart, path)
            .with("first", first.display().to_string())
            .field("path", &text),
        ModelFileError::NotAFile { path, kind: _ } => {
            file(Reason::NotARegularFile, path).field("path", &text)
        }
        ModelFileError::Unreadable { path, user: _ } => file(Reason::FileNotReadable, path),
        ModelFileError::Replaced { path } => {
            file(Reason::FileBeingReplaced, path).retry(Duration::from_secs(1))
        }
        ModelFileError::Empty { path } => file(Reason::BadModelFile, path),
        ModelFileError::TooManyFiles { path } => {
            file(Reason::TooManyFiles, path).retry(Duration::from_secs(5))
        }
        ModelFileError::Io { path, message: _ } => {
            file(Reason::FileFailed, path).requires("FILE", &path.display().to_string(), &text)
        }
    };
    failure.says(&text)
}
