//! Measured rates of CPU compute, by the number of rows that weights are multiplied with and by the
//! bytes of one computation.
//!
//! Rows have to be copied from the GPU and results back, and threads have to wake, whatever the
//! number of bytes. So one expert costs more per byte than eight, and if the rate of small
//! computations were used for large ones, the CPU would never be given more. Sizes with few
//! measurements are assumed to be as fast as possible, so that they are tried: a computation of
//! twice the size costs half as much per byte at best.

use std::time::Duration;

/// Weight of a new sample in the moving average.
const WEIGHT: f64 = 0.2;

/// A sample counts as at most this many times slower than the average: a thread that lost its core
/// to another process says little.
const SLOWER_MAX: f64 = 2.0;

/// Number of first samples of which the fastest counts: at first threads start, and pages of the
/// file are mapped.
pub(super) const SAMPLES_MIN: u32 = 4;

/// Number of classes of computations by the rows that a matrix is multiplied with, one for each
/// power of two.
const CLASSES: usize = 8;

/// Number of classes of computations by their bytes, one for each power of two from [`SIZE_MIN`]
/// on.
const SIZES: usize = 8;

/// Bytes of the smallest class of computations, which ends at twice as many.
const SIZE_MIN: u64 = 1 << 20;

/// Moving average of seconds per byte, with its number of samples.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rate {
    seconds: Option<f64>,
    samples: u32,
}

impl Rate {
    pub(super) fn note(&mut self, took: Duration, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let sample = took.as_secs_f64() / bytes as f64;
        self.samples = self.samples.saturating_add(1);
        let early = self.samples <= SAMPLES_MIN;
        self.seconds = Some(match self.seconds {
            None => sample,
            Some(before) if early => before.min(sample),
            Some(before) => before + (sample.min(SLOWER_MAX * before) - before) * WEIGHT,
        });
    }

    pub(super) fn samples(&self) -> u32 {
        self.samples
    }

    pub(super) fn a_byte(&self) -> Option<f64> {
        self.seconds
    }

    /// The rate in seconds per byte; `None` if it has too few samples.
    fn sure(&self) -> Option<f64> {
        self.seconds.filter(|_| self.samples >= SAMPLES_MIN)
    }
}

/// Rates of CPU compute for weights in one place (kept or in the file), by rows and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates([[Rate; SIZES]; CLASSES]);

fn class(rows: usize) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

fn size(bytes: u64) -> usize {
    ((bytes / SIZE_MIN).max(1).ilog2() as usize).min(SIZES - 1)
}

impl Rates {
    /// Rates of `seconds` for each byte at all sizes.
    #[cfg(test)]
    pub(super) fn all(seconds: f64) -> Self {
        let rate = Rate {
            seconds: Some(seconds),
            samples: SAMPLES_MIN,
        };
        Self([[rate; SIZES]; CLASSES])
    }

    /// Records the time of a computation of `bytes` of weights with `rows` rows each.
    pub(super) fn note(&mut self, rows: usize, took: Duration, bytes: u64) {
        self.0[class(rows)][size(bytes)].note(took, bytes);
    }

    /// Expected seconds of a computation; optimistic for sizes with few samples. `None` if nothing
    /// was measured.
    pub(super) fn seconds(&self, rows: usize, bytes: u64) -> Option<f64> {
        let (rates, at) = (&self.0[class(rows)], size(bytes));
        let a_byte = rates[at].sure().or_else(|| {
            let below = (0..at).rev().find_map(|s| rates[s].sure());
            let above = || rates[at + 1..].iter().find_map(Rate::sure);
            let hoped = below.map(|a_byte| a_byte / 2.0).or_else(above);
            let measured = rates.iter().find_map(Rate::a_byte);
            match (rates[at].a_byte(), hoped) {
                (Some(found), Some(hoped)) => Some(found.min(hoped)),
                (found, hoped) => found.or(hoped).or(measured),
            }
        })?;
        Some(a_byte * bytes as f64)
    }

    /// Whether computations with `rows` rows were measured often enough to predict their time.
    pub(super) fn are_known(&self, rows: usize) -> bool {
        self.0[class(rows)].iter().any(|rate| rate.sure().is_some())
    }

    /// Forgets the measurements of computations with `rows` rows.
    pub(super) fn forget(&mut self, rows: usize) {
        self.0[class(rows)] = [Rate::default(); SIZES];
    }

    /// Forgets the measurements of the size class above that of `bytes`, so that it is tried again.
    pub(super) fn forget_larger(&mut self, rows: usize, bytes: u64) {
        if let Some(rate) = self.0[class(rows)].get_mut(size(bytes) + 1) {
            *rate = Rate::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn note(rates: &mut Rates, n: u32, us: u64, bytes: u64) {
        for _ in 0..n {
            rates.note(1, Duration::from_micros(us), bytes);
        }
    }

    fn us(rates: &Rates, bytes: u64) -> Option<u64> {
        let seconds = rates.seconds(1, bytes)?;
        Some((seconds * 1e6).round() as u64)
    }

    #[test]
    fn what_was_not_measured_is_hoped_for() {
        let mut rates = Rates::default();
        assert_eq!(us(&rates, MIB), None);
        note(&mut rates, 1, 100, MIB);
        assert_eq!(
            (us(&rates, MIB), us(&rates, 4 * MIB)),
            (Some(100), Some(400))
        );
        assert!(!rates.are_known(1));
        note(&mut rates, SAMPLES_MIN, 100, MIB);
        assert!(rates.are_known(1) && !rates.are_known(2));
        // Half as much a byte, however much larger.
        assert_eq!(us(&rates, 4 * MIB), Some(200));
        assert_eq!(us(&rates, 64 * MIB), Some(3200));
        // One bad answer says little, and so many as to be sure say all.
        note(&mut rates, 1, 4000, 4 * MIB);
        assert_eq!(us(&rates, 4 * MIB), Some(200));
        note(&mut rates, SAMPLES_MIN - 1, 4000, 4 * MIB);
        assert_eq!(us(&rates, 4 * MIB), Some(4000));
        rates.forget_larger(1, MIB + 1);
        assert_eq!(us(&rates, 2 * MIB), Some(100));
        assert_eq!(us(&rates, 4 * MIB), Some(4000), "two sizes above");
        // Small ones cost at least as much a byte as large ones.
        let mut rates = Rates::default();
        note(&mut rates, SAMPLES_MIN, 800, 8 * MIB);
        assert_eq!(us(&rates, MIB), Some(100));
        rates.forget(1);
        assert_eq!(us(&rates, 8 * MIB), None);
    }

    #[test]
    fn the_first_answers_may_be_slow() {
        let mut rate = Rate::default();
        let ms = Duration::from_millis;
        for took in [90, 4, 5, 4] {
            rate.note(ms(took), 1 << 20);
        }
        let found = |rate: &Rate| (rate.a_byte().unwrap() * f64::from(1 << 20) * 1e3).round();
        assert_eq!(found(&rate), 4.0);
        rate.note(ms(6), 5 << 18);
        assert_eq!(found(&rate), 4.0, "4.8 ms");
        rate.note(ms(900), 1 << 20);
        assert_eq!(found(&rate), 5.0, "as 8.3 ms");
        rate.note(ms(0), 0);
        assert_eq!(rate.samples, SAMPLES_MIN + 2);
    }
}
