//! llama-server's routes, metrics, and what no route answers.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA, send, unix, whole};
use crate::templates::with_template;

fn state(models: &Value, name: &str) -> Value {
    let data = models["data"].as_array().unwrap();
    let found = data.iter().find(|model| model["id"] == name).unwrap();
    found["status"]["value"].clone()
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_name() {
    let http = HttpDaemon::start().await;
    assert_eq!(state(&http.get("/models").await.json(), LLAMA), "unloaded");
    let asked = json!({"model": LLAMA});
    let loaded = http.post("/models/load", &asked).await;
    assert_eq!(
        (loaded.status, loaded.json()),
        (200, json!({"success": true}))
    );
    assert_eq!(state(&http.get("/models").await.json(), LLAMA), "loaded");
    let list = http
        .daemon
        .models()
        .list(v1::ListModelsRequest {})
        .await
        .unwrap();
    assert_eq!(list.into_inner().models[0].name, LLAMA, "gRPC sees it, too");
    assert_eq!(http.post("/models/unload", &asked).await.status, 200);
    assert_eq!(state(&http.get("/models").await.json(), LLAMA), "unloaded");
    let again = http.post("/models/unload", &asked).await;
    assert_eq!(again.status, 404);
    assert!(
        again.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains(LLAMA)
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn tokens_are_those_that_grpc_gives() {
    let http = HttpDaemon::start().await;
    http.daemon
        .load(format!("{LLAMA}.gguf"), LLAMA)
        .await
        .unwrap();
    let request = v1::TokenizeRequest {
        model: LLAMA.into(),
        text: "Once upon a time".into(),
        add_special: Some(false),
        ..Default::default()
    };
    let expected = http
        .daemon
        .inference()
        .tokenize(request)
        .await
        .unwrap()
        .into_inner();
    let asked = json!({"content": "Once upon a time"});
    assert_eq!(
        http.post("/tokenize", &asked).await.json()["tokens"],
        json!(expected.ids)
    );
    let asked = json!({"model": LLAMA, "content": "Once upon a time", "with_pieces": true});
    let pieces = http.post("/tokenize", &asked).await.json();
    let text: String = pieces["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token["piece"].as_str().unwrap())
        .collect();
    assert!(text.contains("upon a time"), "{text}");

    let props = http.get(&format!("/props?model={LLAMA}")).await.json();
    assert_eq!(props["total_slots"], 4);
    assert!(props["default_generation_settings"]["n_ctx"].as_u64() > Some(0));
    assert!(
        props["chat_template"]
            .as_str()
            .unwrap()
            .contains("messages")
    );
    assert_eq!(
        http.get("/props").await.json()["model_alias"],
        LLAMA,
        "the only one"
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn metrics_say_what_routers_and_people_ask() {
    let http = HttpDaemon::start().await;
    let asked = json!({"model": LLAMA, "prompt": "Once upon a time", "max_tokens": 4});
    assert_eq!(http.post("/v1/completions", &asked).await.status, 200);
    let reply = http.get("/metrics").await;
    let kind = reply.headers["content-type"].to_str().unwrap();
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    let value = |name: &str| -> f64 {
        let mut lines = reply.text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let line = line.unwrap_or_else(|| panic!("no {name} in {}", reply.text));
        line.parse().unwrap()
    };
    assert_eq!(value("vllm:num_requests_running"), 0.0);
    assert_eq!(value("vllm:num_requests_waiting"), 0.0);
    assert!((0.0..=1.0).contains(&value("vllm:kv_cache_usage_perc")));
    assert!(
        reply
            .text
            .contains("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"")
    );
    assert_eq!(value("rocmforge_budget_bytes"), f64::from(64 << 20));
    let of_llama = |name: &str| value(&format!("{name}{{model=\"{LLAMA}\"}}"));
    assert!(of_llama("rocmforge_uploaded_bytes_total") > 0.0);
    assert!(of_llama("rocmforge_segment_misses_total") > 0.0);
    assert!((0.0..=1.0).contains(&of_llama("rocmforge_model_residency_ratio")));
    assert!(of_llama("rocmforge_model_resident_bytes") > 0.0);
    // Every metric has its type, and no line is anything else.
    for line in reply.text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let mut families = ["_bucket", "_sum", "_count", ""].iter();
        let is_typed = families.any(|suffix| {
            let family = name.strip_suffix(suffix).unwrap_or(name);
            reply.text.contains(&format!("# TYPE {family} "))
        });
        assert!(is_typed, "{line}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn requests_have_names_and_what_is_not_there_says_so() {
    let http = HttpDaemon::start().await;
    let given = unix(
        &http.path(),
        "GET",
        "/health",
        &[("x-request-id", "abc-1")],
        "",
    )
    .await;
    assert_eq!(given.headers["x-request-id"], "abc-1");
    assert_eq!((given.status, given.json()), (200, json!({"status": "ok"})));
    let fresh = http.get("/health").await;
    assert!(
        fresh.headers["x-request-id"]
            .to_str()
            .unwrap()
            .starts_with("req-")
    );
    let long = "x".repeat(1000);
    let odd = unix(
        &http.path(),
        "GET",
        "/health",
        &[("x-request-id", &long)],
        "",
    )
    .await;
    assert_ne!(odd.headers["x-request-id"], long.as_str());

    let nothing = http.get("/v1/nothing").await;
    assert_eq!(
        (nothing.status, nothing.json()["error"]["code"].clone()),
        (404, json!("NO_SUCH_ROUTE"))
    );
    assert!(http.get("/api/nothing").await.json()["error"].is_string());
    let broken = unix(
        &http.path(),
        "POST",
        "/v1/chat/completions",
        &[],
        "{\"model\": ",
    )
    .await;
    assert_eq!(broken.status, 400);
    assert!(
        broken.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("JSON")
    );
    let large = " ".repeat(rocmforged::REQUEST_MAX_BYTES + 1);
    let reply = unix(&http.path(), "POST", "/v1/completions", &[], &large).await;
    assert_eq!(reply.status, 413, "{reply:?}");
    // What only names a model is never that long.
    let named = json!({"model": LLAMA, "padding": " ".repeat(64 << 10)});
    for route in ["/models/load", "/models/unload", "/api/show"] {
        assert_eq!(http.post(route, &named).await.status, 413, "{route}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_route_tells_which_method_it_takes() {
    let http = HttpDaemon::start().await;
    for (method, path, taken, allow) in [
        ("GET", "/v1/chat/completions", "send POST", "POST"),
        ("DELETE", "/v1/models/a/b", "send GET", "GET,HEAD"),
        ("GET", "/v1/messages", "send POST", "POST"),
        ("PUT", "/api/tags", "send GET", "GET,HEAD"),
        ("OPTIONS", "/", "send GET", "GET,HEAD"),
    ] {
        let reply = unix(&http.path(), method, path, &[], "").await;
        assert_eq!(reply.status, 405, "{method} {path}: {reply:?}");
        assert_eq!(reply.headers["allow"], allow, "{method} {path}");
        let told = reply.json();
        let message = match path {
            path if path.starts_with("/api/") => &told["error"],
            _ => &told["error"]["message"],
        };
        let message = message.as_str().unwrap();
        assert_eq!(message, format!("{path} takes no {method}; {taken}"));
        assert_eq!(told["type"] == "error", path == "/v1/messages", "{told}");
    }
    let head = unix(&http.path(), "HEAD", "/health", &[], "").await;
    assert_eq!((head.status, head.text.as_str()), (200, ""));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_missing_name_is_told_with_the_route_that_lists_names() {
    let http = HttpDaemon::start().await;
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "input": "x", "query": "x",
        "documents": ["x"], "max_tokens": 1,
    });
    for (path, list) in [
        ("/v1/chat/completions", "/v1/models"),
        ("/v1/completions", "/v1/models"),
        ("/v1/embeddings", "/v1/models"),
        ("/v1/rerank", "/v1/models"),
        ("/v1/responses", "/v1/models"),
        ("/v1/messages/count_tokens", "/v1/models"),
        ("/models/load", "/v1/models"),
        ("/models/unload", "/v1/models"),
        ("/api/chat", "/api/tags"),
        ("/api/embed", "/api/tags"),
        ("/api/show", "/api/tags"),
    ] {
        let mut body = body.clone();
        if path == "/v1/completions" {
            body["prompt"] = "x".into();
        }
        let reply = http.post(path, &body).await;
        assert_eq!(reply.status, 400, "{path}: {reply:?}");
        let expected = format!("model: missing; name one of GET {list}");
        assert!(reply.text.contains(&expected), "{path}: {reply:?}");
    }
    // Nothing to say: Ollama's way to have a model loaded, or to let it go.
    for asked in [
        json!({"messages": []}),
        json!({"messages": [], "keep_alive": 0}),
    ] {
        let reply = http.post("/api/chat", &asked).await;
        assert!(reply.text.contains("GET /api/tags"), "{reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn loads_and_unloads_are_told_as_they_happen() {
    let http = HttpDaemon::start().await;
    let stream = tokio::net::UnixStream::connect(http.path()).await.unwrap();
    let response = send(stream, "GET", "/models/sse", &[], "").await;
    let kind = response.headers()["content-type"].to_str().unwrap();
    assert!(kind.starts_with("text/event-stream"), "{kind}");
    let watching = tokio::spawn(whole(response));
    let asked = json!({"model": LLAMA});
    for action in ["load", "unload", "load"] {
        let done = http.post(&format!("/models/{action}"), &asked).await;
        assert_eq!(done.status, 200, "{done:?}");
        // Two changes between two looks would be none.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    }
    // The stream ends with the daemon, and does not hold it up.
    assert_eq!(http.stop().await, End::Drained);
    let told = watching.await.unwrap();
    let events: Vec<Value> = told
        .events()
        .iter()
        .filter(|(_, data)| !data.is_empty())
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let statuses: Vec<_> = events
        .iter()
        .map(|event| event["data"]["status"].as_str().unwrap())
        .collect();
    assert_eq!(statuses, ["loaded", "unloaded", "loaded"], "{events:?}");
    for event in &events {
        assert_eq!(
            (&event["model"], &event["event"]),
            (&json!(LLAMA), &json!("status_change"))
        );
    }
}

/// What agents send, and many templates refuse or leave out.
#[tokio::test]
async fn templates_get_a_chat_in_the_way_that_they_take_it() {
    const FIRST: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}\
                         {% endif %}{{ m.content }};{% endfor %}";
    const ONE: &str = "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% endif %}\
                       {% for m in messages %}{% if m.role != 'system' %}{{ m.content }};{% endif %}{% endfor %}";
    const NONE: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('x') }}{% endif %}\
                        {{ m.content }};{% endfor %}";
    const TEXT: &str = "{% for m in messages %}{{ m.content + ';' }}{% endfor %}{# <tool_call> #}";
    const SHORT: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}\
                         {{ raise_exception('x') }}{% endif %}{{ c.id }};{% endfor %}{{ m.tool_call_id }};{% endfor %}";
    const SPELLS: &str = "{% for m in messages %}{{ m.content }};{% endfor %}";
    let http = HttpDaemon::start().await;
    let system = json!([
        {"role": "system", "content": "A"}, {"role": "system", "content": "B"},
        {"role": "user", "content": "C"}, {"role": "system", "content": "D"},
    ]);
    let calls = json!([
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_8d68ca450f949c6b", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_8d68ca450f949c6b", "content": "E"},
    ]);
    for (name, template, messages, expected) in [
        ("first", FIRST, &system, "A\n\nB;C\n\nD;"),
        ("one", ONE, &system, "A\n\nB;C\n\nD;"),
        ("none", NONE, &system, "A\n\nB\n\nC\n\nD;"),
        ("text", TEXT, &calls, "C;;E;"),
        ("spells", SPELLS, &calls, "C;;E;"),
        ("short", SHORT, &calls, ";50f949c6b;;50f949c6b;"),
    ] {
        with_template(&http.daemon, name, template);
        let asked = json!({"model": name, "messages": messages});
        let reply = http.post("/apply-template", &asked).await;
        assert_eq!(reply.status, 200, "{name}: {reply:?}");
        // Blanks fill the template's place in the file.
        let prompt = reply.json()["prompt"].as_str().unwrap().to_owned();
        assert_eq!(prompt.trim_end(), expected, "{name}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
