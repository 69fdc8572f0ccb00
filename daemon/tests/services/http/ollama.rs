//! Ollama's routes.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA};
use crate::templates::{with_template, without_template};

fn question() -> Value {
    json!({
        "model": LLAMA,
        "messages": [{"role": "user", "content": "42 - 30 = ?"}],
        "options": {"temperature": 0, "num_predict": 16, "num_ctx": 512, "num_gpu": 1},
        "keep_alive": "5m",
    })
}

#[tokio::test]
async fn chats_are_lines_and_the_last_has_the_counts() {
    let http = HttpDaemon::start().await;
    let reply = http.post("/api/chat", &question()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    let lines = reply.lines();
    let (last, pieces) = lines.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|line| {
            assert_eq!(
                (&line["done"], &line["model"]),
                (&json!(false), &json!(LLAMA))
            );
            line["message"]["content"].as_str().unwrap()
        })
        .collect();
    assert_eq!(text, "42 - 30 = 12.");
    assert_eq!(
        (&last["done"], &last["done_reason"]),
        (&json!(true), &json!("stop"))
    );
    for count in ["prompt_eval_count", "eval_count", "total_duration"] {
        assert!(last[count].as_u64() > Some(0), "{last}");
    }

    let mut whole = question();
    whole["stream"] = false.into();
    whole["model"] = format!("{LLAMA}:latest").into();
    // More than the model's is the model's.
    whole["options"]["num_ctx"] = (1 << 30).into();
    let answer = http.post("/api/chat", &whole).await.json();
    assert_eq!(answer["message"]["content"], "42 - 30 = 12.");
    assert_eq!(answer["done"], true);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn generate_uses_the_template_unless_it_is_raw() {
    let http = HttpDaemon::start().await;
    let mut asked = json!({
        "model": LLAMA, "prompt": "42 - 30 = ?", "stream": false, "options": {"temperature": 0, "num_predict": 16},
    });
    let answer = http.post("/api/generate", &asked).await.json();
    assert_eq!(answer["response"], "42 - 30 = 12.");
    asked["raw"] = true.into();
    let raw = http.post("/api/generate", &asked).await.json();
    assert!(raw["prompt_eval_count"].as_u64() < answer["prompt_eval_count"].as_u64());
    asked["stream"] = true.into();
    let lines = http.post("/api/generate", &asked).await.lines();
    let text: String = lines
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    assert_eq!(text, raw["response"].as_str().unwrap());
    assert_eq!(http.stop().await, End::Drained);
}

/// What said "unload" unloaded nothing.
#[tokio::test]
async fn a_model_is_let_go_when_its_keep_alive_ends() {
    let http = HttpDaemon::start().await;
    let there = async || {
        let ps = http.get("/api/ps").await.json();
        let models = ps["models"].as_array().unwrap().iter();
        models.clone().find(|model| model["name"] == LLAMA).cloned()
    };
    let ask = async |keep_alive: Value| {
        let mut asked = question();
        asked["keep_alive"] = keep_alive;
        asked["stream"] = false.into();
        let answer = http.post("/api/chat", &asked).await.json();
        assert_eq!(answer["message"]["content"], "42 - 30 = 12.");
    };
    for (path, body) in [
        ("/api/generate", json!({"model": LLAMA, "keep_alive": 0})),
        (
            "/api/chat",
            json!({"model": LLAMA, "messages": [], "keep_alive": "0s"}),
        ),
    ] {
        ask(json!(-1)).await;
        let model = there().await.unwrap();
        assert!(model["size_vram"].as_u64() > Some(1 << 20), "{model}");
        assert!(
            model["expires_at"].as_str().unwrap().starts_with("2100"),
            "{model}"
        );
        let answer = http.post(path, &body).await.json();
        assert_eq!(answer["done_reason"], "unload");
        assert_eq!(there().await, None, "{path}");
    }
    // At the end of an answer, and some time later.
    ask(json!("5m")).await;
    let ends = there().await.unwrap()["expires_at"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(!ends.starts_with("2100"), "{ends}");
    for keep_alive in [json!(0), json!("300ms")] {
        ask(keep_alive).await;
        let begun = std::time::Instant::now();
        while there().await.is_some() {
            assert!(begun.elapsed().as_secs() < 20, "it stays");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
    // It is there again when it is asked for.
    ask(json!(null)).await;
    assert!(there().await.unwrap()["size_vram"].as_u64() > Some(1 << 20));
    let odd = json!({"model": LLAMA, "keep_alive": "soon"});
    assert_eq!(http.post("/api/generate", &odd).await.status, 400);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn models_are_told_in_ollamas_words() {
    let http = HttpDaemon::start().await;
    // Codex takes nothing older.
    assert_eq!(http.get("/api/version").await.json()["version"], "0.13.4");
    assert_eq!(http.get("/").await.status, 200);
    let tags = http.get("/api/tags").await.json();
    let llama = |list: &Value| {
        let models = list["models"].as_array().unwrap();
        models.iter().find(|model| model["name"] == LLAMA).cloned()
    };
    assert!(llama(&tags).unwrap()["size"].as_u64() > Some(1 << 20));
    assert_eq!(http.get("/api/ps").await.json(), json!({"models": []}));

    // Without a text, the model is loaded.
    let loaded = http
        .post("/api/generate", &json!({"model": LLAMA}))
        .await
        .json();
    assert_eq!(
        (&loaded["done"], &loaded["done_reason"]),
        (&json!(true), &json!("load"))
    );
    let ps = http.get("/api/ps").await.json();
    assert!(llama(&ps).unwrap()["size"].as_u64() > Some(1 << 20));
    let tags = http.get("/api/tags").await.json();
    for list in [&ps, &tags] {
        let details = llama(list).unwrap()["details"].clone();
        assert_eq!(details["quantization_level"], "Q4_K_M", "{details}");
    }
    let gone = http
        .post("/api/chat", &json!({"model": LLAMA, "keep_alive": 0}))
        .await;
    assert_eq!(gone.json()["done_reason"], "unload");
    // What is not there cannot be let go (found by fuzzing: it was told as done).
    for path in ["/api/chat", "/api/generate"] {
        let body = json!({"model": "nothing", "keep_alive": "0m"});
        let refused = http.post(path, &body).await;
        assert_eq!(refused.status, 404, "{path}");
        let error = refused.json()["error"].to_string();
        assert!(error.contains(LLAMA), "{path}: {error}");
    }

    for named in [
        json!({"name": LLAMA}),
        json!({"name": LLAMA, "model": LLAMA}),
        json!({"name": LLAMA, "model": ""}),
    ] {
        assert_eq!(http.post("/api/show", &named).await.status, 200, "{named}");
    }
    let shown = http
        .post("/api/show", &json!({"model": LLAMA}))
        .await
        .json();
    assert_eq!(shown["details"]["family"], "llama");
    assert_eq!(shown["details"]["quantization_level"], "Q4_K_M");
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert!(shown["model_info"]["llama.context_length"].as_u64() > Some(0));
    assert_eq!(shown["capabilities"], json!(["completion"]));
    assert!(shown["template"].as_str().unwrap().contains("messages"));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn nothing_and_no_bound_are_said_as_ollamas_clients_say_them() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["options"]["repeat_last_n"] = (-1).into();
    asked["options"]["repeat_penalty"] = 1.1.into();
    asked["options"]["top_k"] = (-1).into();
    asked["options"]["stop"] = json!([""]);
    asked["stream"] = false.into();
    asked["logprobs"] = false.into();
    // Neither is a bound.
    asked["options"]["num_predict"] = 0.into();
    asked["options"]["top_p"] = 0.into();
    let reply = http.post("/api/chat", &asked).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    for (path, field) in [("/api/embed", "options"), ("/api/generate", "prompt")] {
        let mut asked = json!({"model": LLAMA, "input": "Once"});
        asked[field] = Value::Null;
        let reply = http.post(path, &asked).await;
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_long_text_is_cut_to_be_embedded_and_no_text_loads_the_model() {
    let http = HttpDaemon::start().await;
    let ask = async |more: Value| {
        let mut asked = json!({"model": LLAMA});
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        http.post("/api/embed", &asked).await
    };
    let (long, options) = ("whale ".repeat(100), json!({"num_ctx": 40}));
    let cut = ask(json!({"input": ["a", long], "options": options}))
        .await
        .json();
    assert_eq!(cut["embeddings"].as_array().unwrap().len(), 2, "{cut}");
    let one = ask(json!({"input": long, "options": options})).await.json();
    assert_eq!(one["prompt_eval_count"], 40);
    let refused = ask(json!({"input": long, "options": options, "truncate": false})).await;
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(message.contains("raise options.num_ctx"), "{message}");
    for nothing in [json!([]), json!(""), Value::Null] {
        let reply = ask(json!({"input": nothing})).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(reply.json()["embeddings"], json!([]));
    }
    let older = json!({"model": LLAMA, "prompt": ""});
    let older = http.post("/api/embeddings", &older).await.json();
    assert_eq!(older, json!({"embedding": []}));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn the_oldest_turns_of_a_chat_that_is_too_long_are_left_out() {
    let http = HttpDaemon::start().await;
    let ask = async |turns: usize, n_ctx: u32, last: &str| {
        let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
        for _ in 0..turns {
            messages.push(json!({"role": "user", "content": "Tell me of the whale."}));
            messages.push(json!({"role": "assistant", "content": "The whale sang a song."}));
        }
        messages.push(json!({"role": "user", "content": last}));
        let asked = json!({
            "model": LLAMA, "messages": messages, "stream": false,
            "options": {"num_ctx": n_ctx, "num_predict": 4},
        });
        http.post("/api/chat", &asked).await
    };
    let tokens = async |turns| {
        let whole = ask(turns, 1000, "42 - 30 = ?").await.json();
        whole["prompt_eval_count"].as_u64().unwrap()
    };
    let two = tokens(2).await;
    // With two turns there is one place for an answer, with three there is none.
    let reply = ask(9, two as u32 + 1, "42 - 30 = ?").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json()["prompt_eval_count"], two);
    let refused = ask(9, two as u32, &"word ".repeat(200)).await;
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(message.contains("options.num_ctx"), "{message}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_model_without_a_template_continues_the_prompt() {
    let http = HttpDaemon::start().await;
    without_template(&http.daemon, "plain");
    let mut asked = json!({
        "model": "plain", "prompt": "Once", "stream": false, "options": {"num_predict": 2},
    });
    let reply = http.post("/api/generate", &asked).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let plain = reply.json()["prompt_eval_count"].clone();
    asked["raw"] = true.into();
    let raw = http.post("/api/generate", &asked).await.json();
    assert_eq!(raw["prompt_eval_count"], plain);
    asked["raw"] = false.into();
    // What the system says stands in ChatML, whose marks the vocabulary has.
    asked["system"] = "Be brief.".into();
    let told = http.post("/api/generate", &asked).await;
    assert_eq!(told.status, 200, "{told:?}");
    let told = told.json()["prompt_eval_count"].as_u64();
    assert!(told > plain.as_u64(), "{told:?}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn refusals_have_ollamas_shape_and_names() {
    let http = HttpDaemon::start().await;
    let rows = [
        (
            "options",
            json!({"temperature": -1}),
            400,
            "options.temperature",
        ),
        ("options", json!({"min_p": 2}), 400, "options.min_p"),
        ("options", json!({"num_ctx": -5}), 400, "options.num_ctx"),
        ("options", json!({"mirostat": 3}), 400, "options.mirostat"),
        ("format", json!("yaml"), 400, "format"),
        (
            "top_logprobs",
            json!(21),
            400,
            "top_logprobs: 21 is out of range: from 0 to 20",
        ),
        (
            "top_logprobs",
            json!(-1),
            400,
            "top_logprobs: -1 is out of range: from 0 to 20",
        ),
        ("top_logprobs", json!(0.5), 400, "top_logprobs"),
        ("logprobs", json!("yes"), 400, "logprobs"),
        ("model", json!("ghost"), 404, "ghost"),
    ];
    for (key, value, status, mentions) in rows {
        let mut asked = question();
        asked[key] = value;
        let reply = http.post("/api/chat", &asked).await;
        assert_eq!(reply.status, status, "{reply:?}");
        let message = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(message.contains(mentions), "{message}");
    }
    let images =
        json!({"model": LLAMA, "messages": [{"role": "user", "content": "x", "images": ["aa"]}]});
    let reply = http.post("/api/chat", &images).await;
    assert_eq!(reply.status, 200, "a session lives on: {reply:?}");
    assert_eq!(http.stop().await, End::Drained);
}

/// What Ollama tells of log-probabilities: of a whole answer, and of the lines of a stream, behind
/// one another.
async fn logprobs(http: &HttpDaemon, route: &str, asked: &Value) -> [(Value, Vec<Value>); 2] {
    let ask = async |stream: bool| {
        let mut asked = asked.clone();
        asked["stream"] = stream.into();
        let reply = http.post(route, &asked).await;
        assert_eq!(reply.status, 200, "{asked}: {reply:?}");
        let lines = reply.lines();
        let told = lines.iter().filter_map(|line| line["logprobs"].as_array());
        let told = told.flatten().cloned().collect();
        (lines.into(), told)
    };
    [ask(false).await, ask(true).await]
}

/// The bytes of tokens, as the text that they are.
fn spelled(tokens: &[Value]) -> String {
    let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array());
    let bytes = bytes
        .flatten()
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn log_probabilities_are_those_of_openais_route() {
    let http = HttpDaemon::start().await;
    let openai = json!({
        "model": LLAMA, "messages": question()["messages"], "temperature": 0, "max_tokens": 16,
        "logprobs": true, "top_logprobs": 3,
    });
    let openai = http.post("/v1/chat/completions", &openai).await.json();
    let expected = openai["choices"][0]["logprobs"]["content"].as_array();
    let expected = expected.unwrap();
    assert_eq!(spelled(expected), "42 - 30 = 12.");

    let mut asked = question();
    asked["prompt"] = "42 - 30 = ?".into();
    asked["logprobs"] = true.into();
    asked["top_logprobs"] = 3.0.into();
    // What may begin a stop string holds text back, and its log-probabilities.
    asked["options"]["stop"] = json!(["12.x"]);
    for route in ["/api/chat", "/api/generate"] {
        let [(_, whole), (lines, streamed)] = logprobs(&http, route, &asked).await;
        assert_eq!((&whole, &streamed), (expected, expected), "{route}");
        // They come with their text.
        for line in lines.as_array().unwrap() {
            let text = match &line["message"] {
                Value::Null => &line["response"],
                message => &message["content"],
            };
            let told = line["logprobs"].as_array();
            let told = told.map(|told| spelled(told)).unwrap_or_default();
            assert_eq!(text, &told, "{line}");
        }
    }

    // Without a number of others, the tokens alone; none of a stop string.
    asked["top_logprobs"] = Value::Null;
    asked["options"]["stop"] = json!(["30"]);
    for route in ["/api/chat", "/api/generate"] {
        for (_, told) in logprobs(&http, route, &asked).await {
            assert_eq!(spelled(&told), "42 - ", "{route}");
            for (token, expected) in told.iter().zip(expected) {
                assert_eq!(token["logprob"], expected["logprob"]);
                assert_eq!(token["top_logprobs"], json!([]));
            }
        }
    }

    // Unless they are wanted there are none.
    asked["logprobs"] = false.into();
    asked["top_logprobs"] = 2.into();
    for (answer, _) in logprobs(&http, "/api/chat", &asked).await {
        let lines = answer.as_array().unwrap();
        assert!(lines.iter().all(|line| line.get("logprobs").is_none()));
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn thoughts_marks_and_calls_have_log_probabilities_too() {
    let http = HttpDaemon::start().await;
    let template = "{{ messages[0].content }}";
    let marks = "{# <think> </think> #}";
    with_template(&http.daemon, "thinks", &format!("{template}{marks}"));
    let marks = "{# <tool_call> #}";
    with_template(&http.daemon, "calls", &format!("{template}{marks}"));
    let call = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>";
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    for (model, text, tools) in [
        ("thinks", "<think> a b</think> c d".to_owned(), json!([])),
        ("calls", format!("x{call} y"), json!([tool])),
    ] {
        let asked = json!({
            "model": model, "messages": question()["messages"], "logprobs": true,
            "tools": tools, "format": {"const": text}, "options": {"temperature": 0, "num_predict": 200},
        });
        let [(_, whole), (lines, streamed)] = logprobs(&http, "/api/chat", &asked).await;
        // A format lets white space come first.
        assert_eq!(spelled(&whole).trim(), format!("{text:?}"), "{model}");
        assert_eq!(whole, streamed, "{model}");
        // A line has those of what it brings.
        let with_call = |line: &&Value| line["message"]["tool_calls"].is_array();
        let with_call = lines.as_array().unwrap().iter().find(with_call);
        let of_call = with_call.map(|line| spelled(line["logprobs"].as_array().unwrap()));
        let expected = (model == "calls").then(|| call.to_owned());
        assert_eq!(of_call, expected, "{model}: {lines}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
