//! Bodies of every shape get an answer: a field may hold anything.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA};

/// What a field may hold instead.
fn odd() -> Vec<Value> {
    let object = json!({"type": "text", "role": "user", "content": "x", "name": 1, "text": []});
    vec![
        Value::Null,
        json!(true),
        json!(-1),
        json!(1e308),
        json!(u64::MAX),
        json!(""),
        json!("a\u{0}b"),
        json!([]),
        json!([null]),
        json!([1, "x"]),
        json!([[]]),
        json!(["user"]),
        json!([{}]),
        json!([object]),
        json!([{"role": "user", "content": ["x", 1, {}, {"type": "tool_result", "content": [1]}]}]),
        json!([{"type": "function", "name": "f", "function": "f"}]),
        json!([{"type": "function_call"}, {"type": "reasoning", "content": [1], "summary": "x"}]),
        object,
        json!({"type": {"type": 1}}),
    ]
}

#[tokio::test]
async fn a_field_may_hold_anything_and_the_daemon_answers() {
    const FIELDS: [&str; 27] = [
        "model",
        "messages",
        "prompt",
        "input",
        "content",
        "options",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "stop",
        "logit_bias",
        "samplers",
        "dry_sequence_breakers",
        "mirostat",
        "n_probs",
        "stop_sequences",
        "system",
        "thinking",
        "think",
        "seed",
        "keep_alive",
        "reasoning",
        "metadata",
        "chat_template_kwargs",
        "temperature",
        "max_tokens",
    ];
    const ROUTES: [&str; 12] = [
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/completion",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/tokenize",
        "/models/unload",
    ];
    let http = HttpDaemon::start().await;
    let usual = json!({
        "model": LLAMA, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi",
        "content": "hi", "max_tokens": 1, "max_output_tokens": 1, "options": {"num_predict": 1},
    });
    let (mut answered, mut refused) = (0, 0);
    for route in ROUTES {
        for field in FIELDS {
            for value in odd() {
                let mut body = usual.clone();
                body[field] = value;
                let reply = http.post(route, &body).await;
                assert!(reply.status < 500, "{route} {body}: {reply:?}");
                if reply.status == 200 {
                    answered += 1;
                } else {
                    assert!(
                        reply.json().get("error").is_some(),
                        "{route} {body}: {reply:?}"
                    );
                    refused += 1;
                }
            }
        }
    }
    assert!(
        answered > 500 && refused > 500,
        "{answered} answered, {refused} refused"
    );
    assert_eq!(http.stop().await, End::Drained);
}
