//! Clients that always want more places than there are, beside others that ask for little: those
//! wait a bounded number of passes, and nobody comes and goes for nothing.
//!
//! `ROCMFORGE_SEED=n cargo test -p rocmforge-scheduler contention` runs one seed.

use std::collections::BTreeMap;

use crate::bench::Bench;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_scheduler::*;

const RUNS: u64 = 200;
const PASSES: u64 = 1_500;
/// The longest text in positions.
const POSITIONS_MAX: u32 = 400;
/// Rows of prompts in a pass beside others' tokens.
const SHARED_ROWS: u64 = 16;

/// What happened.
#[derive(Debug, Default)]
struct Seen {
    modest: u64,
    /// Where what was computed is lost, and where it is kept.
    longest_wait: [u64; 2],
    yields: u64,
    slow_yields: u64,
    most_yields_of_one: u32,
}

/// Clients below `hogs` want all places, the others a few.
struct World {
    bench: Bench,
    config: Config,
    /// What a sequence has computed is there again after it yielded.
    keeps: bool,
    hogs: u64,
    modest: u64,
    /// Requests that a modest client has at once at most: its share.
    at_once: usize,
    /// Since when a sequence waits or runs.
    waits_since: BTreeMap<SeqId, u64>,
    runs_since: BTreeMap<SeqId, u64>,
    unready_since: BTreeMap<SeqId, u64>,
}

impl World {
    fn new(rng: &mut StdRng) -> World {
        let hogs = rng.random_range(1..4);
        let modest = rng.random_range(1..4);
        let config = Config {
            running_max: rng.random_range((hogs + modest) as usize..24),
            turn_passes: rng.random_range(1..16),
            waiting_max: 10_000,
            patience_passes: rng.random_range(20..600),
            ..Config::default()
        };
        let mut bench = Bench::with(config);
        bench.budget = 1 << 40;
        bench.spans_max = rng.random_range(24..64);
        World {
            bench,
            config,
            keeps: rng.random_bool(0.7),
            hogs,
            modest,
            at_once: config.running_max / (hogs + modest) as usize,
            waits_since: BTreeMap::new(),
            runs_since: BTreeMap::new(),
            unready_since: BTreeMap::new(),
        }
    }

    fn of(&self, client: u64) -> usize {
        let of = |s: &SequenceStatus| s.arrival.client == ClientId(client);
        self.bench.scheduler.sequences().filter(of).count()
    }

    fn comes(&mut self, client: u64, tokens: u32, more: u32) {
        let arrival = Arrival {
            client: ClientId(client),
            ..self.bench.arrival(tokens, more)
        };
        let seq = self.bench.come(arrival);
        self.waits_since.insert(seq, self.bench.scheduler.passes());
    }

    fn arrivals(&mut self, rng: &mut StdRng) {
        for hog in 0..self.hogs {
            while self.of(hog) < self.config.running_max + 3 {
                self.comes(
                    hog,
                    rng.random_range(1..12),
                    rng.random_range(1..POSITIONS_MAX - 12),
                );
            }
        }
        for client in self.hogs..self.hogs + self.modest {
            while self.of(client) < self.at_once && rng.random_bool(0.1) {
                self.comes(client, rng.random_range(1..12), rng.random_range(1..12));
            }
        }
    }

    /// Readers of the first client are slow at times.
    fn readers(&mut self, rng: &mut StdRng) {
        let passes = self.bench.scheduler.passes();
        let all: Vec<SequenceStatus> = self.bench.scheduler.sequences().collect();
        for s in all.iter().filter(|s| s.arrival.client == ClientId(0)) {
            let seq = s.arrival.seq;
            if s.running && rng.random_bool(0.01) {
                self.bench.scheduler.set_ready(seq, false);
                self.unready_since.entry(seq).or_insert(passes);
            } else if rng.random_bool(0.03) {
                self.bench.scheduler.set_ready(seq, true);
                self.unready_since.remove(&seq);
            }
        }
    }

    fn pass(&mut self, seen: &mut Seen) {
        let before = self.bench.scheduler.passes();
        let mut running = self.runs_since.keys();
        let idle = running.all(|seq| self.unready_since.contains_key(seq));
        let actions = self.bench.admit();
        for (n, action) in actions.iter().enumerate() {
            match *action {
                Action::Yielded(seq) => {
                    let next = actions.get(n + 1);
                    self.yielded(seq, next, (before, idle), seen);
                }
                Action::Admitted(seq) => {
                    let waited = before - self.waits_since.remove(&seq).unwrap();
                    self.runs_since.insert(seq, before);
                    let s = self.bench.scheduler.sequence(seq).unwrap();
                    if self.keeps && s.yields > 0 {
                        self.bench.scheduler.reused(seq, s.known - 1);
                    }
                    if s.arrival.client.0 >= self.hogs {
                        let longest = &mut seen.longest_wait[usize::from(self.keeps)];
                        *longest = (*longest).max(waited);
                        seen.modest += 1;
                    }
                }
                ref other => panic!("{other:?}"),
            }
        }
        // Whoever has yielded often keeps his place until his prompt is computed again.
        let again = u64::from(POSITIONS_MAX) * self.config.running_max as u64 / SHARED_ROWS;
        let most = self.config.turn_passes + if self.keeps { 2 } else { again };
        for (seq, since) in &self.waits_since {
            let client = self.bench.scheduler.sequence(*seq).unwrap().arrival.client;
            let waited = before - since;
            assert!(
                client.0 < self.hogs || waited <= most,
                "{seq:?} of {client:?} has waited for {waited} passes: {:?}",
                self.config
            );
        }
        if let Some(Next::Pass(plan)) = self.bench.with_view(Scheduler::next) {
            self.bench.computed(&plan);
        }
        let there: Vec<SeqId> = self.runs_since.keys().copied().collect();
        for seq in there {
            if self.bench.scheduler.sequence(seq).is_none() {
                self.runs_since.remove(&seq);
                self.unready_since.remove(&seq);
            }
        }
    }

    /// Whoever yields has had his turn or reads nothing, and another client has it next; unless
    /// nobody can go on.
    fn yielded(
        &mut self,
        seq: SeqId,
        next: Option<&Action>,
        (now, idle): (u64, bool),
        seen: &mut Seen,
    ) {
        let Some(Action::Admitted(by)) = next else {
            panic!("{seq:?} yields for nothing");
        };
        let s = self.bench.scheduler.sequence(seq).unwrap();
        let by = self.bench.scheduler.sequence(*by).unwrap();
        let slow = self.unready_since.contains_key(&seq);
        let ran = now - self.runs_since.remove(&seq).unwrap();
        self.waits_since.insert(seq, now);
        if idle {
            return;
        }
        assert_ne!(s.arrival.client, by.arrival.client, "{s:?} to {by:?}");
        assert!(ran >= self.config.turn_passes, "{s:?} has had {ran} passes");
        assert!(slow || s.arrival.client.0 < self.hogs, "{s:?} to {by:?}");
        seen.yields += 1;
        seen.slow_yields += u64::from(slow);
        seen.most_yields_of_one = seen.most_yields_of_one.max(s.yields);
    }
}

#[test]
fn who_asks_for_little_waits_a_bounded_number_of_passes() {
    let seed = std::env::var("ROCMFORGE_SEED").ok();
    let one = seed.map(|seed| seed.parse::<u64>().expect("a number"));
    let first = one.unwrap_or_else(|| rand::random_range(0..1 << 40));
    let runs = if one.is_some() { 1 } else { RUNS };
    let mut seen = Seen::default();
    for seed in first..first + runs {
        println!("ROCMFORGE_SEED={seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut world = World::new(&mut rng);
        for _ in 0..PASSES {
            world.arrivals(&mut rng);
            world.readers(&mut rng);
            world.pass(&mut seen);
        }
        // Nobody comes any more, and all ends.
        let all: Vec<SeqId> = world
            .bench
            .scheduler
            .sequences()
            .map(|s| s.arrival.seq)
            .collect();
        all.iter()
            .for_each(|seq| world.bench.scheduler.set_ready(*seq, true));
        let mut passes = 0;
        while world.bench.scheduler.sequences().count() > 0 {
            world.pass(&mut seen);
            passes += 1;
            assert!(passes < 100_000);
        }
    }
    println!("{seen:#?}");
    let enough = seen.modest > 1000 && seen.yields > 1000 && seen.slow_yields > 100;
    assert!(one.is_some() || enough, "{seen:?}");
}
