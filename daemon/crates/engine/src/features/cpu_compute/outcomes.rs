//! Measured times of MoE layers, by the number of missing experts and the number that the CPU
//! computed.
//!
//! The separate rates of link and CPU say little about both at once: they read the same memory. Of
//! an H200's layers that lacked 8 experts those with 5 on the CPU took 353 to 401 us, those with 4
//! took 419 to 489, and by the rates both were equal. So shares are compared with their neighbours
//! by the times of whole layers.

use std::time::Duration;

use super::rates::{Rate, SAMPLES_MIN};

/// Maximum number of absent experts of a layer for which times are kept (those of one token).
const N_MAX: usize = 16;

/// Number of decisions after which a share other than the best is tried, since its time may have
/// changed.
const LOOK_EVERY: u32 = 64;

/// Measured times of one model's layers in passes of one row.
#[derive(Debug)]
pub(super) struct Outcomes(Vec<Layers>);

/// Measured times of layers that lacked the same number of experts, for each share of the CPU.
#[derive(Debug, Clone, Default)]
struct Layers {
    /// Mean seconds of a layer, by the number of experts that the CPU computed.
    took: [Rate; N_MAX + 1],
    /// The number of experts with the shortest time so far; `None` before the first choice.
    best: Option<usize>,
    /// Number of decisions since another number was tried.
    since: u32,
    /// Whether the last trial was the smaller neighbour of the best number.
    was_smaller: bool,
}

impl Outcomes {
    pub(super) fn new() -> Self {
        Self(vec![Layers::default(); N_MAX + 1])
    }

    /// Records the time of a layer that lacked `n` experts, of which the CPU computed `computed`.
    pub(super) fn note(&mut self, n: usize, computed: usize, took: Duration) {
        let layers = self.0.get_mut(n);
        if let Some(rate) = layers.and_then(|layers| layers.took.get_mut(computed)) {
            rate.note(took, 1);
        }
    }

    /// The best number of `n` absent experts for the CPU to compute. Starts at `by_rates`, the
    /// number that the rates suggest, and moves to a neighbour as long as that is faster; at most
    /// `most`.
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
