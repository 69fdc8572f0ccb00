//! What can go wrong in the engine, each kind with the one gRPC status that it maps to.
//!
//! The kinds follow the error table of the design: who acts on an error, and whether trying again
//! helps, decides its kind. The daemon maps them to statuses once, in one exhaustive match.

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
        /// The file.
        path: PathBuf,
        /// What is wrong with the model's file.
        message: String,
    },
    /// The architecture, tensor type or another feature is not implemented. UNIMPLEMENTED.
    #[error("{0}")]
    Unsupported(String),
    /// No model of this name. NOT_FOUND.
    #[error(
        "no model named '{name}' is loaded; load it first, or name one that is (loaded: {})",
        list(known)
    )]
    UnknownModel {
        /// The name asked for.
        name: String,
        /// The names that exist.
        known: Vec<String>,
    },
    /// The name belongs to another file. ALREADY_EXISTS.
    #[error("{}", taken(name, path, *changed))]
    NameTaken {
        /// The name.
        name: String,
        /// Whether the loaded model has the requested file, but in the state before a change.
        changed: bool,
        /// The file that is loaded under the name.
        path: PathBuf,
    },
    /// Cannot work in the present state and waiting alone does not help. FAILED_PRECONDITION.
    #[error("{0}")]
    Precondition(Refusal),
    /// Full now; later it may work. RESOURCE_EXHAUSTED with RetryInfo.
    #[error("{message}")]
    Exhausted {
        /// The limit that was reached, with the numbers.
        message: String,
        /// Delay after which the request may be sent again.
        retry_after: Duration,
    },
    /// The client has as many requests as it may have; see `Asker`.
    /// RESOURCE_EXHAUSTED with RetryInfo.
    #[error("this user or token has reached its limit: {running} requests run and {queued} wait; {}", allowed(*running_max, *queued_max))]
    AskerLimit {
        /// Running requests of the client.
        running: u32,
        /// The client's requests in the queue.
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
    /// The model's file changed or was cut short under us. DATA_LOSS.
    #[error(
        "the file of model '{name}' can no longer be read as it was loaded: {message}; unload the model and load it again \
         (over HTTP the next request does)"
    )]
    DataLoss {
        /// The model.
        name: String,
        /// How the file differs from the one that was loaded.
        message: String,
    },
    /// The model's file lies elsewhere, and nothing of it has come for a while. UNAVAILABLE with
    /// RetryInfo.
    #[error(
        "the file of model '{name}' has not answered for {seconds} s: {}; check the server or the mount that it lies on, then ask again (other models go on)", path.display()
    )]
    FileSilent {
        /// The model.
        name: String,
        /// The file.
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
    /// The device that was asked for is not there or cannot be used; the engine does not start.
    /// FAILED_PRECONDITION, though no client of an engine that runs meets it.
    #[error("{0}")]
    NoDevice(String),
    /// The device hung or failed for good while it was opened; the engine does not start, and the
    /// process cannot use that device any more. UNAVAILABLE, though no client of an engine that
    /// runs meets it.
    #[error("the device is lost: {0}")]
    DeviceLost(Loss),
    /// A broken promise of our own. INTERNAL.
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

/// A device's error while it is opened or given its memory.
pub(crate) fn no_device(error: &rocmforge_device::Error) -> Error {
    match error {
        rocmforge_device::Error::Lost(loss) => Error::DeviceLost(loss.clone()),
        error => Error::NoDevice(chain(error)),
    }
}

/// An error with its sources, for logs and messages.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// A message about a file that contradicts itself, with what to do.
pub(crate) fn damaged(message: &str) -> String {
    format!("{message}; the file is damaged or was converted wrongly: fetch or convert it again")
}

/// The message, with what to do about a damaged file unless it says so itself.
fn told(message: String, is_damage: bool) -> String {
    match is_damage {
        true => damaged(&message),
        false => message,
    }
}

/// Whether the system failed to read the file, or a part of it.
fn is_of_the_system(error: &GgufError) -> bool {
    match error {
        GgufError::Io { .. } => true,
        GgufError::Part { source, .. } => is_of_the_system(source),
        _ => false,
    }
}

/// An error of reading a file's header.
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

/// An error of reading a loaded model's tensors: its header was fine, so the file is not what it
/// was.
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

/// An error of making a model from a header.
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

/// An error of a file's vocabulary.
pub(crate) fn from_tokenizer(path: &Path, error: &TokenizerError) -> Error {
    if error.is_unsupported() {
        return Error::Unsupported(format!("{}: {}", path.display(), chain(error)));
    }
    Error::BadModel {
        path: path.to_owned(),
        message: told(chain(error), error.is_damage()),
    }
}

/// An error of the device, in the light of the model that it worked for.
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

/// An error of the cache.
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

/// Why the cache does not let a model go, which it knows by a number.
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
