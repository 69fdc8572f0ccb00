//! The device's memory is given back while nobody asks for anything, and taken again.

use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{Budget, GenerateRequest, IdleRelease, PreloadEvent, When};
use rocmforge_engine::{EngineConfig, EngineHandle, Error, LoadedModel};
use rocmforge_fake_hip::Live;

use crate::fake::{Runtime, gpu_config};
use crate::requests::{chat, engine, greedy, load, load_endless, questions, run, until};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const BUDGET: u64 = 16 << 20;

fn gpu(idle_release: Option<Duration>) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(BUDGET),
        cpu_compute: When::Never,
        host_budget: Some(Budget::Bytes(8 << 20)),
        host_kv: When::Always,
        idle_release: IdleRelease {
            after: idle_release,
            host: false,
        },
        ..EngineConfig::default()
    }
}

async fn answer(engine: &EngineHandle, model: &Arc<LoadedModel>) -> String {
    let request = GenerateRequest {
        max_tokens: Some(16),
        ..chat(model, &questions(1)[0].0)
    };
    run(engine, request).await.0
}

#[tokio::test]
async fn released_memory_goes_to_the_driver_and_comes_back_with_the_next_request() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let own = running.snapshot().cache.resident_bytes;
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    let held = runtime.live().bytes;
    let allocated = running.snapshot().device.memory.unwrap().allocated_bytes;
    assert!(running.snapshot().cache.resident_bytes > own);
    let released = running.release(false).await.unwrap();
    assert_eq!(released.budget_bytes, BUDGET);
    assert_eq!(released.freed_bytes + released.kept_bytes, allocated);
    let left = runtime.live().bytes;
    assert_eq!(held - left, released.freed_bytes);
    assert!(released.kept_bytes * 4 < allocated, "{released:?}");
    let snapshot = running.snapshot();
    assert_eq!(
        (snapshot.released_budget, snapshot.releases),
        (Some(BUDGET), 1)
    );
    assert_eq!(snapshot.cache.resident_bytes, own, "the device's own block");
    // Again, it is what it was.
    let again = running.release(false).await.unwrap();
    assert_eq!((again.budget_bytes, again.freed_bytes), (BUDGET, 0));
    assert_eq!(running.snapshot().releases, 1);
    assert_eq!(answer(&running, &model).await, expected);
    let snapshot = running.snapshot();
    assert_eq!(
        (snapshot.released_budget, snapshot.cache.budget_bytes),
        (None, BUDGET)
    );
    assert_eq!(runtime.live().bytes, held);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn memory_that_others_took_meanwhile_leaves_a_smaller_budget() {
    let runtime = Runtime::new();
    runtime.set_memory(64 << 20, 0);
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    running.release(false).await.unwrap();
    runtime.set_memory(64 << 20, 52 << 20);
    assert_eq!(answer(&running, &model).await, expected);
    let snapshot = running.snapshot();
    let budget = snapshot.cache.budget_bytes;
    assert!((6 << 20..BUDGET).contains(&budget), "{budget}");
    assert_eq!(snapshot.released_budget, None);
    let kept = snapshot.keep_free.expect("it is to come back");
    assert_eq!(kept.given_up_bytes, BUDGET - budget);
    // They go.
    runtime.set_memory(64 << 20, 0);
    until(&running, "the whole budget", |s| {
        s.cache.budget_bytes == BUDGET
    })
    .await;
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn an_idle_device_is_released_and_pinned_weights_stay() {
    let runtime = Runtime::new();
    let config = gpu(Some(Duration::from_millis(20)));
    let running = runtime.start_as(gpu_config(&runtime), config).unwrap();
    let own = running.snapshot().cache.resident_bytes;
    let model = load(&running, LLAMA, "m").await;
    let other = load(&running, "tiny-qwen3-Q8_0.gguf", "other").await;
    let expected = answer(&running, &model).await;
    let pinned = running.pin("other", None, true).await.unwrap();
    let mut events = running.preload("other", None).unwrap();
    loop {
        match events.next().await {
            Some(PreloadEvent::Done { .. }) => break,
            Some(PreloadEvent::Progress { .. }) => {}
            ended => panic!("{ended:?}"),
        }
    }
    for _ in 0..3 {
        until(&running, "the release", |s| s.released_budget.is_some()).await;
        let snapshot = running.snapshot();
        assert_eq!(snapshot.cache.pinned_bytes, pinned);
        let usable = snapshot.device.memory.unwrap().capacity_bytes;
        assert!(usable <= own + pinned + (1 << 10), "{usable} for {pinned}");
        assert_eq!(answer(&running, &model).await, expected);
    }
    // The events hold the way to the engine, which ends when nobody has one.
    drop((model, other, events));
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn what_runs_is_not_released() {
    let engine = engine(Budget::Bytes(BUDGET));
    let model = load_endless(&engine, "m").await;
    let stream = engine
        .generate(greedy(&model, vec![1, 9, 17], 100_000))
        .unwrap();
    until(&engine, "the text", |s| s.running == 1).await;
    let refused = engine.release(false).await.unwrap_err();
    assert!(matches!(refused, Error::Precondition(_)), "{refused:?}");
    assert!(
        refused.to_string().contains("of which there are 1:"),
        "{refused}"
    );
    drop(stream);
    until(&engine, "its end", |s| s.running == 0).await;
    engine.release(false).await.unwrap();
    // A budget that somebody sets is the one in force.
    engine.set_budget(Budget::Bytes(BUDGET / 2)).await.unwrap();
    assert_eq!(engine.snapshot().released_budget, None);
    run(&engine, greedy(&model, vec![1, 9, 17], 4)).await;
    assert_eq!(engine.snapshot().cache.budget_bytes, BUDGET / 2);
}

async fn conversation(engine: &EngineHandle, model: &Arc<LoadedModel>) -> (Vec<u32>, u32) {
    let prompt = (0..200).map(|i| 5 + i * 31 % 200).collect();
    let request = GenerateRequest {
        reuse: true,
        ..greedy(model, prompt, 8)
    };
    let (_, ids, summary) = run(engine, request).await;
    (ids, summary.reused_tokens)
}

#[tokio::test]
async fn kv_pages_come_back_from_host_memory_unless_that_is_given_back_too() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let (expected, reused) = conversation(&running, &model).await;
    assert_eq!(reused, 0);
    let released = running.release(false).await.unwrap();
    assert_eq!(released.host_freed_bytes, 0);
    let tier = running.snapshot().host_tier;
    assert!(tier.bytes > 0, "{tier:?}");
    let (ids, reused) = conversation(&running, &model).await;
    assert_eq!(ids, expected);
    assert!(reused >= 192, "{reused} tokens came back");
    let released = running.release(true).await.unwrap();
    assert!(released.host_freed_bytes >= tier.bytes, "{released:?}");
    let given_back = running.snapshot().host_tier;
    assert_eq!(
        (given_back.bytes, given_back.budget_bytes),
        (0, tier.budget_bytes)
    );
    assert_eq!(conversation(&running, &model).await, (expected, 0));
    // As is configured.
    let config = IdleRelease {
        after: Some(Duration::from_millis(20)),
        host: true,
    };
    running.set_idle_release(config).await.unwrap();
    until(&running, "the release", |s| s.released_budget.is_some()).await;
    assert_eq!(running.snapshot().host_tier.bytes, 0);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}
