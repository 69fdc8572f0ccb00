//! Failures of requests: one reason for each cause, with the fields, names and numbers that
//! programs read.
//!
//! Each protocol (gRPC, HTTP) converts a [`Failure`] to its own format. The type, its reasons and
//! failures that several crates use are here; failures of one crate are in that crate's `refusals`.
//! Messages are cut to [`MESSAGE_MAX_BYTES`], texts of details to half of it, since they travel as
//! headers and a client refuses headers above 16 KiB.

#![forbid(unsafe_code)]

mod kind;
mod reason;
mod violations;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

pub use self::kind::Kind;
pub use self::reason::Reason;
pub use self::violations::Violations;

/// Maximum length of a failure's message, in bytes.
pub const MESSAGE_MAX_BYTES: usize = 1024;
/// Maximum length of a text in a detail, in bytes.
const DETAIL_MAX_BYTES: usize = 512;
/// Maximum number of field violations in one failure.
const VIOLATIONS_MAX: usize = 8;
/// Delay after which a client should retry while the daemon drains: a new one has started by then.
const DRAIN_RETRY: Duration = Duration::from_secs(2);
/// Delay after which a client should retry a chat whose renderers were killed.
const RENDERER_RETRY: Duration = Duration::from_secs(1);

/// The thing that a failure concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Kind of the subject, such as `model` or `file`; for a precondition the failure's reason, or
    /// `DEVICE`.
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
    /// Byte range of the message in which a request parameter is named, and the parameter's name
    /// over gRPC.
    parameter: Option<(Range<usize>, &'static str)>,
    metadata: BTreeMap<String, String>,
    fields: Vec<(String, String)>,
    resource: Option<Subject>,
    precondition: Option<Subject>,
    retry_after: Option<Duration>,
}

impl Failure {
    /// A failure with this reason, without a message.
    pub fn new(reason: Reason) -> Self {
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

    /// Kind of the failure.
    pub fn kind(&self) -> Kind {
        self.0.reason.kind()
    }

    /// Reason of the failure.
    pub fn reason(&self) -> Reason {
        self.0.reason
    }

    /// The message for users: what is wrong, and what to do.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The message, with request parameters renamed by `name`.
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

    /// Invalid fields of the request, each with what is wrong.
    pub fn fields(&self) -> &[(String, String)] {
        &self.0.fields
    }

    /// The thing that is missing or unusable.
    pub fn resource(&self) -> Option<&Subject> {
        self.0.resource.as_ref()
    }

    /// The condition that is not met.
    pub fn precondition(&self) -> Option<&Subject> {
        self.0.precondition.as_ref()
    }

    /// Delay after which the request may be sent again.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// Adds a name or number of the message, for programs.
    pub fn with(mut self, key: &str, value: impl AsRef<str>) -> Self {
        self.0
            .metadata
            .insert(key.to_owned(), cut(value.as_ref(), DETAIL_MAX_BYTES));
        self
    }

    /// Adds an invalid field of the request, and what is wrong with it.
    pub fn field(mut self, field: &str, message: &str) -> Self {
        let (field, message) = (cut(field, DETAIL_MAX_BYTES), cut(message, DETAIL_MAX_BYTES));
        self.0.fields.push((field, message));
        self
    }

    /// Sets the thing that is missing or unusable.
    pub fn about(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.resource = Some(subject(kind, name, message));
        self
    }

    /// Sets the condition that is not met.
    pub fn requires(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.precondition = Some(subject(kind, name, message));
        self
    }

    /// Sets the delay after which the request may be sent again.
    pub fn retry(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// Sets the message, replacing an earlier one.
    pub fn says(mut self, message: &str) -> Self {
        self.0.message = cut(message, MESSAGE_MAX_BYTES);
        self.0.parameter = None;
        self
    }

    /// Sets a message that names a request parameter between `before` and `after`; protocols may
    /// rename it.
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

/// INVALID_ARGUMENT: one field is invalid.
pub fn invalid(field: &str, message: &str) -> Failure {
    invalid_all(&[(field.to_owned(), message.to_owned())])
}

/// INVALID_ARGUMENT: lists what is wrong with each field.
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

/// FAILED_PRECONDITION: a model is not in the required state.
pub fn model_precondition(reason: Reason, model: &str, message: &str) -> Failure {
    Failure::new(reason)
        .with("model", model)
        .requires(reason.name(), model, message)
        .says(message)
}

/// UNIMPLEMENTED: a field asks for something that is not supported.
pub fn unsupported_field(field: &str, message: &str) -> Failure {
    Failure::new(Reason::Unsupported)
        .with("field", field)
        .field(field, message)
        .says(&format!("{field}: {message}"))
}

/// RESOURCE_EXHAUSTED, with the delay after which to retry.
pub fn exhausted(message: &str, retry_after: Duration) -> Failure {
    Failure::new(Reason::FullNow)
        .retry(retry_after)
        .says(message)
}

/// RESOURCE_EXHAUSTED: the client did not read its reply.
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

/// INVALID_ARGUMENT: the prompt exceeds the context. Programs shorten it when they see this reason.
/// The numbers are the prompt's tokens, their maximum, and the context length. The message may name
/// a parameter that can be raised between its two parts.
pub fn context_exceeded(
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

/// UNAVAILABLE: the daemon is shutting down and accepts no new work.
pub fn draining() -> Failure {
    Failure::new(Reason::Draining).retry(DRAIN_RETRY).says(
        "the daemon is ending and takes no new work; retry on a new connection once it runs again",
    )
}

/// UNAVAILABLE: another process killed the processes that render chats.
pub fn renderer_killed(message: &str) -> Failure {
    Failure::new(Reason::RendererKilled)
        .retry(RENDERER_RETRY)
        .says(message)
}

/// UNAVAILABLE: the engine ended while the request was running.
pub fn engine_gone() -> Failure {
    Failure::new(Reason::NotServing)
        .retry(DRAIN_RETRY)
        .says("the engine ended before the request did; retry on a new connection once the daemon runs again")
}

/// DEADLINE_EXCEEDED: the request's body did not arrive in time.
pub fn body_late(limit: Duration) -> Failure {
    Failure::new(Reason::RequestTooSlow)
        .with("limit_s", limit.as_secs().to_string())
        .says(&format!(
            "the request did not arrive whole within {} s; send it at once",
            limit.as_secs()
        ))
}

/// INVALID_ARGUMENT: the request has too many bytes.
pub fn body_too_large(max: usize) -> Failure {
    let message = format!(
        "the request has more than {max} bytes, the most that this call takes; send less at once"
    );
    Failure::new(Reason::RequestTooLarge)
        .with("max_bytes", max.to_string())
        .says(&message)
}

/// DEADLINE_EXCEEDED: the deadline passed outside of the engine.
pub fn deadline() -> Failure {
    Failure::new(Reason::Deadline)
        .says("the deadline passed before the answer was ready; allow more time")
}

/// INTERNAL: a bug of the daemon.
pub fn bug(message: &str) -> Failure {
    Failure::new(Reason::Bug).says(&format!(
        "internal error: {message}; please report it with the daemon's log"
    ))
}

/// `text`, cut at a character so that it has at most `max` bytes including the mark of the cut.
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
