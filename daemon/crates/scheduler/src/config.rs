//! The numbers that the rules have. The scheduler has no clock: sequences wait for a number of
//! passes, and models for an amount of time that the engine measured and charged.

use crate::sequence::Class;

/// Settings of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Sequences that run at the same time at most; at least 1.
    pub running_max: usize,
    /// Sequences that wait at most when another comes.
    pub waiting_max: usize,
    /// Positions beyond its tokens that an open-ended sequence is promised at a time.
    pub promise_positions: u32,
    /// Rows below which no prompt's pass becomes shorter for want of room: each pass reads all
    /// weights.
    pub least_rows: u32,
    /// Sequences that may be admitted before one that is first in order and does not fit.
    pub bypass_max: u32,
    /// Passes after which a client's first interactive sequence goes before everyone else's.
    pub patience_passes: u64,
    /// Passes after which a batch sequence goes before everyone else's; from then on it keeps its
    /// place as an interactive one does.
    pub batch_patience_passes: u64,
    /// Microseconds of others' passes after which a model that has something to compute has its
    /// turn whatever a switch costs.
    pub model_patience_us: u64,
    /// Passes that a sequence has for itself before it gives its place to another client, and after
    /// which a reader without room is slow.
    pub turn_passes: u64,
    /// Microseconds that a sequence has its room at least before it gives all of it to who has
    /// none (`terms.rs`), and that it is then without it at most.
    pub term_us: u64,
    /// So many times as long as its last return took, or the next one will take, is that time at
    /// least.
    pub term_returns: u64,
    /// The most microseconds that a switch is taken to cost, so that turns have a bounded length.
    pub switch_us_max: u64,
    /// Microseconds by which a model with batch sequences alone stands behind the others.
    pub batch_lag_us: u64,
    /// Microseconds up to which passes are short: models with such passes share their time as one
    /// (`turns.rs`).
    pub short_pass_us: u64,
    /// Passes that are under way at a time at most, each of another model; at least 1.
    pub passes_max: usize,
    /// Times that a sequence's pass is done again after the driver refused memory.
    pub refusals_max: u32,
}

impl Config {
    /// Passes after which the first sequence of a client and class is overdue.
    pub(crate) fn patience(&self, class: Class) -> u64 {
        match class {
            Class::Interactive => self.patience_passes,
            Class::Batch => self.batch_patience_passes,
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            running_max: 256,
            waiting_max: 1024,
            promise_positions: 256,
            least_rows: 16,
            bypass_max: 8,
            patience_passes: 512,
            batch_patience_passes: 4096,
            model_patience_us: 4_000_000,
            turn_passes: 8,
            term_us: 1_000_000,
            term_returns: 8,
            switch_us_max: 500_000,
            batch_lag_us: 100_000,
            short_pass_us: 3_000,
            passes_max: 4,
            refusals_max: 12,
        }
    }
}
