//! Whoever runs the server: models come and go, budgets and policies change, segments are pinned.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::api::{Budget, Policy, PreloadEvent};

use super::Soak;

/// Longest wait between two actions.
const PERIOD_MS_MAX: u64 = 250;

/// Does something random, again and again, until the end.
pub(super) async fn operator(soak: Arc<Soak>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    while soak.goes_on() {
        tokio::time::sleep(Duration::from_millis(rng.random_range(5..PERIOD_MS_MAX))).await;
        let index = rng.random_range(0..soak.models.len());
        let name = &soak.models[index].0;
        let loaded = soak.engine.snapshot().models.len();
        if soak.engine.model(name).is_err() {
            if let Err(error) = soak.load(index).await {
                soak.tally.fail(format!("loading {name}: {error:#}"));
            }
            continue;
        }
        let segment = |rng: &mut StdRng| {
            let model = soak.engine.model(name).ok()?;
            let n = model.model().plan().segments.len() as u32;
            Some(vec![rng.random_range(0..n)])
        };
        let result = match rng.random_range(0..20) {
            0..=3 if loaded > 1 => {
                let forced = rng.random();
                let gone = soak.engine.unload(name, forced).await;
                gone.map(|_| match forced {
                    true => "unloads by force",
                    false => "unloads",
                })
            }
            4..=8 => {
                let bytes = rng.random_range(soak.budgets.0..=soak.budgets.1);
                let changed = soak.engine.set_budget(Budget::Bytes(bytes)).await;
                changed.map(|_| "budget changes")
            }
            9 | 10 => {
                let segments = segment(&mut rng);
                let pinned = soak.engine.pin(name, segments, true).await;
                pinned.map(|_| "pins")
            }
            11..=13 => soak.engine.pin(name, None, false).await.map(|_| "unpins"),
            14 | 15 => preload(&soak, name).await,
            16 | 17 => {
                let one = rng.random::<bool>().then_some(name.as_str());
                soak.engine.clear(one).await.map(|_| "clears")
            }
            _ => {
                let policy = match rng.random() {
                    true => Policy::PassAware,
                    false => Policy::Lru,
                };
                let changed = soak.engine.set_policy(policy).await;
                changed.map(|_| "policy changes")
            }
        };
        soak.tally.count(&result);
    }
    // So that the rest can end under any of the budgets.
    for (name, _) in &soak.models {
        let _ = soak.engine.pin(name, None, false).await;
    }
}

async fn preload(soak: &Soak, name: &str) -> Result<&'static str, rocmforge_engine::Error> {
    let mut events = soak.engine.preload(name, None)?;
    loop {
        match events.next().await {
            Some(PreloadEvent::Progress { .. }) => {}
            Some(PreloadEvent::Failed(error)) => return Err(error),
            Some(PreloadEvent::Done { .. }) => return Ok("preloads"),
            None => {
                soak.tally.fail("a preload without an end".to_owned());
                return Ok("preloads without an end");
            }
        }
    }
}
