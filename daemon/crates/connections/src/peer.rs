//! Who is at the other end of a connection, and how many connections there may be.

use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use rocmforge_service::arrival::Caller;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use crate::table::{Table, Ticket};

/// Maximum number of ordinary connections of gRPC, and as many of HTTP, where the process may open
/// four times as many files.
pub const CONNECTIONS_MAX: usize = 2048;
/// How long to wait after accepting failed, for want of descriptors or memory.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Shortest interval between two log lines about failures to accept connections.
pub const ACCEPT_LOG_EVERY: Duration = Duration::from_secs(10);

/// The process at the other end of a Unix socket.
pub fn caller_of(stream: &UnixStream) -> Caller {
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
pub struct Peer {
    /// Who is there.
    pub caller: Caller,
    ticket: Ticket,
}

impl Peer {
    /// Counts a connection of `caller` in `table`. Also returns the receiver that resolves when the
    /// connection has to close.
    pub fn enter(caller: Caller, table: &Arc<Table>) -> (Arc<Self>, oneshot::Receiver<()>) {
        let (ticket, closed) = table.enter(caller);
        (Arc::new(Self { caller, ticket }), closed)
    }

    /// Whether only health and status are answered, as all ordinary places are taken.
    pub fn is_reserved(&self) -> bool {
        self.ticket.reserved
    }

    /// Closes the connection. Returns whether it was open.
    pub fn close(&self) -> bool {
        self.ticket.close()
    }

    /// A call of this connection, until it is dropped.
    pub fn call(self: &Arc<Self>) -> Call {
        self.ticket.begin();
        Call(Arc::clone(self))
    }
}

/// A call that is under way.
#[derive(Debug)]
pub struct Call(Arc<Peer>);

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

/// Ordinary connections that the limit of open files allows.
pub fn connections_max() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(files / 4)
        .unwrap_or(CONNECTIONS_MAX)
        .clamp(1, CONNECTIONS_MAX)
}
