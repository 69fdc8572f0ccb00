//! Rows of metrics with labels of their own.

use std::sync::atomic::Ordering;

use rocmforge_engine::api::{Class, EvictionCause, GapCause};

use super::Source;
use super::table::number;
use super::text::{Lines, MODEL_NAME};

pub(super) fn expected(source: &Source<'_>, rows: &mut Lines<'_>) {
    for status in &source.snapshot.models {
        if let Some(seconds) = source.measured.expected_first_token_s(status) {
            rows.add(&[("model", status.model.name())], seconds);
        }
    }
}

pub(super) fn evictions(source: &Source<'_>, rows: &mut Lines<'_>) {
    for status in &source.snapshot.models {
        for cause in EvictionCause::ALL {
            let labels = [("model", status.model.name()), ("cause", cause.name())];
            rows.add(&labels, number(status.cache.evictions_by.of(cause)));
        }
    }
}

pub(super) fn broken_gaps(source: &Source<'_>, rows: &mut Lines<'_>) {
    for (class, name) in [(Class::Interactive, "interactive"), (Class::Batch, "batch")] {
        for cause in GapCause::ALL {
            let labels = [("priority", name), ("cause", cause.name())];
            rows.add(
                &labels,
                number(source.snapshot.broken_gaps.of(class, cause)),
            );
        }
    }
}

/// Successful requests of each model by how they ended.
pub(super) fn ends(source: &Source<'_>, rows: &mut Lines<'_>) {
    for (model, record) in &source.records {
        for (reason, count) in [
            ("stop", &record.ends.stop),
            ("length", &record.ends.length),
            ("abort", &record.ends.abort),
        ] {
            let labels = [(MODEL_NAME, model.as_str()), ("finished_reason", reason)];
            rows.add(&labels, number(count.load(Ordering::Relaxed)));
        }
    }
}
