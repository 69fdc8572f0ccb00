//! What is not on the card, computed on the host: the texts are those of the host,
//! whichever answer a miss gets.

use crate::{fake, requests};
use std::sync::Arc;

use crate::fake::{Runtime, gpu_config};
use crate::requests::{chat, load, questions, run};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Budget, When};
use rocmforge_fake_hip::Live;

/// Questions of the exam; of a trained model's answers one in so many may part where
/// two tokens are nearly equal.
const QUESTIONS: usize = 24;

/// Bytes beside a share of a model's weights: KV pages, scratch, and what the device keeps for
/// itself.
const BESIDE: u64 = 2 << 20;

/// Room for all that the host is asked for.
const ROOMY: Option<Budget> = Some(Budget::Bytes(64 << 20));

/// A budget of a part of a model's weights beside those that the host cannot take.
fn budget(model: &Arc<LoadedModel>, part: u64) -> u64 {
    let info = model.model().info();
    let bytes = |layers: bool| -> u64 {
        let some = info.segments.iter();
        let some = some.filter(|s| s.name.starts_with("blk.") == layers);
        some.map(|s| s.bytes).sum()
    };
    (bytes(false) + bytes(true) / part + BESIDE) & !255
}

/// What came of the questions.
#[derive(Debug, Default)]
struct Asked {
    same: usize,
    hits: u64,
    missed: u64,
    hosted: u64,
    /// Graphs instantiated and launched.
    made: u64,
    launched: u64,
}

/// Asks a model in a budget what the host is asked, and ends the engine.
async fn ask(
    file: &str,
    budget: impl Fn(&Arc<LoadedModel>) -> u64,
    cpu_compute: When,
    keeps: Option<Budget>,
) -> Asked {
    let host = requests::engine(Budget::Bytes(64 << 20));
    let on_host = load(&host, file, "m").await;
    let runtime = Runtime::new();
    let config = gpu_config(&runtime);
    let split = runtime
        .start_split(config, budget(&on_host), (cpu_compute, keeps))
        .unwrap();
    let on_split = load(&split, file, "m").await;
    let mut asked = Asked::default();
    for (question, _) in questions(QUESTIONS) {
        let (_, expected, _) = run(&host, chat(&on_host, &question)).await;
        let (_, got, summary) = run(&split, chat(&on_split, &question)).await;
        asked.same += usize::from(got == expected);
        asked.hits += summary.cache.hits;
        asked.missed += summary.cache.misses;
        asked.hosted += summary.cache.host_bytes;
    }
    asked.made = runtime.calls("hipGraphInstantiate");
    asked.launched = runtime.calls("hipGraphLaunch");
    println!("{file}, {cpu_compute:?}, of {QUESTIONS}: {asked:?}");
    drop(on_split);
    split.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
    assert!(asked.missed > 0, "nothing was missing");
    assert!(asked.same + 1 >= QUESTIONS, "{} of {QUESTIONS}", asked.same);
    asked
}

async fn answers(file: &str, part: u64, cpu_compute: When, keeps: Option<Budget>) {
    let asked = ask(file, |model| budget(model, part), cpu_compute, keeps).await;
    assert!(asked.hosted > 0, "the host did nothing");
}

#[tokio::test]
async fn feed_forwards_are_computed_on_the_host() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        answers(file, 3, When::Always, None).await;
        answers(file, 3, When::Always, ROOMY).await;
    }
}

#[tokio::test]
async fn experts_are_computed_on_the_host() {
    let file = "tiny-qwen3moe-Q4_K_M.gguf";
    answers(file, 4, When::Always, None).await;
    // Some of a layer's experts are kept, others not.
    answers(file, 4, When::Always, Some(Budget::Bytes(2 << 20))).await;
}

#[tokio::test]
async fn link_and_host_share_what_is_missing() {
    answers("tiny-qwen3moe-Q4_K_M.gguf", 4, When::Auto, ROOMY).await;
}

/// Where experts come and go between steps no pass is one recording, but most of its steps are.
#[tokio::test]
async fn steps_between_experts_are_replayed() {
    let host = requests::engine(Budget::Bytes(64 << 20));
    let file = "tiny-qwen3moe-Q4_K_M.gguf";
    let on_host = load(&host, file, "m").await;
    let runtime = Runtime::new();
    let config = gpu_config(&runtime);
    let engine = runtime
        .start_split(config, budget(&on_host, 4), (When::Never, None))
        .unwrap();
    let model = load(&engine, file, "m").await;
    let (mut same, mut tokens) = (0, 0);
    for (question, _) in questions(4) {
        let (_, expected, _) = run(&host, chat(&on_host, &question)).await;
        let (_, got, summary) = run(&engine, chat(&model, &question)).await;
        same += usize::from(got == expected);
        tokens += u64::from(summary.generated_tokens);
        assert!(summary.cache.misses > 0, "{summary:?}");
    }
    assert!(same >= 3, "{same} of 4");
    let calls = |call| runtime.calls(call);
    let (made, launched) = (calls("hipGraphInstantiate"), calls("hipGraphLaunch"));
    let layers = model.model().info().n_layer as u64;
    assert!(made >= layers, "{made} recordings");
    assert!(launched > 4 * made, "{launched} replays of {made}");
    // What lies between two layers' experts is one of them, whatever number of steps it is.
    assert!(
        launched < 2 * layers * tokens,
        "{launched} replays for {tokens} tokens"
    );
    // Nor are events made for every upload.
    let (events, uploads) = (calls("hipEventCreateWithFlags"), {
        let (question, _) = questions(1).remove(0);
        let (_, _, summary) = run(&engine, chat(&model, &question)).await;
        summary.cache.misses
    });
    let more = calls("hipEventCreateWithFlags") - events;
    assert!(
        uploads > 64 && more < 8,
        "{more} events for {uploads} uploads"
    );
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// What stays on the card between two segments that come and go is one recording, whatever
/// number of segments it is.
#[tokio::test]
async fn steps_between_answers_are_replayed_at_once() {
    let some = |model: &Arc<LoadedModel>| budget(model, 1) - BESIDE;
    let asked = ask("tiny-llama-Q4_K_M.gguf", some, When::Auto, None).await;
    assert!(asked.launched > 2 * asked.made, "{asked:?}");
    assert!(3 * asked.launched < 2 * asked.hits, "{asked:?}");
}

#[tokio::test]
async fn what_fits_is_uploaded_whatever_the_host_could_do() {
    let runtime = Runtime::new();
    let config = gpu_config(&runtime);
    let engine = runtime
        .start_split(config, 64 << 20, (When::Auto, ROOMY))
        .unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let (question, _) = questions(1).remove(0);
    let (_, _, summary) = run(&engine, chat(&model, &question)).await;
    assert!(
        summary.cache.misses > 0 && summary.cache.host_bytes == 0,
        "{summary:?}"
    );
    drop(model);
    engine.end().unwrap();
}

#[tokio::test]
async fn a_file_that_is_cut_short_fails_the_request_that_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::copy(requests::fixture("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    let runtime = Runtime::new();
    let other = requests::engine(Budget::Bytes(64 << 20));
    let on_other = load(&other, "tiny-llama-Q4_K_M.gguf", "m").await;
    let config = gpu_config(&runtime);
    let engine = runtime
        .start_split(config, budget(&on_other, 3), (When::Always, None))
        .unwrap();
    let model = fake::load(&engine, &path, "m").await.unwrap();
    let whole = load(&engine, "tiny-llama-Q4_K_M.gguf", "whole").await;
    let (question, _) = questions(1).remove(0);
    let (_, expected, _) = run(&engine, chat(&whole, &question)).await;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(64 << 10).unwrap();
    let error = fake::run(&engine, chat(&model, &question))
        .await
        .unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains("m.gguf"), "{error}");
    let (_, again, _) = run(&engine, chat(&whole, &question)).await;
    assert_eq!(again, expected);
    drop((model, whole));
    engine.end().unwrap();
}
