//! What the engine does while requests run: cancelling, slow readers, pins,
//! budgets, unloading, draining.

mod closing;

use crate::requests;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::requests::{chat, engine, load, load_endless, questions, run, until};
use rocmforge_engine::api::{
    Asker, Budget, EVENT_CAPACITY, GenerateEvent, GenerateRequest, KeptReason, PreloadEvent,
    SamplingParams, ScoreRequest, SegmentState, Snapshot,
};
use rocmforge_engine::{EngineHandle, Error, Events, LoadedModel, Refusal};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

/// A request that goes on for as long as the context lasts, of a model without an end of text.
fn long(model: &Arc<LoadedModel>) -> GenerateRequest {
    GenerateRequest {
        sampling: SamplingParams {
            temperature: 50.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(3),
            ..SamplingParams::default()
        },
        max_tokens: Some(3000),
        ..chat(model, "Tell me a story.")
    }
}

async fn end(events: &mut Events<GenerateEvent>) -> Result<u32, Error> {
    loop {
        match events.next().await.expect("an end") {
            GenerateEvent::Piece { .. } => {}
            GenerateEvent::Done(summary) => return Ok(summary.generated_tokens),
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

#[tokio::test]
async fn a_dropped_request_ends_and_gives_everything_back() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    for _ in 0..20 {
        let mut events = engine.generate(long(&model)).unwrap();
        assert!(matches!(
            events.next().await,
            Some(GenerateEvent::Piece { .. })
        ));
        drop(events);
    }
    until(&engine, "the end of all", |s| s.running == 0).await;
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.cache.kv_bytes + snapshot.cache.scratch_bytes, 0);
    run(&engine, chat(&model, "42 - 30 = ?")).await;
}

#[tokio::test]
async fn a_slow_reader_holds_up_only_itself() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut slow = engine.generate(long(&model)).unwrap();
    until(&engine, "the slow one", |s| s.running == 1).await;
    for (question, _) in questions(5) {
        run(&engine, chat(&model, &question)).await;
    }
    assert_eq!(engine.snapshot().running, 1);
    let generated = end(&mut slow).await.unwrap();
    assert!(generated as usize > EVENT_CAPACITY, "{generated}");
}

#[tokio::test]
async fn whoever_has_an_event_of_a_request_reads_a_state_that_knows_of_it() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    // Soon after each other, each a moment after the state was published for the one before.
    let mut all = Vec::new();
    for n in 1..=4 {
        let mut events = engine.generate(long(&model)).unwrap();
        assert!(matches!(
            events.next().await,
            Some(GenerateEvent::Piece { .. })
        ));
        all.push(events);
        let snapshot = engine.snapshot();
        assert_eq!(
            (
                snapshot.running,
                snapshot.models[0].requests,
                snapshot.queued
            ),
            (n, n, 0)
        );
    }
}

#[tokio::test]
async fn a_preload_comes_to_its_end_beside_a_request_that_goes_on() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    load(&engine, QWEN, "other").await;
    // Its reader keeps up, so that it is never passed over.
    let mut events = engine.generate(long(&model)).unwrap();
    let reader = tokio::spawn(async move { end(&mut events).await });
    until(&engine, "the request", |s| s.running == 1).await;
    let mut preload = engine.preload("other", None).unwrap();
    let uploaded = loop {
        match preload.next().await.expect("an end") {
            PreloadEvent::Progress { .. } => {}
            PreloadEvent::Done { uploaded_bytes } => break uploaded_bytes,
            PreloadEvent::Failed(error) => panic!("{error}"),
        }
    };
    assert!(uploaded > 0);
    assert_eq!(engine.snapshot().running, 1, "the request had ended before");
    assert!(reader.await.unwrap().unwrap() > 0);
}

#[tokio::test]
async fn two_requests_take_turns() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut first = engine.generate(long(&model)).unwrap();
    let mut second = engine.generate(long(&model)).unwrap();
    let (mut a, mut b) = (0usize, 0usize);
    while a < 300 && b < 300 {
        tokio::select! {
            Some(GenerateEvent::Piece { .. }) = first.next() => a += 1,
            Some(GenerateEvent::Piece { .. }) = second.next() => b += 1,
            else => panic!("an early end"),
        }
    }
    assert!(a.abs_diff(b) <= 2 * EVENT_CAPACITY, "{a} and {b}");
}

#[tokio::test]
async fn a_deadline_ends_a_request_that_runs_and_one_that_waits() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let deadline = Some(Instant::now() + Duration::from_millis(60));
    let mut events = engine
        .generate(GenerateRequest {
            deadline,
            ..long(&model)
        })
        .unwrap();
    assert!(matches!(
        end(&mut events).await,
        Err(Error::DeadlineExceeded { .. })
    ));
    let past = Some(Instant::now());
    let mut events = engine
        .generate(GenerateRequest {
            deadline: past,
            ..long(&model)
        })
        .unwrap();
    assert!(matches!(
        end(&mut events).await,
        Err(Error::DeadlineExceeded { generated: 0 })
    ));
    let score = ScoreRequest {
        model,
        ids: vec![5; 100],
        top_n: 0,
        deadline: past,
        asker: Asker::default(),
        adapters: None,
    };
    assert!(matches!(
        engine.score(score).await,
        Err(Error::DeadlineExceeded { .. })
    ));
}

#[tokio::test]
async fn pins_hold_and_a_clear_says_what_it_left() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, LLAMA, "m").await;
    let mut events = engine.preload("m", None).unwrap();
    let mut last = 0;
    loop {
        match events.next().await.expect("an end") {
            PreloadEvent::Progress {
                done_bytes,
                total_bytes,
            } => {
                assert!(done_bytes > last && done_bytes <= total_bytes);
                last = done_bytes;
            }
            PreloadEvent::Done { uploaded_bytes } => break assert_eq!(uploaded_bytes, last),
            PreloadEvent::Failed(error) => panic!("{error}"),
        }
    }
    let resident = |e: &EngineHandle| {
        e.snapshot().models[0]
            .segments
            .iter()
            .filter(|s| s.state == SegmentState::Resident)
            .count()
    };
    let n = model.model().plan().segments.len();
    assert_eq!(resident(&engine), n);
    let pinned = engine.pin("m", Some(vec![1, 3, 3]), true).await.unwrap();
    assert_eq!(engine.snapshot().cache.pinned_bytes, pinned);
    let cleared = engine.clear(None).await.unwrap();
    assert_eq!(cleared.freed_segments as usize, n - 2);
    let kept: Vec<_> = cleared.kept.iter().map(|k| (k.index, k.reason)).collect();
    assert_eq!(kept, [(1, KeptReason::Pinned), (3, KeptReason::Pinned)]);
    assert_eq!(engine.pin("m", None, false).await.unwrap(), 0);
    engine.clear(Some("m")).await.unwrap();
    assert_eq!(
        (resident(&engine), engine.snapshot().cache.resident_bytes),
        (0, 0)
    );
    assert!(matches!(
        engine.pin("m", Some(vec![99]), true).await,
        Err(Error::InvalidArgument {
            field: "segments",
            ..
        })
    ));
    assert!(matches!(
        engine.clear(Some("x")).await,
        Err(Error::UnknownModel { .. })
    ));
}

#[tokio::test]
async fn a_shrinking_budget_never_fails_running_work() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut events = engine
        .generate(GenerateRequest {
            max_tokens: Some(300),
            ..long(&model)
        })
        .unwrap();
    assert!(matches!(
        events.next().await,
        Some(GenerateEvent::Piece { .. })
    ));
    let change = engine.set_budget(Budget::Bytes(512 << 10)).await.unwrap();
    assert_eq!(change.budget_bytes, 512 << 10);
    assert!(change.evicted_bytes > 0 && change.evicted_segments > 0);
    end(&mut events).await.unwrap();
    let shrunk = |s: &Snapshot| s.cache.budget_bytes == 512 << 10;
    until(&engine, "the budget", shrunk).await;
    // A segment needs some 170 kB; with the KV of 3000 tokens beside it this can never fit now.
    let mut events = engine.generate(long(&model)).unwrap();
    let error = end(&mut events).await.unwrap_err();
    assert!(
        matches!(&error, Error::Precondition(r) if r.reason() == "NEVER_FITS"),
        "{error}"
    );
    engine.set_budget(Budget::Bytes(64 << 20)).await.unwrap();
    run(&engine, chat(&model, "42 - 30 = ?")).await;
    for bad in [
        Budget::Bytes(0),
        Budget::Percent(0.0),
        Budget::Percent(f64::NAN),
    ] {
        assert!(matches!(
            engine.set_budget(bad).await,
            Err(Error::InvalidArgument {
                field: "budget",
                ..
            })
        ));
    }
}

#[tokio::test]
async fn pinning_more_than_leaves_room_is_refused_whole() {
    let engine = engine(Budget::Bytes(3 << 20));
    let model = load(&engine, LLAMA, "m").await;
    load(&engine, QWEN, "q").await;
    let error = engine.pin("q", None, true).await.unwrap_err();
    assert!(matches!(error, Error::Precondition(_)), "{error}");
    assert!(
        engine.snapshot().models[1]
            .segments
            .iter()
            .all(|s| !s.pinned)
    );
    run(&engine, chat(&model, "42 - 30 = ?")).await;
}

#[tokio::test]
async fn pins_outlast_a_pin_that_is_refused_and_an_unload_without_force() {
    let engine = engine(Budget::Bytes(3 << 20));
    load(&engine, QWEN, "q").await;
    let pinned = |e: &EngineHandle| {
        let segments = e.snapshot().models[0].segments.clone();
        (0..)
            .zip(segments.iter())
            .filter(|(_, s)| s.pinned)
            .map(|(i, _)| i)
            .collect::<Vec<u32>>()
    };
    engine.pin("q", Some(vec![0, 4]), true).await.unwrap();
    engine.pin("q", None, true).await.unwrap_err();
    assert_eq!(pinned(&engine), [0, 4], "no more and no fewer");
    let error = engine.unload("q", false).await.unwrap_err();
    assert!(
        matches!(&error, Error::Precondition(r) if r.reason() == "MODEL_PINNED"),
        "{error}"
    );
    assert_eq!(pinned(&engine), [0, 4]);
    engine.unload("q", true).await.unwrap();
    assert!(engine.snapshot().models.is_empty());
}

#[tokio::test]
async fn unloading_spares_running_requests_unless_forced() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut events = engine.generate(long(&model)).unwrap();
    assert!(matches!(
        events.next().await,
        Some(GenerateEvent::Piece { .. })
    ));
    assert!(matches!(
        engine.unload("m", false).await,
        Err(Error::Precondition(_))
    ));
    assert!(engine.unload("m", true).await.unwrap().freed_bytes > 0);
    assert!(matches!(
        end(&mut events).await,
        Err(Error::Precondition(_))
    ));
    let snapshot = engine.snapshot();
    assert!(snapshot.models.is_empty() && snapshot.cache.resident_bytes == 0);
    // A request that was made for the model that is gone ends as one that runs.
    let mut events = engine.generate(long(&model)).unwrap();
    assert!(matches!(
        end(&mut events).await,
        Err(Error::Precondition(Refusal::Unloaded { .. }))
    ));
    let again = load_endless(&engine, "m").await;
    let mut events = engine.generate(long(&model)).unwrap();
    assert!(matches!(
        end(&mut events).await,
        Err(Error::Precondition(_))
    ));
    run(&engine, chat(&again, "42 - 30 = ?")).await;
}

#[tokio::test]
async fn names_belong_to_one_file() {
    let engine = engine(Budget::Bytes(64 << 20));
    let first = load(&engine, LLAMA, "m").await;
    assert!(
        Arc::ptr_eq(&first, &load(&engine, LLAMA, "m").await),
        "the same file again is the same model"
    );
    let file = rocmforge_gguf::MappedFile::open(&requests::fixture(QWEN)).unwrap();
    let other = rocmforge_engine::prepare("m", file, &mut |_| {}).unwrap();
    assert!(matches!(
        engine.load(other).await,
        Err(Error::NameTaken { .. })
    ));
}

/// Each name of a file once held a vocabulary of its own: 8.6 MiB where it has 128k tokens.
#[tokio::test]
async fn names_of_one_file_share_what_its_header_comes_to() {
    let engine = engine(Budget::Bytes(64 << 20));
    let first = load(&engine, LLAMA, "a").await;
    let second = load(&engine, LLAMA, "b").await;
    let shared = |model: &Arc<LoadedModel>| {
        Arc::ptr_eq(model.tokenizer(), first.tokenizer())
            && std::ptr::eq(model.model(), first.model())
    };
    assert!(shared(&second), "though it was prepared by itself");
    let snapshot = engine.snapshot();
    let prepare = |name: &str, file: &str| {
        let file = rocmforge_gguf::MappedFile::open(&requests::fixture(file)).unwrap();
        let others = snapshot.models.iter().map(|status| &*status.model);
        rocmforge_engine::prepare_among(name, file, others, &mut |_| {})
    };
    let third = engine.load(prepare("c", LLAMA).unwrap()).await.unwrap();
    assert!(shared(&third) && third.name() == "c");
    assert!(matches!(
        prepare("no name", LLAMA),
        Err(Error::InvalidArgument { .. })
    ));
    let other = engine.load(prepare("d", QWEN).unwrap()).await.unwrap();
    assert!(!shared(&other), "another file");
    // What is shared outlasts the name that made it.
    let expected = run(&engine, chat(&third, "Hello")).await.0;
    engine.unload("a", false).await.unwrap();
    engine.unload("b", false).await.unwrap();
    assert_eq!(run(&engine, chat(&third, "Hello")).await.0, expected);
}

#[tokio::test]
async fn two_models_with_room_for_one_and_a_half_never_reload_a_whole_one() {
    let whole = |m: &Arc<LoadedModel>| {
        m.model()
            .info()
            .segments
            .iter()
            .map(|s| s.bytes)
            .sum::<u64>()
    };
    let engine = engine(Budget::Bytes(64 << 20));
    let (a, b) = (
        load(&engine, LLAMA, "a").await,
        load(&engine, LLAMA, "b").await,
    );
    let room = whole(&a) * 3 / 2 + (600 << 10);
    engine.set_budget(Budget::Bytes(room)).await.unwrap();
    for (i, (question, _)) in questions(12).into_iter().enumerate() {
        let model = if i % 2 == 0 { &a } else { &b };
        let request = GenerateRequest {
            max_tokens: Some(8),
            ..chat(model, &question)
        };
        let uploaded = run(&engine, request).await.2.cache.uploaded_bytes;
        if i >= 2 {
            assert!(
                uploaded < whole(model) * 9 / 10,
                "request {i} uploaded {uploaded} of {}",
                whole(model)
            );
        }
    }
}

/// Of a model that does not fit, every pass uploads what is absent: a prompt takes few passes, and
/// leaves no less room to what comes after it.
#[tokio::test]
async fn a_long_prompt_in_a_small_budget_takes_few_passes() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, QWEN, "m").await;
    let segments = model.model().plan().segments.len() as u64;
    engine.set_budget(Budget::Bytes(4 << 20)).await.unwrap();
    let again = || GenerateRequest {
        max_tokens: Some(2),
        ..chat(&model, &"Name the capital city of Turkey. ".repeat(24))
    };
    let tokens = again().prompt.len();
    let (_, ids, summary) = run(&engine, again()).await;
    let cache = summary.cache;
    println!("{tokens} tokens: {cache:?}");
    let passes = (cache.hits + cache.misses) / segments;
    assert!(cache.misses > 0, "it fits: {cache:?}");
    assert!(tokens > 160 && passes <= 4, "{tokens} tokens: {cache:?}");
    engine.set_budget(Budget::Bytes(64 << 20)).await.unwrap();
    let (_, roomy, _) = run(&engine, again()).await;
    assert_eq!(ids, roomy);
}

#[tokio::test]
async fn a_drain_lets_running_requests_end_and_takes_no_others() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut short = engine
        .generate(GenerateRequest {
            max_tokens: Some(50),
            ..long(&model)
        })
        .unwrap();
    assert!(matches!(
        short.next().await,
        Some(GenerateEvent::Piece { .. })
    ));
    let draining = tokio::spawn({
        let engine = engine.clone();
        async move { engine.drain(Duration::from_secs(20)).await }
    });
    until(&engine, "draining", |s| s.draining).await;
    if let Ok(mut late) = engine.generate(chat(&model, "42 - 30 = ?")) {
        // Either refused by the engine, or the engine ended before it looked.
        assert!(matches!(
            late.next().await,
            None | Some(GenerateEvent::Failed(Error::Unavailable { .. }))
        ));
    }
    assert!(end(&mut short).await.unwrap() > 0);
    draining.await.unwrap();
    assert!(matches!(
        engine.unload("m", false).await,
        Err(Error::Unavailable { .. })
    ));
}

#[tokio::test]
async fn a_drain_ends_what_outlasts_its_grace() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    // Nobody reads, so it stays in mid-air.
    let mut stuck = engine.generate(long(&model)).unwrap();
    until(&engine, "the stuck one", |s| s.running == 1).await;
    engine.drain(Duration::from_millis(100)).await;
    assert!(matches!(
        end(&mut stuck).await,
        Err(Error::Unavailable { .. })
    ));
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, LLAMA, "m").await;
    let ask = |request: GenerateRequest| {
        let mut events = engine.generate(request).unwrap();
        async move { end(&mut events).await.unwrap_err().to_string() }
    };
    let request = || chat(&model, "42 - 30 = ?");
    assert!(
        ask(GenerateRequest {
            prompt: Vec::new(),
            ..request()
        })
        .await
        .contains("no tokens")
    );
    assert!(
        ask(GenerateRequest {
            prompt: vec![5; 4097],
            ..request()
        })
        .await
        .contains("4097")
    );
    assert!(
        ask(GenerateRequest {
            prompt: vec![1 << 20],
            ..request()
        })
        .await
        .contains("vocabulary")
    );
    assert!(
        ask(GenerateRequest {
            n_ctx: Some(0),
            ..request()
        })
        .await
        .contains("n_ctx")
    );
    assert!(
        ask(GenerateRequest {
            n_ctx: Some(4097),
            ..request()
        })
        .await
        .contains("4096")
    );
    let score = ScoreRequest {
        model: Arc::clone(&model),
        ids: vec![1],
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    assert!(
        engine
            .score(score)
            .await
            .unwrap_err()
            .to_string()
            .contains("at least 2")
    );
    let score = ScoreRequest {
        model: Arc::clone(&model),
        ids: vec![1, 1 << 20],
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let error = engine.score(score).await.unwrap_err().to_string();
    assert!(error.contains("vocabulary"), "{error}");
    run(&engine, request()).await;
}
