//! One request: who sent it, what it is called, and the dialect of its answer.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use rocmforge_engine::LoadedModel;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::arrival::{Arrival, Caller};
use rocmforge_service::request_log::RequestLog;
use rocmforge_service::{REQUEST_MAX_BYTES, SMALL_REQUEST_MAX_BYTES, Service};
use rocmforge_tokenizer::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;

use super::error::Dialect;
use super::image_urls::ImageUrls;
use super::{Http, body};

/// What a client calls its request, and what we call it in the answer.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header in which Anthropic's clients expect the request id.
pub(super) const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");
/// Longest such name.
const REQUEST_ID_MAX_BYTES: usize = 128;

/// Client of a request, as its connection knows it; put into every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client {
    /// The process at the other end of the Unix socket; `None` over TCP.
    pub(super) caller: Option<Caller>,
    /// Whether the connection uses a reserved place, which serves health and metrics only.
    pub(super) reserved: bool,
}

/// The name of a request.
#[derive(Debug, Clone)]
pub(super) struct RequestId(pub(super) HeaderValue);

impl RequestId {
    /// The client's, or a fresh one where it has none that is fit to print.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let printable = |value: &&HeaderValue| {
            let bytes = value.as_bytes();
            !bytes.is_empty()
                && bytes.len() <= REQUEST_ID_MAX_BYTES
                && bytes.iter().all(u8::is_ascii_graphic)
        };
        let given = headers.get(REQUEST_ID).filter(printable);
        Self(given.cloned().unwrap_or_else(|| {
            let fresh = format!("req-{}", fresh_id());
            HeaderValue::from_str(&fresh).unwrap_or(HeaderValue::from_static("req"))
        }))
    }

    pub(super) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

/// Sixteen digits that no other answer has.
pub(super) fn fresh_id() -> String {
    format!("{:016x}", rand::random::<u64>())
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) service: Arc<Service>,
    /// Where the events of a stream are made.
    pub(super) sockets: Handle,
    pub(super) arrival: Arrival,
    pub(super) dialect: Dialect,
    pub(super) id: RequestId,
    /// The route, for the log.
    route: &'static str,
    /// Images that it names by a URL.
    image_urls: Arc<ImageUrls>,
}

impl Call {
    pub(super) fn of(http: &Http, route: &'static str, request: &Request) -> Self {
        let extensions = request.extensions();
        let client = extensions.get::<Client>();
        let id = extensions.get::<RequestId>().cloned();
        let traceparent = request.headers().get("traceparent");
        let traceparent = traceparent.and_then(|value| value.to_str().ok());
        let mut arrival =
            Arrival::now(client.and_then(|client| client.caller)).part_of(traceparent);
        arrival.token = extensions.get().copied();
        Self {
            service: Arc::clone(&http.service),
            sockets: http.runtimes.sockets.clone(),
            arrival,
            dialect: Dialect::of(request.uri(), request.headers()),
            id: id.unwrap_or_else(|| RequestId::of(request.headers())),
            route,
            image_urls: Arc::clone(&http.image_urls),
        }
    }

    /// Begins the line of this request in the log.
    pub(super) fn log(&self, model: &str) -> RequestLog {
        let mut log = RequestLog::new(self.route, model, &self.arrival);
        log.identify(self.id.as_str());
        log
    }

    /// Begins the line of a call of management.
    pub(super) fn audit(&self, model: &str, arguments: &str) -> RequestLog {
        let mut log = RequestLog::audit(self.route, model, arguments, &self.arrival);
        log.identify(self.id.as_str());
        log
    }

    /// The body, decoded.
    pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
        &self,
        request: Request,
    ) -> Result<T, Failure> {
        body::read(self, request, REQUEST_MAX_BYTES).await
    }

    /// The body of a request that only names things.
    pub(super) async fn read_small<T: DeserializeOwned + Send + 'static>(
        &self,
        request: Request,
    ) -> Result<T, Failure> {
        body::read(self, request, SMALL_REQUEST_MAX_BYTES).await
    }

    /// The user that what it holds is counted for.
    pub(super) fn uid(&self) -> u32 {
        self.arrival.caller.map_or(Caller::NOBODY, |c| c.uid)
    }

    /// The model of this name, which is loaded if it is not.
    pub(super) async fn model(&self, name: &str) -> Result<Arc<LoadedModel>, Failure> {
        self.has_name(name)?;
        let found = self
            .service
            .model_at_first_use("model", name, &self.arrival);
        found.await
    }

    /// Puts the bytes of images in the place of their URLs, for a model that reads images.
    ///
    /// # Errors
    /// As [`ImageUrls::fetch`].
    pub(super) async fn fetch_images(
        &self,
        messages: &mut [Message],
        model: &LoadedModel,
    ) -> Result<(), Failure> {
        let fetched = self
            .image_urls
            .fetch(&self.service, &self.arrival, messages, model);
        fetched.await
    }

    /// The name that a request means: its own, or where it has none that of the only model there
    /// is, loaded or a file.
    ///
    /// # Errors
    /// INVALID_ARGUMENT where it has none and there are several, or none.
    pub(super) async fn meant(&self, name: String) -> Result<String, Failure> {
        if !name.is_empty() {
            return Ok(name);
        }
        let all = self.service.available().await?;
        let mut models = all.iter().filter(|model| model.alias_of().is_none());
        match (models.next(), models.next()) {
            (Some(only), None) => Ok(only.name().to_owned()),
            _ => self.has_name(&name).map(|()| name),
        }
    }

    /// Refuses a missing name, saying where this dialect's clients find those that there are.
    pub(super) fn has_name(&self, name: &str) -> Result<(), Failure> {
        if !name.is_empty() {
            return Ok(());
        }
        let list = match self.dialect {
            Dialect::Ollama => "/api/tags",
            Dialect::OpenAi | Dialect::Anthropic => "/v1/models",
        };
        let why = format!("missing; name one of GET {list}");
        Err(failure::invalid("model", &why))
    }

    /// Result of the handler, as a response.
    pub(super) fn respond(&self, result: Result<Response, Failure>) -> Response {
        match result {
            Ok(response) => response,
            Err(failure) => self.refuse(&failure),
        }
    }

    /// The refusal in the dialect's words.
    pub(super) fn refuse(&self, failure: &Failure) -> Response {
        // Requests that came far enough to be generated have lines of their own.
        tracing::debug!(
            route = self.route,
            id = self.id.as_str(),
            reason = failure.reason().name(),
            message = ?failure.message(),
            "an HTTP request is refused"
        );
        self.dialect.response(failure, self.id.as_str())
    }
}

/// A JSON answer.
pub(super) fn json<T: Serialize>(value: &T) -> Result<Response, Failure> {
    match serde_json::to_vec(value) {
        Ok(bytes) => Ok(with_type("application/json", Body::from(bytes))),
        Err(error) => Err(failure::bug(&format!("an answer is no JSON: {error}"))),
    }
}

/// An answer with the type of its content.
pub(super) fn with_type(content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    let value = HeaderValue::from_static(content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}

/// What a query says of `key`, percent-decoded.
pub(super) fn query(uri: &Uri, key: &str) -> Option<String> {
    let pairs = uri.query()?.split('&');
    let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == key)?;
    Some(percent_decoded(value))
}

/// Percent escapes as the bytes that they stand for; what is no escape stays.
pub(super) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escaped = (first == b'%')
            .then(|| after.get(..2))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Seconds since 1970.
pub(super) fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Whether a request may be answered where everything is full, and by anyone.
pub(super) fn is_light(method: &Method, path: &str) -> bool {
    method == Method::GET && matches!(path, "/health" | "/v1/health" | "/metrics")
}
