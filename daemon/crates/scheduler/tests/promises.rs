//! Gaps that are promised, by rule and on simulated machines with a device and a link.
//!
//! `ROCMFORGE_SEED=n cargo test -p rocmforge-scheduler promises` runs one seed.

use crate::bench;
use crate::bench::A;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_scheduler::*;

/// How long a slice lasts in the simulated engine, in microseconds.
const SLICE_US: u64 = 3_000;

/// Machines that are simulated: the same ones, or others with `ROCMFORGE_TEST_ALL`.
const SEEDS: u64 = 600;

/// Places for a pass of each model.
const PLACES: usize = 9;

/// A model of the simulated machine.
struct Simulated {
    id: ModelId,
    /// The most microseconds of a step, and how many a pass has.
    step_us: u64,
    steps: u64,
    /// Each so many-th step needs an upload, of so many microseconds of the link.
    uploads: Option<(u64, u64)>,
    /// The gap that its texts are promised.
    gap_us: Option<u64>,
    rests_us: u64,
    comes_at: u64,
    pass: Option<PassPlan>,
    at: u64,
    ready_at: Option<u64>,
    /// When its text had its last token.
    token_at: Option<u64>,
    had_us: u64,
    had_at: u64,
    waited_most_us: u64,
    longest_gap_us: u64,
}

impl Simulated {
    fn share(&self) -> Option<Share> {
        Some(Share {
            gap_us: self.gap_us?,
            pass_us: self.steps * self.step_us,
        })
    }

    fn view(&self, now: u64) -> ModelView {
        let left = match self.pass {
            Some(_) => self.steps - self.at,
            None => self.steps,
        };
        let promise = self.gap_us.map(|gap_us| Promise {
            due_us: match self.token_at {
                Some(at) => (at + gap_us).saturating_sub(now),
                None => u64::MAX,
            },
            pass_us: left * self.step_us,
            gap_us,
        });
        ModelView {
            model: self.id,
            waits: self.ready_at.is_some_and(|at| at > now),
            piece_us: self.step_us,
            promise,
            ..bench::model(A)
        }
    }
}

/// A device, a link, and an engine that gives them to models by the scheduler's word.
struct Machine {
    scheduler: Scheduler,
    config: Config,
    models: Vec<Simulated>,
    now: u64,
    link_free_at: u64,
    names: u64,
    idle_us: u64,
}

impl Machine {
    fn new(rng: &mut StdRng) -> Machine {
        let (wanted, long) = (rng.random_range(1..5), rng.random_range(1..5));
        // In half of all machines there are few places for passes beside the promised ones.
        let passes_max = match rng.random_bool(0.5) {
            true => Config::default().passes_max,
            false => PLACES,
        };
        let config = Config {
            model_patience_us: 400_000,
            passes_max,
            ..Config::default()
        };
        let models = (0..wanted + long).map(|n| {
            let is_short = n < wanted;
            let streams = !is_short && rng.random_bool(0.5);
            let uploads = (rng.random_range(1..8), rng.random_range(100..6_000));
            Simulated {
                id: ModelId(n),
                step_us: rng.random_range(100..6_000),
                steps: match is_short {
                    true => rng.random_range(1..4),
                    false => rng.random_range(10..300),
                },
                uploads: streams.then_some(uploads),
                gap_us: None,
                rests_us: match rng.random_bool(0.5) {
                    true => 0,
                    false => rng.random_range(1..100_000),
                },
                comes_at: 0,
                pass: None,
                at: 0,
                ready_at: None,
                token_at: None,
                had_us: 0,
                had_at: 0,
                waited_most_us: 0,
                longest_gap_us: 0,
            }
        });
        let mut machine = Machine {
            models: models.collect(),
            scheduler: Scheduler::new(config),
            config,
            now: 0,
            link_free_at: 0,
            names: 0,
            idle_us: 0,
        };
        for at in 0..wanted as usize {
            machine.ask_for_a_gap(at, rng);
        }
        machine
    }

    /// A model is promised a gap if it can be held, or the least that can.
    fn ask_for_a_gap(&mut self, at: usize, rng: &mut StdRng) {
        let piece_us = self.models.iter().map(|m| m.step_us).max().unwrap();
        let others: Vec<Share> = self.models.iter().filter_map(Simulated::share).collect();
        if others.len() >= Scheduler::promising_models_max(&self.config) {
            return;
        }
        let model = &mut self.models[at];
        let asked = Share {
            gap_us: rng.random_range(1_000..80_000),
            pass_us: model.steps * model.step_us,
        };
        model.gap_us = match least_gap(asked, &others, piece_us) {
            Ok(()) => Some(asked.gap_us),
            Err(cannot) => cannot.least_us.filter(|_| rng.random_bool(0.7)),
        };
    }

    fn ask<T>(&mut self, ask: impl FnOnce(&mut Scheduler, &View<'_>) -> T) -> T {
        let views: Vec<ModelView> = self.models.iter().map(|m| m.view(self.now)).collect();
        let view = View {
            budget_bytes: 1 << 30,
            held_bytes: 0,
            kept_bytes: 0,
            models: &views,
            costs: &bench::Bytes,
            spans_max: 64,
            link_bytes_per_ms: 10,
            beside_bytes: 1 << 30,
        };
        ask(&mut self.scheduler, &view)
    }

    fn has_text(&self, model: ModelId) -> bool {
        self.scheduler.sequences().any(|s| s.arrival.model == model)
    }

    /// Texts come for models that have none.
    fn arrivals(&mut self, rng: &mut StdRng) {
        for at in 0..self.models.len() {
            let model = &self.models[at];
            if model.comes_at > self.now || self.has_text(model.id) {
                continue;
            }
            self.names += 1;
            let more = rng.random_range(1..30);
            let arrival = Arrival {
                seq: SeqId(self.names),
                model: model.id,
                client: ClientId(u64::from(model.id.0)),
                class: Class::Interactive,
                kind: Kind::Generate,
                tokens: 1,
                positions_max: 1 + more,
                open_ended: false,
                whole: false,
                deadline: None,
                promised: model.gap_us.is_some(),
            };
            self.scheduler.arrive(arrival).unwrap();
            self.models[at].had_at = self.now;
        }
    }

    /// A slice, or the wait for somebody to come.
    fn slice(&mut self, rng: &mut StdRng) {
        self.arrivals(rng);
        self.ask(|scheduler, view| scheduler.admit(view, Tick(0), &mut Vec::new()));
        let model = match self.ask(Scheduler::next) {
            None => {
                let next = self.models.iter().map(|m| m.comes_at);
                self.now = next.filter(|at| *at > self.now).min().unwrap();
                return;
            }
            Some(Next::Pass(plan)) => {
                let model = &mut self.models[plan.model.0 as usize];
                assert!(model.pass.is_none());
                (model.at, model.ready_at) = (0, None);
                let id = plan.model;
                model.pass = Some(plan);
                id
            }
            Some(Next::GoOn(model)) => {
                self.waits_for_nothing(model);
                model
            }
        };
        self.run(model, rng);
        self.scheduler.assert_consistent();
    }

    /// The device rests only if nobody could go on, and nobody begin but in a place that is kept
    /// for promised passes.
    fn waits_for_nothing(&mut self, model: ModelId) {
        let ready_at = self.models[model.0 as usize].ready_at.unwrap_or(0);
        if ready_at <= self.now {
            return;
        }
        let passes_max = self.config.passes_max;
        let promised = |m: &&Simulated| m.gap_us.is_some() && m.pass.is_none();
        let kept = self.models.iter().filter(promised).count();
        for other in &self.models {
            let kept = match other.gap_us {
                Some(_) => 0,
                None => kept.min(passes_max - 1),
            };
            let has_place = self.scheduler.suspended() + kept < passes_max;
            let could = match other.pass {
                None => has_place && self.has_text(other.id),
                Some(_) => other.ready_at.is_none_or(|at| at <= self.now),
            };
            assert!(!could, "the device rests for nothing");
        }
        self.idle_us += ready_at - self.now;
        self.now = ready_at;
    }

    /// Microseconds of a model's next slice at most.
    fn limit_us(&mut self, id: ModelId) -> u64 {
        let slack = self.ask(|_, view| view.slack_us(id));
        slack.map_or(SLICE_US, |slack| slack.min(SLICE_US))
    }

    fn run(&mut self, id: ModelId, rng: &mut StdRng) {
        let limit = self.limit_us(id);
        let model = &mut self.models[id.0 as usize];
        model.waited_most_us = model.waited_most_us.max(self.now - model.had_at);
        let (begun, mut longest) = (self.now, 0);
        let ended = loop {
            if model.at == model.steps {
                break true;
            }
            if let Some((every, upload_us)) = model.uploads
                && model.at.is_multiple_of(every)
                && model.ready_at.is_none()
            {
                self.link_free_at = self.link_free_at.max(self.now) + upload_us;
                model.ready_at = Some(self.link_free_at);
                break false;
            }
            let took = rng.random_range(model.step_us / 2..=model.step_us);
            longest = longest.max(took).max(model.step_us);
            self.now += took;
            model.at += 1;
            model.ready_at = None;
            if slice_is_over(self.now - begun, longest, limit) && model.at < model.steps {
                break false;
            }
        };
        let took = self.now - begun;
        model.had_us += took;
        model.had_at = self.now;
        self.scheduler.took(id, took, ended);
        match ended {
            true => self.end_pass(id, rng),
            false => self.scheduler.suspend(id),
        }
    }

    fn end_pass(&mut self, id: ModelId, rng: &mut StdRng) {
        self.scheduler.pass_ended(id);
        let model = &mut self.models[id.0 as usize];
        let plan = model.pass.take().unwrap();
        let results = plan.spans.iter().map(|span| {
            let s = self.scheduler.sequence(span.seq).unwrap();
            SpanResult {
                seq: span.seq,
                rows: span.rows,
                appended: 1,
                ended: s.known + 1 >= s.arrival.positions_max,
            }
        });
        let results: Vec<SpanResult> = results.collect();
        if let Some(at) = model.token_at.replace(self.now) {
            model.longest_gap_us = model.longest_gap_us.max(self.now - at);
        }
        if results.iter().all(|r| r.ended) {
            model.token_at = None;
            model.comes_at = self.now + rng.random_range(0..=model.rests_us);
        }
        self.scheduler.computed(&results);
    }

    /// Every promise is kept, and whoever was promised nothing has the rest of the time.
    fn check(&self) {
        for model in &self.models {
            if let Some(gap) = model.gap_us {
                let longest = model.longest_gap_us;
                assert!(longest <= gap, "a gap of {longest} us, of {gap}");
            }
        }
        if self.config.passes_max < PLACES {
            return;
        }
        let busy: u64 = self.models.iter().map(|m| m.had_us).sum();
        let piece = self.models.iter().map(|m| m.step_us).max().unwrap();
        let promised = self.models.iter().filter_map(Simulated::share);
        // A promise brings a pass forward by what may come before it at the most.
        let passes: u64 = promised.clone().map(|p| p.pass_us).sum();
        let needed = promised.map(|p| {
            let every = p.gap_us.saturating_sub(piece + passes - p.pass_us);
            p.pass_us as f64 / every.max(p.pass_us) as f64
        });
        let left = (1.0 - needed.sum::<f64>()).max(0.0) / self.models.len() as f64;
        for model in self.models.iter().filter(|m| m.gap_us.is_none()) {
            let least = match model.rests_us == 0 && model.uploads.is_none() {
                true => left * 0.35 * busy as f64,
                false => 0.0,
            };
            assert!(
                model.had_us as f64 >= least,
                "{} of {busy} us, at least {least}",
                model.had_us
            );
            // Nobody is passed over for ever: it is overdue behind the others' patience, and then
            // has its turn between promised passes.
            let most = 3 * self.models.len() as u64 * 400_000;
            assert!(model.waited_most_us <= most, "{}", model.waited_most_us);
        }
    }
}

/// Random machines of models that were promised gaps, and of others with long passes, some of which
/// stream over one link: no gap is longer than promised where admission accepted it, the device
/// rests only if nobody can go on, and those who were promised nothing have the rest of the time.
///
/// Five faults in the scheduler were tried, and each fails here: the turns alone decide
/// (`Scheduler::before_promises` returns the model), slices end by their time alone
/// (`View::slack_us` without promises), every gap is promised (`least_gap` without its bound),
/// promised passes are not counted behind one another (`slack_us` with the least of each alone),
/// and no place is kept for them (`Scheduler::plan_beside`).
#[test]
fn no_gap_is_longer_than_promised_and_nobody_starves_for_it() {
    let seed = std::env::var("ROCMFORGE_SEED")
        .ok()
        .map(|seed| seed.parse().unwrap());
    let first = match std::env::var_os("ROCMFORGE_TEST_ALL") {
        Some(_) => rand::random_range(0..1 << 40),
        None => 0,
    };
    let seeds = seed.map_or(first..first + SEEDS, |seed: u64| seed..seed + 1);
    let (mut promises, mut near, mut rested) = (0, 0, 0);
    for seed in seeds {
        println!("ROCMFORGE_SEED={seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut machine = Machine::new(&mut rng);
        for _ in 0..4_000 {
            machine.slice(&mut rng);
        }
        machine.check();
        for model in &machine.models {
            if let Some(gap) = model.gap_us {
                promises += 1;
                near += usize::from(model.longest_gap_us * 10 >= gap * 8);
            }
        }
        rested += machine.idle_us;
    }
    println!("{promises} promises, of which {near} were needed");
    assert!(seed.is_some() || (promises > 600 && near * 3 > promises && rested > 0));
}

/// B is promised a gap, and others are as they are.
fn with_a_promise(due_us: u64) -> bench::Bench {
    let mut bench = bench::Bench::with(Config {
        model_patience_us: 10_000,
        ..Config::default()
    });
    bench.models[1].promise = Some(Promise {
        due_us,
        pass_us: 1_000,
        gap_us: 100_000,
    });
    bench
}

/// Where a promise is late with every pass, the others come to their turn in the end.
#[test]
fn a_promise_that_is_never_held_passes_over_nobody_without_end() {
    let mut bench = with_a_promise(0);
    bench.models[0].piece_us = 5_000;
    let mut late = bench.arrival(4, 2_000);
    (late.model, late.promised) = (bench::B, true);
    bench.come(late);
    bench.pass().unwrap();
    bench.comes(4, 2_000);
    let mut since = 0;
    let mut turns = 0;
    for _ in 0..1_000 {
        let plan = bench.pass().unwrap();
        since += bench::took_us(&plan);
        if plan.model == A {
            (since, turns) = (0, turns + 1);
        }
        assert!(since <= 120_000, "{since}");
    }
    assert!(turns > 5, "{turns}");
    assert!(turns < 100, "promises have the rest: {turns}");
}

/// What can only be computed whole needs the room that a promised pass would have beside it.
#[test]
fn room_for_promises_holds_up_no_pass_that_has_no_shorter_one() {
    let mut bench = with_a_promise(u64::MAX);
    (bench.budget, bench.beside_bytes) = (2_000, 100);
    let mut promised = bench.arrival(4, 40);
    (promised.model, promised.promised) = (bench::B, true);
    bench.come(promised);
    let mut whole = bench.arrival(64, 0);
    (whole.whole, whole.kind) = (true, Kind::Embed);
    let whole = bench.come(whole);
    let is_there = |plan: PassPlan| plan.spans.iter().any(|s| s.seq == whole && s.rows == 64);
    assert!((0..8).filter_map(|_| bench.pass()).any(is_there));
    // Beside prompts of any length room is kept.
    let long = bench.comes(64, 4);
    let mut rows = (0..8).filter_map(|_| bench.pass()).flat_map(|p| p.spans);
    assert!(rows.any(|s| s.seq == long && s.rows < 64));
}
