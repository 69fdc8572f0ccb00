//! Errors to statuses: the one place where a gRPC code is chosen.
//!
//! Every status carries an `ErrorInfo` (a reason in capitals that programs may match on, the domain [`DOMAIN`], and the
//! names and numbers of the message), and beside it the detail that its code calls for. Texts are cut to
//! [`MESSAGE_MAX_BYTES`], since statuses travel as headers and a client refuses headers above 16 KiB.

use std::collections::HashMap;
use std::time::Duration;

use rocmforge_engine::api::ModelStatus;
use rocmforge_engine::{Error, Refusal};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::model_files::ModelFileError;
use crate::roles::Role;

/// The domain of every `ErrorInfo`.
pub(super) const DOMAIN: &str = "rocmforge";
/// Longest message of a status, in bytes.
const MESSAGE_MAX_BYTES: usize = 1024;
/// Longest text inside of a detail, in bytes.
const DETAIL_MAX_BYTES: usize = 512;
/// Most field violations that one status lists.
const VIOLATIONS_MAX: usize = 8;
/// When to come back while a drain goes on: a new daemon is up by then.
const DRAIN_RETRY: Duration = Duration::from_secs(2);

/// A status in the making.
struct Answer {
    code: Code,
    reason: &'static str,
    metadata: HashMap<String, String>,
    details: ErrorDetails,
}

impl Answer {
    fn new(code: Code, reason: &'static str) -> Self {
        Self {
            code,
            reason,
            metadata: HashMap::new(),
            details: ErrorDetails::new(),
        }
    }

    fn with(mut self, key: &str, value: impl AsRef<str>) -> Self {
        self.metadata
            .insert(key.to_owned(), cut(value.as_ref(), DETAIL_MAX_BYTES));
        self
    }

    fn field(mut self, field: &str, message: &str) -> Self {
        self.details.add_bad_request_violation(
            cut(field, DETAIL_MAX_BYTES),
            cut(message, DETAIL_MAX_BYTES),
        );
        self
    }

    fn resource(mut self, kind: &str, name: &str, message: &str) -> Self {
        let (name, message) = (cut(name, DETAIL_MAX_BYTES), cut(message, DETAIL_MAX_BYTES));
        self.details.set_resource_info(kind, name, "", message);
        self
    }

    fn precondition(mut self, kind: &str, subject: &str, message: &str) -> Self {
        let (subject, message) = (
            cut(subject, DETAIL_MAX_BYTES),
            cut(message, DETAIL_MAX_BYTES),
        );
        self.details
            .add_precondition_failure_violation(kind, subject, message);
        self
    }

    fn retry(mut self, after: Duration) -> Self {
        self.details.set_retry_info(Some(after));
        self
    }

    fn status(mut self, message: &str) -> Status {
        self.details
            .set_error_info(self.reason, DOMAIN, self.metadata);
        Status::with_error_details(self.code, cut(message, MESSAGE_MAX_BYTES), self.details)
    }
}

/// The status of an engine's error.
pub(super) fn from_engine(error: &Error) -> Status {
    let text = error.to_string();
    let answer = match error {
        Error::InvalidArgument { field, message } => {
            Answer::new(Code::InvalidArgument, "INVALID_FIELD")
                .with("field", field)
                .field(field, message)
        }
        Error::BadModel { path, message } => {
            let path = path.display().to_string();
            Answer::new(Code::InvalidArgument, "BAD_MODEL_FILE")
                .with("path", &path)
                .resource("gguf", &path, message)
        }
        Error::Unsupported(message) => {
            Answer::new(Code::Unimplemented, "UNSUPPORTED").resource("feature", "", message)
        }
        Error::UnknownModel { name, known } => Answer::new(Code::NotFound, "UNKNOWN_MODEL")
            .with("model", name)
            .with("loaded", known.join(", "))
            .resource("model", name, "not loaded"),
        Error::NameTaken {
            name,
            path,
            changed,
        } => {
            let (reason, what) = if *changed {
                (
                    "LOADED_FILE_CHANGED",
                    "the file has changed since it was loaded",
                )
            } else {
                ("NAME_TAKEN", "another file has this name")
            };
            Answer::new(Code::AlreadyExists, reason)
                .with("model", name)
                .with("path", path.display().to_string())
                .resource("model", name, what)
        }
        Error::Precondition(refusal) => from_refusal(refusal, &text),
        Error::Exhausted {
            message: _,
            retry_after,
        } => Answer::new(Code::ResourceExhausted, "FULL_NOW").retry(*retry_after),
        Error::Unavailable {
            message: _,
            retry_after,
        } => Answer::new(Code::Unavailable, "NOT_SERVING").retry(*retry_after),
        Error::DataLoss { name, message } => Answer::new(Code::DataLoss, "MODEL_FILE_CHANGED")
            .with("model", name)
            .resource("model", name, message),
        Error::DeadlineExceeded { generated } => Answer::new(Code::DeadlineExceeded, "DEADLINE")
            .with("generated_tokens", generated.to_string()),
        Error::Cancelled => Answer::new(Code::Cancelled, "CANCELLED"),
        Error::NoDevice(message) => Answer::new(Code::FailedPrecondition, "NO_DEVICE")
            .precondition("DEVICE", "engine", message),
        Error::Internal(_) => Answer::new(Code::Internal, "BUG"),
    };
    answer.status(&text)
}

/// One reason a cause, and the numbers beside it.
fn from_refusal(refusal: &Refusal, text: &str) -> Answer {
    let mut answer = Answer::new(Code::FailedPrecondition, refusal.reason());
    for (name, number) in refusal.numbers() {
        answer = answer.with(name, number.to_string());
    }
    match refusal.model() {
        Some(model) => answer
            .with("model", model)
            .precondition(refusal.reason(), model, text),
        None => answer.precondition(refusal.reason(), "engine", text),
    }
}

/// The status of a file that cannot be opened.
pub(super) fn from_model_file(error: &ModelFileError) -> Status {
    let text = error.to_string();
    let file = |code, reason, path: &std::path::Path| {
        let path = path.display().to_string();
        Answer::new(code, reason)
            .with("path", &path)
            .resource("file", &path, &text)
    };
    let answer = match error {
        ModelFileError::BadPath { message } => Answer::new(Code::InvalidArgument, "INVALID_FIELD")
            .with("field", "path")
            .field("path", message),
        ModelFileError::Outside { path, dirs: _ } => {
            file(Code::PermissionDenied, "OUTSIDE_MODEL_DIRS", path).with("flag", "--model-dir")
        }
        ModelFileError::NoModelDir => {
            Answer::new(Code::PermissionDenied, "NO_MODEL_DIR").with("flag", "--model-dir")
        }
        ModelFileError::NotFound { tried } => {
            let tried: Vec<String> = tried
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            let tried = tried.join(", ");
            Answer::new(Code::NotFound, "NO_SUCH_FILE")
                .with("tried", &tried)
                .resource("file", &tried, "no such file")
        }
        ModelFileError::MissingParts { path, missing, .. } => {
            let missing: Vec<String> = missing.iter().map(|p| p.display().to_string()).collect();
            file(Code::NotFound, "MISSING_PARTS", path).with("missing", missing.join(", "))
        }
        ModelFileError::NotFirstPart { path, first, .. } => {
            file(Code::InvalidArgument, "NOT_FIRST_PART", path)
                .with("first", first.display().to_string())
                .field("path", &text)
        }
        ModelFileError::NotAFile { path, kind: _ } => {
            file(Code::InvalidArgument, "NOT_A_REGULAR_FILE", path).field("path", &text)
        }
        ModelFileError::Unreadable { path, user: _ } => {
            file(Code::PermissionDenied, "FILE_NOT_READABLE", path)
        }
        ModelFileError::Replaced { path } => {
            file(Code::Unavailable, "FILE_BEING_REPLACED", path).retry(Duration::from_secs(1))
        }
        ModelFileError::Empty { path } => file(Code::InvalidArgument, "BAD_MODEL_FILE", path),
        ModelFileError::TooManyFiles { path } => {
            file(Code::ResourceExhausted, "TOO_MANY_FILES", path).retry(Duration::from_secs(5))
        }
        ModelFileError::Io { path, message: _ } => file(
            Code::FailedPrecondition,
            "FILE_NOT_READABLE",
            path,
        )
        .precondition("FILE", &path.display().to_string(), &text),
    };
    answer.status(&text)
}

/// INVALID_ARGUMENT for one field.
pub(super) fn invalid(field: &str, message: &str) -> Status {
    invalid_all(&[(field.to_owned(), message.to_owned())])
}

/// INVALID_ARGUMENT that lists what is wrong with each field.
pub(super) fn invalid_all(violations: &[(String, String)]) -> Status {
    let mut text = String::new();
    let mut answer = Answer::new(Code::InvalidArgument, "INVALID_FIELD");
    for (i, (field, message)) in violations.iter().take(VIOLATIONS_MAX).enumerate() {
        if i == 0 {
            answer = answer.with("field", field);
        } else {
            text.push_str("; ");
        }
        text.push_str(field);
        text.push_str(": ");
        text.push_str(message);
        answer = answer.field(field, message);
    }
    if violations.len() > VIOLATIONS_MAX {
        text.push_str(&format!("; and {} more", violations.len() - VIOLATIONS_MAX));
    }
    answer.status(&text)
}

/// NOT_FOUND, naming the models that are loaded.
pub(super) fn unknown_model(name: &str, models: &[ModelStatus]) -> Status {
    let known = models
        .iter()
        .map(|status| status.model.name().to_owned())
        .collect();
    from_engine(&Error::UnknownModel {
        name: name.to_owned(),
        known,
    })
}

/// NOT_FOUND: the model was loaded, and somebody unloaded it before the load was answered.
pub(super) fn unloaded_meanwhile(name: &str) -> Status {
    let message = format!(
        "model '{name}' was loaded, and unloaded again by another client before this call ended"
    );
    Answer::new(Code::NotFound, "UNKNOWN_MODEL")
        .with("model", name)
        .resource("model", name, &message)
        .status(&message)
}

/// FAILED_PRECONDITION about a model.
pub(super) fn model_precondition(reason: &'static str, model: &str, message: &str) -> Status {
    Answer::new(Code::FailedPrecondition, reason)
        .with("model", model)
        .precondition(reason, model, message)
        .status(message)
}

/// UNIMPLEMENTED, naming the field that asks for it.
pub(super) fn unsupported_field(field: &str, message: &str) -> Status {
    Answer::new(Code::Unimplemented, "UNSUPPORTED")
        .with("field", field)
        .field(field, message)
        .status(&format!("{field}: {message}"))
}

/// RESOURCE_EXHAUSTED with the delay after which to try again.
pub(super) fn exhausted(message: &str, retry_after: Duration) -> Status {
    Answer::new(Code::ResourceExhausted, "FULL_NOW")
        .retry(retry_after)
        .status(message)
}

/// PERMISSION_DENIED: the caller lacks the role.
pub(super) fn role_missing(role: Role, uid: u32) -> Status {
    let key = format!("{role}_by");
    Answer::new(Code::PermissionDenied, "ROLE_MISSING")
        .with("role", role.to_string())
        .with("setting", &key)
        .status(&format!(
            "user {uid} has not the role '{role}', which this call needs; the daemon's setting {key} names who has it"
        ))
}

/// RESOURCE_EXHAUSTED: the reply was not read.
pub(super) fn unread(unread: Duration) -> Status {
    Answer::new(Code::ResourceExhausted, "UNREAD")
        .with("unread_s", unread.as_secs().to_string())
        .retry(Duration::from_secs(1))
        .status(&format!(
            "the reply was not read for {} s and has been ended, since it held what others need; read replies as they \
             come",
            unread.as_secs()
        ))
}

/// DEADLINE_EXCEEDED: the request did not arrive whole.
pub(super) fn body_late(limit: Duration) -> Status {
    Answer::new(Code::DeadlineExceeded, "REQUEST_TOO_SLOW")
        .with("limit_s", limit.as_secs().to_string())
        .status(&format!(
            "the request did not arrive whole within {} s; send it at once",
            limit.as_secs()
        ))
}

/// INVALID_ARGUMENT: the request has too many bytes.
pub(super) fn body_too_large(max: usize) -> Status {
    let message = format!("the request has more than {max} bytes, the most that this call takes");
    Answer::new(Code::InvalidArgument, "REQUEST_TOO_LARGE")
        .with("max_bytes", max.to_string())
        .status(&message)
}

/// UNAVAILABLE: the daemon takes no new work.
pub(super) fn draining() -> Status {
    Answer::new(Code::Unavailable, "DRAINING")
        .retry(DRAIN_RETRY)
        .status("the daemon is ending and takes no new work; retry on a new connection once it runs again")
}

/// UNAVAILABLE: the engine ended under a request.
pub(super) fn engine_gone() -> Status {
    Answer::new(Code::Unavailable, "NOT_SERVING")
        .retry(DRAIN_RETRY)
        .status("the engine ended before the request did; retry on a new connection once the daemon runs again")
}

/// DEADLINE_EXCEEDED outside of the engine.
pub(super) fn deadline() -> Status {
    Answer::new(Code::DeadlineExceeded, "DEADLINE")
        .status("the deadline passed before the answer was ready")
}

/// INTERNAL.
pub(super) fn bug(message: &str) -> Status {
    from_engine(&Error::Internal(message.to_owned()))
}

/// `text`, cut at a character so that it has at most `max` bytes with the mark of the cut.
fn cut(text: &str, max: usize) -> String {
    const MARK: &str = "...";
    if text.len() <= max {
        return text.to_owned();
    }
    let mut end = max - MARK.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MARK}", &text[..end])
}

#[cfg(test)]
#[path = "status_code_tests.rs"]
mod tests;
