//! Gaps between tokens that are promised.
//!
//! No test compares a measured gap with the one that was promised where a busy machine could make
//! it longer: what is asserted is what the engine plans by its measured times, and whether it says
//! the truth of what came.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{
    Asker, Budget, Class, GapCause, GenerateEvent, GenerateRequest, GenerateSummary,
};
use rocmforge_engine::{EngineConfig, EngineHandle, Error, Events, LoadedModel, MaxGaps, start};

use crate::fake;
use crate::requests::{engine, greedy, load, load_endless, until};

const ROOMY: Budget = Budget::Bytes(64 << 20);
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

/// A gap that nothing breaks.
const LONG: Duration = Duration::from_secs(60);

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 31 % 200).collect()
}

fn promised(model: &Arc<LoadedModel>, n: u32, gap: Duration) -> GenerateRequest {
    let mut request = greedy(model, ids(4), n);
    request.decoding.ignore_eos = true;
    request.max_gap = Some(gap);
    request
}

async fn end(events: &mut Events<GenerateEvent>) -> Result<GenerateSummary, Error> {
    loop {
        match events.next().await.expect("an end") {
            GenerateEvent::Piece { .. } => {}
            GenerateEvent::Done(summary) => return Ok(summary),
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

async fn run(engine: &EngineHandle, request: GenerateRequest) -> Result<GenerateSummary, Error> {
    end(&mut engine.generate(request).unwrap()).await
}

/// A request that goes on until it is dropped, and has its first token.
async fn running(engine: &EngineHandle, request: GenerateRequest) -> Events<GenerateEvent> {
    let mut events = engine.generate(request).unwrap();
    match events.next().await.unwrap() {
        GenerateEvent::Piece { .. } => events,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_answer_says_what_was_promised_and_whether_it_was_held() {
    let engine = engine(ROOMY);
    let model = load(&engine, QWEN, "m").await;
    let summary = run(&engine, promised(&model, 20, LONG)).await.unwrap();
    assert_eq!(summary.promised_gap, Some((LONG, 0)));
    assert!(summary.longest_gap.unwrap().took <= LONG);
    let summary = run(&engine, greedy(&model, ids(4), 20)).await.unwrap();
    assert_eq!(summary.promised_gap, None);
    let none = promised(&model, 4, Duration::ZERO);
    assert_eq!(run(&engine, none).await.unwrap().promised_gap, None);
    assert_eq!(engine.snapshot().broken_gaps.sum(), 0);
}

#[tokio::test]
async fn a_class_has_a_gap_of_its_own() {
    let engine = start(EngineConfig {
        budget: ROOMY,
        max_gaps: MaxGaps {
            interactive: Some(LONG),
            batch: None,
        },
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = load(&engine, QWEN, "m").await;
    let of = |class| {
        let mut request = greedy(&model, ids(4), 4);
        request.asker = Asker {
            class,
            ..Asker::default()
        };
        request
    };
    let summary = run(&engine, of(Class::Interactive)).await.unwrap();
    assert_eq!(summary.promised_gap, Some((LONG, 0)));
    let summary = run(&engine, of(Class::Batch)).await.unwrap();
    assert_eq!(summary.promised_gap, None);
    let mut none = of(Class::Interactive);
    none.max_gap = Some(Duration::ZERO);
    assert_eq!(run(&engine, none).await.unwrap().promised_gap, None);
}

/// A pass of the model was measured, and takes longer than what is asked for.
#[tokio::test]
async fn a_gap_that_a_pass_alone_is_longer_than_is_refused_with_the_least() {
    let engine = engine(ROOMY);
    let model = load(&engine, QWEN, "m").await;
    run(&engine, greedy(&model, ids(4), 20)).await.unwrap();
    let error = run(&engine, promised(&model, 4, Duration::from_micros(1)))
        .await
        .unwrap_err();
    let Error::InvalidArgument { field, message } = error else {
        panic!("{error}");
    };
    assert_eq!(field, "max_gap_ms");
    assert!(
        message.contains("a pass of 'm' with 1 request takes"),
        "{message}"
    );
    let least = message.split("ask for ").nth(1).expect("the least gap");
    let least: u64 = least.trim().parse().expect("a number");
    // Machines become slower and faster: four times that is enough.
    let summary = run(
        &engine,
        promised(&model, 4, Duration::from_millis(4 * least)),
    )
    .await
    .unwrap();
    assert!(summary.promised_gap.is_some());
}

/// The weights of a model stay while its requests have promises, also where another one takes
/// turns with it for the room.
#[tokio::test]
async fn weights_of_a_promise_are_not_evicted_for_others() {
    let roomy = engine(ROOMY);
    let of_one = load(&roomy, QWEN, "a").await;
    let bytes = of_one.model().info().tensor_bytes;
    for is_promised in [true, false] {
        let engine = engine(Budget::Bytes(bytes * 3 / 2 + (1 << 20)));
        let (a, b) = (
            load(&engine, QWEN, "a").await,
            load(&engine, QWEN, "b").await,
        );
        let gap = if is_promised { LONG } else { Duration::ZERO };
        let mut stream = running(&engine, promised(&a, 400, gap)).await;
        let before = engine.snapshot().models[0].cache.evictions;
        for _ in 0..3 {
            run(&engine, greedy(&b, ids(4), 8)).await.unwrap();
        }
        let summary = end(&mut stream).await.unwrap();
        let evicted = engine.snapshot().models[0].cache.evictions - before;
        match is_promised {
            true => assert_eq!((evicted, summary.promised_gap), (0, Some((LONG, 0)))),
            false => assert!(evicted > 0, "the other one took no room"),
        }
        // Nothing stays once the promise has ended.
        for _ in 0..3 {
            run(&engine, greedy(&b, ids(4), 8)).await.unwrap();
        }
        until(&engine, "the end of all", |s| s.running == 0).await;
        let after = engine.snapshot();
        assert_eq!(after.cache.kv_bytes + after.cache.scratch_bytes, 0);
        assert!(after.models[0].cache.evictions > before, "{is_promised}");
    }
}

/// Places are left to others, and no gap is promised to more models than have passes at a time.
#[tokio::test]
async fn promises_leave_places_to_others() {
    let engine = start(EngineConfig {
        budget: ROOMY,
        max_sequences: NonZeroUsize::new(4).unwrap(),
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = load_endless(&engine, "m").await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(running(&engine, promised(&model, 3000, LONG)).await);
    }
    let error = run(&engine, promised(&model, 4, LONG)).await.unwrap_err();
    let Error::Exhausted { message, .. } = error else {
        panic!("{error}");
    };
    assert!(
        message.contains("3 requests with promised gaps"),
        "{message}"
    );
    assert!(
        message.contains("try again when one of them has ended"),
        "{message}"
    );
    run(&engine, greedy(&model, ids(4), 4)).await.unwrap();
    streams.pop();
    until(&engine, "two", |s| s.running == 2).await;
    run(&engine, promised(&model, 4, LONG)).await.unwrap();
}

/// A long prompt beside promised streams, and a model that does not fit: all texts are as they are
/// alone, and what is said of gaps is what came.
#[tokio::test]
async fn promised_streams_beside_long_prompts_and_a_model_that_does_not_fit_have_their_texts() {
    let roomy = engine(ROOMY);
    let of_one = load(&roomy, QWEN, "a").await;
    let bytes = of_one.model().info().tensor_bytes;
    let engine = start(EngineConfig {
        budget: Budget::Bytes(bytes + bytes / 2 + (1 << 20)),
        prefill_chunk: NonZeroUsize::new(64),
        slice: Some(Duration::ZERO),
        speculate: Some(false),
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let (a, b) = (
        load(&engine, QWEN, "a").await,
        load(&engine, QWEN, "b").await,
    );
    let text = |mut events: Events<GenerateEvent>| async move {
        let (mut ids, mut summary) = (Vec::new(), None);
        while let Some(event) = events.next().await {
            match event {
                GenerateEvent::Piece { ids: more, .. } => ids.extend(more),
                GenerateEvent::Done(done) => summary = Some(done),
                GenerateEvent::Failed(error) => panic!("{error}"),
            }
        }
        (ids, summary.unwrap())
    };
    let long = || greedy(&a, ids(180), 4);
    let stream = || promised(&a, 60, LONG);
    let alone = text(engine.generate(stream()).unwrap()).await.0;
    let prompt = text(engine.generate(long()).unwrap()).await.0;
    let other = text(engine.generate(greedy(&b, ids(40), 6)).unwrap())
        .await
        .0;
    let streams: Vec<_> = (0..3)
        .map(|_| tokio::spawn(text(engine.generate(stream()).unwrap())))
        .collect();
    let beside = tokio::spawn(text(engine.generate(long()).unwrap()));
    let third = tokio::spawn(text(engine.generate(greedy(&b, ids(40), 6)).unwrap()));
    for stream in streams {
        let (ids, summary) = stream.await.unwrap();
        assert_eq!(ids, alone);
        assert_eq!(summary.promised_gap, Some((LONG, 0)));
    }
    assert_eq!(beside.await.unwrap().0, prompt);
    assert_eq!(third.await.unwrap().0, other);
}

/// While nothing is measured a gap is promised that no pass can hold: each is counted as broken,
/// with its class, and a model that was promised nothing comes to its end all the same.
#[tokio::test]
async fn broken_gaps_are_counted_and_starve_nobody() {
    let engine = start(EngineConfig {
        budget: ROOMY,
        speculate: Some(false),
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = load(&engine, QWEN, "m").await;
    let other = load(&engine, QWEN, "other").await;
    // Its steps are known, and would be held back by a promise that can be held.
    run(&engine, greedy(&other, ids(40), 8)).await.unwrap();
    let mut request = promised(&model, 300, Duration::from_micros(1));
    request.asker.class = Class::Batch;
    let mut stream = running(&engine, request).await;
    let mut beside = greedy(&other, ids(150), 40);
    beside.decoding.ignore_eos = true;
    let beside = run(&engine, beside).await.unwrap();
    assert_eq!(beside.generated_tokens, 40);
    let summary = end(&mut stream).await.unwrap();
    assert_eq!(summary.generated_tokens, 300);
    let (gap, broken) = summary.promised_gap.unwrap();
    assert_eq!(gap, Duration::from_micros(1));
    assert!(summary.longest_gap.unwrap().took > gap);
    // Time in which the test did not read is no part of them, nor is a token's that came then.
    assert!((1..=299).contains(&broken), "{broken}");
    let counted = engine.snapshot().broken_gaps;
    let of_batch = GapCause::ALL.map(|cause| counted.of(Class::Batch, cause));
    assert_eq!(of_batch.iter().sum::<u64>(), u64::from(broken));
    assert_eq!(counted.sum(), u64::from(broken));
}

/// The same on a card, whose passes are recorded: what is promised changes no text, and the driver
/// is asked for nothing wrong.
#[tokio::test]
async fn promised_streams_on_the_hip_path_have_their_texts() {
    let runtime = fake::Runtime::new();
    let config = EngineConfig {
        budget: Budget::Bytes(128 << 20),
        prefill_chunk: NonZeroUsize::new(64),
        slice: Some(Duration::ZERO),
        speculate: Some(false),
        ..EngineConfig::default()
    };
    let engine = runtime
        .start_as(fake::gpu_config(&runtime), config)
        .unwrap();
    let (a, b) = (
        load(&engine, QWEN, "a").await,
        load(&engine, QWEN, "b").await,
    );
    let stream = |gap| promised(&a, 40, gap);
    let alone = texts(
        &engine,
        vec![stream(Duration::ZERO), greedy(&b, ids(150), 6)],
    )
    .await;
    let other = greedy(&b, ids(150), 6);
    let beside = texts(&engine, vec![stream(LONG), stream(LONG), other]).await;
    assert_eq!((&beside[0], &beside[1]), (&alone[0], &alone[0]));
    assert_eq!(beside[2], alone[1]);
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

/// The tokens of requests that run beside each other.
async fn texts(engine: &EngineHandle, requests: Vec<GenerateRequest>) -> Vec<Vec<u32>> {
    let begun = requests.into_iter().map(|r| engine.generate(r).unwrap());
    let begun: Vec<_> = begun.collect();
    let mut texts = Vec::new();
    for mut events in begun {
        let mut text = Vec::new();
        while let Some(event) = events.next().await {
            match event {
                GenerateEvent::Piece { ids, .. } => text.extend(ids),
                GenerateEvent::Done(_) => break,
                GenerateEvent::Failed(error) => panic!("{error}"),
            }
        }
        texts.push(text);
    }
    texts
}
