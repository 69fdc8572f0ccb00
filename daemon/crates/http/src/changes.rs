//! Streams of changes, which last as long as a client follows them: `GET /models/sse`, `GET
//! /ui/live`.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;

use super::call::with_type;
use super::sending::Streamed;
use super::sse::SSE;

/// Interval after which a silent stream of changes sends a comment, to keep the connection open.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(15);
/// The comment that a stream sends when nothing has changed for a while.
pub(super) const NOTHING_CHANGED: &str = ": nothing changed\n\n";

/// The response that streams these events.
pub(super) fn response<S>(events: S) -> Response
where
    S: Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
{
    let mut response = with_type(SSE, Body::from_stream(events));
    response.extensions_mut().insert(Streamed);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies would hold small pieces back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
