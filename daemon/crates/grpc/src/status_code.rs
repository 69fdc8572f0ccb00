//! Converts failures to gRPC statuses; the only place where gRPC codes are chosen.
//!
//! Every status carries an `ErrorInfo` (a reason in capitals that programs may match on, the domain
//! [`DOMAIN`], and the names and numbers of the message), and in addition the detail that its code
//! requires.

use std::collections::HashMap;

use rocmforge_failure::{Failure, Kind, Subject};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// The domain in every `ErrorInfo`.
pub(super) const DOMAIN: &str = "rocmforge";

/// The gRPC code of a kind of failure.
fn code(kind: Kind) -> Code {
    match kind {
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::Unimplemented => Code::Unimplemented,
        Kind::NotFound => Code::NotFound,
        Kind::AlreadyExists => Code::AlreadyExists,
        Kind::PermissionDenied => Code::PermissionDenied,
        Kind::Unauthenticated => Code::Unauthenticated,
        Kind::FailedPrecondition => Code::FailedPrecondition,
        Kind::ResourceExhausted => Code::ResourceExhausted,
        Kind::Unavailable => Code::Unavailable,
        Kind::DataLoss => Code::DataLoss,
        Kind::DeadlineExceeded => Code::DeadlineExceeded,
        Kind::Cancelled => Code::Cancelled,
        Kind::Internal => Code::Internal,
    }
}

/// Converts a failure to a status.
#[expect(
    clippy::needless_pass_by_value,
    reason = "it ends here, and is what map_err hands over"
)]
pub(super) fn status(failure: Failure) -> Status {
    let mut details = ErrorDetails::new();
    for (field, message) in failure.fields() {
        details.add_bad_request_violation(field, message);
    }
    if let Some(Subject {
        kind,
        name,
        message,
    }) = failure.resource()
    {
        details.set_resource_info(kind, name, "", message);
    }
    if let Some(Subject {
        kind,
        name,
        message,
    }) = failure.precondition()
    {
        details.add_precondition_failure_violation(kind, name, message);
    }
    if let Some(after) = failure.retry_after() {
        details.set_retry_info(Some(after));
    }
    let metadata: HashMap<_, _> = failure.metadata().clone().into_iter().collect();
    details.set_error_info(failure.reason().name(), DOMAIN, metadata);
    Status::with_error_details(code(failure.kind()), failure.message(), details)
}

#[cfg(test)]
#[path = "status_code_tests.rs"]
mod tests;
