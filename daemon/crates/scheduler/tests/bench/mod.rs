//! A scheduler with a roomy view of two models, asked and answered step by step.

use rocmforge_scheduler::*;

pub(crate) const A: ModelId = ModelId(0);
pub(crate) const B: ModelId = ModelId(1);

/// A position takes a byte, in pages of 4; a row of a pass takes one, a row of logits 10.
pub(crate) struct Bytes;

impl Costs for Bytes {
    fn kv_bytes(&self, _: ModelId, positions: u32) -> u64 {
        u64::from(positions.next_multiple_of(4))
    }

    fn scratch_bytes(&self, _: ModelId, rows: u32, outputs: u32) -> u64 {
        u64::from(rows) + 10 * u64::from(outputs)
    }
}

pub(crate) fn model(model: ModelId) -> ModelView {
    ModelView {
        model,
        segment_bytes: 100,
        rows_max: 64,
        shared_rows: 16,
        outputs_max: 16,
        fits: true,
        switch_bytes: 0,
        waits: false,
        piece_us: 0,
        promise: None,
    }
}

/// Microseconds that a pass takes here: a millisecond, and one more for each 128 rows.
pub(crate) fn took_us(plan: &PassPlan) -> u64 {
    1000 * u64::from(1 + plan.rows / 128)
}

/// A scheduler, a roomy view of two models, and what was decided.
pub(crate) struct Bench {
    pub(crate) scheduler: Scheduler,
    pub(crate) models: [ModelView; 2],
    pub(crate) budget: u64,
    pub(crate) spans_max: u32,
    pub(crate) beside_bytes: u64,
    pub(crate) now: u64,
    pub(crate) names: u64,
    pub(crate) actions: Vec<Action>,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::with(Config {
            promise_positions: 8,
            batch_lag_us: 16_000,
            ..Config::default()
        })
    }

    pub(crate) fn with(config: Config) -> Bench {
        Bench {
            scheduler: Scheduler::new(config),
            models: [model(A), model(B)],
            budget: 10_000,
            spans_max: 64,
            beside_bytes: 10_000,
            now: 0,
            names: 0,
            actions: Vec::new(),
        }
    }

    /// An interactive generation of client 0 with model A, of so many tokens, that ends after
    /// `more`.
    pub(crate) fn arrival(&mut self, tokens: u32, more: u32) -> Arrival {
        self.names += 1;
        Arrival {
            seq: SeqId(self.names),
            model: A,
            client: ClientId(0),
            class: Class::Interactive,
            kind: Kind::Generate,
            tokens,
            positions_max: tokens + more,
            open_ended: false,
            whole: false,
            deadline: None,
            promised: false,
        }
    }

    pub(crate) fn come(&mut self, arrival: Arrival) -> SeqId {
        self.scheduler.arrive(arrival).unwrap();
        arrival.seq
    }

    pub(crate) fn comes(&mut self, tokens: u32, more: u32) -> SeqId {
        let arrival = self.arrival(tokens, more);
        self.come(arrival)
    }

    pub(crate) fn with_view<T>(&mut self, ask: impl FnOnce(&mut Scheduler, &View<'_>) -> T) -> T {
        let view = View {
            budget_bytes: self.budget,
            held_bytes: 0,
            kept_bytes: 0,
            models: &self.models,
            costs: &Bytes,
            spans_max: self.spans_max,
            link_bytes_per_ms: 10,
            beside_bytes: self.beside_bytes,
        };
        ask(&mut self.scheduler, &view)
    }

    pub(crate) fn admit(&mut self) -> Vec<Action> {
        let now = Tick(self.now);
        let mut actions = Vec::new();
        self.with_view(|scheduler, view| scheduler.admit(view, now, &mut actions));
        self.scheduler.assert_consistent();
        actions
    }

    /// Admits and plans; the pass is not run.
    pub(crate) fn plan(&mut self) -> Option<PassPlan> {
        self.actions = self.admit();
        match self.with_view(Scheduler::next)? {
            Next::Pass(plan) => Some(plan),
            Next::GoOn(model) => panic!("no pass of {model:?} is suspended"),
        }
    }

    /// Admits, plans and runs a pass in which no draft is right.
    pub(crate) fn pass(&mut self) -> Option<PassPlan> {
        let plan = self.plan()?;
        self.computed(&plan);
        Some(plan)
    }

    pub(crate) fn computed(&mut self, plan: &PassPlan) {
        self.scheduler.took(plan.model, took_us(plan), true);
        self.results(plan);
    }

    /// The pass is over; no draft was right.
    pub(crate) fn results(&mut self, plan: &PassPlan) {
        self.scheduler.pass_ended(plan.model);
        let mut results = Vec::new();
        for (at, span) in plan.spans.iter().enumerate() {
            let s = self.scheduler.sequence(span.seq).unwrap();
            let rows = if at < plan.decode_spans { 1 } else { span.rows };
            let appended = u32::from(span.outputs > 0 && s.arrival.kind == Kind::Generate);
            results.push(SpanResult {
                seq: span.seq,
                rows,
                appended,
                ended: s.arrival.kind == Kind::Generate
                    && s.known + appended >= s.arrival.positions_max,
            });
        }
        self.scheduler.computed(&results);
    }

    pub(crate) fn running(&self, seq: SeqId) -> bool {
        self.scheduler.sequence(seq).is_some_and(|s| s.running)
    }
}

pub(crate) fn rows(plan: &PassPlan) -> Vec<(u64, u32)> {
    plan.spans.iter().map(|s| (s.seq.0, s.rows)).collect()
}

/// A generation of a client comes, with model A, of so many tokens, that ends after `more`.
pub(crate) fn comes_of(
    bench: &mut Bench,
    client: u64,
    class: Class,
    tokens: u32,
    more: u32,
) -> SeqId {
    let arrival = Arrival {
        client: ClientId(client),
        class,
        ..bench.arrival(tokens, more)
    };
    bench.come(arrival)
}
