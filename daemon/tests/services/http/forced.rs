//! Calls of tools that a request forces, and formats beside tools and thinking.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::HttpDaemon;
use crate::templates::with_template;

/// A template whose models write calls as JSON.
const CALLER: &str = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}{# <tool_call> #}";

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": {"city": {"enum": ["Bern", "Graz"]}},
    })
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "", "parameters": parameters()}})
}

fn question(more: &Value) -> Value {
    let mut asked = json!({
        "model": "caller",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "tools": [tool("weather"), tool("snow")],
        "temperature": 1,
        "seed": 3,
        "max_tokens": 300,
    });
    asked
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    asked
}

fn check_arguments(arguments: &Value) {
    let city = arguments["city"].as_str().unwrap();
    assert!(["Bern", "Graz"].contains(&city), "{arguments}");
    assert!(
        (1..=9).contains(&arguments["days"].as_i64().unwrap()),
        "{arguments}"
    );
}

fn parsed(text: &Value) -> Value {
    serde_json::from_str(text.as_str().unwrap()).unwrap()
}

/// Go's and C#'s libraries write null for what a schema does not have, and some clients have many
/// stop strings.
#[tokio::test]
async fn what_clients_write_for_nothing_is_nothing_whether_a_call_is_forced_or_not() {
    let http = HttpDaemon::start().await;
    let template = "{% for t in tools %}{% for p in t.function.parameters.properties or {} %}{{ p }}{% endfor %}\
                    {{ t.function.parameters }}{% endfor %}{{ messages[0].content }}{# <tool_call> #}";
    with_template(&http.daemon, "caller", template);
    let parameters =
        json!({"type": "object", "properties": null, "required": null, "description": null});
    let empty = json!({"type": "function", "function": {"name": "now", "parameters": parameters}});
    let stops: Vec<_> = (0..100).map(|n| format!("stop {n}")).collect();
    for choice in ["auto", "required"] {
        let more =
            json!({"tools": [empty], "tool_choice": choice, "max_tokens": 32, "stop": stops});
        let reply = http.post("/v1/chat/completions", &question(&more)).await;
        assert_eq!(reply.status, 200, "{choice}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_forced_call_is_one_of_the_tools_with_its_arguments() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let named = json!({"type": "function", "function": {"name": "snow"}});
    for (choice, names) in [
        (json!("required"), &["weather", "snow"][..]),
        (named.clone(), &["snow"]),
    ] {
        for seed in 0..5 {
            let more = json!({"tool_choice": choice, "seed": seed, "parallel_tool_calls": false});
            let reply = http.post("/v1/chat/completions", &question(&more)).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let whole = reply.json();
            let choice = &whole["choices"][0];
            assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
            let [call] = choice["message"]["tool_calls"]
                .as_array()
                .unwrap()
                .as_slice()
            else {
                panic!("{whole}");
            };
            let name = call["function"]["name"].as_str().unwrap();
            assert!(names.contains(&name), "{name}");
            check_arguments(&parsed(&call["function"]["arguments"]));
            assert!(choice["message"]["content"].is_null());
        }
    }

    let asked = json!({
        "model": "caller", "input": "Tell me a story.", "tool_choice": {"type": "function", "name": "snow"},
        "tools": [{"type": "function", "name": "snow", "parameters": parameters()}],
    });
    let whole = http.post("/v1/responses", &asked).await.json();
    assert_eq!(whole["output"][0]["type"], "function_call", "{whole}");
    check_arguments(&parsed(&whole["output"][0]["arguments"]));
    let asked = json!({
        "model": "caller", "max_tokens": 300, "messages": [{"role": "user", "content": "Tell me a story."}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        "tools": [{"name": "snow", "input_schema": parameters()}],
    });
    let whole = http.post("/v1/messages", &asked).await.json();
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    assert_eq!(whole["content"][0]["name"], "snow");
    check_arguments(&whole["content"][0]["input"]);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_format_beside_tools_allows_calls_or_the_format() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let schema = json!({"type": "object", "properties": {"end": {"type": "boolean"}},
        "required": ["end"], "additionalProperties": false});
    for seed in 0..6 {
        let more = json!({"json_schema": schema, "seed": seed, "parallel_tool_calls": false});
        let whole = http
            .post("/v1/chat/completions", &question(&more))
            .await
            .json();
        let message = &whole["choices"][0]["message"];
        match message["tool_calls"].as_array() {
            Some(calls) => check_arguments(&parsed(&calls[0]["function"]["arguments"])),
            None => assert!(parsed(&message["content"])["end"].is_boolean(), "{whole}"),
        }
    }
    let both = question(&json!({"json_schema": schema, "tool_choice": "required"}));
    let refused = http.post("/v1/chat/completions", &both).await;
    assert_eq!(refused.json()["error"]["param"], "json_schema");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn calls_in_other_forms_are_not_forced() {
    let http = HttpDaemon::start().await;
    let template = "{{ messages[0].content }}{# <tool_call><function= #}";
    with_template(&http.daemon, "caller", template);
    let forced = question(&json!({"tool_choice": "required"}));
    let refused = http.post("/v1/chat/completions", &forced).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "tool_choice");
    let free = question(&json!({"max_tokens": 2}));
    assert_eq!(http.post("/v1/chat/completions", &free).await.status, 200);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_format_begins_behind_the_thinking() {
    let http = HttpDaemon::start().await;
    let words = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    with_template(&http.daemon, "thinks", &format!("{words}<think>"));
    with_template(&http.daemon, "thought", &format!("{words}<think></think>"));
    let message = |model: &str| {
        let asked = question(&json!({
            "model": model, "tools": [], "json_schema": {"enum": ["yes", "no"]}, "max_tokens": 20,
        }));
        let http = &http;
        async move {
            let whole = http.post("/v1/chat/completions", &asked).await.json();
            whole["choices"][0]["message"].clone()
        }
    };
    // This model never ends its thinking, and may not end its text in it.
    let free = message("thinks").await;
    assert_eq!(free["content"], "");
    assert!(!free["reasoning_content"].as_str().unwrap().is_empty());
    let held = message("thought").await;
    assert!(
        ["yes", "no"].contains(&parsed(&held["content"]).as_str().unwrap()),
        "{held}"
    );
    assert_eq!(http.stop().await, End::Drained);
}
