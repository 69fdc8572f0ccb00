//! The Unix socket: taken over from systemd, or bound here.
//!
//! What may lie at the path when the daemon starts, and what happens:
//!
//! ```text
//! nothing                                -> bind
//! socket, nobody listens (a daemon died) -> remove, bind
//! socket, somebody listens               -> refuse, naming the process if it takes connections
//! anything else                          -> refuse, never delete
//! ```
//!
//! The socket is never open to others than its owner and group, not even between `bind` and
//! `chmod`: the mode is set on the unbound socket, which the kernel copies to the file.
//! *Invariant:* two daemons that start together cannot both take the path (test
//! `of_many_that_start_together_one_serves`): a file beside it, which only its user can open, is
//! locked from the look to the listen.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, getsockopt, listen,
    socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::geteuid;

/// Mode of the socket file: owner and group may connect, nobody else.
pub const SOCKET_MODE: u32 = 0o660;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// Mode of the file that is locked while a daemon starts.
const LOCK_MODE: u32 = 0o600;
/// Maximum wait for the lock while another process holds it.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(5);

/// Why the daemon's socket cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The socket's directory is missing, or is not a directory.
    #[error("cannot put a socket into {}: {message}; create it (systemd does so with RuntimeDirectory=) or choose another path with --socket (for HTTP --http-socket)", dir.display())]
    Directory {
        /// Path of the directory.
        dir: PathBuf,
        /// Why no socket can be put into the directory.
        message: String,
    },
    /// Another process of this user holds the lock that is taken while a daemon starts.
    #[error("{} stays locked by another process that starts there; stop it, or choose another path with --socket (for HTTP --http-socket)", dir.display())]
    Locked {
        /// Directory of the lock.
        dir: PathBuf,
    },
    /// A running daemon serves the socket.
    #[error("{} is served already, by process {pid} of user {uid}; stop that daemon, or choose another path with --socket (for HTTP --http-socket)", path.display())]
    Live {
        /// Path of the socket.
        path: PathBuf,
        /// Process that listens; 0 if it is outside of our pid namespace.
        pid: i32,
        /// User of the process.
        uid: u32,
    },
    /// Something other than a socket is at the path.
    #[error("{} exists and is {kind}, not a socket; it is left alone: move it away, or choose another path with --socket (for HTTP --http-socket)", path.display())]
    Foreign {
        /// Path of the socket.
        path: PathBuf,
        /// What is at the path: a directory, a file or another kind.
        kind: &'static str,
    },
    /// Whether a daemon serves the socket cannot be determined.
    #[error("{} exists, and whether a daemon serves it cannot be found out; remove it if none does, or choose another path with --socket (for HTTP --http-socket)", path.display())]
    Unknown {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the attempt.
        source: io::Error,
    },
    /// systemd passed something other than one listening Unix socket.
    #[error(
        "socket activation: {message}; rocmforged.socket has exactly one ListenStream= with a path, and further sockets \
         are those of http_listen and http_socket"
    )]
    Activation {
        /// What systemd passed instead of one listening Unix socket.
        message: String,
    },
    /// A system call failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// Path of the socket or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The listening socket. When it is dropped, its file is removed if this process created it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: Option<SocketFile>,
}

/// The socket file that this process created: path, device and inode.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    dev: u64,
    ino: u64,
}

impl Socket {
    /// A socket that systemd passed, and whose file belongs to systemd.
    pub fn passed(listener: UnixListener) -> Self {
        Self {
            listener,
            file: None,
        }
    }

    /// Keeps the socket file when the daemon ends, since the service manager keeps the socket.
    pub fn leave_file(&mut self) {
        self.file = None;
    }

    /// Whether the socket outlives the process, because the service manager holds it.
    pub fn is_kept(&self) -> bool {
        self.file.is_none()
    }

    /// Binds a socket at `path`, replacing a stale socket file if there is one.
    ///
    /// # Errors
    /// [`SocketError`], which says what is at the path and what to do.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let failed = |action| {
            move |source: io::Error| SocketError::Io {
                action,
                path: path.to_owned(),
                source,
            }
        };
        let path_at_start = std::path::absolute(path).map_err(failed("find the directory of"))?;
        let _lock = lock_start(&path_at_start)?;
        remove_if_stale(&path_at_start)?;

        let fd = unbound()?;
        let mode = Mode::from_bits_truncate(SOCKET_MODE);
        // The kernel gives the file the mode of the unbound socket, less the
        // umask: never more than we want.
        fchmod(&fd, mode).map_err(|e| failed("set the mode of")(e.into()))?;
        let address = UnixAddr::new(path).map_err(|e| failed("bind")(e.into()))?;
        bind(fd.as_raw_fd(), &address).map_err(|e| failed("bind")(e.into()))?;
        // A strict umask may have taken bits that clients in the group need.
        std::fs::set_permissions(&path_at_start, PermissionsExt::from_mode(SOCKET_MODE))
            .map_err(failed("set the mode of"))?;
        let made = std::fs::symlink_metadata(&path_at_start).map_err(failed("look at"))?;
        let backlog = Backlog::new(BACKLOG).map_err(|e| failed("listen on")(e.into()))?;
        listen(&fd, backlog).map_err(|e| failed("listen on")(e.into()))?;
        Ok(Self {
            listener: UnixListener::from(fd),
            file: Some(SocketFile {
                path: path_at_start,
                dev: made.dev(),
                ino: made.ino(),
            }),
        })
    }

    /// A second handle of the listening socket, for the server.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// The socket's address, for messages.
    pub fn describe(&self) -> String {
        match &self.file {
            Some(file) => file.path.display().to_string(),
            None => "the socket passed by systemd".to_owned(),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        let Ok(now) = std::fs::symlink_metadata(&file.path) else {
            return;
        };
        // Somebody may have replaced the file; what is not ours stays.
        if (now.dev(), now.ino()) == (file.dev, file.ino)
            && let Err(error) = std::fs::remove_file(&file.path)
        {
            tracing::warn!(path = %file.path.display(), %error, "the socket file stays behind");
        }
    }
}

/// Takes the lock for starting a daemon at `path`: on a file beside the socket that only this user
/// can open. (Everyone who may read the directory could lock that.) The file stays, since removing
/// it would race with waiting processes.
fn lock_start(path: &Path) -> Result<File, SocketError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let refuse = |message: String| SocketError::Directory {
        dir: dir.to_owned(),
        message,
    };
    match dir.metadata() {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(refuse("it is not a directory".to_owned())),
        Err(error) => return Err(refuse(error.to_string())),
    }
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let handle = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(LOCK_MODE)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(&lock)
        .map_err(|error| {
            refuse(format!(
                "{} cannot be opened ({error}); remove it if it is not this user's",
                Path::new(&lock).display()
            ))
        })?;
    let give_up = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match handle.try_lock() {
            Ok(()) => return Ok(handle),
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => {
                let owner = handle.metadata().map(|found| found.uid());
                if let Some(uid) = owner.ok().filter(|&uid| uid != geteuid().as_raw()) {
                    return Err(refuse(format!(
                        "{} belongs to user {uid}, who keeps it locked",
                        Path::new(&lock).display()
                    )));
                }
                return Err(SocketError::Locked {
                    dir: dir.to_owned(),
                });
            }
            Err(TryLockError::Error(error)) => return Err(refuse(error.to_string())),
        }
    }
}

fn remove_if_stale(path: &Path) -> Result<(), SocketError> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(SocketError::Io {
                action: "look at",
                path: path.to_owned(),
                source,
            });
        }
    };
    let kind = found.file_type();
    if !kind.is_socket() {
        let kind = if kind.is_dir() {
            "a directory"
        } else if kind.is_symlink() {
            "a symbolic link"
        } else if kind.is_file() {
            "a file"
        } else {
            "a special file"
        };
        return Err(SocketError::Foreign {
            path: path.to_owned(),
            kind,
        });
    }
    let unknown = |errno: Errno| SocketError::Unknown {
        path: path.to_owned(),
        source: errno.into(),
    };
    let fd = unbound()?;
    let address = UnixAddr::new(path).map_err(unknown)?;
    match connect(fd.as_raw_fd(), &address) {
        Ok(()) => {
            let peer = getsockopt(&fd, sockopt::PeerCredentials).map_err(unknown)?;
            Err(SocketError::Live {
                path: path.to_owned(),
                pid: peer.pid(),
                uid: peer.uid(),
            })
        }
        // It listens, but its queue of connections is full: alive, if not well.
        Err(Errno::EAGAIN) => Err(SocketError::Live {
            path: path.to_owned(),
            pid: 0,
            uid: found.uid(),
        }),
        Err(Errno::ECONNREFUSED) => std::fs::remove_file(path).map_err(|source| SocketError::Io {
            action: "remove the stale socket",
            path: path.to_owned(),
            source,
        }),
        Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(unknown(errno)),
    }
}

/// A new socket that is not bound. Non-blocking, so that connecting to a busy daemon returns.
fn unbound() -> Result<OwnedFd, SocketError> {
    socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(|errno| SocketError::Io {
        action: "open a socket for",
        path: PathBuf::new(),
        source: errno.into(),
    })
}
