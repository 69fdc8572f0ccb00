//! Why something is not done: one reason a cause, with the fields, names and numbers that programs
//! read.
//!
//! Every way of asking (gRPC, HTTP) puts a [`Failure`] into its own words on the wire. The type,
//! its reasons and what several crates say by it are here; what one crate alone refuses is in that
//! crate's `refusals`. Messages are cut to [`MESSAGE_MAX_BYTES`], texts of details to half of it,
//! since they travel as headers and a client refuses headers above 16 KiB.

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

/// What a failure is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Kind of the subject, such as `model` or `file`; of a precondition its reason, or `DEVICE`.
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
    /// A failure without a message.
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

    /// With a name or a number of the message, for programs.
    pub fn with(mut self, key: &str, value: impl AsRef<str>) -> Self {
        self.0
            .metadata
            .insert(key.to_owned(), cut(value.as_ref(), DETAIL_MAX_BYTES));
        self
    }

    /// With a field of the request that is at fault, and what is wrong with it.
    pub fn field(mut self, field: &str, message: &str) -> Self {
        let (field, message) = (cut(field, DETAIL_MAX_BYTES), cut(message, DETAIL_MAX_BYTES));
        self.0.fields.push((field, message));
        self
    }

    /// With the thing that is missing or unusable.
    pub fn about(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.resource = Some(subject(kind, name, message));
        self
    }

    /// With what would have to hold.
    pub fn requires(mut self, kind: &str, name: &str, message: &str) -> Self {
        self.0.precondition = Some(subject(kind, name, message));
        self
    }

    /// With the delay after which the request may be sent again.
    pub fn retry(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// With the message, which replaces an earlier one.
    pub fn says(mut self, message: &str) -> Self {
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

/// UNAVAILABLE: the daemon takes no new work.
pub fn draining() -> Failure {
    Failure::new(Reason::Draining).retry(DRAIN_RETRY).says(
        "the daemon is ending and takes no new work; retry on a new connection once it runs again",
    )
}

/// UNAVAILABLE: others kill the processes that render chats.
pub fn renderer_killed(message: &str) -> Failure {
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

/// DEADLINE_EXCEEDED: the request did not arrive whole.
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

/// DEADLINE_EXCEEDED outside of the engine.
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
