//! Bodies of requests: bounded in bytes, in time, in the sum over all that are being read, and in
//! what they become once decoded.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::extract::Request;
use http_body::Body as _;
use rocmforge_service::arrival::Caller;
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::{BODY_WAIT_MAX, REQUEST_MAX_BYTES};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::call::Call;
use super::fault;

/// When to try again where bytes are short.
const RETRY: Duration = Duration::from_secs(1);
/// Most values of a body: two bytes of it can be a value, which takes dozens once decoded.
const VALUES_MAX: usize = 1 << 18;
/// Bodies up to this are decoded where they arrive, larger ones on a blocking thread.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// The body of `request` as `T`.
pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
    call: &Call,
    request: Request,
) -> Result<T, Failure> {
    let uid = call.arrival.caller.map_or(Caller::NOBODY, |c| c.uid);
    let mut held = call.service.reading.hold(uid);
    let mut body = request.into_body();
    let until = Instant::now() + BODY_WAIT_MAX;
    let mut bytes = Vec::new();
    loop {
        let next = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let frame = match tokio::time::timeout_at(until, next).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => {
                return Err(failure::invalid(
                    "body",
                    &format!("it broke off: {error}; send it again"),
                ));
            }
            Ok(None) => break,
            Err(_) => return Err(failure::body_late(BODY_WAIT_MAX)),
        };
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > REQUEST_MAX_BYTES {
            return Err(failure::body_too_large(REQUEST_MAX_BYTES));
        }
        if !held.grow(data.len() as u64) {
            return Err(failure::exhausted(
                "too many bytes of requests arrive at once; try again in a second",
                RETRY,
            ));
        }
        bytes.extend_from_slice(&data);
    }
    if bytes.len() <= INLINE_MAX_BYTES {
        return decode(&bytes);
    }
    let size = bytes.len();
    call.service.text.run(size, move |_| decode(&bytes)).await
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    if values(bytes) > VALUES_MAX {
        return Err(failure::invalid(
            "body",
            &format!("more than {VALUES_MAX} values; send less at once"),
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| {
        let (field, message) = fault::of::<T>(bytes, &error);
        failure::invalid(&field, &message)
    })
}

/// How many values the text of a JSON document can have, at most.
fn values(bytes: &[u8]) -> usize {
    let (mut n, mut in_string, mut escaped) = (1, false, false);
    for &byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => n += 1,
            _ => {}
        }
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        assert_eq!(values(br#"{"a":"[,{\",","b":[1,2]}"#), 5);
        assert_eq!(values(b"7"), 1);
    }

    #[test]
    fn bodies_that_would_take_many_times_their_bytes_are_refused() {
        let bomb = format!("[{}]", "[],".repeat(VALUES_MAX));
        let refused = decode::<serde_json::Value>(bomb.as_bytes()).unwrap_err();
        assert!(refused.message().contains("values"), "{refused:?}");
        let deep = "[".repeat(1000);
        assert!(decode::<serde_json::Value>(deep.as_bytes()).is_err());
    }
}
