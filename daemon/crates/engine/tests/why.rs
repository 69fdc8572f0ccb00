//! Slow requests, made slow on purpose: the first cause that their time account names is the one
//! that they were made slow by, and the parts add up to the whole time.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::times::{Part, RequestTimes, TimesSlot};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, Dry, EmbedRequest, EvictionCause, GenerateEvent, GenerateRequest,
    Pooling, SamplingParams, ScoreRequest, When,
};
use rocmforge_engine::{EngineConfig, EngineHandle, Events, LoadedModel, start};

use crate::fake;
use crate::requests::{drop_cached, engine, fixture, greedy, load, load_endless, until};

const ROOMY: Budget = Budget::Bytes(64 << 20);
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

pub(crate) fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 31 % 200).collect()
}

pub(crate) fn of(client: u64, request: GenerateRequest) -> GenerateRequest {
    let asker = Asker {
        client,
        ..request.asker
    };
    GenerateRequest { asker, ..request }
}

pub(crate) fn begin(
    engine: &EngineHandle,
    request: GenerateRequest,
) -> (Events<GenerateEvent>, TimesSlot) {
    let slot = TimesSlot::default();
    let times = Some(slot.clone());
    let events = engine.generate_timed(request, Vec::new(), times).unwrap();
    (events, slot)
}

/// Reads a request to its end and gives its times, of which the parts add up.
pub(crate) async fn end(
    name: &str,
    events: &mut Events<GenerateEvent>,
    slot: &TimesSlot,
) -> RequestTimes {
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

pub(crate) async fn run(
    name: &str,
    engine: &EngineHandle,
    request: GenerateRequest,
) -> RequestTimes {
    let (mut events, slot) = begin(engine, request);
    end(name, &mut events, &slot).await
}

/// A request that goes on for long, and is read.
pub(crate) fn endless(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    client: u64,
) -> tokio::task::JoinHandle<()> {
    let request = of(client, greedy(model, ids(4), 3000));
    let (mut events, _) = begin(engine, request);
    tokio::spawn(async move { while events.next().await.is_some() {} })
}

/// Tries of a case whose first cause is measured: on a busy machine something else may take longer
/// now and then.
const TRIES: usize = 24;

/// Runs a case until it was right twice.
pub(crate) async fn on_some_tries(case: impl AsyncFn() -> bool) {
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
