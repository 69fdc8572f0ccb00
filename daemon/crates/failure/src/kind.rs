//! Kinds of failures, one for each thing that a client can do about them.

/// Kind of a failure: it says who has to act, and whether trying again helps. The names are gRPC's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request can never work as it is.
    InvalidArgument,
    /// The request asks for something that is not supported.
    Unimplemented,
    /// The request names something that does not exist.
    NotFound,
    /// The name in the request is taken.
    AlreadyExists,
    /// The client lacks the permission.
    PermissionDenied,
    /// The client is not authenticated.
    Unauthenticated,
    /// The present state does not allow it, and waiting alone does not help.
    FailedPrecondition,
    /// A limit is reached; the request may work later.
    ResourceExhausted,
    /// The daemon accepts no work now.
    Unavailable,
    /// A model file is no longer what it was.
    DataLoss,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The client went away.
    Cancelled,
    /// The daemon has a bug.
    Internal,
}

impl Kind {
    /// The kind's name, for the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::Unimplemented => "Unimplemented",
            Self::NotFound => "NotFound",
            Self::AlreadyExists => "AlreadyExists",
            Self::PermissionDenied => "PermissionDenied",
            Self::Unauthenticated => "Unauthenticated",
            Self::FailedPrecondition => "FailedPrecondition",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::Unavailable => "Unavailable",
            Self::DataLoss => "DataLoss",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::Cancelled => "Cancelled",
            Self::Internal => "Internal",
        }
    }
}
