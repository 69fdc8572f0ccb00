//! Measured times of a model's passes that only decode, by their number of rows.

use std::time::Duration;

/// Maximum number of rows of a pass whose time is remembered.
pub(crate) const ROWS_MAX: usize = 128;

/// Number of passes after which a measured time is outdated.
pub(crate) const STALE_PASSES: u64 = 2048;

/// Times of a model's passes that only decode, by their rows.
#[derive(Debug)]
pub(crate) struct PassTimes {
    /// By rows: seconds, and the number of the pass in which they were measured last.
    rows: Vec<Option<(f64, u64)>>,
    passes: u64,
}

impl Default for PassTimes {
    fn default() -> Self {
        Self {
            rows: vec![None; ROWS_MAX + 1],
            passes: 0,
        }
    }
}

impl PassTimes {
    /// Notes the time of a pass with `rows` rows.
    pub(crate) fn note(&mut self, rows: usize, took: Duration) {
        self.passes += 1;
        let took = took.as_secs_f64();
        let passes = self.passes;
        if let Some(known) = self.rows.get_mut(rows) {
            let seconds = match known {
                // Now and then something else goes on, too.
                Some((before, at)) if passes - *at < STALE_PASSES => {
                    *before + (took.min(*before * 2.0) - *before) / 8.0
                }
                _ => took,
            };
            *known = Some((seconds, passes));
        }
    }

    /// Seconds of a pass of `rows` rows, if measured recently.
    pub(crate) fn recent(&self, rows: usize) -> Option<f64> {
        let (seconds, at) = (*self.rows.get(rows)?)?;
        (self.passes - at < STALE_PASSES).then_some(seconds)
    }

    /// The largest number of rows, at most `rows`, whose time was measured recently, and the
    /// seconds.
    fn recent_within(&self, rows: usize) -> Option<(usize, f64)> {
        let known = |n| Some((n, self.recent(n)?));
        (rows <= ROWS_MAX).then(|| (0..=rows).rev().find_map(known))?
    }

    /// Seconds of a pass of `rows` rows. If that was not measured recently, the time of the next
    /// smaller measured number of rows, so that `rows` is tried.
    pub(crate) fn seconds(&self, rows: usize) -> Option<f64> {
        self.recent_within(rows).map(|(_, seconds)| seconds)
    }

    /// Seconds of a decode pass of `rows` rows, given that a pass of `all` rows including these
    /// took `took` seconds. If it was not measured recently, it is interpolated between fewer and
    /// more rows, and at least the rows' share of that pass: while prompts come in, no pass has
    /// only tokens. `None` if nothing is known for as few rows.
    pub(crate) fn seconds_within(&self, rows: usize, all: usize, took: f64) -> Option<f64> {
        let (below, least) = self.recent_within(rows)?;
        if below == rows {
            return Some(least);
        }
        let above = (rows + 1..=ROWS_MAX).find_map(|n| Some((n, self.recent(n)?)));
        let between = above.map_or(least, |(above, most)| {
            let part = (rows - below) as f64 / (above - below) as f64;
            least + (most - least).max(0.0) * part
        });
        Some(between.max(took * rows as f64 / all.max(rows) as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(times: &mut PassTimes, rows: usize, seconds: f64) {
        times.note(rows, Duration::from_secs_f64(seconds));
    }

    #[test]
    fn rows_that_were_not_measured_lie_between_those_that_were() {
        let mut times = PassTimes::default();
        assert_eq!(times.seconds_within(8, 16, 1.0), None);
        note(&mut times, 1, 0.002);
        note(&mut times, 64, 0.004);
        note(&mut times, 128, 0.007);
        assert_eq!(times.seconds_within(64, 512, 1.0), Some(0.004));
        let seconds = times.seconds_within(96, 512, 0.007).unwrap();
        assert!((seconds - 0.0055).abs() < 1e-9, "{seconds}");
        // Measured long ago is not measured.
        for _ in 0..STALE_PASSES {
            note(&mut times, 1, 0.002);
        }
        assert_eq!(times.seconds_within(64, 512, 0.001), Some(0.002));
    }

    #[test]
    fn what_was_measured_of_few_rows_is_not_what_many_take() {
        let mut times = PassTimes::default();
        note(&mut times, 1, 0.002);
        assert_eq!(times.seconds_within(100, 200, 0.010), Some(0.005));
        // Of few rows in a long pass the part says nothing.
        assert_eq!(times.seconds_within(2, 512, 0.024), Some(0.002));
    }
}
