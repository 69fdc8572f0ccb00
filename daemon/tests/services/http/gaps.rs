//! Gaps between tokens that are promised, in each dialect and over gRPC.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};
use tonic::Code;

use crate::daemon::{assert_status, greedy};
use crate::http::client::{HttpDaemon, LLAMA};

/// The routes that generate, with a request each, and where their answer says what was promised.
fn routes() -> [(&'static str, Value, Option<&'static str>); 7] {
    let chat = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let prompt = "Once upon a time";
    [
        (
            "/completion",
            json!({"model": LLAMA, "prompt": prompt, "n_predict": 8}),
            Some("/timings"),
        ),
        (
            "/v1/completions",
            json!({"model": LLAMA, "prompt": prompt, "max_tokens": 8}),
            None,
        ),
        (
            "/v1/chat/completions",
            json!({"model": LLAMA, "messages": chat, "max_tokens": 8}),
            Some("/timings"),
        ),
        (
            "/v1/responses",
            json!({"model": LLAMA, "input": chat, "max_output_tokens": 8}),
            None,
        ),
        (
            "/v1/messages",
            json!({"model": LLAMA, "messages": chat, "max_tokens": 8}),
            Some("/usage"),
        ),
        (
            "/api/generate",
            json!({"model": LLAMA, "prompt": prompt, "stream": false}),
            Some(""),
        ),
        (
            "/api/chat",
            json!({"model": LLAMA, "messages": chat, "stream": false}),
            Some(""),
        ),
    ]
}

/// The request with a gap, where its dialect has such fields.
fn with_gap(request: &Value, ms: i64) -> Value {
    let mut request = request.clone();
    let more = json!({"max_gap_ms": ms, "num_predict": 8, "ignore_eos": true});
    match request["stream"] == false {
        true => request["options"] = more,
        false => {
            request["max_gap_ms"] = ms.into();
            request["ignore_eos"] = true.into();
        }
    }
    request
}

#[tokio::test]
async fn each_dialect_asks_for_a_gap_and_says_whether_it_was_held() {
    let http = HttpDaemon::start().await;
    for (path, request, told) in routes() {
        let reply = http.post(path, &with_gap(&request, 60_000)).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text);
        let whole = reply.json();
        if let Some(at) = told {
            let told = whole.pointer(at).unwrap();
            assert_eq!(told["promised_gap_ms"], 60_000, "{path}: {told}");
            assert_eq!(told["broken_gaps"], 0, "{path}: {told}");
            assert!(
                told["longest_gap_ms"].as_f64() > Some(0.0),
                "{path}: {told}"
            );
            assert!(told["longest_gap_cause"].is_string(), "{path}: {told}");
        }
        for ms in [-1, 60_001] {
            let reply = http.post(path, &with_gap(&request, ms)).await;
            assert_eq!(reply.status, 400, "{path}: {}", reply.text);
            assert!(reply.text.contains("max_gap_ms"), "{path}: {}", reply.text);
            assert!(
                reply.text.contains("from 1 to 60000"),
                "{path}: {}",
                reply.text
            );
        }
        // A pass was measured by now, and no time is left for one.
        let reply = http.post(path, &with_gap(&request, 1)).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.text);
        assert!(
            reply.text.contains("cannot be held: a pass of"),
            "{path}: {}",
            reply.text
        );
        assert!(reply.text.contains("ask for "), "{path}: {}", reply.text);
        let reply = http.post(path, &with_gap(&request, 0)).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text);
        assert!(
            !reply.text.contains("promised_gap_ms"),
            "{path}: {}",
            reply.text
        );
    }
    let metrics = http.get("/metrics").await.text;
    for cause in ["own_passes", "other_models", "uploads", "waiting"] {
        let line = format!(
            "rocmforge_broken_gaps_total{{priority=\"interactive\",cause=\"{cause}\"}} 0\n"
        );
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn grpc_asks_for_a_gap_and_says_whether_it_was_held() {
    let http = HttpDaemon::start().await;
    let daemon = &http.daemon;
    let asked = |ms| v1::GenerateRequest {
        max_gap_ms: Some(ms),
        ..greedy(LLAMA, "Once upon a time", 8)
    };
    // It is opened over HTTP.
    let (path, request, _) = &routes()[0];
    assert_eq!(http.post(path, request).await.status, 200);
    let (_, done) = daemon.generate(asked(60_000)).await.unwrap();
    assert_eq!((done.promised_gap_ms, done.broken_gaps), (Some(60_000), 0));
    assert!(done.longest_gap_ms > 0.0 && !done.longest_gap_cause.is_empty());
    let (_, done) = daemon.generate(greedy(LLAMA, "Once", 8)).await.unwrap();
    assert_eq!(done.promised_gap_ms, None);
    assert!(done.longest_gap_ms > 0.0);
    assert_status(
        daemon.generate(asked(60_001)).await,
        Code::InvalidArgument,
        &["max_gap_ms", "from 1 to 60000"],
    );
    assert_status(
        daemon.generate(asked(1)).await,
        Code::InvalidArgument,
        &["max_gap_ms", "cannot be held", "ask for"],
    );
    assert_eq!(http.stop().await, End::Drained);
}
