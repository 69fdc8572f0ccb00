//! The engine with real models: answers, small budgets, two models, and the state it publishes.

use crate::requests;
use std::sync::Arc;

use crate::requests::{chat, engine, load, questions, run};
use rocmforge_engine::api::{
    Asker, Budget, FinishReason, PreloadEvent, PreloadRoom, ScoreRequest, SegmentState,
};
use rocmforge_engine::{EngineHandle, Events};

#[tokio::test]
async fn right_answers_and_the_same_ones_in_a_small_budget() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, file, "m").await;
        let mut right = 0;
        for (question, answer) in questions(30) {
            let (text, ids, summary) = run(&engine, chat(&model, &question)).await;
            right += usize::from(text.trim() == answer);
            assert_eq!(summary.generated_tokens as usize, ids.len());
            if text.trim() == answer {
                assert_eq!(summary.finish, FinishReason::EndOfText);
            } else {
                println!("{file}: {question:.60} -> {text:?}, not {answer:?}");
            }
        }
        println!("{file}: {right} of 30");
        assert!(right >= 29, "{right} of 30");
        assert_eq!(engine.snapshot().cache.evictions, 0);

        let info = model.model().info();
        let largest = info.segments.iter().map(|s| s.bytes).max().unwrap();
        let small = requests::engine(Budget::Bytes(info.tensor_bytes / 3 + largest));
        let again = load(&small, file, "m").await;
        for (question, _) in questions(6) {
            let full = run(&engine, chat(&model, &question)).await.1;
            assert_eq!(
                run(&small, chat(&again, &question)).await.1,
                full,
                "{question}"
            );
        }
        let cache = small.snapshot().cache;
        println!("{file}: {cache:?}");
        assert!(cache.evictions > 0);
        assert_eq!(
            cache.kv_bytes + cache.scratch_bytes,
            0,
            "nothing runs, nothing is held"
        );
    }
}

#[tokio::test]
async fn scores_are_those_of_the_tokens_that_greedy_chooses() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let (question, _) = questions(1).remove(0);
    let request = chat(&model, &question);
    let prompt = request.prompt.clone();
    let (_, ids, _) = run(&engine, request).await;
    let all: Vec<u32> = prompt.iter().chain(&ids).copied().collect();
    let score = ScoreRequest {
        model: Arc::clone(&model),
        ids: all.clone(),
        top_n: 3,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let scores = engine.score(score).await.unwrap();
    assert_eq!(scores.tokens.len(), all.len() - 1);
    for (i, score) in scores.tokens.iter().enumerate() {
        assert_eq!(score.id, all[i + 1]);
        assert!(score.logprob <= 0.0);
        assert_eq!(score.top.len(), 3);
        if i + 1 >= prompt.len() {
            assert_eq!(score.top[0].0, score.id, "token {i}");
            assert_eq!(score.top[0].1, score.logprob);
        }
    }
}

/// Preloads, and says what was uploaded.
async fn preloaded(engine: &EngineHandle, name: &str, segments: Option<Vec<u32>>) -> u64 {
    let mut events = engine.preload(name, segments).unwrap();
    loop {
        match events.next().await.expect("an end") {
            PreloadEvent::Progress { .. } => {}
            PreloadEvent::Done { uploaded_bytes } => break uploaded_bytes,
            PreloadEvent::Failed(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn a_preload_leaves_out_what_does_not_fit() {
    let engine = engine(Budget::Bytes(3 << 20));
    load(&engine, "tiny-qwen3-Q8_0.gguf", "large").await;
    load(&engine, "tiny-llama-Q4_K_M.gguf", "small").await;
    let resident = |model: usize| {
        let snapshot = engine.snapshot();
        let segments = (0u32..).zip(snapshot.models[model].segments.iter());
        let there = segments.filter(|(_, segment)| segment.state == SegmentState::Resident);
        there.map(|(index, _)| index).collect::<Vec<_>>()
    };
    let uploaded = preloaded(&engine, "large", None).await;
    assert!(uploaded > 2 << 20 && uploaded <= 3 << 20, "{uploaded}");
    let (brought, evictions) = (resident(0), engine.snapshot().cache.evictions);
    assert_eq!(evictions, 0, "each was uploaded into room that nobody had");
    // What is there stays when it is asked for again, whatever is missing.
    assert_eq!(preloaded(&engine, "large", None).await, 0);
    assert_eq!(resident(0), brought);
    // A named segment takes the room of others.
    assert!(!brought.contains(&17));
    assert!(preloaded(&engine, "large", Some(vec![17])).await > 0);
    assert!(resident(0).contains(&17));
    // The other model is idle by now: all of its room is there for this one.
    preloaded(&engine, "small", None).await;
    let n = engine.snapshot().models[1].segments.len();
    assert_eq!(resident(1).len(), n);
}

/// What comes back behind a restart leaves alone what requests have brought by then.
#[tokio::test]
async fn a_preload_into_free_room_evicts_nothing_of_idle_models() {
    let engine = engine(Budget::Bytes(6 << 20));
    load(&engine, "tiny-llama-Q4_K_M.gguf", "used").await;
    load(&engine, "tiny-qwen3-Q8_0.gguf", "large").await;
    preloaded(&engine, "used", None).await;
    let weights = |model: usize| {
        let snapshot = engine.snapshot();
        let segments = snapshot.models[model].segments.iter();
        let there = segments.filter(|segment| segment.state == SegmentState::Resident);
        there.map(|segment| segment.bytes).sum::<u64>()
    };
    let used = weights(0);
    assert!(used > 1 << 20, "{used}");
    let n = engine.snapshot().models[1].segments.len() as u32;
    let all = || Some((0..n).collect());
    let ended = |mut events: Events<PreloadEvent>| async move {
        loop {
            match events.next().await.expect("an end") {
                PreloadEvent::Progress { .. } => {}
                end => break end,
            }
        }
    };
    let events = engine.preload_into("large", all(), PreloadRoom::Free);
    let end = ended(events.unwrap()).await;
    assert!(
        matches!(end, PreloadEvent::Done { uploaded_bytes } if uploaded_bytes > 1 << 20),
        "{end:?}"
    );
    let left_out = weights(1);
    assert_eq!((weights(0), engine.snapshot().cache.evictions), (used, 0));
    // Into the room of idle models more of it goes.
    let events = engine.preload_into("large", all(), PreloadRoom::Idle);
    assert!(matches!(
        ended(events.unwrap()).await,
        PreloadEvent::Done { .. }
    ));
    assert!(weights(1) > left_out && weights(0) < used);
}
