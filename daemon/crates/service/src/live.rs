//! Queued and running requests, as a client may see them: the same for gRPC and HTTP.

use rocmforge_engine::api::{LiveRequest, Snapshot};
use serde::Serialize;

use crate::Service;
use crate::why::Viewer;

/// A queued or running request, with the name of its client. Serialized, it has the fields of
/// gRPC's `LiveRequest`; what is not known yet is null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LiveReport {
    /// Number of the request, as in time accounts and in the log.
    pub number: u64,
    /// Name of the request's model.
    pub model: String,
    /// Client that sent the request.
    pub client: String,
    /// State of the request, such as `queued` or `decode`.
    pub state: &'static str,
    /// Time since the arrival of the request, in milliseconds.
    pub age_ms: u64,
    /// Number of tokens of the request's prompt, or of the text that is embedded or scored.
    pub prompt_tokens: u32,
    /// Number of positions that are computed so far, prompt and generated tokens together.
    pub computed_tokens: u32,
    /// Tokens that the request has generated so far.
    pub generated_tokens: u32,
    /// Decode rate: tokens a second after the first one.
    pub tokens_per_s: Option<f64>,
    /// Longest gap between two tokens of the request, in milliseconds.
    pub longest_gap_ms: Option<f64>,
    /// What took most of the longest gap.
    pub longest_gap_cause: Option<&'static str>,
}

impl LiveReport {
    fn of(live: &LiveRequest, client: String) -> Self {
        Self {
            number: live.number,
            model: live.model.name().to_owned(),
            client,
            state: live.state.name(),
            age_ms: live.since.elapsed().as_millis() as u64,
            prompt_tokens: live.prompt_tokens,
            computed_tokens: live.computed_tokens,
            generated_tokens: live.generated_tokens,
            tokens_per_s: live.tokens_per_s,
            longest_gap_ms: live.longest_gap.map(|gap| gap.took.as_secs_f64() * 1e3),
            longest_gap_cause: live.longest_gap.map(|gap| gap.cause.name()),
        }
    }
}

impl Service {
    /// The queued and running requests of a snapshot that a client may see, in the order of their
    /// arrival.
    #[must_use]
    pub fn live(&self, snapshot: &Snapshot, viewer: &Viewer) -> Vec<LiveReport> {
        let all = snapshot.requests.iter();
        let seen = all.filter(|live| self.is_seen_by(viewer, live.client));
        let shown = seen.map(|live| LiveReport::of(live, self.client_seen_by(viewer, live.client)));
        shown.collect()
    }
}
