//! Checks and limits of every call, before and after its handler: they bound the memory that a
//! client can make the daemon hold.
//!
//! ```text
//! connection kept for health and status?  -> other calls are refused
//! role of the caller                      -> PERMISSION_DENIED without the one that the call needs
//! body: collected here, whole             -> bounded in bytes (each call's own bound), in time,
//!                                            and in the sum over all calls and over one
//!                                            user's; counted before it is decoded
//! handler
//! reply: handed out in pieces             -> bytes not yet sent are summed likewise, with HTTP's;
//!                                            one that is not read is ended ([`Replies`])
//! ```
//!
//! *Invariant:* the bytes of requests that are being read stay within
//! [`rocmforge_service::READING_MAX_BYTES`] beside a frame of each call, but for reflection, whose
//! requests stream (test `requests_in_reading_have_a_bound_all_together`). A rejected call holds no
//! bytes. *Invariant:* nothing here waits but for the caller's groups, and for the body
//! [`BODY_WAIT_MAX`] at most (test `a_request_that_does_not_end_is_ended`).

mod late;
mod method;
mod replies;
mod shape;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as _, Frame};
use rocmforge_connections::{Peer, Replies, Runtimes};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::arrival::Caller;
use rocmforge_service::refusals;
use rocmforge_service::sum::Held;
use rocmforge_service::{BODY_WAIT_MAX, Service as Daemon};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tower::Layer;

use self::method::Method;
use self::replies::Reply;
use super::arrival;
use super::status_code::status;

/// Delay after which a client should retry when too many bytes are being read.
const RETRY: Duration = Duration::from_secs(1);

/// The limits, shared by all connections.
#[derive(Debug)]
pub(super) struct Bounds {
    context: Arc<Daemon>,
    runtimes: Runtimes,
    replies: Arc<Replies>,
}

impl Bounds {
    pub(super) fn new(context: &Arc<Daemon>, runtimes: Runtimes) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            runtimes,
            replies: Replies::new(&context.sending),
        })
    }

    /// Ends streams that nobody reads; runs for as long as it is polled.
    pub(super) async fn watch(&self) {
        let engine = &self.context.engine;
        let others_wait = || engine.snapshot().others_wait();
        self.replies.watch(others_wait).await;
    }
}

/// Wraps services with the checks and limits.
#[derive(Debug, Clone)]
pub(super) struct GateLayer(pub(super) Arc<Bounds>);

impl<S> Layer<S> for GateLayer {
    type Service = Gate<S>;

    fn layer(&self, inner: S) -> Gate<S> {
        Gate {
            inner,
            bounds: Arc::clone(&self.0),
        }
    }
}

/// A service behind the checks and limits.
#[derive(Debug, Clone)]
pub(super) struct Gate<S> {
    inner: S,
    bounds: Arc<Bounds>,
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Poller<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The one that was polled ready is used, and a fresh one stays.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let bounds = Arc::clone(&self.bounds);
        let Some(peer) = request.extensions().get::<Arc<Peer>>().cloned() else {
            let response = status(failure::bug("a call without a connection")).into_http();
            return Box::pin(std::future::ready(Ok(response)));
        };
        let call = peer.call();
        let until = request.extensions().get().and_then(arrival::last_moment);
        let runtimes = bounds.runtimes.clone();
        let handled = runtimes.handle(async move {
            let method = Method::of(request.uri().path());
            let uid = peer.caller.uid;
            let entered = match bounds.enter(&method, &peer).await {
                Ok(()) => bounds.read(&method, uid, request).await,
                Err(failure) => Err(status(failure)),
            };
            let (request, held) = match entered {
                Ok(entered) => entered,
                Err(status) => return Ok(status.into_http()),
            };
            let response = inner.call(request).await?;
            // The handler has made of the request what it keeps.
            drop(held);
            Ok(response.map(|body| match body.is_end_stream() {
                true => body,
                false => Body::new(Reply(bounds.replies.wrap(body, method.unread, call))),
            }))
        });
        Box::pin(late::until_deadline(until, handled))
    }
}

impl Bounds {
    async fn enter(&self, method: &Method, peer: &Peer) -> Result<(), Failure> {
        let Caller { uid, gid, pid } = peer.caller;
        if let Some(needed) = method.role
            && self.context.roles.highest(uid, gid).await < Some(needed)
        {
            tracing::info!(target: "audit", uid, pid, role = %needed, "refused: the role is missing");
            return Err(refusals::role_missing(needed, uid));
        }
        if peer.is_reserved() && !method.is_light {
            return Err(failure::exhausted(
                "all connections that the daemon keeps for work are busy; this one answers health and status only: try \
                 again when one is free",
                RETRY,
            ));
        }
        match method.is_light {
            true => Ok(()),
            false => self.context.room_for_reply(uid),
        }
    }

    /// Reads the request's body completely, and counts its bytes.
    async fn read(
        &self,
        method: &Method,
        uid: u32,
        request: Request<Body>,
    ) -> Result<(Request<Body>, Held), Status> {
        let mut held = self.context.reading.hold(uid);
        let (parts, mut body) = request.into_parts();
        if method.streams_in {
            return Ok((Request::from_parts(parts, body), held));
        }
        let until = Instant::now() + BODY_WAIT_MAX;
        let mut frames = Vec::new();
        let mut bytes = 0;
        loop {
            let next = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
            let frame = match tokio::time::timeout_at(until, next).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(status))) => return Err(status),
                Ok(None) => break,
                Err(_) => return Err(status(failure::body_late(BODY_WAIT_MAX))),
            };
            let Ok(data) = frame.into_data() else {
                continue;
            };
            bytes += data.len();
            if bytes > method.request_max_bytes {
                return Err(status(failure::body_too_large(method.request_max_bytes)));
            }
            if !held.grow(data.len() as u64) {
                return Err(status(failure::exhausted(
                    "too many bytes of requests arrive at once; try again in a second",
                    RETRY,
                )));
            }
            frames.push(data);
        }
        shape::check(method.shape, &frames)?;
        let body = Body::new(Collected(frames.into_iter()));
        Ok((Request::from_parts(parts, body), held))
    }
}

/// A collected body; its frames are freed as they are taken.
#[derive(Debug)]
struct Collected(std::vec::IntoIter<Bytes>);

impl http_body::Body for Collected {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Poller<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.next().map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_slice().is_empty()
    }
}
