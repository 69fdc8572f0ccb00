//! Spans of requests, sent to a collector: OTLP over HTTP, in JSON.
//!
//! One task takes the spans that [`rocmforge_service::trace`] hands out and sends them in
//! batches. What the collector does not take is lost; the log says so once, and how much it was
//! when it takes some again.
//!
//! *Invariants:* nothing waits for the collector but the end of the daemon, for [`LAST_WAIT_MAX`]
//! (test `a_collector_that_never_answers_hurts_nobody`); there is one connection to it and one
//! look-up of its name at a time, whatever it does (one task sends).

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::time::{Duration, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use rocmforge_service::trace::{self, Span, Value};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

/// Spans of a batch.
const BATCH_MAX: usize = 256;
/// How long a span waits for others.
const BATCH_WAIT: Duration = Duration::from_millis(500);
/// How long the collector may take for a batch.
const SEND_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long the last batch may hold up the end.
pub const LAST_WAIT_MAX: Duration = Duration::from_secs(2);
/// Blocking threads that look-ups of the collector's name need at most.
pub(crate) const LOOKUPS_AT_ONCE: usize = 1;
/// Where collectors take traces.
const USUAL_PATH: &str = "/v1/traces";

/// What OTLP calls the kind of a span that answers a caller, and of a part of one.
const SERVER: u8 = 2;
const INTERNAL: u8 = 1;
const STATUS_ERROR: u8 = 2;

/// A collector's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    host: String,
    port: u16,
    path: String,
}

impl Collector {
    /// Reads `http://HOST:PORT`, with a path if it is not the usual one.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "'{text}' is no address of a collector: http://HOST:PORT (OTLP over HTTP, without TLS)"
            )
        };
        let uri: Uri = text.parse().map_err(|_| refuse())?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http"));
        let authority = authority.filter(|a| !a.as_str().contains('@') && uri.query().is_none());
        let (host, port) = authority
            .and_then(|a| Some((a.host(), a.port_u16()?)))
            .filter(|(host, port)| !host.is_empty() && *port != 0)
            .ok_or_else(refuse)?;
        let path = match uri.path() {
            "" | "/" => USUAL_PATH,
            path => path,
        };
        Ok(Self {
            host: host.to_owned(),
            port,
            path: path.to_owned(),
        })
    }

    /// The host as a resolver takes it: without the brackets of an IPv6 address.
    fn name(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// The way to a collector.
#[derive(Debug)]
struct Sender {
    collector: Collector,
    /// A look-up of its name that goes on. The system's resolver cannot be stopped, so the next
    /// batch waits for the same one.
    lookup: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
}

impl Sender {
    async fn addresses(&mut self) -> io::Result<Vec<SocketAddr>> {
        let port = self.collector.port;
        if let Ok(ip) = self.collector.name().parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let lookup = self.lookup.get_or_insert_with(|| {
            let name = self.collector.name().to_owned();
            tokio::task::spawn_blocking(move || Ok((name, port).to_socket_addrs()?.collect()))
        });
        let found = lookup.await;
        self.lookup = None;
        found.map_err(io::Error::other)?
    }

    /// Sends a batch. Dropping the future ends the connection.
    async fn send(&mut self, body: String) -> Result<(), String> {
        let told = |error: &dyn fmt::Display| error.to_string();
        let addresses = self.addresses().await.map_err(|error| told(&error))?;
        let stream = TcpStream::connect(&*addresses).await;
        let stream = TokioIo::new(stream.map_err(|error| told(&error))?);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream)
            .await
            .map_err(|error| told(&error))?;
        let Collector { host, port, path } = &self.collector;
        let request = Request::post(path.as_str())
            .header(header::HOST, format!("{host}:{port}"))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Body::from(body))
            .map_err(|error| told(&error))?;
        // Its own failure is the answer's, too. It is ended with this future.
        let mut connections = JoinSet::new();
        connections.spawn(connection);
        let answer = sender.send_request(request).await;
        // What else it says is not listened to.
        match answer.map_err(|error| told(&error))?.status() {
            StatusCode::OK => Ok(()),
            status => Err(format!("it answers {status}")),
        }
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, path } = self;
        write!(f, "http://{host}:{port}{path}")
    }
}

/// The task that sends; see [`Exporter::finish`].
#[derive(Debug)]
pub struct Exporter {
    last: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Exporter {
    /// Begins to record requests and to send them. `None` where that was done before. Called inside
    /// of the async runtime.
    pub fn start(collector: Collector) -> Option<Self> {
        let spans = trace::follow()?;
        let (last, ending) = oneshot::channel();
        let task = tokio::spawn(export(collector, spans, ending));
        Some(Self { last, task })
    }

    /// Sends the last batch, and ends.
    pub async fn finish(self) {
        // A task that has ended has nothing more to send.
        let _ = self.last.send(());
        let _ = tokio::time::timeout(LAST_WAIT_MAX, self.task).await;
    }
}

async fn export(
    collector: Collector,
    mut spans: mpsc::Receiver<Span>,
    mut ending: oneshot::Receiver<()>,
) {
    let mut sender = Sender {
        collector,
        lookup: None,
    };
    let mut batch = Vec::new();
    // Spans that were not taken since some last were.
    let mut lost = 0;
    let (mut is_last, mut fails) = (false, false);
    while !is_last {
        tokio::select! {
            n = spans.recv_many(&mut batch, BATCH_MAX) => if n == 0 { return },
            _ = &mut ending => is_last = true,
        }
        if !is_last && batch.len() < BATCH_MAX {
            // Whatever comes meanwhile goes along.
            is_last = tokio::time::timeout(BATCH_WAIT, &mut ending).await.is_ok();
        }
        while batch.len() < BATCH_MAX
            && let Ok(span) = spans.try_recv()
        {
            batch.push(span);
        }
        if batch.is_empty() {
            continue;
        }
        let sending = sender.send(written(&batch));
        let sent = tokio::time::timeout(SEND_WAIT_MAX, sending).await;
        let sent = sent.unwrap_or_else(|_| Err("it takes too long".to_owned()));
        let collector = &sender.collector;
        lost += trace::take_dropped();
        match &sent {
            Ok(()) => {
                if fails || lost > 0 {
                    tracing::info!(%collector, lost, "traces are taken again");
                }
                lost = 0;
            }
            Err(error) => {
                lost += batch.len() as u64;
                if !fails {
                    tracing::warn!(%collector, error, lost, "traces are not taken");
                }
            }
        }
        fails = sent.is_err();
        batch.clear();
    }
}

/// A batch in OTLP's JSON: identifiers in hexadecimal, times in nanoseconds as text.
fn written(batch: &[Span]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let spans: Vec<_> = batch.iter().flat_map(spans).collect();
    let resource = [
        attribute("service.name", &Value::Text("rocmforged".to_owned())),
        attribute("service.version", &Value::Text(version.to_owned())),
        attribute("process.pid", &Value::Number(std::process::id().into())),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{"scope": {"name": "rocmforged", "version": version}, "spans": spans}],
    }]})
    .to_string()
}

fn attribute(key: &str, value: &Value) -> serde_json::Value {
    let value = match value {
        Value::Text(text) => json!({"stringValue": text}),
        Value::Number(n) => json!({"intValue": n.to_string()}),
    };
    json!({"key": key, "value": value})
}

/// A request's span, and those of its parts.
fn spans(span: &Span) -> Vec<serde_json::Value> {
    let trace = span.parent.map_or_else(fresh_trace, |parent| parent.trace);
    let trace = format!("{trace:032x}");
    let id = fresh_span();
    let at = |offset: Duration| {
        let since = span.start.duration_since(UNIX_EPOCH).unwrap_or_default();
        (since + offset).as_nanos().to_string()
    };
    let attributes = span.attributes.iter();
    let mut whole = json!({
        "traceId": trace,
        "spanId": id,
        "name": span.name,
        "kind": SERVER,
        "startTimeUnixNano": at(Duration::ZERO),
        "endTimeUnixNano": at(span.took),
        "attributes": attributes.map(|(key, value)| attribute(key, value)).collect::<Vec<_>>(),
    });
    if let Some(parent) = span.parent {
        whole["parentSpanId"] = format!("{:016x}", parent.span).into();
    }
    if let Some(error) = span.error {
        whole["status"] = json!({"code": STATUS_ERROR, "message": error});
    }
    let parts = span.phases.iter().map(|phase| {
        json!({
            "traceId": trace,
            "spanId": fresh_span(),
            "parentSpanId": id,
            "name": phase.name,
            "kind": INTERNAL,
            "startTimeUnixNano": at(phase.from),
            "endTimeUnixNano": at(phase.to),
        })
    });
    let parts: Vec<_> = parts.collect();
    std::iter::once(whole).chain(parts).collect()
}

/// Zero stands for none.
fn fresh_trace() -> u128 {
    rand::random::<u128>().max(1)
}

fn fresh_span() -> String {
    format!("{:016x}", rand::random::<u64>().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_an_address_without_tls() {
        let collector = Collector::parse("http://127.0.0.1:4318").unwrap();
        assert_eq!(collector.to_string(), "http://127.0.0.1:4318/v1/traces");
        let other = Collector::parse("http://[::1]:80/otlp/v1/traces").unwrap();
        assert_eq!(other.to_string(), "http://[::1]:80/otlp/v1/traces");
        for odd in [
            "",
            "127.0.0.1:4318",
            "http://127.0.0.1",
            "https://localhost:4318",
            "http://user@localhost:4318",
            "http://localhost:99999",
            "http://localhost:0",
            "http://:4318",
            "http://localhost:4318/v1/traces?key=1",
            "/v1/traces",
        ] {
            assert!(Collector::parse(odd).is_err(), "{odd}");
        }
    }
}
