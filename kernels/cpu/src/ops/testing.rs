//! Random input for the tests of the operations, from a printed seed, and
//! comparisons that name what differs.

use std::num::NonZeroUsize;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::Pool;

pub(super) fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).expect("at least one thread")).expect("threads")
}

/// Random numbers of one test. `ROCMFORGE_TEST_SEED` repeats a run.
pub(super) struct Random(StdRng);

impl Random {
    pub(super) fn new(name: &str) -> Random {
        let seed = std::env::var("ROCMFORGE_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| rand::rng().next_u64());
        println!("{name}: ROCMFORGE_TEST_SEED={seed}");
        Random(StdRng::seed_from_u64(seed))
    }

    /// About normally distributed.
    pub(super) fn normal(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| (0..12).map(|_| self.0.random::<f32>()).sum::<f32>() - 6.0)
            .collect()
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }
}

/// Every element of `found` is within `tolerance * (1 + |expected|)` of `expected`.
pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found) - expected).abs();
        assert!(
            difference <= tolerance * (1.0 + expected.abs()),
            "{what}: element {i} is {found}, expected {expected}"
        );
    }
}
