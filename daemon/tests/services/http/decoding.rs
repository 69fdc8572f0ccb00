//! Log-probabilities, bias, ends, formats and several answers, over HTTP.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA};

fn question(more: &Value) -> Value {
    let mut asked = json!({
        "model": LLAMA,
        "messages": [{"role": "user", "content": "42 - 30 = ?"}],
        "temperature": 0,
        "max_tokens": 64,
    });
    let members = more.as_object().unwrap().clone();
    asked.as_object_mut().unwrap().extend(members);
    asked
}

/// A schema with the answers that it allows.
fn verdict() -> (Value, [Value; 2]) {
    let schema = json!({
        "type": "object", "properties": {"right": {"type": "boolean"}}, "required": ["right"],
        "additionalProperties": false,
    });
    (schema, [json!({"right": true}), json!({"right": false})])
}

async fn posted(http: &HttpDaemon, target: &str, body: &Value) -> Value {
    let reply = http.post(target, body).await;
    assert_eq!(reply.status, 200, "{body}: {reply:?}");
    reply.json()
}

#[tokio::test]
async fn chats_tell_the_log_probabilities_of_their_tokens() {
    let http = HttpDaemon::start().await;
    let asked = question(&json!({"logprobs": true, "top_logprobs": 3}));
    let whole = posted(&http, "/v1/chat/completions", &asked).await;
    let choice = &whole["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
    let text: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap())
        .map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap())
        .collect();
    assert_eq!(
        String::from_utf8(text).unwrap(),
        choice["message"]["content"].as_str().unwrap()
    );
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(top[0]["logprob"], token["logprob"], "it is greedy");
        assert!(top[1]["logprob"].as_f64() <= top[0]["logprob"].as_f64());
    }

    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    // A stop string that may begin holds text back, and its scores.
    streamed["stop"] = json!(["12.x"]);
    let reply = http.post("/v1/chat/completions", &streamed).await;
    let mut found = Vec::new();
    for (_, data) in reply.events().iter().filter(|(_, data)| data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).unwrap();
        let content = &chunk["choices"][0]["logprobs"]["content"];
        found.extend(content.as_array().cloned().unwrap_or_default());
    }
    assert_eq!(&found, tokens);

    // Tokens of a stop string that ends the text are none of it.
    for stream in [false, true] {
        let mut stopped = asked.clone();
        stopped["stop"] = json!(["30"]);
        stopped["stream"] = stream.into();
        let reply = http.post("/v1/chat/completions", &stopped).await;
        let (mut content, mut told) = (String::new(), String::new());
        let chunks = match stream {
            true => reply.events().into_iter().map(|(_, data)| data).collect(),
            false => vec![reply.text],
        };
        for chunk in chunks.iter().filter(|data| *data != "[DONE]") {
            let choice = serde_json::from_str::<Value>(chunk).unwrap()["choices"][0].clone();
            let said = if stream {
                &choice["delta"]
            } else {
                &choice["message"]
            };
            content.push_str(said["content"].as_str().unwrap_or_default());
            for token in choice["logprobs"]["content"]
                .as_array()
                .into_iter()
                .flatten()
            {
                told.push_str(token["token"].as_str().unwrap());
            }
        }
        assert_eq!((&*content, &*told), ("42 - ", "42 - "), "{stream}");
    }

    let plain = posted(&http, "/v1/chat/completions", &question(&json!({}))).await;
    assert!(plain["choices"][0]["logprobs"].is_null());
    assert_eq!(http.stop().await, End::Drained);
}

/// What begins as a stop string, and is none until later, holds back more than one token.
#[tokio::test]
async fn a_stop_string_that_begins_with_itself_has_no_scores() {
    let http = HttpDaemon::start().await;
    for (written, stop, left) in [
        ("aaab", "aab", "a"),
        ("....!", "..!", ".."),
        ("ab", "b", "a"),
    ] {
        let mut asked = question(&json!({
            "grammar": format!("root ::= \"{written}\""), "stop": [stop], "logprobs": true,
        }));
        let whole = posted(&http, "/v1/chat/completions", &asked).await;
        let of_whole = whole["choices"][0].clone();
        asked["stream"] = true.into();
        let streamed = http.post("/v1/chat/completions", &asked).await;
        let of_stream = streamed.events().into_iter().filter_map(|(_, data)| {
            let chunk: Value = serde_json::from_str(&data).ok()?;
            Some(chunk["choices"][0].clone())
        });
        for (choices, said) in [(vec![of_whole], "message"), (of_stream.collect(), "delta")] {
            let (mut content, mut told) = (String::new(), String::new());
            for choice in choices {
                content += choice[said]["content"].as_str().unwrap_or_default();
                let tokens = choice["logprobs"]["content"].as_array();
                for token in tokens.into_iter().flatten() {
                    told += token["token"].as_str().unwrap();
                }
            }
            assert_eq!((&*content, &*told), (left, left), "{written:?}: {said}");
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn completions_tell_them_by_place() {
    let http = HttpDaemon::start().await;
    let mut asked = json!({
        "model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "logprobs": 2,
    });
    let whole = posted(&http, "/v1/completions", &asked).await;
    let told = &whole["choices"][0]["logprobs"];
    let tokens: Vec<_> = told["tokens"].as_array().unwrap().iter().collect();
    let text: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        assert_eq!(told["text_offset"][i], offset);
        offset += token.as_str().unwrap().chars().count();
        let top = told["top_logprobs"][i].as_object().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(top[token.as_str().unwrap()], told["token_logprobs"][i]);
    }
    asked["stream"] = true.into();
    let reply = http.post("/v1/completions", &asked).await;
    let mut offsets = Vec::new();
    for (_, data) in reply.events().iter().filter(|(_, data)| data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).unwrap();
        let more = &chunk["choices"][0]["logprobs"]["text_offset"];
        offsets.extend(more.as_array().cloned().unwrap_or_default());
    }
    assert_eq!(json!(offsets), told["text_offset"]);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn several_prompts_are_continued_in_one_answer() {
    let http = HttpDaemon::start().await;
    let ask = |prompt: Value, n: u32| json!({"model": LLAMA, "prompt": prompt, "temperature": 0, "max_tokens": 4, "n": n});
    let prompts = ["Once upon a time", "42 - 30 =", "The whale"];
    let whole = posted(&http, "/v1/completions", &ask(json!(prompts), 2)).await;
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    let (mut tokens, mut generated) = (0, 0);
    for (at, prompt) in prompts.iter().enumerate() {
        let alone = posted(&http, "/v1/completions", &ask(json!(prompt), 1)).await;
        tokens += alone["usage"]["prompt_tokens"].as_u64().unwrap();
        generated += 2 * alone["usage"]["completion_tokens"].as_u64().unwrap();
        for n in 0..2 {
            let choice = &choices[2 * at + n];
            assert_eq!(choice["index"], 2 * at + n);
            assert_eq!(choice["text"], alone["choices"][0]["text"]);
        }
    }
    assert_eq!(whole["usage"]["prompt_tokens"], tokens);
    assert_eq!(whole["usage"]["completion_tokens"], generated);
    let mut streamed = ask(json!(prompts), 1);
    streamed["stream"] = true.into();
    let refused = http.post("/v1/completions", &streamed).await;
    assert_eq!(refused.json()["error"]["param"], "stream");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn one_of_is_held_to_as_any_of() {
    let http = HttpDaemon::start().await;
    let kind = |name: &str| {
        json!({"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"],
            "additionalProperties": false})
    };
    let schema = json!({"oneOf": [kind("a"), kind("b")]});
    let asked = question(&json!({"json_schema": schema}));
    let whole = posted(&http, "/v1/chat/completions", &asked).await;
    let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
    let held: Value = serde_json::from_str(content).unwrap();
    assert!(held["kind"] == "a" || held["kind"] == "b", "{held}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn bias_and_ends_reach_the_engine_in_every_dialect() {
    let http = HttpDaemon::start().await;
    let ids = |text: &str| {
        let asked = json!({"model": LLAMA, "content": text});
        let http = &http;
        async move { posted(http, "/tokenize", &asked).await["tokens"].clone() }
    };
    let banned = ids("42").await[0].clone();
    let plain = "42 - 30 = 12.";
    let bias = json!({banned.to_string(): -100});
    let content = |more: Value| {
        let (http, asked) = (&http, question(&more));
        async move {
            let whole = posted(http, "/v1/chat/completions", &asked).await;
            whole["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .to_owned()
        }
    };
    assert_eq!(content(json!({})).await, plain);
    assert!(!content(json!({"logit_bias": bias})).await.starts_with("42"));
    let longer = content(json!({"min_tokens": 30})).await;
    assert!(
        longer.starts_with(plain) && longer.len() > plain.len(),
        "{longer}"
    );
    let longer = content(json!({"ignore_eos": true})).await;
    assert!(
        longer.starts_with(plain) && longer.len() > plain.len(),
        "{longer}"
    );
    assert_eq!(content(json!({"stop_token_ids": [banned]})).await, "");

    let messages = json!([{"role": "user", "content": "42 - 30 = ?"}]);
    let options = json!({"temperature": 0, "logit_bias": bias});
    let asked = json!({"model": LLAMA, "messages": messages, "stream": false, "options": options});
    let said = posted(&http, "/api/chat", &asked).await["message"]["content"].clone();
    assert!(!said.as_str().unwrap().starts_with("42"), "{said}");
    let asked =
        json!({"model": LLAMA, "input": "42 - 30 = ?", "temperature": 0, "logit_bias": bias});
    let said =
        posted(&http, "/v1/responses", &asked).await["output"][0]["content"][0]["text"].clone();
    assert!(!said.as_str().unwrap().starts_with("42"), "{said}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn answers_are_held_to_a_schema_in_every_dialect() {
    let http = HttpDaemon::start().await;
    let (schema, allowed) = verdict();
    let parsed = |text: &Value| {
        let value: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        assert!(allowed.contains(&value), "{value}");
    };
    let named = json!({"type": "json_schema", "json_schema": {"name": "verdict", "strict": true, "schema": schema}});
    let flat = json!({"type": "json_schema", "name": "verdict", "schema": schema});
    let messages = json!([{"role": "user", "content": "42 - 30 = ?"}]);

    for format in [
        json!({"response_format": named}),
        json!({"json_schema": schema}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
    ] {
        let whole = posted(&http, "/v1/chat/completions", &question(&format)).await;
        parsed(&whole["choices"][0]["message"]["content"]);
        assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    }
    let asked =
        json!({"model": LLAMA, "prompt": "Once", "max_tokens": 300, "response_format": named});
    parsed(&posted(&http, "/v1/completions", &asked).await["choices"][0]["text"]);
    let asked = json!({"model": LLAMA, "input": "42 - 30 = ?", "text": {"format": flat}});
    let whole = posted(&http, "/v1/responses", &asked).await;
    parsed(&whole["output"][0]["content"][0]["text"]);
    assert_eq!(whole["text"]["format"]["type"], "json_schema");
    let asked = json!({"model": LLAMA, "messages": messages, "max_tokens": 300, "output_config": {"format": flat}});
    parsed(&posted(&http, "/v1/messages", &asked).await["content"][0]["text"]);
    let asked = json!({"model": LLAMA, "messages": messages, "format": schema, "stream": false});
    parsed(&posted(&http, "/api/chat", &asked).await["message"]["content"]);
    let asked = json!({"model": LLAMA, "prompt": "42 - 30 = ?", "format": schema, "stream": false});
    parsed(&posted(&http, "/api/generate", &asked).await["response"]);

    let asked = json!({
        "model": LLAMA, "messages": messages, "format": "json", "stream": false,
        "options": {"num_predict": 200, "seed": 4},
    });
    let said = posted(&http, "/api/chat", &asked).await["message"]["content"].clone();
    assert!(said.as_str().unwrap().starts_with('{'), "{said}");
    let lark = question(&json!({"grammar": "%llguidance {}\nstart: \"a\" \"b\"{3}"}));
    let whole = posted(&http, "/v1/chat/completions", &lark).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "abbb");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn several_answers_are_told_by_their_index() {
    let http = HttpDaemon::start().await;
    let story = json!({
        "n": 3, "seed": 5, "temperature": 1, "max_tokens": 12, "logprobs": true,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    });
    let whole = posted(&http, "/v1/chat/completions", &question(&story)).await;
    let choices = whole["choices"].as_array().unwrap();
    let text = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
    let texts: Vec<_> = choices.iter().map(text).collect();
    assert_eq!(texts.len(), 3);
    let n_scores = |c: &Value| c["logprobs"]["content"].as_array().unwrap().len() as u64;
    let counted: u64 = choices.iter().map(n_scores).sum();
    assert_eq!(whole["usage"]["completion_tokens"], counted);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        // Each is what a request of its own seed gives.
        let mut alone = story.clone();
        alone["n"] = 1.into();
        alone["seed"] = (5 + i).into();
        let one = posted(&http, "/v1/chat/completions", &question(&alone)).await;
        assert_eq!(text(&one["choices"][0]), texts[i]);
        assert_eq!(
            one["usage"]["prompt_tokens"],
            whole["usage"]["prompt_tokens"]
        );
    }
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");

    let mut streamed = story.clone();
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let reply = http
        .post("/v1/chat/completions", &question(&streamed))
        .await;
    let events = reply.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done.1, "[DONE]");
    let mut parts = vec![(0, String::new(), 0); 3];
    let mut usage = Value::Null;
    for (_, data) in chunks {
        let chunk: Value = serde_json::from_str(data).unwrap();
        match chunk["choices"].as_array().unwrap().as_slice() {
            [] => usage = chunk["usage"].clone(),
            [choice] => {
                let (roles, text, ends) = &mut parts[choice["index"].as_u64().unwrap() as usize];
                *roles += u32::from(choice["delta"]["role"].is_string());
                text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
                assert_eq!(*ends, 0, "nothing comes behind the end");
                *ends += u32::from(choice["finish_reason"].is_string());
            }
            more => panic!("{more:?}"),
        }
    }
    assert_eq!(usage, whole["usage"]);
    for (i, (roles, text, ends)) in parts.iter().enumerate() {
        assert_eq!((roles, text, ends), (&1, &texts[i], &1));
    }

    let asked = json!({
        "model": LLAMA, "prompt": "Once upon a time", "n": 2, "best_of": 2, "seed": 1, "max_tokens": 6,
    });
    let whole = posted(&http, "/v1/completions", &asked).await;
    let indexes: Vec<_> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["index"])
        .collect();
    assert_eq!(indexes, [0, 1]);
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn what_cannot_be_is_refused_by_its_field() {
    let http = HttpDaemon::start().await;
    let bias: serde_json::Map<_, _> = (0..1025).map(|i| (i.to_string(), json!(1))).collect();
    let rows = [
        (json!({"n": 9}), "n"),
        (json!({"n": 0}), "n"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {"word": "x"}}), "logit_bias"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"logit_bias": bias}), "logit_bias"),
        (json!({"min_tokens": 65}), "min_tokens"),
        (json!({"stop_token_ids": [99_999_999]}), "stop_token_ids"),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format",
        ),
        (json!({"json_schema": {"type": "strnig"}}), "json_schema"),
        (
            json!({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}),
            "json_schema",
        ),
        (json!({"grammar": "root ::= \"a"}), "grammar"),
        (json!({"grammar": "%llguidance {}\nnothing"}), "grammar"),
        (
            json!({"json_schema": {}, "grammar": "%llguidance {}\nstart: \"a\""}),
            "grammar",
        ),
        (json!({"json_schema": {}, "ignore_eos": true}), "ignore_eos"),
    ];
    for (more, field) in rows {
        let reply = http.post("/v1/chat/completions", &question(&more)).await;
        let error = &reply.json()["error"];
        assert_eq!(reply.status, 400, "{more}: {error}");
        assert_eq!(error["param"], field, "{error}");
    }
    let asked =
        json!({"model": LLAMA, "messages": [{"role": "user", "content": "hi"}], "format": "yaml"});
    let reply = http.post("/api/chat", &asked).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text.contains("format"), "{}", reply.text);
    assert_eq!(http.stop().await, End::Drained);
}
