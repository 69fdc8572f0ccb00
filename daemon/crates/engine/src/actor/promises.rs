//! Promised gaps between tokens: when the next tokens are due, what other work may run until then,
//! and to which requests a gap can be promised.
//!
//! All decisions use measured times. While nothing is measured, a gap is promised, passes have few
//! rows, and the times are learned.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rocmforge_scheduler::{
    Config, ModelView, Promise, Scheduler, SeqId, Share, View, least_gap, slack_us,
};
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::pass::pieces::ROWS_LEAST;
use crate::request::task::Task;

/// Time subtracted from a promised gap when it is planned: for the engine's work between two
/// passes, and for sending the token.
pub(super) const MARGIN: Duration = Duration::from_millis(1);

/// Factor on the measured time of a pass when a promise is planned.
const LONGER: f64 = 1.25;

/// Share of the time that a promised gap leaves which passes with rows of prompts may take, while
/// no other model has requests.
const PROMPT_PART: f64 = 0.9;
const PROMPT_PART_BESIDE: f64 = 0.5;

/// Assumed longest step of a pass, as a multiple of its mean step, before one is measured.
const STEP_TO_MEAN: f64 = 3.0;

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn micros_of(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(u64::MAX, micros)
}

/// The promised gap less [`MARGIN`], which planning uses.
pub(super) fn planned(gap: Duration) -> Duration {
    gap.saturating_sub(MARGIN)
}

/// Assumed time of a pass that was never measured, in microseconds: a quarter of its gap.
pub(super) fn unknown_pass_us(gap_us: u64) -> u64 {
    gap_us / 4
}

/// Planned time of a pass in microseconds: `seconds` as measured, times [`LONGER`].
pub(super) fn pass_us(seconds: f64) -> u64 {
    micros_of(seconds * LONGER)
}

/// What each model's running requests are promised: gap, due time and pass time.
pub(crate) type ModelPromises = Vec<(ModelId, Promise)>;

fn of_model(promises: &ModelPromises, model: ModelId) -> Option<Promise> {
    let found = promises.iter().find(|(id, _)| *id == model);
    found.map(|(_, promise)| *promise)
}

fn of_others(promises: &ModelPromises, model: ModelId) -> impl Iterator<Item = Promise> {
    let others = promises.iter().filter(move |(id, _)| *id != model);
    others.map(|(_, promise)| *promise)
}

fn share(promise: Promise) -> Share {
    Share {
        gap_us: promise.gap_us,
        pass_us: promise.pass_us,
    }
}

fn shares(promises: &ModelPromises, except: ModelId) -> Vec<Share> {
    of_others(promises, except).map(share).collect()
}

/// The longest time in microseconds that other work may ever take: right after all of these
/// requests had their tokens. `None` if there are no promises.
fn slack_most(promises: impl Iterator<Item = Promise>) -> Option<u64> {
    slack_us(promises.map(|promise| Promise {
        due_us: promise.gap_us,
        ..promise
    }))
}

/// Whether a model can hold its promised gap beside the other models' promises, if the longest step
/// of other work takes `piece_seconds`.
fn can_hold(own: Share, others: &[Share], piece_seconds: f64) -> bool {
    least_gap(own, others, micros_of(piece_seconds)).is_ok()
}

impl Engine {
    /// Updates the state of promised gaps: whether there are any, whether their readers keep up,
    /// and which models' weights are kept for them.
    pub(crate) fn look_at_promises(&mut self) {
        if !self.requests.promises.any {
            return;
        }
        let now = self.now();
        let promised = |task: &Task| task.promised_gap().is_some();
        let any = self.requests.all().any(promised);
        self.requests.promises.note_any(any);
        let uploads = self.memory.store.reasons.waited.all;
        let requests = &mut self.requests;
        for task in requests.tasks.values_mut() {
            let spent = requests.suspended.spent(task.model, uploads);
            task.note_reader(now, spent);
        }
        self.keep_promised_weights();
    }

    /// Protects the weights of models whose running requests were promised a gap from eviction, if
    /// all weights of the model fit.
    fn keep_promised_weights(&mut self) {
        let mut kept = Vec::new();
        for task in self.requests.all().filter(|t| t.promised_gap().is_some()) {
            let runs = self.requests.running(task.seq).is_some();
            if runs && self.memory.store.cache.fits(task.model) && !kept.contains(&task.model) {
                kept.push(task.model);
                kept.extend(self.speculation.beside(task.model));
            }
        }
        kept.sort_unstable();
        kept.dedup();
        if kept != self.requests.promises.kept {
            self.memory.store.cache.keep(&kept);
            self.requests.promises.kept = kept;
        }
    }

    /// Bytes of weights that are protected from eviction for promises, without pinned weights.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let kept = self.requests.promises.kept.iter();
        kept.map(|&model| self.unpinned_bytes(model)).sum()
    }

    pub(super) fn unpinned_bytes(&self, model: ModelId) -> u64 {
        let store = &self.memory.store;
        match store.sources.contains_key(&model) {
            true => store.model_bytes(model) - store.model_pinned_bytes(model),
            false => 0,
        }
    }

    /// What each model's running requests are promised at the time `now`.
    pub(crate) fn promises(&self, now: Instant) -> ModelPromises {
        if !self.requests.promises.any {
            return Vec::new();
        }
        let queued = self.space.backlog.left(now);
        let mut found: Vec<(ModelId, Option<Instant>, Duration)> = Vec::new();
        for task in self.requests.all() {
            let Some(gap) = task.promised_gap() else {
                continue;
            };
            if self.requests.running(task.seq).is_none() {
                continue;
            }
            let due = task.due();
            match found.iter_mut().find(|(model, ..)| *model == task.model) {
                Some((_, first, shortest)) => {
                    *first = [*first, due].into_iter().flatten().min();
                    *shortest = gap.min(*shortest);
                }
                None => found.push((task.model, due, gap)),
            }
        }
        let promise = |(model, due, gap): (ModelId, Option<Instant>, Duration)| {
            let left = |due: Instant| due.saturating_duration_since(now + queued + MARGIN);
            let gap = planned(gap);
            let pass = self.pass_left(model).map(pass_us);
            let promise = Promise {
                due_us: due.map_or(u64::MAX, |due| micros(left(due))),
                pass_us: pass.unwrap_or(unknown_pass_us(micros(gap))),
                gap_us: micros(gap),
            };
            (model, promise)
        };
        found.into_iter().map(promise).collect()
    }

    /// Expected seconds of a model's pass of `rows` tokens while it has a promise, so that its
    /// weights stay resident, if they fit. Experts of an MoE model are uploaded as they are needed,
    /// so passes that upload count until all are resident.
    pub(super) fn promised_seconds(&self, model: ModelId, rows: u32) -> Option<f64> {
        let entry = self.models.get(model)?;
        let rows = rows.max(1) as usize;
        if !self.memory.store.cache.fits(model) {
            return entry.times.seconds(rows);
        }
        let resident = entry.resident_times.seconds(rows);
        resident.or_else(|| entry.times.seconds(rows).filter(|_| entry.routes()))
    }

    /// Expected seconds of a model's next pass, or of the rest of its suspended one; `None` if
    /// nothing was measured.
    fn pass_left(&self, model: ModelId) -> Option<f64> {
        let entry = self.models.get(model)?;
        let tokens = |rows: u32| self.promised_seconds(model, rows);
        if let Some(pass) = self.requests.suspended.of(model) {
            let decode = pass.plan.decode_spans;
            let all = match pass.plan.spans.len() > decode {
                true => entry.price.seconds().or(tokens(pass.plan.rows)),
                false => tokens(pass.plan.rows),
            }?;
            return Some((all - pass.took.as_secs_f64()).max(all / 8.0));
        }
        self.pass_seconds(model, self.requests.running_of(model))
    }

    /// Expected seconds of a model's whole pass of `rows` tokens, with its prompts' rows if it has
    /// any; `None` if nothing was measured.
    pub(super) fn pass_seconds(&self, model: ModelId, rows: u32) -> Option<f64> {
        let entry = self.models.get(model)?;
        let alone = self.promised_seconds(model, rows);
        let with_prompts = match self.requests.prompts(model).0 {
            0 => None,
            _ => entry.price.seconds(),
        };
        let known = alone.into_iter().chain(with_prompts);
        known.reduce(f64::max)
    }

    /// Measured seconds of the longest step in a model's passes of `rows` rows.
    pub(super) fn piece_seconds(&self, model: ModelId, rows: u32) -> Option<f64> {
        let entry = self.models.get(model)?;
        entry.pieces.seconds(rows).or_else(|| {
            let steps = entry.loaded.model().plan().steps.len().max(1);
            Some(entry.times.seconds(rows as usize)? / steps as f64 * STEP_TO_MEAN)
        })
    }

    /// The model with the longest step among those that have running or promised requests, other
    /// than `except`, and the seconds of that step in passes of few rows. Requests that wait
    /// without a promise are checked when they are admitted.
    pub(super) fn longest_piece(&self, except: ModelId) -> Option<(ModelId, f64)> {
        let counts = |task: &&Task| {
            task.promised_gap().is_some() || self.requests.running(task.seq).is_some()
        };
        let tasks = self.requests.all().filter(counts);
        let mut models: Vec<ModelId> = tasks.map(|task| task.model).collect();
        models.sort_unstable();
        models.dedup();
        let others = models.into_iter().filter(|&model| model != except);
        let pieces = others.filter_map(|model| {
            let rows = self.requests.running_of(model).max(ROWS_LEAST);
            Some((model, self.piece_seconds(model, rows)?))
        });
        pieces.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Maximum seconds of a model's pass that has rows of prompts beside tokens with a promised
    /// gap; `None` if the model has no promise.
    pub(crate) fn pass_bound(&self, model: ModelId, promises: &ModelPromises) -> Option<f64> {
        let own = of_model(promises, model)?;
        let piece = self
            .longest_piece(model)
            .map_or(0.0, |(_, seconds)| seconds);
        let passes = of_others(promises, model).map(|other| {
            let times = own.gap_us.div_ceil(other.gap_us.max(1));
            times.saturating_mul(other.pass_us)
        });
        let taken = passes.fold(micros_of(piece), u64::saturating_add);
        let left = own.gap_us.saturating_sub(taken) as f64 / 1e6;
        let part = match self.requests.any_of_others(model) {
            true => PROMPT_PART_BESIDE,
            false => PROMPT_PART,
        };
        Some(left * part / LONGER)
    }

    /// How long a slice of a model's pass may last so that other models hold their promised gaps;
    /// `None` if they have none, or if the promises leave no time at all and so cannot be held.
    pub(crate) fn slack(&self, model: ModelId) -> Option<Duration> {
        let promises = self.promises(self.now());
        slack_most(of_others(&promises, model)).filter(|most| *most > 0)?;
        slack_us(of_others(&promises, model)).map(Duration::from_micros)
    }

    /// Seconds until a pass of a model has to begin that makes tokens which were promised a gap.
    pub(crate) fn own_slack(&self, model: ModelId) -> Option<f64> {
        let promises = self.promises(self.now());
        let own = of_model(&promises, model)?;
        Some(slack_us(std::iter::once(own))? as f64 / 1e6)
    }

    /// Puts each model's promise into its view, and bounds the rows of passes whose steps would
    /// delay other models' promised tokens too long.
    pub(crate) fn bound_by_promises(&self, views: &mut [ModelView], promises: &ModelPromises) {
        for view in views {
            let model = ModelId(view.model.0);
            view.promise = of_model(promises, model);
            let most = slack_most(of_others(promises, model));
            // What leaves no time at all cannot be held: it makes nobody's passes shorter.
            let most = most.filter(|most| *most > 0);
            let (Some(most), Some(entry)) = (most, self.models.get(model)) else {
                continue;
            };
            let within = |rows| entry.pieces.rows_within(most as f64 / 1e6, rows);
            let whole = self.requests.rows_max(model, 0);
            view.rows_max = within(view.rows_max).max(whole);
            view.shared_rows = within(view.shared_rows).max(1);
            let rows = match self.requests.suspended.of(model) {
                Some(pass) => pass.plan.rows,
                None => match self.requests.prompts(model) {
                    (0, _) => self.requests.running_of(model),
                    (_, rows) => view.rows_max.min(rows.max(1) as u32),
                },
            };
            let piece = self.piece_seconds(model, rows).unwrap_or(0.0);
            view.piece_us = micros_of(piece);
        }
    }

    /// Waiting requests without a promise that may not be admitted now, because promises would be
    /// broken beside them.
    pub(crate) fn held_for_promises(&mut self) -> HashSet<SeqId> {
        if !self.requests.promises.any {
            return HashSet::new();
        }
        let now = self.now();
        // Nobody waits for the sake of a client that does not read.
        let is_read = |model: ModelId| {
            let mut of_model = self.requests.all().filter(|t| t.model == model);
            of_model.any(Task::has_promise_now)
        };
        let mut promises = self.promises(now);
        promises.retain(|(model, _)| is_read(*model));
        let mut looked: Vec<(ModelId, bool)> = Vec::new();
        let mut held = HashSet::new();
        if !promises.is_empty() {
            for task in self.requests.tasks.values() {
                let waits = self.requests.running(task.seq).is_none();
                if !waits || task.promised_gap().is_some() {
                    continue;
                }
                let known = looked.iter().find(|(model, _)| *model == task.model);
                let breaks = known.map_or_else(
                    || self.breaks_promises(task.model, &promises),
                    |(_, breaks)| *breaks,
                );
                looked.push((task.model, breaks));
                if breaks {
                    held.insert(task.seq);
                }
            }
        }
        self.requests.promises.note_held(held.iter().copied(), now);
        held
    }

    /// Whether one more request of a model would break promises, by measured times. Promises that
    /// cannot be held even without it hold nothing back.
    fn breaks_promises(&self, model: ModelId, promises: &ModelPromises) -> bool {
        let running = self.requests.running_of(model);
        let piece = |except| {
            self.longest_piece(except)
                .map_or(0.0, |(_, seconds)| seconds)
        };
        if let Some(own) = of_model(promises, model) {
            let holds = |rows: u32| {
                let pass = self.promised_seconds(model, rows);
                let own = Share {
                    gap_us: own.gap_us,
                    pass_us: pass.map_or(own.pass_us, pass_us),
                };
                can_hold(own, &shares(promises, model), piece(model))
            };
            return holds(running) && !holds(running + 1);
        }
        if running > 0 {
            // Its steps are waited for already.
            return false;
        }
        let Some(more) = self.piece_seconds(model, ROWS_LEAST) else {
            return false;
        };
        promises.iter().any(|&(of, promise)| {
            let (own, others, piece) = (share(promise), shares(promises, of), piece(of));
            can_hold(own, &others, piece) && !can_hold(own, &others, more.max(piece))
        })
    }

    /// Bytes that running requests need beside weights (KV cache, states, scratch).
    pub(super) fn needed_beside_weights(&mut self) -> u64 {
        let budget = self.memory.budget();
        self.scheduling(budget, |scheduler: &mut Scheduler, view: &View<'_>| {
            let view = View {
                kept_bytes: 0,
                ..*view
            };
            scheduler.needed(&view)
        })
    }
}

/// Maximum number of models that may have promises at the same time.
pub(super) fn promising_models_max() -> usize {
    Scheduler::promising_models_max(&Config::default())
}
