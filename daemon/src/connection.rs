//! Accepted connections, bounded in number. Those above the bound wait in the socket's queue until one closes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::Connected;

/// Connections that are open at once. Each takes a file descriptor, of which a process has 1024 where nobody raised it.
pub const CONNECTIONS_MAX: usize = 512;
/// How long to wait after accepting failed, for want of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// An accepted connection, and its place among [`CONNECTIONS_MAX`].
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

/// The connections of a listener, without end. A failure to accept is logged and tried again.
pub(crate) fn accept(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    stream::unfold((listener, places), |(listener, places)| async move {
        let place = Arc::clone(&places).acquire_owned().await.ok()?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    return Some((
                        Ok(Connection {
                            stream,
                            _place: place,
                        }),
                        (listener, places),
                    ));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    })
}

impl Connected for Connection {
    /// The client's process and user, where the kernel tells them.
    type ConnectInfo = Option<UCred>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.peer_cred().ok()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
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
