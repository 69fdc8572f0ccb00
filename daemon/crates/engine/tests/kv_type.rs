//! Keys and values in 8 bits, and in 32: half the memory of f16, or twice, and a text that depends
//! on who else runs, on budgets and on what was kept as little as in f16.

use crate::{fake, requests};
use std::sync::Arc;

use rocmforge_engine::api::{
    Asker, Budget, Decoding, GenerateEvent, GenerateRequest, SamplingParams, ScoreRequest,
};
use rocmforge_engine::{EngineConfig, EngineHandle, KvType, LoadedModel, start};

use crate::requests::{chat, load, questions, run, until};

/// Models whose heads fit: all positions in two layouts of heads, and of further kinds
/// windows, states and a mixture.
const FILES: [&str; 6] = [
    "tiny-llama-Q4_K_M.gguf",
    "tiny-qwen3-Q8_0.gguf",
    "arch/gemma3.gguf",
    "arch/gpt-oss.gguf",
    "arch/qwen35.gguf",
    "arch/nemotron_h.gguf",
];

/// Models in f32: Gemma 4's and mixtures, which have it by default, latent keys and values, and
/// states.
const FILES_F32: [&str; 5] = [
    "arch/gemma4.gguf",
    "arch/gemma4e.gguf",
    "arch/gemma4moe.gguf",
    "arch/deepseek2.gguf",
    "arch/qwen35.gguf",
];

/// Each with what it is stored as.
fn files() -> impl Iterator<Item = (&'static str, KvType)> {
    let eight_bits = FILES.map(|file| (file, KvType::Q8_0));
    let floats = FILES_F32.map(|file| (file, KvType::F32));
    eight_bits.into_iter().chain(floats)
}

/// Requests at once.
const MANY: usize = 8;

const ROOMY: u64 = 64 << 20;

fn config(budget: u64, kv_type: KvType) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(budget),
        kv_type: Some(kv_type),
        ..EngineConfig::default()
    }
}

fn on_host(budget: u64, kv_type: KvType) -> EngineHandle {
    start(config(budget, kv_type)).unwrap().0
}

/// `n` ids, others for another `seed`.
fn ids(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| 5 + (i * 31 + seed * 17 + i * i * seed) % 200)
        .collect()
}

/// A request whose prompt begins like that of its neighbour, greedy or drawn.
fn request(model: &Arc<LoadedModel>, i: u32, reuse: bool) -> GenerateRequest {
    GenerateRequest {
        prompt: [ids(i / 2, 70), ids(10 + i, 9 * i as usize)].concat(),
        sampling: SamplingParams {
            temperature: if i.is_multiple_of(2) { 0.0 } else { 1.0 },
            seed: Some(u64::from(i)),
            ..SamplingParams::default()
        },
        max_tokens: Some(20 + 5 * i),
        reuse,
        asker: Asker::default(),
        model: Arc::clone(model),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        adapters: None,
    }
}

#[tokio::test]
async fn a_token_takes_half_the_memory_in_8_bits_where_heads_fit_and_twice_as_much_in_32() {
    for (file, stored) in [
        ("tiny-llama-Q4_K_M.gguf", "q8_0"),
        ("tiny-qwen3-Q8_0.gguf", "q8_0"),
        // Heads of 16.
        ("arch/smollm3.gguf", "f16"),
    ] {
        let widest = on_host(ROOMY, KvType::F32);
        let of_widest = load(&widest, file, "m").await;
        let of_widest = of_widest.model().info();
        let (wide, narrow) = (on_host(ROOMY, KvType::F16), on_host(ROOMY, KvType::Q8_0));
        let of_wide = load(&wide, file, "m").await;
        let of_narrow = load(&narrow, file, "m").await;
        let (of_wide, of_narrow) = (of_wide.model().info(), of_narrow.model().info());
        assert_eq!(of_wide.kv_type, "f16");
        assert_eq!(of_widest.kv_type, "f32");
        assert_eq!(
            of_widest.kv_bytes_per_token,
            2 * of_wide.kv_bytes_per_token,
            "{file}"
        );
        assert_eq!(of_narrow.kv_type, stored, "{file}");
        let share = if stored == "f16" { 64 } else { 34 };
        assert_eq!(
            of_narrow.kv_bytes_per_token * 64,
            of_wide.kv_bytes_per_token * share,
            "{file}"
        );
    }
}

/// The smallest budget in which a request with much context is taken, to 16 KiB.
async fn smallest_budget(kv_type: KvType, model: &str) -> u64 {
    let engine = on_host(ROOMY, kv_type);
    let model = load(&engine, model, "m").await;
    let (mut refused, mut runs) = (0, ROOMY);
    while runs - refused > 16 << 10 {
        let between = (refused + runs) / 2;
        engine.set_budget(Budget::Bytes(between)).await.unwrap();
        let request = GenerateRequest {
            prompt: ids(1, 60),
            max_tokens: Some(1900),
            ..request(&model, 0, false)
        };
        let mut events = engine.generate(request).unwrap();
        let taken = match events.next().await {
            Some(GenerateEvent::Failed(_)) => false,
            Some(GenerateEvent::Piece { .. } | GenerateEvent::Done(_)) => true,
            None => panic!("no end"),
        };
        drop(events);
        until(&engine, "its end", |s| s.running == 0).await;
        if taken {
            runs = between;
        } else {
            refused = between;
        }
    }
    runs
}

/// What a request is said to need is what is stored.
#[tokio::test]
async fn a_budget_that_is_too_small_in_f16_is_enough() {
    let file = "tiny-qwen3-Q8_0.gguf";
    let engine = on_host(ROOMY, KvType::F16);
    let per_token = load(&engine, file, "m")
        .await
        .model()
        .info()
        .kv_bytes_per_token;
    let wide = smallest_budget(KvType::F16, file).await;
    let narrow = smallest_budget(KvType::Q8_0, file).await;
    // 1,960 positions are 62 pages.
    let saved = 62 * 32 * per_token * 30 / 64;
    println!("{wide} bytes in f16, {narrow} in 8 bits; pages differ by {saved}");
    // Scratch is an eighth of the budget and shrinks with it.
    assert!(wide - narrow >= saved * 9 / 10, "{wide}, {narrow}, {saved}");
}

/// Each alone; then all at once, in a roomy budget, and in one in which weights come and go; each
/// computed anew, and with what earlier ones have left.
#[tokio::test]
async fn the_text_is_the_same_alone_beside_others_and_with_what_was_kept() {
    for (file, ty) in files() {
        let roomy = on_host(ROOMY, ty);
        let model = load(&roomy, file, "m").await;
        let info = model.model().info();
        assert!(info.kv_type.contains(ty.name()), "{file}: {}", info.kv_type);
        let tight = on_host(info.tensor_bytes * 2 / 3 + (1 << 20), ty);
        let in_tight = load(&tight, file, "m").await;
        let mut alone = Vec::new();
        for i in 0..MANY as u32 {
            alone.push(run(&roomy, request(&model, i, false)).await.1);
        }
        let mut reused = 0;
        for (engine, model, label) in [(&roomy, &model, "roomy"), (&tight, &in_tight, "tight")] {
            for reuse in [false, true, true] {
                let together: Vec<_> = (0..MANY as u32)
                    .map(|i| {
                        let (engine, request) = (engine.clone(), request(model, i, reuse));
                        tokio::spawn(async move { run(&engine, request).await })
                    })
                    .collect();
                for (i, one) in together.into_iter().enumerate() {
                    let (_, found, summary) = one.await.unwrap();
                    assert_eq!(
                        found, alone[i],
                        "{file}, {ty:?}, {label}, reuse {reuse}, request {i}"
                    );
                    reused += summary.reused_tokens;
                }
            }
            let cache = engine.snapshot().cache;
            assert_eq!((cache.kv_bytes, cache.scratch_bytes), (0, 0), "{file}");
        }
        println!("{file}: {reused} tokens used again");
        assert!(reused > 0, "{file}");
    }
}

/// Requests without an end in sight: all begin, and then there is no room for what they come to.
/// Who yields is computed again.
#[tokio::test]
async fn who_yields_goes_on_with_the_same_text() {
    for ty in [KvType::Q8_0, KvType::F32] {
        who_yields(ty).await;
    }
}

async fn who_yields(ty: KvType) {
    const REQUESTS: u32 = 6;
    const N_CTX: u32 = 700;
    let roomy = on_host(ROOMY, ty);
    let model = requests::load_endless(&roomy, "m").await;
    let info = model.model().info();
    // Each is promised its prompt and 256 positions at first; twice as much is too much for all.
    let budget =
        info.tensor_bytes + u64::from(REQUESTS) * 400 * info.kv_bytes_per_token + (1 << 20);
    assert!(u64::from(REQUESTS * N_CTX) * info.kv_bytes_per_token > budget - info.tensor_bytes);
    let tight = on_host(budget, ty);
    let in_tight = requests::load_endless(&tight, "m").await;
    let endless = |model: &Arc<LoadedModel>, i: u32| GenerateRequest {
        prompt: ids(i, 40 + i as usize),
        max_tokens: None,
        n_ctx: Some(N_CTX),
        ..request(model, i, false)
    };
    let together: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let (engine, request) = (tight.clone(), endless(&in_tight, i));
            tokio::spawn(async move { run(&engine, request).await.1 })
        })
        .collect();
    until(&tight, "the last of them", |s| s.running == REQUESTS).await;
    for (i, found) in together.into_iter().enumerate() {
        let expected = run(&roomy, endless(&model, i as u32)).await.1;
        assert_eq!(found.await.unwrap(), expected, "request {i}");
        assert!(expected.len() > 600, "{}", expected.len());
    }
}

/// What comes through the HIP path is the host's: its kernels of the type are asked for, with the
/// arguments that they expect.
#[tokio::test]
async fn the_text_through_the_hip_path_is_the_hosts() {
    let runtime = fake::Runtime::new();
    for (file, ty) in files() {
        let host = on_host(ROOMY, ty);
        let gpu = fake::gpu_config(&runtime);
        let device = runtime.start_as(gpu, config(ROOMY, ty)).unwrap();
        let on_host = load(&host, file, "m").await;
        let on_device = load(&device, file, "m").await;
        let prompt = ids(3, 100);
        let score = |model: &Arc<LoadedModel>| ScoreRequest {
            model: Arc::clone(model),
            ids: prompt.clone(),
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        };
        let expected = host.score(score(&on_host)).await.unwrap();
        let found = device.score(score(&on_device)).await.unwrap();
        let mut worst = 0f32;
        for (expected, found) in expected.tokens.iter().zip(&found.tokens) {
            let difference = (expected.logprob - found.logprob).abs();
            // Products of many rows round their inputs to other scales than the host does.
            assert!(difference < 0.1, "{file}: {difference}");
            worst = worst.max(difference);
        }
        // Row by row, which another kernel computes.
        let greedy = |model| GenerateRequest {
            max_tokens: Some(12),
            ..request(model, 0, false)
        };
        let text = run(&device, greedy(&on_device)).await.1;
        assert!(!text.is_empty(), "{file}");
        println!("{file}: log-probabilities differ by {worst} at most");
    }
}

/// Trained models answer as well as in f16.
#[tokio::test]
async fn trained_models_know_what_they_knew() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let mut right = [0; 3];
        for (right, ty) in right.iter_mut().zip(KvType::ALL) {
            let engine = on_host(ROOMY, ty);
            let model = load(&engine, file, "m").await;
            for (question, answer) in questions(60) {
                let (text, ..) = run(&engine, chat(&model, &question)).await;
                *right += usize::from(text.trim() == answer);
            }
        }
        println!("{file}: {right:?} of 60 right in f32, in f16 and in 8 bits");
        let [f32, f16, eight_bits] = right;
        assert!(eight_bits + 1 >= f16 && f16 >= 58 && f32 >= 58, "{right:?}");
    }
}
