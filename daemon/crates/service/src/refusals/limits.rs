//! Failures of clients that have reached one of their limits.

use std::time::Duration;

use rocmforge_failure::{Failure, Reason};

use super::LIMIT_RETRY;

/// RESOURCE_EXHAUSTED: the client has reached a limit of its own; `retry_after` is `None` if the
/// request can never pass.
pub(crate) fn peer_limit(
    peer: &str,
    (limit, max): (&str, u64),
    what: &str,
    retry_after: Option<Duration>,
) -> Failure {
    let (reason, remedy) = match retry_after {
        Some(_) => (Reason::PeerLimit, "try again later"),
        None => (
            Reason::PeerLimitAlways,
            "shorten the request, or raise the limit ([[limit]] in the daemon's configuration)",
        ),
    };
    let failure = Failure::new(reason)
        .with("peer", peer)
        .with("limit", limit)
        .with("max", max.to_string())
        .says(&format!(
            "{what}; the daemon's limit for {peer} is {limit} = {max}; {remedy}"
        ));
    match retry_after {
        Some(after) => failure.retry(after.max(LIMIT_RETRY)),
        None => failure,
    }
}

/// RESOURCE_EXHAUSTED: the client's limit on prompt bytes is used up by its other requests.
pub(crate) fn prompts_held(peer: &str, max: u64, held: u64, bytes: u64) -> Failure {
    let retry_after = (bytes <= max).then_some(LIMIT_RETRY);
    let what =
        format!("this prompt has {bytes} bytes, and prompts of requests under way have {held}");
    peer_limit(peer, ("prompt_bytes", max), &what, retry_after)
}
