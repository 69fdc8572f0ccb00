//! Ends a call with the daemon's own code if its handler or its body is late.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;

use rocmforge_failure as failure;
use tonic::body::Body;
use tonic::codegen::http::Response;

use crate::status_code::status;

type Answer = Result<Response<Body>, Infallible>;

/// The response of `handler`, or DEADLINE_EXCEEDED at `until`.
///
/// The server's timer, which ends calls with CANCELLED, is polled after this one in the same task
/// and fires later, so this one always comes first.
pub(super) async fn until_deadline(
    until: Option<Instant>,
    handler: impl Future<Output = Answer>,
) -> Answer {
    let Some(until) = until else {
        return handler.await;
    };
    let mut handler = pin!(handler);
    let mut timer = pin!(tokio::time::sleep_until(until.into()));
    poll_fn(|cx| {
        if let Poll::Ready(answer) = handler.as_mut().poll(cx) {
            return Poll::Ready(answer);
        }
        // Timers tick in milliseconds: the other one may be in the same tick.
        if timer.as_mut().poll(cx).is_ready() || Instant::now() >= until {
            return Poll::Ready(Ok(status(failure::deadline()).into_http()));
        }
        Poll::Pending
    })
    .await
}
