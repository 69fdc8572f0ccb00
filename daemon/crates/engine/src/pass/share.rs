//! Number of rows of a long prompt in a pass while other requests wait for their next token, chosen
//! so that the pass takes at most a multiple of its time without the prompt. The times are
//! measured, since what a row costs depends on the device, the model, how many rows there are and
//! how far into the text they are.
//!
//! Kernels process blocks of rows, so the time of a pass grows in steps: passes have one of a few
//! sizes, and the next larger one is used if it is expected to fit, the next smaller one if two
//! passes in a row did not.
//!
//! ```text
//!   held --(the smallest size is far too long, twice)--> let go: up to some times longer
//!    ^                                                                    |
//!    +--------------(it fits again, or a new prompt begins)---------------+
//! ```
//!
//! The smallest size is kept even if it is a little too long: the others' pace has priority.
//!
//! One long prompt beside many decoding requests may at most double the time between tokens. The
//! more requests have no token at all, the longer a pass may take: many waiting prompts matter more
//! than the others' pace.

use std::time::Duration;

/// A pass may take longer by this factor for each waiting prompt per decoding sequence.
const LONGER_A_PROMPT: f64 = 4.0;

/// Minimum factor by which a pass with prompt rows may take longer.
const LONGER_LEAST: f64 = 1.0;

/// Factor by which passes with prompts may take longer while other models have requests. A token
/// waits for slices of those models, too, so a short pass adds little to the time between tokens.
const LONGER_BESIDE_OTHERS: f64 = 4.0;
const SECONDS_BESIDE_OTHERS: f64 = 0.010;

/// Possible numbers of rows in a pass, tokens included: the block sizes of kernels, and some
/// between.
pub(super) const SIZES: [u32; 18] = [
    12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
];

/// Index of the first size, before anything was measured: 64 rows.
pub(super) const FIRST: usize = 5;

/// Minimum number of prompt rows: with the tokens of 8 sequences, as many as kernels for few rows
/// take at a time.
pub(super) const ROWS_MIN: u32 = 8;

/// A pass counts as too long beyond this part of its allowed time, since the engine's work between
/// two passes also delays tokens.
pub(crate) const TOLERANCE: f64 = 0.97;

/// A size that takes this many times the allowed time is not tried a second time, except the
/// smallest one.
const FAR_TOO_LONG: f64 = 1.5;

/// Number of passes for which a size that was too long at some position is not tried again from
/// that position on.
const CEILING_PASSES: u32 = 1024;

/// Factor on the allowed time for a pass that is too long at every size, such as one far into a
/// very long text.
const LET_GO: f64 = 8.0;

/// The number of prompt rows in a model's next pass, and the measured times that it follows from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PromptShare {
    /// Index into [`SIZES`] of the next pass.
    size: usize,
    ceiling: Option<Ceiling>,
    /// Whether the last pass was too long.
    over: bool,
    /// Whether even the smallest size was far too long, so that larger ones are allowed.
    let_go: bool,
    /// Size and seconds of the pass before.
    last: Option<(usize, f64)>,
    /// Position in its text of the last prompt's rows.
    position: u32,
}

/// A size that was too long from a position in the text on, so that it is not tried again and
/// again.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ceiling {
    size: usize,
    position: u32,
    /// Seconds by which the pass was allowed to take longer.
    longer: f64,
    passes_left: u32,
}

/// A pass that had rows of prompts beside tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mixed {
    /// Number of prompt rows in the pass.
    pub(crate) rows: u32,
    /// Number of decode rows, at least 1.
    pub(crate) tokens: u32,
    /// The largest first position of any prompt's rows in the pass.
    pub(crate) position: u32,
    /// Time that the pass took.
    pub(crate) took: Duration,
    /// Measured seconds of a pass of the decode rows alone; `None` if not measured.
    pub(crate) without: Option<f64>,
    /// Number of decoding sequences, at least 1.
    pub(crate) decoding: usize,
    /// Number of requests that have no token yet.
    pub(crate) waiting: usize,
    /// Whether other models have requests.
    pub(crate) beside_others: bool,
}

impl Mixed {
    /// Seconds by which the pass may take longer than `without`, the seconds without prompts.
    fn longer(&self, without: f64) -> f64 {
        let longer = without * longer(self.waiting, self.decoding);
        match self.beside_others {
            true => longer.max((without * LONGER_BESIDE_OTHERS).min(SECONDS_BESIDE_OTHERS)),
            false => longer,
        }
    }
}

impl Default for PromptShare {
    fn default() -> Self {
        Self {
            size: FIRST,
            ceiling: None,
            over: false,
            let_go: false,
            last: None,
            position: 0,
        }
    }
}

/// Factor by which decode passes may take longer than alone, while `waiting` requests have no token
/// yet and `decoding` decode.
pub(crate) fn longer(waiting: usize, decoding: usize) -> f64 {
    let ratio = waiting as f64 / decoding.max(1) as f64;
    (ratio * LONGER_A_PROMPT).max(LONGER_LEAST)
}

/// The smallest size of a pass that leaves rows for prompts beside `tokens` rows.
pub(super) fn smallest(tokens: u32) -> usize {
    let fits = SIZES.iter().position(|size| *size >= tokens + ROWS_MIN);
    fits.unwrap_or(SIZES.len() - 1)
}

/// Number of prompt rows in a pass of the size with index `size`, beside `tokens` decode rows.
pub(super) fn prompt_rows(size: usize, tokens: u32) -> u32 {
    SIZES[size].saturating_sub(tokens).max(ROWS_MIN)
}

impl PromptShare {
    /// Number of prompt rows in the next pass beside `tokens` decode rows, at most `most`.
    pub(crate) fn rows(self, tokens: u32, most: u32) -> u32 {
        prompt_rows(self.size.max(smallest(tokens)), tokens).min(most.max(1))
    }

    /// Learns from the time of a pass. A pass has at most `most` rows.
    pub(crate) fn note(&mut self, pass: Mixed, most: u32) {
        let least = smallest(pass.tokens);
        let size = self.size.max(least);
        let (allowed, rows) = (prompt_rows(size, pass.tokens), pass.rows.max(1));
        if rows > allowed {
            // It was not held to this size, and says nothing of it.
            return;
        }
        let Some(without) = pass.without else {
            self.size = self.larger(size, pass.tokens, most).unwrap_or(size);
            return;
        };
        // Another prompt: what was found far into the last one does not hold.
        if pass.position < self.position / 2 {
            (self.let_go, self.over) = (false, false);
        }
        self.position = pass.position;
        let longer = pass.longer(without);
        let took = pass.took.as_secs_f64();
        let before = self.last.replace((size, took));
        if self.let_go {
            if size == least && took <= (without + longer) * TOLERANCE {
                self.let_go = false;
            } else {
                self.while_let_go(size, least, (took, without, longer), before, &pass, most);
                return;
            }
        }
        let bound = without + longer;
        if took > bound * TOLERANCE {
            let far = took > bound * FAR_TOO_LONG;
            // Of the smallest size one slow pass says nothing: if it was let go, every pass of the
            // prompt would be longer.
            let is_clear = far && size > least;
            if !std::mem::replace(&mut self.over, true) && !is_clear {
                return;
            }
            self.over = false;
            if size == least {
                if far {
                    (self.let_go, self.ceiling) = (true, None);
                }
                return;
            }
            self.close(size, longer);
            // What fits by this pass's price of a row, one size down at least.
            let each = (took - without) / f64::from(rows);
            let fits = |s: usize| {
                without + f64::from(prompt_rows(s, pass.tokens)) * each <= bound * TOLERANCE
            };
            let down = (least..size).rev().find(|&s| fits(s));
            self.size = down.unwrap_or(least);
            return;
        }
        self.over = false;
        // A prompt's end may have been shorter than what was allowed, and says little of longer
        // ones.
        if rows * 4 < allowed * 3 {
            return;
        }
        self.pass_by();
        if let Some(next) = self.larger(size, pass.tokens, most)
            && !self.is_closed(next, longer)
        {
            let each = (took - without).max(0.0) / f64::from(rows);
            let more = f64::from(prompt_rows(next, pass.tokens) - allowed);
            if took + more * each <= bound * TOLERANCE {
                self.size = next;
            }
        }
    }

    /// Finds a larger size, while the allowed time does not apply, as long as its rows are much
    /// cheaper than those of the size before.
    fn while_let_go(
        &mut self,
        size: usize,
        least: usize,
        (took, without, longer): (f64, f64, f64),
        before: Option<(usize, f64)>,
        pass: &Mixed,
        most: u32,
    ) {
        self.pass_by();
        if let Some((smaller, took_before)) = before
            && smaller + 1 == size
        {
            let rows = |s| f64::from(prompt_rows(s, pass.tokens));
            let cheap = took - took_before
                <= (took_before - without).max(0.0) / 2.0 * (rows(size) / rows(smaller) - 1.0);
            if !cheap {
                self.close(size, longer);
                self.size = smaller;
                return;
            }
        }
        if took > without + longer * LET_GO {
            self.size = size.saturating_sub(1).max(least);
        } else if let Some(next) = self.larger(size, pass.tokens, most)
            && !self.is_closed(next, longer)
        {
            self.size = next;
        }
    }

    /// The next larger size, if it is allowed.
    fn larger(&self, size: usize, tokens: u32, most: u32) -> Option<usize> {
        let next = (size + 1 < SIZES.len()).then_some(size + 1)?;
        (prompt_rows(size, tokens) < most).then_some(next)
    }

    fn close(&mut self, size: usize, longer: f64) {
        self.ceiling = Some(Ceiling {
            size,
            position: self.position,
            longer,
            passes_left: CEILING_PASSES,
        });
    }

    fn pass_by(&mut self) {
        self.ceiling = self.ceiling.and_then(|c| {
            let passes_left = c.passes_left.checked_sub(1)?;
            Some(Ceiling { passes_left, ..c })
        });
    }

    /// Whether a size was too long at an earlier position with as little time allowed.
    fn is_closed(&self, size: usize, longer: f64) -> bool {
        self.ceiling.is_some_and(|c| {
            size >= c.size && self.position >= c.position / 2 && longer <= c.longer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::times::PassTimes;

    /// A prompt of `length` beside 8 tokens, whose passes take `ms(rows, position)`. Returns what
    /// each took, and the rows of the last whole one.
    fn prompt(
        share: &mut PromptShare,
        length: u32,
        waiting: usize,
        ms: impl Fn(u32, u32) -> f64,
    ) -> (Vec<f64>, u32) {
        let (mut position, mut took, mut last) = (0, Vec::new(), 0);
        while position < length {
            let rows = share.rows(8, 512).min(length - position);
            let pass = Mixed {
                rows,
                tokens: 8,
                position,
                took: Duration::from_secs_f64(ms(rows, position) / 1e3),
                without: Some(4e-3),
                decoding: 8,
                waiting,
                beside_others: false,
            };
            took.push(ms(rows, position));
            share.note(pass, 512);
            position += rows;
            if position < length {
                last = rows;
            }
        }
        (took, last)
    }

    /// The part of passes that took longer than twice the 4 ms of the tokens alone.
    fn too_long(took: &[f64]) -> f64 {
        took.iter().filter(|ms| **ms > 8.0 * TOLERANCE).count() as f64 / took.len() as f64
    }

    /// Near what an H200 was seen to take for an 8B model, beside 8 tokens: kernels of 32 and of 64
    /// rows, and attention to what came before.
    fn card(rows: u32, position: u32) -> f64 {
        let products = match rows + 8 {
            0..=16 => 4.6,
            17..=32 => 5.6,
            33..=64 => 7.8,
            65..=128 => 13.0,
            _ => 20.0,
        };
        products + f64::from(position) / 16_384.0 * 1.8 + f64::from(rows) * 0.005
    }

    #[test]
    fn one_prompt_at_most_doubles_the_time_between_tokens() {
        for each in [0.01, 0.05, 0.2] {
            let (took, rows) = prompt(&mut PromptShare::default(), 16_384, 1, |rows, _| {
                4.0 + f64::from(rows) * each
            });
            assert!(too_long(&took) < 0.01, "{each}: {took:?}");
            let next = SIZES.iter().find(|s| **s > rows + 8).unwrap() - 8;
            assert!(
                8.0 * TOLERANCE - 4.0 < f64::from(next) * each || rows == 512,
                "{each}: {rows}"
            );
        }
    }

    /// Near what an H200 was seen to take for an 8B model, at short positions, in ms.
    fn few_or_many(rows: usize) -> f64 {
        let known = [
            (1, 1.8),
            (8, 2.55),
            (32, 3.47),
            (64, 4.36),
            (128, 6.85),
            (600, 24.0),
            (4096, 140.0),
        ];
        let at = known.iter().position(|&(n, _)| rows <= n).unwrap().max(1);
        let ((below, least), (above, most)) = (known[at - 1], known[at]);
        least + (most - least) * (rows - below) as f64 / (above - below) as f64
    }

    /// Of requests that come together the first have not said all before the last begin, whatever
    /// was measured before of tokens alone.
    #[test]
    fn the_last_of_many_prompts_come_in_while_the_first_decode() {
        const REQUESTS: usize = 128;
        const LENGTH: usize = 128;
        for measured in [&[1][..], &[1, 8, 32, 64], &[1, 8, 32, 64, 128]] {
            let (mut share, mut times) = (PromptShare::default(), PassTimes::default());
            for &rows in measured {
                times.note(rows, Duration::from_secs_f64(few_or_many(rows) / 1e3));
            }
            // Rows of prompts that are computed, and passes since the first request decodes.
            let (mut computed, mut passes) = (0, 0);
            while computed < REQUESTS * LENGTH {
                let decoding = computed / LENGTH;
                let most = match decoding {
                    0 => 2048,
                    n => share.rows(n as u32, 512) as usize,
                };
                let rows = most.min(REQUESTS * LENGTH - computed);
                let took = few_or_many(decoding + rows) / 1e3;
                let position = (computed % LENGTH) as u32;
                computed += rows;
                if decoding == 0 {
                    continue;
                }
                passes += 1;
                assert!(passes < LENGTH, "{measured:?}: {computed} rows");
                let pass = Mixed {
                    rows: rows as u32,
                    tokens: decoding as u32,
                    position,
                    took: Duration::from_secs_f64(took),
                    without: times.seconds_within(decoding, decoding + rows, took),
                    decoding,
                    waiting: REQUESTS - computed / LENGTH,
                    beside_others: false,
                };
                share.note(pass, 512);
            }
        }
    }

    #[test]
    fn a_long_prompt_on_a_card_with_steps_stays_within_the_bound() {
        let mut share = PromptShare::default();
        for _ in 0..3 {
            let (took, _) = prompt(&mut share, 16_384, 1, card);
            assert!(too_long(&took) < 0.01, "{took:?}");
            assert!(took.len() < 800, "{} passes", took.len());
        }
    }

    #[test]
    fn one_slow_pass_changes_nothing_and_two_do() {
        let mut share = PromptShare::default();
        prompt(&mut share, 4096, 1, |_, _| 7.7);
        let held = share.rows(8, 512);
        let pass = |ms: f64| Mixed {
            rows: held,
            tokens: 8,
            position: 5000,
            took: Duration::from_secs_f64(ms / 1e3),
            without: Some(4e-3),
            decoding: 8,
            waiting: 1,
            beside_others: false,
        };
        share.note(pass(9.0), 512);
        assert_eq!(share.rows(8, 512), held);
        share.note(pass(7.0), 512);
        share.note(pass(9.0), 512);
        assert_eq!(share.rows(8, 512), held);
        share.note(pass(9.0), 512);
        assert!(share.rows(8, 512) < held);
    }

    #[test]
    fn one_very_slow_pass_of_the_smallest_size_does_not_let_it_go() {
        let mut share = PromptShare::default();
        // What a mixture of experts was seen to take: 8 rows fit, 16 do not.
        let cost = |rows: u32, _| 7.0 + f64::from(rows) * 0.09;
        let (_, rows) = prompt(&mut share, 4096, 1, cost);
        assert_eq!(rows, ROWS_MIN);
        let pass = |ms: f64, share: &PromptShare| Mixed {
            rows: share.rows(8, 512),
            tokens: 8,
            position: 5000,
            took: Duration::from_secs_f64(ms / 1e3),
            without: Some(4e-3),
            decoding: 8,
            waiting: 1,
            beside_others: false,
        };
        share.note(pass(25.0, &share), 512);
        assert!(!share.let_go && share.rows(8, 512) == ROWS_MIN);
        share.note(pass(7.7, &share), 512);
        share.note(pass(25.0, &share), 512);
        assert!(!share.let_go);
        share.note(pass(25.0, &share), 512);
        assert!(share.let_go);
    }

    #[test]
    fn beside_other_models_a_pass_may_take_longer_and_that_is_bounded() {
        let pass = |beside_others| Mixed {
            rows: 56,
            tokens: 8,
            position: 0,
            took: Duration::from_millis(8),
            without: None,
            decoding: 8,
            waiting: 1,
            beside_others,
        };
        assert_eq!(pass(false).longer(0.002), 0.002);
        assert_eq!(pass(true).longer(0.002), 0.008);
        assert_eq!(pass(true).longer(0.004), 0.010);
        assert_eq!(pass(true).longer(0.040), 0.040, "as long as alone");
    }

    #[test]
    fn many_waiting_prompts_get_more() {
        let cost = |rows: u32, _| 4.0 + f64::from(rows) * 0.05;
        let (_, few) = prompt(&mut PromptShare::default(), 65_536, 1, cost);
        let (_, many) = prompt(&mut PromptShare::default(), 65_536, 16, cost);
        assert!(many > 4 * few, "{few}, {many}");
    }

    #[test]
    fn what_a_device_cannot_do_in_time_gets_few_rows() {
        let (took, rows) = prompt(&mut PromptShare::default(), 4096, 1, |rows, _| {
            4.0 + f64::from(rows) * 100.0
        });
        assert_eq!(rows, ROWS_MIN, "{took:?}");
    }

    #[test]
    fn a_pass_that_is_long_whatever_it_takes_in_takes_in_more() {
        let (took, rows) = prompt(&mut PromptShare::default(), 16_384, 1, |rows, _| {
            14.0 + f64::from(rows) * 0.01
        });
        assert!(took.len() < 100 && rows >= 256, "{rows}, {}", took.len());
        // But not more than it may then.
        let (took, _) = prompt(&mut PromptShare::default(), 16_384, 1, |rows, _| {
            14.0 + f64::from(rows) * 0.1
        });
        let longest = took.iter().fold(0.0f64, |a, b| a.max(*b));
        assert!(longest < 4.0 + 4.0 * LET_GO + 26.0, "{longest}");
    }

    #[test]
    fn a_pass_that_is_a_little_too_long_does_not_get_longer() {
        // More rows are cheap, but 8 of them do not fit already from position 3,000 on.
        let cost =
            |rows: u32, position: u32| 7.6 + f64::from(rows) * 0.02 + f64::from(position) * 8e-5;
        let mut share = PromptShare::default();
        let (took, rows) = prompt(&mut share, 16_384, 1, cost);
        assert_eq!(rows, ROWS_MIN);
        assert!(!share.let_go);
        let longest = took[2..].iter().fold(0.0f64, |a, b| a.max(*b));
        assert!(longest < 9.1, "{longest}");
    }

    #[test]
    fn a_new_prompt_is_held_again() {
        let mut share = PromptShare::default();
        // Far into this one nothing fits.
        prompt(&mut share, 100_000, 1, |rows, position| {
            card(rows, position) + f64::from(position / 20_000) * 4.0
        });
        assert!(share.let_go);
        let (took, _) = prompt(&mut share, 16_384, 1, card);
        assert!(too_long(&took) < 0.02, "{took:?}");
        assert!(!share.let_go);
    }

    #[test]
    fn the_short_end_of_a_prompt_changes_little() {
        let mut share = PromptShare::default();
        prompt(&mut share, 4096, 1, |_, _| 7.7);
        let held = share.rows(8, 512);
        let pass = Mixed {
            rows: 3,
            tokens: 8,
            position: 4096,
            took: Duration::from_millis(4),
            without: Some(4e-3),
            decoding: 8,
            waiting: 1,
            beside_others: false,
        };
        share.note(pass, 512);
        assert_eq!(share.rows(8, 512), held);
    }

    #[test]
    fn many_tokens_leave_prompts_some_rows() {
        for tokens in [1, 8, 60, 64, 500, 5000] {
            let rows = PromptShare::default().rows(tokens, 512);
            assert!((ROWS_MIN..=512).contains(&rows), "{tokens}: {rows}");
            assert_eq!(PromptShare::default().rows(tokens, 1), 1);
        }
    }
}
