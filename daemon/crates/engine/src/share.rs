//! How much of a prompt a pass takes in while somebody waits for his next token: so much that the pass takes at most some
//! times what it takes without. The times are measured, since what a row costs depends on the device, the model and how
//! many rows there are.
//!
//! One long prompt beside many texts is to at most double the time between tokens. The more of the requests still have no token at
//! all, the longer a pass may take: that many waiting prompts are worth more than the others' pace.

use std::time::Duration;

/// How much longer a pass may take for one prompt a decoding sequence.
const LONGER_A_PROMPT: f64 = 4.0;

/// How much longer it may take at least.
const LONGER_LEAST: f64 = 1.0;

/// Fewest rows: below it a pass costs about the same.
const ROWS_MIN: f64 = 16.0;

/// Rows before anything was measured.
const ROWS_AT_FIRST: f64 = 64.0;

/// A pass beyond this part more than it may take was too long.
const TOLERANCE: f64 = 1.05;

/// Passes for which a size that was too long is not tried again.
const CEILING_PASSES: u32 = 1024;

/// How many times the lowest price of a row few rows may cost: beyond it a pass is long whatever it takes in, as one far into a
/// long text may be, and takes in all that it may.
const PRICE_MAX: f64 = 2.0;

/// How fast the lowest price is forgotten, a pass.
const FORGETTING: f64 = 1.001;

/// Passes that do so, before fewer rows are tried again.
const FREE_PASSES: u32 = 32;

/// What was measured for one model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PromptShare {
    rows: f64,
    ceiling: Option<Ceiling>,
    /// Seconds a row where it was lowest, which is forgotten slowly.
    lowest: f64,
    /// Passes left that take in all that they may.
    free: u32,
}

/// A size that was too long: prices have steps, and a step is not to be climbed again and again.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ceiling {
    rows: f64,
    /// Seconds that a pass was allowed to take longer.
    longer: f64,
    passes_left: u32,
}

/// A pass of prompts beside tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mixed {
    /// Rows of prompts.
    pub(crate) rows: u32,
    /// What the pass took.
    pub(crate) took: Duration,
    /// Seconds of a pass of the tokens alone, where that was measured.
    pub(crate) without: Option<f64>,
    /// Sequences that decode, at least 1.
    pub(crate) decoding: usize,
    /// Requests that have no token yet.
    pub(crate) waiting: usize,
}

impl Default for PromptShare {
    fn default() -> Self {
        Self {
            rows: ROWS_AT_FIRST,
            ceiling: None,
            lowest: f64::INFINITY,
            free: 0,
        }
    }
}

impl PromptShare {
    /// Rows of prompts that the next such pass takes, of `most`.
    pub(crate) fn rows(self, most: u32) -> u32 {
        // The first one tells what a row costs where there are many.
        if self.free > 0 || self.lowest == f64::INFINITY {
            return most;
        }
        (self.rows as u32).clamp(1, most.max(1))
    }

    /// Learns from a pass. `most` is what a pass takes in at most.
    pub(crate) fn note(&mut self, pass: Mixed, most: u32) {
        let Some(without) = pass.without else {
            self.rows = (self.rows * 2.0).min(f64::from(most));
            return;
        };
        let ratio = pass.waiting as f64 / pass.decoding.max(1) as f64;
        let longer = without * (ratio * LONGER_A_PROMPT).max(LONGER_LEAST);
        let rows = f64::from(pass.rows.max(1));
        let each = (pass.took.as_secs_f64() - without) / rows;
        // What fits by this pass's price of a row. A pass is noisy and prices have steps, so no more than half as many or
        // twice as many rows as this one had.
        let fits = if each > 0.0 {
            longer / each
        } else {
            rows * 2.0
        };
        let wanted = fits.clamp(rows / 2.0, rows * 2.0);
        let too_long = each * rows > (without + longer) * TOLERANCE - without;
        if each > 0.0 {
            self.lowest = (self.lowest * FORGETTING).min(each);
        }
        if rows > self.rows {
            // It was not held to these rows, and says nothing of them.
            self.free = self.free.saturating_sub(1);
            return;
        }
        if too_long && rows <= ROWS_MIN && each > self.lowest * PRICE_MAX {
            self.free = FREE_PASSES;
            self.rows = ROWS_AT_FIRST;
            return;
        }
        // A prompt's end may have been shorter than what was allowed, and says little of longer ones.
        if !too_long && rows < self.rows / 2.0 {
            return;
        }
        self.ceiling = self.ceiling.and_then(|c| {
            let passes_left = c.passes_left.checked_sub(1)?;
            (longer <= c.longer * TOLERANCE).then_some(Ceiling { passes_left, ..c })
        });
        if too_long {
            self.ceiling = Some(Ceiling {
                rows: rows * 0.9,
                longer,
                passes_left: CEILING_PASSES,
            });
        }
        let most = self
            .ceiling
            .map_or(f64::INFINITY, |c| c.rows)
            .min(f64::from(most));
        self.rows = wanted.min(most).max(ROWS_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows after many passes on a device where a pass of 8 tokens takes 4 ms, beside `waiting` prompts, and the time of
    /// the last of them in ms.
    fn settled(cost: impl Fn(f64) -> f64, waiting: usize) -> (u32, f64) {
        let mut share = PromptShare::default();
        let mut last = 0.0;
        for _ in 0..50 {
            let rows = share.rows(512);
            last = cost(f64::from(rows));
            let pass = Mixed {
                rows,
                took: Duration::from_secs_f64((4.0 + last) / 1e3),
                without: Some(4e-3),
                decoding: 8,
                waiting,
            };
            share.note(pass, 512);
        }
        (share.rows(512), 4.0 + last)
    }

    #[test]
    fn one_prompt_at_most_doubles_the_time_between_tokens() {
        for each in [0.01, 0.05, 0.2] {
            let (rows, took) = settled(|rows| rows * each, 1);
            assert!(took <= 8.01, "{each}: {rows} rows, {took} ms");
            let most = (4.0 / each).min(512.0) as u32;
            assert!(rows + 1 >= most, "{each}: {rows} of {most} rows");
        }
    }

    #[test]
    fn many_waiting_prompts_get_more() {
        let (few, _) = settled(|rows| rows * 0.05, 1);
        let (many, took) = settled(|rows| rows * 0.05, 16);
        assert!(many > 4 * few && took > 24.0, "{few}, {many}, {took}");
    }

    #[test]
    fn a_price_with_a_step_stays_near_the_bound() {
        // Beyond 56 rows another kernel, with a price of its own.
        let cost = |rows: f64| {
            if rows > 56.0 {
                9.0 + rows * 0.02
            } else {
                rows * 0.07
            }
        };
        let mut share = PromptShare::default();
        let mut over = 0;
        for _ in 0..100 {
            let rows = share.rows(512);
            let extra = cost(f64::from(rows));
            over += usize::from(extra > 5.0);
            let pass = Mixed {
                rows,
                took: Duration::from_secs_f64((4.0 + extra) / 1e3),
                without: Some(4e-3),
                decoding: 8,
                waiting: 1,
            };
            share.note(pass, 512);
        }
        assert!(over <= 6, "{over} of 100 passes are much longer");
        assert!((40..=56).contains(&share.rows(512)), "{share:?}");
    }

    #[test]
    fn what_a_device_cannot_do_in_time_gets_the_fewest_rows() {
        assert_eq!(settled(|rows| rows * 100.0, 1).0, ROWS_MIN as u32);
    }

    #[test]
    fn a_pass_that_is_long_whatever_it_takes_in_takes_in_much() {
        let mut share = PromptShare::default();
        let (mut few, mut passes) = (0, 0);
        let mut left = 16_384;
        while left > 0 {
            let rows = share.rows(512).min(left);
            left -= rows;
            passes += 1;
            few += u32::from(rows < 512);
            let pass = Mixed {
                rows,
                took: Duration::from_secs_f64((4.0 + 10.0 + 0.04 * f64::from(rows)) / 1e3),
                without: Some(4e-3),
                decoding: 8,
                waiting: 1,
            };
            share.note(pass, 512);
        }
        assert!(passes < 48 && few < 8, "{passes} passes, {few} of few rows");
    }

    #[test]
    fn a_long_prompt_on_a_card_with_steps_stays_within_the_bound() {
        // Near what an H200 was seen to take for an 8B model, beside 8 tokens: kernels of 32 and of 64 rows, and attention
        // to what came before.
        let took = |rows: u32, context: u32| {
            let products = match rows + 8 {
                0..=32 => 5.8,
                33..=64 => 9.5,
                65..=128 => 17.0,
                _ => 22.0,
            };
            products + 0.5 + f64::from(context) * f64::from(rows.max(32)) / 16_384.0 * 0.04
        };
        // Others have shown what a row costs in long passes.
        let mut share = PromptShare {
            lowest: 0.04e-3,
            ..PromptShare::default()
        };
        let (mut context, mut passes, mut long) = (0, 0, 0);
        while context < 16_384 {
            let rows = share.rows(512).min(16_384 - context);
            let ms = took(rows, context);
            context += rows;
            passes += 1;
            long += usize::from(ms > 2.0 * 4.3 * TOLERANCE);
            let pass = Mixed {
                rows,
                took: Duration::from_secs_f64(ms / 1e3),
                without: Some(4.3e-3),
                decoding: 8,
                waiting: 1,
            };
            share.note(pass, 512);
        }
        assert!(
            long * 100 < passes,
            "{long} of {passes} passes are too long"
        );
        assert!(passes < 800, "{passes} passes");
    }

    #[test]
    fn the_short_end_of_a_prompt_changes_little() {
        let mut share = PromptShare {
            rows: 256.0,
            lowest: 0.04e-3,
            ..PromptShare::default()
        };
        let pass = Mixed {
            rows: 3,
            took: Duration::from_millis(4),
            without: Some(4e-3),
            decoding: 8,
            waiting: 1,
        };
        share.note(pass, 512);
        assert_eq!(share.rows(512), 256);
    }
}
