//! `GET /ui/residency`: where the segments of loaded models are, for the maps of the page.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_engine::api::{SegmentState, SegmentStatus};
use serde::Serialize;

use super::super::Http;
use super::super::call::{Call, json};

/// Most models that are told of.
const MODELS_MAX: usize = 256;

/// Models of which something is on the device, or comes there.
#[derive(Debug, Serialize)]
struct Residency {
    models: Vec<Map>,
    /// Further such models.
    left_out: usize,
}

/// A model's segments.
#[derive(Debug, Serialize)]
struct Map {
    model: String,
    /// A character a segment, in the order of a pass ([`cell`]).
    segments: String,
}

/// Where the segments of loaded models are: `.` in the file only, `>` in flight, `#` resident, `*`
/// resident and pinned, `@` in use by a pass. Models without anything on the device are left out.
pub(in crate::http) async fn residency(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "GET /ui/residency", &request);
    let snapshot = call.service.engine.snapshot();
    let is_there = |segment: &SegmentStatus| segment.state != SegmentState::Absent;
    let all = snapshot.models.iter();
    let mut all = all.filter(|model| model.segments.iter().any(is_there));
    let models = all.by_ref().take(MODELS_MAX).map(|model| Map {
        model: model.model.name().to_owned(),
        segments: model.segments.iter().map(cell).collect(),
    });
    let models = models.collect();
    let left_out = all.count();
    call.respond(json(&Residency { models, left_out }))
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
