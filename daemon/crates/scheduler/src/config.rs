//! Settings of the scheduling rules. The scheduler has no clock: the patience of sequences is a
//! number of passes, that of models an amount of time that the engine measured and charged.

use crate::sequence::Class;

/// Settings of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Maximum number of sequences that run at the same time; at least 1.
    pub running_max: usize,
    /// Maximum number of sequences in the queue.
    pub waiting_max: usize,
    /// Number of positions beyond its tokens that an open-ended sequence is promised at a time.
    pub promise_positions: u32,
    /// Minimum number of rows to which a prompt's pass is shortened if memory is short: each pass
    /// reads all weights.
    pub least_rows: u32,
    /// Maximum number of sequences that may be admitted before one that is first in order and does
    /// not fit.
    pub bypass_max: u32,
    /// Number of passes after which a client's first interactive sequence is overdue and goes
    /// before all others.
    pub patience_passes: u64,
    /// Number of passes after which a batch sequence is overdue and goes before all others; from
    /// then on it keeps its place like an interactive one.
    pub batch_patience_passes: u64,
    /// Microseconds of other models' passes after which a model with work has its turn whatever the
    /// switch costs.
    pub model_patience_us: u64,
    /// Number of passes that a sequence has before it may give its place to another client, and
    /// after which a reader without room counts as slow.
    pub turn_passes: u64,
    /// Minimum time in microseconds for which a sequence keeps its KV memory before it gives all of
    /// it to one that has none (`terms.rs`), and the maximum time that it is then without.
    pub term_us: u64,
    /// The term lasts at least this many times as long as restoring the sequence's KV takes.
    pub term_returns: u64,
    /// Upper bound on the assumed cost of a switch between models, in microseconds, so that turns
    /// have a bounded length.
    pub switch_us_max: u64,
    /// Microseconds by which a model with only batch sequences is put behind the others.
    pub batch_lag_us: u64,
    /// Maximum time in microseconds of a short pass: models with such passes share their time as
    /// one (`turns.rs`).
    pub short_pass_us: u64,
    /// Maximum number of passes under way at a time, each of another model; at least 1.
    pub passes_max: usize,
    /// Number of times that a sequence's pass is repeated after the driver refused memory.
    pub refusals_max: u32,
}

impl Config {
    /// Number of passes after which the first sequence of a client and class is overdue.
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
