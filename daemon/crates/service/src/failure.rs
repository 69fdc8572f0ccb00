//! Why something is not done: one reason a cause, with the fields, names and numbers that programs
//! read.
//!
//! Every way of asking (gRPC, HTTP) puts a [`Failure`] into its own words on the wire; which
//! failures there are, and what they say, is decided here. Texts are cut to [`MESSAGE_MAX_BYTES`],
//! since they travel as headers and a client refuses headers above 16 KiB.

mod http;
mod limits;
mod model_file;
mod reason;
mod settings;
mod silent;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use rocmforge_engine::api::ModelStatus;
use rocmforge_engine::{Error, Refusal};

pub use self::http::{
    body_late, body_too_large, content_encoding, file_loaded, foreign_origin, hub_failed,
    no_method, no_model_dir, no_route, not_on_hub, pull_over_tcp_off, role_missing_here,
    token_missing, unknown_item, unknown_previous, unknown_response,
};
pub(crate) use self::limits::{peer_limit, prompts_held};
pub use self::model_file::from_model_file;
pub(crate) use self::model_file::leads_away;
pub use self::reason::Reason;
pub(crate) use self::settings::no_settings;
pub use self::settings::settings_unusable;
pub(crate) use self::silent::{beside_unreadable, directory_silent, file_silent};
use crate::roles::Role;

/// Longest message of a failure, in bytes.
pub const MESSAGE_MAX_BYTES: usize = 1024;
/// Longest text inside of a detail, in bytes.
const DETAIL_MAX_BYTES: usize = 512;
/// Most field violations that one failure lists.
const VIOLATIONS_MAX: usize = 8;
/// When to come back while a drain goes on: a new daemon is up by then.
const DRAIN_RETRY: Duration = Duration::from_secs(2);
/// When to ask again for a chat whose renderers were killed.
const RENDERER_RETRY: Duration = Duration::from_secs(1);
/// When to come back where one's own requests are too many: some of them have ended by then.
const LIMIT_RETRY: Duration = Duration::from_secs(1);

/// What kind of failure it is: who has to act on it, and whether trying again helps. The names are
/// gRPC's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request can never work as it is.
    InvalidArgument,
    /// The request asks for something that is not supported.
    Unimplemented,
    /// The request names something that does not exist.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// The caller may not.
    PermissionDenied,
    /// The client is not authenticated.
    Unauthenticated,
    /// The present state does not allow it, and waiting alone does not help.
    FailedPrecondition,
    /// Full now; later it may work.
    ResourceExhausted,
    /// The daemon takes no work now.
    Unavailable,
    /// A file is not what it was.
    DataLoss,
    /// Too late.
    DeadlineExceeded,
    /// The client went away.
    Cancelled,
    /// A bug of the daemon.
    Internal,
}

impl Kind {
    /// The kind's name, for the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::Unimplemented => "Unimplemented",
            Self::NotFound => "NotFound",
            Self::AlreadyExists => "AlreadyExists",
            Self::PermissionDenied => "PermissionDenied",
            Self::Unauthenticated => "Unauthenticated",
            Self::FailedPrecondition => "FailedPrecondition",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::Unavailable => "Unavailable",
            Self::DataLoss => "DataLoss",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::Cancelled => "Cancelled",
            Self::Internal => "Internal",
        }
    }
}

/// What a failure is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Kind of the subject: `model`, `file`, `gguf`, `feature`; of a precondition its reason.
    pub kind: String,
    /// The subject's name.
    pub name: String,
    /// What is wrong with the subject.
    pub message: String,
}

/// A rejected or failed request: reason, message and details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(Box<Told>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    reason: Reason,
    message: String,
    /// Where in the message a parameter of requests is named, and its name over gRPC.
    parameter: Option<(Range<usize>, &'static str)>,
    metadata: BTreeMap<String, String>,
    fields: Vec<(String, String)>,
    resource: Option<Subject>,
    precondition: Option<Subject>,
    retry_after: Option<Duration>,
}

impl Failure {
    pub(crate) fn new(reason: Reason) -> Self {
        Self(Box::new(Told {
            reason,
            message: String::new(),
            parameter: None,
            metadata: BTreeMap::new(),
            fields: Vec::new(),
            resource: None,
            precondition: None,
            retry_after: None,
        }))
    }

    /// What kind it is.
    pub fn kind(&self) -> Kind {
        self.0.reason.kind()
    }

    /// Reason of the failure.
    pub fn reason(&self) -> Reason {
        self.0.reason
    }

    /// What is wrong and what to do, to be shown to users.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The message with the parameters of requests as `name` calls them.
    pub fn message_naming(&self, name: impl FnOnce(&str) -> String) -> String {
        let mut message = self.0.message.clone();
        if let Some((range, parameter)) = &self.0.parameter {
            message.replace_range(range.clone(), &name(parameter));
        }
        message
    }

    /// The names and numbers of the message, by name.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.0.metadata
    }

    /// The fields of the request that are at fault, each with what is wrong.
    pub fn fields(&self) -> &[(String, String)] {
        &self.0.fields
    }

    /// The thing that is missing or unusable.
    pub fn resource(&self) -> Option<&Subject> {
        self.0.resource.as_ref()
    }

    /// What would have to hold.
    pub fn precondition(&self) -> Option<&Subject> {
        self.0.precondition.as_ref()
    }

    /// Delay after which the request may be sent again.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    pub(crate) fn with(mut self, key: &str, value: impl AsRef<str>) -> Self {
        self.0
            .metadata
            .insert(key.to_owned(), cut(value.as_ref(), DETAIL_MAX_BYTES));
        self
    }

    fn field(mut self, field: &str, message: &str) -> Self {
        let (field, message) = (cut(field, DETAIL_MAX_BYTES), cut(message, DETAIL_MAX_BYTES));
        self.0.fields.push((field, message));
        self
    }

    fn about(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.resource = Some(subject(kind, name, message));
        self
    }

    fn requires(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.precondition = Some(subject(kind, name, message));
        self
    }

    pub(crate) fn retry(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    pub(crate) fn says(mut self, message: &str) -> Self {
        self.0.message = cut(message, MESSAGE_MAX_BYTES);
        self.0.parameter = None;
        self
    }

    /// A message that names a parameter of requests, which other interfaces call otherwise.
    fn says_naming(self, before: &str, parameter: &'static str, after: &str) -> Self {
        let range = before.len()..before.len() + parameter.len();
        let whole = format!("{before}{parameter}{after}");
        let mut failure = self.says(&whole);
        let is_whole = whole.get(..range.end) == failure.0.message.get(..range.end);
        failure.0.parameter = is_whole.then_some((range, parameter));
        failure
    }
}

fn subject(kind: &str, name: &str, message: &str) -> Subject {
    Subject {
        kind: kind.to_owned(),
        name: cut(name, DETAIL_MAX_BYTES),
        message: cut(message, DETAIL_MAX_BYTES),
    }
}

/// The failure of an engine's error.
pub fn from_engine(error: &Error) -> Failure {
    let text = error.to_string();
    let failure = match error {
        Error::InvalidArgument { field, message } => Failure::new(Reason::InvalidField)
            .with("field", field)
            .field(field, message),
        Error::BadModel { path, message } => {
            let path = path.display().to_string();
            Failure::new(Reason::BadModelFile)
                .with("path", &path)
                .about("gguf", &path, message)
        }
        Error::Unsupported(message) => {
            Failure::new(Reason::Unsupported).about("feature", "", message)
        }
        Error::UnknownModel { name, known } => Failure::new(Reason::UnknownModel)
            .with("model", name)
            .with("loaded", known.join(", "))
            .about("model", name, "not loaded"),
        Error::NameTaken {
            name,
            path,
            changed,
        } => {
            let (reason, what) = if *changed {
                (
                    Reason::LoadedFileChanged,
                    "the file has changed since it was loaded",
                )
            } else {
                (Reason::NameTaken, "another file has this name")
            };
            Failure::new(reason)
                .with("model", name)
                .with("path", path.display().to_string())
                .about("model", name, what)
        }
        Error::Precondition(refusal) => from_refusal(refusal, &text),
        Error::Exhausted {
            message: _,
            retry_after,
        } => Failure::new(Reason::FullNow).retry(*retry_after),
        Error::AskerLimit {
            running,
            queued,
            running_max,
            queued_max,
        } => Failure::new(Reason::PeerLimit)
            .with("limit", "queued")
            .with("max", queued_max.to_string())
            .with("running", running.to_string())
            .with("queued", queued.to_string())
            .with("running_max", running_max.to_string())
            .retry(LIMIT_RETRY),
        Error::Unavailable {
            message: _,
            retry_after,
        } => Failure::new(Reason::NotServing).retry(*retry_after),
        Error::DataLoss { name, message } => Failure::new(Reason::ModelFileChanged)
            .with("model", name)
            .about("model", name, message),
        Error::FileSilent {
            name,
            path,
            seconds,
        } => Failure::new(Reason::ModelFileSilent)
            .with("model", name)
            .with("path", path.display().to_string())
            .with("seconds", seconds.to_string())
            .retry(Duration::from_secs(5)),
        Error::DeadlineExceeded { generated } => {
            Failure::new(Reason::Deadline).with("generated_tokens", generated.to_string())
        }
        Error::Cancelled => Failure::new(Reason::Cancelled),
        Error::NoDevice(message) => {
            Failure::new(Reason::NoDevice).requires("DEVICE", "engine", message)
        }
        Error::DeviceLost(_) => Failure::new(Reason::NotServing).retry(Duration::from_secs(5)),
        Error::Internal(_) => Failure::new(Reason::Bug),
    };
    failure.says(&text)
}

/// One reason a cause, and the numbers beside it.
fn from_refusal(refusal: &Refusal, text: &str) -> Failure {
    let reason = Reason::of(refusal);
    let mut failure = Failure::new(reason);
    for (name, number) in refusal.numbers() {
        failure = failure.with(name, number.to_string());
    }
    match refusal.model() {
        Some(model) => failure
            .with("model", model)
            .requires(reason.name(), model, text),
        None => failure.requires(reason.name(), "engine", text),
    }
}

/// INVALID_ARGUMENT for one field.
pub fn invalid(field: &str, message: &str) -> Failure {
    invalid_all(&[(field.to_owned(), message.to_owned())])
}

/// INVALID_ARGUMENT that lists what is wrong with each field.
pub fn invalid_all(violations: &[(String, String)]) -> Failure {
    let mut text = String::new();
    let mut failure = Failure::new(Reason::InvalidField);
    for (i, (field, message)) in violations.iter().take(VIOLATIONS_MAX).enumerate() {
        if i == 0 {
            failure = failure.with("field", field);
        } else {
            text.push_str("; ");
        }
        text.push_str(field);
        text.push_str(": ");
        text.push_str(message);
        failure = failure.field(field, message);
    }
    if violations.len() > VIOLATIONS_MAX {
        text.push_str(&format!("; and {} more", violations.len() - VIOLATIONS_MAX));
    }
    failure.says(&text)
}

/// NOT_FOUND, naming the models that are loaded.
pub fn unknown_model(name: &str, models: &[ModelStatus]) -> Failure {
    let known = models
        .iter()
        .map(|status| status.model.name().to_owned())
        .collect();
    from_engine(&Error::UnknownModel {
        name: name.to_owned(),
        known,
    })
}

/// NOT_FOUND for a request that is not among the last ones that its client may see.
pub(crate) fn unknown_request(name: &str, kept: usize) -> Failure {
    Failure::new(Reason::UnknownRequest).says(&format!(
        "no request '{name}' of yours is among the last {kept} of all clients that have ended: list them (rocmforgectl \
         why --list)"
    ))
}

/// NOT_FOUND, naming the models that are loaded and the files that could be.
pub(crate) fn no_such_model<'l, 'f>(
    name: &str,
    loaded: impl Iterator<Item = &'l str>,
    on_disk: impl Iterator<Item = &'f str>,
) -> Failure {
    let list = |names: Vec<&str>| match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    let (loaded, on_disk) = (list(loaded.collect()), list(on_disk.collect()));
    Failure::new(Reason::UnknownModel)
        .with("model", name)
        .with("loaded", &loaded)
        .with("on_disk", &on_disk)
        .about("model", name, "neither loaded nor in a model directory")
        .says(&format!(
            "no model '{name}' is loaded or in a model directory; name one of these, or put its file into a model \
             directory; loaded: {loaded}; files: {on_disk}"
        ))
}

/// FAILED_PRECONDITION: the model was loaded, and somebody unloaded it before the load was
/// answered. As where it is unloaded under a request.
pub fn unloaded_meanwhile(name: &str) -> Failure {
    let message = format!(
        "model '{name}' was loaded, and unloaded again by another client before this call ended; load it again"
    );
    model_precondition(Reason::ModelUnloaded, name, &message)
}

/// FAILED_PRECONDITION about a model.
pub fn model_precondition(reason: Reason, model: &str, message: &str) -> Failure {
    Failure::new(reason)
        .with("model", model)
        .requires(reason.name(), model, message)
        .says(message)
}

/// UNIMPLEMENTED, naming the field that asks for it.
pub fn unsupported_field(field: &str, message: &str) -> Failure {
    Failure::new(Reason::Unsupported)
        .with("field", field)
        .field(field, message)
        .says(&format!("{field}: {message}"))
}

/// RESOURCE_EXHAUSTED with the delay after which to try again.
pub fn exhausted(message: &str, retry_after: Duration) -> Failure {
    Failure::new(Reason::FullNow)
        .retry(retry_after)
        .says(message)
}

/// PERMISSION_DENIED: the caller lacks the role.
pub fn role_missing(role: Role, uid: u32) -> Failure {
    let key = format!("{role}_by");
    Failure::new(Reason::RoleMissing)
        .with("role", role.to_string())
        .with("setting", &key)
        .says(&format!(
            "user {uid} has not the role '{role}', which this call needs; the daemon's setting {key} names who has it"
        ))
}

/// RESOURCE_EXHAUSTED: the reply was not read.
pub fn unread(unread: Duration) -> Failure {
    Failure::new(Reason::Unread)
        .with("unread_s", unread.as_secs().to_string())
        .retry(Duration::from_secs(1))
        .says(&format!(
            "the reply was not read for {} s and has been ended, since it held what others need; read replies as they \
             come",
            unread.as_secs()
        ))
}

/// INVALID_ARGUMENT: a prompt is longer than its context. Programs shorten it when they see this
/// reason. The numbers are the tokens of the prompt, the most that it may have, and those of the
/// context. The message may name a parameter that can be raised between its two parts.
pub(crate) fn context_exceeded(
    field: &str,
    (before, parameter, after): (&str, Option<&'static str>, &str),
    (n_prompt_tokens, prompt_max, n_ctx): (usize, usize, u32),
) -> Failure {
    let message = format!("{before}{}{after}", parameter.unwrap_or_default());
    let failure = Failure::new(Reason::ContextExceeded)
        .with("field", field)
        .with("n_prompt_tokens", n_prompt_tokens.to_string())
        .with("prompt_tokens_max", prompt_max.to_string())
        .with("n_ctx", n_ctx.to_string())
        .field(field, &message);
    match parameter {
        Some(name) => failure.says_naming(&format!("{field}: {before}"), name, after),
        None => failure.says(&format!("{field}: {message}")),
    }
}

/// UNAVAILABLE: the daemon takes no new work.
pub fn draining() -> Failure {
    Failure::new(Reason::Draining).retry(DRAIN_RETRY).says(
        "the daemon is ending and takes no new work; retry on a new connection once it runs again",
    )
}

/// UNAVAILABLE: others kill the processes that render chats.
pub(crate) fn renderer_killed(message: &str) -> Failure {
    Failure::new(Reason::RendererKilled)
        .retry(RENDERER_RETRY)
        .says(message)
}

/// UNAVAILABLE: the engine ended under a request.
pub fn engine_gone() -> Failure {
    Failure::new(Reason::NotServing)
        .retry(DRAIN_RETRY)
        .says("the engine ended before the request did; retry on a new connection once the daemon runs again")
}

/// DEADLINE_EXCEEDED outside of the engine.
pub fn deadline() -> Failure {
    Failure::new(Reason::Deadline)
        .says("the deadline passed before the answer was ready; allow more time")
}

/// INTERNAL.
pub fn bug(message: &str) -> Failure {
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
mod tests;
