//! Decides which model's turn it is. Models share time, not numbers of passes.
//!
//! A *flow* is what shares the device with others as an equal: each model whose passes are long,
//! and all models with short passes ([`Config::short_pass_us`]) together. A flow's *service* is the
//! time that its passes took, as the engine measured it. The next slice goes to the flow with the
//! least sum of its service, of what a switch to it has to upload (in time of the link), and, if
//! only batch sequences have something to compute there, of a lag. Inside the flow of short passes
//! the models share its time in the same way.
//!
//! So a model that needs a millisecond a pass does not wait for as many passes of one that needs a
//! second, and many small models together do not crowd out a large one. Models that push each other
//! out of memory take turns whose length follows from what they upload. A model that is passed over
//! for too long has its turn whatever it costs.
//!
//! A flow that had nothing to compute goes on at the service of the flow that was served last
//! (start-time fair queueing): unused time is not saved up.
//!
//! The clock here is the sum of all that was charged. It stands while nothing is computed.

use std::collections::BTreeMap;

use crate::config::Config;
use crate::sequence::ModelId;
use crate::view::View;

/// A model that has something to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) model: ModelId,
    /// Whether an interactive sequence of the model has something to compute.
    pub(crate) interactive: bool,
}

/// A model's service and times.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    /// Microseconds of service of the model's passes.
    service: u64,
    /// Number of the round in which the model was last a candidate; 0 before the first.
    seen_at: u64,
    /// Clock at which the model was last served, or became a candidate since.
    since: u64,
    /// Clock at which the model was first passed over for promised passes since it last had its
    /// turn; `None` if it was not.
    passed_over_at: Option<u64>,
    /// Microseconds of the model's current pass so far.
    pass: u64,
    /// Usual microseconds of a pass of the model (moving average); 0 before the first one ended.
    usual: u64,
}

/// The turns of all models.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    turns: BTreeMap<ModelId, Turn>,
    /// The service of all models with short passes together.
    short_service: u64,
    /// Service of the flow that was served last, at which new flows start.
    time: u64,
    /// Service of the model with short passes that was served last, at which new ones start.
    short_time: u64,
    /// Sum of all charged microseconds.
    clock: u64,
    /// Number of rounds in which candidates were recorded.
    round: u64,
    /// The last round in which a model with short passes was a candidate.
    short_seen_at: u64,
    /// The model that was served last.
    last: Option<ModelId>,
}

/// A model is passed over for promised passes for at most this many times its patience.
const PROMISED_PATIENCE: u64 = 8;

/// Microseconds from which on a pass weighs as much as all short passes together.
const LONG_US: u64 = 40_000;

/// Full weight of a flow, whose service is then its time. Tokens of shorter passes are waited for
/// like those of short ones, so they weigh less; but many small models must not crowd out one that
/// is slightly larger.
const WEIGHT: u64 = 1000;
const WEIGHT_MAX: u64 = 2500;

/// The weight of a model whose passes usually take `usual_us` microseconds.
fn weight(usual_us: u64) -> u64 {
    (LONG_US * WEIGHT / usual_us.max(1)).clamp(WEIGHT, WEIGHT_MAX)
}

/// Weight of the old value in a moving average.
const KEEPS: u64 = 7;

impl Turns {
    /// Forgets a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.turns.remove(&model);
        if self.last == Some(model) {
            self.last = None;
        }
    }

    /// Resets the turns when no model has work. Measured times of passes are kept.
    pub(crate) fn idle(&mut self) {
        for turn in self.turns.values_mut() {
            *turn = Turn {
                usual: turn.usual,
                ..Turn::default()
            };
        }
        (self.short_service, self.time, self.short_time) = (0, 0, 0);
        (self.clock, self.round, self.short_seen_at) = (0, 0, 0);
    }

    fn of(&self, model: ModelId) -> Turn {
        self.turns.get(&model).copied().unwrap_or_default()
    }

    fn is_short(turn: &Turn, config: &Config) -> bool {
        turn.usual.max(turn.pass) <= config.short_pass_us
    }

    /// Sum of all microseconds charged since there was last nothing to compute.
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    /// Usual microseconds of a model's pass; 0 while unknown.
    pub(crate) fn usual_us(&self, model: ModelId) -> u64 {
        self.of(model).usual
    }

    /// Whether a model's passes are short ([`Config::short_pass_us`]).
    pub(crate) fn has_short_passes(&self, model: ModelId, config: &Config) -> bool {
        Turns::is_short(&self.of(model), config)
    }

    /// Whether a model with work waited for so long that it has the next turn in any case.
    pub(crate) fn is_overdue(&self, model: ModelId, config: &Config) -> bool {
        self.clock.saturating_sub(self.of(model).since) >= config.model_patience_us
    }

    /// Notes that it is this model's turn, and whether another model's promised pass goes first.
    pub(crate) fn pass_over(&mut self, model: ModelId, is_passed_over: bool) {
        let clock = self.clock;
        let turn = self.turns.entry(model).or_default();
        let at = turn.passed_over_at.unwrap_or(clock);
        turn.passed_over_at = is_passed_over.then_some(at);
    }

    /// Whether a model that has its turn waited for promised passes much longer than they can
    /// justify.
    pub(crate) fn is_passed_over_too_long(&self, model: ModelId, config: &Config) -> bool {
        let at = self.of(model).passed_over_at;
        let most = config.model_patience_us.saturating_mul(PROMISED_PATIENCE);
        at.is_some_and(|at| self.clock.saturating_sub(at) >= most)
    }

    /// Records the candidates of this round, so that models without work do not save up turns.
    pub(crate) fn note(&mut self, candidates: &[Candidate], config: &Config) {
        self.round += 1;
        let (round, clock) = (self.round, self.clock);
        for candidate in candidates {
            let (time, short_time) = (self.time, self.short_time);
            let turn = self.turns.entry(candidate.model).or_default();
            let short = Turns::is_short(turn, config);
            if turn.seen_at + 1 < round || turn.seen_at == 0 {
                let time = if short { short_time } else { time };
                turn.service = turn.service.max(time);
                (turn.since, turn.passed_over_at) = (clock, None);
            }
            turn.seen_at = round;
            if short {
                if self.short_seen_at + 1 < round {
                    self.short_service = self.short_service.max(time);
                }
                self.short_seen_at = round;
            }
        }
    }

    /// Chooses the model whose turn it is; `ahead` is a model that counts as served for so many
    /// microseconds more.
    pub(crate) fn pick(
        &self,
        candidates: &[Candidate],
        ahead: Option<(ModelId, u64)>,
        (view, config): (&View<'_>, &Config),
    ) -> Option<ModelId> {
        let extra = |model: ModelId| ahead.filter(|a| a.0 == model).map_or(0, |a| a.1);
        let ahead_is_short = ahead.filter(|a| Turns::is_short(&self.of(a.0), config));
        let of_short = ahead_is_short.map_or(0, |a| a.1);
        // What stands against it beside its service.
        let against = |c: &Candidate| {
            let stays = match ahead {
                Some((model, _)) => model == c.model,
                None => self.last == Some(c.model),
            };
            let switch = match stays {
                true => 0,
                false => view.switch_us(c.model, config.switch_us_max),
            };
            let lag = match c.interactive {
                true => 0,
                false => config.batch_lag_us,
            };
            switch + lag
        };
        let overdue = |c: &&Candidate| extra(c.model) == 0 && self.is_overdue(c.model, config);
        let late = candidates.iter().filter(overdue);
        if let Some(first) = late.min_by_key(|c| (self.of(c.model).since, c.model)) {
            return Some(first.model);
        }
        let flow = |c: &Candidate| {
            let turn = self.of(c.model);
            match Turns::is_short(&turn, config) {
                true => (true, self.short_service + of_short + against(c)),
                false => (false, turn.service + extra(c.model) + against(c)),
            }
        };
        let key = |c: &&Candidate| (flow(c).1, self.of(c.model).since, c.model);
        let first = candidates.iter().min_by_key(key)?;
        if !flow(first).0 {
            return Some(first.model);
        }
        let own = |c: &&Candidate| {
            let turn = self.of(c.model);
            let service = turn.service + extra(c.model) + against(c);
            (service, turn.since, c.model)
        };
        let short = candidates.iter().filter(|c| flow(c).0);
        short.min_by_key(own).map(|c| c.model)
    }

    /// Charges a model with a slice of its pass; `ended` if it was the pass's last.
    pub(crate) fn charge(&mut self, model: ModelId, took_us: u64, ended: bool, config: &Config) {
        let turn = self.turns.entry(model).or_default();
        // The clock goes on with every slice, so that whoever waits comes to his turn.
        let took_us = took_us.max(1);
        let was_short = Turns::is_short(turn, config);
        match was_short {
            true => {
                self.time = self.time.max(self.short_service);
                self.short_time = self.short_time.max(turn.service);
                self.short_service += took_us;
            }
            false => self.time = self.time.max(turn.service),
        }
        turn.service += match was_short {
            true => took_us,
            false => took_us * WEIGHT / weight(turn.usual.max(turn.pass)),
        };
        turn.pass += took_us;
        self.clock += took_us;
        (turn.since, turn.passed_over_at) = (self.clock, None);
        if ended {
            turn.usual = match turn.usual {
                0 => turn.pass,
                usual => (usual * KEEPS + turn.pass) / (KEEPS + 1),
            };
            turn.pass = 0;
        }
        // Its service counts among others from now on: neither a debt nor a claim comes along.
        match (was_short, Turns::is_short(turn, config)) {
            (true, false) => turn.service = self.time + took_us,
            (false, true) => turn.service = self.short_time,
            _ => {}
        }
        self.last = Some(model);
    }
}
