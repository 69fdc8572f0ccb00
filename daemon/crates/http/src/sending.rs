//! An answer on its way out: counted where it is large, and ended where nobody reads it, together
//! with its connection, which carries nothing else.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use rocmforge_connections::{Call, Outgoing, Replies, Rule, Taken, UNREAD_MAX};

/// Marks a response whose body is generated while it is sent. It may stay unread while no request
/// waits for its memory. While others wait, a generation's own writer ends it long before this
/// bound does (`reply.rs`); streams of changes (`changes.rs`) have no such writer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streamed;

/// The body of an answer, as the connection takes it.
pub(super) struct Sending(Outgoing<Body>);

/// Why an answer has no end.
#[derive(Debug, thiserror::Error)]
#[error("its client did not read it for {} s", .0.as_secs())]
struct Unread(Duration);

/// Bounds what an answer may hold, and for how long.
pub(super) fn bounded(
    replies: &Arc<Replies>,
    response: Response,
    call: Call,
) -> hyper::Response<Sending> {
    let rule = Rule {
        unread_max: UNREAD_MAX,
        only_while_others_wait: response.extensions().get::<Streamed>().is_some(),
        ends_connection: true,
    };
    response.map(|body| Sending(replies.wrap(body, rule, call)))
}

impl http_body::Body for Sending {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.0.poll_taken(cx).map(|taken| {
            Some(match taken? {
                Taken::Frame(frame) => Ok(frame),
                Taken::Failed(error) => Err(error),
                Taken::Ended(ended) => Err(axum::Error::new(Unread(ended.unread_max))),
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
