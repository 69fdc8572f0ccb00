//! What the scheduler is shown, and what it decides carried out.
//!
//! The scheduler (crate `scheduler`) counts positions and bytes and knows no request; the engine
//! keeps the requests by the names that it knows them by. Before each pass it is told whose readers
//! have room, it admits who fits, and plans.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use rocmforge_device::Device;
use rocmforge_ops::{Plan, RowCounts, Step};
use rocmforge_scheduler::{
    Action, Arrival, Config, Costs, ModelView, Next, NotTaken, PassPlan, Refusal as Refused,
    Scheduler, SeqId, SpanPlan, Tick, View,
};
use rocmforge_tensor_cache::ModelId;

use crate::actor::{Engine, Entry};
use crate::budget::BUDGET_MIN;
use crate::config::EngineConfig;
use crate::error::Error;
use crate::interleave::CHUNK_ROWS;
use crate::kv;
use crate::refusal::Refusal;
use crate::share::Mixed;
use crate::task::Task;

/// Most rows of logits that are computed at a time.
const OUTPUT_ROWS_MAX: u64 = 256;

/// The part of the budget that rows of logits may take.
const OUTPUT_ROWS_PART: u64 = 32;

/// The part of a pass's rows at most that prompts have while somebody waits for his next token,
/// whatever [`crate::share`] measures.
const SHARED_PART: u32 = 4;

/// Sizes of scratch that are remembered.
const SIZES_MAX: usize = 4096;

/// Bytes that are uploaded in the time of a usual pass, while nothing is measured.
const PASS_UPLOAD_BYTES: u64 = 64 << 20;

/// Bytes that the link brings in a millisecond, while nothing is measured.
const LINK_BYTES_PER_MS: u64 = 4 << 20;

/// Passes after which the pace is looked at again.
const PACE_PASSES: u32 = 64;

/// How long passes take, and what the link brings meanwhile.
#[derive(Debug)]
pub(crate) struct PassPace {
    /// Seconds of a pass, weighted towards the recent; 0 before the first.
    seconds: f64,
    passes: u32,
    pub(crate) upload_bytes: u64,
    /// What the link brings in a millisecond.
    link_bytes_per_ms: u64,
}

impl Default for PassPace {
    fn default() -> Self {
        Self {
            seconds: 0.0,
            passes: 0,
            upload_bytes: PASS_UPLOAD_BYTES,
            link_bytes_per_ms: LINK_BYTES_PER_MS,
        }
    }
}

/// Positions of a short request: a question and its answer.
const SHORT_POSITIONS: u32 = 256;

/// Sizes of scratch by model, rows and rows of logits: to lay it out takes longer than all else
/// that is decided before a pass.
pub(crate) type ScratchSizes = RefCell<HashMap<(ModelId, u32, u32), u64>>;

/// What sequences and passes cost on this device.
struct Sizes<'a> {
    models: &'a [Entry],
    device: &'a dyn Device,
    known: &'a ScratchSizes,
    /// Rows of a pass at most.
    rows_max: usize,
}

impl Sizes<'_> {
    fn plan(&self, model: rocmforge_scheduler::ModelId) -> &Plan {
        let entry = self.models.iter().find(|e| e.id.0 == model.0);
        let entry = entry.expect("a request keeps its model registered");
        entry.loaded.model().plan()
    }

    /// The plan of the model's block that predicts, where sequences use it.
    fn predictor(&self, model: rocmforge_scheduler::ModelId) -> Option<&Plan> {
        let entry = self.models.iter().find(|e| e.id.0 == model.0)?;
        let predictor = entry.predictor.as_ref().filter(|p| p.on)?;
        Some(&predictor.plan)
    }
}

impl Costs for Sizes<'_> {
    fn kv_bytes(&self, model: rocmforge_scheduler::ModelId, positions: u32) -> u64 {
        let bytes = |plan| kv::bytes_for(plan, positions as usize, self.rows_max);
        bytes(self.plan(model)) + self.predictor(model).map_or(0, bytes)
    }

    fn scratch_bytes(&self, model: rocmforge_scheduler::ModelId, rows: u32, outputs: u32) -> u64 {
        let key = (ModelId(model.0), rows, outputs);
        if let Some(&bytes) = self.known.borrow().get(&key) {
            return bytes;
        }
        let bytes = |plan: &Plan| {
            let layout = plan.scratch(RowCounts {
                tokens: u64::from(rows),
                outputs: u64::from(outputs),
            });
            layout.bytes + self.device.workspace_bytes(&layout)
        };
        // One runs behind the other.
        let bytes = bytes(self.plan(model)).max(self.predictor(model).map_or(0, bytes));
        let mut known = self.known.borrow_mut();
        if known.len() >= SIZES_MAX {
            known.clear();
        }
        known.insert(key, bytes);
        bytes
    }
}

/// Entries in the device's table of pages that a span of a sequence with so many positions has.
pub(crate) fn table_entries(plan: &Plan, positions: usize) -> u64 {
    let longest = plan.kv.iter().map(|g| g.layout.pages_for(positions));
    let row = longest.max().unwrap_or(0).next_power_of_two().max(8);
    (row * plan.kv.len()) as u64
}

/// The scheduler of an engine.
pub(crate) fn scheduler(config: &EngineConfig) -> Scheduler {
    Scheduler::new(Config {
        running_max: config.max_sequences.get(),
        waiting_max: config.queue_capacity,
        ..Config::default()
    })
}

impl Engine {
    /// Shows the scheduler what there is, in this budget.
    pub(crate) fn scheduling<T>(
        &mut self,
        budget: u64,
        ask: impl FnOnce(&mut Scheduler, &View<'_>) -> T,
    ) -> T {
        let store = &self.store;
        let cache = &store.cache;
        let pinned = store.pinned_bytes();
        let waiting = self.under_way.waiting().filter(|&s| store.is_under_way(s));
        let waiting: Vec<ModelId> = waiting.map(|segment| segment.model).collect();
        let mut models: Vec<ModelView> = Vec::new();
        for task in self.all_tasks() {
            let id = rocmforge_scheduler::ModelId(task.model.0);
            if models.iter().any(|m| m.model == id) {
                continue;
            }
            let row = task.loaded.model().plan().logits_width() * 4;
            let outputs = (budget / OUTPUT_ROWS_PART / row).clamp(1, OUTPUT_ROWS_MAX);
            let entry = self.models.iter().find(|e| e.id == task.model);
            let predictor = entry.and_then(|e| e.predictor.as_ref()).filter(|p| p.on);
            let of_block = predictor.map_or(0, |p| store.largest_unpinned(p.id));
            let states = entry.and_then(|e| e.states.as_ref());
            let states = states.map_or(0, |s| s.bytes(budget));
            let all = store.model_bytes(task.model);
            let there = cache.model_stats(task.model).usage.resident;
            models.push(ModelView {
                model: id,
                // Spare states are needed once, too, while this model's passes run.
                segment_bytes: store.largest_unpinned(task.model).max(of_block) + states,
                rows_max: self.rows_max(task.model),
                shared_rows: self.shared_rows(task.model),
                outputs_max: outputs as u32,
                fits: cache.fits(task.model),
                switch_bytes: all.min(budget).saturating_sub(there),
                waits: waiting.contains(&task.model),
            });
        }
        let sizes = Sizes {
            models: &self.models,
            device: store.device.as_ref(),
            known: &self.scratch_sizes,
            rows_max: self.prefill_chunk.get(),
        };
        let view = View {
            budget_bytes: budget,
            held_bytes: pinned + store.reserve_bytes,
            models: &models,
            costs: &sizes,
            // A row of a draft is a span of its own.
            spans_max: self.spans_max().saturating_sub(self.drafts).max(1),
            link_bytes_per_ms: self.pass_pace.link_bytes_per_ms,
            beside_bytes: self.beside_bytes(),
        };
        ask(&mut self.scheduler, &view)
    }

    /// Sequences of one pass at most: their pages must have room in the device's table.
    pub(crate) fn spans_max(&self) -> u32 {
        let pages = |task: &Task| table_entries(task.loaded.model().plan(), task.tokens.len());
        let most = self.all_tasks().filter(|t| t.begun).map(pages).max();
        self.spans_within(most.unwrap_or(8))
    }

    /// Spans of one pass at most that each have so many entries in the device's table of pages.
    pub(crate) fn spans_within(&self, entries_each: u64) -> u32 {
        match self.store.device.page_table_entries() {
            Some(entries) => (entries / entries_each.max(1)).max(1) as u32,
            None => u32::MAX,
        }
    }

    /// A request comes.
    pub(crate) fn arrive(&mut self, task: Task, arrival: Arrival) {
        if let Some(error) = self.too_many_of(&task.asker) {
            return task.fail(error);
        }
        match self.scheduler.arrive(arrival) {
            Ok(()) => {
                self.tasks.insert(task.seq, task);
                self.requests_changed = true;
            }
            Err(NotTaken::QueueFull { waiting, .. }) => task.fail(Error::Exhausted {
                message: format!(
                    "{waiting} requests wait already and {} run; the queue is full: try again when some have ended",
                    self.scheduler.running()
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

    /// Brings the requests in line with the budget: who runs, who yields, who cannot.
    pub(crate) fn admit(&mut self) {
        self.admit_within(self.budget());
    }

    /// The same for another budget.
    pub(crate) fn admit_within(&mut self, budget: u64) {
        if self.tasks.is_empty() {
            return;
        }
        self.spare_predictors(budget);
        self.admit_once(budget);
        // Who would have to yield for what is promised is in suspended passes.
        if self.scheduler.is_short_of_room() && self.finish_passes() {
            self.admit_once(budget);
        }
    }

    fn admit_once(&mut self, budget: u64) {
        let held_back = self.held_back();
        let not_ready = self.not_ready();
        for task in self.tasks.values() {
            let ready = task.reader_has_room()
                && !task.follows
                && !held_back.contains(&task.seq)
                && !not_ready.contains(&task.model);
            self.scheduler.set_ready(task.seq, ready);
        }
        let mut actions = Vec::new();
        let nobody_new = self.passes_before_admission > 0 && self.scheduler.running() > 0;
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
                    if let Some(task) = self.tasks.remove(&seq) {
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

    /// Takes back what a request computed.
    pub(crate) fn start_over(&mut self, seq: SeqId) {
        if let Some(task) = self.tasks.get_mut(&seq) {
            task.start_over(&mut self.store);
            self.requests_changed = true;
        }
    }

    /// The pass that comes next, or the suspended one that goes on.
    pub(crate) fn next_slice(&mut self) -> Option<Next> {
        if self.tasks.is_empty() && self.under_way.is_empty() {
            self.store.cache.foresee(&[]);
            return None;
        }
        if self.speculates || self.models.iter().any(|e| e.draft.is_some()) {
            self.draft();
        }
        let (next, upcoming) = self.scheduling(self.budget(), |scheduler, view| {
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

    /// Tells the cache which models requests wait for, each with its block that predicts.
    fn foresee(&mut self, upcoming: &[rocmforge_scheduler::ModelId]) {
        let mut models = Vec::with_capacity(upcoming.len());
        for model in upcoming {
            let entry = self.models.iter().find(|e| e.id.0 == model.0);
            let block = entry.and_then(|e| e.predictor.as_ref()).filter(|p| p.on);
            let draft = entry.and_then(|e| e.draft.as_ref()).filter(|d| d.is_used());
            models.push(ModelId(model.0));
            models.extend(block.map(|p| p.id));
            models.extend(draft.map(|d| d.id));
        }
        self.store.cache.foresee(&models);
    }

    /// Bytes of scratch of a model's pass.
    pub(crate) fn scratch_bytes(&self, model: ModelId, rows: usize, outputs: usize) -> u64 {
        let sizes = Sizes {
            models: &self.models,
            device: self.store.device.as_ref(),
            known: &self.scratch_sizes,
            rows_max: self.prefill_chunk.get(),
        };
        let model = rocmforge_scheduler::ModelId(model.0);
        sizes.scratch_bytes(model, rows as u32, outputs as u32)
    }

    /// Has sequences draft their next tokens where that pays.
    fn draft(&mut self) {
        // Others must have room, too.
        let most = self.spans_max() as usize / 2;
        let mut spans_left = most;
        let budget = self.budget();
        for entry in &self.models {
            let block_seconds = entry.predictor.as_ref().map_or(0.0, |p| p.seconds);
            let of_model = self.tasks.values_mut().filter(|t| t.model == entry.id);
            let mut rows = of_model
                .filter(|t| t.begun && t.n_past + 1 == t.tokens.len())
                .count();
            let states = entry.states.as_ref();
            let mut states_left = states.map_or(usize::MAX, |s| s.most(budget));
            for task in self.tasks.values_mut().filter(|t| t.model == entry.id) {
                let room = spans_left.min(states_left);
                let texts = self.speculates;
                let drafts = task.draft(rows, room, &entry.times, block_seconds, texts);
                states_left -= drafts;
                rows += drafts;
                spans_left -= drafts;
                self.scheduler.propose(task.seq, drafts as u32);
            }
        }
        self.drafts = (most - spans_left) as u32;
    }

    /// Rows of prompts at most in a pass while somebody waits for his next
    /// token, whatever was measured.
    pub(crate) fn shared_rows_max(&self) -> u32 {
        (self.prefill_chunk.get() as u32 / SHARED_PART).max(1)
    }

    /// The same, by what was measured. Prompts that are done in a few passes are not worth
    /// stretching: each token of others waits a little longer once, and the requests
    /// behind them wait for all.
    fn shared_rows(&self, model: ModelId) -> u32 {
        let most = self.shared_rows_max();
        let (n, rows) = self.prompts(model);
        let all = self.all_tasks().filter(|t| t.model == model).count();
        let share = self.models.iter().find(|e| e.id == model);
        if share.is_some_and(|entry| self.streams_experts(entry)) {
            return self.prefill_chunk.get() as u32;
        }
        match share.filter(|_| self.is_worth_stretching(rows)) {
            Some(_) if self.interleaves(model) => CHUNK_ROWS.min(most),
            Some(entry) => entry.share.rows((all - n) as u32, most),
            None => most,
        }
    }

    /// Whether a pass of a model uploads experts: a few rows of prompts are routed to nearly as
    /// many of those as a full chunk, so that each chunk costs about as much, however short it is.
    fn streams_experts(&self, entry: &Entry) -> bool {
        let mut steps = entry.loaded.model().plan().steps.iter();
        steps.any(|step| matches!(step, Step::Experts { .. })) && !self.store.cache.fits(entry.id)
    }

    /// Whether prompts of so many rows together come in beside others' tokens little by little.
    pub(crate) fn is_worth_stretching(&self, rows: usize) -> bool {
        rows > self.prefill_chunk.get()
    }

    /// How many of a model's requests have no token yet, and how many rows their prompts have
    /// together. Requests of a pass under way are not among them.
    pub(crate) fn prompts(&self, model: ModelId) -> (usize, usize) {
        let of_model = self.tasks.values().filter(|t| t.model == model);
        let prompts = of_model.filter(|t| !t.begun || t.n_past + 1 < t.tokens.len());
        prompts.fold((0, 0), |(n, rows), t| (n + 1, rows + t.prompt_rows()))
    }

    /// A pass took so long.
    pub(crate) fn note_pass(&mut self, plan: &PassPlan, took: Duration) {
        let rows = plan.rows as usize;
        let most = self.shared_rows_max();
        let (decode, prompts) = plan.spans.split_at(plan.decode_spans);
        let (others, _) = self.prompts(ModelId(plan.model.0));
        let waiting = others + prompts.len();
        let entry = self.models.iter_mut().find(|e| e.id.0 == plan.model.0);
        if let Some(entry) = entry {
            let rows_of = |spans: &[SpanPlan]| spans.iter().map(|s| s.rows).sum::<u32>();
            if decode.is_empty() {
                self.store.tier.note_prompt(entry.id, rows, took);
            }
            if prompts.is_empty() {
                entry.slice.declined = false;
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
                };
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
        let pace = &mut self.pass_pace;
        let took = took.as_secs_f64();
        pace.seconds = match pace.passes {
            0 => took,
            _ => pace.seconds + (took - pace.seconds) / 8.0,
        };
        pace.passes = pace.passes.wrapping_add(1);
        if pace.passes % PACE_PASSES == 1
            && let Some(measured) = self.store.device.pace(rows)
        {
            pace.upload_bytes = ((pace.seconds * measured.upload_bytes_per_s) as u64).max(1);
            pace.link_bytes_per_ms = ((measured.upload_bytes_per_s / 1e3) as u64).max(1);
        }
    }

    /// Ends a request that is known.
    pub(crate) fn end(&mut self, seq: SeqId, error: Error) {
        self.scheduler.end(seq);
        if let Some(task) = self.tasks.remove(&seq) {
            self.finish(task, Some(error));
        }
    }

    /// The smallest budget of at least `wanted` bytes in which the running requests can go on, and
    /// those that have yielded, one after another.
    pub(crate) fn room_for_running(&mut self, wanted: u64) -> u64 {
        let needed = self.scheduling(wanted, |scheduler, view| {
            scheduler.needed(view).max(scheduler.budget_least(view))
        });
        wanted.max(needed)
    }

    /// The smallest budget, in bytes, in which the smallest registered model can run a short
    /// request beside what the device keeps for itself.
    pub(crate) fn budget_least(&self) -> u64 {
        let needed = self.budget_needed(SHORT_POSITIONS).max(BUDGET_MIN);
        (self.store.reserve_bytes + needed).next_multiple_of(BUDGET_MIN)
    }

    /// Below so many bytes no registered model can run any request.
    pub(crate) fn budget_floor(&self) -> u64 {
        self.store.reserve_bytes + self.budget_needed(1)
    }

    /// Bytes that the smallest registered model needs for a request of so many positions.
    fn budget_needed(&self, positions: u32) -> u64 {
        let sizes = Sizes {
            models: &self.models,
            device: self.store.device.as_ref(),
            known: &self.scratch_sizes,
            rows_max: self.prefill_chunk.get(),
        };
        let needs = self.models.iter().map(|entry| {
            let id = rocmforge_scheduler::ModelId(entry.id.0);
            let states = entry.states.as_ref().map_or(0, |s| s.bytes(self.budget()));
            let kv = sizes.kv_bytes(id, positions);
            self.store.largest_unpinned(entry.id) + states + kv + sizes.scratch_bytes(id, 1, 1)
        });
        needs.min().unwrap_or(0)
    }

    pub(crate) fn budget(&self) -> u64 {
        self.store.budget()
    }

    /// Why a request cannot run.
    fn refused(&self, task: &Task, why: Refused) -> Error {
        let name = task.loaded.name();
        match why {
            Refused::NeverFits {
                positions,
                demand,
                budget_bytes,
                ..
            } => {
                let pinned = self.store.pinned_bytes();
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
