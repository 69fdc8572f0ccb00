//! Accepts connections, bounded in number, and serves them with HTTP/1.1 until the daemon closes.
//!
//! A connection that sends no whole header within [`HEADER_WAIT_MAX`], also between requests, is
//! closed by hyper.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rocmforge_connections::{
    ACCEPT_LOG_EVERY, ACCEPT_RETRY, Peer, QuietStream, Table, caller_of, connections_max,
};
use rocmforge_service::arrival::Caller;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;
use tower::ServiceExt as _;

use super::call::Client;
use super::handshake::Handshakes;
use super::{Http, HttpListeners, path, router, sending};

/// Maximum time for the head of a request, from the connection or its last response.
const HEADER_WAIT_MAX: Duration = Duration::from_secs(60);
/// Maximum size of a request's head in bytes.
const HEADER_MAX_BYTES: usize = 32 << 10;
/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 100;

/// A listening socket.
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// An accepted connection: TCP, TLS or a Unix socket.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(listener) => listener.accept().await.map(|(s, _)| Stream::Unix(s)),
            Self::Tcp(listener) => listener.accept().await.map(|(s, _)| Stream::Tcp(s)),
        }
    }
}

/// Phase of the daemon's shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Requests are accepted.
    Serving,
    /// New work is rejected, and running requests may end.
    Draining,
    /// The last request has ended.
    Closing,
}

/// Decides when a listener and its connections close.
#[derive(Clone)]
struct Closing {
    phase: watch::Receiver<Phase>,
    at: Phase,
}

impl Closing {
    async fn begins(&mut self) {
        // A sender that is gone closes, too.
        let _ = self.phase.wait_for(|phase| *phase >= self.at).await;
    }
}

/// Serves the listeners until `phase` says to close, then until the last connection has ended.
/// Listeners that are kept for a successor close when the daemon drains: their connections end
/// after the current responses, and new clients wait for the successor.
///
/// # Errors
/// A listener cannot be used.
// Behind a pointer, so that the server is compiled here: a future that is known by its type is
// compiled where it is awaited.
#[inline(never)]
pub fn serve(
    http: Arc<Http>,
    listeners: HttpListeners,
    phase: watch::Receiver<Phase>,
) -> BoxFuture<'static, io::Result<()>> {
    Box::pin(serve_until(http, listeners, phase))
}

async fn serve_until(
    http: Arc<Http>,
    listeners: HttpListeners,
    phase: watch::Receiver<Phase>,
) -> io::Result<()> {
    let at = match listeners.kept {
        true => Phase::Draining,
        false => Phase::Closing,
    };
    let closing = Closing { phase, at };
    let table = Table::new(connections_max());
    let router = router(&http);
    let handshakes = Arc::new(Handshakes::default());
    let mut open = Vec::new();
    if let Some(unix) = listeners.unix {
        unix.set_nonblocking(true)?;
        open.push(Listener::Unix(UnixListener::from_std(unix)?));
    }
    for tcp in listeners.tcp {
        tcp.set_nonblocking(true)?;
        open.push(Listener::Tcp(TcpListener::from_std(tcp)?));
    }
    let mut loops = JoinSet::new();
    for listener in open {
        loops.spawn(accept(
            listener,
            router.clone(),
            Arc::clone(&table),
            (Arc::clone(&http), Arc::clone(&handshakes)),
            closing.clone(),
        ));
    }
    let engine = &http.service.engine;
    tokio::select! {
        () = async { while loops.join_next().await.is_some() {} } => {}
        () = http.replies.watch(|| engine.snapshot().others_wait()) => {}
        () = http.keep_alives.run(engine) => {}
    }
    Ok(())
}

async fn accept(
    listener: Listener,
    router: Router,
    table: Arc<Table>,
    (http, handshakes): (Arc<Http>, Arc<Handshakes>),
    mut closing: Closing,
) {
    let mut connections = JoinSet::new();
    let mut logged = None::<Instant>;
    loop {
        let accepted = tokio::select! {
            // In this order: who comes once the listener is closed is a successor's.
            biased;
            () = closing.begins() => break,
            // Ended connections are forgotten as they end.
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(stream) => {
                let handling = (Arc::clone(&http), router.clone());
                let closing = closing.clone();
                // Places are taken here: tasks do not begin in the order of their connections, and
                // the oldest connection makes room for the next.
                match stream {
                    Stream::Unix(stream) => {
                        let caller = caller_of(&stream);
                        let stream = match QuietStream::new(stream) {
                            Ok(stream) => stream,
                            Err(error) => {
                                tracing::debug!(%error, "cannot watch a connection");
                                continue;
                            }
                        };
                        let place = Peer::enter(caller, &table);
                        let served = serve_one(stream, Some(caller), place, handling, closing);
                        connections.spawn(served);
                    }
                    Stream::Tcp(stream) => {
                        // Tokens are small and wanted at once.
                        let _ = stream.set_nodelay(true);
                        let place = Peer::enter(Caller::unknown(), &table);
                        if let Some(config) = http.tls() {
                            let making = handshakes.enter().make(stream, config);
                            connections.spawn(serve_tls(making, place, handling, closing));
                        } else {
                            connections.spawn(serve_one(stream, None, place, handling, closing));
                        }
                    }
                }
            }
            Err(error) => {
                // Descriptors are short: whoever does nothing makes room.
                table.close_one();
                if logged.is_none_or(|at| at.elapsed() > ACCEPT_LOG_EVERY) {
                    logged = Some(Instant::now());
                    tracing::warn!(%error, "cannot accept an HTTP connection");
                }
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// A connection's entry, and the signal to close it.
type Place = (Arc<Peer>, oneshot::Receiver<()>);

/// The state and routes that handle a connection's requests.
type Handling = (Arc<Http>, Router);

/// Serves a connection after its TLS handshake.
async fn serve_tls(
    making: impl Future<Output = io::Result<TlsStream<TcpStream>>> + Send + 'static,
    (peer, mut closed): Place,
    handling: Handling,
    closing: Closing,
) {
    let made = tokio::select! {
        // Signing takes as long as hundreds of tokens do.
        made = handling.0.runtimes.handle(making) => made,
        // It makes room for another.
        Ok(()) = &mut closed => return,
    };
    match made {
        Ok(stream) => serve_one(stream, None, (peer, closed), handling, closing).await,
        Err(error) => tracing::debug!(%error, "no TLS handshake"),
    }
}

async fn serve_one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    caller: Option<Caller>,
    (peer, mut closed): Place,
    (http, router): Handling,
    mut closing: Closing,
) {
    let client = Client {
        caller,
        reserved: peer.is_reserved(),
    };
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(client);
        if let Some(regular) = path::regular(request.uri()) {
            *request.uri_mut() = regular;
        }
        let call = peer.call();
        let answer = http
            .runtimes
            .handle(router.clone().oneshot(request.map(Body::new)));
        let replies = Arc::clone(&http.replies);
        async move {
            let response = answer.await?;
            Ok::<_, Infallible>(sending::bounded(&replies, response, call))
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_WAIT_MAX)
        .max_buf_size(HEADER_MAX_BYTES)
        .max_headers(HEADERS_MAX);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let mut is_closing = false;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "an HTTP connection ended early");
                }
                return;
            }
            // It makes room for another.
            Ok(()) = &mut closed => return,
            () = closing.begins(), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
