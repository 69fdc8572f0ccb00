//! Long prompts of a mixture between the passes of others' tokens: each request has the text that
//! it has alone, whoever ends, goes or finds no room meanwhile.

use crate::fake;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{
    Asker, Budget, GenerateEvent, GenerateRequest, SamplingParams, ScoreRequest,
};
use rocmforge_engine::{EngineConfig, EngineHandle, Error, Events, LoadedModel, start};

use crate::requests::{greedy, load, until};

/// Tokens of the long prompt: some chunks.
const LENGTH: u32 = 200;

/// A prompt is long beyond this; a chunk has a quarter of it.
const PREFILL: usize = 64;

fn config(budget: u64) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(budget),
        prefill_chunk: NonZeroUsize::new(PREFILL),
        interleave: Some(true),
        speculate: Some(false),
        ..EngineConfig::default()
    }
}

fn ids(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|j| 5 + (j * 31 + seed * 17) % 200).collect()
}

/// One that decodes while the long prompt comes in: the first is greedy, others are drawn.
fn reader(model: &Arc<LoadedModel>, i: u32, max_tokens: u32) -> GenerateRequest {
    let mut request = greedy(model, ids(i, 3 + 5 * i), max_tokens);
    if i > 0 {
        request.sampling = SamplingParams {
            seed: Some(u64::from(i)),
            temperature: 0.7,
            top_k: if i.is_multiple_of(2) { 0 } else { 20 },
            ..SamplingParams::default()
        };
    }
    request.decoding.ignore_eos = true;
    request
}

fn long(model: &Arc<LoadedModel>) -> GenerateRequest {
    let mut request = greedy(model, ids(77, LENGTH), 4);
    request.decoding.ignore_eos = true;
    request
}

async fn rest(events: &mut Events<GenerateEvent>, tokens: &mut Vec<u32>) -> Result<(), Error> {
    loop {
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids, .. } => tokens.extend(ids),
            GenerateEvent::Done(_) => return Ok(()),
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

async fn tokens(mut events: Events<GenerateEvent>) -> Result<Vec<u32>, Error> {
    let mut tokens = Vec::new();
    rest(&mut events, &mut tokens).await?;
    Ok(tokens)
}

async fn alone(engine: &EngineHandle, request: GenerateRequest) -> Vec<u32> {
    tokens(engine.generate(request).unwrap()).await.unwrap()
}

/// Waits for a request's first token.
async fn first(events: &mut Events<GenerateEvent>) -> Vec<u32> {
    match events.next().await.unwrap() {
        GenerateEvent::Piece { ids, .. } => ids,
        other => panic!("{other:?}"),
    }
}

/// Readers of different lengths, the shortest of which end while the long prompt comes in, and a
/// prompt beside them: all have their text.
async fn each_has_its_text(engine: &EngineHandle, name: &str, file: &str) {
    let model = load(engine, file, name).await;
    let requests: Vec<_> = [8, 90, 40, 20].into_iter().zip(0..).collect();
    let mut texts = Vec::new();
    for &(n, i) in &requests {
        texts.push(alone(engine, reader(&model, i, n)).await);
    }
    let expected = alone(engine, long(&model)).await;
    let before = engine.snapshot().interleaved_passes;
    let mut readers: Vec<_> = requests
        .iter()
        .map(|&(n, i)| engine.generate(reader(&model, i, n)).unwrap())
        .collect();
    let mut begun = Vec::new();
    for events in &mut readers {
        begun.push(first(events).await);
    }
    let prompt = tokio::spawn(tokens(engine.generate(long(&model)).unwrap()));
    for (i, (mut events, mut text)) in readers.into_iter().zip(begun).enumerate() {
        rest(&mut events, &mut text).await.unwrap();
        assert_eq!(text, texts[i], "{name}, reader {i}");
    }
    assert_eq!(prompt.await.unwrap().unwrap(), expected, "{name}");
    until(engine, "the end of all", |s| s.running == 0).await;
    let after = engine.snapshot();
    assert!(after.interleaved_passes > before, "{name}: never between");
    assert_eq!(after.cache.kv_bytes + after.cache.scratch_bytes, 0);
    engine.unload(name, false).await.unwrap();
}

/// Mixtures: with attention alone, with windows, with a state, with latent keys.
const MIXTURES: [&str; 8] = [
    "qwen3moe",
    "gpt-oss",
    "gemma4moe",
    "qwen35moe",
    "nemotron_h_moe",
    "lfm2moe",
    "deepseek2",
    "glm4moe",
];

#[tokio::test]
async fn each_has_its_text_beside_a_long_prompt() {
    let engine = start(config(256 << 20)).unwrap().0;
    each_has_its_text(&engine, "m", "tiny-qwen3moe-Q4_K_M.gguf").await;
    for name in MIXTURES {
        each_has_its_text(&engine, name, &format!("arch/{name}.gguf")).await;
    }
}

#[tokio::test]
async fn each_has_its_text_beside_a_long_prompt_on_the_hip_path() {
    let runtime = fake::Runtime::new();
    let engine = runtime
        .start_as(fake::gpu_config(&runtime), config(128 << 20))
        .unwrap();
    for name in MIXTURES {
        each_has_its_text(&engine, name, &format!("arch/{name}.gguf")).await;
    }
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

/// The long prompt's client goes, then a reader does, in the middle of a chunk or between two.
#[tokio::test]
async fn who_goes_disturbs_nobody() {
    let engine = start(config(256 << 20)).unwrap().0;
    let model = load(&engine, "arch/qwen35moe.gguf", "m").await;
    let (kept, expected) = (
        alone(&engine, reader(&model, 1, 60)).await,
        alone(&engine, long(&model)).await,
    );
    let mut passes = 0;
    for round in 0..24 {
        let mut stays = engine.generate(reader(&model, 1, 60)).unwrap();
        let mut goes = engine.generate(reader(&model, 2, 60)).unwrap();
        let (mut text, _) = (first(&mut stays).await, first(&mut goes).await);
        let prompt = engine.generate(long(&model)).unwrap();
        let before = engine.snapshot().interleaved_passes;
        for _ in 0..round / 2 {
            goes.next().await;
        }
        if round % 2 == 0 {
            drop(prompt);
            rest(&mut goes, &mut Vec::new()).await.unwrap();
        } else {
            drop(goes);
            assert_eq!(tokens(prompt).await.unwrap(), expected, "round {round}");
        }
        rest(&mut stays, &mut text).await.unwrap();
        assert_eq!(text, kept, "round {round}");
        until(&engine, "the end of all", |s| s.running == 0).await;
        passes += engine.snapshot().interleaved_passes - before;
        assert_eq!(engine.snapshot().cache.kv_bytes, 0);
    }
    assert!(passes > 0, "no chunk was under way");
}

/// Scores beside a long prompt: prompts share passes then, and all have what they have alone.
#[tokio::test]
async fn scores_beside_a_long_prompt_are_what_they_are_alone() {
    let engine = start(config(256 << 20)).unwrap().0;
    let model = load(&engine, "arch/qwen3moe.gguf", "m").await;
    let (text, expected) = (
        alone(&engine, reader(&model, 1, 90)).await,
        alone(&engine, long(&model)).await,
    );
    let request = || ScoreRequest {
        model: Arc::clone(&model),
        ids: ids(5, LENGTH),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let scores = engine.score(request()).await.unwrap().tokens;
    for _ in 0..4 {
        let mut events = engine.generate(reader(&model, 1, 90)).unwrap();
        let mut found = first(&mut events).await;
        let prompt = tokio::spawn(tokens(engine.generate(long(&model)).unwrap()));
        assert_eq!(engine.score(request()).await.unwrap().tokens, scores);
        rest(&mut events, &mut found).await.unwrap();
        assert_eq!(found, text);
        assert_eq!(prompt.await.unwrap().unwrap(), expected);
    }
}

/// What tokens take was measured of one text alone, and eight take several times as long: the
/// prompt comes in all the same, and not behind them.
#[tokio::test]
async fn a_chunk_goes_on_where_tokens_take_longer_than_was_measured() {
    let engine = start(config(256 << 20)).unwrap().0;
    let model = load(&engine, "tiny-qwen3moe-Q4_K_M.gguf", "m").await;
    alone(&engine, reader(&model, 1, 60)).await;
    let mut readers: Vec<_> = (0..8)
        .map(|i| engine.generate(reader(&model, i, 250)).unwrap())
        .collect();
    for events in &mut readers {
        first(events).await;
    }
    let readers: Vec<_> = readers
        .into_iter()
        .map(|events| tokio::spawn(tokens(events)))
        .collect();
    alone(&engine, long(&model)).await;
    let done = readers.iter().filter(|reader| reader.is_finished()).count();
    assert_eq!(done, 0, "the prompt came in behind {done} of 8 texts");
    for reader in readers {
        reader.await.unwrap().unwrap();
    }
}

/// A reader that does not read is waited for by nobody.
#[tokio::test]
async fn a_slow_reader_holds_no_chunk_up() {
    let engine = start(config(256 << 20)).unwrap().0;
    let model = load(&engine, "arch/qwen3moe.gguf", "m").await;
    let kept = alone(&engine, reader(&model, 1, 300)).await;
    let expected = alone(&engine, long(&model)).await;
    let mut slow = engine.generate(reader(&model, 1, 300)).unwrap();
    let mut text = first(&mut slow).await;
    for _ in 0..8 {
        assert_eq!(alone(&engine, long(&model)).await, expected);
    }
    rest(&mut slow, &mut text).await.unwrap();
    assert_eq!(text, kept);
}

/// In budgets that hold the model and little more, requests yield and chunks find no room: all end,
/// with their text.
#[tokio::test]
async fn all_end_where_there_is_little_room() {
    let ample = start(config(256 << 20)).unwrap().0;
    let model = load(&ample, "arch/qwen3moe.gguf", "m").await;
    let expected = alone(&ample, long(&model)).await;
    let mut texts = Vec::new();
    for i in 0..4 {
        texts.push(alone(&ample, reader(&model, i, 60)).await);
    }
    let bytes: u64 = model.model().info().segments.iter().map(|s| s.bytes).sum();
    let mut passes = 0;
    for step in 0..24 {
        let engine = start(config((bytes + (step << 16)) & !255)).unwrap().0;
        let model = load(&engine, "arch/qwen3moe.gguf", "m").await;
        // A budget that no request fits in says so.
        let Ok(asked) = engine.generate(long(&model)) else {
            continue;
        };
        if let Err(error) = tokens(asked).await {
            assert!(
                matches!(error, Error::Precondition(_)),
                "step {step}: {error}"
            );
            continue;
        }
        let readers = (0..4).map(|i| engine.generate(reader(&model, i, 60)).unwrap());
        let readers: Vec<_> = readers.map(|events| tokio::spawn(tokens(events))).collect();
        let prompts: Vec<_> = (0..2)
            .map(|_| tokio::spawn(tokens(engine.generate(long(&model)).unwrap())))
            .collect();
        for (i, reader) in readers.into_iter().enumerate() {
            let text = reader.await.unwrap();
            assert_eq!(text.unwrap(), texts[i], "step {step}, reader {i}");
        }
        for prompt in prompts {
            assert_eq!(prompt.await.unwrap().unwrap(), expected, "step {step}");
        }
        passes += engine.snapshot().interleaved_passes;
    }
    assert!(passes > 0, "never between");
}

/// The driver refuses memory at some launch of a chunk, or of a pass of tokens beside it: the pass
/// is done again with less, and all have their text.
#[tokio::test]
async fn all_end_where_the_driver_refuses_memory() {
    const OUT_OF_MEMORY: u32 = 2;
    let runtime = fake::Runtime::new();
    let engine = runtime
        .start_as(fake::gpu_config(&runtime), config(128 << 20))
        .unwrap();
    let model = load(&engine, "arch/qwen35moe.gguf", "m").await;
    let mut texts = Vec::new();
    for i in 0..3 {
        texts.push(alone(&engine, reader(&model, i, 60)).await);
    }
    let expected = alone(&engine, long(&model)).await;
    let (mut refused, mut passes) = (0, 0);
    for round in 0..40 {
        let mut readers: Vec<_> = (0..3)
            .map(|i| engine.generate(reader(&model, i, 60)).unwrap())
            .collect();
        let mut begun = Vec::new();
        for events in &mut readers {
            begun.push(first(events).await);
        }
        let before = engine.snapshot();
        let prompt = engine.generate(long(&model)).unwrap();
        runtime.fail("hipModuleLaunchKernel", 1 + round * 37, OUT_OF_MEMORY);
        // In some rounds its client goes: nobody's error becomes a reader's.
        let goes = round % 4 == 3;
        let prompt = tokio::spawn(async move {
            if goes {
                tokio::time::sleep(Duration::from_millis(round)).await;
                return None;
            }
            Some(tokens(prompt).await)
        });
        for (i, (mut events, mut text)) in readers.into_iter().zip(begun).enumerate() {
            rest(&mut events, &mut text).await.unwrap();
            assert_eq!(text, texts[i], "round {round}, reader {i}");
        }
        match prompt.await.unwrap() {
            Some(text) => assert_eq!(text.unwrap(), expected, "round {round}"),
            None => assert!(goes),
        }
        runtime.recover();
        let after = until(&engine, "the end of all", |s| s.running == 0).await;
        passes += after.interleaved_passes - before.interleaved_passes;
        refused += u32::from(after.cache.budget_bytes < before.cache.budget_bytes);
        engine.set_budget(Budget::Bytes(128 << 20)).await.unwrap();
    }
    println!("{refused} refusals, {passes} passes of tokens between");
    assert!(
        refused > 10 && passes > 0,
        "{refused} refusals, {passes} passes"
    );
    // Pages that are kept through the host's memory are not full.
    let mut noted = runtime.violations();
    noted.retain(|v| !(v.starts_with("a copy to the host reads") && v.ends_with("never written")));
    assert_eq!(noted, Vec::<String>::new());
}
