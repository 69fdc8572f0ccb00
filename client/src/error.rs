//! Everything that can go wrong between a caller and the daemon.

use std::error::Error as StdError;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt};

/// An error of the connection, of the daemon, or of the stream between.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No daemon answered at any of the paths.
    #[error("{}", Unreached(.tried))]
    NoDaemon {
        /// The paths that were tried, in order; never empty.
        tried: Vec<Attempt>,
    },
    /// Something answers at the path, but does not speak gRPC.
    #[error("{} does not answer as a rocmforged; check the socket path", .path.display())]
    Handshake {
        /// The path of the socket.
        path: PathBuf,
        /// What the transport says.
        source: tonic::transport::Error,
    },
    /// The connection broke while a request was on it.
    #[error(
        "{rpc}: the daemon closed the connection, or does not respond; see its log, restart it \
         if need be"
    )]
    ConnectionLost {
        /// Service and method, as "Models.Load".
        rpc: &'static str,
        /// What the transport says.
        source: Box<tonic::Status>,
    },
    /// The daemon answered with an error.
    #[error(transparent)]
    Rpc(Box<RpcError>),
    /// The answer breaks the protocol: a stream without its last event, or a
    /// message without a required field.
    #[error("{rpc}: the daemon's answer lacks {missing}; client and daemon may differ in version")]
    Incomplete {
        /// Service and method, as "Models.Load".
        rpc: &'static str,
        /// The field that the response lacks.
        missing: &'static str,
    },
}

impl Error {
    /// Wraps the status of a call, telling the daemon's answers from failures of
    /// the connection.
    pub(crate) fn from_status(rpc: &'static str, status: tonic::Status) -> Error {
        if is_of_lost_connection(&status) {
            let source = Box::new(status);
            return Error::ConnectionLost { rpc, source };
        }
        Error::Rpc(Box::new(RpcError {
            rpc,
            code: status.code(),
            details: status.get_error_details(),
            message: status.message().to_owned(),
        }))
    }

    /// The daemon's error, if it is one.
    pub fn as_rpc(&self) -> Option<&RpcError> {
        match self {
            Error::Rpc(error) => Some(error),
            _ => None,
        }
    }

    /// The gRPC code of the daemon's error, if it is one.
    pub fn code(&self) -> Option<Code> {
        self.as_rpc().map(|error| error.code)
    }

    /// How long the daemon asks to wait before the same request may succeed.
    pub fn retry_after(&self) -> Option<Duration> {
        self.as_rpc().and_then(RpcError::retry_after)
    }
}

/// Whether the connection ended, rather than the call.
///
/// A status that came over the wire has no source; one that the transport made up carries the
/// failure that it stands for. Its code is of no use: a connection that a daemon closes as it
/// ends (GOAWAY with NO_ERROR) gives INTERNAL.
fn is_of_lost_connection(status: &tonic::Status) -> bool {
    let mut next = StdError::source(status);
    if next.is_some() && matches!(status.code(), Code::Unavailable | Code::Unknown) {
        return true;
    }
    while let Some(error) = next {
        if let Some(http2) = error.downcast_ref::<h2::Error>() {
            return http2.is_go_away() || http2.is_io();
        }
        if error
            .downcast_ref::<hyper::Error>()
            .is_some_and(hyper::Error::is_canceled)
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error that the daemon answered with.
#[derive(Debug, Clone)]
pub struct RpcError {
    /// Service and method, as "Models.Load".
    pub rpc: &'static str,
    /// gRPC status code; it decides whether the client, the user or the administrator has to act.
    pub code: Code,
    /// What is wrong and what to do, to be shown to users.
    pub message: String,
    /// The google.rpc details of the error; empty if there are none.
    pub details: ErrorDetails,
}

impl RpcError {
    /// How long to wait before the same request may succeed, from RetryInfo.
    pub fn retry_after(&self) -> Option<Duration> {
        self.details.retry_info().and_then(|info| info.retry_delay)
    }

    /// Fields of the request that are wrong, each with what is wrong about it,
    /// from BadRequest.
    pub fn field_violations(&self) -> impl Iterator<Item = (&str, &str)> {
        self.details
            .bad_request()
            .into_iter()
            .flat_map(|bad| &bad.field_violations)
            .map(|violation| (violation.field.as_str(), violation.description.as_str()))
    }

    /// What stands in the way, each as type, subject and description, from
    /// PreconditionFailure.
    pub fn precondition_violations(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.details
            .precondition_failure()
            .into_iter()
            .flat_map(|failure| &failure.violations)
            .map(|v| {
                (
                    v.r#type.as_str(),
                    v.subject.as_str(),
                    v.description.as_str(),
                )
            })
    }

    /// Machine-readable reason, from ErrorInfo.
    pub fn reason(&self) -> Option<&str> {
        self.details.error_info().map(|info| info.reason.as_str())
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            write!(f, "{}: {}", self.rpc, self.code.description())
        } else {
            f.write_str(&self.message)
        }
    }
}

impl std::error::Error for RpcError {}

/// A path at which no daemon answered.
#[derive(Debug)]
pub struct Attempt {
    /// The path.
    pub path: PathBuf,
    /// Why the connection failed.
    pub error: std::io::Error,
}

/// Says why no daemon was reached, and what to do about it.
struct Unreached<'a>(&'a [Attempt]);

impl fmt::Display for Unreached<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = Listed(self.0);
        let met = |kind| self.0.iter().any(|attempt| attempt.error.kind() == kind);
        if met(ErrorKind::PermissionDenied) {
            write!(
                f,
                "the daemon's socket may not be used ({listed}); join the group that owns it, or name another \
                 socket with --socket or ROCMFORGE_SOCKET"
            )
        } else if met(ErrorKind::WouldBlock) {
            write!(
                f,
                "a daemon listens and takes no connection ({listed}); it hangs or has too many clients: try again, or \
                 restart it"
            )
        } else {
            write!(
                f,
                "no daemon listens ({listed}); start one with `rocmforged`, or name its socket with --socket or \
                 ROCMFORGE_SOCKET"
            )
        }
    }
}

/// Shows attempts as "/a.sock: connection refused; /b.sock: no such file".
struct Listed<'a>(&'a [Attempt]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, attempt) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            let path = attempt.path.display();
            match attempt.error.kind() {
                std::io::ErrorKind::NotFound => write!(f, "{separator}{path}: no such socket")?,
                std::io::ErrorKind::ConnectionRefused => {
                    write!(f, "{separator}{path}: nobody behind it")?;
                }
                _ => write!(f, "{separator}{path}: {}", attempt.error)?,
            }
        }
        Ok(())
    }
}
