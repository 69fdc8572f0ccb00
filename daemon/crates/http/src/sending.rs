//! A response being sent: counted if it is large, and ended with its connection if the client does
//! not read it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use rocmforge_connections::{Call, Outgoing, Replies, Rule, Taken, UNREAD_MAX};

/// Marks a response whose body is generated while it is sent. Such a response may stay unread while
/// no request waits for its memory. While others wait, a generation's own writer ends it long
/// before this bound does (`reply.rs`); streams of changes (`changes.rs`) have no such writer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streamed;

/// The body of a response, as the connection takes it.
pub(super) struct Sending(Outgoing<Body>);

/// The error of a response that was ended because its client did not read it.
#[derive(Debug, thiserror::Error)]
#[error("its client did not read it for {} s", .0.as_secs())]
struct Unread(Duration);

/// Limits the bytes and the time that an unread response may hold.
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
