//! Amounts of work for a device, and estimates of its time.
//!
//! Weights are read at the device's rate, which it measures. The time of attention grows with a
//! sequence: a row of a prompt attends to all positions before it. The device times slices of
//! passes, and what they took beyond their weights is what attention costs a model.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use crate::pass::pieces::{CLASSES, class};

/// An amount of work for a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    /// Bytes of weights that the work reads.
    pub(crate) bytes: u64,
    /// Number of positions that rows attend to, summed over the rows and the layers with attention.
    pub(crate) attended: u64,
}

impl Add for Amount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            attended: self.attended + other.attended,
        }
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Amount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            attended: self.attended.saturating_sub(other.attended),
        }
    }
}

/// How fast a device computes with a model's weights in passes of some number of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WorkRates {
    /// Rate in bytes of weights per second.
    pub(crate) bytes_per_s: f64,
    /// Seconds for a row to attend to a position in one layer.
    pub(crate) attention: f64,
}

impl WorkRates {
    /// Estimated device time for an amount of work.
    pub(crate) fn time(self, amount: Amount) -> Duration {
        let weights = amount.bytes as f64 / self.bytes_per_s;
        let seconds = weights + amount.attended as f64 * self.attention;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
    }
}

/// Minimum number of attended positions for a sample: with fewer, launches dominate the time.
const ATTENDED_MIN: u64 = 1 << 20;

/// A sample counts as at most this many times the known value.
const SAMPLE_MAX: f64 = 4.0;

/// Weight of a new sample in the moving average.
const WEIGHT: f64 = 0.25;

/// Seconds for a row to attend to a position in one layer, for one model, by the rows of a pass.
#[derive(Debug, Default)]
pub(crate) struct AttentionCosts {
    seconds: [Option<f64>; CLASSES],
}

impl AttentionCosts {
    /// Seconds for a row to attend to a position in passes of `rows` rows; of the nearest measured
    /// number of rows, or zero.
    pub(crate) fn seconds(&self, rows: u32) -> f64 {
        let class = class(rows);
        let known = self.seconds.iter().enumerate();
        let known = known.filter_map(|(at, seconds)| Some((at.abs_diff(class), (*seconds)?)));
        known.min_by_key(|(far, _)| *far).map_or(0.0, |(_, s)| s)
    }

    /// Notes the device's time for a part of a pass with `rows` rows.
    pub(crate) fn note(&mut self, rows: u32, amount: Amount, took: Duration, bytes_per_s: f64) {
        if amount.attended < ATTENDED_MIN {
            return;
        }
        let beside = took.as_secs_f64() - amount.bytes as f64 / bytes_per_s;
        let sample = beside.max(0.0) / amount.attended as f64;
        let known = &mut self.seconds[class(rows)];
        // Now and then something else goes on, too.
        let next = |before: f64| match before > 0.0 {
            true => before + (sample.min(before * SAMPLE_MAX) - before) * WEIGHT,
            false => sample,
        };
        *known = Some(known.map_or(sample, next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: f64 = 1e9;

    #[test]
    fn attention_costs_what_a_slice_takes_beyond_its_weights() {
        let mut costs = AttentionCosts::default();
        let slice = Amount {
            bytes: 100_000_000,
            attended: 512 * 30_000,
        };
        let rates = |costs: &AttentionCosts| WorkRates {
            bytes_per_s: 100.0 * GB,
            attention: costs.seconds(512),
        };
        assert_eq!(rates(&costs).time(slice), Duration::from_millis(1));
        costs.note(512, slice, Duration::from_millis(6), 100.0 * GB);
        let time = rates(&costs).time(slice + slice);
        assert!((time.as_secs_f64() - 12e-3).abs() < 1e-6, "{time:?}");
        // Of other numbers of rows the nearest that is known counts.
        assert_eq!(costs.seconds(2048), costs.seconds(512));
        costs.note(1, slice, Duration::from_millis(2), 100.0 * GB);
        assert!(costs.seconds(2) < costs.seconds(256));
        // A text at its begin says nothing, and none is less than nothing.
        let short = Amount {
            attended: 1000,
            ..slice
        };
        let before = costs.seconds(512);
        costs.note(512, short, Duration::from_secs(1), 100.0 * GB);
        assert_eq!(costs.seconds(512), before);
        costs.note(64, slice, Duration::ZERO, 100.0 * GB);
        assert_eq!(costs.seconds(64), 0.0);
    }

    #[test]
    fn samples_are_smoothed() {
        let mut costs = AttentionCosts::default();
        let slice = Amount {
            bytes: 0,
            attended: 1 << 24,
        };
        for ms in [4, 4, 40, 4] {
            costs.note(512, slice, Duration::from_millis(ms), GB);
        }
        let ms = costs.seconds(512) * f64::from(1 << 24) * 1e3;
        assert!((4.0..12.0).contains(&ms), "{ms}");
    }
}
