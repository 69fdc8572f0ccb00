//! Rounds of load, generate, unload: whether memory grows, on the card or in this process.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rocmforge_engine::api::Policy;

use super::Bench;
use super::plan::title;
use crate::check::Check;
use crate::session::Session;

/// Rounds before the first look: caches of the allocator, the driver and the registered windows
/// fill.
const WARM_UP: u32 = 20;

/// Tokens of a round's prompt and text.
const TOKENS: (usize, u32) = (16, 8);

/// Allowed growth. The host's allocator keeps freed memory in pieces, which differ from moment to
/// moment; a leak of a model's tables or of its registered file is many times that.
const DEVICE_BYTES_MAX: u64 = 8 << 20;
const HOST_BYTES_MAX: u64 = 48 << 20;
const MAPPINGS_MAX: u64 = 16;
const FILES_MAX: u64 = 4;

/// What may grow.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    /// Bytes of the card in use by the driver's count; none on the host.
    device_bytes: Option<u64>,
    /// Bytes of anonymous memory in this process's resident set: mapped files are the page cache's.
    host_bytes: u64,
    /// Mappings, open files.
    mappings: u64,
    files: u64,
    /// Allocations asked of the driver.
    allocations: u64,
}

fn sample(bench: &Bench, session: &Session) -> Result<Sample> {
    // Tables for encoding are built in the background and let go of when that is done.
    std::thread::sleep(Duration::from_millis(1500));
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let anonymous = status.lines().find_map(|line| {
        let kib = line.strip_prefix("RssAnon:")?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()
    });
    let maps = std::fs::read_to_string("/proc/self/maps").context("/proc/self/maps")?;
    let card = bench.card.as_ref();
    Ok(Sample {
        device_bytes: card.map(|card| card.used_bytes()).transpose()?,
        host_bytes: anonymous.context("no RssAnon in /proc/self/status")? << 10,
        mappings: maps.lines().count() as u64,
        files: std::fs::read_dir("/proc/self/fd")?.count() as u64,
        allocations: session.engine.snapshot().device.allocations,
    })
}

fn round(session: &mut Session, path: &Path) -> Result<()> {
    let model = session.register("round", path)?;
    session.generate(&model, TOKENS.0, TOKENS.1)?;
    drop(model);
    session.unload("round")
}

/// What the check is called.
pub(crate) fn name(bench: &Bench, rounds: u32) -> String {
    let model = title(bench.plan.small);
    format!("{rounds} rounds of load, generate, unload, {model}")
}

/// Runs the rounds.
///
/// # Errors
/// A round fails.
pub(crate) fn run(bench: &Bench, rounds: u32, check: &mut Check) -> Result<()> {
    let path = bench.models.get(bench.plan.small, 1)?;
    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    for _ in 0..WARM_UP.min(rounds) {
        round(&mut session, &path)?;
    }
    let held = session.engine.snapshot().cache;
    let before = sample(bench, &session)?;
    for _ in 0..rounds {
        round(&mut session, &path)?;
    }
    let after = sample(bench, &session)?;
    let held_after = session.engine.snapshot().cache;
    session.end()?;

    let mut grown = |what: &str, before: u64, after: u64, most: u64, scale: u64, unit: &str| {
        let growth = after as f64 - before as f64;
        let decimals = usize::from(scale > 1);
        let told = |count: f64| format!("{:.decimals$}{unit}", count / scale as f64);
        let line = format!(
            "{what}: {} before, {} after, at most {} more",
            told(before as f64),
            told(after as f64),
            told(most as f64)
        );
        if growth > most as f64 {
            check.fail(line);
        } else {
            check.note(line);
        }
    };
    if let Some((before, after)) = before.device_bytes.zip(after.device_bytes) {
        let (most, mib) = (DEVICE_BYTES_MAX, 1 << 20);
        grown(
            "device memory, the driver's count",
            before,
            after,
            most,
            mib,
            " MiB",
        );
    }
    let (was, is) = (before.host_bytes, after.host_bytes);
    grown(
        "anonymous memory of the process",
        was,
        is,
        HOST_BYTES_MAX,
        1 << 20,
        " MiB",
    );
    let (was, is) = (before.mappings, after.mappings);
    grown("mappings", was, is, MAPPINGS_MAX, 1, "");
    grown("open files", before.files, after.files, FILES_MAX, 1, "");
    let (was, is) = (before.allocations, after.allocations);
    grown("driver allocations", was, is, 0, 1, "");
    let (was, is) = (held.resident_bytes, held_after.resident_bytes);
    grown("bytes in the ledger", was, is, 0, 1, "");
    Ok(())
}
