//! Whole models through the HIP path, without a card: a fake runtime carries the kernels out with the host's own code.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod fake;
mod requests;

use std::sync::Arc;

use fake::Runtime;
use requests::{chat, load, questions, run};
use rocmforge_engine::api::{Budget, ScoreRequest};
use rocmforge_engine::{EngineHandle, LoadedModel};
use rocmforge_fake_hip::Live;

/// Two tokens whose logits differ by less than this are equally good: what 8-bit inputs and f16 pages may move.
const TOLERANCE: f32 = 0.05;

/// Budget that holds all of a fixture.
const ROOMY: u64 = 24 << 20;

/// How much worse the host finds the first token that differs; `None` if none does.
async fn gap(
    host: &EngineHandle,
    model: &Arc<LoadedModel>,
    prompt: &[u32],
    expected: &[u32],
    got: &[u32],
) -> Option<f32> {
    let end = model.tokenizer().end_of_generation()[0];
    let at = |ids: &[u32], i: usize| ids.get(i).copied().unwrap_or(end);
    let first = (0..expected.len().max(got.len())).find(|&i| expected.get(i) != got.get(i))?;
    let mut ids = [prompt, &expected[..first]].concat();
    let mut logprob = [0.0; 2];
    for (to, next) in logprob
        .iter_mut()
        .zip([at(expected, first), at(got, first)])
    {
        ids.push(next);
        let request = ScoreRequest {
            model: Arc::clone(model),
            ids: ids.clone(),
            top_n: 0,
            deadline: None,
        };
        *to = host
            .score(request)
            .await
            .unwrap()
            .tokens
            .last()
            .unwrap()
            .logprob;
        ids.pop();
    }
    Some(logprob[0] - logprob[1])
}

/// The exam, with the whole model on the device and with a third of its layers: the host's tokens, but where two are
/// equally good.
async fn exam(file: &str) {
    let runtime = Runtime::new();
    let host = requests::engine(Budget::Bytes(64 << 20));
    let on_host = load(&host, file, "m").await;
    let device = runtime.start(ROOMY).unwrap();
    let on_device = load(&device, file, "m").await;
    assert_eq!(device.snapshot().device.kind, "hip");

    let info = on_host.model().info();
    let layers = info.segments.iter().filter(|s| s.name.starts_with("blk."));
    let (n_layer, layer) = (layers.clone().count() as u64, layers.map(|s| s.bytes).max());
    let others: u64 = info
        .segments
        .iter()
        .filter(|s| !s.name.starts_with("blk."))
        .map(|s| s.bytes)
        .sum();
    let third = others + (n_layer / 3) * layer.unwrap();
    // Beside the weights: KV pages, scratch, and what the device keeps for itself.
    let small = runtime.start(third + (2 << 20)).unwrap();
    let on_small = load(&small, file, "m").await;

    let (mut right, mut close, mut asked) = (0, 0, 0);
    for (question, answer) in questions(120) {
        let request = chat(&on_host, &question);
        let prompt = request.prompt.clone();
        let (_, expected, _) = run(&host, request).await;
        let (text, ids, _) = run(&device, chat(&on_device, &question)).await;
        let (_, ids_small, summary) = run(&small, chat(&on_small, &question)).await;
        assert!(summary.cache.misses > 0, "nothing was missing: {summary:?}");
        assert_eq!(
            ids, ids_small,
            "{file}: a small budget changes the text: {question}"
        );
        asked += 1;
        right += usize::from(text.trim() == answer);
        if let Some(gap) = gap(&host, &on_host, &prompt, &expected, &ids).await {
            assert!(
                gap.abs() < TOLERANCE,
                "{file}: {text:?} is no equal of the host's: {gap} to {question}"
            );
            println!("{file}: a token as good as the host's, by {gap}: {question}");
            close += 1;
        }
    }
    let cache = small.snapshot().cache;
    println!(
        "{file}: {right} of {asked} right, {close} with a token as good as the host's; a third of the layers: {} evictions",
        cache.evictions
    );
    assert!(right + 2 >= asked, "{right} of {asked}");
    assert!(close * 20 <= asked, "{close} of {asked} differ");
    assert!(cache.evictions > 0);
    let graphs = runtime.live().graphs;
    assert!(
        graphs > 0,
        "decode steps are recorded where everything is resident"
    );
    assert!(device.snapshot().device.allocations < 10);
    device.end().unwrap();
    small.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn tiny_llama_says_what_it_says_on_the_host() {
    exam("tiny-llama-Q4_K_M.gguf").await;
}

#[tokio::test]
async fn tiny_qwen3_says_what_it_says_on_the_host() {
    exam("tiny-qwen3-Q8_0.gguf").await;
}
