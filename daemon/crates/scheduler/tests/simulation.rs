//! Random arrivals, passes, cancellations, refusals and budget changes against a naive oracle that
//! holds the specification: vectors, sums and rules that look at everything. It is asked after
//! every step.
//!
//! `ROCMFORGE_SEED=n cargo test -p rocmforge-scheduler simulation` runs one seed; a seed
//! that failed is added to `KEPT`. `ROCMFORGE_RUNS=n` sets how many seeds are run.

use crate::oracle::World;
use crate::oracle::outcome::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Seeds that failed once, and what was wrong.
const KEPT: &[u64] = &[];
const RUNS: u64 = 400;
const STEPS: u64 = 4_000;

#[test]
fn random_arrivals_agree_with_the_oracle_and_all_that_is_admitted_ends() {
    let number = |name: &str| {
        let value = std::env::var(name).ok()?;
        Some(value.parse::<u64>().expect("a number"))
    };
    if let Some(seed) = number("ROCMFORGE_SEED") {
        run(seed, &mut Outcome::default());
        return;
    }
    let runs = number("ROCMFORGE_RUNS").unwrap_or(RUNS);
    let first: u64 = rand::random_range(0..1 << 40);
    println!(
        "seeds {first} to {}, and {} kept ones",
        first + runs - 1,
        KEPT.len()
    );
    let mut outcome = Outcome::default();
    for seed in KEPT.iter().copied().chain(first..first + runs) {
        run(seed, &mut outcome);
    }
    println!("{outcome:#?}");
    assert!(runs < RUNS || outcome.operations >= 1_000_000);
    outcome.assert_everything_happened();
}

fn run(seed: u64, outcome: &mut Outcome) {
    let failed = Announce(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new(&mut rng);
    for _ in 0..STEPS {
        step(&mut world, &mut rng, outcome);
        world.check();
        outcome.operations += 1;
    }
    world.drain(&mut rng, outcome);
    std::mem::forget(failed);
}

/// Names the seed when a run panics.
struct Announce(u64);

impl Drop for Announce {
    fn drop(&mut self) {
        println!("failed with ROCMFORGE_SEED={}", self.0);
    }
}

fn step(world: &mut World, rng: &mut StdRng, outcome: &mut Outcome) {
    match rng.random_range(0..100) {
        0..=11 => world.arrive(rng, outcome),
        12..=13 => world.cancel(rng, outcome),
        14..=17 => world.block(rng, outcome),
        18..=22 => world.unblock(rng),
        23 => world.change_budget(rng, outcome),
        24 if rng.random_bool(0.05) => world.unload(rng, outcome),
        25 => world.change_residency(rng),
        26..=28 => world.propose(rng),
        29 if rng.random_bool(0.3) => world.force_yield(rng, outcome),
        _ => world.turn(rng, outcome),
    }
}
