//! Slow requests, made slow on purpose: the first cause that their time account names is the one
//! that they were made slow by, and the parts add up to the whole time.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_engine::api::times::{Displaced, Part, RequestTimes, TimesSlot};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, Dry, EmbedRequest, EvictionCause, GenerateEvent, GenerateRequest,
    Pooling, SamplingParams, ScoreRequest, When,
};
use rocmforge_engine::{EngineConfig, EngineHandle, Events, LoadedModel, start};
use rocmforge_fake_hip::Misbehaviour;

use crate::fake;
use crate::requests::{drop_cached, engine, fixture, greedy, load, load_endless, until};

const ROOMY: Budget = Budget::Bytes(64 << 20);
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 31 % 200).collect()
}

fn of(client: u64, request: GenerateRequest) -> GenerateRequest {
    let asker = Asker {
        client,
        ..request.asker
    };
    GenerateRequest { asker, ..request }
}

fn begin(engine: &EngineHandle, request: GenerateRequest) -> (Events<GenerateEvent>, TimesSlot) {
    let slot = TimesSlot::default();
    let times = Some(slot.clone());
    let events = engine.generate_timed(request, Vec::new(), times).unwrap();
    (events, slot)
}

/// Reads a request to its end and gives its times, of which the parts add up.
async fn end(name: &str, events: &mut Events<GenerateEvent>, slot: &TimesSlot) -> RequestTimes {
    loop {
        match events.next().await.expect("an end") {
            GenerateEvent::Piece { .. } => {}
            GenerateEvent::Done(_) => break,
            GenerateEvent::Failed(error) => panic!("{name}: {error}"),
        }
    }
    let times = slot.get().expect("its times are there with its end");
    let whole = times.ended - times.begun;
    assert_eq!(times.parts.total(), whole, "{name}");
    println!("{name}: {whole:?} {:?}", times.parts.ranked());
    println!("{name}: {:?} {:?}", times.waited_for, times.displaced);
    times
}

async fn run(name: &str, engine: &EngineHandle, request: GenerateRequest) -> RequestTimes {
    let (mut events, slot) = begin(engine, request);
    end(name, &mut events, &slot).await
}

/// A request that goes on for long, and is read.
fn endless(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    client: u64,
) -> tokio::task::JoinHandle<()> {
    let request = of(client, greedy(model, ids(4), 3000));
    let (mut events, _) = begin(engine, request);
    tokio::spawn(async move { while events.next().await.is_some() {} })
}

#[tokio::test]
async fn the_queue_is_told_with_the_client_who_is_first() {
    on_some_tries(async || {
        let engine = start(EngineConfig {
            budget: ROOMY,
            max_sequences: NonZeroUsize::MIN,
            ..EngineConfig::default()
        })
        .unwrap()
        .0;
        let model = load_endless(&engine, "m").await;
        let (mut events, _) = begin(&engine, of(7, greedy(&model, ids(4), 600)));
        until(&engine, "the first", |s| s.running == 1).await;
        let first = tokio::spawn(async move { while events.next().await.is_some() {} });
        let times = run("queue", &engine, of(8, greedy(&model, ids(4), 1))).await;
        first.await.unwrap();
        if times.parts.first_cause() != Part::Queue {
            return false;
        }
        let behind = &times.waited_for[0];
        assert_eq!((&*behind.model, behind.client), ("m", 7));
        assert_eq!(times.surroundings.running, (1, 1));
        true
    })
    .await;
}

#[tokio::test]
async fn a_reader_who_takes_his_time_is_the_cause_of_it() {
    on_some_tries(async || {
        let engine = engine(ROOMY);
        let model = load_endless(&engine, "m").await;
        let began = Instant::now();
        run("read at once", &engine, greedy(&model, ids(4), 200)).await;
        let alone = began.elapsed();
        let (mut events, slot) = begin(&engine, greedy(&model, ids(4), 200));
        tokio::time::sleep(alone * 4 + Duration::from_secs(1)).await;
        let times = end("reader", &mut events, &slot).await;
        if times.parts.first_cause() != Part::Reader {
            return false;
        }
        assert!(times.waited_for.is_empty());
        true
    })
    .await;
}

/// Tries of a case whose first cause is measured: on a busy machine something else may take longer
/// now and then.
const TRIES: usize = 8;

/// Runs a case until it was right twice.
async fn on_some_tries(case: impl AsyncFn() -> bool) {
    let mut right = 0;
    for _ in 0..TRIES {
        right += usize::from(case().await);
        if right == 2 {
            return;
        }
    }
    panic!("another first cause in {TRIES} tries but {right}; they are printed above");
}

/// Budget for one of the models beside what a request needs.
fn for_one(models: &[&Arc<LoadedModel>]) -> Budget {
    let bytes = models.iter().map(|m| m.model().info().tensor_bytes).max();
    Budget::Bytes(bytes.unwrap_or(0) + (1 << 20))
}

#[tokio::test]
async fn weights_that_another_model_evicted_are_told_with_its_name() {
    on_some_tries(async || {
        let roomy = engine(ROOMY);
        let of_one = load(&roomy, QWEN, "large").await;
        let engine = engine(for_one(&[&of_one]));
        let large = load(&engine, QWEN, "large").await;
        let other = load(&engine, QWEN, "other").await;
        let first = run("first use", &engine, greedy(&large, vec![1], 1)).await;
        assert_eq!(first.displaced[0].cause, None, "it was never there");
        assert_eq!(first.displaced[0].by, None);
        run("the other", &engine, greedy(&other, vec![1], 1)).await;
        let times = run("evicted", &engine, greedy(&large, vec![1], 1)).await;
        if times.parts.first_cause() != Part::Uploads {
            return false;
        }
        let displaced = &times.displaced[0];
        assert_eq!(displaced.cause, Some(EvictionCause::OtherModel));
        assert_eq!(displaced.by.as_deref(), Some("other"));
        assert!(displaced.bytes <= times.uploaded_bytes);
        // Nobody takes its room now.
        let again = run("resident", &engine, greedy(&large, vec![1], 1)).await;
        assert_eq!((again.uploaded_bytes, again.displaced.len()), (0, 0));
        assert_eq!(again.parts.of(Part::Uploads), Duration::ZERO);
        true
    })
    .await;
}

#[tokio::test]
async fn a_model_that_does_not_fit_waits_for_the_link_at_each_token() {
    on_some_tries(async || {
        let roomy = engine(ROOMY);
        let whole = load(&roomy, QWEN, "m").await;
        let info = whole.model().info();
        let engine = engine(Budget::Bytes(info.tensor_bytes / 2 + (1 << 20)));
        let model = load(&engine, QWEN, "m").await;
        let request = GenerateRequest {
            decoding: Decoding {
                ignore_eos: true,
                ..Decoding::default()
            },
            ..greedy(&model, vec![1], 40)
        };
        let times = run("does not fit", &engine, request).await;
        if times.parts.first_cause() != Part::Uploads {
            return false;
        }
        assert!(!times.surroundings.model_fits);
        let own = times.displaced.iter();
        let own = own.filter(|d| d.cause == Some(EvictionCause::OwnPass));
        assert!(own.map(|d| d.bytes).sum::<u64>() > times.uploaded_bytes / 2);
        assert!(times.link.bytes > 0 && !times.link.took.is_zero());
        true
    })
    .await;
}

#[tokio::test]
async fn weights_of_a_cold_file_come_from_disk() {
    on_some_tries(async || {
        let engine = engine(ROOMY);
        // Beside the build, which is on a disk more often than temporary files are.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("cold.gguf");
        std::fs::copy(fixture(QWEN), &path).unwrap();
        let cold = load(&engine, path.to_str().unwrap(), "cold").await;
        if !drop_cached(cold.file()) {
            println!("skipped: pages of {} stay cached", path.display());
            return true;
        }
        let times = run("cold disk", &engine, greedy(&cold, vec![1], 1)).await;
        // The first to be read is the token's row. How much of the rest comes with it, and how fast
        // the disk is, nobody knows.
        assert!(!times.parts.of(Part::Disk).is_zero());
        assert!(times.cold_bytes <= times.uploaded_bytes);
        matches!(times.parts.first_cause(), Part::Disk | Part::Uploads)
    })
    .await;
}

#[tokio::test]
async fn passes_of_other_models_are_told_with_theirs() {
    on_some_tries(async || {
        const OTHERS: u64 = 8;
        let engine = start(EngineConfig {
            budget: Budget::Bytes(512 << 20),
            max_sequences: NonZeroUsize::new(16).unwrap(),
            ..EngineConfig::default()
        })
        .unwrap()
        .0;
        let model = load_endless(&engine, "m").await;
        let mut others = Vec::new();
        for client in 0..OTHERS {
            let busy = load_endless(&engine, &format!("busy-{client}")).await;
            others.push(endless(&engine, &busy, 10 + client));
        }
        until(&engine, "the others", |s| u64::from(s.running) == OTHERS).await;
        let request = of(9, greedy(&model, ids(4), 40));
        let times = run("other models", &engine, request).await;
        others.iter().for_each(tokio::task::JoinHandle::abort);
        if times.parts.first_cause() != Part::OtherModels {
            return false;
        }
        let behind = &times.waited_for[0];
        assert_eq!(behind.part, Part::OtherModels);
        assert_eq!(behind.model, format!("busy-{}", behind.client - 10));
        true
    })
    .await;
}

#[tokio::test]
async fn prompts_of_others_in_its_own_model_are_no_work_of_its_own() {
    on_some_tries(async || {
        let engine = engine(ROOMY);
        let model = load_endless(&engine, "m").await;
        let (mut events, slot) = begin(&engine, of(9, greedy(&model, ids(4), 60)));
        until(&engine, "the text", |s| s.running == 1).await;
        let mut others = Vec::new();
        for client in 10..16 {
            let (mut events, _) = begin(&engine, of(client, greedy(&model, ids(2000), 1)));
            others.push(tokio::spawn(async move {
                while events.next().await.is_some() {}
            }));
        }
        let times = end("own model", &mut events, &slot).await;
        for other in others {
            other.await.unwrap();
        }
        if times.parts.first_cause() != Part::OwnModel {
            return false;
        }
        assert!((10..16).contains(&times.waited_for[0].client));
        true
    })
    .await;
}

#[tokio::test]
async fn a_long_prompt_of_its_own_is_the_cause() {
    on_some_tries(async || {
        let engine = engine(ROOMY);
        let model = load_endless(&engine, "m").await;
        let times = run("prompt", &engine, greedy(&model, ids(2000), 1)).await;
        if times.parts.first_cause() != Part::Prompt {
            return false;
        }
        assert_eq!(
            (times.prompt_tokens, times.generated_tokens),
            ((2000, 0), 1)
        );
        true
    })
    .await;
}

#[tokio::test]
async fn a_long_answer_is_the_cause() {
    on_some_tries(async || {
        let engine = engine(ROOMY);
        let model = load_endless(&engine, "m").await;
        let times = run("decode", &engine, greedy(&model, ids(4), 300)).await;
        if times.parts.first_cause() != Part::Decode {
            return false;
        }
        let token = times.surroundings.resident_token_s.unwrap();
        let decode = times.parts.of(Part::Decode).as_secs_f64();
        (0.2..5.0).contains(&(decode / 300.0 / token))
    })
    .await;
}

#[tokio::test]
async fn who_is_preempted_waits_for_who_took_its_place() {
    on_some_tries(async || {
        let engine = start(EngineConfig {
            budget: ROOMY,
            max_sequences: NonZeroUsize::new(2).unwrap(),
            ..EngineConfig::default()
        })
        .unwrap()
        .0;
        let model = load_endless(&engine, "m").await;
        let read = |client, n| {
            let (mut events, _) = begin(&engine, of(client, greedy(&model, ids(4), n)));
            tokio::spawn(async move { while events.next().await.is_some() {} })
        };
        // A client with both places gives the newer one to another client, once that has had a
        // turn.
        let first = read(7, 1500);
        until(&engine, "the first", |s| s.running == 1).await;
        let (mut events, slot) = begin(&engine, of(7, greedy(&model, ids(4), 250)));
        for _ in 0..100 {
            assert!(events.next().await.is_some());
        }
        let third = read(8, 1500);
        let times = end("preempted", &mut events, &slot).await;
        first.await.unwrap();
        third.await.unwrap();
        if times.parts.first_cause() != Part::Preempted {
            return false;
        }
        let behind = &times.waited_for[0];
        assert_eq!((behind.part, &*behind.model), (Part::Preempted, "m"));
        assert_eq!(times.surroundings.kv_type, "f16");
        assert!(times.surroundings.kv_bytes > 0);
        true
    })
    .await;
}

#[tokio::test]
async fn what_the_cpu_computes_for_a_card_is_told_apart() {
    let runtime = fake::Runtime::new();
    let roomy = engine(ROOMY);
    let info = load(&roomy, QWEN, "m").await;
    let budget = info.model().info().tensor_bytes / 2 + (2 << 20);
    let split = (When::Always, Some(ROOMY));
    let config = fake::gpu_config(&runtime);
    let engine = runtime.start_split(config, budget & !255, split).unwrap();
    let model = load(&engine, QWEN, "m").await;
    let times = run("cpu compute", &engine, greedy(&model, ids(4), 8)).await;
    assert!(times.cpu_bytes > 0);
    assert!(!times.parts.of(Part::CpuCompute).is_zero());
    assert!(
        times
            .link
            .measured_bytes_per_s
            .is_none_or(|rate| rate > 0.0)
    );
}

/// A text on a card with room for a quarter of the weights: the CPU computes with the others.
#[tokio::test]
async fn what_the_cpu_computes_at_each_token_is_a_part_of_its_own() {
    on_some_tries(async || {
        let runtime = fake::Runtime::new();
        let roomy = engine(ROOMY);
        let info = load(&roomy, QWEN, "m").await;
        let budget = info.model().info().tensor_bytes / 4 + (2 << 20);
        let split = (When::Always, Some(ROOMY));
        let config = fake::gpu_config(&runtime);
        let engine = runtime.start_split(config, budget & !255, split).unwrap();
        let model = load(&engine, QWEN, "m").await;
        let request = || GenerateRequest {
            decoding: Decoding {
                ignore_eos: true,
                ..Decoding::default()
            },
            ..greedy(&model, vec![1], 60)
        };
        run("the first", &engine, request()).await;
        let times = run("cpu at each token", &engine, request()).await;
        assert!(times.decode.cpu_bytes > times.decode.uploaded_bytes);
        // The fake card's kernels are computed by the same CPU, and take their part.
        let cpu = times.decode.parts.of(Part::CpuCompute);
        cpu > times.decode.parts.total() / 5 && times.parts.of(Part::Uploads) < cpu
    })
    .await;
}

/// Two models on a card with a slow link, each of which evicts the other: also a prompt waits for
/// what the card waits for itself.
#[tokio::test]
async fn a_prompt_behind_a_busy_link_is_told_its_uploads_and_who_evicted() {
    on_some_tries(async || {
        let runtime = fake::Runtime::new();
        runtime.misbehave(Misbehaviour::SlowPinnedCopies, 40);
        runtime.misbehave(Misbehaviour::SlowRegisteredCopies, 40);
        let roomy = engine(ROOMY);
        let info = load(&roomy, QWEN, "m").await;
        let budget = info.model().info().tensor_bytes + (2 << 20);
        let engine = runtime.start(budget & !255).unwrap();
        let model = load(&engine, QWEN, "m").await;
        let other = load(&engine, QWEN, "other").await;
        run("first use", &engine, greedy(&model, ids(4), 1)).await;
        run("the other", &engine, greedy(&other, ids(4), 1)).await;
        let (mut others, _) = begin(&engine, of(7, greedy(&other, ids(4), 1)));
        let times = run("a busy link", &engine, of(8, greedy(&model, ids(8), 1))).await;
        while others.next().await.is_some() {}
        // The fake card's own times of kernels have copies among them, so that how much of the rest
        // is the prompt's differs.
        let by_other = |d: &Displaced| d.by.as_deref() == Some("other");
        times.displaced.iter().any(by_other)
            && times.parts.of(Part::Uploads) > times.parts.total() / 8
    })
    .await;
}

/// An embedding behind texts of another client, and one by itself.
#[tokio::test]
async fn embeddings_and_scores_have_accounts_as_well() {
    on_some_tries(async || {
        let engine = start(EngineConfig {
            budget: ROOMY,
            max_sequences: NonZeroUsize::MIN,
            ..EngineConfig::default()
        })
        .unwrap()
        .0;
        let model = load_endless(&engine, "m").await;
        let embed = |n, slot: &TimesSlot| {
            let request = EmbedRequest {
                model: Arc::clone(&model),
                ids: ids(n),
                pooling: Pooling::Mean,
                classes: false,
                deadline: None,
                asker: Asker::default(),
                adapters: None,
            };
            engine.embed_timed(request, Some(slot.clone()))
        };
        let slot = TimesSlot::default();
        embed(1500, &slot).await.unwrap();
        let alone = slot.get().expect("its times");
        assert_eq!(alone.parts.total(), alone.ended - alone.begun);
        assert_eq!(alone.prompt_tokens, (1500, 0));
        let (mut events, _) = begin(&engine, of(7, greedy(&model, ids(4), 600)));
        until(&engine, "the text", |s| s.running == 1).await;
        let text = tokio::spawn(async move { while events.next().await.is_some() {} });
        let slot = TimesSlot::default();
        embed(2, &slot).await.unwrap();
        let behind = slot.get().expect("its times");
        text.await.unwrap();
        println!("{:?} {:?}", alone.parts.ranked(), behind.parts.ranked());
        let score = ScoreRequest {
            model: Arc::clone(&model),
            ids: ids(40),
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        };
        let slot = TimesSlot::default();
        let scored = engine.score_timed(score, Some(slot.clone())).await;
        assert_eq!(scored.unwrap().tokens.len(), 39);
        assert_eq!(slot.get().expect("its times").prompt_tokens, (40, 0));
        alone.parts.first_cause() == Part::Prompt
            && behind.parts.first_cause() == Part::Queue
            && behind.waited_for[0].client == 7
    })
    .await;
}

#[tokio::test]
async fn choosing_tokens_is_told_from_computing_them() {
    let engine = engine(ROOMY);
    let model = load_endless(&engine, "m").await;
    // DRY looks for each sequence that may repeat, in a text that is all alike.
    let request = GenerateRequest {
        sampling: SamplingParams {
            temperature: 1.0,
            top_k: 0,
            dry: Dry {
                multiplier: 0.8,
                ..Dry::default()
            },
            ..SamplingParams::default()
        },
        ..greedy(&model, ids(4), 100)
    };
    let times = run("sampling", &engine, request).await;
    let plain = run("greedy", &engine, greedy(&model, ids(4), 100)).await;
    let of = |times: &RequestTimes| times.parts.of(Part::Sampling);
    assert!(of(&times) > of(&plain), "{:?} {:?}", of(&times), of(&plain));
}

#[tokio::test]
async fn who_goes_away_leaves_an_account_behind() {
    let engine = engine(ROOMY);
    let model = load_endless(&engine, "m").await;
    let (mut events, slot) = begin(&engine, greedy(&model, ids(4), 100_000));
    assert!(events.next().await.is_some());
    drop(events);
    until(&engine, "its end", |s| s.running == 0 && s.queued == 0).await;
    let times = slot.get().expect("its times");
    assert_eq!(times.parts.total(), times.ended - times.begun);
}
