//! What can go wrong in the engine, each kind with the one gRPC status that it maps to.
//!
//! The kind of an error says who can act on it, and whether trying again helps. The daemon maps
//! them to statuses once, in one exhaustive match.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rocmforge_device::{Error as DeviceError, Loss};
use rocmforge_gguf::Error as GgufError;
use rocmforge_model::Error as ModelError;
use rocmforge_tensor_cache::Error as CacheError;
use rocmforge_tokenizer::Error as TokenizerError;

use crate::api::refusal::Refusal;

/// An error of the engine. `Display` never repeats its source.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A request's field has a value that can never work. INVALID_ARGUMENT.
    #[error("{field}: {message}")]
    InvalidArgument {
        /// The field as the wire names it, for example `sampling.top_p`.
        field: &'static str,
        /// What is wrong with the field, and what is allowed.
        message: String,
    },
    /// The GGUF file is malformed or does not describe a usable model. INVALID_ARGUMENT.
    #[error("{}: {message}", path.display())]
    BadModel {
        /// Path of the model's file.
        path: PathBuf,
        /// What is wrong with the model's file.
        message: String,
    },
    /// The architecture, tensor type or another feature is not implemented. UNIMPLEMENTED.
    #[error("{0}")]
    Unsupported(String),
    /// No model of this name is loaded. NOT_FOUND.
    #[error(
        "no model named '{name}' is loaded; load it first, or name one that is (loaded: {})",
        list(known)
    )]
    UnknownModel {
        /// The model name that the request used.
        name: String,
        /// The names of the loaded models.
        known: Vec<String>,
    },
    /// The name belongs to a loaded model from another file. ALREADY_EXISTS.
    #[error("{}", taken(name, path, *changed))]
    NameTaken {
        /// The model name that is taken.
        name: String,
        /// Whether the loaded model is from the requested file, which has changed since.
        changed: bool,
        /// The file that is loaded under the name.
        path: PathBuf,
    },
    /// The command cannot work in the present state, and waiting alone does not help.
    /// FAILED_PRECONDITION.
    #[error("{0}")]
    Precondition(Refusal),
    /// A limit is reached; the request may work later. RESOURCE_EXHAUSTED with RetryInfo.
    #[error("{message}")]
    Exhausted {
        /// The limit that was reached, with the numbers.
        message: String,
        /// Delay after which the request may be sent again.
        retry_after: Duration,
    },
    /// The client has as many requests as it may have; see [`Asker`](crate::api::Asker).
    /// RESOURCE_EXHAUSTED with RetryInfo.
    #[error("this user or token has reached its limit: {running} requests run and {queued} wait; {}", allowed(*running_max, *queued_max))]
    AskerLimit {
        /// Number of the client's running requests.
        running: u32,
        /// Number of the client's queued requests.
        queued: u32,
        /// Maximum number of running requests of a client.
        running_max: u32,
        /// Maximum number of queued requests of a client.
        queued_max: u32,
    },
    /// The engine takes no work: draining, or its device is lost. UNAVAILABLE with RetryInfo.
    #[error("{message}")]
    Unavailable {
        /// Why the engine is unavailable.
        message: String,
        /// Delay after which the request may be sent again.
        retry_after: Duration,
    },
    /// The model's file changed or was truncated while it is loaded. DATA_LOSS.
    #[error(
        "the file of model '{name}' can no longer be read as it was loaded: {message}; unload the model and load it again \
         (over HTTP the next request does)"
    )]
    DataLoss {
        /// Name of the model whose file changed.
        name: String,
        /// How the file differs from the one that was loaded.
        message: String,
    },
    /// The model's file is on a network file system and has not responded for a while. UNAVAILABLE
    /// with RetryInfo.
    #[error(
        "the file of model '{name}' has not answered for {seconds} s: {}; check the server or the mount that it lies on, then ask again (other models go on)", path.display()
    )]
    FileSilent {
        /// Name of the model whose file does not respond.
        name: String,
        /// Path of the file that does not respond.
        path: PathBuf,
        /// Seconds without a byte from the file.
        seconds: u64,
    },
    /// The request's deadline passed. DEADLINE_EXCEEDED.
    #[error(
        "the deadline passed after {generated} generated tokens; allow more time, or ask for fewer"
    )]
    DeadlineExceeded {
        /// Tokens that were generated before the deadline.
        generated: u32,
    },
    /// The client went away. CANCELLED; nobody reads it.
    #[error("cancelled by the client")]
    Cancelled,
    /// The device that was asked for does not exist or cannot be used; the engine does not start,
    /// so no client meets this error. FAILED_PRECONDITION.
    #[error("{0}")]
    NoDevice(String),
    /// The device hung or failed for good while it was opened. The engine does not start, so no
    /// client meets this error, and the process cannot use the device any more. UNAVAILABLE.
    #[error("the device is lost: {0}")]
    DeviceLost(Loss),
    /// A violated invariant of the engine: a bug. INTERNAL.
    #[error("internal error: {0}; please report it with the daemon's log")]
    Internal(String),
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Precondition(refusal)
    }
}

fn allowed(running_max: u32, queued_max: u32) -> String {
    format!(
        "the daemon's limits are running = {running_max} and queued = {queued_max}; wait for an answer, or send less at once"
    )
}

fn taken(name: &str, path: &Path, changed: bool) -> String {
    let path = path.display();
    if changed {
        format!(
            "{path} has changed since it was loaded as '{name}'; unload '{name}' and load the file again"
        )
    } else {
        format!(
            "the name '{name}' is taken by {path}; unload it first, or load this file under another name"
        )
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    let mut sorted: Vec<&str> = names.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    sorted.join(", ")
}

/// The error that every request and command gets once the device is lost.
pub(crate) fn device_lost(reason: &rocmforge_device::Loss) -> Error {
    Error::Unavailable {
        message: format!(
            "the device is lost ({reason}); the daemon ends, its service manager starts it again: try again then"
        ),
        retry_after: Duration::from_secs(5),
    }
}

/// The error for a device that could not be opened or allocate its memory.
pub(crate) fn no_device(error: &rocmforge_device::Error) -> Error {
    match error {
        rocmforge_device::Error::Lost(loss) => Error::DeviceLost(loss.clone()),
        error => Error::NoDevice(chain(error)),
    }
}

/// The text of an error followed by those of its sources, for logs and messages.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The message with advice what to do about a damaged file appended.
pub(crate) fn damaged(message: &str) -> String {
    format!("{message}; the file is damaged or was converted wrongly: fetch or convert it again")
}

/// The message, with advice about a damaged file if `is_damage` and the message has none.
fn told(message: String, is_damage: bool) -> String {
    match is_damage {
        true => damaged(&message),
        false => message,
    }
}

/// Whether the operating system failed to read the file, or a part of it.
fn is_of_the_system(error: &GgufError) -> bool {
    match error {
        GgufError::Io { .. } => true,
        GgufError::Part { source, .. } => is_of_the_system(source),
        _ => false,
    }
}

/// Converts an error of reading a file's header.
pub(crate) fn from_gguf(name: &str, path: &Path, error: GgufError) -> Error {
    match error {
        GgufError::Changed { .. } => Error::DataLoss {
            name: name.to_owned(),
            message: chain(&error),
        },
        _ if is_of_the_system(&error) => Error::BadModel {
            path: path.to_owned(),
            message: format!(
                "{}; check the disk or mount that the file is on, then load it again",
                chain(&error)
            ),
        },
        _ => Error::BadModel {
            path: path.to_owned(),
            message: told(chain(&error), error.is_damage()),
        },
    }
}

/// Converts an error of reading a loaded model's tensors: the header was valid, so the file has
/// changed.
pub(crate) fn from_read(name: &str, path: &Path, error: GgufError) -> Error {
    match error {
        GgufError::Changed { .. } | GgufError::Io { .. } | GgufError::OutOfRange { .. } => {
            Error::DataLoss {
                name: name.to_owned(),
                message: chain(&error),
            }
        }
        _ => Error::BadModel {
            path: path.to_owned(),
            message: chain(&error),
        },
    }
}

/// Converts an error of building a model from a header.
pub(crate) fn from_model(path: &Path, error: ModelError) -> Error {
    match error {
        ModelError::UnknownArchitecture { .. }
        | ModelError::Unsupported(_)
        | ModelError::UnsupportedType { .. } => {
            Error::Unsupported(format!("{}: {error}", path.display()))
        }
        ModelError::Adapter(message) => Error::InvalidArgument {
            field: "lora",
            message: format!("{}: {message}", path.display()),
        },
        ModelError::Plan { .. } => Error::Internal(chain(&error)),
        ModelError::MissingKey(_)
        | ModelError::BadValue { .. }
        | ModelError::MissingTensor(_)
        | ModelError::WrongShape { .. } => Error::BadModel {
            path: path.to_owned(),
            message: damaged(&chain(&error)),
        },
        ModelError::Gguf(ref cause) => Error::BadModel {
            path: path.to_owned(),
            message: told(chain(&error), cause.is_damage()),
        },
    }
}

/// Converts an error of a file's vocabulary.
pub(crate) fn from_tokenizer(path: &Path, error: &TokenizerError) -> Error {
    if error.is_unsupported() {
        return Error::Unsupported(format!("{}: {}", path.display(), chain(error)));
    }
    Error::BadModel {
        path: path.to_owned(),
        message: told(chain(error), error.is_damage()),
    }
}

/// Converts an error of the device; `model` is the name and path of the model that it worked for.
pub(crate) fn from_device(model: Option<(&str, &Path)>, error: DeviceError) -> Error {
    let path = || model.map_or_else(PathBuf::new, |(_, path)| path.to_owned());
    match error {
        DeviceError::Unsupported { .. } | DeviceError::NoKernel(_) => {
            Error::Unsupported(match model {
                Some((_, path)) => format!("{}: {error}", path.display()),
                None => error.to_string(),
            })
        }
        DeviceError::Shape { .. } => Error::BadModel {
            path: path(),
            message: damaged(&error.to_string()),
        },
        DeviceError::NotFinite { .. } => Error::BadModel {
            path: path(),
            message: error.to_string(),
        },
        DeviceError::Read { source, .. } => {
            let (name, path) = model.unwrap_or(("?", Path::new("")));
            from_read(name, path, source)
        }
        DeviceError::Memory { .. } => Error::Exhausted {
            message: error.to_string(),
            retry_after: Duration::from_secs(1),
        },
        DeviceError::Config(message) => Refusal::Setting { message }.into(),
        DeviceError::Driver { .. } | DeviceError::Closed(_) => Error::Internal(error.to_string()),
        DeviceError::Lost(_) => Error::Unavailable {
            message: error.to_string(),
            retry_after: Duration::from_secs(5),
        },
    }
}

/// Converts an error of the segment cache.
pub(crate) fn from_cache(error: CacheError) -> Error {
    let message = error.to_string();
    match error {
        CacheError::NeverFits {
            need,
            budget,
            pinned,
        } => Refusal::NeverFits {
            message,
            need,
            budget,
            pinned,
        }
        .into(),
        CacheError::NoRoom { .. } => Error::Exhausted {
            message,
            retry_after: Duration::from_secs(1),
        },
        other => Error::Internal(other.to_string()),
    }
}

/// Converts the cache's refusal to unregister a model; `name` replaces the cache's number of the
/// model.
pub(crate) fn from_unregister(name: &str, error: CacheError) -> Error {
    let message = match error {
        CacheError::Busy { .. } => format!(
            "model '{name}' is in use by a pass or an upload; try again when its requests have ended"
        ),
        CacheError::Pinned { segments, .. } => {
            format!("model '{name}' has {segments} pinned segments; unpin it, then unload it again")
        }
        other => return from_cache(other),
    };
    Refusal::InUse { message }.into()
}

#[cfg(test)]
mod tests {
    use rocmforge_tensor_cache::ModelId;

    use super::*;

    #[test]
    fn a_disk_that_fails_while_a_header_is_read_is_no_error_of_ours() {
        const EIO: i32 = 5;
        let path = Path::new("/m.gguf");
        let broken = || GgufError::Io {
            op: "read",
            path: path.to_owned(),
            source: std::io::Error::from_raw_os_error(EIO),
        };
        let part = GgufError::Part {
            path: path.to_owned(),
            source: Box::new(broken()),
        };
        for error in [broken(), part] {
            let error = from_gguf("m", path, error);
            assert!(matches!(error, Error::BadModel { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("Input/output error"), "{text}");
            assert!(text.contains("check the disk"), "{text}");
        }
    }

    #[test]
    fn a_model_that_the_cache_holds_is_told_by_its_name() {
        let (model, name) = (ModelId(3), "small");
        for error in [
            CacheError::Busy {
                model,
                in_use: 2,
                in_flight: 0,
                blocks: 1,
            },
            CacheError::Pinned { model, segments: 2 },
        ] {
            let error = from_unregister(name, error);
            assert!(
                matches!(error, Error::Precondition(Refusal::InUse { .. })),
                "{error:?}"
            );
            let text = error.to_string();
            assert!(text.starts_with("model 'small' "), "{text}");
        }
    }

    #[test]
    fn a_file_that_contradicts_itself_is_told_with_what_to_do_once() {
        const REMEDY: &str = "fetch or convert it again";
        let path = Path::new("/m.gguf");
        let twice = || GgufError::DuplicateKey {
            key: "a".to_owned(),
            offset: 7,
        };
        let part = GgufError::Part {
            path: path.to_owned(),
            source: Box::new(twice()),
        };
        for (error, is_told) in [
            (from_gguf("m", path, twice()), true),
            (from_gguf("m", path, part), true),
            // It says by itself what to do.
            (from_gguf("m", path, GgufError::BadMagic), false),
            (
                from_model(path, ModelError::MissingTensor("a".to_owned())),
                true,
            ),
            (from_model(path, ModelError::Gguf(twice())), true),
            (from_tokenizer(path, &twice().into()), true),
            (
                from_tokenizer(path, &TokenizerError::MissingKey { key: "a" }),
                false,
            ),
        ] {
            let text = error.to_string();
            assert_eq!(text.matches(REMEDY).count(), usize::from(is_told), "{text}");
        }
    }
}
