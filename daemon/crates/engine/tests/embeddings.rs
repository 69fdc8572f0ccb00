//! Embeddings: the hidden states that logits are computed from, pooled.

use crate::fake;
use std::num::NonZeroUsize;
use std::sync::Arc;

use half::f16;
use rocmforge_engine::api::{Asker, Budget, EmbedRequest, Pooling, ScoreRequest, TOP_N_MAX};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};
use rocmforge_gguf::Gguf;

use crate::requests::{chat, engine, fixture, load, run};

const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

pub(crate) async fn embed(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    ids: &[u32],
    pooling: Pooling,
) -> Vec<f32> {
    let request = EmbedRequest {
        model: Arc::clone(model),
        ids: ids.to_vec(),
        pooling,
        classes: false,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    engine.embed(request).await.unwrap().values
}

fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| 5 + (i * 31 + i * i) % 200).collect()
}

/// The rows of a Q8_0 matrix of `width` columns times `x`.
fn times_q8_0(matrix: &[u8], width: usize, x: &[f32]) -> Vec<f64> {
    let row = |row: &[u8]| {
        let blocks = row.chunks_exact(34).zip(x.chunks_exact(32));
        blocks
            .map(|(block, x)| {
                let scale = f64::from(f16::from_le_bytes([block[0], block[1]]));
                let codes = block[2..].iter().map(|&code| f64::from(code as i8));
                scale * codes.zip(x).map(|(c, &x)| c * f64::from(x)).sum::<f64>()
            })
            .sum()
    };
    matrix.chunks_exact(width / 32 * 34).map(row).collect()
}

/// The output matrix, read here from the file, makes of the last state what a scoring says
/// of the token that follows.
#[tokio::test]
async fn the_output_matrix_makes_the_models_own_logits_of_it() {
    let bytes = std::fs::read(fixture(QWEN)).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let matrix = gguf.tensor("output.weight");
    let matrix = matrix.or(gguf.tensor("token_embd.weight")).unwrap();
    let width = matrix.dims[0] as usize;
    let matrix = &bytes[matrix.offset as usize..][..matrix.bytes as usize];

    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, QWEN, "m").await;
    for n in [1, 7, 40] {
        let state = embed(&engine, &model, &ids(n), Pooling::Last).await;
        assert_eq!(state.len(), width);
        let logits = times_q8_0(matrix, width, &state);
        let most = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - most).exp()).sum();
        let scores = engine.score(ScoreRequest {
            model: Arc::clone(&model),
            ids: [ids(n), vec![9]].concat(),
            top_n: TOP_N_MAX,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        });
        let scores = scores.await.unwrap();
        for &(id, logprob) in &scores.tokens.last().unwrap().top {
            let here = logits[id as usize] - most - sum.ln();
            let difference = (here - f64::from(logprob)).abs();
            // The host's product rounds its input to 8 bits.
            assert!(difference < 0.1, "{n} tokens, {id}: {here}, {logprob}");
        }
    }
}

/// Means of beginnings, lengths of passes, budgets and company: the same states, bitwise.
#[tokio::test]
async fn states_do_not_depend_on_how_they_come() {
    for name in [
        QWEN,
        "arch/gemma3.gguf",
        "arch/qwen35.gguf",
        "arch/qwen3moe.gguf",
    ] {
        let roomy = engine(Budget::Bytes(64 << 20));
        let model = load(&roomy, name, "m").await;
        let text = ids(45);
        let mean = embed(&roomy, &model, &text, Pooling::Mean).await;
        let each = embed(&roomy, &model, &text, Pooling::None).await;
        assert_eq!(each.len(), text.len() * mean.len(), "{name}");
        let mut sum = vec![0.0; mean.len()];
        for n in 1..=text.len() {
            let last = embed(&roomy, &model, &text[..n], Pooling::Last).await;
            let own = &each[(n - 1) * mean.len()..][..mean.len()];
            assert_eq!(own, last, "{name}, token {n}");
            sum.iter_mut().zip(&last).for_each(|(s, l)| *s += l);
            if n == 1 {
                let first = embed(&roomy, &model, &text, Pooling::First).await;
                assert_eq!(first, last, "{name}");
            }
        }
        let expected: Vec<f32> = sum.iter().map(|s| s / text.len() as f32).collect();
        for (found, expected) in mean.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-3,
                "{name}: {found}, {expected}"
            );
        }
        for (budget, chunk) in [(64 << 20, 1), (64 << 20, 19), (3 << 20, 512)] {
            let config = EngineConfig {
                budget: Budget::Bytes(budget),
                prefill_chunk: NonZeroUsize::new(chunk),
                ..EngineConfig::default()
            };
            let other = start(config).unwrap().0;
            let model = load(&other, name, "m").await;
            let found = embed(&other, &model, &text, Pooling::Mean).await;
            assert_eq!(found, mean, "{name}: {budget} bytes, passes of {chunk}");
            let found = embed(&other, &model, &text, Pooling::None).await;
            assert_eq!(found, each, "{name}: {budget} bytes, passes of {chunk}");
            assert_eq!(other.snapshot().cache.kv_bytes, 0);
        }
    }
}

#[tokio::test]
async fn embeddings_share_passes_with_texts() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, QWEN, "m").await;
    let question = "Name the capital city of Turkey.";
    let (text, _, _) = run(&engine, chat(&model, question)).await;
    let ids = ids(60);
    let alone = embed(&engine, &model, &ids, Pooling::Mean).await;
    for _ in 0..5 {
        let generated = run(&engine, chat(&model, question));
        let first = embed(&engine, &model, &ids, Pooling::Mean);
        let second = embed(&engine, &model, &ids, Pooling::Mean);
        let (generated, first, second) = tokio::join!(generated, first, second);
        assert_eq!(generated.0, text);
        assert_eq!((&first, &second), (&alone, &alone));
    }
}

#[tokio::test]
async fn a_card_finds_nearly_the_same() {
    let host = engine(Budget::Bytes(64 << 20));
    let runtime = fake::Runtime::new();
    let card = runtime.start(64 << 20).unwrap();
    for name in [QWEN, "arch/qwen35.gguf", "arch/gemma3.gguf"] {
        let (there, model) = (load(&host, name, "m").await, load(&card, name, "m").await);
        for pooling in [Pooling::Mean, Pooling::Last, Pooling::First, Pooling::None] {
            let expected = embed(&host, &there, &ids(45), pooling).await;
            let found = embed(&card, &model, &ids(45), pooling).await;
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                let products = a.iter().zip(b).map(|(a, b)| f64::from(a * b));
                products.sum()
            };
            let norms = dot(&expected, &expected) * dot(&found, &found);
            let cosine = dot(&expected, &found) / norms.sqrt();
            assert!(cosine > 0.999, "{name}, {pooling:?}: {cosine}");
        }
        for engine in [&host, &*card] {
            engine.unload("m", false).await.unwrap();
        }
    }
}
