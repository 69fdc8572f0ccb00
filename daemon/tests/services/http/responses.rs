//! `/v1/responses`.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA, unix};
use crate::templates::with_template;

fn question() -> Value {
    json!({
        "model": LLAMA,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "42 - 30 = ?"}]}],
        "temperature": 0,
        "max_output_tokens": 16,
        "store": false,
        "include": ["reasoning.encrypted_content"],
    })
}

fn data(event: &(String, String)) -> Value {
    serde_json::from_str(&event.1).unwrap()
}

#[tokio::test]
async fn a_response_is_a_list_of_items() {
    let http = HttpDaemon::start().await;
    let reply = http.post("/v1/responses", &question()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let response = reply.json();
    assert_eq!(
        (&response["object"], &response["status"]),
        (&json!("response"), &json!("completed"))
    );
    let item = &response["output"][0];
    assert_eq!(
        (&item["type"], &item["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(item["content"][0]["text"], "42 - 30 = 12.");
    let usage = &response["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap())
    );
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 0);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 0);
    // OpenAI's libraries ask for these.
    let reasoning = json!({"effort": null, "summary": null});
    for (key, value) in [
        ("temperature", json!(0.0)),
        ("top_p", Value::Null),
        ("top_logprobs", json!(0)),
        ("truncation", json!("disabled")),
        ("background", json!(false)),
        ("reasoning", reasoning),
    ] {
        assert_eq!(response.get(key), Some(&value), "{key}");
    }

    let mut cut = question();
    cut["max_output_tokens"] = 1.into();
    let response = http.post("/v1/responses", &cut).await.json();
    assert_eq!(response["status"], "incomplete");
    assert_eq!(
        response["incomplete_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_stream_opens_fills_and_closes_each_item() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked["stream"] = true.into();
    let events = http.post("/v1/responses", &asked).await.events();
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    let deltas = names
        .iter()
        .filter(|name| **name == "response.output_text.delta")
        .count();
    assert!(deltas > 1, "{names:?}");
    let mut expected = vec![
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ];
    expected.extend(vec!["response.output_text.delta"; deltas]);
    expected.extend([
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]);
    assert_eq!(names, expected);
    for (n, event) in events.iter().enumerate() {
        assert_eq!(data(event)["sequence_number"], n);
        assert_eq!(data(event)["type"], event.0.as_str());
    }
    let text: String = events[4..4 + deltas]
        .iter()
        .map(|event| data(event)["delta"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "42 - 30 = 12.");
    let done = data(&events[events.len() - 2]);
    assert_eq!(done["item"]["content"][0]["text"], "42 - 30 = 12.");
    let last = data(events.last().unwrap())["response"].clone();
    assert_eq!(last["output"], json!([done["item"]]));
    assert_eq!(last["id"], data(&events[0])["response"]["id"]);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn thoughts_are_items_and_a_long_prompt_fails_inside_of_the_stream() {
    let http = HttpDaemon::start().await;
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>";
    with_template(&http.daemon, "thinker", template);
    let mut asked = question();
    asked["model"] = "thinker".into();
    asked["stream"] = true.into();
    let events = http.post("/v1/responses", &asked).await.events();
    let delta = events
        .iter()
        .find(|(name, _)| name == "response.reasoning_text.delta");
    assert_eq!(data(delta.unwrap())["content_index"], 0);
    let last = data(events.last().unwrap())["response"].clone();
    assert_eq!(last["output"][0]["type"], "reasoning");
    assert!(last["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
    assert_eq!(last["output"][0]["summary"], json!([]));

    asked["reasoning"] = json!({"summary": "auto"});
    let events = http.post("/v1/responses", &asked).await.events();
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[2..4],
        [
            "response.output_item.added",
            "response.reasoning_summary_part.added"
        ]
    );
    let end = [
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ];
    let found = names[names.len() - 4..].iter();
    let found = found.map(|name| name.trim_start_matches("response."));
    assert_eq!(found.take(3).collect::<Vec<_>>(), end);
    let of = |kind: &str| {
        let deltas = events.iter().filter(|(name, _)| name == kind).map(data);
        deltas
            .map(|event| event["delta"].as_str().unwrap().to_owned())
            .collect::<String>()
    };
    let told = of("response.reasoning_summary_text.delta");
    assert!(!told.is_empty());
    assert_eq!(told, of("response.reasoning_text.delta"));
    let done = data(&events[events.len() - 2])["item"].clone();
    assert_eq!(
        done["summary"],
        json!([{"type": "summary_text", "text": told}])
    );
    let mut whole = asked.clone();
    whole["stream"] = false.into();
    let whole = http.post("/v1/responses", &whole).await.json();
    assert_eq!(whole["output"][0]["summary"], done["summary"]);

    let mut long = question();
    long["input"] = "word ".repeat(4000).into();
    let refused = http.post("/v1/responses", &long).await;
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].clone()),
        (400, json!("input"))
    );
    long["stream"] = true.into();
    let events = http.post("/v1/responses", &long).await.events();
    assert_eq!(events[0].0, "response.created");
    let (name, _) = events.last().unwrap();
    assert_eq!(name, "response.failed");
    let failed = data(events.last().unwrap());
    let error = &failed["response"]["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    let words = "exceeds the available context size";
    assert!(
        error["message"].as_str().unwrap().contains(words),
        "{error}"
    );
    assert_eq!(http.stop().await, End::Drained);
}

/// The kinds of a stream's events, without what all begin with, each once where it is repeated.
fn kinds(events: &[(String, String)]) -> Vec<&str> {
    let names = events.iter().map(|(name, _)| name.as_str());
    let mut kinds: Vec<_> = names
        .map(|name| name.trim_start_matches("response."))
        .collect();
    kinds.dedup();
    kinds
}

/// openai-node's stream threw "missing content at index 0" at the first delta of a thought.
#[tokio::test]
async fn a_thought_has_a_part_before_its_text_comes() {
    let http = HttpDaemon::start().await;
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>";
    with_template(&http.daemon, "thinker", template);
    let mut asked = question();
    asked["model"] = "thinker".into();
    asked["stream"] = true.into();
    let events = http.post("/v1/responses", &asked).await.events();
    assert_eq!(
        kinds(&events)[2..7],
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ]
    );
    let parts = events
        .iter()
        .filter(|(name, _)| name.contains("content_part"));
    let parts: Vec<_> = parts
        .map(data)
        .filter(|event| event["part"]["type"] == "reasoning_text")
        .collect();
    assert_eq!(parts[0]["part"]["text"], "");
    let done = events
        .iter()
        .find(|(name, _)| name == "response.reasoning_text.done");
    let done = data(done.unwrap());
    assert_eq!(parts[1]["part"]["text"], done["text"]);
    for part in &parts {
        assert_eq!(
            (
                &part["item_id"],
                &part["output_index"],
                &part["content_index"]
            ),
            (&done["item_id"], &json!(0), &json!(0))
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// AI SDK 7's provider names what the assistant said in every later step.
#[tokio::test]
async fn a_later_request_refers_to_items_and_responses() {
    let http = HttpDaemon::start().await;
    let mut asked = question();
    asked.as_object_mut().unwrap().remove("store");
    let whole = http.post("/v1/responses", &asked).await.json();
    asked["stream"] = true.into();
    let events = http.post("/v1/responses", &asked).await.events();
    let streamed = data(events.last().unwrap())["response"].clone();
    asked["stream"] = false.into();
    let again = json!({"role": "user", "content": "42 - 30 = ?"});
    for response in [&whole, &streamed] {
        assert_eq!(response["store"], true);
        let (id, item) = (&response["id"], &response["output"][0]);
        // The same conversation, told in three ways.
        let mut told = Vec::new();
        for (previous, input) in [
            (json!(null), json!([asked["input"][0], item, again])),
            (
                json!(null),
                json!([asked["input"][0], {"type": "item_reference", "id": item["id"]}, again]),
            ),
            (id.clone(), json!([again])),
        ] {
            let mut next = asked.clone();
            next["input"] = input;
            next["previous_response_id"] = previous.clone();
            let reply = http.post("/v1/responses", &next).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let next = reply.json();
            assert_eq!(next["previous_response_id"], previous);
            told.push((
                next["usage"]["input_tokens"].clone(),
                next["output"][0]["content"].clone(),
            ));
        }
        assert!(told[0] == told[1] && told[1] == told[2], "{told:?}");
        let path = format!("/v1/responses/{}", id.as_str().unwrap());
        assert_eq!(&http.get(&path).await.json(), response);
        let input = http.get(&format!("{path}/input_items")).await.json();
        assert_eq!(input["data"], asked["input"]);
        let gone = unix(&http.path(), "DELETE", &path, &[], "").await;
        assert_eq!(
            gone.json(),
            json!({"id": id, "object": "response", "deleted": true})
        );
        assert_eq!(http.get(&path).await.status, 404);
    }
    // What is not to be kept is not, and what never was is told so.
    asked["store"] = false.into();
    let unkept = http.post("/v1/responses", &asked).await.json();
    assert_eq!(unkept["store"], false);
    for (key, value, status, code) in [
        (
            "previous_response_id",
            unkept["id"].clone(),
            400,
            "previous_response_not_found",
        ),
        (
            "input",
            json!([{"type": "item_reference", "id": unkept["output"][0]["id"]}]),
            404,
            "UNKNOWN_ITEM",
        ),
        ("previous_response_id", json!(7), 400, "INVALID_FIELD"),
    ] {
        let mut next = asked.clone();
        next[key] = value;
        let reply = http.post("/v1/responses", &next).await;
        assert_eq!(reply.status, status, "{reply:?}");
        assert_eq!(reply.json()["error"]["code"], code);
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// A tool whose input is a text, as Codex's apply_patch.
#[tokio::test]
async fn a_call_of_a_custom_tool_has_its_text_as_input() {
    let http = HttpDaemon::start().await;
    with_template(
        &http.daemon,
        "calls",
        "{{ messages[0].content }}{# <tool_call> #}",
    );
    let call = "<tool_call><function=patch><parameter=input>a b</parameter></function></tool_call>";
    let mut asked = json!({
        "model": "calls", "input": "x", "temperature": 0, "max_output_tokens": 200,
        "tools": [{"type": "custom", "name": "patch", "description": "d"}, {"type": "web_search"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": format!("x{call}")}}},
    });
    let whole = http.post("/v1/responses", &asked).await.json();
    asked["stream"] = true.into();
    let events = http.post("/v1/responses", &asked).await.events();
    let streamed = data(events.last().unwrap())["response"].clone();
    for response in [&whole, &streamed] {
        let items = response["output"].as_array().unwrap().iter();
        let call = items
            .clone()
            .find(|item| item["type"] == "custom_tool_call");
        let call = call.unwrap_or_else(|| panic!("{response}"));
        assert_eq!(
            (&call["name"], &call["input"]),
            (&json!("patch"), &json!("a b"))
        );
    }
    let of = |kind: &str| {
        let name = format!("response.custom_tool_call_input.{kind}");
        let event = events.iter().find(|(found, _)| *found == name);
        data(event.unwrap())
    };
    assert_eq!(
        (&of("delta")["delta"], &of("done")["input"]),
        (&json!("a b"), &json!("a b"))
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn an_item_that_the_limit_cuts_is_incomplete() {
    let http = HttpDaemon::start().await;
    let words = "{% for m in messages %}{{ m.content }}{% endfor %}";
    with_template(
        &http.daemon,
        "thinker",
        &format!("{words}{{# </think> #}}<think>"),
    );
    let header = "<|start|> to=functions.f<|channel|>commentary<|message|>";
    with_template(&http.daemon, "caller", &format!("{words}{header}"));
    for (model, kind) in [
        (LLAMA, "message"),
        ("thinker", "reasoning"),
        // What it writes is no object, so it is no call.
        ("caller", "message"),
    ] {
        let mut asked = question();
        asked["model"] = model.into();
        for (tokens, status) in [(2, "incomplete"), (16, "completed")] {
            // Models without their own template do not end.
            if model != LLAMA && status == "completed" {
                continue;
            }
            asked["max_output_tokens"] = tokens.into();
            asked["stream"] = false.into();
            let whole = http.post("/v1/responses", &asked).await.json();
            asked["stream"] = true.into();
            let events = http.post("/v1/responses", &asked).await.events();
            let last = data(events.last().unwrap());
            assert_eq!(last["type"], format!("response.{status}"));
            for response in [&whole, &last["response"]] {
                let item = &response["output"][0];
                assert_eq!(
                    (&response["status"], &item["type"], &item["status"]),
                    (&json!(status), &json!(kind), &json!(status)),
                    "{response}"
                );
            }
            let item_of = |wanted: &str| {
                let event = events.iter().find(|(name, _)| name == wanted);
                data(event.unwrap())["item"].clone()
            };
            let added = item_of("response.output_item.added");
            assert_eq!(added["status"], "in_progress");
            let done = item_of("response.output_item.done");
            assert_eq!(done, last["response"]["output"][0]);
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}
