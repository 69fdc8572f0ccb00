//! Replies on their way out.
//!
//! The transport takes a frame of a reply, and comes for the next when that one has been sent as
//! far as the client's window allows. A client that does not read makes it never come. What the
//! reply then holds (a generation with its place and its KV, or megabytes of encoded answer) is let
//! go by [`Replies::watch`], and the client finds a status where it reads on.
//!
//! ```text
//!            taken: a frame              taken again: nothing there yet
//! fresh --------------------> unread ----------------------------------> waiting for its handler
//!                               ^  |  too long                                   |
//!                               |  +---------> ended (body dropped, status left) | a frame
//!                               +------------------------------------------------+
//! ```

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use rocmforge_service::failure;
use rocmforge_service::sum::{Held, Sum};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::HeaderMap;

use super::method::Method;
use crate::connection::Call;
use crate::rpc::status_code;

/// Frames above this are counted, and handed out in pieces of it.
const PIECE_BYTES: usize = 16 << 10;
/// How long others have to wait, each time that is looked at, before a reply is ended for them.
const OTHERS_WAIT_MIN: Duration = Duration::from_secs(5);
/// How often unread replies are looked for.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// The replies that are on their way.
#[derive(Debug)]
pub(super) struct Replies {
    sum: Arc<Sum>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    replies: HashMap<u64, Weak<Reply>>,
}

/// A reply, shared by the transport that takes it and the watch that may end it.
#[derive(Debug)]
struct Reply {
    unread_max: Duration,
    only_while_others_wait: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The handler's body, and the call that it keeps; `None` once ended.
    body: Option<(Body, Call)>,
    /// What is left of a large frame, and its count.
    rest: Option<(Bytes, Arc<Held>)>,
    /// When the transport last took a frame; `None` while the handler is waited for.
    unread_since: Option<Instant>,
    /// What the client is told where the watch ended it.
    end: Option<End>,
}

#[derive(Debug)]
enum End {
    /// A status, after whole messages.
    Status(Status),
    /// A reset, inside of a message.
    Reset(Status),
    /// It has been told.
    Told,
}

impl Replies {
    pub(super) fn new(sum: Arc<Sum>) -> Arc<Self> {
        Arc::new(Self {
            sum,
            open: Mutex::default(),
        })
    }

    /// Whether this user's replies, or everyone's, fill the room for them.
    pub(super) fn is_full(&self, uid: u32) -> bool {
        self.sum.is_full(uid)
    }

    /// The reply as the transport takes it.
    pub(super) fn wrap(
        self: &Arc<Self>,
        body: Body,
        method: &Method,
        uid: u32,
        call: Call,
    ) -> Body {
        if body.is_end_stream() {
            return body;
        }
        let (unread_max, only_while_others_wait) = method.unread_max;
        let reply = Arc::new(Reply {
            unread_max,
            only_while_others_wait,
            state: Mutex::new(State {
                body: Some((body, call)),
                rest: None,
                unread_since: Some(Instant::now()),
                end: None,
            }),
        });
        let id = {
            let mut open = lock(&self.open);
            let id = open.next;
            open.next += 1;
            open.replies.insert(id, Arc::downgrade(&reply));
            id
        };
        Body::new(Outgoing {
            replies: Arc::clone(self),
            id,
            uid,
            reply,
        })
    }

    /// Ends replies that are unread for too long, for as long as it is polled.
    pub(super) async fn watch(&self, others_wait: impl Fn() -> bool) {
        let mut waiting_since: Option<Instant> = None;
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            // A request waits for a moment before it runs, which is no reason to end another.
            waiting_since = others_wait().then(|| waiting_since.unwrap_or_else(Instant::now));
            let others_wait = waiting_since.is_some_and(|at| at.elapsed() >= OTHERS_WAIT_MIN);
            let replies: Vec<_> = lock(&self.open)
                .replies
                .values()
                .filter_map(Weak::upgrade)
                .collect();
            for reply in replies {
                if others_wait || !reply.only_while_others_wait {
                    reply.end_if_unread(Instant::now());
                }
            }
        }
    }
}

impl Reply {
    fn end_if_unread(&self, now: Instant) {
        let mut state = lock(&self.state);
        let Some(since) = state.unread_since else {
            return;
        };
        if state.body.is_none() || now.duration_since(since) < self.unread_max {
            return;
        }
        let status = status_code::status(failure::unread(self.unread_max));
        state.end = Some(match state.rest.take() {
            Some(_) => End::Reset(status),
            None => End::Status(status),
        });
        let body = state.body.take();
        drop(state);
        // Outside of the lock: this cancels what the handler does.
        drop(body);
        tracing::info!(
            unread_s = now.duration_since(since).as_secs(),
            "a reply is ended: its client does not read it"
        );
    }
}

/// What is locked here is whole at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The transport's end of a reply.
#[derive(Debug)]
struct Outgoing {
    replies: Arc<Replies>,
    id: u64,
    uid: u32,
    reply: Arc<Reply>,
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        lock(&self.replies.open).replies.remove(&self.id);
    }
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut state = lock(&self.reply.state);
        if let Some(piece) = state.piece() {
            return Poll::Ready(Some(Ok(piece)));
        }
        let Some((body, _)) = &mut state.body else {
            return Poll::Ready(state.told());
        };
        let frame = match Pin::new(body).poll_frame(cx) {
            Poll::Pending => {
                state.unread_since = None;
                return Poll::Pending;
            }
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(last) => return Poll::Ready(last),
        };
        state.unread_since = Some(Instant::now());
        let frame = match frame.into_data() {
            Ok(data) if data.len() > PIECE_BYTES => {
                let mut held = self.replies.sum.hold(self.uid);
                held.add(data.len() as u64);
                state.rest = Some((data, Arc::new(held)));
                return Poll::Ready(state.piece().map(Ok));
            }
            Ok(data) => Frame::data(data),
            Err(frame) => frame,
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        let state = lock(&self.reply.state);
        match (&state.rest, &state.body) {
            (Some(_), _) => false,
            (None, Some((body, _))) => body.is_end_stream(),
            (None, None) => matches!(state.end, None | Some(End::Told)),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl State {
    /// The next piece of a large frame. Its bytes count until the transport has
    /// let go of the last of them.
    fn piece(&mut self) -> Option<Frame<Bytes>> {
        let (rest, held) = self.rest.as_mut()?;
        let data = rest.split_to(PIECE_BYTES.min(rest.len()));
        let counted = Counted {
            data,
            _held: Arc::clone(held),
        };
        if rest.is_empty() {
            self.rest = None;
        }
        self.unread_since = Some(Instant::now());
        Some(Frame::data(Bytes::from_owner(counted)))
    }

    /// What the client is told of a reply that was ended, once.
    fn told(&mut self) -> Option<Result<Frame<Bytes>, Status>> {
        match self.end.replace(End::Told)? {
            End::Status(status) => {
                let mut trailers = HeaderMap::new();
                match status.add_header(&mut trailers) {
                    Ok(()) => Some(Ok(Frame::trailers(trailers))),
                    Err(error) => Some(Err(error)),
                }
            }
            End::Reset(status) => Some(Err(status)),
            End::Told => None,
        }
    }
}

/// Bytes that are counted for as long as somebody has them.
#[derive(Debug)]
struct Counted {
    data: Bytes,
    _held: Arc<Held>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}
