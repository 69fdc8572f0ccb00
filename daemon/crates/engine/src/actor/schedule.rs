//! Shows the scheduler the engine's state, and carries out its decisions.
//!
//! The scheduler (crate `scheduler`) counts positions and bytes and knows no request's content; the
//! engine keeps the requests under the scheduler's sequence ids. Before each pass it updates which
//! readers have room; the scheduler admits requests and plans the pass.

use std::time::Duration;

use rocmforge_scheduler::{
    Action, Arrival, Costs, ModelId as ScheduledModel, ModelView, Next, NotTaken, PassPlan,
    Refusal as Refused, Scheduler, SeqId, SpanPlan, Tick, View,
};
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::actor::promises::ModelPromises;
use crate::api::error::Error;
use crate::api::refusal::Refusal;
use crate::features::context::{have_room, model_of, shared_rows_max, spans_max};
use crate::guards::budget::BUDGET_MIN;
use crate::model::registry::Entry;
use crate::pass::costs::Sizes;
use crate::pass::interleave::CHUNK_ROWS;
use crate::pass::share::Mixed;
use crate::request::task::Task;

/// Maximum number of rows whose logits are computed at a time.
const OUTPUT_ROWS_MAX: u64 = 256;

/// Logits may take one part in this many of the budget.
const OUTPUT_ROWS_PART: u64 = 32;

/// While passes are suspended and one found no contiguous memory, a further pass may take one part
/// in this many of the budget.
const CROWDED_PART: u64 = 32;

/// Number of positions that a short request (a question and its answer) is assumed to need.
const SHORT_POSITIONS: u32 = 256;

impl Engine {
    /// Calls the scheduler with a view of the engine's state under a budget of `budget` bytes.
    pub(crate) fn scheduling<T>(
        &mut self,
        budget: u64,
        ask: impl FnOnce(&mut Scheduler, &View<'_>) -> T,
    ) -> T {
        let models = self.model_views(budget);
        let kept_bytes = self.kept_bytes();
        let beside_bytes = self.beside_bytes();
        let Self {
            memory,
            models: registered,
            requests,
            space,
            speculation,
            ..
        } = self;
        let spans_max = spans_max(memory, requests);
        let sizes = Sizes::new(registered, speculation, &*memory.store.device, space);
        let view = View {
            budget_bytes: budget,
            held_bytes: memory.store.pinned_bytes() + memory.store.reserve_bytes(),
            kept_bytes,
            models: &models,
            costs: &sizes,
            // A row of a draft is a span of its own.
            spans_max: spans_max.saturating_sub(speculation.planned).max(1),
            link_bytes_per_ms: space.pace.link_bytes_per_ms,
            beside_bytes,
        };
        ask(&mut requests.scheduler, &view)
    }

    /// The models that have requests, as the scheduler sees them under a budget of `budget` bytes.
    fn model_views(&self, budget: u64) -> Vec<ModelView> {
        let store = &self.memory.store;
        let suspended = &self.requests.suspended;
        let waiting: Vec<ModelId> = suspended.waiting(&self.memory).collect();
        let usual = self.space.prefill_chunk.get();
        let promises = self.promises(self.now());
        let mut models: Vec<ModelView> = Vec::new();
        for task in self.requests.all() {
            let model = ScheduledModel(task.model.0);
            if models.iter().any(|m| m.model == model) {
                continue;
            }
            let row = task.loaded.model().plan().logits_width() * 4;
            let outputs = (budget / OUTPUT_ROWS_PART / row).clamp(1, OUTPUT_ROWS_MAX);
            let mtp = self.speculation.mtp(task.model);
            let of_mtp = mtp.map_or(0, |mtp| store.largest_unpinned(mtp.id));
            let states = self.speculation.state_bytes(task.model, budget);
            let all = store.model_bytes(task.model);
            let there = store.cache.model_stats(task.model).usage.resident;
            models.push(ModelView {
                model,
                // Spare states are needed once, too, while this model's passes run.
                segment_bytes: store.largest_unpinned(task.model).max(of_mtp) + states,
                rows_max: self.requests.rows_max(task.model, usual),
                shared_rows: self.shared_rows(task.model, &promises),
                outputs_max: outputs as u32,
                fits: store.cache.fits(task.model),
                switch_bytes: all.min(budget).saturating_sub(there),
                waits: waiting.contains(&task.model),
                piece_us: 0,
                promise: None,
            });
        }
        // Where passes of one model make no other one upload more, time is shared slice by slice:
        // long turns would save nothing.
        if !self.evict_each_other(&models, budget) {
            models.iter_mut().for_each(|model| model.switch_bytes = 0);
        }
        if !promises.is_empty() {
            self.bound_by_promises(&mut models, &promises);
        }
        models
    }

    /// Whether models that take turns under a budget of `budget` bytes cause each other more
    /// uploads: those that fit alone do not fit together, or several do not fit even alone.
    fn evict_each_other(&self, models: &[ModelView], budget: u64) -> bool {
        let (fitting, larger): (Vec<&ModelView>, Vec<_>) = models.iter().partition(|m| m.fits);
        let fitting: Vec<ModelId> = fitting.iter().map(|m| ModelId(m.model.0)).collect();
        larger.len() > 1 || !have_room(&self.memory, &self.speculation, &fitting, budget)
    }

    /// Memory sizes of sequences and passes on this device.
    pub(crate) fn sizes(&self) -> Sizes<'_> {
        let device = &*self.memory.store.device;
        Sizes::new(&self.models, &self.speculation, device, &self.space)
    }

    /// Bytes that a further pass may take beside the suspended passes.
    fn beside_bytes(&self) -> u64 {
        let store = &self.memory.store;
        let suspended = &self.requests.suspended;
        let segments = suspended.models().map(|id| store.largest_unpinned(id));
        let taken = store.cache.usage().blocks() - self.memory.prefixes.kept_bytes();
        let all = taken + store.pinned_bytes() + segments.sum::<u64>();
        let budget = store.budget();
        let most = match suspended.is_crowded() {
            true => budget / CROWDED_PART,
            false => u64::MAX,
        };
        budget.saturating_sub(all).min(most)
    }

    /// Adds a request that has arrived to the scheduler and the engine.
    pub(crate) fn arrive(&mut self, task: Task, arrival: Arrival) {
        if let Some(error) = self
            .requests
            .too_many_of(&task.asker, self.config.max_sequences.get())
        {
            return task.fail(error);
        }
        match self.requests.scheduler.arrive(arrival) {
            Ok(()) => {
                self.requests.put_back(task);
                self.requests.changed = true;
            }
            Err(NotTaken::QueueFull { waiting, .. }) => task.fail(Error::Exhausted {
                message: format!(
                    "{waiting} requests wait already and {} run; the queue is full: try again when some have ended",
                    self.requests.scheduler.running()
                ),
                retry_after: Duration::from_secs(1),
            }),
            Err(NotTaken::LeftToOthers { of_client, free }) => task.fail(Error::Exhausted {
                message: format!(
                    "{of_client} requests of yours wait already, and the last {free} places of the queue are left to \
                     others: try again when some of yours have ended"
                ),
                retry_after: Duration::from_secs(1),
            }),
        }
    }

    /// Admits, preempts and rejects requests, so that the running ones fit the budget.
    pub(crate) fn admit(&mut self) {
        self.admit_within(self.memory.budget());
    }

    /// Admits waiting requests as if the budget had `budget` bytes.
    pub(crate) fn admit_within(&mut self, budget: u64) {
        self.look_at_promises();
        if self.requests.tasks.is_empty() {
            return;
        }
        self.spare_speculation(budget);
        self.admit_once(budget);
        // Who would have to yield for what is promised is in suspended passes.
        if self.requests.scheduler.is_short_of_room() && self.finish_passes() {
            self.admit_once(budget);
        }
    }

    fn admit_once(&mut self, budget: u64) {
        let mut held_back = self.requests.held_back();
        held_back.extend(self.held_for_promises());
        let not_ready = self.background.not_ready();
        let requests = &mut self.requests;
        for task in requests.tasks.values() {
            let ready = task.reader_has_room()
                && !task.follows
                && !task.reads
                && !held_back.contains(&task.seq)
                && !not_ready.contains(&task.model);
            requests.scheduler.set_ready(task.seq, ready);
        }
        self.account_standing();
        let mut actions = Vec::new();
        let nobody_new =
            self.requests.passes_before_admission > 0 && self.requests.scheduler.running() > 0;
        self.scheduling(budget, |scheduler, view| {
            // Deadlines are the engine's affair, which says how many tokens there were.
            let ask = match nobody_new {
                true => Scheduler::keep,
                false => Scheduler::admit,
            };
            ask(scheduler, view, Tick(0), &mut actions);
        });
        for action in actions {
            match action {
                Action::Admitted(seq) => self.begin(seq),
                Action::Yielded(seq) => self.start_over(seq),
                Action::Refused { seq, why } => {
                    if let Some(task) = self.requests.tasks.remove(&seq) {
                        if matches!(why, Refused::NoRoom { .. }) && task.may_end_here() {
                            self.end_for_room(task);
                            continue;
                        }
                        let error = self.refused(&task, why);
                        self.finish(task, Some(error));
                    }
                }
                Action::Expired(seq) => self.end(seq, Error::Cancelled),
            }
        }
        self.follow();
    }

    /// Discards what a request has computed, so that it starts again.
    pub(crate) fn start_over(&mut self, seq: SeqId) {
        if let Some(task) = self.requests.tasks.get_mut(&seq) {
            task.start_over(&mut self.memory);
            self.requests.changed = true;
            // Whoever is admitted behind it reserves memory before the weights are noted.
            self.memory.preempted_kv = self.preempted_kv();
        }
    }

    /// Chooses the next pass, or the suspended pass to resume.
    pub(crate) fn next_slice(&mut self) -> Option<Next> {
        if self.requests.is_empty() {
            self.memory.store.cache.foresee(&[]);
            return None;
        }
        if self.speculation.is_on || self.speculation.has_draft_models() {
            let (speculation, mut cx) = self.speculation();
            speculation.before_pass(&mut cx);
        }
        let (next, upcoming) = self.scheduling(self.memory.budget(), |scheduler, view| {
            let next = scheduler.next(view);
            let plan = match &next {
                Some(Next::Pass(plan)) => Some(plan),
                Some(Next::GoOn(_)) | None => None,
            };
            let upcoming = match view.models {
                // Nobody waits for another one.
                [_] => Vec::new(),
                _ => scheduler.upcoming_models(plan, view),
            };
            (next, upcoming)
        });
        self.foresee(&upcoming);
        next
    }

    /// Reports to the cache the order of models that requests wait for, each with its draft model.
    fn foresee(&mut self, upcoming: &[rocmforge_scheduler::ModelId]) {
        let mut models = Vec::with_capacity(upcoming.len());
        for model in upcoming {
            let model = ModelId(model.0);
            models.push(model);
            models.extend(self.speculation.beside(model));
        }
        self.memory.store.cache.foresee(&models);
    }

    /// Maximum number of rows of prompts in a pass while other requests wait for their next token,
    /// by measured times. Prompts that take only a few passes are not stretched: each other token
    /// is late once, and the requests behind them need not wait longer.
    fn shared_rows(&self, model: ModelId, promises: &ModelPromises) -> u32 {
        let most = shared_rows_max(&self.space);
        let (n, rows) = self.requests.prompts(model);
        let all = self.requests.all().filter(|t| t.model == model).count();
        let share = self.models.get(model);
        let rows = if share.is_some_and(|entry| self.streams_experts(entry)) {
            self.space.prefill_chunk.get() as u32
        } else {
            match share.filter(|_| self.is_worth_stretching(rows)) {
                // Its steps are cut to what is promised.
                Some(_) if self.interleaves(model) => return CHUNK_ROWS.min(most),
                Some(entry) => entry.share.rows((all - n) as u32, most),
                None => most,
            }
        };
        match share.and_then(|entry| Some((entry, self.pass_bound(model, promises)?))) {
            Some((entry, bound)) => entry.price.rows_within((all - n) as u32, rows, bound),
            None => rows,
        }
    }

    /// Whether a pass of a model uploads experts. A few rows of prompts are routed to nearly as
    /// many experts as a full chunk, so each chunk costs about the same, however short it is.
    fn streams_experts(&self, entry: &Entry) -> bool {
        entry.routes() && !self.memory.store.cache.fits(entry.id)
    }

    /// Whether prompts of `rows` rows together are worth splitting into small chunks beside other
    /// requests' tokens.
    pub(crate) fn is_worth_stretching(&self, rows: usize) -> bool {
        rows > self.space.prefill_chunk.get()
    }

    /// Records the time of a complete pass.
    pub(crate) fn note_pass(&mut self, plan: &PassPlan, took: Duration) {
        let rows = plan.rows as usize;
        let most = shared_rows_max(&self.space);
        let (decode, prompts) = plan.spans.split_at(plan.decode_spans);
        let (others, _) = self.requests.prompts(model_of(plan));
        let waiting = others + prompts.len();
        let beside_others = self.requests.any_of_others(model_of(plan));
        let entry = self.models.get_mut(model_of(plan));
        if let Some(entry) = entry {
            let rows_of = |spans: &[SpanPlan]| spans.iter().map(|s| s.rows).sum::<u32>();
            if decode.is_empty() {
                self.memory.host_kv.note_prompt(entry.id, rows, took);
            }
            if prompts.is_empty() {
                self.interleaving.slice(entry.id).declined = false;
                entry.times.note(rows, took);
            } else if !decode.is_empty() {
                let mixed = Mixed {
                    rows: rows_of(prompts),
                    tokens: rows_of(decode),
                    position: prompts.iter().map(|s| s.first_position).max().unwrap_or(0),
                    took,
                    without: entry.times.seconds_within(
                        rows_of(decode) as usize,
                        rows,
                        took.as_secs_f64(),
                    ),
                    decoding: decode.len(),
                    waiting,
                    beside_others,
                };
                entry.price.note(mixed.rows, took, mixed.without);
                tracing::trace!(
                    mixed.rows,
                    mixed.tokens,
                    ?took,
                    mixed.without,
                    "a pass with prompts"
                );
                entry.share.note(mixed, most);
            }
        }
        let device = &mut self.memory.store.device;
        self.space.pace.note(took, || device.pace(rows));
    }

    /// Records the time of a pass whose weights were all resident.
    pub(crate) fn note_resident_pass(&mut self, plan: &PassPlan, took: Duration) {
        let entry = self.models.get_mut(model_of(plan));
        if let Some(entry) = entry.filter(|_| plan.decode_spans == plan.spans.len()) {
            entry.resident_times.note(plan.rows as usize, took);
        }
    }

    /// The smallest budget of at least `wanted` bytes in which the running requests can go on and
    /// the preempted ones can resume one by one.
    pub(crate) fn room_for_running(&mut self, wanted: u64) -> u64 {
        let needed = self.scheduling(wanted, |scheduler, view| {
            scheduler.needed(view).max(scheduler.budget_least(view))
        });
        wanted.max(needed)
    }

    /// The smallest budget, in bytes, in which the smallest registered model can run a short
    /// request beside the device's own block.
    pub(crate) fn budget_least(&self) -> u64 {
        let needed = self.budget_needed(SHORT_POSITIONS).max(BUDGET_MIN);
        (self.memory.store.reserve_bytes() + needed).next_multiple_of(BUDGET_MIN)
    }

    /// The smallest budget, in bytes, in which any registered model can run a request.
    pub(crate) fn budget_floor(&self) -> u64 {
        self.memory.store.reserve_bytes() + self.budget_needed(1)
    }

    /// Bytes that the smallest registered model needs for a request of `positions` positions.
    fn budget_needed(&self, positions: u32) -> u64 {
        let sizes = self.sizes();
        let store = &self.memory.store;
        let needs = self.models.named_ones().map(|entry| {
            let id = ScheduledModel(entry.id.0);
            let states = self.speculation.state_bytes(entry.id, store.budget());
            let kv = sizes.kv_bytes(id, positions);
            store.largest_unpinned(entry.id) + states + kv + sizes.scratch_bytes(id, 1, 1)
        });
        needs.min().unwrap_or(0)
    }

    /// The error that says why the scheduler refused a request.
    fn refused(&self, task: &Task, why: Refused) -> Error {
        let name = task.loaded.name();
        match why {
            Refused::NeverFits {
                positions,
                demand,
                budget_bytes,
                ..
            } => {
                let pinned = self.memory.store.pinned_bytes();
                let message = format!(
                    "the request needs {} bytes of the cache and its budget is {budget_bytes}: {} for the KV of \
                     {positions} tokens, {} for scratch, {} for the largest segment of '{name}', {pinned} pinned, {} for \
                     the device's own staging; ask for fewer tokens, unpin, or raise the budget (rocmforgectl cache \
                     budget)",
                    demand.total(),
                    demand.kv_bytes,
                    demand.scratch_bytes,
                    demand.segment_bytes,
                    demand.held_bytes - pinned,
                );
                Refusal::NeverFits {
                    message,
                    need: demand.total(),
                    budget: budget_bytes,
                    pinned,
                }
                .into()
            }
            Refused::NoRoom { .. } | Refused::DriverRefuses { .. } => Error::Exhausted {
                message: why.to_string(),
                retry_after: Duration::from_secs(1),
            },
        }
    }
}
