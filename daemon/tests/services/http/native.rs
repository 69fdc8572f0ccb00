//! llama-server's own routes of text, and what its clients count on: a model without a name,
//! slashes in paths, marks in front of bodies.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use rocmforged::End;
use rocmforged::roles::Roles;
use serde_json::{Value, json};

use crate::daemon::fixtures;
use crate::http::client::{HttpDaemon, LLAMA, tcp, unix_bytes};

/// llama-server, vLLM and LM Studio answer with what they serve.
#[tokio::test]
async fn a_request_without_a_name_means_the_only_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("{LLAMA}.gguf");
    std::fs::copy(fixtures().join(&file), dir.path().join(&file)).unwrap();
    let dirs = [dir.path().to_owned()];
    let http = HttpDaemon::start_serving(&dirs, None, Roles::default(), Vec::new()).await;
    let chat = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({"messages": chat, "max_tokens": 1}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": null, "messages": chat, "max_tokens": 1}),
        ),
        ("/v1/completions", json!({"prompt": "hi", "max_tokens": 1})),
        ("/v1/embeddings", json!({"input": "hi"})),
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 1}),
        ),
        ("/v1/messages", json!({"messages": chat, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": chat})),
        ("/tokenize", json!({"content": "hi"})),
        ("/apply-template", json!({"messages": chat})),
        (
            "/api/chat",
            json!({"messages": chat, "stream": false, "options": {"num_predict": 1}}),
        ),
        (
            "/api/generate",
            json!({"prompt": "hi", "stream": false, "options": {"num_predict": 1}}),
        ),
        ("/api/embed", json!({"input": "hi"})),
        ("/api/embeddings", json!({"prompt": "hi"})),
        ("/api/show", json!({})),
        ("/models/load", json!({})),
    ] {
        let reply = http.post(path, &body).await;
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
        let told = reply.json();
        assert!(
            told.get("model").is_none_or(|model| model == LLAMA),
            "{path}: {told}"
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// An object, a list of one, and texts and ids behind each other.
#[tokio::test]
async fn a_prompt_is_taken_in_each_form_of_llama_servers() {
    let http = HttpDaemon::start().await;
    let mut tell =
        json!({"model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "n_predict": 8});
    let text = http.post("/completion", &tell).await.json()["content"].clone();
    let ids = json!({"model": LLAMA, "content": "upon a time"});
    let ids = http.post("/tokenize", &ids).await.json()["tokens"].clone();
    let begun = json!({"model": LLAMA, "content": "Once ", "add_special": true});
    let mut mixed = http.post("/tokenize", &begun).await.json()["tokens"].clone();
    let whole = [
        mixed.as_array().unwrap().clone(),
        ids.as_array().unwrap().clone(),
    ]
    .concat();
    mixed = json!([vec![json!("Once ")], ids.as_array().unwrap().clone()].concat());
    tell["prompt"] = json!(whole);
    let of_ids = http.post("/completion", &tell).await.json()["content"].clone();
    for (prompt, expected) in [
        (json!({"prompt_string": "Once upon a time"}), &text),
        (json!(["Once upon a time"]), &text),
        (mixed, &of_ids),
    ] {
        tell["prompt"] = prompt;
        let told = http.post("/completion", &tell).await;
        assert_eq!(&told.json()["content"], expected, "{tell}: {told:?}");
    }
    for prompt in [
        json!(["a", "b"]),
        json!(["a", -1]),
        json!(["a", 1_u64 << 40]),
        json!({}),
    ] {
        tell["prompt"] = prompt;
        assert_eq!(http.post("/completion", &tell).await.status, 400, "{tell}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// What users of llama.vim, SillyTavern and scripts for llama-server call first.
#[tokio::test]
async fn llama_servers_own_routes_answer() {
    let http = HttpDaemon::start().await;
    let mut asked =
        json!({"model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "n_predict": 8});
    let openai =
        json!({"model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
    let text = http.post("/v1/completions", &openai).await.json()["choices"][0]["text"].clone();
    for path in ["/completion", "/completions"] {
        let whole = http.post(path, &asked).await.json();
        assert_eq!(
            (&whole["content"], &whole["stop"]),
            (&text, &json!(true)),
            "{whole}"
        );
        assert_eq!(
            (&whole["stop_type"], &whole["tokens_predicted"]),
            (&json!("limit"), &json!(8))
        );
        assert!(
            whole["timings"]["predicted_per_second"].as_f64() > Some(0.0),
            "{whole}"
        );
    }
    // As llama.vim asks, to have a prompt computed ahead.
    let mut ahead = asked.clone();
    ahead["n_predict"] = 0.into();
    ahead["response_fields"] =
        json!(["content", "tokens_predicted", "timings/predicted_n", "none"]);
    let told = http.post("/completion", &ahead).await.json();
    let expected = json!({"content": "", "tokens_predicted": 0, "timings/predicted_n": 0});
    assert_eq!(told, expected);
    asked["stream"] = true.into();
    let events = http.post("/completion", &asked).await.events();
    let pieces: Vec<Value> = events
        .iter()
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let told = pieces
        .iter()
        .map(|piece| piece["content"].as_str().unwrap());
    assert_eq!(told.collect::<String>(), text.as_str().unwrap());
    let (last, others) = pieces.split_last().unwrap();
    assert!(others.iter().all(|piece| piece["stop"] == false));
    assert_eq!(
        (&last["stop"], &last["stop_type"]),
        (&json!(true), &json!("limit"))
    );

    let content = "42 - 30 = 12, h\u{e9}";
    let ids = http
        .post("/tokenize", &json!({"model": LLAMA, "content": content}))
        .await
        .json();
    let back = http
        .post(
            "/detokenize",
            &json!({"model": LLAMA, "tokens": ids["tokens"]}),
        )
        .await;
    assert_eq!(back.json(), json!({"content": content}));
    let beyond = http
        .post("/detokenize", &json!({"model": LLAMA, "tokens": [1 << 30]}))
        .await;
    assert_eq!(beyond.status, 400, "{beyond:?}");

    let vector = http
        .post("/v1/embeddings", &json!({"model": LLAMA, "input": "a"}))
        .await
        .json();
    for path in ["/embedding", "/embeddings"] {
        let own = http
            .post(path, &json!({"model": LLAMA, "content": "a"}))
            .await
            .json();
        assert_eq!(
            own[0]["embedding"][0], vector["data"][0]["embedding"],
            "{path}"
        );
        let openai = http
            .post(path, &json!({"model": LLAMA, "input": "a"}))
            .await
            .json();
        assert_eq!(openai["data"], vector["data"], "{path}");
    }
    let slots = http.get("/slots").await.json();
    assert_eq!(slots.as_array().unwrap().len(), 4, "{slots}");
    assert_eq!(slots[0]["is_processing"], false);

    // A model whose vocabulary has no tokens for it.
    for (path, body, field) in [
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": "b"}),
            "input_suffix",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "suffix": "b"}),
            "suffix",
        ),
        (
            "/api/generate",
            json!({"prompt": "a", "suffix": "b"}),
            "suffix",
        ),
    ] {
        let mut body = body;
        body["model"] = LLAMA.into();
        let reply = http.post(path, &body).await;
        assert_eq!(reply.status, 400, "{path}: {reply:?}");
        let words = format!("{field}: the vocabulary of model '{LLAMA}' has no tokens");
        assert!(reply.text.contains(&words), "{path}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn slashes_that_base_urls_bring_are_overlooked() {
    let http = HttpDaemon::start().await;
    for path in ["//health", "/health/", "/v1//health//"] {
        assert_eq!(http.get(path).await.status, 200, "{path}");
    }
    // The role that a route needs is that of the route.
    let tokenless = tcp(http.tcp, "POST", "//models//load/", &[], "{}").await;
    assert_eq!(tokenless.status, 403, "{tokenless:?}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn bodies_come_as_they_are_with_or_without_a_byte_order_mark() {
    let http = HttpDaemon::start().await;
    let body = format!("\u{feff}{{\"model\": \"{LLAMA}\", \"content\": \"hi\"}}");
    let packed = |bytes: &str| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(bytes.as_bytes()).unwrap();
        gzip.finish().unwrap()
    };
    let plain = body.as_bytes().to_vec();
    let many_spaces = packed(&" ".repeat(rocmforge_service::REQUEST_MAX_BYTES + 1));
    for (encoding, body, status) in [
        ("identity", plain.clone(), 200),
        ("utf-8", plain.clone(), 200),
        ("gzip", packed(&body), 200),
        ("gzip", plain.clone(), 400),
        ("gzip", many_spaces, 413),
        ("gzip, gzip", plain.clone(), 415),
        ("br", plain, 415),
    ] {
        let headers = [("content-encoding", encoding)];
        let reply = unix_bytes(&http.path(), "POST", "/tokenize", &headers, body).await;
        assert_eq!(reply.status, status, "{encoding}: {reply:?}");
        let accepted = reply.headers.get("accept-encoding");
        assert_eq!(accepted.is_some(), status == 415, "{encoding}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
