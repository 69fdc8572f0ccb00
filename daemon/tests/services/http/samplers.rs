//! Samplers and what is told of them, in each dialect; and what is told while an answer comes.

use rocmforged::End;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::http::client::{HttpDaemon, LLAMA, piece, send};
use crate::templates::with_template;

/// The routes that generate, with a request each and where their text is.
fn routes() -> [(&'static str, Value, &'static str); 7] {
    let chat = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let prompt = "Once upon a time";
    [
        (
            "/completion",
            json!({"model": LLAMA, "prompt": prompt, "n_predict": 12}),
            "/content",
        ),
        (
            "/v1/completions",
            json!({"model": LLAMA, "prompt": prompt, "max_tokens": 12}),
            "/choices/0/text",
        ),
        (
            "/v1/chat/completions",
            json!({"model": LLAMA, "messages": chat, "max_tokens": 12}),
            "/choices/0/message/content",
        ),
        (
            "/v1/responses",
            json!({"model": LLAMA, "input": chat, "max_output_tokens": 12}),
            "/output/0/content/0/text",
        ),
        (
            "/v1/messages",
            json!({"model": LLAMA, "messages": chat, "max_tokens": 12}),
            "/content/0/text",
        ),
        (
            "/api/generate",
            json!({"model": LLAMA, "prompt": prompt, "stream": false, "options": {"num_predict": 12}}),
            "/response",
        ),
        (
            "/api/chat",
            json!({"model": LLAMA, "messages": chat, "stream": false, "options": {"num_predict": 12}}),
            "/message/content",
        ),
    ]
}

/// The request with more fields, where its dialect has them.
fn with(request: &Value, more: &Value) -> Value {
    let mut request = request.clone();
    let into = match request.get("options") {
        Some(_) => &mut request["options"],
        None => &mut request,
    };
    let members = more.as_object().unwrap().clone();
    into.as_object_mut().unwrap().extend(members);
    request
}

#[tokio::test]
async fn every_dialect_takes_samplers_and_their_order() {
    let http = HttpDaemon::start().await;
    for (path, request, text) in routes() {
        let told = async |more: Value| {
            let reply = http.post(path, &with(&request, &more)).await;
            assert_eq!(reply.status, 200, "{path} {more}: {reply:?}");
            reply.json().pointer(text).cloned().unwrap()
        };
        let greedy = told(json!({"temperature": 0})).await;
        // Each leaves the most likely token alone, however hot the draw would be.
        for more in [
            json!({"temperature": 9, "samplers": ["top_k", "temperature"], "top_k": 1}),
            json!({"temperature": 9, "samplers": "kt", "top_k": 1}),
            json!({"temperature": 1, "mirostat": 2, "mirostat_tau": 0, "top_k": 0}),
            json!({"temperature": 9, "top_n_sigma": 1e-6}),
            json!({"temperature": 9, "min_p": 0.99999}),
            json!({"temperature": 0, "xtc_probability": 1, "xtc_threshold": 0.51}),
        ] {
            assert_eq!(told(more.clone()).await, greedy, "{path} {more}");
        }
        // These take another way.
        for more in [
            json!({"temperature": 0, "xtc_probability": 1, "xtc_threshold": 0, "top_p": 1, "min_p": 0}),
            json!({"temperature": 99, "samplers": ["temperature"], "seed": 3}),
            json!({"temperature": 1, "dynatemp_range": 99, "dynatemp_exponent": 0, "top_k": 0,
                "top_p": 1, "min_p": 0, "seed": 3}),
        ] {
            assert_ne!(told(more.clone()).await, greedy, "{path} {more}");
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn every_dialect_refuses_hostile_samplers_by_name() {
    let http = HttpDaemon::start().await;
    for (path, request, _) in routes() {
        for (field, value, range) in [
            ("typical_p", json!(0), "above 0"),
            ("top_n_sigma", json!(-3), "at least 0"),
            ("xtc_probability", json!(1.5), "from 0 to 1"),
            ("xtc_threshold", json!(-1), "from 0 to 1"),
            ("dynatemp_range", json!(-0.5), "at least 0"),
            ("dynatemp_exponent", json!(1e300), "at least 0"),
            ("min_keep", json!(-1), "at least 0"),
            ("dry_multiplier", json!(-1), "at least 0"),
            ("dry_base", json!(0.5), "at least 1"),
            ("dry_allowed_length", json!(0), "at least 1"),
            ("dry_penalty_last_n", json!(-2), "-1 for the whole context"),
            ("dry_sequence_breakers", json!([""]), "1 to 40"),
            ("mirostat", json!(3), "0 for none"),
            ("mirostat_tau", json!(-1), "at least 0"),
            ("mirostat_eta", json!(2), "from 0 to 1"),
            ("samplers", json!(["beam"]), "there is no sampler 'beam'"),
            ("samplers", json!("kq"), "there is no sampler 'q'"),
            ("logit_bias", json!({"a": 101}), "from -100 to 100"),
        ] {
            let asked = with(&request, &json!({field: value}));
            let reply = http.post(path, &asked).await;
            assert_eq!(reply.status, 400, "{path} {field}: {reply:?}");
            let told = reply.text.contains(field) && reply.text.contains(range);
            assert!(told, "{path} {field}: {}", reply.text);
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn texts_are_biased_and_forbidden_in_every_dialect() {
    let http = HttpDaemon::start().await;
    let tokens = json!({"model": LLAMA, "content": "z", "add_special": false});
    let tokens = http.post("/tokenize", &tokens).await.json()["tokens"].clone();
    let id = tokens[0].as_u64().unwrap();
    assert_eq!(tokens.as_array().unwrap().len(), 1);
    for (path, request, text) in routes() {
        let told = async |bias: Value| {
            let more = json!({"temperature": 0, "logit_bias": bias});
            let reply = http.post(path, &with(&request, &more)).await;
            assert_eq!(reply.status, 200, "{path} {bias}: {reply:?}");
            reply.json().pointer(text).cloned().unwrap()
        };
        let by_text = told(json!([["z", 100]])).await;
        assert_eq!(by_text, told(json!({"z": 100})).await, "{path}");
        assert_eq!(by_text, told(json!([[id, 100]])).await, "{path}");
        let repeated = by_text.as_str().unwrap().matches('z').count();
        assert!(repeated > 8, "{path}: {by_text}");
        // What is forbidden stays so, whatever else is added.
        let never = told(json!([["z", false], ["z", 100]])).await;
        assert!(!never.as_str().unwrap().contains('z'), "{path}: {never}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// The pieces of a stream of `/completion`.
async fn pieces(http: &HttpDaemon, path: &str, asked: &Value) -> Vec<Value> {
    let asked = with(asked, &json!({"stream": true}));
    let events = http.post(path, &asked).await.events().into_iter();
    let data = events.filter(|(_, data)| data != "[DONE]");
    data.map(|(_, data)| serde_json::from_str(&data).unwrap())
        .collect()
}

#[tokio::test]
async fn completion_tells_the_probabilities_of_its_tokens() {
    let http = HttpDaemon::start().await;
    let mut asked = json!({
        "model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "n_predict": 6, "n_probs": 3,
    });
    let whole = http.post("/completion", &asked).await.json();
    let tokens = whole["completion_probabilities"].as_array().unwrap();
    assert_eq!(tokens.len(), 6, "{whole}");
    let mut text = String::new();
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(
            (&top[0]["id"], &top[0]["logprob"]),
            (&token["id"], &token["logprob"])
        );
        assert!(token["logprob"].as_f64() <= Some(0.0) && token["bytes"].is_array());
        text += token["token"].as_str().unwrap();
    }
    assert_eq!(whole["content"], text);
    let streamed = pieces(&http, "/completion", &asked).await;
    let found = streamed
        .iter()
        .filter_map(|piece| piece["completion_probabilities"].as_array());
    assert_eq!(&found.flatten().cloned().collect::<Vec<_>>(), tokens);
    asked["response_fields"] = json!(["content"]);
    let few = http.post("/completion", &asked).await.json();
    assert_eq!(few, json!({"content": text}));

    // Behind the samplers two tokens are left, with all of the probability.
    let drawn = json!({
        "model": LLAMA, "prompt": "Once upon a time", "temperature": 2, "seed": 1, "top_k": 2,
        "top_p": 1, "min_p": 0, "n_predict": 6, "n_probs": 5, "post_sampling_probs": true,
    });
    let whole = http.post("/completion", &drawn).await.json();
    for token in whole["completion_probabilities"].as_array().unwrap() {
        let top = token["top_probs"].as_array().unwrap();
        let probs: Vec<f64> = top.iter().map(|of| of["prob"].as_f64().unwrap()).collect();
        assert_eq!(probs.len(), 2, "{token}");
        assert!((probs.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{token}");
        assert!(
            top.iter()
                .any(|of| of["id"] == token["id"] && of["prob"] == token["prob"])
        );
    }
    let many = json!({"model": LLAMA, "prompt": "a", "n_probs": 21});
    let refused = http.post("/completion", &many).await;
    assert_eq!(refused.status, 400);
    assert!(refused.text.contains("n_probs"), "{}", refused.text);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn streams_tell_the_time_so_far_where_they_are_asked() {
    let http = HttpDaemon::start().await;
    let routes = routes();
    for (path, request, _) in [&routes[0], &routes[2]] {
        let request = &with(request, &json!({"ignore_eos": true}));
        let plain = pieces(&http, path, request).await;
        let pieces = pieces(
            &http,
            path,
            &with(request, &json!({"timings_per_token": true})),
        )
        .await;
        let is_last = |piece: &Value| piece["stop"] == true;
        assert!(
            !plain
                .iter()
                .any(|piece| !is_last(piece) && piece["timings"].is_object())
        );
        let counts = pieces.iter().map(|piece| &piece["timings"]["predicted_n"]);
        let counts: Vec<u64> = counts.map(|n| n.as_u64().unwrap()).collect();
        assert!(
            counts.is_sorted() && counts.last() == Some(&12),
            "{path}: {counts:?}"
        );
        assert!(
            counts.iter().any(|n| (1..12).contains(n)),
            "{path}: {counts:?}"
        );
        let last = &pieces.last().unwrap()["timings"];
        assert!(
            last["prompt_n"].as_u64() > Some(0) && last["cache_n"].is_u64(),
            "{last}"
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn tokens_of_an_input_are_counted_as_its_answer_does() {
    let http = HttpDaemon::start().await;
    let messages = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let chat = json!({"model": LLAMA, "messages": messages, "max_tokens": 1});
    let begun = json!({
        "model": LLAMA, "max_tokens": 1, "continue_final_message": true, "add_generation_prompt": false,
        "messages": [messages[0], {"role": "assistant", "content": "42 - 30 ="}],
    });
    for asked in [chat, begun] {
        let whole = http.post("/v1/chat/completions", &asked).await.json();
        for path in [
            "/v1/chat/completions/input_tokens",
            "/chat/completions/input_tokens",
        ] {
            let counted = http.post(path, &asked).await.json();
            assert_eq!(
                counted["input_tokens"], whole["usage"]["prompt_tokens"],
                "{whole}"
            );
        }
    }
    let response =
        json!({"model": LLAMA, "input": "hi", "instructions": "Be brief.", "max_output_tokens": 1});
    let whole = http.post("/v1/responses", &response).await.json();
    let counted = http
        .post("/v1/responses/input_tokens", &response)
        .await
        .json();
    assert_eq!(counted["object"], "response.input_tokens");
    assert_eq!(
        counted["input_tokens"], whole["usage"]["input_tokens"],
        "{whole}"
    );
    // What it goes on from counts, too.
    let later = json!({"model": LLAMA, "input": "more", "previous_response_id": whole["id"]});
    let more = http.post("/responses/input_tokens", &later).await.json();
    assert!(
        more["input_tokens"].as_u64() > counted["input_tokens"].as_u64(),
        "{more}"
    );
    let wrong = json!({"model": LLAMA, "messages": []});
    let refused = http.post("/v1/chat/completions/input_tokens", &wrong).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    assert_eq!(http.get("/lora-adapters").await.json(), json!([]));
    assert_eq!(http.stop().await, End::Drained);
}

/// The ids are those of the rendered prompt, on each route that counts, and only where asked for.
#[tokio::test]
async fn counted_tokens_come_with_their_ids_where_the_uri_asks_for_them() {
    let http = HttpDaemon::start().await;
    let messages = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let chat = json!({"model": LLAMA, "messages": messages});
    let rendered = http.post("/apply-template", &chat).await.json()["prompt"].clone();
    let asked = json!({"model": LLAMA, "content": rendered, "add_special": true});
    let ids = http.post("/tokenize", &asked).await.json()["tokens"].clone();
    let n = ids.as_array().expect("a list of ids").len();
    assert!(n > 8, "{ids}");
    let response = json!({"model": LLAMA, "input": "42 - 30 = ?"});
    for (path, asked) in [
        ("/v1/chat/completions/input_tokens", &chat),
        ("/v1/responses/input_tokens", &response),
        ("/v1/messages/count_tokens", &chat),
    ] {
        let counted = http.post(&format!("{path}?tokens=true"), asked).await;
        assert_eq!(counted.status, 200, "{path}: {counted:?}");
        let counted = counted.json();
        assert_eq!(counted["tokens"], ids, "{path}");
        assert_eq!(counted["input_tokens"], n, "{path}");
        for uri in [path.to_owned(), format!("{path}?tokens=false")] {
            let short = http.post(&uri, asked).await.json();
            assert_eq!(short["input_tokens"], n, "{uri}");
            assert_eq!(short.get("tokens"), None, "{uri}");
            assert_eq!(short.get("object"), counted.get("object"), "{uri}");
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn thinking_ends_when_it_is_told_to() {
    const CONTROL: &str = "/v1/chat/completions/control";
    let http = HttpDaemon::start().await;
    let words = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    with_template(&http.daemon, "thinks", &format!("{words}<think>"));
    let asked = json!({
        "model": "thinks", "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0, "ignore_eos": true, "stream": true, "reasoning_control": true,
    });
    let stream = UnixStream::connect(http.path()).await.unwrap();
    let response = send(
        stream,
        "POST",
        "/v1/chat/completions",
        &[],
        &asked.to_string(),
    )
    .await;
    let mut body = response.into_body();
    let mut text = String::new();
    let (mut id, mut told) = (String::new(), false);
    while let Some(more) = piece(&mut body).await {
        text += std::str::from_utf8(&more).unwrap();
        if !told && text.matches("reasoning_content").count() > 3 {
            let first = text.lines().next().unwrap();
            let first: Value = serde_json::from_str(first.strip_prefix("data: ").unwrap()).unwrap();
            id = first["id"].as_str().unwrap().to_owned();
            let done = http
                .post(CONTROL, &json!({"id": id, "action": "reasoning_end"}))
                .await;
            assert_eq!((done.status, done.json()), (200, json!({"success": true})));
            told = true;
        }
    }
    let (mut thought, mut said) = (String::new(), String::new());
    for line in text.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let chunk: Value = serde_json::from_str(&format!("{{{line}")).unwrap();
        let delta = &chunk["choices"][0]["delta"];
        thought += delta["reasoning_content"].as_str().unwrap_or_default();
        said += delta["content"].as_str().unwrap_or_default();
    }
    assert!(told && thought.contains("budget is used up"), "{thought}");
    assert!(!said.is_empty(), "{text}");
    // It is over, so that nothing more can be told to it.
    let action = json!({"id": id, "action": "reasoning_end"});
    let late = http.post(CONTROL, &action).await;
    assert_eq!(late.status, 400, "{late:?}");
    assert!(late.text.contains("reasoning_control"), "{}", late.text);
    let unknown = http.post(CONTROL, &json!({"id": id, "action": "x"})).await;
    assert!(unknown.status == 400 && unknown.text.contains("reasoning_end"));
    assert_eq!(http.stop().await, End::Drained);
}
