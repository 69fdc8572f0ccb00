//! The deadline of a request, from its `grpc-timeout` header.
//!
//! The server's own timeout ends a call with CANCELLED, and only up to the first message of a
//! stream. So arrivals are stamped before that timer is made, every handler waits no longer than
//! the stamp's deadline, which lies a little before the timer's, and the engine gets it. A handler
//! that is later than that is abandoned (`gate/late.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_connections::Peer;
use rocmforge_service::arrival::{Arrival, Caller};
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

/// How much earlier than the server's own timer ours fires, so that its code is the one that is
/// sent; at most a quarter of the timeout. Timers tick in milliseconds.
const HEAD_START: Duration = Duration::from_millis(3);

/// When a call is ended whose handler has not ended it at its deadline: after that, since handlers
/// return better errors, and before the server's own timer.
pub(super) fn last_moment(arrival: &Arrival) -> Option<Instant> {
    let deadline = arrival.deadline?;
    // Of the timeout the deadline has three quarters, or all but the head start.
    let allowed = deadline.saturating_duration_since(arrival.at);
    Some(deadline + HEAD_START.min(allowed / 3) / 3)
}

/// The arrival that a request was stamped with.
pub(super) fn of<T>(request: &Request<T>) -> Arrival {
    match request.extensions().get::<Arrival>() {
        Some(stamp) => *stamp,
        None => now(request.metadata(), None),
    }
}

fn now(metadata: &MetadataMap, caller: Option<Caller>) -> Arrival {
    let traceparent = metadata.get("traceparent").and_then(|v| v.to_str().ok());
    let arrival = Arrival::now(caller).part_of(traceparent);
    let timeout = metadata
        .get("grpc-timeout")
        .and_then(|value| parse_timeout(value.to_str().ok()?));
    match timeout {
        Some(timeout) => arrival.within(timeout - HEAD_START.min(timeout / 4)),
        None => arrival,
    }
}

/// Stamps a request with its [`Arrival`]; runs before anything else sees the request.
pub(super) fn stamp(mut request: Request<()>) -> Result<Request<()>, Status> {
    let caller = request.extensions().get::<Arc<Peer>>();
    let caller = caller.map(|peer| peer.caller);
    let arrival = now(request.metadata(), caller);
    request.extensions_mut().insert(arrival);
    Ok(request)
}

/// Parses `grpc-timeout`: one to eight digits and a unit. Anything else counts as absent.
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
    fn the_last_moment_is_between_the_deadline_and_the_servers_timer() {
        for timeout in [
            "0m",
            "1n",
            "7u",
            "1m",
            "8m",
            "12m",
            "13m",
            "2S",
            "99999999H",
        ] {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", timeout.parse().unwrap());
            let arrival = now(&metadata, None);
            let timer = arrival.at + parse_timeout(timeout).unwrap();
            let (deadline, last) = (arrival.deadline.unwrap(), last_moment(&arrival).unwrap());
            assert!(
                deadline <= last && last <= timer,
                "{timeout}: {deadline:?}, {last:?}, {timer:?}"
            );
            let apart = timer > arrival.at + Duration::from_micros(1);
            assert!(!apart || deadline < last && last < timer, "{timeout}");
        }
        assert_eq!(last_moment(&now(&MetadataMap::new(), None)), None);
    }

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
}
