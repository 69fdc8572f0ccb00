//! Many requests at once: they share passes, and each gets what it would get alone.

use crate::{fake, requests};
use std::num::NonZeroUsize;
use std::sync::Arc;

use rocmforge_engine::api::{
    Asker, Budget, Class, Decoding, EVENT_CAPACITY, GenerateEvent, GenerateRequest, Mirostat,
    MirostatVersion, SamplingParams, ScoreRequest, Snapshot, TokenScore,
};
use rocmforge_engine::{
    EngineConfig, EngineHandle, Error, Events, LoadedModel, PrefixCache, start,
};

use crate::requests::{chat, engine, load, load_endless, questions, run, until};

/// Requests at once.
const MANY: usize = 12;

/// The i-th request: questions of different lengths, greedy and not, of two
/// clients and both classes.
fn request(model: &Arc<LoadedModel>, i: usize) -> GenerateRequest {
    let (question, _) = questions(MANY).swap_remove(i);
    let sampling = match i % 4 {
        0 => SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        1 => SamplingParams {
            seed: Some(i as u64),
            top_k: 3 + i as u32,
            ..SamplingParams::default()
        },
        // It looks at all logits, which others of its passes do not.
        2 => SamplingParams {
            seed: Some(i as u64),
            presence_penalty: 0.5,
            ..SamplingParams::default()
        },
        _ => SamplingParams {
            seed: Some(i as u64),
            top_k: 0,
            ..SamplingParams::default()
        },
    };
    GenerateRequest {
        sampling,
        max_tokens: Some(8 + 3 * i as u32),
        asker: Asker {
            client: i as u64 % 2,
            class: match i % 4 {
                3 => Class::Batch,
                _ => Class::Interactive,
            },
            ..Asker::default()
        },
        reuse: false,
        ..chat(model, &question.repeat(1 + i % 3))
    }
}

/// Tokens, and segments that its passes had.
async fn tokens(mut events: Events<GenerateEvent>) -> Result<(Vec<u32>, u64), Error> {
    let mut tokens = Vec::new();
    loop {
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids, .. } => tokens.extend(ids),
            GenerateEvent::Done(summary) => {
                return Ok((tokens, summary.cache.hits + summary.cache.misses));
            }
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

/// Each request alone, then all of them at once with a scoring beside them.
async fn share(engine: &EngineHandle, model: &Arc<LoadedModel>) {
    let score = || ScoreRequest {
        model: Arc::clone(model),
        ids: model
            .tokenizer()
            .encode(&questions(1)[0].0.repeat(4), true, true)
            .unwrap(),
        top_n: 2,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let mut alone = Vec::new();
    for i in 0..MANY {
        alone.push(
            tokens(engine.generate(request(model, i)).unwrap())
                .await
                .unwrap(),
        );
    }
    let scored = engine.score(score()).await.unwrap();

    // Where this thread is held up between two requests, the first has ended
    // before the second begins.
    for _ in 0..20 {
        if shares(engine, model, &alone, (score(), &scored.tokens)).await {
            return;
        }
    }
    panic!("they never shared passes");
}

/// Asks all of them at once, whose answers are to be as alone; whether they had
/// less than half of the passes.
async fn shares(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    alone: &[(Vec<u32>, u64)],
    (score, scored): (ScoreRequest, &[TokenScore]),
) -> bool {
    let before = engine.snapshot().cache;
    let together: Vec<_> = (0..MANY)
        .map(|i| tokio::spawn(tokens(engine.generate(request(model, i)).unwrap())))
        .collect();
    let beside = engine.score(score).await.unwrap();
    let mut told = beside.cache.hits + beside.cache.misses;
    for (i, request) in together.into_iter().enumerate() {
        let (tokens, segments) = request.await.unwrap().unwrap();
        assert_eq!(tokens, alone[i].0, "request {i}");
        told += segments;
    }
    assert_eq!(beside.tokens, scored);
    let after = engine.snapshot().cache;
    let had = after.hits + after.misses - before.hits - before.misses;
    println!("{told} segments by the requests' counts, {had} by the cache's");
    assert_eq!(after.kv_bytes + after.scratch_bytes, 0, "nothing is held");
    had * 2 < told
}

#[tokio::test]
async fn what_each_gets_is_what_it_gets_alone() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, file, "m").await;
        share(&engine, &model).await;
    }
}

#[tokio::test]
async fn requests_of_a_mixture_share_passes_too() {
    // In the second one experts come and go, a few at a time.
    for budget in [256 << 20, 6 << 20] {
        let engine = engine(Budget::Bytes(budget));
        let model = load(&engine, "tiny-qwen3moe-Q4_K_M.gguf", "m").await;
        share(&engine, &model).await;
    }
}

/// Requests that are there at once.
const CROWD: u32 = 64;

/// A request that looks at all of its logits.
fn whole(model: &Arc<LoadedModel>, i: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        seed: Some(u64::from(i)),
        top_k: 0,
        ..SamplingParams::default()
    };
    let mut request = of_ids(model, i % 9);
    request.max_tokens = Some(40);
    request.sampling = match i % 4 {
        0 => SamplingParams {
            repeat_penalty: 1.2,
            ..sampling
        },
        1 => SamplingParams {
            mirostat: Some(Mirostat {
                version: MirostatVersion::V2,
                tau: 5.0,
                eta: 0.1,
            }),
            ..sampling
        },
        2 => SamplingParams {
            logit_bias: vec![(7, 3.5)],
            ..sampling
        },
        _ => sampling,
    };
    request.decoding.logprobs = i.is_multiple_of(3).then_some(4);
    request
}

/// Tokens with their scores.
async fn scored(mut events: Events<GenerateEvent>) -> Vec<(Vec<u32>, Vec<TokenScore>)> {
    let mut pieces = Vec::new();
    loop {
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids, scores, .. } => pieces.push((ids, scores)),
            GenerateEvent::Done(_) => return pieces,
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn a_crowd_whose_logits_are_shared_out_among_threads_gets_what_each_gets_alone() {
    let config = EngineConfig {
        budget: Budget::Bytes(256 << 20),
        threads: NonZeroUsize::new(3),
        rows_shared_from: Some(0),
        max_sequences: NonZeroUsize::new(CROWD as usize).unwrap(),
        ..EngineConfig::default()
    };
    let engine = start(config).unwrap().0;
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let mut alone = Vec::new();
    for i in 0..CROWD {
        alone.push(scored(engine.generate(whole(&model, i)).unwrap()).await);
    }
    let asked: Vec<_> = (0..CROWD)
        .map(|i| tokio::spawn(scored(engine.generate(whole(&model, i)).unwrap())))
        .collect();
    for (i, asked) in asked.into_iter().enumerate() {
        assert_eq!(asked.await.unwrap(), alone[i], "request {i}");
    }
}

/// A greedy request of some ids, each time others.
fn of_ids(model: &Arc<LoadedModel>, i: u32) -> GenerateRequest {
    let ids = (0..3 + 7 * i)
        .map(|j| 5 + (j * 31 + i * 17) % 200)
        .collect();
    GenerateRequest {
        model: Arc::clone(model),
        prompt: ids,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens: Some(6),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    }
}

/// Layers with a state, windows, mixtures and latent attention keep their sequences apart.
async fn kinds_of_layers(engine: &EngineHandle) {
    for name in [
        "qwen35",
        "nemotron_h",
        "lfm2",
        "granitehybrid",
        "gemma3",
        "gpt-oss",
        "deepseek2",
    ] {
        let model = load(engine, &format!("arch/{name}.gguf"), name).await;
        let mut alone = Vec::new();
        for i in 0..5 {
            alone.push(
                tokens(engine.generate(of_ids(&model, i)).unwrap())
                    .await
                    .unwrap()
                    .0,
            );
        }
        let together: Vec<_> = (0..5)
            .map(|i| tokio::spawn(tokens(engine.generate(of_ids(&model, i)).unwrap())))
            .collect();
        for (i, request) in together.into_iter().enumerate() {
            let found = request.await.unwrap().unwrap().0;
            assert_eq!(found, alone[i], "{name}, request {i}");
        }
        engine.unload(name, false).await.unwrap();
    }
}

#[tokio::test]
async fn sequences_of_all_kinds_of_layers_are_kept_apart() {
    kinds_of_layers(&engine(Budget::Bytes(256 << 20))).await;
}

#[tokio::test]
async fn sequences_of_all_kinds_of_layers_are_kept_apart_on_the_hip_path() {
    let runtime = fake::Runtime::new();
    let engine = runtime.start(128 << 20).unwrap();
    kinds_of_layers(&engine).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn the_same_on_the_hip_path() {
    let runtime = fake::Runtime::new();
    let engine = runtime.start(64 << 20).unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    share(&engine, &model).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn who_goes_disturbs_nobody() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let endless = load_endless(&engine, "endless").await;
    let expected = tokens(engine.generate(request(&model, 0)).unwrap())
        .await
        .unwrap();
    for round in 0..6 {
        let mut leaving: Vec<_> = (0..4)
            .map(|_| {
                let request = GenerateRequest {
                    max_tokens: None,
                    ..chat(&endless, "Tell me all.")
                };
                engine.generate(request).unwrap()
            })
            .collect();
        let stays = tokio::spawn(tokens(engine.generate(request(&model, 0)).unwrap()));
        for (i, mut events) in leaving.drain(..).enumerate() {
            for _ in 0..i * (round + 1) {
                events.next().await;
            }
            drop(events);
        }
        assert_eq!(stays.await.unwrap().unwrap().0, expected.0);
    }
    until(&engine, "the end of all", |s| s.running == 0).await;
    assert_eq!(engine.snapshot().cache.kv_bytes, 0);
}

/// Three models of which two fit. While one runs, the one that a request waits for stays and the
/// one that nobody asks for goes, although that was used later.
#[tokio::test]
async fn the_model_that_a_request_waits_for_keeps_its_segments() {
    for _ in 0..100 {
        if waited_for_and_kept().await {
            return;
        }
    }
    panic!("the second of two requests always came too late");
}

/// Whether the request that waits came before the model that runs meanwhile needed room.
async fn waited_for_and_kept() -> bool {
    let ample = engine(Budget::Bytes(64 << 20));
    let there = load_endless(&ample, "m").await;
    let bytes: u64 = there.model().info().segments.iter().map(|s| s.bytes).sum();
    let config = EngineConfig {
        budget: Budget::Bytes((2 * bytes + bytes / 2) & !255),
        max_sequences: std::num::NonZeroUsize::MIN,
        prefix_cache: PrefixCache::Off,
        ..EngineConfig::default()
    };
    let engine = start(config).unwrap().0;
    let mut models = Vec::new();
    for name in ["waits", "idle", "runs"] {
        models.push(load_endless(&engine, name).await);
    }
    let [waits, idle, runs] = [&models[0], &models[1], &models[2]];
    let ask = |model, tokens| requests::greedy(model, vec![5, 9, 6, 7], tokens);
    let cache = |snapshot: &Snapshot, name: &str| {
        let mut models = snapshot.models.iter();
        models.find(|m| m.model.name() == name).unwrap().cache
    };
    let (_, expected, first) = run(&engine, ask(waits, 4)).await;
    assert!(first.cache.misses > 0);
    // It has the one place for longer than it takes to ask for the others, mostly; and it never
    // waits for its reader, since others would run meanwhile.
    let n_held = EVENT_CAPACITY as u32 / 2;
    let held = engine.generate(ask(idle, n_held));
    let next = engine.generate(ask(runs, 4));
    let last = engine.generate(ask(waits, 4));
    let [held, next, last] = [held, next, last].map(|asked| tokens(asked.unwrap()));
    let both = until(&engine, "the two that wait", |s| {
        s.queued == 2 || cache(s, "runs").uploads > 0
    });
    let both = both.await;
    if cache(&both, "runs").uploads > 0 {
        return false;
    }
    let before = cache(&both, "waits").uploads;
    let (held, next, last) = tokio::join!(held, next, last);
    assert_eq!(held.unwrap().0.len() as u32, n_held);
    next.unwrap();
    assert_eq!(last.unwrap().0, expected);
    let after = engine.snapshot();
    let [waits, idle, runs] = ["waits", "idle", "runs"].map(|name| cache(&after, name));
    assert_eq!(waits.uploads, before, "it was there: {idle:?}, {runs:?}");
    assert!(runs.uploads > 0 && idle.evictions > 0, "{idle:?}, {runs:?}");
    true
}

/// The three models of the fixtures: two dense ones, and a mixture of experts.
const MODELS: [&str; 3] = [
    "tiny-llama-Q4_K_M.gguf",
    "tiny-qwen3-Q8_0.gguf",
    "tiny-qwen3moe-Q4_K_M.gguf",
];

/// Requests of each of them.
const OF_EACH: usize = 5;

/// An engine whose passes stop behind each step, so that those of several models are under way at
/// once.
fn slicing(budget: u64) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(budget),
        slice: Some(std::time::Duration::ZERO),
        ..EngineConfig::default()
    }
}

async fn load_all(engine: &EngineHandle) -> Vec<Arc<LoadedModel>> {
    let mut models = Vec::new();
    for file in MODELS {
        models.push(load(engine, file, file).await);
    }
    models
}

/// What each request of each model says alone.
async fn texts_alone() -> Vec<Vec<u32>> {
    let engine = engine(Budget::Bytes(64 << 20));
    let mut texts = Vec::new();
    for model in load_all(&engine).await {
        for i in 0..OF_EACH {
            let events = engine.generate(request(&model, i)).unwrap();
            texts.push(tokens(events).await.unwrap().0);
        }
    }
    texts
}

/// A request that is under way: its tokens, or how it failed.
type UnderWay = tokio::task::JoinHandle<Result<(Vec<u32>, u64), Error>>;

/// All requests of all models at once.
fn all_at_once(engine: &EngineHandle, models: &[Arc<LoadedModel>]) -> Vec<UnderWay> {
    let each = models
        .iter()
        .flat_map(|model| (0..OF_EACH).map(move |i| request(model, i)));
    each.map(|request| tokio::spawn(tokens(engine.generate(request).unwrap())))
        .collect()
}

/// Passes of three models stop behind each step and go on in turn, where all models fit, and where
/// they push each other out: each text is what it is alone, bit by bit, and nothing is held at the
/// end.
#[tokio::test]
async fn passes_that_stop_between_their_steps_leave_each_text_as_it_is_alone() {
    let alone = texts_alone().await;
    for budget in [64 << 20, 14 << 20, 9 << 20] {
        let engine = start(slicing(budget)).unwrap().0;
        let models = load_all(&engine).await;
        for (i, text) in all_at_once(&engine, &models).into_iter().enumerate() {
            let text = text.await.unwrap().unwrap().0;
            assert_eq!(text, alone[i], "{budget}: request {i}");
        }
        let after = until(&engine, "the end of all", |s| s.running == 0).await;
        let cache = after.cache;
        println!(
            "{budget}: {} times, {} uploads",
            after.suspensions, cache.uploads
        );
        assert!(after.suspensions > 500, "{}", after.suspensions);
        assert_eq!(cache.kv_bytes + cache.scratch_bytes, 0, "{cache:?}");
        assert!(after.cache.resident_bytes <= budget);
    }
}

/// What changes under suspended passes: readers go away, the budget shrinks and grows, weights are
/// cleared, and a model is unloaded. The others' texts stay what they are.
#[tokio::test]
async fn suspended_passes_survive_who_goes_and_what_changes() {
    let alone = texts_alone().await;
    let engine = start(slicing(24 << 20)).unwrap().0;
    let models = load_all(&engine).await;
    for round in 0..4u64 {
        let texts = all_at_once(&engine, &models);
        let mut leaving: Vec<_> = models
            .iter()
            .map(|model| engine.generate(chat(model, "Tell me a story.")).unwrap())
            .collect();
        for (i, mut events) in leaving.drain(..).enumerate() {
            for _ in 0..i * 2 + round as usize {
                events.next().await;
            }
            drop(events);
            match i {
                0 => drop(engine.set_budget(Budget::Bytes(10 << 20)).await.unwrap()),
                1 => drop(engine.clear(None).await.unwrap()),
                _ => drop(engine.set_budget(Budget::Bytes(24 << 20)).await.unwrap()),
            }
        }
        let unloads = round == 3;
        if unloads {
            engine.unload(MODELS[1], true).await.unwrap();
        }
        for (i, text) in texts.into_iter().enumerate() {
            match text.await.unwrap() {
                Ok((text, _)) => assert_eq!(text, alone[i], "round {round}: request {i}"),
                Err(error) => {
                    let gone = OF_EACH..2 * OF_EACH;
                    assert!(unloads && gone.contains(&i), "round {round}, {i}: {error}");
                }
            }
        }
        until(&engine, "the end of all", |s| s.running == 0).await;
        let cache = engine.snapshot().cache;
        assert_eq!(cache.kv_bytes + cache.scratch_bytes, 0, "{cache:?}");
    }
    assert!(engine.snapshot().suspensions > 500);
}

/// The same on the path of a card, of which uploads come by themselves.
#[tokio::test]
async fn passes_of_a_card_that_stop_between_their_steps_leave_each_text_as_it_is_alone() {
    let runtime = fake::Runtime::new();
    let mut alone = Vec::new();
    for (slice, budget) in [
        (None, 64 << 20),
        (Some(std::time::Duration::ZERO), 16 << 20),
    ] {
        let config = EngineConfig {
            slice,
            cpu_compute: rocmforge_engine::api::When::Never,
            ..slicing(budget)
        };
        let engine = runtime
            .start_as(fake::gpu_config(&runtime), config)
            .unwrap();
        let models = load_all(&engine).await;
        if slice.is_none() {
            for model in &models {
                for i in 0..OF_EACH {
                    let events = engine.generate(request(model, i)).unwrap();
                    alone.push(tokens(events).await.unwrap().0);
                }
            }
            continue;
        }
        let mut apart = 0;
        for (i, text) in all_at_once(&engine, &models).into_iter().enumerate() {
            // Kernels for several rows round otherwise than those for one.
            apart += usize::from(text.await.unwrap().unwrap().0 != alone[i]);
        }
        assert!(apart <= 1, "{apart} texts are others");
        let after = until(&engine, "the end of all", |s| s.running == 0).await;
        assert!(after.suspensions > 100, "{}", after.suspensions);
        assert_eq!(after.cache.kv_bytes + after.cache.scratch_bytes, 0);
    }
}
