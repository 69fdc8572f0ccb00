//! Explains how long requests took: the time of each recent request as parts that add up to the
//! whole, which models and clients it waited for, and what would help.
//!
//! ```text
//! RequestLog (one request) --ends--> RecentRequests (a ring) --asked--> Report --> gRPC, HTTP
//!       engine: RequestTimes --------^ (its TimesSlot)
//! ```
//!
//! A report is made when it is asked for. A client sees only its own requests; clients with the
//! role `admin` see all, and the names of clients that others waited for.
//!
//! *Invariants:* at most [`KEPT_MAX`] requests are kept, each with at most the completions of one
//! request; the parts of a report add up to its whole time (test
//! `the_parts_of_a_report_add_up_to_the_whole_time`).

mod advice;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rocmforge_engine::api::times::{Part, PartTimes, RequestTimes, TimesSlot};
use rocmforge_failure::Failure;
use serde::Serialize;
use tokio::sync::watch;

pub use advice::Prediction;

use crate::Service;
use crate::arrival::Arrival;
use crate::peer::Peer;
use crate::refusals;
use crate::roles::Role;

/// Maximum number of kept requests.
pub const KEPT_MAX: usize = 256;

/// Name shown in place of a client that the caller may not see.
const ANOTHER: &str = "another client";

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) number: u64,
    /// The client's id of the request.
    pub(crate) id: Option<String>,
    pub(crate) call: &'static str,
    pub(crate) model: String,
    pub(crate) peer: Peer,
    pub(crate) at: Instant,
    /// Time at which the request was handed to the engine, if it was.
    pub(crate) handed_over: Option<Instant>,
    pub(crate) ended: Instant,
    pub(crate) code: &'static str,
    /// Time accounts of the request's completions in the engine.
    pub(crate) slots: Vec<TimesSlot>,
}

/// The most recent requests that have ended.
#[derive(Debug, Default)]
pub struct RecentRequests {
    ring: Mutex<VecDeque<Arc<Ended>>>,
    next: AtomicU64,
    /// Notified after each request that is kept.
    kept: watch::Sender<()>,
}

impl RecentRequests {
    /// A new request number.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Keeps an ended request; drops the oldest if there are too many.
    pub(crate) fn keep(&self, ended: Ended) {
        let ended = Arc::new(ended);
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if ring.len() >= KEPT_MAX {
            ring.pop_front();
        }
        ring.push_back(ended);
        drop(ring);
        self.kept.send_replace(());
    }

    /// Finished requests that a client may see, the latest first.
    fn seen_by(&self, viewer: &Viewer) -> Vec<Arc<Ended>> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = ring.iter().rev().filter(|ended| viewer.sees(ended));
        seen.cloned().collect()
    }

    /// Number of the latest ended request that a client may see.
    fn last_seen_by(&self, viewer: &Viewer) -> Option<u64> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let last = ring.iter().rev().find(|ended| viewer.sees(ended));
        last.map(|ended| ended.number)
    }
}

/// The client that asks for time accounts.
#[derive(Debug, Clone, Copy)]
pub struct Viewer {
    /// Client whose requests are shown.
    pub peer: Peer,
    /// Whether the client sees the requests of all clients.
    pub is_admin: bool,
}

impl Viewer {
    fn sees(&self, ended: &Ended) -> bool {
        self.is_admin || ended.peer == self.peer
    }
}

/// Requests to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// The request with this number or client's id; the latest if there are several.
    Named(String),
    /// The kept request that took longest.
    Slowest,
    /// This many of the latest requests.
    Latest(usize),
}

/// Time account of a request with advice, as clients see it.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Number of the request, by which its report can be requested.
    pub number: u64,
    /// The `x-request-id` of the request; empty if it has none.
    pub id: String,
    /// The RPC or the HTTP route.
    pub call: String,
    /// Name of the request's model.
    pub model: String,
    /// Client that sent the request.
    pub client: String,
    /// Arrival of the request, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The request's outcome: `Ok`, `Cancelled`, or its error code.
    pub code: String,
    /// Duration of the request in milliseconds.
    pub total_ms: f64,
    /// The part that took longest.
    pub cause: String,
    /// The parts of the request's time, the longest first.
    pub parts: Vec<ReportPart>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV cache was reused from an earlier request.
    pub reused_tokens: u32,
    /// Number of generated tokens.
    pub generated_tokens: u32,
    /// Decode rate in tokens per second after the first token, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// The longest gap between two tokens, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_gap_ms: Option<f64>,
    /// The cause of the longest gap: a [`GapCause::name`](rocmforge_engine::api::GapCause::name).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_gap_cause: Option<&'static str>,
    /// The promised gap between tokens, in milliseconds; `None` if none was promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub promised_gap_ms: Option<f64>,
    /// Number of gaps that were longer than promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_gaps: Option<u32>,
    /// Weights that were uploaded for the request, or computed with by the CPU.
    pub weights: Weights,
    /// Sentences that say what would make such a request faster, by measured numbers.
    pub advice: Vec<String>,
    /// Predicted decode rates for the changes that `advice` names.
    pub predictions: Vec<Prediction>,
    /// Settings that had no effect on the request, and changes that would have none.
    pub no_effect: Vec<String>,
}

/// A part of a request's time.
#[derive(Debug, Clone, Serialize)]
pub struct ReportPart {
    /// Name of the part, such as `uploads`.
    pub name: &'static str,
    /// Description of the part.
    pub text: &'static str,
    /// Duration of the part in milliseconds.
    pub ms: f64,
    /// Models and clients whose passes the request waited for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub behind: Vec<Behind>,
}

/// A model and a client whose passes a request waited for.
#[derive(Debug, Clone, Serialize)]
pub struct Behind {
    /// Model of the passes.
    pub model: String,
    /// Client with most rows of the passes.
    pub client: String,
    /// Duration in milliseconds.
    pub ms: f64,
}

/// Weights that a request needed and that were not on the device.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Weights {
    /// Bytes of weights that were uploaded.
    pub uploaded_bytes: u64,
    /// Bytes of uploaded weights that had to be read from disk.
    pub disk_bytes: u64,
    /// Bytes of weights that the CPU computed with.
    pub cpu_bytes: u64,
    /// Upload rate while the request waited for uploads, in bytes per second; 0 if it did not wait.
    pub link_bytes_per_s: f64,
    /// Upload rate in bytes per second as the device measures it; 0 if it does not.
    pub link_measured_bytes_per_s: f64,
    /// The uploaded weights by the reason for which they were not resident.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub displaced: Vec<DisplacedWeights>,
}

/// Weights that were uploaded, by the reason for which they were not resident.
#[derive(Debug, Clone, Serialize)]
pub struct DisplacedWeights {
    /// Cause of the weights' eviction, or `first_use`.
    pub cause: &'static str,
    /// Model that took the memory of the weights; empty if none did.
    pub by_model: String,
    /// Bytes of the weights.
    pub bytes: u64,
}

/// The description of a part of a request's time in a report.
pub fn text(part: Part) -> &'static str {
    match part {
        Part::Preparing => "opening the model, rendering the template, tokenizing",
        Part::Queue => "waiting in the queue",
        Part::Preempted => "preempted: others needed its KV cache memory",
        Part::Tower => "computing its images",
        Part::Disk => "waiting for weights or KV cache from disk",
        Part::Uploads => "waiting for uploads of weights",
        Part::CpuCompute => "CPU compute of weights that are not on the device",
        Part::Prompt => "computing the prompt",
        Part::Decode => "computing new tokens",
        Part::OwnModel => "passes of its own model for other requests",
        Part::OtherModels => "passes of other models",
        Part::Sampling => "choosing tokens: samplers and grammar",
        Part::Reader => "waiting for the client to take tokens",
        Part::Rest => "the rest",
    }
}

impl Service {
    /// The client that asks for reports, and whether it may see all requests.
    pub async fn viewer(&self, arrival: &Arrival) -> Viewer {
        let highest = match arrival.caller {
            Some(caller) => self.roles.highest(caller.uid, caller.gid).await,
            None => None,
        };
        Viewer {
            peer: arrival.peer(),
            is_admin: highest >= Some(Role::Admin),
        }
    }

    /// Number of the latest ended request that a client may see; 0 if there is none.
    #[must_use]
    pub fn last_ended(&self, viewer: &Viewer) -> u64 {
        self.recent.last_seen_by(viewer).unwrap_or(0)
    }

    /// Notified whenever a request has ended, after [`last_ended`](Self::last_ended) includes it.
    /// The engine may have ended it earlier, by as long as the client took to read the rest.
    #[must_use]
    pub fn ended_requests(&self) -> watch::Receiver<()> {
        self.recent.kept.subscribe()
    }

    /// Reports of ended requests; empty if none has ended.
    ///
    /// # Errors
    /// NOT_FOUND if the named request is not kept, or belongs to another client.
    pub fn why(&self, viewer: &Viewer, which: &Which) -> Result<Vec<Report>, Failure> {
        let seen = self.recent.seen_by(viewer);
        let report = |ended: &Arc<Ended>| self.report(ended, viewer);
        match which {
            Which::Latest(n) => Ok(seen.iter().take(*n).map(report).collect()),
            Which::Slowest => {
                let slowest = seen.iter().max_by_key(|ended| ended.took());
                Ok(slowest.map(report).into_iter().collect())
            }
            Which::Named(name) => {
                let number = name.parse().ok();
                // A client chooses its ids: one of them is not to stand for another's number.
                let by_number = seen.iter().find(|e| Some(e.number) == number);
                let by_id = || seen.iter().find(|e| e.id.as_deref() == Some(name));
                match by_number.or_else(by_id) {
                    Some(found) => Ok(vec![report(found)]),
                    None => Err(refusals::unknown_request(name, KEPT_MAX)),
                }
            }
        }
    }

    fn report(&self, ended: &Ended, viewer: &Viewer) -> Report {
        ended.report(&|number| self.client_seen_by(viewer, number))
    }

    /// The name of a client as a viewer may see it.
    pub fn client_seen_by(&self, viewer: &Viewer, number: u64) -> String {
        if number == viewer.peer.client() {
            viewer.peer.to_string()
        } else if viewer.is_admin {
            self.client_name(number)
        } else {
            ANOTHER.to_owned()
        }
    }

    /// Whether a viewer may see a request of the client with this number: lengths and rates of
    /// others' texts are private to them.
    pub fn is_seen_by(&self, viewer: &Viewer, number: u64) -> bool {
        viewer.is_admin || number == viewer.peer.client()
    }
}

impl Ended {
    /// The time account of the completion that took longest, once the engine has ended it.
    fn engine(&self) -> Option<RequestTimes> {
        let times = self.slots.iter().filter_map(TimesSlot::get);
        times.max_by_key(|times| times.ended)
    }

    /// Duration of the request. If its client went away, the engine may have ended it later.
    fn took(&self) -> Duration {
        let ended = self
            .engine()
            .map_or(self.ended, |t| t.ended.max(self.ended));
        ended.saturating_duration_since(self.at)
    }

    /// The parts of the request's time, given the engine's account.
    fn parts(&self, times: Option<&RequestTimes>) -> PartTimes {
        let mut parts = PartTimes::default();
        let Some(times) = times else {
            let handed_over = self.handed_over.unwrap_or(self.ended);
            parts.add(
                Part::Preparing,
                handed_over.saturating_duration_since(self.at),
            );
            let rest = self.ended.saturating_duration_since(handed_over);
            parts.add(Part::Rest, rest);
            return parts;
        };
        let preparing = times.begun.saturating_duration_since(self.at);
        parts.add(Part::Preparing, preparing);
        for part in Part::ALL {
            parts.add(part, times.parts.of(part));
        }
        // The rest of the answer is on its way to the client.
        let behind = self.ended.saturating_duration_since(times.ended);
        parts.add(Part::Reader, behind);
        parts
    }

    fn report(&self, client: &dyn Fn(u64) -> String) -> Report {
        let times = self.engine();
        let times = times.as_ref();
        let parts = self.parts(times);
        let gap = times.and_then(|times| times.longest_gap);
        let promised = times.and_then(|times| times.promised_gap);
        let advice = times.map_or_else(Vec::new, |times| advice::of(times, &parts));
        let without_effect = times.map(|times| advice::without_effect(times, &parts));
        let report_part = |(part, took): (Part, Duration)| {
            let waited = times.iter().flat_map(|times| &times.waited_for);
            let behind = waited.filter(|waited| waited.part == part);
            let behind = behind.map(|waited| Behind {
                model: waited.model.clone(),
                client: client(waited.client),
                ms: ms(waited.took),
            });
            ReportPart {
                name: part.name(),
                text: text(part),
                ms: ms(took),
                behind: behind.collect(),
            }
        };
        let since = SystemTime::now()
            .checked_sub(self.at.elapsed())
            .and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        Report {
            number: self.number,
            id: self.id.clone().unwrap_or_default(),
            call: self.call.to_owned(),
            model: self.model.clone(),
            client: client(self.peer.client()),
            started_unix_ms: since.map_or(0, |since| since.as_millis() as u64),
            code: self.code.to_owned(),
            total_ms: ms(parts.total()),
            cause: parts.first_cause().name().to_owned(),
            parts: parts.ranked().into_iter().map(report_part).collect(),
            prompt_tokens: times.map_or(0, |t| t.prompt_tokens.0),
            reused_tokens: times.map_or(0, |t| t.prompt_tokens.1),
            generated_tokens: times.map_or(0, |t| t.generated_tokens),
            tokens_per_s: times.and_then(|times| times.decode.tokens_per_s()),
            longest_gap_ms: gap.map(|gap| ms(gap.took)),
            longest_gap_cause: gap.map(|gap| gap.cause.name()),
            promised_gap_ms: promised.map(|(gap, _)| ms(gap)),
            broken_gaps: promised.map(|(_, broken)| broken),
            weights: times.map(weights).unwrap_or_default(),
            predictions: advice.iter().filter_map(|a| a.prediction.clone()).collect(),
            advice: advice.into_iter().map(|advice| advice.text).collect(),
            no_effect: without_effect.unwrap_or_default(),
        }
    }
}

fn ms(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

fn weights(times: &RequestTimes) -> Weights {
    let displaced = times.displaced.iter().map(|displaced| DisplacedWeights {
        cause: displaced.cause.map_or("first_use", |cause| cause.name()),
        by_model: displaced.by.clone().unwrap_or_default(),
        bytes: displaced.bytes,
    });
    let seconds = times.link.took.as_secs_f64();
    Weights {
        uploaded_bytes: times.uploaded_bytes,
        disk_bytes: times.cold_bytes,
        cpu_bytes: times.cpu_bytes,
        link_bytes_per_s: match seconds > 0.0 {
            true => times.link.bytes as f64 / seconds,
            false => 0.0,
        },
        link_measured_bytes_per_s: times.link.measured_bytes_per_s.unwrap_or_default(),
        displaced: displaced.collect(),
    }
}

#[cfg(test)]
#[path = "why/tests.rs"]
mod tests;
