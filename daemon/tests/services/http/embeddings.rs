//! Embeddings in the dialects that have them.

use rocmforged::End;
use serde_json::{Value, json};

use super::client::{HttpDaemon, LLAMA};

fn vector(value: &Value) -> Vec<f64> {
    let values = value.as_array().unwrap();
    values.iter().map(|v| v.as_f64().unwrap()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[tokio::test]
async fn texts_become_vectors_of_length_1_each_in_its_place() {
    let http = HttpDaemon::start().await;
    let texts = ["The whale sang.", "The whale sang a song.", "42 - 30 = 12."];
    let reply = http
        .post("/v1/embeddings", &json!({"model": LLAMA, "input": texts}))
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    assert_eq!(whole["object"], "list");
    let data = whole["data"].as_array().unwrap();
    let vectors: Vec<Vec<f64>> = data.iter().map(|d| vector(&d["embedding"])).collect();
    for (i, (one, found)) in data.iter().zip(&vectors).enumerate() {
        assert_eq!(one["object"], "embedding");
        assert_eq!(one["index"].as_u64(), Some(i as u64));
        assert!((dot(found, found) - 1.0).abs() < 1e-5);
    }
    let tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 10);
    assert_eq!(whole["usage"]["total_tokens"].as_u64(), Some(tokens));

    // A text alone, its ids, the first elements of it, and as bytes.
    let ask = async |input: Value| {
        let asked = json!({"model": LLAMA, "input": input});
        let reply = http.post("/v1/embeddings", &asked).await.json();
        vector(&reply["data"][0]["embedding"])
    };
    assert_eq!(ask(texts[2].into()).await, vectors[2]);
    let tokenized = json!({"model": LLAMA, "content": texts[2], "add_special": true});
    let ids = http.post("/tokenize", &tokenized).await.json()["tokens"].clone();
    assert_eq!(ask(ids.clone()).await, vectors[2]);
    assert_eq!(ask(json!([ids])).await, vectors[2]);
    let short = json!({"model": LLAMA, "input": texts[2], "dimensions": 5});
    let short = http.post("/v1/embeddings", &short).await.json();
    let short = vector(&short["data"][0]["embedding"]);
    let length = dot(&vectors[2][..5], &vectors[2][..5]).sqrt();
    for (found, all) in short.iter().zip(&vectors[2]) {
        assert!((found - all / length).abs() < 1e-5);
    }
    assert_eq!(short.len(), 5);
    let bytes = json!({"model": LLAMA, "input": texts[2], "encoding_format": "base64"});
    let bytes = http.post("/v1/embeddings", &bytes).await.json();
    let text = bytes["data"][0]["embedding"].as_str().unwrap();
    assert_eq!(text.len(), (vectors[2].len() * 4).div_ceil(3) * 4);

    // Ollama's.
    let many = json!({"model": LLAMA, "input": texts});
    let many = http.post("/api/embed", &many).await.json();
    for (found, expected) in many["embeddings"].as_array().unwrap().iter().zip(&vectors) {
        assert_eq!(vector(found), *expected);
    }
    assert_eq!(many["prompt_eval_count"].as_u64(), Some(tokens));
    let one = json!({"model": LLAMA, "prompt": texts[1]});
    let one = http.post("/api/embeddings", &one).await.json();
    assert_eq!(vector(&one["embedding"]), vectors[1]);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn what_cannot_be_embedded_is_refused_by_its_field() {
    let http = HttpDaemon::start().await;
    let long = "whale ".repeat(5000);
    let many = vec!["a"; 2049];
    for (asked, mentions) in [
        (json!({"model": LLAMA}), "input"),
        (json!({"model": LLAMA, "input": []}), "from 1 to 2048"),
        (json!({"model": LLAMA, "input": many}), "from 1 to 2048"),
        (json!({"model": LLAMA, "input": [1, "a"]}), "list"),
        (json!({"model": LLAMA, "input": [1, -2]}), "ids"),
        (json!({"model": LLAMA, "input": [99_999_999]}), "input"),
        (
            json!({"model": LLAMA, "input": "a", "dimensions": 0}),
            "dimensions",
        ),
        (
            json!({"model": LLAMA, "input": "a", "dimensions": 100_000}),
            "dimensions",
        ),
        (
            json!({"model": LLAMA, "input": "a", "encoding_format": "int8"}),
            "base64",
        ),
        (json!({"model": LLAMA, "input": ["a", long]}), "parts"),
        (json!({"model": "ghost", "input": "a"}), "ghost"),
    ] {
        let reply = http.post("/v1/embeddings", &asked).await;
        assert!(matches!(reply.status, 400 | 404), "{asked}: {reply:?}");
        let message = reply.json()["error"].to_string();
        assert!(message.contains(mentions), "{asked}: {message}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
