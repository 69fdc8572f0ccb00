//! How long layers took that lacked so many experts and left so many of them to the host.
//!
//! Rates of link and host, each taken by itself, say little of both at once: they read the same
//! memory. Of an H200's layers that lacked 8 experts those with 5 on the host took 353 to 401 us,
//! those with 4 took 419 to 489, and by the rates either was as good. So a share is compared with
//! those next to it by what whole layers took.

use std::time::Duration;

use super::rates::{Rate, SAMPLES_MIN};

/// Maximum number of absent experts of a layer that are examined: those of one token.
const N_MAX: usize = 16;

/// After so many decisions another share is taken than the best so far: what it takes may have
/// changed.
const LOOK_EVERY: u32 = 64;

/// Measured times of one model's layers in passes of one row.
#[derive(Debug)]
pub(super) struct Outcomes(Vec<Layers>);

/// Measured times of layers that lacked the same number of experts.
#[derive(Debug, Clone, Default)]
struct Layers {
    /// Seconds of a layer, by the experts that the host took.
    took: [Rate; N_MAX + 1],
    /// The best so far.
    best: Option<usize>,
    /// Decisions since another one was looked at.
    since: u32,
    /// Whether that was the smaller one.
    was_smaller: bool,
}

impl Outcomes {
    pub(super) fn new() -> Self {
        Self(vec![Layers::default(); N_MAX + 1])
    }

    /// Notes the time of a layer that lacked `n` experts, of which the CPU computed `computed`.
    pub(super) fn note(&mut self, n: usize, computed: usize, took: Duration) {
        let layers = self.0.get_mut(n);
        if let Some(rate) = layers.and_then(|layers| layers.took.get_mut(computed)) {
            rate.note(took, 1);
        }
    }

    /// How many of `n` absent experts the host had best compute, where `by_rates` is what the rates
    /// say, and `most` the most that it can. Goes from there to a share next to it as long as that
    /// is better.
    pub(super) fn best(&mut self, n: usize, by_rates: usize, most: usize) -> usize {
        match self.0.get_mut(n) {
            Some(layers) => layers.next(by_rates, most.min(n)),
            None => by_rates,
        }
    }
}

impl Layers {
    fn next(&mut self, by_rates: usize, most: usize) -> usize {
        let from = self.best.unwrap_or(by_rates).min(most);
        let sure = |h: usize| self.took[h].samples() >= SAMPLES_MIN;
        if !sure(from) {
            return from;
        }
        let near = from.saturating_sub(1)..=(from + 1).min(most);
        if let Some(new) = near.clone().find(|h| !sure(*h)) {
            return new;
        }
        let seconds = |h: usize| self.took[h].a_byte().unwrap_or(f64::INFINITY);
        let best = near
            .clone()
            .min_by(|&a, &b| f64::total_cmp(&seconds(a), &seconds(b)));
        let best = best.unwrap_or(from);
        // Where the host keeps few of them, the best of those says nothing of more.
        if self.best.is_none_or(|before| before <= most) {
            self.best = Some(best);
        }
        self.since += 1;
        if self.since < LOOK_EVERY {
            return best;
        }
        self.since = 0;
        self.was_smaller = !self.was_smaller;
        match self.was_smaller {
            true => best.saturating_sub(1),
            false => (best + 1).min(most),
        }
    }
}
