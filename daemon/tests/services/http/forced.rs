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
    // PHP's way of an empty object.
    let lists = json!({"type": "object", "properties": [], "required": []});
    let from_php = json!({"type": "function", "function": {"name": "now", "parameters": lists}});
    for choice in ["auto", "required"] {
        for tool in [&empty, &from_php] {
            let more =
                json!({"tools": [tool], "tool_choice": choice, "max_tokens": 32, "stop": stops});
            let reply = http.post("/v1/chat/completions", &question(&more)).await;
            assert_eq!(reply.status, 200, "{choice}: {reply:?}");
        }
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

/// Found by hand: only Hermes' form could be forced.
#[tokio::test]
async fn calls_of_every_form_are_forced() {
    let http = HttpDaemon::start().await;
    for (at, signs) in [
        "<tool_call><function=",
        "<tool_call><arg_key>",
        "<seed:tool_call>",
        "<|tool_call>",
        "[TOOL_CALLS][ARGS]",
        "[TOOL_CALLS]\"arguments\"",
        "<|tool_calls_section_begin|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>```json",
        "｜DSML｜",
        "<minimax:tool_call>",
        "<|START_ACTION|>",
        "<|tool_call_start|>",
        "<TOOLCALL>",
        "<tool_calls>",
        "<|tool_call|>",
        "<|function_call|>",
        "<|python_tag|>",
        // Behind messages of other kinds, whose budget has to be used up first.
        "<|channel|><|message|>",
        "<|message|><atem:function_calls>",
    ]
    .iter()
    .enumerate()
    {
        let model = format!("caller{at}");
        let template = format!("{{{{ messages[0].content }}}}{{# {signs} #}}");
        with_template(&http.daemon, &model, &template);
        let forced = json!({"model": model, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 700});
        let reply = http.post("/v1/chat/completions", &question(&forced)).await;
        assert_eq!(reply.status, 200, "{signs}: {reply:?}");
        let whole = reply.json();
        let call = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
        assert!(call["name"].is_string(), "{signs}: {whole}");
        check_arguments(&parsed(&call["arguments"]));
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// Its arguments could be null in a tool that is free to be called, and not in a forced one.
#[tokio::test]
async fn a_tool_whose_properties_are_null_is_forced_as_it_is_offered() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let parameters = json!({"type": "object", "properties": null, "required": null, "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "now", "strict": true, "parameters": parameters}});
    for more in [
        json!({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 700}),
        json!({"tools": [tool], "max_tokens": 2}),
    ] {
        let reply = http.post("/v1/chat/completions", &question(&more)).await;
        assert_eq!(reply.status, 200, "{more}: {reply:?}");
        if more["tool_choice"] == "required" {
            let whole = reply.json();
            let call = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
            assert_eq!(parsed(&call["arguments"]), json!({}), "{whole}");
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// As many as an agent with several servers of tools offers: 6,000 values of schemas were refused.
#[tokio::test]
async fn many_tools_of_many_parameters_are_held_in_reasonable_time() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let kinds = [
        json!({"type": "string", "description": "A text.", "maxLength": 40}),
        json!({"type": "integer", "minimum": 0}),
        json!({"type": "boolean", "default": false}),
        json!({"type": "array", "items": {"type": "string"}}),
        json!({"enum": ["a", "b", "c"]}),
    ];
    let tool = |n: usize| {
        let properties = (0..20).map(|i| (format!("p{n}_{i}"), kinds[i % 5].clone()));
        let properties: serde_json::Map<_, _> = properties.collect();
        json!({"type": "function", "function": {"name": format!("tool{n}"), "strict": true,
            "parameters": {"type": "object", "properties": properties, "required": [format!("p{n}_0")]}}})
    };
    let tools: Vec<Value> = (0..128).map(tool).collect();
    for choice in ["required", "auto"] {
        let begun = std::time::Instant::now();
        let more = json!({"tools": tools, "tool_choice": choice, "max_tokens": 8});
        let reply = http.post("/v1/chat/completions", &question(&more)).await;
        println!("128 tools, {choice}: {:?}", begun.elapsed());
        assert_eq!(reply.status, 200, "{choice}: {reply:?}");
        assert!(begun.elapsed().as_secs() < 60, "{choice}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// A strict tool whose schema cannot be enforced was taken and not held to it.
#[tokio::test]
async fn a_strict_tool_that_cannot_be_held_to_its_schema_is_rejected_with_the_place() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let parameters = json!({"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": true}}});
    let tool = |strict: bool| json!({"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}});
    let more = |strict: bool| question(&json!({"tools": [tool(strict)], "max_tokens": 2}));
    let refused = http.post("/v1/chat/completions", &more(true)).await;
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].clone();
    assert_eq!(error["param"], "tools");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("tool 'f': #/properties/a/uniqueItems"),
        "{message}"
    );
    assert_eq!(
        http.post("/v1/chat/completions", &more(false)).await.status,
        200
    );
    assert_eq!(http.stop().await, End::Drained);
}

/// What is refused while it is compiled came with the grammar that was made of it, and without the
/// tool's name.
#[tokio::test]
async fn a_tool_that_nothing_satisfies_is_rejected_by_its_name() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    for (schema, why) in [
        (
            json!({"a": {"type": "integer", "minimum": 5, "maximum": 1}}),
            "tool 'bad': Unsatisfiable schema: required property 'a' is unsatisfiable",
        ),
        (
            json!({"a": {"type": "string", "format": "date", "maxLength": 3}}),
            "tool 'bad': Unsatisfiable schema: required property 'a' is unsatisfiable",
        ),
    ] {
        let bad = json!({"type": "object", "properties": schema, "required": ["a"]});
        let function = |name: &str, schema: &Value| json!({"type": "function", "function": {"name": name, "parameters": schema}});
        let good = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let tools = [function("good", &good), function("bad", &bad)];
        let more = json!({"tools": tools, "tool_choice": "required", "max_tokens": 2});
        let refused = http.post("/v1/chat/completions", &question(&more)).await;
        let error = refused.json()["error"].clone();
        assert_eq!(error["message"], format!("tool_choice: {why}"));
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// Reasoning that never ended took the whole context, and nothing was left for the format.
#[tokio::test]
async fn reasoning_ends_at_its_budget_and_leaves_room_for_the_format() {
    let http = HttpDaemon::start().await;
    let words = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    with_template(&http.daemon, "thinks", &format!("{words}<think>"));
    let message = [json!({"role": "user", "content": "Tell me a story."})];
    let format = json!({"enum": ["yes", "no"]});
    let tokens =
        |whole: &Value| whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
    let chat = json!({"model": "thinks", "messages": message, "temperature": 0, "max_tokens": 200, "json_schema": format});
    let whole = http.post("/v1/chat/completions", &chat).await.json();
    let said = &whole["choices"][0]["message"];
    assert!(
        ["yes", "no"].contains(&parsed(&said["content"]).as_str().unwrap()),
        "{whole}"
    );
    assert!(tokens(&whole) >= Some(50), "{whole}");
    for field in [
        "reasoning_budget",
        "thinking_budget_tokens",
        "thinking_token_budget",
    ] {
        let mut asked = chat.clone();
        asked[field] = 9.into();
        let whole = http.post("/v1/chat/completions", &asked).await.json();
        let said = &whole["choices"][0]["message"];
        assert!(
            ["yes", "no"].contains(&parsed(&said["content"]).as_str().unwrap()),
            "{whole}"
        );
        assert!(tokens(&whole) < Some(80), "{field}: {whole}");
    }
    // Without a format, too, and in the words of the others.
    let plain = json!({"model": "thinks", "messages": message, "max_tokens": 120, "min_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 9}});
    let whole = http.post("/v1/messages", &plain).await.json();
    let kinds: Vec<_> = whole["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|block| block["type"].clone())
        .collect();
    assert_eq!(kinds, ["thinking", "text"], "{whole}");
    let plain = json!({"model": "thinks", "messages": message, "stream": false, "options": {"num_predict": 120, "min_tokens": 60, "reasoning_budget": 9}});
    let whole = http.post("/api/chat", &plain).await.json();
    assert!(
        whole["message"]["content"] != "" && whole["message"]["thinking"].is_string(),
        "{whole}"
    );
    let plain = json!({"model": "thinks", "input": "Tell me a story.", "max_output_tokens": 120, "min_tokens": 60, "reasoning_budget": 9});
    let whole = http.post("/v1/responses", &plain).await.json();
    let kinds: Vec<_> = whole["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].clone())
        .collect();
    assert_eq!(kinds, ["reasoning", "message"], "{whole}");
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
            "model": model, "tools": [], "json_schema": {"enum": ["yes", "no"]}, "max_tokens": 90,
        }));
        let http = &http;
        async move {
            let whole = http.post("/v1/chat/completions", &asked).await.json();
            whole["choices"][0]["message"].clone()
        }
    };
    // This model never ends its thinking by itself.
    let free = message("thinks").await;
    assert!(
        ["yes", "no"].contains(&parsed(&free["content"]).as_str().unwrap()),
        "{free}"
    );
    assert!(!free["reasoning_content"].as_str().unwrap().is_empty());
    let held = message("thought").await;
    assert!(
        ["yes", "no"].contains(&parsed(&held["content"]).as_str().unwrap()),
        "{held}"
    );
    assert_eq!(http.stop().await, End::Drained);
}
