//! Cost of prompt rows beside tokens, by the last such pass. If the tokens have a promised gap, a
//! pass has as many prompt rows as fit into the rest of the gap.

use std::time::Duration;

use crate::pass::share::{FIRST, ROWS_MIN, SIZES, TOLERANCE, prompt_rows, smallest};

/// Time of a model's last pass that had rows of prompts beside tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RowPrice {
    last: Option<Last>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Last {
    /// Number of prompt rows in the pass.
    rows: u32,
    /// Seconds that the pass took, and that it would have taken without prompts.
    seconds: f64,
    without: f64,
}

impl RowPrice {
    /// Records a pass with `rows` prompt rows; without them it would have taken `without` seconds.
    pub(crate) fn note(&mut self, rows: u32, took: Duration, without: Option<f64>) {
        // The few rows at a prompt's end say little.
        if let Some(without) = without.filter(|_| rows >= ROWS_MIN) {
            self.last = Some(Last {
                rows,
                seconds: took.as_secs_f64(),
                without,
            });
        }
    }

    /// Seconds of the last pass that had prompt rows beside tokens.
    pub(crate) fn seconds(self) -> Option<f64> {
        self.last.map(|last| last.seconds)
    }

    /// Maximum number of prompt rows, up to `most`, for a pass beside `tokens` rows that is
    /// expected to take at most `bound` seconds. At most twice as many as the last pass had, since
    /// much larger passes are not known.
    pub(crate) fn rows_within(self, tokens: u32, most: u32, bound: f64) -> u32 {
        let least = smallest(tokens);
        let Some(last) = self.last else {
            return prompt_rows(FIRST.max(least), tokens).min(most.max(1));
        };
        let each = (last.seconds - last.without).max(0.0) / f64::from(last.rows.max(1));
        let fits = |size: &usize| {
            let rows = prompt_rows(*size, tokens);
            let expected = last.without + f64::from(rows) * each;
            rows <= last.rows.saturating_mul(2).max(SIZES[FIRST]) && expected <= bound * TOLERANCE
        };
        let size = (least..SIZES.len()).rev().find(fits).unwrap_or(least);
        prompt_rows(size, tokens).min(most.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt beside 8 tokens, whose passes take `ms(rows, position)`: the longest pass in ms but
    /// for the first one, and the mean of rows.
    fn prompt(bound: f64, ms: impl Fn(u32, u32) -> f64) -> (f64, u32) {
        let (mut price, mut position, mut passes, mut longest) = (RowPrice::default(), 0, 0, 0.0);
        while position < 65_536 {
            let rows = price.rows_within(8, 512, bound / 1e3);
            let took = ms(rows, position);
            if passes > 0 {
                longest = f64::max(longest, took);
            }
            price.note(rows, Duration::from_secs_f64(took / 1e3), Some(4e-3));
            (position, passes) = (position + rows, passes + 1);
        }
        (longest, position / passes)
    }

    #[test]
    fn passes_are_as_long_as_they_may_be_and_no_longer() {
        for each in [0.01, 0.05, 0.2, 1.0] {
            // Rows cost more the farther they are into the text.
            let cost = |rows: u32, position: u32| {
                4.0 + f64::from(rows) * each * (1.0 + f64::from(position) / 65_536.0)
            };
            let (longest, rows) = prompt(40.0, cost);
            assert!(longest <= 40.0, "{each}: {longest}");
            let could = 36.0 / (2.0 * each);
            assert!(f64::from(rows) * 2.0 >= could.min(512.0), "{each}: {rows}");
        }
        // Not even the fewest fit.
        let (_, rows) = prompt(10.0, |rows, _| 4.0 + f64::from(rows) * 10.0);
        assert!(rows <= 2 * ROWS_MIN, "{rows}");
    }

    #[test]
    fn what_is_not_known_is_tried_with_few_rows() {
        assert_eq!(RowPrice::default().rows_within(8, 512, 1.0), 56);
        assert_eq!(RowPrice::default().rows_within(8, 20, 1.0), 20);
        let mut price = RowPrice::default();
        price.note(3, Duration::from_millis(90), Some(4e-3));
        assert_eq!((price, price.seconds()), (RowPrice::default(), None));
        price.note(56, Duration::from_millis(5), Some(4e-3));
        assert_eq!(price.rows_within(8, 4096, 1.0), 88);
        assert_eq!(price.seconds(), Some(5e-3));
    }
}
