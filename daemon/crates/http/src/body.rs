//! Reads bodies of requests, limited in bytes, in time, in the sum over all bodies, and in decoded
//! size.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::sum::Held;
use rocmforge_service::{BODY_WAIT_MAX, REQUEST_MAX_BYTES};

use crate::refusals;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use http_body::Body as _;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::call::Call;
use super::fault;
use super::packed::{self, Coding};

/// Number of bytes of a body for which it may take one second longer than [`BODY_WAIT_MAX`]: what a
/// slow connection transfers in that time.
const BYTES_A_SECOND_MIN: u64 = 64 << 10;
/// Maximum time in which the body of a rejected request is read and discarded.
const DISCARD_MAX: Duration = Duration::from_secs(2);
/// Maximum number of values of a body: two bytes of it can be a value, which takes dozens once
/// decoded.
const VALUES_MAX: usize = 1 << 18;
/// UTF-8 byte order mark.
const BOM: &[u8] = b"\xef\xbb\xbf";
/// Maximum number of bodies of rejected requests that are discarded at a time.
const DISCARDS_MAX: usize = 32;
static DISCARDS: Semaphore = Semaphore::const_new(DISCARDS_MAX);

/// Maximum size of a body that is decoded on the async thread; larger ones are decoded on a
/// blocking thread.
const INLINE_MAX_BYTES: usize = 64 << 10;

/// Reads and decodes the body of `request`, of at most `max` bytes, as `T`.
pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
    call: &Call,
    request: Request,
    max: usize,
) -> Result<T, Failure> {
    let Whole {
        coding,
        bytes,
        mut held,
    } = whole(call, request, max).await?;
    let is_plain = coding == Coding::Plain;
    if is_plain && bytes.len() <= INLINE_MAX_BYTES {
        return decode(&bytes);
    }
    // What is packed is counted as it may become.
    let size = if is_plain { bytes.len() } else { max };
    let text = &call.service.text;
    let work = text.run(call.arrival.peer(), size, move |_| {
        if is_plain {
            return decode(&bytes);
        }
        decode(&coding.unpack(&bytes, max, &mut held)?)
    });
    work.await
}

/// A body that was read completely.
struct Whole {
    coding: Coding,
    /// Bytes of the body as received.
    bytes: Vec<u8>,
    held: Held,
}

/// Reads the whole body of `request`.
async fn whole(call: &Call, mut request: Request, max: usize) -> Result<Whole, Failure> {
    let encoding = encoding_of(request.headers());
    let Some(coding) = Coding::of(&encoding) else {
        let encoding = String::from_utf8_lossy(&encoding);
        let failure = refusals::content_encoding(&encoding, packed::ACCEPTED);
        discard(&mut request).await;
        return Err(failure);
    };
    let mut held = call.service.reading.hold(call.uid());
    let mut body = request.into_body();
    let begun = Instant::now();
    let mut bytes = Vec::new();
    let mut last = begun;
    loop {
        // What came fast gives no right to be silent: others wait for the room that it holds.
        let silent = last + BODY_WAIT_MAX;
        let until = silent.min(begun + time_for(bytes.len()));
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
            Err(_) => return Err(failure::body_late(until - begun)),
        };
        last = Instant::now();
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > max {
            drop((bytes, held));
            take_rest(&mut body).await;
            return Err(failure::body_too_large(max));
        }
        if !held.grow(data.len() as u64) {
            drop((bytes, held));
            take_rest(&mut body).await;
            return Err(packed::too_many_at_once());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Whole {
        coding,
        bytes,
        held,
    })
}

/// The values of `Content-Encoding`, in order.
fn encoding_of(headers: &HeaderMap) -> Vec<u8> {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let values: Vec<_> = values.map(HeaderValue::as_bytes).collect();
    values.join(&b',')
}

/// Reads and discards the body of a rejected request: if the connection was closed while more of it
/// arrives, it would be reset, and many clients would never see the response.
pub(super) async fn discard(request: &mut Request) {
    // Who asks first sends nothing before he is told to.
    if request.headers().contains_key(header::EXPECT) {
        return;
    }
    take_rest(request.body_mut()).await;
}

/// As [`discard`], for the rest of a body that was read in part.
async fn take_rest(body: &mut Body) {
    // Its connection has a place as long as this takes, for a request that has none: few at a time.
    let Ok(_place) = DISCARDS.try_acquire() else {
        return;
    };
    let all = async {
        let mut left = REQUEST_MAX_BYTES;
        while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            let bytes = frame.into_data().map_or(0, |data| data.len());
            left = match left.checked_sub(bytes) {
                Some(left) => left,
                None => return,
            };
        }
    };
    // What takes longer is cut off.
    let _ = tokio::time::timeout(DISCARD_MAX, all).await;
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    // Clients of .NET and PowerShell put it in front.
    let bytes = bytes.strip_prefix(BOM).unwrap_or(bytes);
    if values(bytes) > VALUES_MAX {
        return Err(failure::invalid(
            "body",
            &format!("more than {VALUES_MAX} values; send less at once"),
        ));
    }
    let error = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    // Clients that cut texts leave halves of characters.
    if error.classify() == Category::Syntax
        && let Some(mended) = without_halves(bytes)
        && let Ok(value) = serde_json::from_slice(&mended)
    {
        return Ok(value);
    }
    let (field, message) = fault::of::<T>(bytes, &error);
    Err(failure::invalid(&field, &message))
}

/// Time limit for a body of which `bytes` have been received.
fn time_for(bytes: usize) -> Duration {
    BODY_WAIT_MAX + Duration::from_secs(bytes as u64 / BYTES_A_SECOND_MIN)
}

/// JSON with each unpaired surrogate escape replaced by U+FFFD, as Go's and Python's parsers do;
/// `None` if there is none.
fn without_halves(json: &[u8]) -> Option<Vec<u8>> {
    let escape = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut mended = None::<Vec<u8>>;
    let mut at = 0;
    while let Some(found) = json[at..].iter().position(|&byte| byte == b'\\') {
        at += found;
        at += match escape(at) {
            Some(0xd800..=0xdbff) if matches!(escape(at + 6), Some(0xdc00..=0xdfff)) => 12,
            Some(0xd800..=0xdfff) => {
                let mended = mended.get_or_insert_with(|| json.to_vec());
                mended[at..at + 6].copy_from_slice(b"\\ufffd");
                6
            }
            _ => 2,
        };
        if at >= json.len() {
            break;
        }
    }
    mended
}

/// Upper bound on the number of values in a JSON text.
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
    use rocmforge_service::REQUEST_MAX_BYTES;

    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        assert_eq!(values(br#"{"a":"[,{\",","b":[1,2]}"#), 5);
        assert_eq!(values(b"7"), 1);
    }

    #[test]
    fn halves_of_characters_are_replaced_and_whole_ones_stay() {
        let read = |text: &str| decode::<String>(format!("\"{text}\"").as_bytes());
        for (text, expected) in [
            (r"a\ud83d", "a\u{fffd}"),
            (r"\ud83d\ude00\ude00", "\u{1f600}\u{fffd}"),
            (r"\ud83dx\uD83D\n", "\u{fffd}x\u{fffd}\n"),
            (r"\\ud83d \ud83d", "\\ud83d \u{fffd}"),
        ] {
            assert_eq!(read(text).unwrap(), expected, "{text}");
        }
        for bad in [r"\ud8", r"\ud83d\", r"\ux"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_left_out() {
        let read = |bytes: &[u8]| decode::<String>(bytes);
        assert_eq!(read(b"\xef\xbb\xbf\"a\"").unwrap(), "a");
        assert!(read(b"\xef\xbb\"a\"").is_err());
    }

    #[test]
    fn a_body_has_time_for_what_has_come() {
        assert_eq!(time_for(0), BODY_WAIT_MAX);
        // As long as it is not silent: 5 MB over 2 Mbit/s, and still minutes for the largest.
        assert!(time_for(5_000_000) > Duration::from_secs(5_000_000 * 8 / 2_000_000));
        assert!(time_for(REQUEST_MAX_BYTES) < Duration::from_secs(300));
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
