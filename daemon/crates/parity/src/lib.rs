//! Every operation and weight type on one device against another, usually a GPU against the host.
//!
//! [`cases()`] is the table; [`Pair::compare`] runs a case on both devices, from the same seed, and
//! tells how far apart the results are. The device's own test and `rocmforge-bench gpu` both use
//! it.
//!
//! Tolerances: both devices round a product's input to 8 bits a block of 32 (a GPU to f16 instead
//! where the vendor's library multiplies), each with its own scale, so two right results differ by
//! a small share of the result's size. With float weights neither rounds to less than 22 bits.
//! Norms, rotations and sums are f32 on both and differ by their order of summation; operations
//! with a state add to it from row to row, and their tolerances follow from the terms of a sum and
//! the rows (`cases/recurrent.rs`); attention has keys and values in the same type on both, and
//! multiplies many rows in f16, but for pages of f32. Errors are measured as the root of the mean
//! square of the difference over that of the reference's result.

#![forbid(unsafe_code)]

mod cases;
pub mod check;
mod rows;
mod run;
mod states;
mod weights;

use std::collections::BTreeMap;

use rocmforge_device::Device;

pub use cases::{Case, Extent, cases};
use run::ARENA;

/// Why a comparison could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device refused or failed.
    #[error("{case}, seed {seed}: the {kind} device")]
    Device {
        /// The case.
        case: String,
        /// Seed of the case's inputs.
        seed: u64,
        /// Which device.
        kind: &'static str,
        /// The device's error.
        source: Box<rocmforge_device::Error>,
    },
    /// The case's weights could not be written or mapped.
    #[error("a temporary file of weights: {0}; TMPDIR names the folder")]
    File(String),
    /// The case itself makes no sense.
    #[error("{0}")]
    Case(String),
}

/// How far two results for one buffer of a case are apart.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The operation, with the weight type where it has one.
    pub operation: String,
    /// The case: shapes and numbers of rows.
    pub case: String,
    /// Which buffer.
    pub buffer: &'static str,
    /// The seed of the case's data.
    pub seed: u64,
    /// Relative error.
    pub error: f64,
    /// Most that it may be.
    pub tolerance: f64,
    /// Within the tolerance, and finite throughout.
    pub right: bool,
}

/// A device and the one that it is compared with.
pub struct Pair {
    reference: Box<dyn Device>,
    device: Box<dyn Device>,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair")
            .field("reference", &self.reference.info())
            .field("device", &self.device.info())
            .finish()
    }
}

impl Pair {
    /// Gives both devices, which must be fresh, their memory: 144 MiB each.
    ///
    /// # Errors
    /// A device refuses it.
    pub fn new(
        mut reference: Box<dyn Device>,
        mut device: Box<dyn Device>,
    ) -> Result<Self, rocmforge_device::Error> {
        for device in [&mut reference, &mut device] {
            device.set_capacity(ARENA)?;
            let fixed = device.reserve_bytes(ARENA);
            assert!(
                fixed < run::SLAB,
                "the device wants {fixed} bytes for itself"
            );
            device.set_reserve(0, fixed)?;
        }
        Ok(Self { reference, device })
    }

    /// Runs a case on both.
    ///
    /// # Errors
    /// One of them fails, or the disk does.
    pub fn compare(&mut self, case: &Case, seed: u64) -> Result<Vec<Comparison>, Error> {
        let expected = run::run(self.reference.as_mut(), case, seed)?;
        let got = run::run(self.device.as_mut(), case, seed)?;
        let pairs = got.into_iter().zip(expected);
        Ok(pairs
            .map(|((buffer, got), (_, expected))| {
                let error = difference(&got, &expected);
                Comparison {
                    operation: case.operation.clone(),
                    case: case.name.clone(),
                    buffer,
                    seed,
                    error,
                    tolerance: case.tolerance,
                    right: error <= case.tolerance && got.iter().all(|x| x.is_finite()),
                }
            })
            .collect())
    }
}

/// The largest relative error of each operation, with its tolerance.
pub fn worst(comparisons: &[Comparison]) -> Vec<(String, f64, f64)> {
    let mut worst: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for c in comparisons {
        let entry = worst.entry(&c.operation).or_insert((0.0, c.tolerance));
        // A NaN is worse than any number.
        if c.error.is_nan() || c.error > entry.0 {
            *entry = (c.error, c.tolerance);
        }
    }
    let owned =
        |(name, (error, tolerance)): (&str, (f64, f64))| (name.to_owned(), error, tolerance);
    worst.into_iter().map(owned).collect()
}

/// Root of the mean square of the difference, over that of the expected values.
fn difference(got: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let pairs = got.iter().zip(expected);
    let wrong: f64 = pairs
        .map(|(&a, &b)| square(f64::from(a) - f64::from(b)))
        .sum();
    let size: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
    (wrong / size.max(1e-30)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Work;
    use rocmforge_device::Op;
    use rocmforge_device_cpu::{HostConfig, HostDevice};
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;

    fn host(threads: usize) -> Box<dyn Device> {
        let threads = NonZeroUsize::new(threads);
        Box::new(
            HostDevice::new(HostConfig {
                threads,
                ..HostConfig::default()
            })
            .unwrap(),
        )
    }

    #[test]
    fn the_host_agrees_with_itself_whatever_its_threads() {
        let mut pair = Pair::new(host(1), host(3)).unwrap();
        let mut all = Vec::new();
        for (i, case) in cases(Extent::Quick).iter().enumerate() {
            all.extend(pair.compare(case, 77 + i as u64).unwrap());
        }
        let wrong: Vec<_> = all.iter().filter(|c| c.error != 0.0).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        let worst = worst(&all);
        println!("{} comparisons, {} operations", all.len(), worst.len());
        assert!(worst.iter().any(|(name, ..)| name == "attention"));
    }

    /// Names the kinds of operations: the compiler asks for a new one here, and the
    /// test below for its cases.
    macro_rules! kinds {
        ($($kind:ident)*) => {
            const KINDS: &[&str] = &[$(stringify!($kind)),*];

            fn kind(op: &Op) -> &'static str {
                match op {
                    $(Op::$kind { .. } => stringify!($kind),)*
                }
            }
        };
    }

    kinds! {
        RmsNorm LayerNorm Add AddWeighted AddTable Scale ScaleBy SoftCap Clamp MatMul AddAdapters MatMulHeads MatMulTransposed Columns Rope RopeKv Attention Gate Activate AddGated GateHeads
        PositionScale Conv DeltaNet Ssm Route Combine MergeRows GatherOutputs
    }

    /// The kinds of a case's work, which is what a step of a plan can be, and
    /// what a device does besides.
    fn work(work: &Work) -> (&'static str, Vec<&Op>) {
        match work {
            Work::Ops(ops) => ("operations", ops.iter().collect()),
            Work::State(op, ..) => ("operations", vec![op]),
            Work::Experts { route, .. } => ("experts", vec![route]),
            Work::EmbeddingRows(_) => ("embedding rows", Vec::new()),
            Work::Argmax => ("argmax", Vec::new()),
            Work::TopK(_) => ("top_k", Vec::new()),
        }
    }

    #[test]
    fn every_kind_of_operation_is_in_the_table_also_in_the_short_one() {
        for extent in [Extent::Full, Extent::Quick] {
            let table = cases(extent);
            let ops = table.iter().flat_map(|case| work(&case.work).1);
            let found: BTreeSet<&str> = ops.map(kind).collect();
            let missing: Vec<_> = KINDS.iter().filter(|k| !found.contains(**k)).collect();
            assert!(missing.is_empty(), "{extent:?}: no case of {missing:?}");
            let works: BTreeSet<&str> = table.iter().map(|case| work(&case.work).0).collect();
            let all = ["argmax", "embedding rows", "experts", "operations", "top_k"];
            assert!(works.into_iter().eq(all), "{extent:?}");
        }
    }

    #[test]
    fn another_seed_is_a_difference() {
        let mut device = host(1);
        device.set_capacity(ARENA).unwrap();
        for case in cases(Extent::Quick) {
            let a = run::run(device.as_mut(), &case, 1).unwrap();
            let b = run::run(device.as_mut(), &case, 2).unwrap();
            let apart = difference(&a[0].1, &b[0].1);
            assert!(apart > case.tolerance, "{}: {apart}", case.name);
        }
    }

    /// What adapters add is large enough that a case without it would be wrong.
    #[test]
    fn adapters_are_felt() {
        let mut device = host(1);
        device.set_capacity(ARENA).unwrap();
        let mut least = f64::INFINITY;
        for mut case in cases(Extent::Full) {
            let Some(scales) = &mut case.scales else {
                continue;
            };
            scales.size *= 0.5;
            let half = run::run(device.as_mut(), &case, 1).unwrap();
            case.scales.iter_mut().for_each(|scales| scales.size *= 2.0);
            let whole = run::run(device.as_mut(), &case, 1).unwrap();
            for ((_, half), (_, whole)) in half.iter().zip(&whole) {
                let apart = difference(half, whole);
                assert!(apart > case.tolerance, "{}: {apart}", case.name);
                least = least.min(apart);
            }
        }
        println!("at least {least:.1e}");
    }

    #[test]
    fn a_difference_is_relative() {
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((difference(&[3.0, 4.4], &[3.0, 4.0]) - 0.08).abs() < 1e-6);
        assert!(difference(&[f32::NAN], &[1.0]).is_nan());
    }
}
