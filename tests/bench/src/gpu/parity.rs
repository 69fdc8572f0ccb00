//! Every operation and type on the device against the host.

use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use rocmforge_device::Device;
use rocmforge_device::gpu::device::usual_images;
use rocmforge_device::gpu::{GpuConfig, GpuDevice};
use rocmforge_device::host::{HostConfig, HostDevice};
use rocmforge_parity::{Comparison, Extent, Pair, cases, worst};

use super::Bench;
use super::card::vendor;
use crate::check::Check;

/// Seed of the first case.
const SEED: u64 = 1000;

fn host(threads: Option<NonZeroUsize>) -> Result<Box<dyn Device>> {
    Ok(Box::new(HostDevice::new(HostConfig { threads })?))
}

/// Compares.
///
/// # Errors
/// A device cannot be opened, or fails.
pub(crate) fn run(bench: &Bench) -> Result<Check> {
    let (reference, device, against) = match vendor(&bench.kind) {
        Some(vendor) => {
            let gpu = GpuDevice::open(GpuConfig::new(vendor, 0), usual_images(vendor))?;
            let gpu: Box<dyn Device> = Box::new(gpu);
            (host(None)?, gpu, format!("{vendor} against the host"))
        }
        None => (
            host(NonZeroUsize::new(1))?,
            host(None)?,
            "the host against itself with one thread".to_owned(),
        ),
    };
    let mut check = Check::new(format!("Parity, {against}"));
    let mut pair = Pair::new(reference, device).context("half a GiB for each device")?;
    let extent = match bench.is_quick {
        true => Extent::Quick,
        false => Extent::Full,
    };
    let mut all: Vec<Comparison> = Vec::new();
    for (seed, case) in (SEED..).zip(cases(extent)) {
        let comparisons = pair.compare(&case, seed)?;
        for c in comparisons.iter().filter(|c| !c.right) {
            check.fail(format!(
                "{} {} {}: {:.2e}, at most {:.0e}, seed {}",
                c.operation, c.case, c.buffer, c.error, c.tolerance, c.seed
            ));
        }
        all.extend(comparisons);
    }
    check.note(format!(
        "{} comparisons; the largest relative error of each operation, of its tolerance:",
        all.len()
    ));
    let errors = worst(&all).into_iter();
    let errors = errors.map(|(name, error, most)| format!("{name} {error:.1e} of {most:.0e}"));
    check.note(errors.collect::<Vec<_>>().join("; "));
    Ok(check)
}
