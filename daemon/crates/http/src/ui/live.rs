//! `GET /ui/live`: what the page shows, as it changes: memory, maps of weights, requests that run,
//! downloads. One stream for all of it, since a browser opens few connections to a server.
//!
//! Each event is an object with the parts that are other than in the event before; the first has
//! all of them:
//!
//! | part | value |
//! |---|---|
//! | `memory` | bytes of the budget by use, and sums since the start |
//! | `models` | [`Residency`] |
//! | `requests` | those that wait or run, of the caller ([`LiveReport`]) |
//! | `ended` | number of the caller's last request that has ended |
//! | `loaded` | how often models were loaded or unloaded since the stream began |
//! | `downloads` | as `GET /models/sse` reports them |
//!
//! [`LiveReport`]: rocmforge_service::live::LiveReport

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{self, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use rocmforge_engine::api::{ModelStatus, SegmentState, SegmentStatus, Snapshot};
use rocmforge_service::Service;
use rocmforge_service::arrival::Arrival;
use rocmforge_service::why::Viewer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::Http;
use super::super::call::Call;
use super::super::changes;
use super::super::pulls::Pulls;
use super::super::sse;

/// Maximum number of models whose segments are sent.
const MODELS_MAX: usize = 256;
/// Minimum time between two events.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Handler of `GET /ui/live`.
pub(crate) async fn live(State(http): State<Arc<Http>>, request: extract::Request) -> Response {
    let call = Call::of(&http, "GET /ui/live", &request);
    if let Err(failure) = call.service.admit() {
        return call.refuse(&failure);
    }
    let mut snapshots = call.service.engine.watch();
    snapshots.mark_changed();
    let watching = Watching {
        arrival: call.arrival,
        ended: call.service.ended_requests(),
        service: call.service,
        downloads: http.pulls.changes(),
        pulls: Arc::clone(&http.pulls),
        snapshots,
        names: None,
        loaded: 0,
        sent: Map::new(),
        next_look: Instant::now(),
    };
    let events = stream::unfold(watching, |mut watching| async move {
        let text = watching.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(text)), watching))
    });
    changes::response(events)
}

/// An open window of the page `/ui`.
struct Watching {
    /// Arrival and client of the request.
    arrival: Arrival,
    service: Arc<Service>,
    pulls: Arc<Pulls>,
    downloads: watch::Receiver<u64>,
    /// Notified when a request has ended for reports, which is later than the engine's end.
    ended: watch::Receiver<()>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// Names of the models that were loaded at the last check.
    names: Option<BTreeSet<String>>,
    loaded: u64,
    /// The parts of the page's data as they were sent last.
    sent: Map<String, Value>,
    next_look: Instant,
}

impl Watching {
    /// Waits for the next event; `None` once the daemon ends.
    async fn next(&mut self) -> Option<String> {
        let silent = tokio::time::sleep(changes::SILENT_MAX);
        let mut silent = std::pin::pin!(silent);
        loop {
            tokio::select! {
                changed = self.snapshots.changed() => changed.ok()?,
                changed = self.downloads.changed() => changed.ok()?,
                changed = self.ended.changed() => changed.ok()?,
                () = &mut silent => return Some(changes::NOTHING_CHANGED.to_owned()),
            }
            tokio::time::sleep_until(self.next_look).await;
            let snapshot = Arc::clone(&self.snapshots.borrow_and_update());
            self.downloads.mark_unchanged();
            self.ended.mark_unchanged();
            if snapshot.draining || self.service.is_draining() {
                return None;
            }
            self.next_look = Instant::now() + LOOK_EVERY;
            // Its roles may end while it follows.
            let viewer = self.service.viewer(&self.arrival).await;
            let changed = self.changed(&snapshot, &viewer);
            if !changed.is_empty() {
                let mut text = String::new();
                sse::data_event(&changed, &mut text);
                return Some(text);
            }
        }
    }

    /// The parts that differ from what was sent.
    fn changed(&mut self, snapshot: &Snapshot, viewer: &Viewer) -> Map<String, Value> {
        let names = names(snapshot);
        if self.names.as_ref().is_some_and(|before| *before != names) {
            self.loaded += 1;
        }
        self.names = Some(names);
        let downloads = self.pulls.told().into_iter();
        let downloads = downloads
            .map(|(name, event, data)| json!({"model": name, "event": event, "data": data}));
        let parts = [
            ("memory", memory(snapshot)),
            ("models", value(&residency(snapshot))),
            ("requests", value(&self.service.live(snapshot, viewer))),
            ("ended", json!(self.service.last_ended(viewer))),
            ("loaded", json!(self.loaded)),
            ("downloads", downloads.collect()),
        ];
        let mut changed = Map::new();
        for (name, part) in parts {
            if self.sent.get(name) != Some(&part) {
                changed.insert(name.to_owned(), part.clone());
                self.sent.insert(name.to_owned(), part);
            }
        }
        changed
    }
}

fn value(part: &impl Serialize) -> Value {
    // Of our own values none has keys that are no text.
    serde_json::to_value(part).unwrap_or_default()
}

fn names(snapshot: &Snapshot) -> BTreeSet<String> {
    let models = snapshot.models.iter();
    models.map(|m| m.model.name().to_owned()).collect()
}

fn memory(snapshot: &Snapshot) -> Value {
    let cache = &snapshot.cache;
    let others = cache.kv_bytes + cache.prefix_bytes + cache.scratch_bytes;
    json!({
        "budget_bytes": cache.budget_bytes,
        "weight_bytes": cache.resident_bytes.saturating_sub(others),
        "in_flight_bytes": cache.in_flight_bytes,
        "kv_bytes": cache.kv_bytes,
        "prefix_cache_bytes": cache.prefix_bytes,
        "scratch_bytes": cache.scratch_bytes,
        "uploaded_bytes": cache.uploaded_bytes,
        "hits": cache.hits,
        "misses": cache.misses,
        "running": snapshot.running,
        "queued": snapshot.queued,
    })
}

/// Models with segments on the device or in flight.
#[derive(Debug, Serialize)]
struct Residency {
    maps: Vec<SegmentMap>,
    /// Number of further such models that are not listed.
    left_out: usize,
}

/// A model's segments.
#[derive(Debug, Serialize)]
struct SegmentMap {
    model: String,
    resident_bytes: u64,
    /// One character for each segment, in the order of a pass: `.` absent, `>` in flight, `#`
    /// resident, `*` resident and pinned, `@` in use by a pass.
    segments: String,
}

/// Models with something on the device; others are left out.
fn residency(snapshot: &Snapshot) -> Residency {
    let is_there = |segment: &SegmentStatus| segment.state != SegmentState::Absent;
    let all = snapshot.models.iter();
    let mut all = all.filter(|model| model.segments.iter().any(is_there));
    let maps = all.by_ref().take(MODELS_MAX).map(segment_map).collect();
    Residency {
        maps,
        left_out: all.count(),
    }
}

fn segment_map(model: &ModelStatus) -> SegmentMap {
    let segments = model.segments.iter();
    let resident = segments.filter(|s| s.state == SegmentState::Resident);
    SegmentMap {
        model: model.model.name().to_owned(),
        resident_bytes: resident.map(|segment| segment.bytes).sum(),
        segments: model.segments.iter().map(cell).collect(),
    }
}

/// A segment's character, as `rocmforgectl top` draws it.
fn cell(segment: &SegmentStatus) -> char {
    match segment.state {
        SegmentState::Absent => '.',
        SegmentState::InFlight => '>',
        SegmentState::Resident if segment.in_use => '@',
        SegmentState::Resident if segment.pinned => '*',
        SegmentState::Resident => '#',
    }
}
