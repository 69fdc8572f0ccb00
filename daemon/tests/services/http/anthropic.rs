//! Anthropic's routes.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA, unix};
use crate::templates::with_template;

fn question() -> Value {
    json!({
        "model": LLAMA,
        "max_tokens": 16,
        "temperature": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "42 - 30 = ?"}]}],
        "metadata": {"user_id": "somebody"},
    })
}

fn data(event: &(String, String)) -> Value {
    serde_json::from_str(&event.1).unwrap()
}

#[tokio::test]
async fn messages_are_answered_and_counted() {
    let http = HttpDaemon::start().await;
    let reply = http.post("/v1/messages?beta=true", &question()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let message = reply.json();
    assert_eq!(
        (&message["type"], &message["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(
        message["content"],
        json!([{"type": "text", "text": "42 - 30 = 12."}])
    );
    assert_eq!(message["stop_reason"], "end_turn");
    let usage = &message["usage"];
    assert!(usage["output_tokens"].as_u64() > Some(0));
    assert_eq!(usage["cache_read_input_tokens"], 0);

    let mut counting = question();
    counting.as_object_mut().unwrap().remove("max_tokens");
    let counted = http.post("/v1/messages/count_tokens", &counting).await;
    assert_eq!(counted.json()["input_tokens"], usage["input_tokens"]);

    let mut cut = question();
    cut["stop_sequences"] = json!([" ="]);
    let message = http.post("/v1/messages", &cut).await.json();
    assert_eq!(message["stop_reason"], "stop_sequence");
    assert_eq!(message["stop_sequence"], " =");
    assert_eq!(message["content"][0]["text"], "42 - 30");
    cut["max_tokens"] = 1.into();
    assert_eq!(
        http.post("/v1/messages", &cut).await.json()["stop_reason"],
        "max_tokens"
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_stream_has_its_events_in_order() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["stream"] = true.into();
    let events = http.post("/v1/messages", &asked).await.events();
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    let deltas = names
        .iter()
        .filter(|name| **name == "content_block_delta")
        .count();
    assert!(deltas > 1, "{names:?}");
    let mut expected = vec!["message_start", "content_block_start"];
    expected.extend(vec!["content_block_delta"; deltas]);
    expected.extend(["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(names, expected);
    let text: String = events[2..2 + deltas]
        .iter()
        .map(|event| {
            let delta = data(event);
            assert_eq!(
                (&delta["index"], &delta["delta"]["type"]),
                (&json!(0), &json!("text_delta"))
            );
            delta["delta"]["text"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(text, "42 - 30 = 12.");
    let start = data(&events[0]);
    assert!(start["message"]["usage"]["input_tokens"].as_u64() > Some(0));
    assert_eq!(start["message"]["content"], json!([]));
    for event in &events {
        assert_eq!(data(event)["type"], event.0.as_str());
    }
    let end = data(&events[events.len() - 2]);
    assert_eq!(end["delta"]["stop_reason"], "end_turn");
    assert!(end["usage"]["output_tokens"].as_u64() > Some(0));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_stream_tells_what_was_read_from_the_cache_at_its_end() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["stream"] = true.into();
    asked["messages"] = json!([{"role": "user", "content": "Tell me of the whale. ".repeat(20)}]);
    let usages = async || {
        let events = http.post("/v1/messages", &asked).await.events();
        let start = data(&events[0])["message"]["usage"].clone();
        (start, data(&events[events.len() - 2])["usage"].clone())
    };
    for again in [false, true] {
        let (start, end) = usages().await;
        // Not known yet.
        assert_eq!(start["cache_read_input_tokens"], 0, "{start}");
        assert_eq!(start["cache_creation_input_tokens"], 0);
        assert_eq!(end["cache_creation_input_tokens"], 0);
        let read = end["cache_read_input_tokens"].as_u64().unwrap();
        assert_eq!(read > 0, again, "{end}");
        let computed = end["input_tokens"].as_u64().unwrap();
        assert_eq!(start["input_tokens"].as_u64(), Some(computed + read));
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn thoughts_are_blocks_of_their_own() {
    let http = HttpDaemon::start().await;
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>";
    with_template(&http.daemon, "thinker", template);
    let mut asked = question();
    asked["model"] = "thinker".into();
    let message = http.post("/v1/messages", &asked).await.json();
    assert_eq!(message["content"][0]["type"], "thinking");
    let thought = |usage: &Value| {
        let thought = usage["output_tokens_details"]["thinking_tokens"].as_u64();
        assert!(thought > Some(0) && thought <= usage["output_tokens"].as_u64());
    };
    thought(&message["usage"]);
    asked["stream"] = true.into();
    let events = http.post("/v1/messages", &asked).await.events();
    assert_eq!(data(&events[1])["content_block"]["type"], "thinking");
    let stop = events
        .iter()
        .position(|(name, _)| name == "content_block_stop")
        .unwrap();
    let signature = data(&events[stop - 1]);
    assert_eq!(
        signature["delta"]["type"], "signature_delta",
        "before the block ends"
    );
    thought(&data(&events[events.len() - 2])["usage"]);
    assert_eq!(http.stop().await, End::Drained);
}

/// Anthropic's API thinks where it is asked to.
#[tokio::test]
async fn a_model_that_can_be_told_so_thinks_only_where_it_is_asked_to() {
    let http = HttpDaemon::start().await;
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\
                    {% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}";
    with_template(&http.daemon, "hybrid", template);
    let always = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>";
    with_template(&http.daemon, "always", always);
    for (model, thinking, kind) in [
        ("hybrid", json!(null), "text"),
        ("hybrid", json!({"type": "disabled"}), "text"),
        (
            "hybrid",
            json!({"type": "enabled", "budget_tokens": 1024}),
            "thinking",
        ),
        ("hybrid", json!({"type": "adaptive"}), "thinking"),
        ("always", json!(null), "thinking"),
    ] {
        let mut asked = question();
        asked["model"] = model.into();
        asked["thinking"] = thinking.clone();
        let message = http.post("/v1/messages", &asked).await.json();
        assert_eq!(
            message["content"][0]["type"], kind,
            "{model} {thinking}: {message}"
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// An image in a tool's result made every later turn of a session 400.
#[tokio::test]
async fn a_session_with_an_image_and_tools_of_other_machines_lives_on() {
    let http = HttpDaemon::start().await;
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
    let mut asked = question();
    asked["messages"] = json!([
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "42 - 30 = ?"},
    ]);
    asked["tools"] = json!([{"type": "web_search_20250305", "name": "web_search"}]);
    asked["tool_choice"] = json!({"type": "tool", "name": "web_search"});
    let reply = http.post("/v1/messages", &asked).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let counted = http.post("/v1/messages/count_tokens", &asked).await.json();
    let usage = &reply.json()["usage"];
    let n = |key: &str| usage[key].as_u64().unwrap();
    let input = n("input_tokens") + n("cache_read_input_tokens");
    assert_eq!(counted["input_tokens"], input);
    assert_eq!(http.stop().await, End::Drained);
}

/// Agents know by these words and numbers that they have to compact their conversation.
#[tokio::test]
async fn a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["messages"] = json!([{"role": "user", "content": "x ".repeat(3000)}]);
    let counted = http.post("/v1/messages/count_tokens", &asked).await;
    let reply = http.post("/v1/messages", &asked).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    let message = reply.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    let rest = message.strip_prefix("prompt is too long: ").unwrap();
    let (n, rest) = rest.split_once(" tokens > ").unwrap();
    assert_eq!(rest.split_once(" maximum").unwrap().0, "1023");
    let n: u64 = n.parse().unwrap();
    assert!(n > 2900 && n < 6100, "{message}");
    drop(counted);
    let chat = http.post("/v1/chat/completions", &asked).await.json();
    let error = &chat["error"];
    assert_eq!(
        (&error["n_prompt_tokens"], &error["n_ctx"]),
        (&json!(n), &json!(1024))
    );
    assert_eq!(error["code"], "context_length_exceeded");
    for words in [
        "the request exceeds the available context size",
        "this model's maximum context length is 1024 tokens",
    ] {
        assert!(
            error["message"].as_str().unwrap().contains(words),
            "{error}"
        );
    }
    asked["options"] = json!({"num_predict": 1});
    let ollama = http.post("/api/chat", &asked).await.json();
    let told = ollama["error"].as_str().unwrap();
    assert!(
        told.contains("exceeds the available context size"),
        "{told}"
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn refusals_have_anthropics_shape() {
    let http = HttpDaemon::start().await;
    let rows = [
        (
            "max_tokens",
            Value::Null,
            400,
            "invalid_request_error",
            "max_tokens",
        ),
        (
            "temperature",
            json!(-1),
            400,
            "invalid_request_error",
            "temperature",
        ),
        ("model", json!("ghost"), 404, "not_found_error", "ghost"),
        (
            "tool_choice",
            json!({"type": "any"}),
            400,
            "invalid_request_error",
            "tool_choice",
        ),
    ];
    for (key, value, status, kind, mentions) in rows {
        let mut asked = question();
        asked[key] = value;
        let body = asked.to_string();
        let headers = [("x-request-id", "mine-7")];
        let reply = unix(&http.path(), "POST", "/v1/messages", &headers, &body).await;
        assert_eq!(reply.status, status, "{reply:?}");
        let answer = reply.json();
        assert_eq!(answer["type"], "error");
        assert_eq!(answer["error"]["type"], kind);
        assert_eq!(answer["request_id"], "mine-7");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(mentions), "{message}");
    }
    let headers = [("anthropic-version", "2023-06-01")];
    let models = unix(&http.path(), "GET", "/v1/models", &headers, "")
        .await
        .json();
    assert_eq!(models["data"][0]["type"], "model");
    assert_eq!(models["has_more"], false);
    // Known once it is loaded.
    let loaded = http.post("/api/show", &json!({"model": LLAMA})).await;
    assert_eq!(loaded.status, 200);
    let target = format!("/v1/models/{LLAMA}");
    let one = unix(&http.path(), "GET", &target, &headers, "").await;
    assert_eq!(one.json()["max_input_tokens"], 1024);
    assert_eq!(http.stop().await, End::Drained);
}

/// As agents send it: a line and a count in the system's text are others with every request.
#[tokio::test]
async fn a_prompt_that_was_computed_is_told_as_read_from_the_cache() {
    let http = HttpDaemon::start().await;
    let story =
        "There was a proud whale named Omar. One morning Omar found a golden coin. ".repeat(4);
    let mut told = Vec::new();
    for turn in 0..2 {
        let left = format!("<total_tokens>{} tokens left</total_tokens>", 9000 - turn);
        let mut asked = question();
        asked["system"] = json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};")},
            {"type": "text", "text": format!("{story}\n\n{left}")},
        ]);
        asked["cache_prompt"] = json!(turn > 0);
        let usage = http.post("/v1/messages", &asked).await.json()["usage"].clone();
        told.push(usage);
        if turn == 0 {
            asked["cache_prompt"] = json!(true);
            http.post("/v1/messages", &asked).await;
        }
    }
    let n = |usage: &Value, key: &str| usage[key].as_u64().unwrap();
    let (read, input) = ("cache_read_input_tokens", "input_tokens");
    assert_eq!(n(&told[0], read), 0);
    let prompt = n(&told[0], input);
    // Pages of 32 tokens.
    assert_eq!(n(&told[1], read), (prompt - 1) / 32 * 32);
    assert_eq!(n(&told[1], read) + n(&told[1], input), prompt);

    let mut asked = question();
    asked["system"] = story.into();
    asked["stream"] = true.into();
    let events = http.post("/v1/messages", &asked).await.events();
    let start = data(&events[0])["message"]["usage"].clone();
    let end = data(&events[events.len() - 2])["usage"].clone();
    assert!(n(&end, read) > 0, "{end}");
    assert_eq!(n(&end, read) + n(&end, input), n(&start, input));
    assert_eq!(http.stop().await, End::Drained);
}

/// Agents compact their conversation by these words.
#[tokio::test]
async fn a_prompt_without_room_is_told_as_too_long() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["system"] = "word ".repeat(6000).into();
    for streams in [false, true] {
        asked["stream"] = streams.into();
        let reply = http.post("/v1/messages", &asked).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.json()["error"].clone();
        assert_eq!(error["type"], "invalid_request_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with("prompt is too long: "), "{message}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn an_answer_that_is_begun_is_gone_on_with() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["messages"] = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let text = |whole: Value| whole["content"][0]["text"].as_str().unwrap().to_owned();
    let whole = text(http.post("/v1/messages", &asked).await.json());
    let (begun, rest) = whole.split_at(whole.find('=').unwrap() + 1);
    asked["messages"] = json!([
        {"role": "user", "content": "42 - 30 = ?"}, {"role": "assistant", "content": begun},
    ]);
    let told = text(http.post("/v1/messages", &asked).await.json());
    assert_eq!(told.trim_start(), rest.trim_start(), "{whole}");
    assert_eq!(http.stop().await, End::Drained);
}
