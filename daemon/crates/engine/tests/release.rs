//! The device's memory is given back while nobody asks for anything, and taken again.

use std::sync::Arc;
use std::time::Duration;

use rocmforge_device_gpu::GpuConfig;
use rocmforge_engine::api::{
    Budget, GenerateEvent, GenerateRequest, IdleRelease, PreloadEvent, Snapshot, When,
};
use rocmforge_engine::{EngineConfig, EngineHandle, Error, LoadedModel};
use rocmforge_fake_hip::{Live, Misbehaviour};

use crate::fake::{Runtime, gpu_config};
use crate::requests::{chat, engine, greedy, load, load_endless, questions, run, until};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const BUDGET: u64 = 16 << 20;
const OUT_OF_MEMORY: u32 = 2;

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
    assert_eq!((held, released.kept_bytes), (released.freed_bytes, 0));
    assert_eq!(
        (runtime.live(), runtime.is_open()),
        (Live::default(), false)
    );
    let snapshot = running.snapshot();
    assert!(snapshot.device_closed);
    assert_eq!(snapshot.device.memory.unwrap().allocated_bytes, 0);
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
    assert!(!snapshot.device_closed);
    assert_eq!(runtime.live().bytes, held);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Without what grows with use: events in a pool, modules that were loaded.
fn comparable(live: Live) -> Live {
    Live {
        events: 0,
        modules: 0,
        ..live
    }
}

#[tokio::test]
async fn many_releases_leave_nothing_and_change_nothing() {
    let runtime = Runtime::new();
    runtime.add_products();
    // Kernels are loaded and files registered ahead of need, as in a daemon.
    let config = GpuConfig {
        warm_up: true,
        vendor_products: true,
        ..gpu_config(&runtime)
    };
    let running = runtime.start_as(config, gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let (expected, _) = conversation(&running, &model).await;
    let ledger = |s: &Snapshot| {
        (
            s.cache.resident_bytes,
            s.cache.kv_bytes,
            s.cache.budget_bytes,
        )
    };
    let (held, used) = (comparable(runtime.live()), ledger(&running.snapshot()));
    for round in 0..20 {
        running.release(round % 3 == 2).await.unwrap();
        assert_eq!(
            (runtime.live(), runtime.is_open()),
            (Live::default(), false)
        );
        // A model that is loaded meanwhile needs no GPU.
        if round == 7 {
            load(&running, "tiny-qwen3-Q8_0.gguf", "other").await;
            assert!(!runtime.is_open());
        }
        let (ids, reused) = conversation(&running, &model).await;
        assert_eq!(ids, expected, "round {round}");
        assert_eq!(reused >= 192, round % 3 != 2, "round {round}: {reused}");
        assert_eq!(ledger(&running.snapshot()), used, "round {round}");
        let live = comparable(runtime.live());
        assert_eq!((live.bytes, live.streams), (held.bytes, held.streams));
    }
    let other = running.snapshot().models[1].model.clone();
    assert!(!answer(&running, &other).await.is_empty());
    drop((model, other));
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn requests_that_come_while_the_gpu_is_closed_or_opened_wait_and_are_answered() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    runtime.misbehave(Misbehaviour::HoldsReset, 1);
    let release = running.release(false);
    let ask = async {
        while runtime.calls("hipDeviceReset") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The engine is closing it now.
        let both = async { tokio::join!(answer(&running, &model), answer(&running, &model)) };
        tokio::pin!(both);
        let waited = tokio::time::timeout(Duration::from_millis(30), &mut both);
        waited.await.unwrap_err();
        runtime.misbehave(Misbehaviour::HoldsReset, 0);
        both.await
    };
    let (released, (one, other)) = tokio::join!(release, ask);
    released.unwrap();
    assert_eq!((&one, &other), (&expected, &expected));
    let snapshot = running.snapshot();
    assert_eq!((snapshot.releases, snapshot.device_closed), (1, false));
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_gpu_that_cannot_be_opened_again_refuses_one_request_and_not_the_next() {
    let runtime = Runtime::new();
    runtime.set_memory(64 << 20, 0);
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let (expected, _) = conversation(&running, &model).await;
    running.release(false).await.unwrap();
    let budget = Budget::Bytes(BUDGET);
    for case in ["the context", "a stream", "the arena"] {
        match case {
            "the context" => runtime.fail("hipSetDevice", 1, OUT_OF_MEMORY),
            "a stream" => runtime.fail("hipStreamCreateWithPriority", 1, OUT_OF_MEMORY),
            // Another process has taken the card.
            _ => runtime.set_memory(64 << 20, 64 << 20),
        }
        let request = greedy(&model, vec![1, 9, 17], 4);
        let mut events = running.generate(request).unwrap();
        let Some(GenerateEvent::Failed(refused)) = events.next().await else {
            panic!("{case}: it is not refused");
        };
        assert!(
            matches!(refused, Error::Unavailable { .. }),
            "{case}: {refused:?}"
        );
        let text = refused.to_string();
        assert!(text.contains("cannot be opened again: "), "{case}: {text}");
        assert!(
            text.ends_with("; the next request tries again"),
            "{case}: {text}"
        );
        let snapshot = running.snapshot();
        assert_eq!(
            (snapshot.device_closed, snapshot.released_budget),
            (true, Some(BUDGET))
        );
        assert_eq!(
            (runtime.live(), runtime.is_open()),
            (Live::default(), false),
            "{case}"
        );
        runtime.recover();
        if case == "the arena" {
            running.set_budget(budget).await.unwrap_err();
            running.pin("m", None, true).await.unwrap_err();
            let mut events = running.preload("m", None).unwrap();
            let ended = events.next().await;
            assert!(matches!(ended, Some(PreloadEvent::Failed(_))), "{ended:?}");
        }
    }
    runtime.set_memory(64 << 20, 0);
    let (ids, reused) = conversation(&running, &model).await;
    assert_eq!(ids, expected);
    assert!(reused >= 192, "{reused} tokens came back");
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_request_that_is_refused_does_not_wake_the_gpu() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    let unloaded = load(&running, "tiny-qwen3-Q8_0.gguf", "other").await;
    running.unload("other", false).await.unwrap();
    running.release(false).await.unwrap();
    for (case, request) in [
        ("no tokens", greedy(&model, Vec::new(), 4)),
        ("an unknown token", greedy(&model, vec![u32::MAX], 4)),
        ("no model", greedy(&unloaded, vec![1], 4)),
        (
            "a context that is too long",
            GenerateRequest {
                n_ctx: Some(u32::MAX),
                ..greedy(&model, vec![1, 9, 17], 4)
            },
        ),
    ] {
        let mut events = running.generate(request).unwrap();
        let refused = events.next().await;
        let is_refused = matches!(refused, Some(GenerateEvent::Failed(_)));
        assert!(is_refused, "{case}: {refused:?}");
        let snapshot = running.snapshot();
        assert!(snapshot.device_closed && !runtime.is_open(), "{case}");
        assert_eq!(snapshot.released_budget, Some(BUDGET), "{case}");
    }
    assert_eq!(answer(&running, &model).await, expected);
    drop((model, unloaded));
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_close_that_fails_is_tried_again() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    let resets = runtime.calls("hipDeviceReset");
    runtime.fail("hipDeviceReset", 1, OUT_OF_MEMORY);
    running.release(false).await.unwrap();
    assert!(running.snapshot().device_closed);
    until(&running, "one more", |_| {
        runtime.calls("hipDeviceReset") == resets + 2 && !runtime.is_open()
    })
    .await;
    assert_eq!(runtime.live(), Live::default());
    assert_eq!(answer(&running, &model).await, expected);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_budget_that_is_set_opens_the_gpu_unless_it_is_refused() {
    let runtime = Runtime::new();
    let running = runtime.start_as(gpu_config(&runtime), gpu(None)).unwrap();
    let model = load(&running, LLAMA, "m").await;
    let expected = answer(&running, &model).await;
    running.release(false).await.unwrap();
    running.set_budget(Budget::Bytes(1)).await.unwrap_err();
    assert!(running.snapshot().device_closed && !runtime.is_open());
    running.set_budget(Budget::Bytes(BUDGET / 2)).await.unwrap();
    let snapshot = running.snapshot();
    assert_eq!(
        (snapshot.device_closed, snapshot.released_budget),
        (false, None)
    );
    assert_eq!(answer(&running, &model).await, expected);
    assert_eq!(running.snapshot().cache.budget_bytes, BUDGET / 2);
    // What needs no GPU does not open it.
    running.release(false).await.unwrap();
    running.clear(None).await.unwrap();
    running.pin("m", None, false).await.unwrap();
    drop(model);
    running.unload("m", false).await.unwrap();
    assert!(running.snapshot().device_closed && !runtime.is_open());
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
        assert!(!snapshot.device_closed && runtime.is_open());
        let usable = snapshot.device.memory.unwrap().capacity_bytes;
        assert!(usable <= own + pinned + (1 << 10), "{usable} for {pinned}");
        assert_eq!(answer(&running, &model).await, expected);
    }
    // Once nothing is pinned, the GPU is closed.
    running.pin("other", None, false).await.unwrap();
    for _ in 0..3 {
        assert_eq!(answer(&running, &model).await, expected);
        until(&running, "the end of it", |s| s.device_closed).await;
        assert_eq!(
            (runtime.live(), runtime.is_open()),
            (Live::default(), false)
        );
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
    // Also while the GPU is closed.
    running.release(false).await.unwrap();
    assert!(runtime.live() == Live::default() && running.snapshot().host_tier.bytes > 0);
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
