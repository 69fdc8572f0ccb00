//! The listening sockets that the service manager holds for the daemon: those of its socket units,
//! and those of HTTP that an earlier daemon of the same service gave it to keep (`FDSTORE=1`).
//!
//! Sockets that the manager holds outlive the process. A draining daemon stops accepting on them,
//! and clients that connect wait in the socket for its successor, which gets the same one.
//!
//! Sockets are identified by their addresses: those of `http_listen` and `http_socket` are HTTP's,
//! and of the others at most one Unix socket is there, which is that of gRPC.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use listenfd::ListenFd;
use sd_notify::NotifyState;

use crate::socket::SocketError;

/// The name of HTTP's listening sockets in the manager's store.
const STORED: &str = "rocmforged-http";
/// Environment variable that says that the manager has a store for the service. systemd sets it
/// from version 254 on, our unit always.
const STORE: &str = "FDSTORE";
/// Maximum number of waiting connections that are closed at a time.
const REFUSED_MAX: usize = 4096;

/// A socket, and its name in the service manager.
#[derive(Debug)]
struct Named<S> {
    socket: S,
    /// Whether an earlier daemon gave the socket to the manager's store.
    is_stored: bool,
}

impl<S> Named<S> {
    fn again(&self, clone: impl FnOnce(&S) -> io::Result<S>) -> io::Result<Self> {
        Ok(Self {
            socket: clone(&self.socket)?,
            is_stored: self.is_stored,
        })
    }
}

/// The sockets that the service manager passed and that are not in use yet.
#[derive(Debug, Default)]
pub struct Passed {
    unix: Vec<Named<UnixListener>>,
    tcp: Vec<Named<TcpListener>>,
    /// Error about a passed descriptor that is not a supported listening socket.
    unknown: Option<io::Error>,
}

impl Passed {
    /// The sockets passed to this process according to the environment. Only the first call gets
    /// them.
    pub fn from_env() -> Self {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let names: Vec<&str> = names.split(':').collect();
        let mut fds = ListenFd::from_env();
        let mut passed = Self::default();
        for index in 0..fds.len() {
            let is_stored = names.get(index) == Some(&STORED);
            if let Ok(Some(socket)) = fds.take_tcp_listener(index) {
                passed.tcp.push(Named { socket, is_stored });
                continue;
            }
            match fds.take_unix_listener(index) {
                Ok(Some(socket)) => passed.unix.push(Named { socket, is_stored }),
                Ok(None) => {}
                Err(error) => passed.unknown = Some(error),
            }
        }
        passed
    }

    /// Whether there are no passed sockets left.
    pub fn is_empty(&self) -> bool {
        self.unix.is_empty() && self.tcp.is_empty()
    }

    /// Takes the socket that listens on a TCP address, if it was passed.
    pub fn take_tcp(&mut self, address: SocketAddr) -> Option<TcpListener> {
        let listens = |tcp: &Named<TcpListener>| {
            let own = tcp.socket.local_addr();
            own.is_ok_and(|own| own == address)
        };
        let at = self.tcp.iter().position(listens)?;
        Some(self.tcp.remove(at).socket)
    }

    /// Takes the socket that listens at a path, if it was passed.
    pub fn take_unix(&mut self, path: &Path) -> Option<UnixListener> {
        let path = std::path::absolute(path).ok()?;
        let listens = |unix: &Named<UnixListener>| {
            let own = unix.socket.local_addr();
            own.is_ok_and(|own| own.as_pathname() == Some(&path))
        };
        let at = self.unix.iter().position(listens)?;
        Some(self.unix.remove(at).socket)
    }

    /// Takes the socket of gRPC, after HTTP's were taken.
    ///
    /// # Errors
    /// [`SocketError::Activation`] if other sockets are left.
    pub fn take_grpc(&mut self) -> Result<Option<UnixListener>, SocketError> {
        let refused = |message: String| Err(SocketError::Activation { message });
        if let Some(error) = &self.unknown {
            return refused(error.to_string());
        }
        // Those of HTTP that were stored under settings that have changed since are let go.
        self.tcp.retain(|tcp| !tcp.is_stored);
        self.unix.retain(|unix| !unix.is_stored);
        if let Some(tcp) = self.tcp.first() {
            let address = tcp
                .socket
                .local_addr()
                .map(|a| a.to_string())
                .unwrap_or_default();
            return refused(format!(
                "a socket that listens on {address} was passed, and http_listen does not name it"
            ));
        }
        match self.unix.len() {
            0 | 1 => Ok(self.unix.pop().map(|unix| unix.socket)),
            n => refused(format!(
                "{n} sockets were passed that http_socket does not name"
            )),
        }
    }

    /// Closes all connections that wait to be accepted, if no daemon will accept them: the manager
    /// would start one for them again and again. Returns their number.
    pub fn refuse_waiting(&self) -> usize {
        let mut refused = 0;
        for Named { socket, .. } in &self.unix {
            if socket.set_nonblocking(true).is_ok() {
                refused += (0..REFUSED_MAX).map_while(|_| socket.accept().ok()).count();
            }
        }
        for Named { socket, .. } in &self.tcp {
            if socket.set_nonblocking(true).is_ok() {
                refused += (0..REFUSED_MAX).map_while(|_| socket.accept().ok()).count();
            }
        }
        refused
    }

    /// Duplicates of all passed sockets.
    pub fn try_clone(&self) -> io::Result<Self> {
        let unix = self.unix.iter().map(|of| of.again(UnixListener::try_clone));
        let tcp = self.tcp.iter().map(|of| of.again(TcpListener::try_clone));
        Ok(Self {
            unix: unix.collect::<io::Result<_>>()?,
            tcp: tcp.collect::<io::Result<_>>()?,
            unknown: None,
        })
    }
}

/// Whether the service manager keeps sockets for this service.
fn stores() -> bool {
    let told = std::env::var(STORE).ok();
    let most = told.and_then(|most| most.parse::<u32>().ok());
    most.is_some_and(|most| most > 0) && std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Gives HTTP's listening sockets to the service manager's store, replacing earlier ones. Returns
/// whether it takes them.
pub fn store(tcp: &[TcpListener], unix: Option<&UnixListener>) -> bool {
    if !stores() {
        return false;
    }
    let sockets: Vec<BorrowedFd<'_>> = tcp
        .iter()
        .map(AsFd::as_fd)
        .chain(unix.map(AsFd::as_fd))
        .collect();
    let name = NotifyState::FdName(STORED);
    let forgotten = sd_notify::notify(&[NotifyState::FdStoreRemove, name]);
    if sockets.is_empty() {
        return false;
    }
    let name = NotifyState::FdName(STORED);
    let stored = sd_notify::notify_with_fds(&[NotifyState::FdStore, name], &sockets);
    match forgotten.and(stored) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(%error, "the service manager does not keep HTTP's sockets across a restart");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn own<S>(socket: S) -> Named<S> {
        Named {
            socket,
            is_stored: false,
        }
    }

    fn passed(dir: &Path, names: &[&str]) -> Passed {
        let unix = |name: &&str| own(UnixListener::bind(dir.join(name)).unwrap());
        Passed {
            unix: names.iter().map(unix).collect(),
            tcp: vec![own(TcpListener::bind("127.0.0.1:0").unwrap())],
            unknown: None,
        }
    }

    #[test]
    fn sockets_are_told_by_their_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = passed(dir.path(), &["http", "grpc"]);
        let address = all.tcp[0].socket.local_addr().unwrap();
        assert!(all.take_tcp("127.0.0.1:1".parse().unwrap()).is_none());
        let refused = all.try_clone().unwrap().take_grpc().unwrap_err();
        assert!(
            refused.to_string().contains(&address.to_string()),
            "{refused}"
        );
        assert!(all.take_tcp(address).is_some() && all.take_tcp(address).is_none());
        let refused = all.try_clone().unwrap().take_grpc().unwrap_err();
        assert!(refused.to_string().contains("2 sockets"), "{refused}");
        assert!(all.take_unix(&dir.path().join("other")).is_none());
        assert!(all.take_unix(&dir.path().join("http")).is_some());
        // What was kept under another http_socket is let go.
        let old = UnixListener::bind(dir.path().join("old")).unwrap();
        all.unix.push(Named {
            socket: old,
            is_stored: true,
        });
        let grpc = all.take_grpc().unwrap().unwrap();
        assert_eq!(
            grpc.local_addr().unwrap().as_pathname(),
            Some(&*dir.path().join("grpc"))
        );
        assert!(all.is_empty() && all.take_grpc().unwrap().is_none());
    }

    #[test]
    fn who_waits_where_no_daemon_will_come_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let all = passed(dir.path(), &["grpc"]);
        let mut unix = UnixStream::connect(dir.path().join("grpc")).unwrap();
        let mut tcp = TcpStream::connect(all.tcp[0].socket.local_addr().unwrap()).unwrap();
        assert_eq!(all.refuse_waiting(), 2);
        assert_eq!(unix.read(&mut [0]).unwrap(), 0);
        assert_eq!(tcp.read(&mut [0]).unwrap(), 0);
        assert_eq!(all.refuse_waiting(), 0);
    }
}
