//! Prompts that are repeated, log-probabilities of a response's text, and grammars in GBNF.

use rocmforged::End;
use serde_json::{Value, json};

use super::client::{HttpDaemon, LLAMA};

async fn posted(http: &HttpDaemon, route: &str, asked: &Value) -> Value {
    let reply = http.post(route, asked).await;
    assert_eq!(reply.status, 200, "{asked}: {reply:?}");
    reply.json()
}

#[tokio::test]
async fn a_prompt_is_repeated_with_its_log_probabilities() {
    let http = HttpDaemon::start().await;
    let prompt = "Once upon a time";
    let plain =
        json!({"model": LLAMA, "prompt": prompt, "temperature": 0, "max_tokens": 6, "logprobs": 1});
    let plain = posted(&http, "/v1/completions", &plain).await["choices"][0].clone();
    let asked = |more: Value| {
        let mut asked = json!({
            "model": LLAMA, "prompt": prompt, "echo": true, "temperature": 0, "max_tokens": 6, "logprobs": 1,
        });
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        asked
    };
    let echoed = posted(&http, "/v1/completions", &asked(json!({}))).await;
    let choice = &echoed["choices"][0];
    let text = format!("{prompt}{}", plain["text"].as_str().unwrap());
    assert_eq!(choice["text"], text);
    let told = &choice["logprobs"];
    let list = |key: &str| told[key].as_array().unwrap().clone();
    let n_prompt = echoed["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(key).len(), n_prompt + 6, "{key}");
    }
    assert!(list("token_logprobs")[0].is_null());
    assert!(
        list("token_logprobs")[1..]
            .iter()
            .all(|p| p.as_f64().unwrap() <= 0.0)
    );
    assert_eq!(
        list("tokens")[n_prompt..],
        plain["logprobs"]["tokens"].as_array().unwrap()[..]
    );
    let offsets = list("text_offset");
    assert!(
        offsets
            .windows(2)
            .all(|two| two[0].as_u64() <= two[1].as_u64()),
        "{offsets:?}"
    );

    // The prompt alone, scored; and what the scores of the same text are.
    let alone = asked(json!({"max_tokens": 0}));
    let alone = posted(&http, "/v1/completions", &alone).await;
    assert_eq!(alone["choices"][0]["text"], prompt);
    assert_eq!(alone["choices"][0]["finish_reason"], "length");
    assert_eq!(alone["usage"]["completion_tokens"], 0);
    let scored = alone["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(scored[..], list("token_logprobs")[..n_prompt]);

    // In a stream, and for each of several answers.
    let streamed = asked(json!({"stream": true, "n": 2}));
    let reply = http.post("/v1/completions", &streamed).await;
    let mut texts = [String::new(), String::new()];
    for (_, data) in reply.events().iter().filter(|(_, data)| data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).unwrap();
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, [text.clone(), text]);

    // Token ids are repeated as their text, and without log-probabilities nothing is scored.
    let ids = posted(
        &http,
        "/tokenize",
        &json!({"model": LLAMA, "content": prompt, "add_special": true}),
    )
    .await;
    let by_ids = asked(json!({"prompt": ids["tokens"], "logprobs": null}));
    let by_ids = posted(&http, "/v1/completions", &by_ids).await;
    assert!(
        by_ids["choices"][0]["text"]
            .as_str()
            .unwrap()
            .contains(prompt)
    );
    assert!(by_ids["choices"][0]["logprobs"].is_null());
    for (more, field) in [
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"prompt": "whale ".repeat(5000)}), "prompt"),
        (json!({"max_tokens": 0, "stream": true}), "stream"),
    ] {
        let reply = http.post("/v1/completions", &asked(more)).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        assert_eq!(reply.json()["error"]["param"], field, "{reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_response_tells_the_log_probabilities_of_its_text() {
    let http = HttpDaemon::start().await;
    let mut asked = json!({
        "model": LLAMA, "input": "42 - 30 = ?", "temperature": 0, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    });
    let whole = posted(&http, "/v1/responses", &asked).await;
    let text = &whole["output"][0]["content"][0];
    let told = text["logprobs"].as_array().unwrap();
    let said: String = told
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert_eq!(said, text["text"].as_str().unwrap());
    for token in told {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(
            token["top_logprobs"][0]["logprob"], token["logprob"],
            "it is greedy"
        );
    }
    asked["stream"] = true.into();
    let reply = http.post("/v1/responses", &asked).await;
    let mut streamed = Vec::new();
    for (name, data) in reply.events() {
        let data: Value = serde_json::from_str(&data).unwrap();
        match name.as_str() {
            "response.output_text.delta" => {
                streamed.extend(data["logprobs"].as_array().unwrap().clone());
            }
            "response.output_text.done" => assert_eq!(data["logprobs"], text["logprobs"]),
            _ => {}
        }
    }
    assert_eq!(json!(streamed), text["logprobs"]);
    let none = json!({"model": LLAMA, "input": "42 - 30 = ?", "temperature": 0});
    let none = posted(&http, "/v1/responses", &none).await;
    assert_eq!(none["output"][0]["content"][0]["logprobs"], json!([]));
    asked["top_logprobs"] = 21.into();
    let reply = http.post("/v1/responses", &asked).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("top_logprobs"))
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn answers_are_held_to_gbnf_in_each_dialects_field() {
    let http = HttpDaemon::start().await;
    let list = "root ::= \"[\" item (\",\" item){2} \"]\"\nitem ::= [0-9]{1,3} | root # nested\n";
    for (more, route) in [
        (json!({"grammar": list}), "/v1/completions"),
        (json!({"guided_grammar": list}), "/v1/completions"),
        (
            json!({"structured_outputs": {"grammar": list}}),
            "/v1/chat/completions",
        ),
        (json!({"grammar": list}), "/v1/chat/completions"),
    ] {
        let mut ended = 0;
        for seed in 0..6 {
            let mut asked = json!({
                "model": LLAMA, "prompt": "Numbers:", "messages": [{"role": "user", "content": "Numbers?"}],
                "temperature": 1, "seed": seed, "max_tokens": 200,
            });
            asked
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            let whole = posted(&http, route, &asked).await;
            let choice = &whole["choices"][0];
            let text = choice["text"]
                .as_str()
                .or_else(|| choice["message"]["content"].as_str());
            if choice["finish_reason"] == "length" {
                continue;
            }
            // Numbers may begin with zeros, which JSON's do not.
            let text = text.unwrap();
            assert!(text.starts_with('[') && text.ends_with(']'), "{text}");
            assert_eq!(
                text.matches('[').count(),
                text.matches(']').count(),
                "{text}"
            );
            assert_eq!(
                text.matches(',').count(),
                2 * text.matches('[').count(),
                "{text}"
            );
            ended += 1;
        }
        assert!(ended > 0, "{more}");
    }
    for (grammar, word) in [
        ("root ::= (", "line 1, column"),
        ("root ::= a\n", "no rule is named 'a'"),
    ] {
        let asked = json!({"model": LLAMA, "prompt": "a", "grammar": grammar});
        let reply = http.post("/v1/completions", &asked).await;
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"]),
            (400, &json!("grammar")),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
