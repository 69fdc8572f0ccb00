//! Accepted connections, bounded in number and by user. Which of them makes room
//! for another says [`table`].
//!
//! *Invariant:* a connection that does not begin to speak HTTP/2 within [`PREFACE_WAIT_MAX`] is
//! closed (test `sockets_that_never_send_a_byte_lock_nobody_out_and_are_closed`); after that the
//! server's own pings find out whether somebody is there.

mod quiet;
mod table;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::{Stream, stream};
use nix::sys::resource::{Resource, getrlimit};
use rocmforge_service::arrival::Caller;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tonic::transport::server::Connected;

pub(crate) use quiet::QuietStream;
pub(crate) use table::Table;
use table::Ticket;

/// Most ordinary connections of gRPC, and as many of HTTP, where the process may open four times as
/// many files.
pub const CONNECTIONS_MAX: usize = 2048;
/// How long a client may take to send the first bytes of HTTP/2.
const PREFACE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Bytes that a client sends first: `PRI * HTTP/2.0`, and what belongs to it.
const PREFACE_BYTES: usize = 24;
/// How long to wait after accepting failed, for want of descriptors or memory.
pub(crate) const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How often such a failure is logged.
pub(crate) const ACCEPT_LOG_EVERY: Duration = Duration::from_secs(10);

/// The process at the other end of a Unix socket.
pub(crate) fn caller_of(stream: &UnixStream) -> Caller {
    match stream.peer_cred() {
        Ok(peer) => Caller {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid().unwrap_or(0),
        },
        Err(_) => Caller::unknown(),
    }
}

/// What the services know of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Who is there.
    pub(crate) caller: Caller,
    ticket: Ticket,
}

impl Peer {
    /// A connection of `caller` that is counted in `table`, and the word to close it.
    pub(crate) fn enter(caller: Caller, table: &Arc<Table>) -> (Arc<Self>, oneshot::Receiver<()>) {
        let (ticket, closed) = table.enter(caller);
        (Arc::new(Self { caller, ticket }), closed)
    }

    /// Whether only health and status are answered, as all ordinary places are taken.
    pub(crate) fn is_reserved(&self) -> bool {
        self.ticket.reserved
    }

    /// Closes the connection; whether that was still to be done.
    pub(crate) fn close(&self) -> bool {
        self.ticket.close()
    }

    /// A call of this connection, until it is dropped.
    pub(crate) fn call(self: &Arc<Self>) -> Call {
        self.ticket.begin();
        Call(Arc::clone(self))
    }
}

/// A call that is under way.
#[derive(Debug)]
pub(crate) struct Call(Arc<Peer>);

impl Call {
    /// Whose it is.
    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.0
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.ticket.end();
    }
}

/// An accepted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: QuietStream,
    peer: Arc<Peer>,
    /// Says when to make room for another; `None` once it has.
    closed: Option<oneshot::Receiver<()>>,
    /// Bytes of the preface that are still to come, and until when.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
}

/// Ordinary connections that the limit of open files allows.
pub(crate) fn connections_max() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(files / 4)
        .unwrap_or(CONNECTIONS_MAX)
        .clamp(1, CONNECTIONS_MAX)
}

/// The connections of a listener, without end. A failure to accept is logged and tried again. Once
/// `left` is done nobody is accepted any more, not even who has connected already: a successor
/// gets those.
pub(crate) fn accept(
    listener: UnixListener,
    left: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = io::Result<Connection>> {
    let table = Table::new(connections_max());
    let left: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(left);
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

    /// Whether the connection has to end: it makes room for another, or its
    /// client does not begin to speak.
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
