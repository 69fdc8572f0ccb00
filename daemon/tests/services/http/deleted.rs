//! Files that are deleted while their models are open.

use rocmforged::End;
use serde_json::{Value, json};

use crate::daemon::fixtures;
use crate::http::client::HttpDaemon;

/// Requests of every route that takes a model.
fn requests() -> Vec<(&'static str, Value)> {
    let said = json!([{"role": "user", "content": "a"}]);
    let one = json!({"num_predict": 1});
    vec![
        (
            "/v1/chat/completions",
            json!({"messages": said, "max_tokens": 1}),
        ),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 1})),
        (
            "/v1/responses",
            json!({"input": "a", "max_output_tokens": 1}),
        ),
        ("/v1/messages", json!({"messages": said, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": said})),
        ("/v1/embeddings", json!({"input": "a"})),
        (
            "/api/chat",
            json!({"messages": said, "stream": false, "options": one}),
        ),
        (
            "/api/generate",
            json!({"prompt": "a", "stream": false, "options": one}),
        ),
        ("/api/embed", json!({"input": "a"})),
        ("/api/show", json!({})),
        ("/completion", json!({"prompt": "a", "n_predict": 1})),
        ("/tokenize", json!({"content": "a"})),
        ("/detokenize", json!({"tokens": [1]})),
        ("/apply-template", json!({"messages": said})),
    ]
}

/// Whoever frees the space of deleted files looks twice a second; no request may be answered from
/// an open file in between.
#[tokio::test]
async fn no_route_answers_from_a_file_right_after_it_is_deleted() {
    let http = HttpDaemon::start().await;
    let file = http.daemon.dir.path().join("short-lived.gguf");
    let name = "short-lived";
    let lists = |list: &Value| list.to_string().contains(name);
    for (route, mut request) in requests() {
        std::fs::copy(fixtures().join("tiny-llama-Q4_K_M.gguf"), &file).unwrap();
        request["model"] = name.into();
        let there = http.post(route, &request).await;
        assert_eq!(there.status, 200, "{route}: {there:?}");
        std::fs::remove_file(&file).unwrap();
        let gone = http.post(route, &request).await;
        assert_eq!(gone.status, 404, "{route}: {gone:?}");
    }
    for route in ["/v1/models", "/api/tags", "/v1/models/short-lived"] {
        std::fs::copy(fixtures().join("tiny-llama-Q4_K_M.gguf"), &file).unwrap();
        let ask = json!({"model": name, "prompt": "a", "max_tokens": 1});
        assert_eq!(http.post("/v1/completions", &ask).await.status, 200);
        assert!(lists(&http.get(route).await.json()), "{route}");
        std::fs::remove_file(&file).unwrap();
        let gone = http.get(route).await;
        let is_told = gone.status == 200 && lists(&gone.json());
        assert!(!is_told, "{route}: {gone:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
