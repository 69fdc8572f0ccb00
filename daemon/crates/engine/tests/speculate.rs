//! Tokens that are drafted from what a text has said before: fewer passes, and the same text.

use crate::requests;
use std::sync::Arc;

use rocmforge_engine::api::{Budget, GenerateRequest, GenerateSummary, SamplingParams};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};

use crate::requests::{greedy, load, load_endless, run};

/// A trained model that knows no end of text.
const ENDLESS: &str = "endless";

fn engine(budget: u64, speculate: bool) -> EngineHandle {
    let config = EngineConfig {
        budget: Budget::Bytes(budget),
        speculate: Some(speculate),
        ..EngineConfig::default()
    };
    start(config).unwrap().0
}

/// A text that repeats itself, and goes on to.
fn refrain(model: &Arc<LoadedModel>) -> Vec<u32> {
    let text = "The whale sang a song. The fox found a coin. ".repeat(6);
    model.tokenizer().encode(&text, true, true).unwrap()
}

fn request(
    model: &Arc<LoadedModel>,
    prompt: Vec<u32>,
    sampling: SamplingParams,
) -> GenerateRequest {
    GenerateRequest {
        sampling,
        ..greedy(model, prompt, 90)
    }
}

fn samplings() -> [SamplingParams; requests::SAMPLINGS] {
    let drawn = SamplingParams {
        seed: Some(7),
        temperature: 0.4,
        ..SamplingParams::default()
    };
    let penalized = SamplingParams {
        repeat_penalty: 1.05,
        frequency_penalty: 0.1,
        ..drawn.clone()
    };
    requests::samplings(drawn, 5, penalized)
}

/// All samplings on both engines; the summaries of the one that drafts.
async fn compare(
    plain: &EngineHandle,
    drafting: &EngineHandle,
    file: &str,
) -> Vec<GenerateSummary> {
    compare_with(plain, drafting, file, &[]).await
}

/// The same with logits moved.
async fn compare_with(
    plain: &EngineHandle,
    drafting: &EngineHandle,
    file: &str,
    bias: &[(u32, f32)],
) -> Vec<GenerateSummary> {
    let (there, model) = match file {
        ENDLESS => (
            load_endless(plain, "m").await,
            load_endless(drafting, "m").await,
        ),
        file => (
            load(plain, file, "m").await,
            load(drafting, file, "m").await,
        ),
    };
    let mut summaries = Vec::new();
    for mut sampling in samplings() {
        sampling.logit_bias = bias.to_vec();
        let ask = |model| request(model, refrain(model), sampling.clone());
        let (text, ids, alone) = run(plain, ask(&there)).await;
        assert_eq!((alone.drafted_tokens, alone.accepted_tokens), (0, 0));
        let (found, found_ids, summary) = run(drafting, ask(&model)).await;
        assert_eq!((found, found_ids), (text, ids), "{file}: {sampling:?}");
        assert_eq!(summary.generated_tokens, alone.generated_tokens);
        assert!(summary.accepted_tokens <= summary.drafted_tokens);
        println!(
            "{file}: {} tokens, {} of {} drafts were right",
            summary.generated_tokens, summary.accepted_tokens, summary.drafted_tokens
        );
        summaries.push(summary);
    }
    for engine in [plain, drafting] {
        engine.unload("m", false).await.unwrap();
        assert_eq!(engine.snapshot().cache.kv_bytes, 0);
    }
    summaries
}

#[tokio::test]
async fn the_text_is_the_same_and_drafts_are_right_where_it_repeats() {
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    // A number of rows that was never timed is tried, so there are drafts on any machine.
    let summaries = compare(&plain, &drafting, ENDLESS).await;
    let accepted: u32 = summaries.iter().map(|s| s.accepted_tokens).sum();
    assert!(accepted > 0);
    compare(&plain, &drafting, "tiny-qwen3-Q8_0.gguf").await;
}

#[tokio::test]
async fn windows_and_mixtures_take_drafts() {
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    for name in ["gemma3", "gpt-oss", "deepseek2", "qwen3moe"] {
        compare(&plain, &drafting, &format!("arch/{name}.gguf")).await;
    }
}

/// Every kind of layer with a state: a wrong draft leaves no trace in it, and a right one does.
#[tokio::test]
async fn states_take_drafts() {
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    let (mut drafted, mut accepted) = (0, 0);
    for name in [
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "lfm2",
        "granitehybrid",
        "nemotron_h",
    ] {
        // What says four tokens only says some again.
        let few = [300, 301, 302, 303].map(|token| (token, 100.0));
        let file = format!("arch/{name}.gguf");
        let summaries = compare_with(&plain, &drafting, &file, &few).await;
        let of = summaries.iter().map(|s| s.drafted_tokens).sum::<u32>();
        assert!(of > 0, "{name}");
        drafted += of;
        accepted += summaries.iter().map(|s| s.accepted_tokens).sum::<u32>();
    }
    assert!(
        0 < accepted && accepted < drafted,
        "{accepted} of {drafted}"
    );
}

#[tokio::test]
async fn a_budget_for_a_part_of_the_model_and_others_beside_change_nothing() {
    let plain = engine(64 << 20, false);
    for budget in [1600 << 10, 64 << 20] {
        let drafting = engine(budget, true);
        let file = "tiny-llama-Q4_K_M.gguf";
        let (there, model) = (
            load(&plain, file, "m").await,
            load(&drafting, file, "m").await,
        );
        let mut together = Vec::new();
        for i in 0..6 {
            let sampling = samplings()[i % requests::SAMPLINGS].clone();
            let mut prompt = refrain(&model);
            prompt.truncate(prompt.len() - 3 * i);
            let (engine, request) = (drafting.clone(), request(&model, prompt, sampling));
            together.push(tokio::spawn(async move { run(&engine, request).await }));
        }
        for (i, one) in together.into_iter().enumerate() {
            let sampling = samplings()[i % requests::SAMPLINGS].clone();
            let mut prompt = refrain(&there);
            prompt.truncate(prompt.len() - 3 * i);
            let (_, expected, _) = run(&plain, request(&there, prompt, sampling)).await;
            assert_eq!(one.await.unwrap().1, expected, "{budget}, request {i}");
        }
        assert_eq!(drafting.snapshot().cache.kv_bytes, 0);
        plain.unload("m", false).await.unwrap();
    }
}

/// The context's end, the most tokens and a stop string end a text in the middle of
/// drafts as they do without.
#[tokio::test]
async fn what_ends_a_text_ends_it_among_drafts() {
    let (plain, drafting) = (engine(64 << 20, false), engine(64 << 20, true));
    let file = "tiny-llama-Q4_K_M.gguf";
    let (there, model) = (
        load(&plain, file, "m").await,
        load(&drafting, file, "m").await,
    );
    let greedy = || samplings()[0].clone();
    for n in 1..24 {
        for (max_tokens, n_ctx, stop) in [
            (Some(n), None, Vec::new()),
            (None, Some(refrain(&model).len() as u32 + n), Vec::new()),
            (
                Some(60),
                None,
                vec!["coin".repeat(1 + n as usize / 20), "sang a".to_owned()],
            ),
        ] {
            let ask = |model: &Arc<LoadedModel>| GenerateRequest {
                max_tokens,
                n_ctx,
                stop: stop.clone(),
                ..request(model, refrain(model), greedy())
            };
            let (text, ids, alone) = run(&plain, ask(&there)).await;
            let (found, found_ids, summary) = run(&drafting, ask(&model)).await;
            assert_eq!((found, found_ids), (text, ids), "{n}");
            assert_eq!(summary.finish, alone.finish);
            assert_eq!(summary.generated_tokens, alone.generated_tokens);
        }
    }
}
