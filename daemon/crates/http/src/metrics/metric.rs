//! The declaration of a metric: its name, kind and help, and where its value comes from.

use std::sync::atomic::AtomicU64;

use rocmforge_engine::api::ModelStatus;
use rocmforge_service::limits::PeerUse;
use rocmforge_service::measured::{Histogram, Record};

use super::Source;
use super::text::Lines;

/// The Prometheus type of a metric.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// A value that goes up and down.
    Gauge,
    /// A sum that only grows, from 0 at the start.
    Counter,
    /// Numbers of observations by upper bound.
    Histogram,
}

/// Source of a metric's values.
pub(super) enum Value {
    /// One value, without labels.
    One(fn(&Source<'_>) -> f64),
    /// One optional value; the metric is omitted if there is none.
    Maybe(fn(&Source<'_>) -> Option<f64>),
    /// A value for each loaded model, with the label `model`.
    OfModel(fn(&ModelStatus) -> f64),
    /// A value for each client of the last minutes, with the label `peer`.
    OfPeer(fn(&Source<'_>, &PeerUse) -> f64),
    /// A counter for each model that was used, with the label `model_name`.
    OfRecord(fn(&Record) -> &AtomicU64),
    /// A histogram for each model that was used, with the label `model_name`.
    Times(fn(&Record) -> &Histogram),
    /// Values with labels of their own.
    Rows(fn(&Source<'_>, &mut Lines<'_>)),
}

/// Declaration of a metric.
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
