//! Models with equal segments, as fine-tunes of one model are: these are on the device once, and
//! every text stays what it is alone.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_engine::api::Budget;
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};

use crate::fake;
use crate::requests::{chat, engine, fixture, questions, run, until};

const FILE: &str = "tiny-llama-Q4_K_M.gguf";

/// The segment that the fine-tune has changed.
const CHANGED: usize = 5;

fn config() -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(64 << 20),
        share_weights: true,
        ..EngineConfig::default()
    }
}

async fn load(engine: &EngineHandle, path: &Path, name: &str) -> Arc<LoadedModel> {
    fake::load(engine, path, name).await.unwrap()
}

/// A copy of the model of which one segment is another.
async fn fine_tune(dir: &Path) -> PathBuf {
    let model = load(&engine(Budget::Bytes(64 << 20)), &fixture(FILE), "base").await;
    let mut bytes = std::fs::read(fixture(FILE)).unwrap();
    let tensors = &model.model().plan().segments[CHANGED].tensors;
    let largest = tensors.iter().max_by_key(|t| t.bytes).unwrap();
    // The last byte of its last block: a few weights of it.
    bytes[(largest.offset + largest.bytes) as usize - 1] ^= 0x35;
    let path = dir.join("tuned.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Some answers of a model.
async fn texts(engine: &EngineHandle, model: &Arc<LoadedModel>) -> Vec<String> {
    let mut texts = Vec::new();
    for (question, _) in questions(3) {
        texts.push(run(engine, chat(model, &question)).await.0);
    }
    texts
}

/// What a model says alone, in an engine of its own.
async fn alone<E>(begin: &impl Fn() -> E, path: &Path) -> Vec<String>
where
    E: Deref<Target = EngineHandle>,
{
    let engine = begin();
    let model = load(&engine, path, "alone").await;
    texts(&engine, &model).await
}

async fn share<E: Deref<Target = EngineHandle>>(begin: impl Fn() -> E) {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.gguf");
    std::fs::copy(fixture(FILE), &copy).unwrap();
    let tuned = fine_tune(dir.path()).await;
    let (of_base, of_tuned) = (
        alone(&begin, &fixture(FILE)).await,
        alone(&begin, &tuned).await,
    );

    let engine = begin();
    let a = load(&engine, &fixture(FILE), "a").await;
    let b = load(&engine, &copy, "b").await;
    let c = load(&engine, &tuned, "c").await;
    assert_eq!(texts(&engine, &a).await, of_base);
    let bytes_of = |n: usize| engine.snapshot().models[0].segments[n].bytes;
    let aligned = |n: usize| bytes_of(n).next_multiple_of(256);
    let all: u64 = (0..engine.snapshot().models[0].segments.len())
        .map(aligned)
        .sum();
    let changed = aligned(CHANGED);
    assert_eq!(texts(&engine, &b).await, of_base);
    assert_eq!(texts(&engine, &c).await, of_tuned);
    let shared = all + all - changed;
    let snapshot = until(&engine, "sharing", |s| s.cache.shared_bytes == shared).await;
    let cache = snapshot.cache;
    let weights = cache.resident_bytes - cache.kv_bytes - cache.prefix_bytes - cache.scratch_bytes;
    let own = snapshot.models.iter().map(|m| m.cache.shared_bytes);
    assert_eq!(own.sum::<u64>(), shared);
    let reserve = weights - (all + changed);
    assert!(reserve < all, "{weights} for {all} and {changed}");

    // At once, and with room for hardly more than a segment of each.
    for budget in [64 << 20, 8 << 20, 64 << 20] {
        engine.set_budget(Budget::Bytes(budget)).await.unwrap();
        let (of_a, of_b, of_c) =
            tokio::join!(texts(&engine, &a), texts(&engine, &b), texts(&engine, &c));
        assert_eq!(
            (of_a, of_b, of_c),
            (of_base.clone(), of_base.clone(), of_tuned.clone())
        );
    }
    until(&engine, "sharing again", |s| s.cache.shared_bytes == shared).await;

    // Whoever has the slab goes.
    engine.unload("a", false).await.unwrap();
    let left = |s: &rocmforge_engine::api::Snapshot| s.cache.shared_bytes == all - changed;
    until(&engine, "what is left", left).await;
    assert_eq!(texts(&engine, &b).await, of_base);
    assert_eq!(texts(&engine, &c).await, of_tuned);
    // A name that is used again has nothing to do with what was.
    let a = load(&engine, &tuned, "a").await;
    engine.unload("b", false).await.unwrap();
    assert_eq!(texts(&engine, &a).await, of_tuned);
    assert_eq!(texts(&engine, &c).await, of_tuned);
    until(&engine, "all of two", |s| s.cache.shared_bytes == all).await;
    engine.clear(None).await.unwrap();
    assert_eq!(texts(&engine, &c).await, of_tuned);
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.cache.shared_bytes, all);
    engine.unload("a", false).await.unwrap();
    engine.unload("c", false).await.unwrap();
    let empty = until(&engine, "nothing", |s| s.models.is_empty()).await;
    assert_eq!(
        (empty.cache.shared_bytes, empty.cache.in_flight_bytes),
        (0, 0)
    );
}

#[tokio::test]
async fn segments_of_two_models_are_kept_once_and_texts_stay() {
    let start_sharing = || start(config()).unwrap().0;
    share(|| Box::new(start_sharing())).await;
}

#[tokio::test]
async fn they_are_on_a_gpu() {
    let runtime = fake::Runtime::new();
    let gpu = || fake::gpu_config(&runtime);
    share(|| runtime.start_as(gpu(), config()).unwrap()).await;
}
