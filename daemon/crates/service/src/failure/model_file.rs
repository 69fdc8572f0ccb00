//! What refuses a path of a model file, as a failure.

use std::path::Path;
use std::time::Duration;

use super::silent::RETRY;
use super::{Failure, Kind};
use crate::model_files::{ModelFileError, Unserved};

/// PERMISSION_DENIED: a link that leads out of the model directories.
pub(crate) fn leads_out(path: &Path, why: &Unserved) -> Failure {
    let path = path.display().to_string();
    let text = format!("{path} is not opened: {why}");
    Failure::new(Kind::PermissionDenied, "OUTSIDE_MODEL_DIRS")
        .with("path", &path)
        .with("flag", "--model-dir")
        .about("file", &path, &text)
        .says(&text)
}

/// The failure of a file that cannot be opened.
pub fn from_model_file(error: &ModelFileError) -> Failure {
    let text = error.to_string();
    let file = |code, reason, path: &Path| {
        let path = path.display().to_string();
        Failure::new(code, reason)
            .with("path", &path)
            .about("file", &path, &text)
    };
    let failure = match error {
        ModelFileError::BadPath { message } => Failure::new(Kind::InvalidArgument, "INVALID_FIELD")
            .with("field", "path")
            .field("path", message),
        ModelFileError::Outside { path, dirs: _ } => {
            file(Kind::PermissionDenied, "OUTSIDE_MODEL_DIRS", path).with("flag", "--model-dir")
        }
        ModelFileError::NoModelDir => {
            Failure::new(Kind::PermissionDenied, "NO_MODEL_DIR").with("flag", "--model-dir")
        }
        ModelFileError::DirSilent { dir, why: _ } => {
            Failure::new(Kind::Unavailable, "MODEL_DIR_SILENT")
                .with("dir", dir.display().to_string())
                .retry(RETRY)
        }
        ModelFileError::NotFound { tried } => {
            let tried: Vec<String> = tried
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            let tried = tried.join(", ");
            Failure::new(Kind::NotFound, "NO_SUCH_FILE")
                .with("tried", &tried)
                .about("file", &tried, "no such file")
        }
        ModelFileError::MissingParts { path, missing, .. } => {
            let missing: Vec<String> = missing.iter().map(|p| p.display().to_string()).collect();
            file(Kind::NotFound, "MISSING_PARTS", path).with("missing", missing.join(", "))
        }
        ModelFileError::NotFirstPart { path, first, .. } => {
            file(Kind::InvalidArgument, "NOT_FIRST_PART", path)
                .with("first", first.display().to_string())
                .field("path", &text)
        }
        ModelFileError::NotAFile { path, kind: _ } => {
            file(Kind::InvalidArgument, "NOT_A_REGULAR_FILE", path).field("path", &text)
        }
        ModelFileError::Unreadable { path, user: _ } => {
            file(Kind::PermissionDenied, "FILE_NOT_READABLE", path)
        }
        ModelFileError::Replaced { path } => {
            file(Kind::Unavailable, "FILE_BEING_REPLACED", path).retry(Duration::from_secs(1))
        }
        ModelFileError::Empty { path } => file(Kind::InvalidArgument, "BAD_MODEL_FILE", path),
        ModelFileError::TooManyFiles { path } => {
            file(Kind::ResourceExhausted, "TOO_MANY_FILES", path).retry(Duration::from_secs(5))
        }
        ModelFileError::Io { path, message: _ } => file(
            Kind::FailedPrecondition,
            "FILE_NOT_READABLE",
            path,
        )
        .requires("FILE", &path.display().to_string(), &text),
    };
    failure.says(&text)
}
