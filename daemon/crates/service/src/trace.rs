//! Trace spans of requests for OpenTelemetry, with the trace that each belongs to.
//!
//! ```text
//! both skins -> Arrival (the caller's traceparent) -> RequestLog (ends with the request) -> Span
//!            -> whoever follows
//! ```
//!
//! *Invariants:* a span holds nothing of prompts, messages or answers (test
//! `a_collector_gets_a_span_of_each_request_with_its_parts`); sending never waits (`try_send`): if
//! the exporter is behind by [`WAITING_MAX`] spans, further ones are dropped and counted.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;

/// Maximum number of spans that wait for the exporter.
pub const WAITING_MAX: usize = 1024;

/// The client's span that a request is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    /// Id of the trace.
    pub trace: u128,
    /// Id of the client's span.
    pub span: u64,
    /// Whether the client records the trace.
    pub sampled: bool,
}

impl Parent {
    /// Parses a `traceparent` header (W3C Trace Context). An invalid one counts as absent.
    pub fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = hex(parts.next()?, 2)?;
        let (trace, span) = (hex(parts.next()?, 32)?, hex(parts.next()?, 16)?);
        let flags = hex(parts.next()?, 2)?;
        // Later versions may have more behind it, this one may not.
        let is_form = version != 0xff && (version != 0 || parts.next().is_none());
        (is_form && trace != 0 && span != 0).then_some(Self {
            trace,
            span: u64::try_from(span).ok()?,
            sampled: flags & 1 == 1,
        })
    }
}

/// Parses a string of exactly `digits` lower-case hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let fits = |b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(b);
    if text.len() != digits || !text.as_bytes().iter().all(fits) {
        return None;
    }
    u128::from_str_radix(text, 16).ok()
}

/// The value of a span's attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
}

/// A phase of a request, for a child span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// Name of the phase.
    pub name: &'static str,
    /// Time from the request's arrival to the phase's beginning.
    pub from: Duration,
    /// Time from the request's arrival to the phase's end.
    pub to: Duration,
}

/// The span of one request after its end.
#[derive(Debug, Clone)]
pub struct Span {
    /// Parent span, if the client sent one.
    pub parent: Option<Parent>,
    /// The HTTP route or the RPC.
    pub name: &'static str,
    /// Arrival of the request.
    pub start: SystemTime,
    /// Time from the request's arrival to its end.
    pub took: Duration,
    /// The request's phases, in their order.
    pub phases: Vec<Phase>,
    /// Attributes of the request, with OpenTelemetry's names where it has them.
    pub attributes: Vec<(&'static str, Value)>,
    /// The error code of the request; `None` if it succeeded.
    pub error: Option<&'static str>,
}

static FOLLOWER: OnceLock<mpsc::Sender<Span>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Starts to record spans, and returns their receiver. `None` if they are recorded already.
pub fn follow() -> Option<mpsc::Receiver<Span>> {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    FOLLOWER.set(sender).ok().map(|()| receiver)
}

/// Whether spans are recorded for requests with this `traceparent`: not if the caller's trace is
/// not recorded.
pub(crate) fn is_followed(parent: Option<Parent>) -> bool {
    FOLLOWER.get().is_some() && parent.is_none_or(|parent| parent.sampled)
}

/// Hands a span to the exporter.
pub(crate) fn end(span: Span) {
    if let Some(follower) = FOLLOWER.get()
        && follower.try_send(span).is_err()
    {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// How many spans were dropped since the last call.
pub fn take_dropped() -> u64 {
    DROPPED.swap(0, Ordering::Relaxed)
}

/// Wall clock time of the arrival of a request.
pub(crate) fn wall(arrived: Instant) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(arrived.elapsed()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_and_nothing_else() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let parent = Parent::read(text).unwrap();
        assert_eq!(parent.trace, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!((parent.span, parent.sampled), (0xb7ad_6b71_6920_3331, true));
        assert!(!Parent::read(&text.replace("-01", "-00")).unwrap().sampled);
        assert!(Parent::read(&format!("{}-later", text.replacen("00", "01", 1))).is_some());
        for odd in [
            "",
            "00",
            "00-0-0-0",
            &text.to_uppercase(),
            &text.replacen("00", "ff", 1),
            &format!("{text}-more"),
            &text.replace("b7ad6b7169203331", "0000000000000000"),
            &text.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &text.replace("b7ad", "b7 d"),
            &text.replace("b7ad", "b7é"),
        ] {
            assert_eq!(Parent::read(odd), None, "{odd}");
        }
    }
}
