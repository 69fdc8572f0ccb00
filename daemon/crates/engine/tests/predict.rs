//! Models whose block predicts one token more: fewer passes than tokens, and the same text.

use crate::requests;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use rocmforge_engine::api::{
    Budget, GenerateEvent, GenerateRequest, GenerateSummary, SamplingParams, When,
};
use rocmforge_engine::{
    DeviceChoice, EngineConfig, EngineHandle, Error, KvType, LoadedModel, prepare, start,
};
use rocmforge_fake_hip::Live;
use rocmforge_gguf::MappedFile;

use crate::fake::{Running, Runtime, gpu_config};
use crate::foresight::{FIRST, Foresight, From};
use crate::requests::{greedy as request, run, together};

const COUNTS: Foresight = Foresight {
    arch: "glm4moe",
    from: From::Token,
    layers: 0.0,
    without: "",
};

/// Count for certain.
const CERTAIN: [Foresight; 4] = [
    COUNTS,
    Foresight {
        from: From::Stream,
        ..COUNTS
    },
    Foresight {
        arch: "qwen35",
        ..COUNTS
    },
    Foresight {
        arch: "qwen35moe",
        from: From::Stream,
        ..COUNTS
    },
];

/// Count as far as what was said before lets them. The last two have recurrent states.
const WAVERING: [Foresight; 3] = [
    wavering("glm4moe"),
    wavering("qwen35"),
    wavering("qwen35moe"),
];

const fn wavering(arch: &'static str) -> Foresight {
    Foresight {
        arch,
        from: From::Both,
        layers: 1.0,
        ..COUNTS
    }
}

fn engine_with(config: EngineConfig, speculate: bool) -> EngineHandle {
    let config = EngineConfig {
        speculate: Some(speculate),
        ..config
    };
    start(config).unwrap().0
}

/// With keys and values in f16, for which the small budgets are made: mixtures of
/// floats have f32 by default.
fn engine(budget: u64, speculate: bool) -> EngineHandle {
    let config = EngineConfig {
        budget: Budget::Bytes(budget),
        kv_type: Some(KvType::F16),
        ..EngineConfig::default()
    };
    engine_with(config, speculate)
}

async fn load(engine: &EngineHandle, path: &Path, name: &str) -> Arc<LoadedModel> {
    let file = MappedFile::open(path).unwrap();
    let prepared = prepare(name, file, &mut |_| {}).unwrap();
    engine.load(prepared).await.unwrap()
}

/// `n` tokens that count, from the `i`-th on.
fn count(i: u32, n: u32) -> Vec<u32> {
    (FIRST + i..FIRST + i + n).collect()
}

fn samplings() -> [SamplingParams; requests::SAMPLINGS] {
    let drawn = SamplingParams {
        seed: Some(11),
        temperature: 1.2,
        ..SamplingParams::default()
    };
    let penalized = SamplingParams {
        repeat_penalty: 1.1,
        ..drawn.clone()
    };
    requests::samplings(drawn, 3, penalized)
}

#[tokio::test]
async fn a_block_that_knows_halves_the_passes() {
    let folder = tempfile::tempdir().unwrap();
    for made in CERTAIN {
        let path = made.write(&folder);
        let mut uses = Vec::new();
        for speculate in [false, true] {
            let engine = engine(64 << 20, speculate);
            let model = load(&engine, &path, "m").await;
            assert!(model.model().predictor().is_some());
            let (_, ids, summary) = run(&engine, request(&model, count(7, 70), 32)).await;
            assert_eq!(ids, count(77, 32), "{made:?}");
            // One comes of the prompt, each later pass has two but the last, behind
            // which there is none to draft.
            let expected = if speculate { (15, 15) } else { (0, 0) };
            assert_eq!((summary.drafted_tokens, summary.accepted_tokens), expected);
            // Of the segments of the model; the block's are not counted with them.
            let cache = engine.snapshot().models[0].cache;
            uses.push(cache.hits + cache.misses);
        }
        assert!(uses[1] * 3 < uses[0] * 2, "{uses:?}");
    }
}

/// All samplings on both engines; the summaries of the one that drafts.
async fn compare(
    (plain, drafting): (&EngineHandle, &EngineHandle),
    path: &Path,
    prompt: &[u32],
) -> Vec<GenerateSummary> {
    let (there, model) = (
        load(plain, path, "m").await,
        load(drafting, path, "m").await,
    );
    let mut summaries = Vec::new();
    for sampling in samplings() {
        let ask = |model| GenerateRequest {
            sampling: sampling.clone(),
            ..request(model, prompt.to_vec(), 90)
        };
        let (text, ids, _) = run(plain, ask(&there)).await;
        let (found, found_ids, summary) = run(drafting, ask(&model)).await;
        assert_eq!((found, found_ids), (text, ids), "{path:?}: {sampling:?}");
        println!(
            "{path:?}: {} tokens, {} of {} drafts were right",
            summary.generated_tokens, summary.accepted_tokens, summary.drafted_tokens
        );
        summaries.push(summary);
    }
    for engine in [plain, drafting] {
        engine.unload("m", false).await.unwrap();
        let cache = engine.snapshot().cache;
        assert_eq!((cache.kv_bytes, cache.prefix_bytes), (0, 0));
    }
    summaries
}

#[tokio::test]
async fn the_text_is_the_same_whatever_the_sampling() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    for made in CERTAIN.into_iter().chain(WAVERING) {
        let path = made.write(&folder);
        let summaries = compare((&plain, &drafting), &path, &count(0, 40)).await;
        assert!(summaries.iter().all(|s| s.drafted_tokens > 0));
        let drafted = summaries.iter().map(|s| s.drafted_tokens).sum::<u32>();
        let accepted = summaries.iter().map(|s| s.accepted_tokens).sum::<u32>();
        // Some are right and some are wrong, so that both are seen.
        assert!(
            0 < accepted && (accepted < drafted || made.layers == 0.0),
            "{made:?}: {accepted} of {drafted}"
        );
    }
}

/// Requests of all samplings and lengths.
fn mixed(model: &Arc<LoadedModel>) -> Vec<GenerateRequest> {
    let one = |i: u32| GenerateRequest {
        sampling: samplings()[i as usize % requests::SAMPLINGS].clone(),
        ..request(model, count(50 * i, 20 + 23 * i), 40 + 9 * i)
    };
    (0..requests::SAMPLINGS as u32).map(one).collect()
}

#[tokio::test]
async fn others_beside_and_a_budget_for_a_part_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for made in std::iter::once(CERTAIN[1]).chain(WAVERING) {
        let path = made.write(&folder);
        let plain = engine(64 << 20, false);
        let there = load(&plain, &path, "m").await;
        let mut expected = Vec::new();
        for request in mixed(&there) {
            expected.push(run(&plain, request).await.1);
        }
        let (mut evictions, mut drafted) = (0, Vec::new());
        for budget in [500 << 10, 700 << 10, 64 << 20] {
            let drafting = engine(budget, true);
            let model = load(&drafting, &path, "m").await;
            let ended = together(&drafting, mixed(&model)).await;
            for (i, ((ids, _), expected)) in ended.iter().zip(&expected).enumerate() {
                assert_eq!(ids, expected, "{made:?}, {budget}, request {i}");
            }
            let cache = drafting.snapshot().cache;
            assert_eq!(cache.kv_bytes, 0);
            evictions += cache.evictions;
            drafted.push(ended.iter().map(|(_, s)| s.drafted_tokens).sum::<u32>());
        }
        println!("{made:?}: {drafted:?} drafts, {evictions} evictions");
        assert!(evictions > 0 && drafted.iter().any(|&n| n > 0));
    }
}

/// The block's keys and values do not depend on how a prompt was divided, on what was there of it,
/// nor on who ran beside: so its drafts are right as often.
#[tokio::test]
async fn drafts_do_not_depend_on_how_a_prompt_was_computed() {
    for made in WAVERING {
        drafts_of_a_prompt_in_parts(&made).await;
    }
}

async fn drafts_of_a_prompt_in_parts(made: &Foresight) {
    let folder = tempfile::tempdir().unwrap();
    let path = made.write(&folder);
    let config = |chunk: usize| EngineConfig {
        budget: Budget::Bytes(64 << 20),
        prefill_chunk: NonZeroUsize::new(chunk),
        ..EngineConfig::default()
    };
    // Few enough drafts of the block that all are made, whatever a pass takes.
    let ask = |model: &Arc<LoadedModel>, i: u32, reuse| GenerateRequest {
        reuse,
        ..request(model, count(30 * i, 100 + 7 * i), 14)
    };
    let mut expected: Vec<(Vec<u32>, u32, u32)> = Vec::new();
    for chunk in [512, 7] {
        let engine = engine_with(config(chunk), true);
        let model = load(&engine, &path, "m").await;
        for (i, reuse) in (0..8).flat_map(|i| [(i, false), (i, true), (i, true)]) {
            let (_, ids, summary) = run(&engine, ask(&model, i, reuse)).await;
            let outcome = (ids, summary.drafted_tokens, summary.accepted_tokens);
            if chunk == 512 && !reuse {
                expected.push(outcome);
                continue;
            }
            let expected = &expected[i as usize];
            assert_eq!(outcome.0, expected.0, "{chunk}, {i}, {reuse}");
            if !repeats(&expected.0) {
                assert_eq!(outcome, *expected, "{chunk}, {i}, {reuse}");
            }
        }
        let reused = engine.snapshot().prefixes.reused_tokens;
        assert!(reused > 8 * 64, "{reused}");
    }
    expected.retain(|outcome| !repeats(&outcome.0));
    let counts = expected.iter().map(|(_, drafted, right)| (drafted, right));
    println!("{:?}", counts.clone().collect::<Vec<_>>());
    assert!(counts.clone().any(|(_, &right)| right > 0));
    assert!(counts.clone().any(|(drafted, right)| right < drafted));
}

/// Whether three tokens in a row came twice, so that what followed is drafted without the block.
fn repeats(ids: &[u32]) -> bool {
    let mut seen = std::collections::HashSet::new();
    !ids.windows(3).all(|gram| seen.insert(gram))
}

/// Turns of a chat go on from the answers of those before, with the block's part.
#[tokio::test]
async fn a_later_turn_goes_on_with_the_blocks_keys() {
    for made in CERTAIN {
        turns_of_a_chat(&made).await;
    }
}

async fn turns_of_a_chat(made: &Foresight) {
    let folder = tempfile::tempdir().unwrap();
    let path = made.write(&folder);
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    let (there, model) = (
        load(&plain, &path, "m").await,
        load(&drafting, &path, "m").await,
    );
    let mut prompt = count(0, 64);
    for turn in 0..40 {
        let ask = |model| GenerateRequest {
            reuse: true,
            ..request(model, prompt.clone(), 12)
        };
        let (_, expected, _) = run(&plain, ask(&there)).await;
        let (_, ids, summary) = run(&drafting, ask(&model)).await;
        assert_eq!(ids, expected);
        // All but a page or two, and never without drafts.
        let rest = prompt.len() as u32 - summary.reused_tokens;
        assert!(
            turn == 0 || rest <= 64,
            "{turn}: {rest} of {}",
            prompt.len()
        );
        assert_eq!(summary.accepted_tokens, 5, "{turn}");
        assert_eq!(summary.drafted_tokens, 5, "{turn}");
        prompt.extend(ids);
        prompt.push(FIRST + prompt.len() as u32);
    }
}

#[tokio::test]
async fn who_yields_goes_on_with_the_same_text() {
    let folder = tempfile::tempdir().unwrap();
    for made in std::iter::once(CERTAIN[0]).chain(WAVERING) {
        let path = made.write(&folder);
        let plain = engine(64 << 20, false);
        let there = load(&plain, &path, "m").await;
        // Open-ended ones are promised a while at a time, so that they get into each other's way.
        let requests = |model: &Arc<LoadedModel>| -> Vec<GenerateRequest> {
            let one = |i: u32| GenerateRequest {
                max_tokens: None,
                n_ctx: Some(400 + 10 * i),
                sampling: samplings()[i as usize % requests::SAMPLINGS].clone(),
                ..request(model, count(5 * i, 30 + i), 1)
            };
            (0..requests::SAMPLINGS as u32).map(one).collect()
        };
        let mut expected = Vec::new();
        for request in requests(&there) {
            expected.push(run(&plain, request).await.1);
        }
        let mut drafted = 0;
        for budget in [1 << 20, 5 << 18, 3 << 19, 2 << 20] {
            let drafting = engine(budget, true);
            let model = load(&drafting, &path, "m").await;
            let ended = together(&drafting, requests(&model)).await;
            for (i, ((ids, summary), expected)) in ended.iter().zip(&expected).enumerate() {
                assert_eq!(ids, expected, "{made:?}, {budget}, request {i}");
                drafted += summary.drafted_tokens;
            }
            assert_eq!(drafting.snapshot().cache.kv_bytes, 0);
        }
        assert!(drafted > 0);
    }
}

#[tokio::test]
async fn the_blocks_segments_are_there_only_for_who_drafts() {
    let folder = tempfile::tempdir().unwrap();
    let path = CERTAIN[0].write(&folder);
    let resident = |engine: &EngineHandle| engine.snapshot().models[0].cache.resident_bytes;
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    let there = load(&plain, &path, "m").await;
    run(&plain, request(&there, count(0, 40), 20)).await;
    let model = load(&drafting, &path, "m").await;
    assert_eq!(resident(&drafting), 0);
    // A text that a grammar or its length leaves no draft does without.
    run(&drafting, request(&model, count(0, 40), 2)).await;
    let of_layers = resident(&drafting);
    run(&drafting, request(&model, count(0, 40), 20)).await;
    let with_block = resident(&drafting);
    assert!(of_layers < with_block, "{of_layers}, {with_block}");
    assert!(resident(&plain) < with_block);
    // Another model wants the room.
    let other = load(&drafting, &WAVERING[0].write(&folder), "other").await;
    let change = drafting
        .set_budget(Budget::Bytes(with_block))
        .await
        .unwrap();
    assert_eq!(change.excess_bytes, 0);
    run(&drafting, request(&other, count(0, 40), 20)).await;
    assert!(resident(&drafting) < with_block);
    drafting.clear(Some("m")).await.unwrap();
    assert_eq!(resident(&drafting), 0);
    drafting.unload("m", false).await.unwrap();
    drafting.unload("other", false).await.unwrap();
    assert_eq!(drafting.snapshot().cache.resident_bytes, 0);
}

#[tokio::test]
async fn a_block_that_is_not_whole_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(64 << 20, true);
    for without in [
        "eh_proj",
        "enorm",
        "hnorm",
        "attn_k.weight",
        "ffn_gate_inp",
        "up_exps",
    ] {
        let made = Foresight {
            without,
            ..CERTAIN[0]
        };
        let model = load(&engine, &made.write(&folder), "m").await;
        assert!(model.model().predictor().is_none());
        let why = model.model().unpredicted().unwrap();
        assert!(why.contains("blk.3.") && why.contains(without), "{why}");
        let (_, ids, summary) = run(&engine, request(&model, count(0, 9), 9)).await;
        assert_eq!((ids, summary.drafted_tokens), (count(9, 9), 0));
        engine.unload("m", false).await.unwrap();
    }
    // What the model's own stands in for may be absent: a file of the other kind has all of them.
    let whole = load(&engine, &CERTAIN[1].write(&folder), "whole").await;
    let segments = &whole.model().predictor().unwrap().segments;
    let names = segments
        .iter()
        .flat_map(|s| &s.tensors)
        .map(|t| t.name.as_str());
    let names: Vec<&str> = names.collect();
    for own in ["shared_head_head", "shared_head_norm"] {
        assert!(names.iter().any(|n| n.contains(own)), "{names:?}");
    }
    assert_eq!(whole.model().left_alone(), &[] as &[String]);
}

/// Everything resident, a part of it, and where the host computes what is missing.
async fn drafts_on(start: &dyn Fn(EngineConfig) -> Result<Running, Error>) {
    let folder = tempfile::tempdir().unwrap();
    for made in CERTAIN {
        let path = made.write(&folder);
        for (budget, cpu_compute) in [
            (24 << 20, When::Never),
            (3 << 20, When::Never),
            (3 << 20, When::Always),
        ] {
            let config = EngineConfig {
                budget: Budget::Bytes(budget),
                speculate: Some(true),
                cpu_compute,
                ..EngineConfig::default()
            };
            let card = start(config).unwrap();
            let model = load(&card, &path, "m").await;
            let (_, ids, summary) = run(&card, request(&model, count(7, 70), 32)).await;
            assert_eq!(ids, count(77, 32), "{made:?}, {budget}");
            let drafts = (summary.drafted_tokens, summary.accepted_tokens);
            assert_eq!(drafts, (15, 15), "{made:?}, {budget}, {cpu_compute:?}");
            card.end().unwrap();
        }
    }
}

/// States behind wrong drafts and right ones, on the path of cards.
#[tokio::test]
async fn states_behind_drafts_through_the_hip_path() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Runtime::new();
    for made in &WAVERING[1..] {
        let path = made.write(&folder);
        let mut texts = Vec::new();
        for speculate in [false, true] {
            let config = EngineConfig {
                budget: Budget::Bytes(24 << 20),
                speculate: Some(speculate),
                ..EngineConfig::default()
            };
            let engine = runtime.start_as(gpu_config(&runtime), config).unwrap();
            let model = load(&engine, &path, "m").await;
            // Few enough that all drafts are made, whatever a pass takes.
            let ask = |i: u32| request(&model, count(30 * i, 40), 14);
            let (mut ids, mut drafts) = (Vec::new(), (0, 0));
            for (of, summary) in together(&engine, (0..4).map(ask).collect()).await {
                ids.push(of);
                drafts.0 += summary.drafted_tokens;
                drafts.1 += summary.accepted_tokens;
            }
            println!("{made:?}: {drafts:?}");
            let seen = 0 < drafts.1 && drafts.1 < drafts.0;
            assert_eq!(seen, speculate, "{made:?}: {drafts:?}");
            texts.push(ids);
            engine.end().unwrap();
        }
        assert_eq!(texts[0], texts[1], "{made:?}");
    }
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Whatever budget a request fits in, it fits in where tokens are drafted.
#[tokio::test]
async fn drafts_take_no_room_that_a_request_needs() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = async |engine: &EngineHandle, request| {
        let mut events = engine.generate(request).unwrap();
        let mut ids = Vec::new();
        loop {
            match events.next().await.unwrap() {
                GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
                GenerateEvent::Done(summary) => return Some((ids, summary.drafted_tokens)),
                GenerateEvent::Failed(_) => return None,
            }
        }
    };
    for made in &WAVERING[1..] {
        let path = made.write(&folder);
        let mut seen = Vec::new();
        for budget in (200..700).step_by(20) {
            let (plain, drafting) = (engine(budget << 10, false), engine(budget << 10, true));
            let (there, model) = (
                load(&plain, &path, "m").await,
                load(&drafting, &path, "m").await,
            );
            let expected = outcome(&plain, request(&there, count(0, 40), 30)).await;
            let found = outcome(&drafting, request(&model, count(0, 40), 30)).await;
            let ids = |of: &Option<(Vec<u32>, u32)>| of.as_ref().map(|(ids, _)| ids.clone());
            assert_eq!(ids(&found), ids(&expected), "{made:?}, {budget} KiB");
            seen.push(found.map(|(_, drafts)| drafts > 0));
        }
        println!("{made:?}: {seen:?}");
        for kind in [None, Some(false), Some(true)] {
            assert!(seen.contains(&kind), "{made:?}: {seen:?}");
        }
    }
}

#[tokio::test]
async fn a_block_that_knows_drafts_through_the_hip_path() {
    let runtime = Runtime::new();
    drafts_on(&|config| runtime.start_as(gpu_config(&runtime), config)).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// On the cards that there are; where none can be opened the test prints why and passes.
#[tokio::test]
async fn a_block_that_knows_drafts_on_a_card() {
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
                drafts_on(&on_card).await;
            }
        }
    }
}
