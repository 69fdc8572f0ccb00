//! Pages and states that leave the card for the host's memory: they come back instead of being
//! computed again, the texts are those without, and nothing of it is left behind.

use std::sync::Arc;

use crate::fake::{Running, Runtime, gpu_config};
use crate::requests::{greedy, load, load_endless, run, until};
use rocmforge_engine::api::{Budget, GenerateRequest, HostTier, When};
use rocmforge_engine::{EngineConfig, LoadedModel};
use rocmforge_fake_hip::Live;

/// Positions of a page.
const PAGE: u32 = 32;

/// Room for all that leaves the card.
const ROOMY: Option<Budget> = Some(Budget::Bytes(64 << 20));

/// All that leaves the card is kept, whatever a fake card's times are.
fn start(runtime: &Runtime, budget: u64, host: Option<Budget>) -> Running {
    let config = EngineConfig {
        budget: Budget::Bytes(budget),
        cpu_compute: When::Never,
        host_budget: host,
        host_kv: When::Always,
        ..EngineConfig::default()
    };
    runtime.start_as(gpu_config(runtime), config).unwrap()
}

fn request(model: &Arc<LoadedModel>, prompt: Vec<u32>, n: u32) -> GenerateRequest {
    GenerateRequest {
        reuse: true,
        ..greedy(model, prompt, n)
    }
}

/// `n` ids, others for another `seed`.
fn ids(seed: u32, n: u32) -> Vec<u32> {
    let id = |i: u32| 5 + (i * 31 + seed * 17 + i * i * seed) % 200;
    (0..n).map(id).collect()
}

fn tier(engine: &Running) -> HostTier {
    engine.snapshot().host_tier
}

/// Ends an engine that has nothing under way, of which nothing is left.
fn end(runtime: &Runtime, engine: Running) {
    let cache = engine.snapshot().cache;
    assert_eq!((cache.kv_bytes, cache.scratch_bytes), (0, 0));
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Requests that are promised a part of what they come to, in a budget that has no room for all.
async fn many(host: Option<Budget>, cancel: bool) -> (Vec<Vec<u32>>, HostTier) {
    const MANY: u32 = 5;
    let runtime = Runtime::new();
    let ample = start(&runtime, 64 << 20, None);
    let bytes: u64 = {
        let model = load_endless(&ample, "m").await;
        model.model().info().segments.iter().map(|s| s.bytes).sum()
    };
    end(&runtime, ample);
    let runtime = Runtime::new();
    let engine = start(&runtime, (bytes + (3 << 19)) & !255, host);
    let before = engine.snapshot().cache.resident_bytes;
    let model = load_endless(&engine, "m").await;
    let asked: Vec<_> = (0..MANY)
        .map(|i| {
            let request = GenerateRequest {
                max_tokens: None,
                n_ctx: Some(420 + 20 * i),
                ..request(&model, ids(i, 100 + 7 * i), 1)
            };
            let mut events = engine.generate(request).unwrap();
            tokio::spawn(async move {
                let mut ids = Vec::new();
                while let Some(event) = events.next().await {
                    use rocmforge_engine::api::GenerateEvent as Event;
                    match event {
                        Event::Piece { ids: new, .. } => ids.extend(new),
                        Event::Done(_) => return ids,
                        Event::Failed(error) => panic!("{error}"),
                    }
                    if cancel && i % 2 == 0 && ids.len() > 150 {
                        return ids;
                    }
                }
                panic!("a generation ends with Done or Failed")
            })
        })
        .collect();
    let mut texts = Vec::new();
    for one in asked {
        texts.push(one.await.unwrap());
    }
    until(&engine, "the end of all", |s| s.running == 0).await;
    let counts = tier(&engine);
    println!("{host:?}: {counts:?}");
    drop(model);
    engine.unload("m", false).await.unwrap();
    assert_eq!(tier(&engine).bytes, 0);
    assert_eq!(engine.snapshot().cache.resident_bytes, before);
    end(&runtime, engine);
    (texts, counts)
}

#[tokio::test]
async fn who_yields_goes_on_with_what_was_computed() {
    let (expected, without) = many(None, false).await;
    assert_eq!((without.saved, without.budget_bytes), (0, 0));
    assert!(without.again_tokens > 0, "nobody yielded: {without:?}");
    let (texts, with) = many(ROOMY, false).await;
    assert_eq!(texts, expected);
    assert!(with.saved > 0 && with.restored > 0, "{with:?}");
    assert!(with.again_tokens < without.again_tokens, "{with:?}");
}

#[tokio::test]
async fn a_tier_too_small_for_all_keeps_what_it_can() {
    let (expected, _) = many(None, false).await;
    let (texts, with) = many(Some(Budget::Bytes(200 << 10)), false).await;
    assert_eq!(texts, expected);
    assert!(with.saved > 0 && with.dropped > 0, "{with:?}");
    assert!(with.bytes <= 200 << 10);
}

#[tokio::test]
async fn what_is_cancelled_leaves_nothing_behind() {
    many(ROOMY, true).await;
}

/// A second turn whose first left the card: all positions, windows, states, and a mixture of them.
#[tokio::test]
async fn a_second_turn_comes_back_from_the_host() {
    for file in [
        "tiny-llama-Q4_K_M.gguf",
        "arch/gemma3.gguf",
        "arch/qwen35.gguf",
        "arch/granitehybrid.gguf",
    ] {
        let runtime = Runtime::new();
        let engine = start(&runtime, 64 << 20, ROOMY);
        let model = load(&engine, file, "m").await;
        let first = ids(1, 150);
        let (_, answer, _) = run(&engine, request(&model, first.clone(), 20)).await;
        let second = [first, answer, ids(2, 20)].concat();
        let alone = GenerateRequest {
            reuse: false,
            ..request(&model, second.clone(), 20)
        };
        let (_, expected, _) = run(&engine, alone).await;
        // What has no room now leaves the card.
        engine.set_budget(Budget::Bytes(8 << 20)).await.unwrap();
        engine.set_budget(Budget::Bytes(64 << 20)).await.unwrap();
        assert_eq!(engine.snapshot().cache.prefix_bytes, 0);
        let left = tier(&engine);
        assert!(left.bytes > 0 && left.saved > 0, "{file}: {left:?}");
        let (_, found, summary) = run(&engine, request(&model, second, 20)).await;
        assert_eq!(found, expected, "{file}");
        let back = tier(&engine);
        println!("{file}: {} reused, {back:?}", summary.reused_tokens);
        assert!(back.restored > 0, "{file}: {back:?}");
        assert!(summary.reused_tokens >= 4 * PAGE, "{file}: {summary:?}");
        engine.clear(None).await.unwrap();
        assert_eq!(tier(&engine).bytes, 0);
        drop(model);
        end(&runtime, engine);
    }
}

/// Chats in turn that have no room beside each other on the card.
#[tokio::test]
async fn chats_in_turn_find_their_beginnings() {
    let mut texts: Vec<Vec<Vec<u32>>> = Vec::new();
    let mut reused = Vec::new();
    for host in [None, ROOMY] {
        let runtime = Runtime::new();
        let engine = start(&runtime, 3 << 20, host);
        let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
        let mut chats: Vec<Vec<u32>> = (0..6).map(|i| ids(i, 200)).collect();
        let (mut found, mut said) = (0, Vec::new());
        for turn in 0..3 {
            for (i, chat) in (0..).zip(&mut chats) {
                let (_, new, summary) = run(&engine, request(&model, chat.clone(), 20)).await;
                found += summary.reused_tokens;
                chat.extend(&new);
                chat.extend(ids(turn * 10 + i, 10));
                said.push(new);
            }
        }
        println!("{host:?}: {found} reused, {:?}", tier(&engine));
        reused.push(found);
        texts.push(said);
        drop(model);
        end(&runtime, engine);
    }
    assert_eq!(texts[0], texts[1]);
    assert!(reused[1] > reused[0], "{reused:?}");
}

/// One budget of the host: what weights take of it, pages leave.
#[tokio::test]
async fn weights_on_the_host_go_before_pages() {
    const HOST: u64 = 4 << 20;
    let runtime = Runtime::new();
    let engine = runtime
        .start_split(
            gpu_config(&runtime),
            64 << 20,
            (When::Always, Some(Budget::Bytes(HOST))),
        )
        .unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    assert_eq!(tier(&engine).budget_bytes, HOST);
    let (_, expected, _) = run(&engine, request(&model, ids(1, 150), 20)).await;
    let small = model
        .model()
        .info()
        .segments
        .iter()
        .map(|s| s.bytes)
        .sum::<u64>()
        / 2
        + (2 << 20);
    engine
        .set_budget(Budget::Bytes(small & !255))
        .await
        .unwrap();
    let (_, found, summary) = run(&engine, request(&model, ids(1, 150), 20)).await;
    assert_eq!(found, expected);
    println!("{:?}, {:?}", summary.cache, tier(&engine));
    assert!(summary.cache.host_bytes > 0, "the host took no part");
    let now = tier(&engine);
    assert!(
        now.budget_bytes < HOST && now.bytes <= now.budget_bytes,
        "{now:?}"
    );
    drop(model);
    engine.unload("m", false).await.unwrap();
    assert_eq!((tier(&engine).budget_bytes, tier(&engine).bytes), (HOST, 0));
    end(&runtime, engine);
}
