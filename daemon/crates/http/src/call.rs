//! One HTTP request while it is handled: its client, its id, and the dialect of its response.

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

/// Header with the id of a request, from the client or made here; repeated in the response.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header in which Anthropic's clients expect the request id.
pub(super) const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");
/// Maximum length of a request id in bytes.
const REQUEST_ID_MAX_BYTES: usize = 128;

/// The client of a request, as its connection knows it; added to each request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client {
    /// The process at the other end of the Unix socket; `None` over TCP.
    pub(super) caller: Option<Caller>,
    /// Whether the connection uses a reserved place, which serves health and metrics only.
    pub(super) reserved: bool,
}

/// The id of a request.
#[derive(Debug, Clone)]
pub(super) struct RequestId(pub(super) HeaderValue);

impl RequestId {
    /// The client's id, or a new one if it has none that is printable.
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

/// Sixteen hexadecimal digits that are unique among responses.
pub(super) fn fresh_id() -> String {
    format!("{:016x}", rand::random::<u64>())
}

/// A request that is being handled.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) service: Arc<Service>,
    /// The runtime on which the events of a stream are made.
    pub(super) sockets: Handle,
    pub(super) arrival: Arrival,
    pub(super) dialect: Dialect,
    pub(super) id: RequestId,
    /// The route of the request, for the log.
    route: &'static str,
    /// Fetches images that the request names by URL.
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

    /// Starts this request's log line.
    pub(super) fn log(&self, model: &str) -> RequestLog {
        let mut log = RequestLog::new(self.route, model, &self.arrival);
        log.identify(self.id.as_str());
        log
    }

    /// Starts the audit log line of a management call.
    pub(super) fn audit(&self, model: &str, arguments: &str) -> RequestLog {
        let mut log = RequestLog::audit(self.route, model, arguments, &self.arrival);
        log.identify(self.id.as_str());
        log
    }

    /// Reads and decodes the request's body.
    pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
        &self,
        request: Request,
    ) -> Result<T, Failure> {
        body::read(self, request, REQUEST_MAX_BYTES).await
    }

    /// Reads and decodes the small body of a request without prompts.
    pub(super) async fn read_small<T: DeserializeOwned + Send + 'static>(
        &self,
        request: Request,
    ) -> Result<T, Failure> {
        body::read(self, request, SMALL_REQUEST_MAX_BYTES).await
    }

    /// The user id for which the request's bytes are counted.
    pub(super) fn uid(&self) -> u32 {
        self.arrival.caller.map_or(Caller::NOBODY, |c| c.uid)
    }

    /// The model of this name, loaded if necessary.
    pub(super) async fn model(&self, name: &str) -> Result<Arc<LoadedModel>, Failure> {
        self.has_name(name)?;
        let found = self
            .service
            .model_at_first_use("model", name, &self.arrival);
        found.await
    }

    /// Replaces URLs of images by the images' bytes, for a model that reads images.
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

    /// The name of the request's model: the given one, or if that is empty the name of the only
    /// model, loaded or a file.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if no name is given and there are several models, or none.
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

    /// Rejects a missing model name, and says where clients of this dialect find the names.
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

    /// Converts a handler's result to a response.
    pub(super) fn respond(&self, result: Result<Response, Failure>) -> Response {
        match result {
            Ok(response) => response,
            Err(failure) => self.refuse(&failure),
        }
    }

    /// Converts a failure to a response in the dialect's format.
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

/// A response with a value as JSON.
pub(super) fn json<T: Serialize>(value: &T) -> Result<Response, Failure> {
    match serde_json::to_vec(value) {
        Ok(bytes) => Ok(with_type("application/json", Body::from(bytes))),
        Err(error) => Err(failure::bug(&format!("an answer is no JSON: {error}"))),
    }
}

/// A response with a body of this content type.
pub(super) fn with_type(content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    let value = HeaderValue::from_static(content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}

/// The value of `key` in a URI's query, percent-decoded.
pub(super) fn query(uri: &Uri, key: &str) -> Option<String> {
    let pairs = uri.query()?.split('&');
    let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == key)?;
    Some(percent_decoded(value))
}

/// Decodes percent escapes to bytes; invalid ones stay.
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

/// Whether a request is served also on reserved connections, and without a role.
pub(super) fn is_light(method: &Method, path: &str) -> bool {
    method == Method::GET && matches!(path, "/health" | "/v1/health" | "/metrics")
}
