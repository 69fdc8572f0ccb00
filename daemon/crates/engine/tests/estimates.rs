//! What is predicted of a request is applied, and what comes of it is measured: on a device whose
//! link takes so long for each byte that this decides.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_engine::api::estimate::MoreRoom;
use rocmforge_engine::api::times::{Part, RequestTimes, TimesSlot};
use rocmforge_engine::api::{Budget, Decoding, GenerateEvent, GenerateRequest, WeightType, When};
use rocmforge_engine::{EngineConfig, EngineHandle, KvType, LoadedModel};
use rocmforge_fake_hip::Misbehaviour;
use rocmforge_gguf::TensorType;

use crate::fake::{Running, Runtime, gpu_config, tiny};
use crate::requests::{greedy, load};

const ROOMY: u64 = 64 << 20;
/// A model with few large matrices, so that their bytes decide and not their number.
const WIDE: (u32, u64) = (8, 4096);
/// One with many layers, so that its KV cache is large.
const DEEP: (u32, u64) = (120, 96);

/// Writes such a model with matrices of this type.
fn made(dir: &Path, (n_layer, n_ff): (u32, u64), ty: TensorType) -> PathBuf {
    let shape = tiny::Shape {
        n_layer,
        n_ff,
        matrices: Some(ty),
    };
    tiny::write_of(dir, &shape, 5)
}

/// Milliseconds that the link takes for a MiB.
const MS_PER_MIB: u64 = 20;

/// Tries: on a busy machine something else may take longer now and then.
const TRIES: usize = 6;

/// A text of some tokens, and where its time went.
async fn times(engine: &EngineHandle, model: &Arc<LoadedModel>) -> RequestTimes {
    times_of(engine, model, 3).await
}

/// The same behind a prompt of so many tokens.
async fn times_of(engine: &EngineHandle, model: &Arc<LoadedModel>, prompt: u32) -> RequestTimes {
    let request = GenerateRequest {
        decoding: Decoding {
            ignore_eos: true,
            ..Decoding::default()
        },
        ..greedy(model, (0..prompt).map(|i| 1 + i % 200).collect(), 17)
    };
    let slot = TimesSlot::default();
    let mut events = engine
        .generate_timed(request, Vec::new(), Some(slot.clone()))
        .unwrap();
    while let Some(event) = events.next().await {
        if let GenerateEvent::Failed(error) = event {
            panic!("{error}");
        }
    }
    let times = slot.get().expect("its times");
    println!("{:?} {:?}", times.decode.parts.ranked(), times.link);
    times
}

async fn budget(engine: &EngineHandle, bytes: u64) {
    engine.set_budget(Budget::Bytes(bytes)).await.unwrap();
}

/// How near a prediction is to be where the link decides, which takes a known time.
const WITHIN: f64 = 1.15;

/// The same where all is resident: what decides then is the machine, which may be busy with other
/// tests in one of the two runs.
const WITHIN_RESIDENT: f64 = 2.0;

/// Whether what was predicted is what is measured, within a factor.
fn holds(predicted: Option<f64>, measured: &RequestTimes, within: f64) -> bool {
    let predicted = predicted.expect("a prediction");
    let measured = measured.tokens_per_s().expect("a rate");
    println!("predicted {predicted:.2} tokens/s, measured {measured:.2}");
    (1.0 / within..=within).contains(&(predicted / measured))
}

/// An engine on a card with a slow link.
fn slow_link(kv_type: Option<KvType>) -> (Runtime, Running) {
    let runtime = Runtime::new();
    runtime.misbehave(Misbehaviour::SlowPinnedCopies, MS_PER_MIB);
    runtime.misbehave(Misbehaviour::SlowRegisteredCopies, MS_PER_MIB);
    let config = EngineConfig {
        budget: Budget::Bytes(ROOMY),
        cpu_compute: When::Never,
        kv_type,
        ..EngineConfig::default()
    };
    let engine = runtime.start_as(gpu_config(&runtime), config).unwrap();
    (runtime, engine)
}

/// The rate of a request in this budget, once its passes are as they stay.
async fn in_budget(engine: &EngineHandle, model: &Arc<LoadedModel>, bytes: u64) -> RequestTimes {
    budget(engine, bytes & !255).await;
    times(engine, model).await;
    times(engine, model).await
}

/// A budget that lacks this share of the weights.
fn lacking(resident: &RequestTimes, share: f64) -> u64 {
    let around = &resident.surroundings;
    let missing = around.model_bytes as f64 * share;
    around.model_bytes + around.block_bytes + (1 << 20) - missing as u64
}

/// Whether the device waits for uploads most of the time, so that the link decides.
fn is_decided_by_the_link(slow: &RequestTimes) -> bool {
    assert!(!slow.surroundings.model_fits);
    let first = slow.decode.parts.first_cause();
    println!("first: {first:?}");
    first == Part::Uploads
}

async fn a_budget_is_predicted(file: &Path) {
    let (_runtime, engine) = slow_link(None);
    let model = load(&engine, file.to_str().unwrap(), "m").await;
    let resident = times(&engine, &model).await;
    let small = lacking(&resident, 0.5);
    let some = resident.surroundings.model_bytes / 4;
    let mut right = [false; 2];
    for _ in 0..TRIES {
        let slow = in_budget(&engine, &model, small).await;
        if !is_decided_by_the_link(&slow) {
            continue;
        }
        let rooms = [
            (MoreRoom::Bytes(some), small + some, WITHIN),
            (MoreRoom::All, ROOMY, WITHIN_RESIDENT),
        ];
        for (at, (room, bytes, within)) in rooms.into_iter().enumerate() {
            let predicted = slow.tokens_per_s_with(room);
            right[at] |= holds(predicted, &in_budget(&engine, &model, bytes).await, within);
        }
        if right == [true; 2] {
            return;
        }
    }
    panic!("not near in {TRIES} tries: {right:?}; they are printed above");
}

#[tokio::test]
async fn a_budget_that_is_applied_gives_the_rate_that_was_predicted() {
    a_budget_is_predicted(Path::new("tiny-llama-Q4_K_M.gguf")).await;
}

#[tokio::test]
async fn a_budget_is_predicted_of_8_bit_weights_as_well() {
    a_budget_is_predicted(Path::new("tiny-qwen3-Q8_0.gguf")).await;
}

/// The same model with weights of a smaller type, in the budget in which it was slow.
#[tokio::test]
async fn weights_of_a_smaller_type_give_the_rate_that_was_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let file = |ty| made(dir.path(), WIDE, ty);
    let (large, small) = (file(TensorType::Q8_0), file(TensorType::Q4_0));
    let (_runtime, engine) = slow_link(None);
    let model = load(&engine, large.to_str().unwrap(), "large").await;
    let budget = lacking(&times(&engine, &model).await, 0.6);
    let smaller = load(&engine, small.to_str().unwrap(), "small").await;
    for _ in 0..TRIES {
        let slow = in_budget(&engine, &model, budget).await;
        if !is_decided_by_the_link(&slow) {
            continue;
        }
        // The output head and the embedding have one type in both.
        let layers = slow.surroundings.weights.matrices.iter();
        let saved = layers.map(|of| of.bytes - of.bytes_as(WeightType::Q4_0));
        let of_both = [&model, &smaller].map(|m| m.model().info().tensor_bytes);
        let saved = saved.sum::<u64>().min(of_both[0] - of_both[1]);
        let predicted = slow.tokens_per_s_with(MoreRoom::Bytes(saved));
        let measured = in_budget(&engine, &smaller, budget).await;
        assert!(!measured.surroundings.model_fits);
        if holds(predicted, &measured, WITHIN) {
            return;
        }
    }
    panic!("not near in {TRIES} tries; they are printed above");
}

/// The same model with a KV cache of a smaller type, in the budget in which it was slow.
#[tokio::test]
async fn a_kv_cache_of_a_smaller_type_gives_the_rate_that_was_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let file = made(dir.path(), DEEP, TensorType::Q8_0);
    let (_wide_runtime, wide) = slow_link(Some(KvType::F16));
    let (_narrow_runtime, narrow) = slow_link(Some(KvType::Q8_0));
    let model = load(&wide, file.to_str().unwrap(), "m").await;
    let of_narrow = load(&narrow, file.to_str().unwrap(), "m").await;
    let prompt = 60;
    let resident = times_of(&wide, &model, prompt).await;
    let bytes = lacking(&resident, 0.6) & !255;
    for _ in 0..TRIES {
        budget(&wide, bytes).await;
        budget(&narrow, bytes).await;
        times_of(&wide, &model, prompt).await;
        let slow = times_of(&wide, &model, prompt).await;
        if !is_decided_by_the_link(&slow) {
            continue;
        }
        let (now, then) = (KvType::F16.bytes(32) as u64, KvType::Q8_0.bytes(32) as u64);
        let freed = slow.surroundings.kv_bytes / now * (now - then);
        let predicted = slow.tokens_per_s_with(MoreRoom::Bytes(freed));
        times_of(&narrow, &of_narrow, prompt).await;
        let measured = times_of(&narrow, &of_narrow, prompt).await;
        println!("frees {freed} of {}", slow.surroundings.kv_bytes);
        assert!(!measured.surroundings.model_fits);
        if holds(predicted, &measured, WITHIN) {
            return;
        }
    }
    panic!("not near in {TRIES} tries; they are printed above");
}
