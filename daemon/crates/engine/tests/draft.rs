//! Models for which a smaller one drafts: fewer passes than tokens, and the same text.

use crate::requests;
use std::io::Write as _;
use std::sync::Arc;

use rocmforge_engine::api::{
    Budget, GenerateEvent, GenerateRequest, GenerateSummary, ModelStatus, SamplingParams, Snapshot,
    When,
};
use rocmforge_engine::{
    DeviceChoice, EngineConfig, EngineHandle, Error, Events, LoadedModel, prepare, start,
};
use rocmforge_fake_hip::Live;
use rocmforge_gguf::MappedFile;

use crate::fake::{Running, Runtime, gpu_config};
use crate::foresight::{FIRST, Foresight, From};
use crate::requests::{fixture, greedy, load, load_endless, run, together};

const LARGE: &str = "tiny-qwen3moe-Q4_K_M.gguf";
const SMALL: &str = "tiny-llama-Q4_K_M.gguf";

fn engine(budget: u64) -> EngineHandle {
    let config = EngineConfig {
        budget: Budget::Bytes(budget),
        ..EngineConfig::default()
    };
    start(config).unwrap().0
}

/// Loads a model for which another one that is loaded drafts.
async fn try_load_with(
    engine: &EngineHandle,
    file: &str,
    draft: &str,
) -> Result<Arc<LoadedModel>, Error> {
    let file = MappedFile::open(&fixture(file)).unwrap();
    let mut prepared = prepare("m", file, &mut |_| {}).unwrap();
    prepared.set_draft(draft);
    engine.load(prepared).await
}

/// The same, of files.
async fn load_pair(engine: &EngineHandle, file: &str, draft: &str) -> Arc<LoadedModel> {
    load(engine, draft, "d").await;
    try_load_with(engine, file, "d").await.unwrap()
}

/// Text that does not repeat itself.
fn prompt(model: &Arc<LoadedModel>, i: usize) -> Vec<u32> {
    let text = std::fs::read_to_string(fixture("text.txt")).unwrap();
    let text: String = text.chars().skip(900 * i).take(400).collect();
    model.tokenizer().encode(&text, true, true).unwrap()
}

fn ask(
    model: &Arc<LoadedModel>,
    i: usize,
    sampling: &SamplingParams,
    max_tokens: u32,
) -> GenerateRequest {
    GenerateRequest {
        sampling: sampling.clone(),
        ..greedy(model, prompt(model, i), max_tokens)
    }
}

fn samplings() -> [SamplingParams; requests::SAMPLINGS] {
    let drawn = SamplingParams {
        seed: Some(7),
        temperature: 0.7,
        ..SamplingParams::default()
    };
    let penalized = SamplingParams {
        repeat_penalty: 1.05,
        frequency_penalty: 0.1,
        ..drawn.clone()
    };
    requests::samplings(drawn, 5, penalized)
}

/// Nothing is held for anybody, but what is kept of prompts.
fn holds_nothing(engine: &EngineHandle) {
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.cache.kv_bytes, 0);
    assert_eq!(snapshot.cache.scratch_bytes, 0);
}

/// Models that count, so that nothing repeats itself, and each draft is right.
#[tokio::test]
async fn a_draft_model_that_knows_saves_passes() {
    let folder = tempfile::tempdir().unwrap();
    let counts = |arch| Foresight {
        arch,
        from: From::Token,
        layers: 0.0,
        without: "",
    };
    let path = |arch| {
        let path = counts(arch).write(&folder);
        path.to_str().unwrap().to_owned()
    };
    let draft = path("glm4moe");
    for file in [draft.clone(), path("qwen35moe")] {
        let mut uses = Vec::new();
        for drafts in [false, true] {
            let config = EngineConfig {
                speculate: (!drafts).then_some(false),
                budget: Budget::Bytes(64 << 20),
                ..EngineConfig::default()
            };
            let engine = start(config).unwrap().0;
            let model = load_pair(&engine, &file, &draft).await;
            let prompt = (FIRST..FIRST + 70).collect();
            let (_, ids, summary) = run(&engine, greedy(&model, prompt, 32)).await;
            assert_eq!(ids, (FIRST + 70..FIRST + 102).collect::<Vec<u32>>());
            println!("{file}: {} drafts", summary.drafted_tokens);
            assert_eq!(summary.drafted_tokens, summary.accepted_tokens);
            // One token comes of the prompt, and each other pass but the last has a draft at least.
            assert!(summary.drafted_tokens >= if drafts { 15 } else { 0 });
            let snapshot = engine.snapshot();
            let of = snapshot.models.iter().find(|m| m.model.name() == "m");
            let cache = of.unwrap().cache;
            uses.push(cache.hits + cache.misses);
            holds_nothing(&engine);
        }
        assert!(uses[1] * 3 < uses[0] * 2, "{uses:?}");
    }
}

/// Draws of all kinds for a pair of files, on an engine that drafts and on one that does not. What
/// was drafted, and how much of it was right.
async fn compare(file: &str, draft: &str, budget: u64) -> (u32, u32) {
    let plain = engine(64 << 20);
    let there = load(&plain, file, "m").await;
    let (mut drafted, mut accepted) = (0, 0);
    for (i, sampling) in samplings().iter().enumerate() {
        // Each pair begins with trials, so that there are drafts whatever a pass takes.
        let drafting = engine(budget);
        let model = load_pair(&drafting, file, draft).await;
        let (text, ids, _) = run(&plain, ask(&there, i, sampling, 60)).await;
        let (found, found_ids, summary) = run(&drafting, ask(&model, i, sampling, 60)).await;
        assert_eq!(
            (found, found_ids),
            (text, ids),
            "{file}, {draft}: {sampling:?}"
        );
        println!(
            "{file}, {draft}: {} tokens, {} of {} drafts were right",
            summary.generated_tokens, summary.accepted_tokens, summary.drafted_tokens
        );
        drafted += summary.drafted_tokens;
        accepted += summary.accepted_tokens;
        holds_nothing(&drafting);
    }
    (drafted, accepted)
}

#[tokio::test]
async fn the_text_is_the_same_whatever_the_sampling() {
    let (drafted, accepted) = compare(LARGE, SMALL, 64 << 20).await;
    // Both were trained on the same text, and differ.
    assert!(
        0 < accepted && accepted < drafted,
        "{accepted} of {drafted}"
    );
}

/// Layers with windows, and a mixture, draft; a model with recurrent states is drafted for.
#[tokio::test]
async fn any_model_of_attention_drafts_for_any_model() {
    for (file, draft) in [
        ("arch/qwen3moe.gguf", "arch/gemma3.gguf"),
        ("arch/qwen35.gguf", "arch/gpt-oss.gguf"),
        ("arch/gemma3.gguf", "arch/deepseek2.gguf"),
        ("arch/nemotron_h.gguf", "arch/qwen3moe.gguf"),
    ] {
        let (drafted, _) = compare(file, draft, 64 << 20).await;
        assert!(drafted > 0, "{file}, {draft}");
    }
}

#[tokio::test]
async fn others_beside_and_a_budget_for_a_part_change_nothing() {
    let plain = engine(64 << 20);
    let there = load(&plain, LARGE, "m").await;
    let requests = |model: &Arc<LoadedModel>| -> Vec<GenerateRequest> {
        let one = |i: usize| GenerateRequest {
            reuse: true,
            ..ask(
                model,
                i % 3,
                &samplings()[i % requests::SAMPLINGS],
                30 + 7 * i as u32,
            )
        };
        (0..6).map(one).collect()
    };
    let mut expected = Vec::new();
    for request in requests(&there) {
        expected.push(run(&plain, request).await.1);
    }
    let mut drafted = Vec::new();
    for budget in [1800 << 10, 3 << 20, 10 << 20, 64 << 20] {
        let drafting = engine(budget);
        let model = load_pair(&drafting, LARGE, SMALL).await;
        let ended = together(&drafting, requests(&model)).await;
        for (i, ((ids, _), expected)) in ended.iter().zip(&expected).enumerate() {
            assert_eq!(ids, expected, "{budget}, request {i}");
        }
        holds_nothing(&drafting);
        drafted.push(ended.iter().map(|(_, s)| s.drafted_tokens).sum::<u32>());
    }
    println!("{drafted:?} drafts");
    assert!(drafted[3] > 0);
}

/// A draft model that knows nothing is asked ever less.
#[tokio::test]
async fn drafts_that_are_wrong_are_made_no_more() {
    let plain = engine(64 << 20);
    let drafting = engine(64 << 20);
    let file = "arch/smollm3.gguf";
    let there = load(&plain, file, "m").await;
    let model = load_pair(&drafting, file, "arch/glm4.gguf").await;
    let (mut generated, mut drafted) = (0, Vec::new());
    for i in 0..12 {
        // Hardly three tokens come twice, so that the text drafts next to nothing.
        let drawn = SamplingParams {
            seed: Some(i as u64),
            temperature: 1.5,
            ..SamplingParams::default()
        };
        let request = |model| {
            let mut request = ask(model, i, &drawn, 60);
            request.decoding.ignore_eos = true;
            request
        };
        let (_, expected, _) = run(&plain, request(&there)).await;
        let (_, ids, summary) = run(&drafting, request(&model)).await;
        assert_eq!(ids, expected);
        generated += summary.generated_tokens;
        drafted.push(summary.drafted_tokens);
    }
    println!("{drafted:?} drafts for {generated} tokens");
    let later: u32 = drafted[4..].iter().sum();
    assert!(drafted.iter().sum::<u32>() >= 64);
    assert!(later * 4 < generated, "{drafted:?}");
}

/// Whatever budget a request fits in, it fits in with a draft model.
#[tokio::test]
async fn a_draft_model_takes_no_room_that_a_request_needs() {
    let mut seen = Vec::new();
    let (file, draft) = ("arch/qwen3moe.gguf", "arch/smollm3.gguf");
    for budget in (240..960).step_by(40) {
        let (plain, drafting) = (engine(budget << 10), engine(budget << 10));
        let there = load(&plain, file, "m").await;
        let model = load_pair(&drafting, file, draft).await;
        let mut outcomes = Vec::new();
        for (engine, model) in [(&plain, &there), (&drafting, &model)] {
            let mut ended = Vec::new();
            for i in 0..3 {
                ended.push(engine.generate(ask(model, i, &samplings()[0], 30)).unwrap());
            }
            let mut of_all = Vec::new();
            for mut events in ended {
                let (mut ids, mut end) = (Vec::new(), None);
                while end.is_none() {
                    match events.next().await.unwrap() {
                        GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
                        GenerateEvent::Done(summary) => end = Some(Some(summary.drafted_tokens)),
                        GenerateEvent::Failed(_) => end = Some(None),
                    }
                }
                of_all.push((ids, end.flatten()));
            }
            holds_nothing(engine);
            outcomes.push(of_all);
        }
        let drafts = outcomes[1]
            .iter()
            .any(|(_, drafts)| drafts.is_some_and(|n| n > 0));
        for (of, found) in outcomes[0].iter().zip(&outcomes[1]) {
            assert_eq!(of.1.is_some(), found.1.is_some(), "{budget} KiB");
            if of.1.is_some() {
                assert_eq!(of.0, found.0, "{budget} KiB");
            }
        }
        seen.push((budget, outcomes[0][0].1.is_some(), drafts));
    }
    println!("{seen:?}");
    assert!(seen.iter().any(|(_, fits, _)| !fits));
    assert!(seen.iter().any(|(_, _, drafts)| *drafts));
}

#[tokio::test]
async fn a_model_that_cannot_draft_is_refused_by_name() {
    let engine = engine(64 << 20);
    let refused = async |file: &str, draft: &str| {
        let error = try_load_with(&engine, file, draft).await.unwrap_err();
        assert!(engine.model("m").is_err(), "nothing is left");
        error
    };
    let error = refused(LARGE, "d").await;
    assert!(
        matches!(&error, Error::UnknownModel { name, .. } if name == "d"),
        "{error}"
    );
    let of_field = |error: Error| match error {
        Error::InvalidArgument { field, message } => {
            assert_eq!(field, "draft");
            message
        }
        other => panic!("{other}"),
    };
    let message = of_field(refused(LARGE, "m").await);
    assert!(message.contains("cannot draft for itself"), "{message}");
    load(&engine, "tiny-qwen3-Q8_0.gguf", "qwen").await;
    let message = of_field(refused(LARGE, "qwen").await);
    for part in [
        "'qwen' cannot draft for 'm'",
        "it has 2048 tokens there and 1216 here",
    ] {
        assert!(message.contains(part), "{message}");
    }
    load_endless(&engine, "endless").await;
    let message = of_field(refused(LARGE, "endless").await);
    for part in [
        "'endless' cannot draft for 'm'",
        "<|endoftexx|>\" there and \"<|endoftext|>\" here",
    ] {
        assert!(message.contains(part), "{message}");
    }
    load(&engine, "arch/qwen35.gguf", "states").await;
    let message = of_field(refused("arch/qwen3moe.gguf", "states").await);
    assert!(
        message.contains("'states' (qwen35) has recurrent states"),
        "{message}"
    );
    // One that is loaded without may have one named later.
    load(&engine, SMALL, "d").await;
    let model = load(&engine, LARGE, "m").await;
    assert_eq!(
        engine
            .snapshot()
            .models
            .iter()
            .filter(|m| m.draft.is_some())
            .count(),
        0
    );
    let again = try_load_with(&engine, LARGE, "d").await.unwrap();
    assert!(Arc::ptr_eq(&model, &again));
    let named = |m: &ModelStatus| m.draft.clone();
    let drafts: Vec<_> = engine.snapshot().models.iter().filter_map(named).collect();
    assert_eq!(drafts, ["d"]);
    let (_, _, summary) = run(&engine, ask(&model, 0, &samplings()[0], 30)).await;
    assert!(summary.drafted_tokens > 0);
}

/// Reads a request's events up to its first tokens.
async fn begun(engine: &EngineHandle, request: GenerateRequest) -> Events<GenerateEvent> {
    let mut events = engine.generate(request).unwrap();
    for _ in 0..4 {
        assert!(matches!(
            events.next().await.unwrap(),
            GenerateEvent::Piece { .. }
        ));
    }
    events
}

#[tokio::test]
async fn a_draft_model_may_be_unloaded_while_it_drafts() {
    let plain = engine(64 << 20);
    let there = load(&plain, LARGE, "m").await;
    let long = |model| {
        let mut request = ask(model, 0, &samplings()[0], 300);
        request.decoding.ignore_eos = true;
        request
    };
    let (_, expected, _) = run(&plain, long(&there)).await;
    let engine = engine(64 << 20);
    let model = load_pair(&engine, LARGE, SMALL).await;
    let mut events = engine.generate(long(&model)).unwrap();
    let mut ids = Vec::new();
    let summary = loop {
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
            GenerateEvent::Done(summary) => break summary,
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
        if ids.len() == 12 {
            engine.unload("d", false).await.unwrap();
        }
    };
    assert_eq!(ids, expected);
    assert!(summary.drafted_tokens > 0);
    holds_nothing(&engine);
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.models.len(), 1);
    assert_eq!(snapshot.models[0].draft, None);
}

/// As when its file has changed in place, and it is loaded anew.
#[tokio::test]
async fn a_draft_model_that_is_loaded_again_drafts_again() {
    let engine = engine(64 << 20);
    let model = load_pair(&engine, LARGE, SMALL).await;
    let drafts_for_it = || {
        let snapshot = engine.snapshot();
        let status = snapshot.models.iter().find(|m| m.model.name() == "m");
        status.unwrap().draft.clone()
    };
    engine.unload("d", false).await.unwrap();
    assert_eq!(drafts_for_it(), None);
    // What cannot draft for it is loaded all the same, under whatever name.
    load(&engine, "tiny-qwen3-Q8_0.gguf", "d").await;
    assert_eq!(drafts_for_it(), None);
    engine.unload("d", false).await.unwrap();
    load(&engine, SMALL, "another").await;
    assert_eq!(drafts_for_it(), None);

    load(&engine, SMALL, "d").await;
    assert_eq!(drafts_for_it().as_deref(), Some("d"));
    let (_, _, summary) = run(&engine, ask(&model, 0, &samplings()[0], 30)).await;
    assert!(summary.drafted_tokens > 0);
}

#[tokio::test]
async fn a_cancelled_request_leaves_nothing_of_the_draft_model() {
    let engine = engine(64 << 20);
    let model = load_pair(&engine, LARGE, SMALL).await;
    for i in 0..4 {
        let events = begun(&engine, ask(&model, i, &samplings()[0], 400)).await;
        drop(events);
    }
    let mut snapshots = engine.watch();
    let idle = |s: &Arc<Snapshot>| s.running == 0 && s.queued == 0;
    let snapshot = snapshots.wait_for(idle).await.unwrap().clone();
    assert_eq!(
        (snapshot.cache.kv_bytes, snapshot.cache.scratch_bytes),
        (0, 0)
    );
    engine.unload("m", false).await.unwrap();
    engine.unload("d", false).await.unwrap();
    assert_eq!(engine.snapshot().cache.resident_bytes, 0);
}

/// A file that is changed while it is in use fails whoever asks for its model, and
/// nobody for whom it would draft.
#[tokio::test]
async fn a_draft_model_that_fails_fails_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.gguf");
    std::fs::copy(fixture(SMALL), &path).unwrap();
    let (plain, engine) = (engine(64 << 20), engine(64 << 20));
    let there = load(&plain, LARGE, "m").await;
    let model = load_pair(&engine, LARGE, path.to_str().unwrap()).await;
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap();
    file.write_all(b"more").unwrap();
    for i in 0..2 {
        let (_, expected, _) = run(&plain, ask(&there, i, &samplings()[0], 40)).await;
        let (_, ids, _) = run(&engine, ask(&model, i, &samplings()[0], 40)).await;
        assert_eq!(ids, expected);
        holds_nothing(&engine);
    }
    let snapshot = engine.snapshot();
    let of_draft = snapshot.models.iter().find(|m| m.model.name() == "d");
    assert_eq!(of_draft.unwrap().cache.resident_bytes, 0);
}

/// A context that ends before the text's: drafts are made up to there.
#[tokio::test]
async fn drafts_end_where_the_draft_models_context_does() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(fixture(SMALL)).unwrap();
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&160u32.to_le_bytes());
    let path = folder.path().join("short.gguf");
    std::fs::write(&path, &bytes).unwrap();
    let engine = engine(64 << 20);
    load(&engine, path.to_str().unwrap(), "d").await;
    let model = try_load_with(&engine, LARGE, "d").await.unwrap();
    let request = |model| {
        let mut request = ask(model, 0, &samplings()[0], 200);
        request.prompt.truncate(100);
        request.decoding.ignore_eos = true;
        request
    };
    let (_, ids, summary) = run(&engine, request(&model)).await;
    assert!(summary.drafted_tokens > 0);
    let plain = self::engine(64 << 20);
    let there = load(&plain, LARGE, "m").await;
    assert_eq!(run(&plain, request(&there)).await.1, ids);
    holds_nothing(&engine);
}

/// On a card, where the text's own drafts are not made unless asked for: all of the same model's
/// are right. Everything resident, a part of it (where drafts are asked for only if there is surely
/// room), and where the host computes what is missing. The texts of all.
async fn drafts_on(
    start: &dyn Fn(EngineConfig) -> Result<Running, Error>,
    has_room: bool,
) -> Vec<Vec<Vec<u32>>> {
    let mut texts = Vec::new();
    for drafts in [false, true] {
        for (budget, cpu_compute) in [
            (24 << 20, When::Never),
            (2 << 20, When::Never),
            (2 << 20, When::Always),
        ] {
            let config = EngineConfig {
                budget: Budget::Bytes(budget),
                cpu_compute,
                ..EngineConfig::default()
            };
            let card = start(config).unwrap();
            let model = match drafts {
                true => load_pair(&card, SMALL, SMALL).await,
                false => load(&card, SMALL, "m").await,
            };
            let one = |i: usize| {
                let mut request = ask(&model, i, &samplings()[0], 12);
                request.prompt.truncate(40);
                request
            };
            let ended = together(&card, (0..3).map(one).collect()).await;
            let count = |of: &dyn Fn(&GenerateSummary) -> u32| -> u32 {
                ended.iter().map(|(_, summary)| of(summary)).sum()
            };
            let (drafted, right) = (count(&|s| s.drafted_tokens), count(&|s| s.accepted_tokens));
            println!("{budget}, {cpu_compute:?}: {right} of {drafted} drafts were right");
            if has_room || budget > 2 << 20 {
                assert_eq!(drafted > 0, drafts, "{budget}, {cpu_compute:?}");
            }
            // Where the number of rows chooses the kernel, one that is nearly
            // as likely may be drafted.
            assert!(right * 4 >= drafted * 3, "{right} of {drafted}");
            texts.push(ended.into_iter().map(|(ids, _)| ids).collect::<Vec<_>>());
            card.end().unwrap();
        }
    }
    texts
}

#[tokio::test]
async fn a_draft_model_drafts_through_the_hip_path() {
    let runtime = Runtime::new();
    let start = |config| runtime.start_as(gpu_config(&runtime), config);
    let texts = drafts_on(&start, true).await;
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// On the cards that there are; where none can be opened the test prints why and passes.
#[tokio::test]
async fn a_draft_model_drafts_on_a_card() {
    for device in [DeviceChoice::Hip(0), DeviceChoice::Cuda(0)] {
        let on_card = |config: EngineConfig| {
            let config = EngineConfig { device, ..config };
            start(config).map(|(handle, thread)| Running::new(handle, thread))
        };
        let trial = EngineConfig {
            budget: Budget::Bytes(24 << 20),
            ..EngineConfig::default()
        };
        match on_card(trial) {
            Err(error) => println!("skipped: {device:?}: {error}"),
            Ok(trial) => {
                trial.end().unwrap();
                // A card's kernels take so much of 2 MiB that drafts may have no room.
                drafts_on(&on_card, false).await;
            }
        }
    }
}
