//! `soak`: a mixed load with evictions, and the promises that are watched all the while.
//!
//! ```text
//! clients   random requests: lengths, sampling, slow readers, cancels, deadlines     clients.rs
//! operator  loads, unloads, budgets, pins, preloads, clears, policies                operator.rs
//! probe     fixed greedy prompts whose text must stay what it was                    clients.rs
//! watcher   every 100 ms: the ledger, and the driver's count beside it               watch.rs
//! ```
//!
//! Everything random is drawn from the run's seed, a stream for each task; what the tasks meet
//! depends on timing as well.

mod clients;
mod operator;
mod tally;
mod watch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rocmforge_engine::{EngineHandle, prepare};
use rocmforge_gguf::MappedFile;

use super::Bench;
use super::plan::{Kind, title};
use crate::check::Check;
use crate::session::Session;
use crate::tensors::tensors;
use crate::vocab;
use tally::Tally;
use watch::Watch;

/// Budget at the start, in percent of all models' weights, and the bounds of its changes.
const BUDGET: u64 = 60;
const BUDGET_BOUNDS: (u64, u64) = (35, 90);

/// A load shorter than this may happen to evict nothing.
const EVICTS_AFTER: Duration = Duration::from_secs(2);

/// How long the last requests may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// What all tasks share.
struct Soak {
    engine: EngineHandle,
    /// Names and files.
    models: Vec<(String, PathBuf)>,
    /// Least and largest budget.
    budgets: (u64, u64),
    /// Tokens of the longest prompts.
    n_prompt_max: usize,
    tally: Tally,
    ending: AtomicBool,
}

impl Soak {
    fn goes_on(&self) -> bool {
        !self.ending.load(Ordering::Relaxed)
    }

    /// Loads a model; the header is read off the runtime's threads.
    async fn load(&self, index: usize) -> Result<()> {
        let (name, path) = self.models[index].clone();
        let named = name.clone();
        let prepared = tokio::task::spawn_blocking(move || {
            let file = MappedFile::open(&path)?;
            Ok::<_, anyhow::Error>(prepare(&named, file, &mut |_| {})?)
        });
        let prepared = prepared.await.context("preparing a model")??;
        self.tally
            .count(&self.engine.load(prepared).await.map(|_| "loads"));
        Ok(())
    }
}

/// Runs the load for a time.
///
/// # Errors
/// The engine does not start, a model does not load, a task panics.
pub(crate) fn run(bench: &Bench, lasts: Duration, check: &mut Check) -> Result<()> {
    let seed = bench.seed;
    let mut models = Vec::new();
    for (i, &kind) in bench.plan.mixed.iter().enumerate() {
        let name = format!("m{i} {}", title(kind)).replace(' ', "-");
        models.push((name, bench.models.get(kind, 1)?));
    }
    let (weights, largest) = sizes(&bench.plan.mixed);
    let least = (weights * BUDGET_BOUNDS.0 / 100).max(largest + bench.plan.room);
    let most = (weights * BUDGET_BOUNDS.1 / 100).max(least);
    let start = (weights * BUDGET / 100).clamp(least, most);

    let mut watch = Watch::new(bench.card.as_ref())?;
    let session = Session::start_within(bench.device, start)?;
    let held = session.engine.snapshot().cache.resident_bytes;
    let (clients, n_prompt_max) = bench.plan.clients;
    let soak = Arc::new(Soak {
        engine: session.engine.clone(),
        models,
        budgets: (least, most),
        n_prompt_max,
        tally: Tally::default(),
        ending: AtomicBool::new(false),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()?;
    let probes = runtime.block_on(async {
        for index in 0..soak.models.len() {
            soak.load(index).await?;
        }
        clients::probes(&soak, seed).await
    })?;
    // What the driver holds beside the arena is known once all kernels and
    // libraries have been used.
    watch.settled(session.engine.snapshot().cache.budget_bytes)?;

    let begin = Instant::now();
    let mut tasks = Vec::new();
    for client in 0..clients {
        let seed = seed.wrapping_mul(1000).wrapping_add(client as u64);
        tasks.push(runtime.spawn(clients::client(Arc::clone(&soak), seed)));
    }
    tasks.push(runtime.spawn(operator::operator(Arc::clone(&soak), seed ^ 0x0BE2)));
    tasks.push(runtime.spawn(clients::probe(Arc::clone(&soak), probes)));
    watch.watch(&soak.engine, begin, lasts);
    soak.ending.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            match tokio::time::timeout(PATIENCE, task).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => check.fail(format!("a task of the load: {error}")),
                Err(_) => check.fail(format!("a request did not end within {PATIENCE:?}")),
            }
        }
        for (name, _) in &soak.models {
            // A model that is not loaded now has nothing to give back.
            let _ = soak.engine.unload(name, true).await;
        }
    });
    let snapshot = session.engine.snapshot();
    let left = snapshot.cache.resident_bytes - snapshot.cache.scratch_bytes;
    if left > held || snapshot.cache.in_flight_bytes > 0 {
        check.fail(format!(
            "with all models gone the ledger holds {left} bytes, at the start {held}"
        ));
    }
    if snapshot.cache.evictions == 0 && lasts >= EVICTS_AFTER {
        check.fail("nothing was evicted: the load proves nothing");
    }
    if let Some(why) = &snapshot.device_lost {
        check.fail(format!("the device was lost: {why}"));
    }
    drop(runtime);
    session.end()?;
    check.note(format!(
        "{} models of {:.2} GB in budgets from {:.2} to {:.2} GB, {clients} clients, seed {seed}",
        soak.models.len(),
        weights as f64 / 1e9,
        least as f64 / 1e9,
        most as f64 / 1e9
    ));
    check.note(format!(
        "{} evictions, {} uploads of {:.1} GB",
        snapshot.cache.evictions,
        snapshot.cache.uploads,
        snapshot.cache.uploaded_bytes as f64 / 1e9
    ));
    watch.report(check);
    soak.tally.report(check);
    Ok(())
}

/// Bytes of all models' weights that go to the device, and of the largest segment.
fn sizes(kinds: &[Kind]) -> (u64, u64) {
    let (mut weights, mut largest) = (0, 0);
    for (preset, mix) in kinds {
        let shape = preset.shape();
        let mut segments: HashMap<String, u64> = HashMap::new();
        for tensor in tensors(&shape, *mix, vocab::N_VOCAB) {
            let segment = match tensor.name.split('.').collect::<Vec<_>>()[..] {
                ["blk", layer, "ffn_down", ..] => format!("{layer}.ffn_down"),
                ["blk", layer, name, ..] if name.starts_with("ffn") => format!("{layer}.ffn_up"),
                ["blk", layer, ..] => format!("{layer}.attn"),
                // An embedding goes to the device where it is the output as well.
                ["token_embd", ..] if !shape.tied => continue,
                _ => "output".to_owned(),
            };
            *segments.entry(segment).or_default() += tensor.bytes();
        }
        weights += segments.values().sum::<u64>();
        largest = largest.max(segments.into_values().max().unwrap_or(0));
    }
    (weights, largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{Mix, Preset};

    #[test]
    fn a_models_weights_are_its_layers_and_its_output() {
        // 8B: 32 layers and an output of Q6_K, no embedding.
        let (weights, largest) = sizes(&[(Preset::Llama8b, Mix::Q4KM)]);
        assert!((4.5e9..4.7e9).contains(&(weights as f64)), "{weights}");
        assert_eq!(largest, 128_256 * 4096 / 256 * 210 + 4096 * 4);
    }
}
