//! Accepts connections, bounded in number and by user. [`Table`] decides which one is closed for
//! another.
//!
//! *Invariant:* a connection that does not begin to speak HTTP/2 within [`PREFACE_WAIT_MAX`] is
//! closed (test `sockets_that_never_send_a_byte_lock_nobody_out_and_are_closed`); after that the
//! server's own pings detect dead clients.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{Stream, stream};
use rocmforge_connections::{
    ACCEPT_LOG_EVERY, ACCEPT_RETRY, Peer, QuietStream, Table, caller_of, connections_max,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tonic::transport::server::Connected;

/// How long a client may take to send the first bytes of HTTP/2.
const PREFACE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Number of bytes of the HTTP/2 client preface.
const PREFACE_BYTES: usize = 24;

/// An accepted connection, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    stream: QuietStream,
    peer: Arc<Peer>,
    /// Signals that the connection has to be closed for another one; `None` once it has.
    closed: Option<oneshot::Receiver<()>>,
    /// Number of bytes of the preface that are missing, and the time limit for them.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
}

/// A stream of a listener's connections. A failure to accept is logged and retried. Once `left` is
/// done no connection is accepted any more: a successor gets them.
pub(super) fn accept(
    listener: UnixListener,
    left: BoxFuture<'static, ()>,
) -> impl Stream<Item = io::Result<Connection>> {
    let table = Table::new(connections_max());
    let state = (listener, table, None::<Instant>, left);
    stream::unfold(
        state,
        |(listener, table, mut logged, mut left)| async move {
            loop {
                let accepted = tokio::select! {
                    // First: who comes once it is done is another's.
                    biased;
                    () = &mut left => std::future::pending().await,
                    accepted = listener.accept() => accepted,
                };
                match accepted {
                    Ok((stream, _)) => match Connection::new(stream, &table) {
                        Ok(connection) => {
                            return Some((Ok(connection), (listener, table, logged, left)));
                        }
                        Err(error) => tracing::debug!(%error, "cannot watch a connection"),
                    },
                    Err(error) => {
                        // Descriptors are short: whoever does nothing makes room.
                        table.close_one();
                        if logged.is_none_or(|at| at.elapsed() > ACCEPT_LOG_EVERY) {
                            logged = Some(Instant::now());
                            tracing::warn!(%error, "cannot accept a connection");
                        }
                        tokio::time::sleep(ACCEPT_RETRY).await;
                    }
                }
            }
        },
    )
}

impl Connection {
    fn new(stream: UnixStream, table: &Arc<Table>) -> io::Result<Self> {
        let caller = caller_of(&stream);
        let stream = QuietStream::new(stream)?;
        let (peer, closed) = Peer::enter(caller, table);
        if peer.is_reserved() {
            tracing::debug!(
                uid = caller.uid,
                pid = caller.pid,
                "all connections are busy; one more for health and status"
            );
        }
        Ok(Self {
            stream,
            peer,
            closed: Some(closed),
            preface: Some((
                PREFACE_BYTES,
                Box::pin(tokio::time::sleep(PREFACE_WAIT_MAX)),
            )),
        })
    }

    /// Whether the connection has to end: it is closed for another one, or its client sends no
    /// preface.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        let stays = self
            .closed
            .as_mut()
            .is_some_and(|closed| Pin::new(closed).poll(cx).is_pending());
        if !stays {
            self.closed = None;
            return Some(io::ErrorKind::ConnectionAborted.into());
        }
        let (_, until) = self.preface.as_mut()?;
        let late = until.as_mut().poll(cx).is_ready();
        late.then(|| io::ErrorKind::TimedOut.into())
    }
}

impl Connected for Connection {
    type ConnectInfo = Arc<Peer>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.peer)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.poll_ended(cx) {
            return Poll::Ready(Err(error));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        let n = buf.filled().len() - before;
        if let Some((left, _)) = &mut self.preface {
            *left = left.saturating_sub(n);
            if *left == 0 {
                self.preface = None;
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
