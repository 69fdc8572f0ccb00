//! Who sent a request, when it came and when it has to be answered, from its `grpc-timeout` header.
//!
//! The server's own timeout ends a call with CANCELLED, and only up to the first message of a stream. So arrivals are
//! stamped before that timer is made, every handler waits no longer than the stamp's deadline, which lies a little before
//! the timer's, and the engine is told it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_engine::api::Asker;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::status_code;
use crate::connection::{Caller, Peer};

/// How much earlier than the server's own timer ours fires, so that its code is the one that is sent; at most a quarter
/// of the timeout. Timers tick in milliseconds.
const HEAD_START: Duration = Duration::from_millis(3);

/// Who sent a request, when it came, and its deadline if it has one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    /// The process that sent it.
    pub(super) caller: Option<Caller>,
    /// When it came.
    pub(super) at: Instant,
    /// When its answer is of no use any more.
    pub(super) deadline: Option<Instant>,
}

impl Arrival {
    /// The stamp of a request.
    pub(super) fn of<T>(request: &Request<T>) -> Self {
        match request.extensions().get::<Self>() {
            Some(stamp) => *stamp,
            None => Self::now(request.metadata(), None),
        }
    }

    fn now(metadata: &MetadataMap, caller: Option<Caller>) -> Self {
        let at = Instant::now();
        let timeout = metadata
            .get("grpc-timeout")
            .and_then(|value| parse_timeout(value.to_str().ok()?));
        // A deadline beyond the clock's range is none.
        Self {
            caller,
            at,
            deadline: timeout
                .and_then(|timeout| at.checked_add(timeout - HEAD_START.min(timeout / 4))),
        }
    }

    /// For whom the engine works: the user whose process asks.
    pub(super) fn asker(&self) -> Asker {
        Asker {
            client: self.caller.map_or(0, |caller| u64::from(caller.uid)),
            ..Asker::default()
        }
    }

    /// Ends at the deadline, with DEADLINE_EXCEEDED; never without one.
    pub(super) async fn passed(&self) -> Status {
        match self.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => std::future::pending().await,
        }
        status_code::deadline()
    }

    /// What `work` gives, or DEADLINE_EXCEEDED. `work` is dropped at the deadline, which cancels it.
    pub(super) async fn limit<T>(
        &self,
        work: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        match self.deadline {
            None => work.await,
            // A new timer would fire with the next tick only, and the server's may have fired by then.
            Some(deadline) if Instant::now() >= deadline => Err(status_code::deadline()),
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), work).await {
                Ok(result) => result,
                Err(_) => Err(status_code::deadline()),
            },
        }
    }
}

/// Stamps a request with its [`Arrival`]; runs before anything else sees the request.
pub(super) fn stamp(mut request: Request<()>) -> Result<Request<()>, Status> {
    let caller = request.extensions().get::<Arc<Peer>>();
    let caller = caller.map(|peer| peer.caller);
    let arrival = Arrival::now(request.metadata(), caller);
    request.extensions_mut().insert(arrival);
    Ok(request)
}

/// Reads `grpc-timeout`: one to eight digits and a unit. Anything else counts as absent.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        let cases = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("4m", Some(Duration::from_millis(4))),
            ("5u", Some(Duration::from_micros(5))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("", None),
            ("S", None),
            ("1", None),
            ("1x", None),
            ("-1S", None),
            ("123456789S", None),
            ("1\u{b5}", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_timeout(text), expected, "{text:?}");
        }
    }

    #[tokio::test]
    async fn work_past_its_deadline_is_dropped_with_the_right_code() {
        let at = Instant::now();
        let arrival = Arrival {
            caller: None,
            at,
            deadline: Some(at + Duration::from_millis(5)),
        };
        let status = arrival
            .limit(std::future::pending::<Result<(), Status>>())
            .await
            .unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
        let late = arrival.limit(async { Ok(()) }).await;
        assert_eq!(late.unwrap_err().code(), tonic::Code::DeadlineExceeded);
        let free = Arrival {
            deadline: None,
            ..arrival
        };
        assert!(free.limit(async { Ok(()) }).await.is_ok());
    }
}
