//! Failures in the format of each dialect, and the only place where HTTP statuses are chosen.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use rocmforge_failure::{Failure, Reason};
use serde_json::{Value, json};

use super::call::with_type;

/// The status for a client that went away, as proxies log it.
const CLIENT_CLOSED: u16 = 499;

/// The dialect whose error format a response has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// The format of OpenAI and llama-server.
    OpenAi,
    /// The format of Anthropic.
    Anthropic,
    /// The format of Ollama.
    Ollama,
}

impl Dialect {
    /// The dialect of a request, by its path; for the list of models, which two dialects have at
    /// the same path, by a header.
    pub(super) fn of(uri: &Uri, headers: &HeaderMap) -> Self {
        let path = uri.path();
        let anthropic = path.starts_with("/v1/models") && headers.contains_key("anthropic-version");
        if path.starts_with("/v1/messages") || anthropic {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }

    /// The failure as a response.
    pub(super) fn response(self, failure: &Failure, id: &str) -> Response {
        let body = self.body(failure, id).to_string();
        let mut response = with_type("application/json", Body::from(body));
        *response.status_mut() = status(failure);
        if let Some(after) = failure.retry_after() {
            let seconds = after.as_secs_f64().ceil() as u64;
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if failure.reason() == Reason::ContentEncoding {
            response.headers_mut().insert(
                header::ACCEPT_ENCODING,
                HeaderValue::from_static(super::packed::ACCEPTED),
            );
        }
        if answer(failure.reason()).1 == RequestBody::Left {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if failure.reason() == Reason::TokenMissing {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }

    /// The failure as a JSON object, for responses and streams.
    pub(super) fn body(self, failure: &Failure, id: &str) -> Value {
        let message = failure.message();
        match self {
            Self::OpenAi => {
                let param = failure.fields().first().map(|(field, _)| field);
                let mut error = json!({
                    "message": message,
                    "type": openai_type(failure),
                    "param": param,
                    "code": openai_code(failure),
                    "details": failure.metadata(),
                });
                // As numbers where llama-server's clients look for them.
                for key in ["n_prompt_tokens", "n_ctx"] {
                    let said = number_of(failure, key).filter(|_| exceeds_context(failure));
                    if let Some(n) = said {
                        error[key] = n.into();
                    }
                }
                json!({"error": error})
            }
            Self::Anthropic => {
                // By these words agents know that they have to compact their conversation, and by
                // the numbers how far.
                let message = match exceeds_context(failure) {
                    true => {
                        let number = |key| number_of(failure, key).unwrap_or_default();
                        format!(
                            "prompt is too long: {} tokens > {} maximum; {message}",
                            number("n_prompt_tokens"),
                            number("prompt_tokens_max"),
                        )
                    }
                    false => message.to_owned(),
                };
                json!({
                    "type": "error",
                    "error": {"type": anthropic_type(failure), "message": message},
                    "request_id": id,
                })
            }
            Self::Ollama => json!({"error": failure.message_naming(super::ollama::name)}),
        }
    }
}

fn exceeds_context(failure: &Failure) -> bool {
    failure.reason() == Reason::ContextExceeded
}

/// A numeric value in a failure's metadata.
fn number_of(failure: &Failure, key: &str) -> Option<u64> {
    failure.metadata().get(key)?.parse().ok()
}

/// The HTTP status of a failure. Clients retry 408, 409, 429 and 5xx by themselves.
pub(super) fn status(failure: &Failure) -> StatusCode {
    answer(failure.reason()).0
}

/// How much of the body of a failed request was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestBody {
    /// The whole body was read.
    Read,
    /// The body, or a part of it, is unread. The connection is closed then, and the response says
    /// so, lest the client sends its next request into it.
    Left,
}

/// The HTTP status for a reason, and whether the request's body has been read when it occurs.
fn answer(reason: Reason) -> (StatusCode, RequestBody) {
    match reason {
        Reason::InvalidField
        | Reason::BadModelFile
        | Reason::Unsupported
        | Reason::ContextExceeded
        | Reason::UnknownPrevious
        | Reason::NotFirstPart
        | Reason::NotARegularFile
        | Reason::FileFailed
        | Reason::NoDevice
        | Reason::TooManyModels
        | Reason::PinTooLarge
        | Reason::NeverFits
        | Reason::NoDeviceMemory
        | Reason::BudgetOutOfRange
        | Reason::Setting
        | Reason::SettingsUnusable
        | Reason::ChatTemplateUnusable
        | Reason::NoChatTemplate => (StatusCode::BAD_REQUEST, RequestBody::Read),
        Reason::TokenMissing => (StatusCode::UNAUTHORIZED, RequestBody::Left),
        Reason::RoleMissing | Reason::ForeignOrigin => (StatusCode::FORBIDDEN, RequestBody::Left),
        Reason::OutsideModelDirs | Reason::NoModelDir | Reason::FileNotReadable => {
            (StatusCode::FORBIDDEN, RequestBody::Read)
        }
        Reason::NoSuchRoute => (StatusCode::NOT_FOUND, RequestBody::Left),
        Reason::UnknownModel
        | Reason::UnknownRequest
        | Reason::UnknownResponse
        | Reason::UnknownItem
        | Reason::NoSuchFile
        | Reason::NotOnHub
        | Reason::MissingParts => (StatusCode::NOT_FOUND, RequestBody::Read),
        Reason::ContentEncoding => (StatusCode::UNSUPPORTED_MEDIA_TYPE, RequestBody::Read),
        Reason::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, RequestBody::Left),
        Reason::RequestTooSlow => (StatusCode::REQUEST_TIMEOUT, RequestBody::Left),
        // The last five pass, or somebody else resolves them.
        Reason::NameTaken
        | Reason::LoadedFileChanged
        | Reason::ModelBusy
        | Reason::ModelPinned
        | Reason::ModelUnloaded
        | Reason::ModelReloaded
        | Reason::InUse => (StatusCode::CONFLICT, RequestBody::Read),
        Reason::RequestTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, RequestBody::Left),
        // To try again does not help.
        Reason::PeerLimitAlways => (StatusCode::PAYLOAD_TOO_LARGE, RequestBody::Read),
        Reason::FullNow => (StatusCode::TOO_MANY_REQUESTS, RequestBody::Left),
        Reason::PeerLimit | Reason::Unread | Reason::TooManyFiles => {
            (StatusCode::TOO_MANY_REQUESTS, RequestBody::Read)
        }
        // Nobody reads it: the client went away.
        Reason::Cancelled => {
            let closed = StatusCode::from_u16(CLIENT_CLOSED);
            (closed.unwrap_or(StatusCode::BAD_REQUEST), RequestBody::Read)
        }
        Reason::ModelFileChanged | Reason::Bug => {
            (StatusCode::INTERNAL_SERVER_ERROR, RequestBody::Read)
        }
        Reason::HubFailed => (StatusCode::BAD_GATEWAY, RequestBody::Read),
        Reason::NotServing
        | Reason::Draining
        | Reason::RendererKilled
        | Reason::ModelFileSilent
        | Reason::ModelDirSilent
        | Reason::FileBeingReplaced => (StatusCode::SERVICE_UNAVAILABLE, RequestBody::Read),
        Reason::Deadline => (StatusCode::GATEWAY_TIMEOUT, RequestBody::Read),
    }
}

fn openai_type(failure: &Failure) -> &'static str {
    match status(failure).as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        503 => "service_unavailable_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

/// The error code: OpenAI's own if it has one, else the failure's reason.
fn openai_code(failure: &Failure) -> &'static str {
    match failure.reason() {
        Reason::ContextExceeded => "context_length_exceeded",
        Reason::UnknownModel => "model_not_found",
        Reason::UnknownPrevious => "previous_response_not_found",
        Reason::TokenMissing => "invalid_api_key",
        reason => reason.name(),
    }
}

fn anthropic_type(failure: &Failure) -> &'static str {
    match status(failure).as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rocmforge_failure as failure;
    use rocmforge_service::refusals::unloaded_meanwhile;

    use super::*;
    use crate::refusals;

    #[test]
    fn each_dialect_has_its_own_shape() {
        let failure = failure::invalid("top_p", "2 is out of range");
        let openai = Dialect::OpenAi.body(&failure, "r");
        assert_eq!(openai["error"]["type"], "invalid_request_error");
        assert_eq!(openai["error"]["param"], "top_p");
        assert_eq!(openai["error"]["code"], "INVALID_FIELD");
        let anthropic = Dialect::Anthropic.body(&failure, "r");
        assert_eq!(anthropic["type"], "error");
        assert_eq!(anthropic["error"]["type"], "invalid_request_error");
        assert_eq!(anthropic["request_id"], "r");
        let ollama = Dialect::Ollama.body(&failure, "r");
        assert_eq!(ollama["error"], "top_p: 2 is out of range");
    }

    #[test]
    fn statuses_say_who_acts_and_when_to_try_again() {
        let rows = [
            (failure::invalid("x", "y"), 400),
            (failure::unsupported_field("x", "y"), 400),
            (refusals::token_missing(), 401),
            (refusals::no_route("GET", "/x"), 404),
            (refusals::no_method("GET", "/x", "POST"), 405),
            (unloaded_meanwhile("x"), 409),
            (failure::body_too_large(7), 413),
            (refusals::content_encoding("br", "gzip"), 415),
            (failure::body_late(Duration::from_secs(1)), 408),
            (failure::exhausted("full", Duration::from_millis(10)), 429),
            (failure::bug("odd"), 500),
            (failure::draining(), 503),
            (failure::deadline(), 504),
        ];
        for (failure, expected) in rows {
            let response = Dialect::OpenAi.response(&failure, "r");
            assert_eq!(response.status().as_u16(), expected, "{failure:?}");
            let retry = response.headers().get(header::RETRY_AFTER);
            assert_eq!(retry.is_some(), failure.retry_after().is_some());
        }
    }

    #[test]
    fn the_path_tells_the_dialect() {
        let of =
            |path: &'static str, headers: &HeaderMap| Dialect::of(&Uri::from_static(path), headers);
        let none = HeaderMap::new();
        assert_eq!(of("/v1/messages?beta=true", &none), Dialect::Anthropic);
        assert_eq!(of("/api/chat", &none), Dialect::Ollama);
        assert_eq!(of("/v1/models", &none), Dialect::OpenAi);
        let mut headers = HeaderMap::new();
        headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
        assert_eq!(of("/v1/models", &headers), Dialect::Anthropic);
    }
}
