//! Encoders on the routes that take them: vectors and scores are those of their authors' code
//! (tests/fixtures/encoders).

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};

use super::client::HttpDaemon;
use crate::daemon::{Daemon, fixtures};

fn golden(name: &str) -> Value {
    let path = fixtures().join(format!("encoders/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    let values = value.as_array().unwrap();
    values.iter().map(|v| v.as_f64().unwrap()).collect()
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() < 2e-3,
            "{what}: {found} {expected}"
        );
    }
}

#[tokio::test]
async fn texts_become_the_vectors_of_the_authors_code() {
    let http = HttpDaemon::start().await;
    for (name, pooling) in [
        ("bert", "mean"),
        ("bert-cased", "mean"),
        ("xlm-roberta", "first"),
    ] {
        let golden = golden(name);
        let cases = golden["cases"].as_array().unwrap();
        let texts: Vec<&Value> = cases.iter().map(|case| &case["text"]).collect();
        let ids: Vec<&Value> = cases.iter().map(|case| &case["ids"]).collect();
        for input in [json!(texts), json!(ids)] {
            let asked = json!({"model": name, "input": input});
            let reply = http.post("/v1/embeddings", &asked).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let reply = reply.json();
            for (found, case) in reply["data"].as_array().unwrap().iter().zip(cases) {
                let what = format!("{name}: {}", case["text"]);
                assert_near(&floats(&found["embedding"]), &floats(&case[pooling]), &what);
            }
            let tokens: usize = ids.iter().map(|ids| ids.as_array().unwrap().len()).sum();
            assert_eq!(reply["usage"]["prompt_tokens"], tokens, "{name}");
        }
        // The first elements are a vector of their own.
        let asked = json!({"model": name, "input": texts[0], "dimensions": 8});
        let short = http.post("/v1/embeddings", &asked).await.json();
        let first = &floats(&cases[0][pooling])[..8];
        let length = first.iter().map(|v| v * v).sum::<f64>().sqrt();
        let expected: Vec<f64> = first.iter().map(|v| v / length).collect();
        assert_near(&floats(&short["data"][0]["embedding"]), &expected, name);
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_text_that_is_longer_than_the_model_is_refused_or_cut() {
    let http = HttpDaemon::start().await;
    let long = "embedding models map a text to a vector ".repeat(20);
    let mut asked = json!({"model": "bert", "input": long});
    let reply = http.post("/v1/embeddings", &asked).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    let message = reply.json()["error"]["message"].to_string();
    assert!(
        message.contains("maximum context length is 96 tokens"),
        "{message}"
    );
    assert!(message.contains("truncate"), "{message}");
    asked["truncate"] = true.into();
    let reply = http.post("/v1/embeddings", &asked).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json()["usage"]["prompt_tokens"], 96);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn documents_are_ranked_by_the_classification_of_the_authors_code() {
    let http = HttpDaemon::start().await;
    for name in ["bert-rank", "xlm-roberta-rank"] {
        for pair in golden(name)["pairs"].as_array().unwrap() {
            let logit = pair["logits"][0].as_f64().unwrap();
            let mut asked = json!({
                "model": name,
                "query": pair["query"],
                "documents": [pair["document"]],
            });
            let reply = http.post("/v1/rerank", &asked).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let reply = reply.json();
            let score = reply["results"][0]["relevance_score"].as_f64().unwrap();
            assert!(
                (score - 1.0 / (1.0 + (-logit).exp())).abs() < 0.01,
                "{name}: {score}"
            );
            let n_ids = pair["ids"].as_array().unwrap().len();
            assert_eq!(reply["usage"]["prompt_tokens"], n_ids, "{name}");
            asked["raw_scores"] = true.into();
            let raw = http.post("/v1/rerank", &asked).await.json();
            let raw = raw["results"][0]["relevance_score"].as_f64().unwrap();
            assert!((raw - logit).abs() < 0.01, "{name}: {raw} {logit}");
        }
    }
    let documents = ["the river rose", "a kettle", "the cat sleeps"];
    let asked = json!({"model": "bert-rank", "query": "a", "documents": documents, "top_n": 2});
    let reply = http.post("/v1/rerank", &asked).await.json();
    let scores: Vec<f64> = reply["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(score)
        .collect();
    assert_eq!(scores.len(), 2);
    assert!(scores[0] >= scores[1]);
    assert_eq!(http.stop().await, End::Drained);
}

fn score(result: &Value) -> f64 {
    result["relevance_score"].as_f64().unwrap()
}

/// Each use of a model that it is not for is refused with what it is for.
#[tokio::test]
async fn what_a_model_is_for_is_told_and_held_to() {
    let http = HttpDaemon::start().await;
    let chat = json!({"model": "bert", "messages": [{"role": "user", "content": "Hi"}]});
    let completion = json!({"model": "bert", "prompt": "Hi", "max_tokens": 2});
    for (route, asked, mentions) in [
        ("/v1/chat/completions", chat, "is an encoder (bert)"),
        ("/v1/completions", completion, "is an encoder (bert)"),
        (
            "/v1/embeddings",
            json!({"model": "bert-rank", "input": "a"}),
            "use /v1/rerank",
        ),
        (
            "/v1/rerank",
            json!({"model": "bert", "query": "a", "documents": ["b"]}),
            "is no reranker",
        ),
    ] {
        let reply = http.post(route, &asked).await;
        assert!((400..502).contains(&reply.status), "{route}: {reply:?}");
        assert!(reply.text.contains(mentions), "{route}: {}", reply.text);
    }
    for (name, expected) in [
        ("bert", "embedding"),
        ("bert-rank", "rerank"),
        ("tiny-llama-Q4_K_M", "completion"),
    ] {
        let shown = http.post("/api/show", &json!({"model": name})).await.json();
        assert_eq!(shown["capabilities"][0], expected, "{name}");
        let props = http.get(&format!("/props?model={name}")).await.json();
        assert_eq!(props["capabilities"][0], expected, "{name}");
        let models = http.get("/v1/models").await.json();
        let mut models = models["data"].as_array().unwrap().iter();
        let model = models.find(|model| model["id"] == name).unwrap();
        assert_eq!(model["capabilities"][0], expected, "{name}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// The first encoder, whose file says that each token has a vector of its own.
fn without_pooling(daemon: &Daemon) {
    let mut bytes = std::fs::read(fixtures().join("encoders/bert.gguf")).unwrap();
    let key = b"bert.pooling_type";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len();
    // Behind its type, a u32: the mean.
    assert_eq!(bytes[at..at + 8], [4, 0, 0, 0, 1, 0, 0, 0]);
    bytes[at + 4] = 0;
    std::fs::write(daemon.dir.path().join("each.gguf"), bytes).unwrap();
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().unwrap().iter().map(floats).collect()
}

/// Of a file without pooling each token has a vector, where the route has a place for them.
#[tokio::test]
async fn without_pooling_each_token_has_a_vector() {
    let http = HttpDaemon::start().await;
    without_pooling(&http.daemon);
    http.daemon.load("each.gguf", "each").await.unwrap();
    let golden = golden("bert");
    let cases = golden["cases"].as_array().unwrap();
    let texts: Vec<&Value> = cases.iter().map(|case| &case["text"]).collect();
    let mut plain = Vec::new();
    for (path, field) in [("/embedding", "content"), ("/embeddings", "input")] {
        let reply = http
            .post(path, &json!({"model": "each", field: texts}))
            .await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let reply = reply.json();
        assert_eq!(reply.as_array().unwrap().len(), cases.len());
        for (i, case) in cases.iter().enumerate() {
            assert_eq!(reply[i]["index"], i);
            let found = rows(&reply[i]["embedding"]);
            assert_eq!(found.len(), case["ids"].as_array().unwrap().len());
            // The mean of what is not scaled is the vector of the usual pooling.
            let width = found[0].len();
            let mean: Vec<f64> = (0..width)
                .map(|at| found.iter().map(|row| row[at]).sum())
                .collect();
            let length = mean.iter().map(|v| v * v).sum::<f64>().sqrt();
            let mean: Vec<f64> = mean.iter().map(|v| v / length).collect();
            assert_near(&mean, &floats(&case["mean"]), path);
            plain = found;
        }
    }
    // Scaled and cut as a request has it.
    let last = texts[texts.len() - 1];
    let asked = json!({"model": "each", "content": last, "embd_normalize": 2, "dimensions": 8});
    let reply = http.post("/embedding", &asked).await.json();
    let found = rows(&reply[0]["embedding"]);
    for (found, plain) in found.iter().zip(&plain) {
        let length = plain[..8].iter().map(|v| v * v).sum::<f64>().sqrt();
        let expected: Vec<f64> = plain[..8].iter().map(|v| v / length).collect();
        assert_near(found, &expected, "a vector of a token");
    }
    // Over gRPC one after the other.
    let request = v1::EmbedRequest {
        model: "each".into(),
        inputs: vec![v1::EmbedInput {
            input: Some(v1::embed_input::Input::Text(last.as_str().unwrap().into())),
        }],
        ..Default::default()
    };
    let over_grpc = http.daemon.inference().embed(request).await.unwrap();
    let over_grpc = over_grpc.into_inner();
    assert_eq!(over_grpc.pooling(), v1::Pooling::None);
    let values = over_grpc.embeddings[0].values.iter();
    let values: Vec<f64> = values.map(|v| f64::from(*v)).collect();
    assert_near(&values, &plain.concat(), "over gRPC");
    for (route, field) in [
        ("/v1/embeddings", "input"),
        ("/api/embed", "input"),
        ("/api/embeddings", "prompt"),
    ] {
        let reply = http
            .post(route, &json!({"model": "each", field: "a"}))
            .await;
        assert_eq!(reply.status, 400, "{route}: {reply:?}");
        assert!(
            reply.text.contains("use /embedding"),
            "{route}: {}",
            reply.text
        );
    }
    let asked = json!({"model": "each", "content": "a", "embd_normalize": -2});
    let reply = http.post("/embedding", &asked).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(reply.text.contains("embd_normalize"), "{}", reply.text);
    assert_eq!(http.stop().await, End::Drained);
}
