//! Times of the steps of a model's passes: a sliced pass cannot be stopped within a step. While
//! other requests were promised a gap between tokens, a pass has so few rows that its longest step
//! fits into it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::pass::work::{Amount, WorkRates};

/// Number of classes of passes by rows, one for each power of two.
pub(super) const CLASSES: usize = 16;

/// Number of rows of a pass whose steps were never measured, while other requests were promised a
/// gap.
const ROWS_FIRST: u32 = 64;

/// Passes are never shortened below this number of rows for the sake of their steps.
pub(crate) const ROWS_LEAST: u32 = 8;

/// Rate at which the estimate of the longest step falls towards shorter ones.
const FALLS: f64 = 1.0 / 64.0;

/// The longest steps of a model's passes, in seconds, by their rows.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    longest: [Option<f64>; CLASSES],
}

/// The size class of passes with `rows` rows.
pub(super) fn class(rows: u32) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

impl Pieces {
    /// Notes the longest step of a slice, in seconds. The estimate rises at once and falls slowly.
    pub(crate) fn note(&mut self, rows: u32, seconds: f64) {
        let known = &mut self.longest[class(rows)];
        *known = Some(match *known {
            Some(before) if seconds < before => before - (before - seconds) * FALLS,
            _ => seconds,
        });
    }

    /// Expected seconds of the longest step in a pass of `rows` rows; if not measured, estimated
    /// from the next smaller passes (whose steps take at most as long per row), else from the next
    /// larger ones. `None` if nothing was measured.
    pub(crate) fn seconds(&self, rows: u32) -> Option<f64> {
        let class = class(rows);
        let below = (0..=class).rev().find_map(|at| {
            let times = (1_u64 << (class - at)) as f64;
            Some(self.longest[at]? * times)
        });
        below.or_else(|| self.longest[class..].iter().copied().flatten().next())
    }

    /// Maximum number of rows, up to `most`, of a pass whose steps take at most `seconds`.
    pub(crate) fn rows_within(&self, seconds: f64, most: u32) -> u32 {
        if self.longest.iter().all(Option::is_none) {
            return most.min(ROWS_FIRST);
        }
        let fits = |rows: &u32| self.seconds(*rows).is_some_and(|took| took <= seconds);
        let powers = (0..CLASSES as u32).rev().map(|power| 1 << power);
        let rows = std::iter::once(most)
            .chain(powers.filter(|rows| *rows < most))
            .find(fits);
        rows.unwrap_or(0).max(ROWS_LEAST.min(most))
    }
}

/// Measures the steps of a slice of a pass.
pub(crate) struct StepWatch {
    begun: Instant,
    /// The device's rates, if it computes asynchronously.
    rates: Option<WorkRates>,
    /// End of the last step, and the work queued until then.
    last: Cell<(Instant, Amount)>,
    /// Whether the next step may wait for work that was queued before the slice.
    is_behind: Cell<bool>,
    longest: Cell<Option<Duration>>,
}

impl StepWatch {
    /// Starts to measure a slice; `is_behind` says that the device has earlier work to do.
    pub(crate) fn new(begun: Instant, rates: Option<WorkRates>, is_behind: bool) -> Self {
        Self {
            begun,
            rates,
            last: Cell::new((begun, Amount::default())),
            is_behind: Cell::new(is_behind),
            longest: Cell::new(None),
        }
    }

    /// Estimated device time for an amount of work; zero if the device computes synchronously.
    pub(crate) fn work(&self, amount: Amount) -> Duration {
        self.rates
            .map_or(Duration::ZERO, |rates| rates.time(amount))
    }

    /// Records that a step ended at `now` when `given` was queued since the slice began. Returns
    /// the slice's time so far and its longest step. The first step's wait for earlier work is not
    /// counted.
    pub(crate) fn step(&self, now: Instant, given: Amount) -> (Duration, Duration) {
        let (last, before) = self.last.replace((now, given));
        let work = self.work(given - before);
        let took = match self.is_behind.take() {
            true => work,
            false => now.saturating_duration_since(last).max(work),
        };
        let longest = self.longest.get().map_or(took, |longest| longest.max(took));
        self.longest.set(Some(longest));
        let elapsed = now.saturating_duration_since(self.begun);
        (elapsed.max(self.work(given)), longest)
    }

    /// The longest step of the slice that ended at `now`; `None` if the slice had one piece. Time
    /// after the last step counts only for a device that computes synchronously: else it is a wait
    /// for counted work.
    pub(crate) fn longest(&self, now: Instant) -> Option<Duration> {
        let longest = self.longest.get()?;
        let (last, _) = self.last.get();
        Some(match self.rates {
            Some(_) => longest,
            None => longest.max(now.saturating_duration_since(last)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_its_time_or_that_of_what_it_gives_the_device() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let at = |n| begin + ms(n);
        let bytes = |bytes| Amount { bytes, attended: 0 };
        let host = StepWatch::new(begin, None, false);
        assert_eq!(host.longest(at(90)), None, "in one piece");
        assert_eq!(host.step(at(3), bytes(10)), (ms(3), ms(3)));
        assert_eq!(host.step(at(4), bytes(20)), (ms(4), ms(3)));
        assert_eq!(host.longest(at(5)), Some(ms(3)));
        assert_eq!(host.longest(at(9)), Some(ms(5)));
        let rates = WorkRates {
            bytes_per_s: 1000.0,
            attention: 1e-3,
        };
        let card = StepWatch::new(begin, Some(rates), false);
        assert_eq!(card.step(at(1), bytes(20)), (ms(20), ms(20)));
        assert_eq!(card.step(at(2), bytes(25)), (ms(25), ms(20)));
        let attended = Amount {
            attended: 30,
            ..bytes(26)
        };
        assert_eq!(card.step(at(3), attended), (ms(56), ms(31)));
        assert_eq!(card.longest(at(25)), Some(ms(31)));
        // The first step waits for what others gave the device.
        let behind = StepWatch::new(begin, Some(rates), true);
        assert_eq!(behind.step(at(90), bytes(2)), (ms(90), ms(2)));
        assert_eq!(behind.step(at(93), bytes(4)), (ms(93), ms(3)));
    }

    #[test]
    fn a_pass_has_as_many_rows_as_its_longest_step_allows() {
        let mut pieces = Pieces::default();
        assert_eq!(pieces.rows_within(0.01, 4096), ROWS_FIRST);
        assert_eq!((pieces.rows_within(0.01, 5), pieces.seconds(5)), (5, None));
        pieces.note(64, 0.001);
        // Larger ones are tried as far as they fit where each row costs as much.
        assert_eq!(pieces.rows_within(0.005, 4096), 256);
        assert_eq!(pieces.rows_within(0.005, 200), 200);
        // They are cheaper than that.
        pieces.note(256, 0.002);
        assert_eq!(pieces.rows_within(0.005, 4096), 512);
        pieces.note(512, 0.006);
        assert_eq!(pieces.rows_within(0.005, 4096), 256);
        assert_eq!(pieces.rows_within(0.0001, 4096), ROWS_LEAST);
        // Of fewer rows than were measured nothing is known but that they take no longer.
        assert_eq!(pieces.seconds(1), Some(0.001));
    }

    #[test]
    fn what_is_known_rises_at_once_and_falls_slowly() {
        let mut pieces = Pieces::default();
        pieces.note(8, 0.001);
        pieces.note(8, 0.004);
        assert_eq!(pieces.seconds(8), Some(0.004));
        pieces.note(8, 0.001);
        assert!(pieces.seconds(8).unwrap() > 0.0039);
        for _ in 0..400 {
            pieces.note(8, 0.001);
        }
        assert!(pieces.seconds(8).unwrap() < 0.0011);
    }
}
