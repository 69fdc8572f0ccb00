//! Every operation and type on the device against the host.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rocmforge_device::Device;
use rocmforge_device_cpu::{HostConfig, HostDevice};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, usual_images};
use rocmforge_ops::WeightType;
use rocmforge_parity::{Comparison, Extent, Pair, cases, worst};

use super::Bench;
use crate::check::Check;

/// Seed of the first case.
const SEED: u64 = 1000;

fn host(threads: Option<NonZeroUsize>) -> Result<Box<dyn Device>> {
    Ok(Box::new(HostDevice::new(HostConfig {
        threads,
        ..HostConfig::default()
    })?))
}

/// What the check is called.
pub(crate) fn name(bench: &Bench) -> String {
    match bench.vendor {
        Some(vendor) => format!("Parity, {vendor} against the host"),
        None => "Parity, the host against itself with one thread".to_owned(),
    }
}

/// Compares.
///
/// # Errors
/// A device cannot be opened, or fails.
pub(crate) fn run(bench: &Bench, check: &mut Check) -> Result<()> {
    let (reference, device) = match bench.vendor {
        Some(vendor) => {
            // A simulated card is slow, and what hangs for good is seen all the same.
            let config = GpuConfig {
                watchdog: Duration::from_secs(600),
                child_exe: Some("/proc/self/exe".into()),
                ..GpuConfig::new(vendor, 0)
            };
            let gpu = GpuDevice::open(config, usual_images(vendor))?;
            (host(None)?, Box::new(gpu) as Box<dyn Device>)
        }
        None => (host(NonZeroUsize::new(1))?, host(None)?),
    };
    let mut pair = Pair::new(reference, device).context("144 MiB for each device")?;
    let extent = match bench.is_quick {
        true => Extent::Quick,
        false => Extent::Full,
    };
    let mut all: Vec<Comparison> = Vec::new();
    for (seed, case) in (SEED..).zip(cases(extent)) {
        if !case.operation().starts_with(&bench.operation) {
            continue;
        }
        let begin = Instant::now();
        let comparisons = pair.compare(&case, seed)?;
        for c in &comparisons {
            let told = format!(
                "{} {} {}: {:.2e}, at most {:.0e}, seed {}",
                c.operation, c.case, c.buffer, c.error, c.tolerance, c.seed
            );
            if bench.tells_progress {
                let verdict = if c.right { "right" } else { "wrong" };
                eprintln!("{verdict} {told}, {:.1} s", begin.elapsed().as_secs_f64());
            }
            if !c.right {
                check.fail(told);
            }
        }
        all.extend(comparisons);
    }
    if all.is_empty() {
        check.fail(format!("no operation begins with {:?}", bench.operation));
    }
    check.note(format!(
        "{} comparisons; the largest relative error of each operation, and what it may be:",
        all.len()
    ));
    // Operations that differ only in the weights' type share a line.
    let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, error, most) in worst(&all) {
        let typed = WeightType::ALL.into_iter().find_map(|ty| {
            let operation = name.strip_suffix(ty.name())?.strip_suffix(' ')?;
            Some((operation, ty.name()))
        });
        let (line, told) = match typed {
            Some((operation, ty)) => (operation, format!("{ty} {error:.1e}")),
            None => ("others", format!("{name} {error:.1e} of {most:.0e}")),
        };
        let most = typed.map_or_else(String::new, |_| format!(", of {most:.0e}"));
        lines.entry(format!("{line}{most}")).or_default().push(told);
    }
    for (line, errors) in lines {
        check.note(format!("{line}: {}", errors.join("; ")));
    }
    Ok(())
}
