//! OpenAI's routes.

use rocmforged::End;
use serde_json::{Value, json};

use crate::daemon::greedy;
use crate::http::client::{HttpDaemon, LLAMA, Reply};
use crate::templates::with_template;

fn question(stream: bool) -> Value {
    json!({
        "model": LLAMA,
        "messages": [{"role": "user", "content": "42 - 30 = ?"}],
        "temperature": 0,
        "max_tokens": 16,
        "stream": stream,
        "user": "somebody",
        "store": false,
    })
}

#[tokio::test]
async fn a_model_on_disk_is_listed_and_loaded_at_its_first_use() {
    let http = HttpDaemon::start().await;
    let names = |list: &Value| -> Vec<String> {
        let data = list["data"].as_array().unwrap();
        data.iter()
            .map(|m| m["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let before = http.get("/v1/models").await.json();
    assert!(names(&before).contains(&LLAMA.to_owned()), "{before}");
    assert_eq!(before["object"], "list");
    assert!(before["data"][0]["created"].is_i64());

    let reply = http.post("/v1/chat/completions", &question(false)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], LLAMA);
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "42 - 30 = 12.");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &whole["usage"];
    let (prompt, answer) = (
        usage["prompt_tokens"].as_u64(),
        usage["completion_tokens"].as_u64(),
    );
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(prompt.unwrap() + answer.unwrap())
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);

    let after = http.get("/v1/models").await.json();
    assert_eq!(names(&after), names(&before), "each model is listed once");
    let one = http.get(&format!("/v1/models/{LLAMA}")).await;
    assert_eq!(one.json()["id"], LLAMA);
    // The model was trained with four times that, which the daemon refuses.
    assert_eq!(one.json()["max_model_len"], 1024);
    let tagged = http.get(&format!("/v1/models/{LLAMA}:latest")).await;
    assert_eq!(tagged.json()["id"], LLAMA);
    // What it can be instead may be a file that nobody has asked for yet.
    let ghost = http.get("/v1/models/ghost").await;
    assert_eq!(ghost.status, 404);
    assert!(ghost.text.contains("tiny-qwen3-Q8_0"), "{ghost:?}");
    assert_eq!(http.stop().await, End::Drained);
}

/// The one fingerprint of an answer, whole or in chunks.
fn fingerprint(reply: &Reply) -> String {
    let events = reply.events();
    let chunks = events.iter().map(|(_, data)| data.as_str());
    let chunks: Vec<_> = chunks.filter(|data| data.starts_with('{')).collect();
    let bodies = if chunks.is_empty() {
        vec![reply.text.as_str()]
    } else {
        chunks
    };
    let mut all: Vec<String> = bodies
        .iter()
        .map(|body| {
            let body: Value = serde_json::from_str(body).unwrap();
            body["system_fingerprint"].as_str().unwrap().to_owned()
        })
        .collect();
    all.dedup();
    let [one] = &all[..] else { panic!("{all:?}") };
    one.clone()
}

#[tokio::test]
async fn answers_have_the_fingerprint_of_what_they_come_from() {
    let http = HttpDaemon::start().await;
    let of = async |route: &str, model: &str, stream: bool, more: Value| {
        let mut asked = question(stream);
        asked["model"] = model.into();
        asked["prompt"] = "Once".into();
        asked["stream_options"] = json!({"include_usage": true});
        let more = more.as_object().unwrap().clone();
        asked.as_object_mut().unwrap().extend(more);
        let reply = http.post(route, &asked).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        fingerprint(&reply)
    };
    let chat = "/v1/chat/completions";
    let one = of(chat, LLAMA, false, json!({})).await;
    assert!(one.starts_with("fp_"), "{one}");
    for (route, stream, more) in [
        (chat, true, json!({})),
        (chat, true, json!({"logprobs": true})),
        ("/v1/completions", false, json!({})),
        ("/v1/completions", true, json!({})),
        (
            "/v1/completions",
            false,
            json!({"echo": true, "max_tokens": 0}),
        ),
    ] {
        let again = of(route, LLAMA, stream, more.clone()).await;
        assert_eq!(again, one, "{route} {stream} {more}");
    }
    let other = of(chat, "tiny-qwen3-Q8_0", false, json!({})).await;
    assert_ne!(other, one);
    // Another template of the same file.
    with_template(&http.daemon, "short", "{{ messages[-1].content }}");
    assert_ne!(of(chat, "short", false, json!({})).await, one);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_stream_has_its_chunks_in_order() {
    let http = HttpDaemon::start().await;
    let mut asked = question(true);
    asked["stream_options"] = json!({"include_usage": true});
    let reply = http.post("/v1/chat/completions", &asked).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let kind = reply.headers["content-type"].to_str().unwrap();
    assert!(kind.starts_with("text/event-stream"), "{kind}");
    let events = reply.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done.1, "[DONE]");
    let chunks: Vec<Value> = chunks
        .iter()
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let [first, middle @ .., finish, usage] = &chunks[..] else {
        panic!("{chunks:?}");
    };
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    let text: String = middle
        .iter()
        .map(|chunk| {
            assert!(chunk["choices"][0]["delta"].get("role").is_none());
            assert!(chunk["choices"][0]["finish_reason"].is_null());
            chunk["choices"][0]["delta"]["content"].as_str().unwrap()
        })
        .collect();
    assert_eq!(text, "42 - 30 = 12.");
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    assert_eq!(finish["choices"][0]["delta"], json!({}));
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64() > Some(0));
    for chunk in &chunks[..chunks.len() - 1] {
        assert_eq!(chunk.get("usage"), Some(&Value::Null), "{chunk}");
    }
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(
            (&chunk["id"], &chunk["created"]),
            (&first["id"], &first["created"])
        );
    }
    // With scores, chunks are made in another way.
    for (route, asks, key) in [
        ("/v1/chat/completions", true, "top_logprobs"),
        ("/v1/chat/completions", false, "top_k"),
        ("/v1/completions", true, "top_k"),
        ("/v1/completions", false, "top_k"),
    ] {
        let mut asked = question(true);
        asked["prompt"] = "Once".into();
        asked["stream_options"] = json!({"include_usage": asks});
        asked["logprobs"] = (key == "top_logprobs").into();
        asked[key] = 1.into();
        let events = http.post(route, &asked).await.events();
        let (done, chunks) = events.split_last().unwrap();
        assert_eq!(done.1, "[DONE]");
        for (at, (_, data)) in chunks.iter().enumerate() {
            let chunk: Value = serde_json::from_str(data).unwrap();
            let expected = match (asks, at + 1 == chunks.len()) {
                (false, _) => "none",
                (true, false) => "null",
                (true, true) => "object",
            };
            let told = match chunk.get("usage") {
                None => "none",
                Some(Value::Null) => "null",
                Some(_) => "object",
            };
            assert_eq!(told, expected, "{route}: {chunk}");
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn stop_strings_that_are_empty_are_none() {
    let http = HttpDaemon::start().await;
    for (stop, expected) in [
        (json!(""), "42 - 30 = 12."),
        (json!([""]), "42 - 30 = 12."),
        (json!(["", " ="]), "42 - 30"),
        (json!(vec![""; 17]), "42 - 30 = 12."),
    ] {
        let mut asked = question(false);
        asked["stop"] = stop.clone();
        let reply = http.post("/v1/chat/completions", &asked).await;
        assert_eq!(reply.status, 200, "{stop}: {reply:?}");
        let text = &reply.json()["choices"][0]["message"]["content"];
        assert_eq!(text, expected, "{stop}");
        asked["prompt"] = "Once".into();
        let reply = http.post("/v1/completions", &asked).await;
        assert_eq!(reply.status, 200, "{stop}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn completions_are_what_the_same_prompt_gives_over_grpc() {
    let http = HttpDaemon::start().await;
    http.daemon
        .load(format!("{LLAMA}.gguf"), LLAMA)
        .await
        .unwrap();
    let mut grpc = greedy(LLAMA, "Once upon a time", 12);
    let (expected, _) = http.daemon.generate(grpc.clone()).await.unwrap();
    let mut asked =
        json!({"model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12});
    let whole = http.post("/v1/completions", &asked).await.json();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["text"], expected);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");

    asked["stream"] = true.into();
    let reply = http.post("/v1/completions", &asked).await;
    let events = reply.events();
    assert_eq!(events.last().unwrap().1, "[DONE]");
    let text: String = events[..events.len() - 1]
        .iter()
        .map(|(_, data)| serde_json::from_str::<Value>(data).unwrap())
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, expected);

    // A stop string is no part of the text, and the prompt may be ids.
    let stop = expected.split_whitespace().nth(2).unwrap().to_owned();
    grpc.sampling.as_mut().unwrap().stop = vec![stop.clone()];
    let (cut, _) = http.daemon.generate(grpc).await.unwrap();
    let tokens = http
        .post(
            "/tokenize",
            &json!({"content": "Once upon a time", "add_special": true}),
        )
        .await;
    asked = json!({
        "model": LLAMA, "prompt": tokens.json()["tokens"], "temperature": 0, "max_tokens": 12, "stop": stop,
    });
    let whole = http.post("/v1/completions", &asked).await.json();
    assert_eq!(whole["choices"][0]["text"], cut);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn what_the_model_thinks_is_apart_from_what_it_says() {
    let http = HttpDaemon::start().await;
    // The template opens the thinking, which this model never ends.
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>";
    with_template(&http.daemon, "thinker", template);
    let mut asked = question(false);
    asked["model"] = "thinker".into();
    let message =
        http.post("/v1/chat/completions", &asked).await.json()["choices"][0]["message"].clone();
    assert_eq!(message["content"], "");
    let thought = message["reasoning_content"].as_str().unwrap().to_owned();
    assert!(!thought.is_empty());

    asked["stream"] = true.into();
    let reply = http.post("/v1/chat/completions", &asked).await;
    let chunks = reply.events();
    let streamed: String = chunks
        .iter()
        .filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok())
        .filter_map(|chunk| {
            let delta = &chunk["choices"][0]["delta"]["reasoning_content"];
            delta.as_str().map(str::to_owned)
        })
        .collect();
    assert_eq!(streamed, thought);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn tools_reach_templates_that_know_them_and_no_others() {
    let http = HttpDaemon::start().await;
    let template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}{# <tool_call> #}";
    with_template(&http.daemon, "caller", template);
    let tools =
        json!([{"type": "function", "function": {"name": "some_function", "parameters": {}}}]);
    let prompt_tokens = |tools: Value| {
        let mut asked = question(false);
        asked["model"] = "caller".into();
        asked["tools"] = tools;
        asked["max_tokens"] = 1.into();
        let http = &http;
        async move {
            let whole = http.post("/v1/chat/completions", &asked).await.json();
            whole["usage"]["prompt_tokens"].as_u64().unwrap()
        }
    };
    assert!(prompt_tokens(tools.clone()).await > prompt_tokens(json!([])).await);

    let mut asked = question(false);
    asked["tools"] = tools;
    let refused = http.post("/v1/chat/completions", &asked).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "tools");
    asked["tool_choice"] = "none".into();
    assert_eq!(http.post("/v1/chat/completions", &asked).await.status, 200);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn refusals_name_the_field_and_say_what_to_do() {
    let http = HttpDaemon::start().await;
    let rows = [
        ("temperature", json!(-1), "temperature", "INVALID_FIELD"),
        ("max_tokens", json!(0), "max_tokens", "INVALID_FIELD"),
        ("top_p", json!(2), "top_p", "INVALID_FIELD"),
        ("stop", json!(vec!["x"; 257]), "stop", "INVALID_FIELD"),
        ("messages", json!([]), "messages", "INVALID_FIELD"),
        ("n", json!(9), "n", "INVALID_FIELD"),
        ("modalities", json!(["audio"]), "modalities", "UNSUPPORTED"),
        (
            "reasoning_budget",
            json!(-7),
            "reasoning_budget",
            "INVALID_FIELD",
        ),
        ("mirostat", json!(3), "mirostat", "INVALID_FIELD"),
        ("grammar", json!("root = 1"), "grammar", "INVALID_FIELD"),
        ("model", json!("ghost"), "", "model_not_found"),
        ("model", json!(""), "model", "INVALID_FIELD"),
        (
            "messages",
            json!([{"role": "user", "content": "word ".repeat(4000)}]),
            "messages",
            "context_length_exceeded",
        ),
    ];
    for (key, value, param, code) in rows {
        let mut asked = question(false);
        asked[key] = value;
        let reply = http.post("/v1/chat/completions", &asked).await;
        let error = &reply.json()["error"];
        let expected = if code == "model_not_found" { 404 } else { 400 };
        assert_eq!(reply.status, expected, "{key}: {error}");
        assert_eq!(error["code"], code, "{error}");
        // Agents that look for words have llama-server's.
        let words = error["message"].as_str().unwrap();
        let overflows = words.contains("exceeds the available context size");
        assert_eq!(overflows, code == "context_length_exceeded", "{error}");
        assert_eq!(
            error["param"].as_str().unwrap_or_default(),
            param,
            "{error}"
        );
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
    }
    // Fields that ask for what is done anyway are fine.
    let mut asked = question(false);
    for (key, value) in [
        ("n", json!(1)),
        ("logprobs", json!(false)),
        ("response_format", json!({"type": "text"})),
        ("logit_bias", json!({})),
        ("tools", json!([])),
        ("some_new_field", json!({"a": [1]})),
        ("top_p", json!(0)),
    ] {
        asked[key] = value;
    }
    assert_eq!(http.post("/v1/chat/completions", &asked).await.status, 200);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn no_tokens_to_think_with_is_no_thoughts_or_a_refusal_that_names_the_field() {
    let http = HttpDaemon::start().await;
    let said = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    let daemon = &http.daemon;
    with_template(daemon, "opens", &format!("{said}<think>"));
    let told = "{% if enable_thinking|default(true) %}<think>{% endif %}";
    with_template(daemon, "told", &format!("{said}{told}"));
    with_template(daemon, "by_itself", said);
    let ask = async |model: &str, more: Value| {
        let mut asked = question(false);
        asked["model"] = model.into();
        let more = more.as_object().unwrap().clone();
        asked.as_object_mut().unwrap().extend(more);
        http.post("/v1/chat/completions", &asked).await
    };
    let switches = [
        json!({"reasoning_budget": 0}),
        json!({"thinking_budget_tokens": 0}),
        json!({"thinking_token_budget": 0.0}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "none"}),
        json!({"reasoning_budget": 0, "chat_template_kwargs": {"enable_thinking": true}}),
    ];
    for model in ["opens", "told"] {
        let thinks = ask(model, json!({})).await.json();
        let message = &thinks["choices"][0]["message"];
        assert!(message["reasoning_content"].is_string(), "{thinks}");
        for off in &switches {
            let reply = ask(model, off.clone()).await;
            assert_eq!(reply.status, 200, "{model} {off}: {reply:?}");
            let message = reply.json()["choices"][0]["message"].clone();
            assert!(message.get("reasoning_content").is_none(), "{off}");
            assert_ne!(message["content"], "", "{model} {off}");
        }
    }
    // Whether this one thinks is its own affair.
    let refused = ask("by_itself", switches[1].clone()).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    let error = refused.json()["error"].clone();
    assert_eq!(error["param"], "thinking_budget_tokens", "{error}");
    assert_eq!(error["code"], "UNSUPPORTED");
    // What is shown is what is given; elsewhere it is said in other words.
    let shown = json!({
        "model": "opens", "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"enable_thinking": false},
    });
    let shown = http.post("/apply-template", &shown).await.json();
    let (open, closed) = ("x<think>", "\n</think>\n\n");
    let shown = shown["prompt"].as_str().unwrap();
    assert!(
        shown.starts_with(open) && shown.ends_with(closed),
        "{shown}"
    );
    let ollama = json!({
        "model": "opens", "think": false, "stream": false, "options": {"num_predict": 8},
        "messages": [{"role": "user", "content": "42 - 30 = ?"}],
    });
    let answer = http.post("/api/chat", &ollama).await.json();
    assert!(answer["message"].get("thinking").is_none(), "{answer}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn no_bound_is_minus_one_and_whole_numbers_may_be_real_ones() {
    let http = HttpDaemon::start().await;
    for (key, value) in [
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(16.0)),
        ("top_k", json!(-1)),
        ("reasoning_budget", json!(-1)),
        // It has none.
        ("reasoning_budget", json!(0)),
        ("mirostat", json!(0)),
    ] {
        let mut asked = question(false);
        asked[key] = value;
        let reply = http.post("/v1/chat/completions", &asked).await;
        assert_eq!(reply.status, 200, "{key}: {reply:?}");
        let choice = reply.json()["choices"][0].clone();
        assert_eq!(choice["message"]["content"], "42 - 30 = 12.", "{key}");
    }
    for (key, value) in [
        ("max_completion_tokens", json!(0)),
        ("max_completion_tokens", json!(i64::MIN)),
        ("max_tokens", json!(0)),
    ] {
        let mut asked = question(false);
        asked.as_object_mut().unwrap().remove("max_tokens");
        asked[key] = value.clone();
        let error = http.post("/v1/chat/completions", &asked).await.json()["error"].clone();
        assert_eq!(error["param"], key, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("{key}: {value} is out of range: ")),
            "{message}"
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}
