//! LoRA adapters against their authors' code: log-probabilities by peft and transformers, on the
//! CPU and on the HIP path (`tests/python/make_adapters.py`).

use std::path::PathBuf;
use std::sync::Arc;

use rocmforge_engine::api::{Asker, Budget, ScoreRequest};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, start};
use rocmforge_ops::KvType;
use serde_json::Value;

use crate::adapters::load_with;
use crate::fake;
use crate::requests::fixture;

/// What f32 products in another order may move a log-probability by.
const TOLERANCE: f64 = 1e-3;

/// What keys and values in f16 may, and on GPUs inputs of products.
const TOLERANCE_F16: f64 = 0.02;

/// The model whose adapters these are, and their files.
fn files(name: &str) -> (PathBuf, [PathBuf; 2]) {
    let adapter = |which| fixture(&format!("adapters/{name}-{which}.gguf"));
    let model = fixture(&format!("arch/{name}.gguf"));
    (model, ["all", "some"].map(adapter))
}

/// The largest difference from the goldens, and what they are apart from the model without
/// adapters.
async fn compare(engine: &EngineHandle, model: &Arc<LoadedModel>, name: &str) -> (f64, f64) {
    let golden = std::fs::read(fixture(&format!("adapters/{name}.json"))).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(
        cases.len(),
        9,
        "three texts with each adapter and with both"
    );
    let numbers = |value: &Value| -> Vec<f64> {
        let list = value.as_array().unwrap().iter();
        list.map(|v| v.as_f64().unwrap()).collect()
    };
    let score = async |ids: &[u32], scales: &[f32]| -> Vec<f64> {
        let request = ScoreRequest {
            model: Arc::clone(model),
            ids: ids.to_vec(),
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: model.adapters().at(scales).unwrap(),
        };
        let scores = engine.score(request).await.unwrap();
        scores.tokens.iter().map(|t| f64::from(t.logprob)).collect()
    };
    let apart = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        let pairs = a.iter().zip(b);
        pairs.fold(0f64, |worst, (a, b)| match (a - b).abs() {
            off if off.is_nan() => f64::INFINITY,
            off => worst.max(off),
        })
    };
    let (mut worst, mut moved) = (0f64, f64::INFINITY);
    for case in cases {
        let ids: Vec<u32> = numbers(&case["ids"]).iter().map(|id| *id as u32).collect();
        let scales: Vec<f32> = numbers(&case["scales"]).iter().map(|s| *s as f32).collect();
        let expected = numbers(&case["next_logprobs"]);
        worst = worst.max(apart(&score(&ids, &scales).await, &expected));
        moved = moved.min(apart(&score(&ids, &[0.0, 0.0]).await, &expected));
    }
    (worst, moved)
}

#[tokio::test]
async fn adapters_are_what_their_authors_code_makes_of_them() {
    let host = |kv_type| {
        let started = start(EngineConfig {
            budget: Budget::Bytes(64 << 20),
            kv_type,
            ..EngineConfig::default()
        });
        started.unwrap().0
    };
    let (exact, usual) = (host(Some(KvType::F32)), host(None));
    let runtime = fake::Runtime::new();
    let card = runtime.start(64 << 20).unwrap();
    let (path, adapters) = files("gemma2");
    for (engine, tolerance) in [
        (&exact, TOLERANCE),
        (&usual, TOLERANCE_F16),
        (&*card, TOLERANCE_F16),
    ] {
        let model = load_with(engine, &path, "m", &adapters).await;
        let (off, moved) = compare(engine, &model, "gemma2").await;
        println!("{off} off, moved by {moved}");
        assert!(off <= tolerance, "{off} off");
        assert!(moved > 0.1, "adapters move a text by {moved}");
    }
}
