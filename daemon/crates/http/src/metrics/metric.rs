//! What a metric is: its name, kind and help, and where its value comes from.

use std::sync::atomic::AtomicU64;

use rocmforge_engine::api::ModelStatus;
use rocmforge_service::limits::PeerUse;
use rocmforge_service::measured::{Histogram, Record};

use super::Source;
use super::text::Lines;

/// What Prometheus may do with a metric.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// Goes up and down.
    Gauge,
    /// Goes up, from 0 at the start.
    Counter,
    /// Counts of observations by upper bound.
    Histogram,
}

/// Source of a metric's values.
pub(super) enum Value {
    /// One value, without labels.
    One(fn(&Source<'_>) -> f64),
    /// One value, or none, and no metric then.
    Maybe(fn(&Source<'_>) -> Option<f64>),
    /// A value for each loaded model, under the label `model`.
    OfModel(fn(&ModelStatus) -> f64),
    /// A value for each client of the last minutes, under the label `peer`.
    OfPeer(fn(&Source<'_>, &PeerUse) -> f64),
    /// A count for each model that was used, under the label `model_name`.
    OfRecord(fn(&Record) -> &AtomicU64),
    /// A histogram for each model that was used, under the label `model_name`.
    Times(fn(&Record) -> &Histogram),
    /// Values with labels of their own.
    Rows(fn(&Source<'_>, &mut Lines<'_>)),
}

/// A metric.
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) help: &'static str,
    pub(super) value: Value,
}

pub(super) const fn gauge(name: &'static str, help: &'static str, value: Value) -> Metric {
    Metric {
        name,
        kind: Kind::Gauge,
        help,
        value,
    }
}

pub(super) const fn counter(name: &'static str, help: &'static str, value: Value) -> Metric {
    Metric {
        name,
        kind: Kind::Counter,
        help,
        value,
    }
}

pub(super) const fn histogram(name: &'static str, help: &'static str, value: Value) -> Metric {
    Metric {
        name,
        kind: Kind::Histogram,
        help,
        value,
    }
}
