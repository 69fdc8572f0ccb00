//! Encoders against what their authors' code computed (tests/fixtures/encoders, made by
//! tests/python/make_encoders.py).

use std::ops::Deref;
use std::sync::Arc;

use futures_util::future::join_all;
use rocmforge_engine::api::{Asker, Budget, EmbedRequest, GenerateEvent, Pooling, ScoreRequest};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};
use serde_json::Value;

use crate::embeddings::embed;
use crate::fake;
use crate::requests::{engine, fixture, greedy, load};

const NAMES: [&str; 15] = [
    "bert",
    "bert-cased",
    "bert-rank",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v2-code",
    "jina-bert-v3",
    "llama-embed",
    "modern-bert",
    "modern-bert-rank",
    "nomic-bert",
    "nomic-bert-moe",
    "xlm-roberta",
    "xlm-roberta-rank",
];

const POOLINGS: [(Pooling, &str); 3] = [
    (Pooling::Mean, "mean"),
    (Pooling::First, "first"),
    (Pooling::Last, "last"),
];

fn golden(name: &str) -> Value {
    let golden = std::fs::read(fixture(&format!("encoders/{name}.json"))).unwrap();
    serde_json::from_slice(&golden).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    let values = value.as_array().unwrap().iter();
    values.map(|v| v.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    floats(value).into_iter().map(|id| id as u32).collect()
}

/// A vector of length 1.
fn normed(values: &[f32]) -> Vec<f32> {
    let length = values.iter().map(|v| v * v).sum::<f32>().sqrt();
    values.iter().map(|v| v / length).collect()
}

async fn classes(engine: &EngineHandle, model: &Arc<LoadedModel>, ids: Vec<u32>) -> Vec<f32> {
    let pooling = match model.model().hparams().arch {
        "modern-bert" => Pooling::Mean,
        _ => Pooling::First,
    };
    let request = EmbedRequest {
        model: Arc::clone(model),
        ids,
        pooling,
        classes: true,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    engine.embed(request).await.unwrap().values
}

/// All embeddings of a model, asked for at once, and one after the other's end its classes.
async fn compare(engine: &EngineHandle, model: &Arc<LoadedModel>, name: &str) {
    let golden = golden(name);
    let cases = golden["cases"].as_array().unwrap();
    let wanted = cases.iter().flat_map(|c| POOLINGS.map(|p| (c, p)));
    let found = wanted.clone().map(|(case, (pooling, _))| async move {
        normed(&embed(engine, model, &ids(&case["ids"]), pooling).await)
    });
    let found = join_all(found).await;
    for ((case, (_, pooling)), found) in wanted.zip(found) {
        let expected = floats(&case[pooling]);
        let what = format!("{name}, {pooling}, {}", case["text"]);
        assert_eq!(found.len(), expected.len(), "{what}");
        let cosine: f32 = found.iter().zip(&expected).map(|(a, b)| a * b).sum();
        assert!(cosine > 0.9999, "{what}: {cosine}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 2e-3,
                "{what}: {found} {expected}"
            );
        }
    }
    compare_each_token(engine, model, cases, name).await;
    for pair in golden["pairs"].as_array().unwrap() {
        let (expected, found) = (
            floats(&pair["logits"]),
            classes(engine, model, ids(&pair["ids"])).await,
        );
        assert_eq!(found.len(), expected.len(), "{name}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 0.01,
                "{name}: {found} {expected}"
            );
        }
    }
}

/// The vectors of all tokens, texts side by side: the first and the last are those of the poolings,
/// and so is their mean.
async fn compare_each_token(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    cases: &[Value],
    name: &str,
) {
    let found = cases
        .iter()
        .map(|case| async { embed(engine, model, &ids(&case["ids"]), Pooling::None).await });
    for (case, found) in cases.iter().zip(join_all(found).await) {
        let n = case["ids"].as_array().unwrap().len();
        let width = floats(&case["mean"]).len();
        assert_eq!(found.len(), n * width, "{name}");
        let rows: Vec<&[f32]> = found.chunks_exact(width).collect();
        let mean: Vec<f32> = (0..width)
            .map(|i| rows.iter().map(|row| row[i]).sum::<f32>() / n as f32)
            .collect();
        for (row, pooling) in [(rows[0], "first"), (rows[n - 1], "last"), (&mean, "mean")] {
            for (found, expected) in normed(row).iter().zip(floats(&case[pooling])) {
                let what = format!("{name}, {pooling}, {}", case["text"]);
                assert!(
                    (found - expected).abs() < 2e-3,
                    "{what}: {found} {expected}"
                );
            }
        }
    }
}

async fn all<E: Deref<Target = EngineHandle>>(start: impl Fn(u64) -> E) {
    for name in NAMES {
        let file = format!("encoders/{name}.gguf");
        let bytes = std::fs::metadata(fixture(&file)).unwrap().len();
        for budget in [64 << 20, bytes / 3 + (1 << 20)] {
            let engine = start(budget);
            let model = load(&engine, &file, name).await;
            compare(&engine, &model, name).await;
            assert_eq!(engine.snapshot().cache.kv_bytes, 0, "{name}");
        }
    }
}

#[tokio::test]
async fn encoders_find_what_their_authors_code_finds() {
    all(|budget| Box::new(engine(Budget::Bytes(budget)))).await;
}

#[tokio::test]
async fn encoders_find_it_through_the_hip_path() {
    let runtime = fake::Runtime::new();
    all(|budget| runtime.start(budget).unwrap()).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

/// Passes have fewer rows than the text; they are as long as it must be.
#[tokio::test]
async fn a_text_is_whole_whatever_the_length_of_passes() {
    for chunk in [1, 7, 19] {
        let started = start(EngineConfig {
            budget: Budget::Bytes(64 << 20),
            prefill_chunk: std::num::NonZeroUsize::new(chunk),
            ..EngineConfig::default()
        });
        let engine = started.unwrap().0;
        let model = load(&engine, "encoders/bert.gguf", "m").await;
        compare(&engine, &model, "bert").await;
    }
}

#[tokio::test]
async fn an_encoder_is_not_asked_for_text() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "encoders/bert.gguf", "m").await;
    let request = greedy(&model, vec![2, 5, 3], 5);
    let mut events = engine.generate(request).unwrap();
    let Some(GenerateEvent::Failed(error)) = events.next().await else {
        panic!("an encoder generates");
    };
    assert!(
        error.to_string().contains("'m' is an encoder (bert)"),
        "{error}"
    );
    let request = ScoreRequest {
        model,
        ids: vec![2, 5, 3],
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let error = engine.score(request).await.unwrap_err();
    assert!(
        error.to_string().contains("ask a model that generates"),
        "{error}"
    );
}

/// A long job of embeddings and a text of another model go on side by side.
#[tokio::test]
async fn a_long_job_of_embeddings_does_not_hold_up_a_text() {
    let engine = engine(Budget::Bytes(64 << 20));
    let encoder = load(&engine, "encoders/bert.gguf", "e").await;
    let model = load(&engine, "tiny-qwen3-Q8_0.gguf", "m").await;
    let golden = golden("bert");
    let case = &golden["cases"][2];
    let (long, expected) = (ids(&case["ids"]), floats(&case["mean"]));
    let jobs = (0..40).map(|_| embed(&engine, &encoder, &long, Pooling::Mean));
    let text = async {
        let mut events = engine.generate(greedy(&model, vec![5; 20], 20)).unwrap();
        let mut tokens = 0;
        while let Some(event) = events.next().await {
            match event {
                GenerateEvent::Piece { .. } => tokens += 1,
                GenerateEvent::Failed(error) => panic!("{error}"),
                GenerateEvent::Done(_) => break,
            }
        }
        tokens
    };
    let (vectors, tokens) = tokio::join!(join_all(jobs), text);
    assert!(tokens > 0);
    let vectors: Vec<Vec<f32>> = vectors;
    for vector in vectors {
        let cosine: f32 = normed(&vector)
            .iter()
            .zip(&expected)
            .map(|(a, b)| a * b)
            .sum();
        assert!(cosine > 0.9999, "{cosine}");
    }
}
