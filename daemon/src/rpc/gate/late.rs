//! A call whose handler is late, or whose body does not come, ends with the daemon's own code.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use rocmforge_service::arrival::Arrival;
use rocmforge_service::failure;
use tonic::body::Body;
use tonic::codegen::http::Response;

use crate::rpc::status_code::status;

type Answer = Result<Response<Body>, Infallible>;

/// What `handler` gives, or DEADLINE_EXCEEDED at `until`.
///
/// The server's timer, which says CANCELLED, is polled behind this one, in the same task, and fires
/// later: whichever thread is late, ours is seen first.
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

/// A moment between the deadline of handlers, which know more of what they did, and the server's timer. That
/// one is 3 ms behind the deadline, or a third of what the deadline allows where this is less
/// ([`crate::rpc::arrival`]).
pub(super) fn last_moment(arrival: &Arrival) -> Option<Instant> {
    let deadline = arrival.deadline?;
    let allowed = deadline.saturating_duration_since(arrival.at);
    Some(deadline + Duration::from_millis(1).min(allowed / 9))
}
