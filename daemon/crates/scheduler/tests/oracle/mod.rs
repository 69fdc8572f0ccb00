//! The naive oracle: what happened to each sequence, kept from the answers alone, and what was
//! allowed.

pub(crate) mod outcome;
mod passes;
mod places;
mod room;
mod rules;
mod terms;

use std::collections::BTreeMap;

use outcome::Outcome;
use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_scheduler::*;

use rules::Phase;

/// The longest slice here.
const SLICE_US_MAX: u64 = 5_000;

/// A sequence as the oracle knows it.
#[derive(Clone, Debug)]
pub(crate) struct Seq {
    a: Arrival,
    entered: u64,
    /// Known tokens at which it ends.
    end_at: u32,
    n_past: u32,
    known: u32,
    ready: bool,
    running: bool,
    begun: bool,
    protected: bool,
    refusals: u32,
    yields: u32,
    /// When it was last admitted, and with how many tokens.
    admitted: (u64, u32),
    /// The clock when it was last admitted, and the time of slices with rows of its prompt since.
    admitted_us: u64,
    prompt_us: u64,
    /// The part of it with positions that were computed before, and how many those are.
    again_us: u64,
    again_until: u32,
    /// Times that it gave its room for a while, and the clock up to which it leaves it.
    terms: u32,
    out_until: u64,
    /// Since when its reader has no room.
    unready_since: Option<u64>,
    last_pass: u64,
    /// Passes of its model in a row that left it out although it could go on.
    left_out: u64,
    /// A suspended pass has rows of it.
    in_pass: bool,
}

impl Seq {
    fn goal(&self) -> u32 {
        self.known - u32::from(self.a.kind == Kind::Score)
    }

    fn ahead(&self) -> u32 {
        self.goal() - self.n_past
    }

    fn runnable(&self) -> bool {
        self.running && self.ready && !self.in_pass && self.ahead() > 0
    }

    fn goes_on(&self) -> bool {
        self.in_pass || self.runnable()
    }

    fn decodes(&self) -> bool {
        self.a.kind == Kind::Generate && self.ahead() == 1
    }

    fn promise_least(&self) -> u32 {
        if self.a.open_ended {
            self.goal()
        } else {
            self.a.positions_max
        }
    }

    fn class(&self) -> Class {
        if self.protected {
            Class::Interactive
        } else {
            self.a.class
        }
    }
}

/// What things cost here: pages, and scratch that is a sum.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    page_positions: u32,
    page_bytes: u64,
    row_bytes: u64,
    output_bytes: u64,
}

impl Costs for Machine {
    fn kv_bytes(&self, model: ModelId, positions: u32) -> u64 {
        let state = u64::from(model.0) * 7;
        state + u64::from(positions.div_ceil(self.page_positions)) * self.page_bytes
    }

    fn scratch_bytes(&self, model: ModelId, rows: u32, outputs: u32) -> u64 {
        assert!(rows > 0 && outputs > 0);
        u64::from(model.0 + 1) * 8
            + u64::from(rows) * self.row_bytes
            + u64::from(outputs) * self.output_bytes
    }
}

/// The scheduler, and what the oracle knows beside it.
pub(crate) struct World {
    scheduler: Scheduler,
    config: Config,
    machine: Machine,
    models: Vec<ModelView>,
    /// In the order of arrival.
    seqs: Vec<Seq>,
    /// Positions that those are promised who run, since the last turn began.
    promises: BTreeMap<SeqId, u32>,
    /// For each client and class, passes planned when one of it was last admitted for the first
    /// time.
    admitted_at: Vec<(ClientId, Class, u64)>,
    /// Microseconds of all slices so far.
    clock: u64,
    /// For each model, the clock when it last had a slice or nothing to compute.
    model_since: Vec<u64>,
    budget: u64,
    /// A budget that everything fits alone.
    roomy: u64,
    held: u64,
    spans_max: u32,
    link_bytes_per_ms: u64,
    /// What a further pass may take beside suspended ones.
    beside_bytes: u64,
    /// Passes under way that were left between two slices.
    suspended: Vec<PassPlan>,
    now: u64,
    names: u64,
    passes: u64,
    last_model: Option<ModelId>,
    /// The last pass's guess whether the next one is of its model.
    guess: Option<bool>,
}

impl World {
    pub(crate) fn new(rng: &mut StdRng) -> World {
        let config = Config {
            running_max: rng.random_range(1..12),
            waiting_max: rng.random_range(4..24),
            promise_positions: rng.random_range(1..40),
            least_rows: rng.random_range(1..8),
            bypass_max: rng.random_range(0..4),
            patience_passes: rng.random_range(20..80),
            batch_patience_passes: rng.random_range(40..160),
            model_patience_us: rng.random_range(100..60_000),
            turn_passes: rng.random_range(1..12),
            term_us: rng.random_range(1..100_000),
            term_returns: rng.random_range(1..10),
            switch_us_max: rng.random_range(0..20_000),
            batch_lag_us: rng.random_range(0..8_000),
            short_pass_us: rng.random_range(0..2 * SLICE_US_MAX),
            passes_max: rng.random_range(1..4),
            refusals_max: rng.random_range(1..4),
        };
        let machine = Machine {
            page_positions: rng.random_range(1..9),
            page_bytes: rng.random_range(1..200),
            row_bytes: rng.random_range(1..20),
            output_bytes: rng.random_range(1..50),
        };
        let n_models = rng.random_range(1..5);
        let models: Vec<ModelView> = (0..n_models)
            .map(|model| {
                let rows_max = rng.random_range(1..64);
                ModelView {
                    model: ModelId(model),
                    segment_bytes: rng.random_range(1..500),
                    rows_max,
                    shared_rows: rng.random_range(1..=rows_max),
                    outputs_max: rng.random_range(1..16),
                    fits: rng.random_bool(0.5),
                    switch_bytes: rng.random_range(0..2000),
                    waits: false,
                    piece_us: 0,
                    promise: None,
                }
            })
            .collect();
        let roomy = rng.random_range(3_000..12_000);
        World {
            scheduler: Scheduler::new(config),
            config,
            machine,
            admitted_at: Vec::new(),
            model_since: vec![0; models.len()],
            models,
            seqs: Vec::new(),
            promises: BTreeMap::new(),
            budget: roomy,
            roomy,
            held: rng.random_range(0..300),
            spans_max: rng.random_range(1..12),
            link_bytes_per_ms: rng.random_range(1..400),
            beside_bytes: rng.random_range(0..12_000),
            suspended: Vec::new(),
            clock: 0,
            now: 0,
            names: 0,
            passes: 0,
            last_model: None,
            guess: None,
        }
    }

    fn view(&self) -> View<'_> {
        View {
            budget_bytes: self.budget,
            held_bytes: self.held,
            kept_bytes: 0,
            models: &self.models,
            costs: &self.machine,
            spans_max: self.spans_max,
            link_bytes_per_ms: self.link_bytes_per_ms,
            beside_bytes: self.beside_bytes,
        }
    }

    fn ask<T>(&mut self, question: impl FnOnce(&mut Scheduler, &View<'_>) -> T) -> T {
        let nobody = Scheduler::new(self.config);
        let mut scheduler = std::mem::replace(&mut self.scheduler, nobody);
        let answer = question(&mut scheduler, &self.view());
        self.scheduler = scheduler;
        answer
    }

    fn at(&self, seq: SeqId) -> usize {
        let at = self.seqs.iter().position(|s| s.a.seq == seq);
        at.expect("a known sequence")
    }

    pub(crate) fn arrive(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let kind = match rng.random_range(0..10) {
            0 => Kind::Score,
            1 => Kind::Embed,
            _ => Kind::Generate,
        };
        let tokens = match rng.random_range(0..4) {
            0 => rng.random_range(2..120),
            _ => rng.random_range(2..20),
        };
        let more = match kind {
            Kind::Generate => rng.random_range(1..40),
            Kind::Score | Kind::Embed => 0,
        };
        let seq = SeqId(self.names);
        let a = Arrival {
            seq,
            model: self.models[rng.random_range(0..self.models.len())].model,
            client: ClientId(rng.random_range(0..4)),
            class: match rng.random_bool(0.6) {
                true => Class::Interactive,
                false => Class::Batch,
            },
            kind,
            tokens,
            positions_max: tokens + more,
            open_ended: kind == Kind::Generate && rng.random_bool(0.5),
            whole: false,
            deadline: rng
                .random_bool(0.1)
                .then(|| Tick(self.now + rng.random_range(1..200))),
            promised: kind == Kind::Generate && rng.random_bool(0.15),
        };
        let waiting = |s: &&Seq| !s.running;
        let of_client = |s: &&Seq| s.a.client == a.client;
        let all = self.seqs.iter().filter(waiting).count();
        // Those that yielded wait, too, and had to be let in.
        let free = self.config.waiting_max.saturating_sub(all);
        let of_client = self.seqs.iter().filter(waiting).filter(of_client).count();
        match self.scheduler.arrive(a) {
            Ok(()) => assert!(free > 0 && of_client < 7 * free, "{of_client}, {free}"),
            Err(NotTaken::QueueFull { .. }) => {
                assert_eq!(free, 0);
                outcome.queue_full += 1;
                return;
            }
            Err(NotTaken::LeftToOthers { .. }) => {
                assert!(free > 0 && of_client >= 7 * free, "{of_client}, {free}");
                outcome.left_to_others += 1;
                return;
            }
        }
        self.names += 1;
        outcome.arrived += 1;
        self.seqs.push(Seq {
            a,
            entered: self.passes,
            end_at: tokens + rng.random_range(1..=more.max(1)),
            n_past: 0,
            known: tokens,
            ready: true,
            running: false,
            begun: false,
            protected: false,
            refusals: 0,
            yields: 0,
            admitted: (0, 0),
            admitted_us: 0,
            prompt_us: 0,
            again_us: 0,
            again_until: 0,
            terms: 0,
            out_until: 0,
            unready_since: None,
            last_pass: self.passes,
            left_out: 0,
            in_pass: false,
        });
    }

    fn any(&self, rng: &mut StdRng) -> Option<usize> {
        (!self.seqs.is_empty()).then(|| rng.random_range(0..self.seqs.len()))
    }

    pub(crate) fn cancel(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let Some(at) = self.any(rng) else {
            return;
        };
        let gone = self.seqs.remove(at);
        assert!(self.scheduler.end(gone.a.seq) && !self.scheduler.end(gone.a.seq));
        outcome.cancelled += 1;
    }

    pub(crate) fn block(&mut self, rng: &mut StdRng, _: &mut Outcome) {
        // Sometimes all readers are slow at once.
        let all = rng.random_bool(0.05);
        let one = self.any(rng);
        for at in 0..self.seqs.len() {
            if all || Some(at) == one {
                self.seqs[at].ready = false;
                self.seqs[at].unready_since.get_or_insert(self.passes);
                self.scheduler.set_ready(self.seqs[at].a.seq, false);
            }
        }
    }

    pub(crate) fn unblock(&mut self, rng: &mut StdRng) {
        let share = rng.random_range(0.2..1.0);
        for s in &mut self.seqs {
            if !s.ready && rng.random_bool(share) {
                s.ready = true;
                s.unready_since = None;
                self.scheduler.set_ready(s.a.seq, true);
            }
        }
    }

    pub(crate) fn change_budget(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let least = self.scheduler.budget_least(&self.view());
        let before = self.budget;
        self.budget = match rng.random_range(0..10) {
            // Less than what has begun needs: someone is refused.
            0 if least > 0 => least - 1,
            1..=4 => rng.random_range(least..=least.max(self.roomy)),
            _ => self.roomy,
        };
        outcome.budget_shrunk += u64::from(self.budget < before);
    }

    pub(crate) fn unload(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let model = self.models[rng.random_range(0..self.models.len())].model;
        let gone = self.scheduler.model_unloaded(model);
        let expected = self.seqs.iter().filter(|s| s.a.model == model);
        assert_eq!(gone, Vec::from_iter(expected.map(|s| s.a.seq)));
        self.seqs.retain(|s| s.a.model != model);
        self.suspended.retain(|plan| plan.model != model);
        outcome.unloaded += u64::from(!gone.is_empty());
    }

    pub(crate) fn change_residency(&mut self, rng: &mut StdRng) {
        let at = rng.random_range(0..self.models.len());
        self.models[at].switch_bytes = rng.random_range(0..2000);
        self.beside_bytes = rng.random_range(0..12_000);
        self.models[at].fits = rng.random_bool(0.5);
        // A segment that is pinned is counted as held; what runs is left its room, as by the
        // engine.
        let held = self.held;
        self.held = rng.random_range(0..300);
        if self.scheduler.budget_least(&self.view()) > self.budget {
            self.held = held;
        }
    }

    pub(crate) fn propose(&mut self, rng: &mut StdRng) {
        for s in self.seqs.iter().filter(|s| s.running) {
            self.scheduler.propose(s.a.seq, rng.random_range(0..5));
        }
    }

    pub(crate) fn force_yield(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let mut actions = Vec::new();
        if self.scheduler.yield_one(&mut actions).is_some() {
            outcome.yielded_forced += 1;
        } else {
            let mut running = self.seqs.iter().filter(|s| s.running);
            assert!(running.clone().count() < 2 || running.all(|s| s.in_pass));
        }
        self.carry_out(&actions, Phase::Forced, rng, &mut Outcome::default());
    }

    /// A turn of the engine's loop: admits, plans a pass, and runs it.
    pub(crate) fn turn(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        self.now += rng.random_range(0..3);
        let waited = self.seqs.iter().any(|s| !s.running);
        // What is in a suspended pass keeps what it was promised.
        let least = |s: &Seq| match s.in_pass {
            true => self.promised(s),
            false => s.promise_least(),
        };
        let fitted = self.least_demand(least) <= self.budget;
        let failed = self
            .seqs
            .iter()
            .any(|s| s.running && !s.in_pass && s.refusals > self.config.refusals_max);
        for s in self.seqs.iter_mut().filter(|s| s.running) {
            let patience = match s.a.class {
                Class::Interactive => self.config.patience_passes,
                Class::Batch => self.config.batch_patience_passes,
            };
            s.protected |= self.passes - s.entered >= patience;
        }
        let now = Tick(self.now);
        let mut kept = Vec::new();
        self.ask(|scheduler, view| scheduler.keep(view, now, &mut kept));
        self.carry_out(&kept, Phase::Keep, rng, outcome);
        self.note_promises();
        let mut actions = Vec::new();
        self.ask(|scheduler, view| scheduler.admit(view, now, &mut actions));
        self.carry_out(&actions, Phase::Admit, rng, outcome);
        let yields = |a: &&Action| matches!(a, Action::Yielded(_));
        let yielded = kept.iter().chain(&actions).find(yields);
        assert!(
            yielded.is_none() || waited || !fitted,
            "yields for nothing: {yielded:?}"
        );
        assert!(
            !failed || !kept.is_empty() || !actions.is_empty(),
            "failed too often"
        );
        self.check_admitted();
        let short = self.scheduler.is_short_of_room();
        outcome.short_of_room += u64::from(short);
        for at in 0..self.models.len() {
            self.models[at].waits = rng.random_bool(0.3);
        }
        let upcoming = self.scheduler.upcoming_models(None, &self.view());
        match self.ask(Scheduler::next) {
            None => {
                assert!(
                    !self.seqs.iter().any(Seq::goes_on),
                    "someone could go on: {:#?}",
                    self.seqs
                );
                outcome.stuck += u64::from(!self.seqs.is_empty());
            }
            Some(Next::Pass(plan)) => {
                let first = upcoming[0] == plan.model;
                assert!(
                    first || !self.suspended.is_empty(),
                    "what was said to come comes"
                );
                self.check_plan(&plan, outcome);
                self.slice(plan, rng, outcome);
            }
            Some(Next::GoOn(model)) => {
                let others = |s: &Seq| s.runnable() && s.a.model != model;
                outcome.held_back +=
                    u64::from(self.model_waits(model) && self.seqs.iter().any(others));
                let at = self.suspended.iter().position(|plan| plan.model == model);
                let plan = self.suspended.remove(at.expect("a suspended pass"));
                self.check_goes_on(model, outcome);
                self.slice(plan, rng, outcome);
            }
        }
    }

    /// Nobody comes any more and all readers read: everybody ends, after no more passes than their
    /// rows need.
    pub(crate) fn drain(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        for s in &mut self.seqs {
            s.ready = true;
            s.unready_since = None;
            self.scheduler.set_ready(s.a.seq, true);
        }
        self.budget = self.roomy.max(self.scheduler.budget_least(&self.view()));
        let rows: u64 = self.seqs.iter().map(|s| u64::from(s.a.positions_max)).sum();
        // A sequence that yields computes its rows again; each pass may fail.
        let most = 4 * rows + 100;
        let mut turns = 0;
        while !self.seqs.is_empty() {
            self.turn(rng, outcome);
            self.check();
            turns += 1;
            assert!(turns <= most, "{turns} turns: {:#?}", self.seqs);
        }
        assert_eq!(self.scheduler.sequences().count(), 0);
        outcome.drained += 1;
    }
}
