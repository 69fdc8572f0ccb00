//! Twenty requests that are made slow on purpose, each in a way of its own: the first cause that
//! their time account names is the one that they were made slow by.
//!
//! What makes one slow takes several times what everything else of it takes: a link that brings a
//! MiB in tens of milliseconds, a reader who sleeps, a prompt of a thousand tokens and more.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::times::{Part, RequestTimes, TimesSlot};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, EmbedRequest, EvictionCause, GenerateRequest, Pooling, SamplingParams,
    ScoreRequest, When,
};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};
use rocmforge_fake_hip::Misbehaviour;
use rocmforge_gguf::TensorType;

use crate::fake::{self, Running, Runtime, tiny};
use crate::requests::{engine, greedy, load, load_endless, until};
use crate::why::{begin, end, endless, ids, of, on_some_tries, run};

const ROOMY: u64 = 64 << 20;
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

/// Milliseconds that a slow link takes for a MiB.
const MS_PER_MIB: u64 = 60;

/// A test for each slow request: its name, the first cause that it is to have, how it comes to be.
macro_rules! slow_requests {
    ($($name:ident: $part:ident = $case:expr;)*) => {
        $(
            #[tokio::test]
            async fn $name() {
                on_some_tries(async || {
                    let times = $case(stringify!($name)).await;
                    times.parts.first_cause() == Part::$part
                })
                .await;
            }
        )*

        /// All of them, and how many parts they have as first causes.
        #[test]
        fn there_are_twenty_of_ten_causes() {
            let all = [$((stringify!($name), Part::$part)),*];
            let causes: std::collections::BTreeSet<_> = all.iter().map(|(_, part)| part).collect();
            assert_eq!((all.len(), causes.len()), (20, 10));
        }
    };
}

slow_requests! {
    behind_another_client_with_the_only_place: Queue = queued;
    an_embedding_behind_a_text: Queue = embedding_queued;
    a_reader_who_comes_late: Reader = reader_late;
    a_reader_who_takes_each_token_slowly: Reader = reader_slow;
    preempted_by_another_client: Preempted = preempted;
    a_prompt_of_two_thousand_tokens: Prompt = long_prompt;
    a_long_text_that_is_embedded: Prompt = long_embedding;
    a_long_text_that_is_scored: Prompt = long_score;
    an_answer_of_many_tokens: Decode = long_answer;
    prompts_of_others_in_the_same_model: OwnModel = own_model;
    texts_of_eight_other_models: OtherModels = other_models;
    prompts_of_another_model: OtherModels = other_prompts;
    samplers_over_a_long_text: Sampling = sampling;
    weights_that_are_read_for_the_first_time: Uploads = first_use;
    weights_that_another_model_evicted: Uploads = evicted_by_another;
    weights_that_were_cleared: Uploads = cleared;
    weights_that_a_smaller_budget_evicted: Uploads = smaller_budget;
    a_model_that_does_not_fit: Uploads = does_not_fit;
    weights_that_a_preload_is_bringing: Uploads = preloading;
    weights_that_the_cpu_computes_with: CpuCompute = cpu_compute;
}

/// The client whose passes a request waited for longest, where this is its first cause; a model's
/// name with it. Where it is, somebody has to be named.
fn first_whom(times: &RequestTimes, part: Part) -> Option<(&str, u64)> {
    let mut of_it = times.waited_for.iter().filter(|w| w.part == part);
    (times.parts.first_cause() == part).then(|| {
        let first = of_it.next().expect("whom it waited for");
        (&*first.model, first.client)
    })
}

/// An engine on the CPU with so many places.
fn with_places(places: usize) -> EngineHandle {
    let config = EngineConfig {
        budget: Budget::Bytes(512 << 20),
        max_sequences: NonZeroUsize::new(places).unwrap(),
        ..EngineConfig::default()
    };
    start(config).unwrap().0
}

/// A card with a slow link.
fn slow_link() -> Runtime {
    let runtime = Runtime::new();
    runtime.misbehave(Misbehaviour::SlowPinnedCopies, MS_PER_MIB);
    runtime.misbehave(Misbehaviour::SlowRegisteredCopies, MS_PER_MIB);
    runtime
}

/// An engine on such a card with room for this share of a model's weights.
async fn with_room(runtime: &Runtime, file: &str, (part, whole): (u64, u64)) -> Running {
    let roomy = engine(Budget::Bytes(ROOMY));
    let bytes = load(&roomy, file, "m").await.model().info().tensor_bytes;
    runtime
        .start((bytes * part / whole + (2 << 20)) & !255)
        .unwrap()
}

/// A request for so many tokens, whatever the model says.
fn tokens(model: &Arc<LoadedModel>, prompt: Vec<u32>, n: u32) -> GenerateRequest {
    GenerateRequest {
        decoding: Decoding {
            ignore_eos: true,
            ..Decoding::default()
        },
        ..greedy(model, prompt, n)
    }
}

async fn queued(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let first = endless(&engine, &model, 7);
    until(&engine, "the first", |s| s.running == 1).await;
    let times = run(name, &engine, of(8, greedy(&model, ids(4), 1))).await;
    first.await.unwrap();
    let whom = first_whom(&times, Part::Queue);
    assert!(whom.is_none_or(|whom| whom == ("m", 7)), "{whom:?}");
    assert_eq!(times.surroundings.running, (1, 1));
    times
}

async fn embed(engine: &EngineHandle, model: &Arc<LoadedModel>, n: usize) -> RequestTimes {
    let request = EmbedRequest {
        model: Arc::clone(model),
        ids: ids(n),
        pooling: Pooling::Mean,
        classes: false,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let slot = TimesSlot::default();
    engine
        .embed_timed(request, Some(slot.clone()))
        .await
        .unwrap();
    slot.get().expect("its times")
}

async fn embedding_queued(_: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let first = endless(&engine, &model, 7);
    until(&engine, "the text", |s| s.running == 1).await;
    let times = embed(&engine, &model, 2).await;
    first.await.unwrap();
    times
}

async fn reader_late(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let (mut events, slot) = begin(&engine, greedy(&model, ids(4), 150));
    tokio::time::sleep(Duration::from_secs(2)).await;
    end(name, &mut events, &slot).await
}

async fn reader_slow(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let (mut events, slot) = begin(&engine, greedy(&model, ids(4), 300));
    for _ in 0..250 {
        assert!(events.next().await.is_some());
        tokio::time::sleep(Duration::from_millis(8)).await;
    }
    end(name, &mut events, &slot).await
}

/// A client with both places gives the newer one to another, once that has had a turn.
async fn preempted(name: &str) -> RequestTimes {
    let engine = with_places(2);
    let model = load_endless(&engine, "m").await;
    let first = endless(&engine, &model, 7);
    until(&engine, "the first", |s| s.running == 1).await;
    let (mut events, slot) = begin(&engine, of(7, greedy(&model, ids(4), 250)));
    for _ in 0..100 {
        assert!(events.next().await.is_some());
    }
    let third = endless(&engine, &model, 8);
    let times = end(name, &mut events, &slot).await;
    first.await.unwrap();
    third.await.unwrap();
    let whom = first_whom(&times, Part::Preempted);
    assert!(whom.is_none_or(|whom| whom.0 == "m"), "{whom:?}");
    assert_eq!(times.surroundings.kv_type, "f16");
    assert!(times.surroundings.kv_bytes > 0);
    times
}

async fn long_prompt(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let times = run(name, &engine, greedy(&model, ids(2000), 1)).await;
    let counts = (times.prompt_tokens, times.generated_tokens);
    assert_eq!(counts, ((2000, 0), 1));
    times
}

async fn long_embedding(_: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    embed(&engine, &model, 1500).await
}

async fn long_score(_: &str) -> RequestTimes {
    let engine = with_places(1);
    let request = ScoreRequest {
        model: load_endless(&engine, "m").await,
        ids: ids(1500),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let slot = TimesSlot::default();
    engine
        .score_timed(request, Some(slot.clone()))
        .await
        .unwrap();
    slot.get().expect("its times")
}

async fn long_answer(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    run(name, &engine, greedy(&model, ids(4), 400)).await
}

async fn own_model(name: &str) -> RequestTimes {
    let engine = with_places(16);
    let model = load_endless(&engine, "m").await;
    let (mut events, slot) = begin(&engine, of(9, greedy(&model, ids(4), 60)));
    until(&engine, "the text", |s| s.running == 1).await;
    let prompts = (10..16).map(|client| {
        let (mut events, _) = begin(&engine, of(client, greedy(&model, ids(2000), 1)));
        tokio::spawn(async move { while events.next().await.is_some() {} })
    });
    let prompts: Vec<_> = prompts.collect();
    let times = end(name, &mut events, &slot).await;
    for prompt in prompts {
        prompt.await.unwrap();
    }
    let whom = first_whom(&times, Part::OwnModel);
    assert!(
        whom.is_none_or(|whom| (10..16).contains(&whom.1)),
        "{whom:?}"
    );
    times
}

async fn other_models(name: &str) -> RequestTimes {
    const OTHERS: u64 = 8;
    let engine = with_places(16);
    let model = load_endless(&engine, "m").await;
    let mut others = Vec::new();
    for client in 0..OTHERS {
        let busy = load_endless(&engine, &format!("busy-{client}")).await;
        others.push(endless(&engine, &busy, 10 + client));
    }
    until(&engine, "the others", |s| u64::from(s.running) == OTHERS).await;
    let times = run(name, &engine, of(9, greedy(&model, ids(4), 40))).await;
    others.iter().for_each(tokio::task::JoinHandle::abort);
    let whom = first_whom(&times, Part::OtherModels);
    let is_one = |(model, client): (&str, u64)| model == format!("busy-{}", client - 10);
    assert!(whom.is_none_or(is_one), "{whom:?}");
    times
}

async fn other_prompts(name: &str) -> RequestTimes {
    let engine = with_places(16);
    let model = load_endless(&engine, "m").await;
    let other = load_endless(&engine, "other").await;
    let (mut events, slot) = begin(&engine, of(9, greedy(&model, ids(4), 60)));
    assert!(events.next().await.is_some());
    let prompts = (10..18).map(|client| {
        let (mut events, _) = begin(&engine, of(client, greedy(&other, ids(2000), 1)));
        tokio::spawn(async move { while events.next().await.is_some() {} })
    });
    let prompts: Vec<_> = prompts.collect();
    let times = end(name, &mut events, &slot).await;
    for prompt in prompts {
        prompt.await.unwrap();
    }
    times
}

/// Samplers with more to do than a small model.
async fn sampling(name: &str) -> RequestTimes {
    let engine = with_places(1);
    let model = load_endless(&engine, "m").await;
    let request = GenerateRequest {
        sampling: SamplingParams {
            temperature: 1.0,
            logit_bias: (0..4_000_000).map(|i| (5 + i % 500, 0.0)).collect(),
            ..SamplingParams::default()
        },
        ..greedy(&model, ids(4), 100)
    };
    run(name, &engine, request).await
}

async fn first_use(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, QWEN, "m").await;
    let times = run(name, &engine, greedy(&model, ids(4), 1)).await;
    assert_eq!(times.displaced[0].cause, None);
    times
}

/// Also a prompt waits for what the card waits for itself.
async fn evicted_by_another(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = with_room(&runtime, QWEN, (1, 1)).await;
    let model = load(&engine, QWEN, "m").await;
    let other = load(&engine, QWEN, "other").await;
    run("first use", &engine, tokens(&model, vec![1], 4)).await;
    run("the other", &engine, greedy(&other, ids(8), 1)).await;
    let times = run(name, &engine, greedy(&model, ids(8), 1)).await;
    assert_eq!(times.displaced[0].cause, Some(EvictionCause::OtherModel));
    assert_eq!(times.displaced[0].by.as_deref(), Some("other"));
    times
}

async fn cleared(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, QWEN, "m").await;
    run("first use", &engine, tokens(&model, vec![1], 4)).await;
    engine.clear(None).await.unwrap();
    let times = run(name, &engine, greedy(&model, ids(4), 1)).await;
    assert_eq!(times.displaced[0].cause, Some(EvictionCause::Clear));
    times
}

async fn smaller_budget(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, QWEN, "m").await;
    run("first use", &engine, tokens(&model, vec![1], 4)).await;
    engine.set_budget(Budget::Bytes(3 << 20)).await.unwrap();
    engine.set_budget(Budget::Bytes(ROOMY)).await.unwrap();
    let times = run(name, &engine, greedy(&model, ids(4), 1)).await;
    assert_eq!(times.displaced[0].cause, Some(EvictionCause::Budget));
    times
}

/// The fake card's events have copies between them, unlike a real one's: what a token takes without
/// is measured in passes with all weights resident.
async fn does_not_fit(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, QWEN, "m").await;
    let resident = run("resident", &engine, tokens(&model, vec![1], 4)).await;
    let half = resident.surroundings.model_bytes / 2 + (2 << 20);
    engine.set_budget(Budget::Bytes(half & !255)).await.unwrap();
    let times = run(name, &engine, tokens(&model, vec![1], 12)).await;
    assert!(!times.surroundings.model_fits);
    times
}

/// Its preload is under way when it comes.
async fn preloading(name: &str) -> RequestTimes {
    let runtime = slow_link();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, QWEN, "m").await;
    run("first use", &engine, tokens(&model, vec![1], 4)).await;
    engine.clear(None).await.unwrap();
    let mut preload = engine.preload("m", None).unwrap();
    let times = run(name, &engine, greedy(&model, ids(4), 1)).await;
    while preload.next().await.is_some() {}
    times
}

/// A card with room for a few of the weights: the CPU computes with the others. They are seven
/// times what all else takes since the matrices are large: of small ones, what the fake card does
/// beside them takes as long.
async fn cpu_compute(name: &str) -> RequestTimes {
    let dir = tempfile::tempdir().unwrap();
    let shape = tiny::Shape {
        n_layer: 8,
        n_ff: 16_384,
        matrices: Some(TensorType::Q8_0),
    };
    let file = tiny::write_of(dir.path(), &shape, 5);
    let runtime = Runtime::new();
    let split = (When::Always, Some(Budget::Bytes(ROOMY)));
    let config = fake::gpu_config(&runtime);
    let engine = runtime.start_split(config, 4 << 20, split).unwrap();
    let model = load(&engine, file.to_str().unwrap(), "m").await;
    run("the first", &engine, tokens(&model, vec![1], 20)).await;
    let times = run(name, &engine, tokens(&model, vec![1], 20)).await;
    assert!(times.cpu_bytes > times.uploaded_bytes);
    times
}
