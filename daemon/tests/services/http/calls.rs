//! Calls of tools as they come: arguments in pieces, and what is left of a call that is cut.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, Reply};
use crate::templates::with_template;

/// A template whose models write calls as JSON.
const CALLER: &str = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}{# <tool_call> #}";

/// Arguments that take many tokens.
fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 40, "maxLength": 60}},
        "required": ["text"],
        "additionalProperties": false,
    })
}

/// A question whose answer is one call, in the words of each dialect that streams arguments.
fn questions() -> [(&'static str, Value); 3] {
    let function = json!({"name": "write", "parameters": parameters()});
    let message = json!([{"role": "user", "content": "Tell me a story."}]);
    [
        (
            "/v1/chat/completions",
            json!({
                "model": "caller", "messages": message, "seed": 3, "tool_choice": "required",
                "tools": [{"type": "function", "function": function}], "parallel_tool_calls": false,
            }),
        ),
        (
            "/v1/messages",
            json!({
                "model": "caller", "messages": message, "seed": 3, "max_tokens": 400,
                "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
                "tools": [{"name": "write", "input_schema": parameters()}],
            }),
        ),
        (
            "/v1/responses",
            json!({
                "model": "caller", "input": message, "seed": 3, "parallel_tool_calls": false,
                "tool_choice": {"type": "function", "namespace": "mcp__pen", "name": "write"},
                "tools": [{"type": "namespace", "name": "mcp__pen", "tools": [
                    {"type": "function", "name": "write", "parameters": parameters()},
                ]}],
            }),
        ),
    ]
}

fn values(reply: &Reply) -> Vec<Value> {
    let events = reply.events().into_iter();
    events
        .filter(|(_, data)| data != "[DONE]")
        .map(|(_, data)| serde_json::from_str(&data).unwrap())
        .collect()
}

fn texts(values: impl Iterator<Item = Value>) -> Vec<String> {
    let texts = values.map(|value| value.as_str().map(str::to_owned));
    texts.flatten().collect()
}

#[tokio::test]
async fn arguments_are_streamed_in_pieces_that_make_those_of_the_whole_answer() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    for (target, mut asked) in questions() {
        let whole = http.post(target, &asked).await.json();
        asked["stream"] = true.into();
        let events = values(&http.post(target, &asked).await);
        let (expected, pieces) = match target {
            "/v1/chat/completions" => {
                let call = &whole["choices"][0]["message"]["tool_calls"][0];
                let told = |event: &Value| event["choices"][0]["delta"]["tool_calls"][0].clone();
                let told: Vec<_> = events.iter().map(told).filter(|c| !c.is_null()).collect();
                assert_eq!(told[0]["function"]["name"], "write");
                assert!(told[0]["id"].is_string() && told[0]["type"] == "function");
                for more in &told[1..] {
                    assert_eq!(more.as_object().unwrap().len(), 2, "{more}");
                    assert_eq!(more["index"], 0);
                }
                let pieces = told
                    .iter()
                    .map(|call| call["function"]["arguments"].clone());
                (call["function"]["arguments"].clone(), texts(pieces))
            }
            "/v1/messages" => {
                let started = events.iter().filter(|e| e["type"] == "content_block_start");
                assert_eq!(started.count(), 1);
                let pieces = texts(events.iter().map(|e| e["delta"]["partial_json"].clone()));
                let input: Value = serde_json::from_str(&pieces.concat()).unwrap();
                assert_eq!(whole["content"][0]["input"], input);
                (pieces.concat().into(), pieces)
            }
            _ => {
                let call = &whole["output"][0];
                assert_eq!(
                    (&call["name"], &call["namespace"]),
                    (&json!("write"), &json!("mcp__pen"))
                );
                let of = |kind: &str| {
                    let found = events.iter().find(|event| event["type"] == kind);
                    found.unwrap().clone()
                };
                for kind in ["response.output_item.added", "response.output_item.done"] {
                    assert_eq!(of(kind)["item"]["namespace"], "mcp__pen");
                    assert_eq!(of(kind)["item"]["name"], "write");
                }
                let done = of("response.function_call_arguments.done");
                assert_eq!(done["arguments"], call["arguments"]);
                let item = of("response.output_item.done")["item"].clone();
                assert_eq!(item["arguments"], call["arguments"]);
                assert_eq!(of("response.completed")["response"]["output"][0], item);
                let kind = "response.function_call_arguments.delta";
                let pieces = events.iter().filter(|event| event["type"] == kind);
                let pieces = pieces.map(|event| event["delta"].clone());
                (call["arguments"].clone(), texts(pieces))
            }
        };
        assert!(pieces.len() > 5, "{target}: {pieces:?}");
        assert_eq!(Value::from(pieces.concat()), expected, "{target}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// Found by hand: with its closing mark half written a whole call became text, and what was cut
/// inside of a call was shown with its marks.
#[tokio::test]
async fn a_call_that_is_cut_shows_no_marks_and_keeps_its_arguments() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let [(target, mut asked), ..] = questions();
    asked["max_tokens"] = 400.into();
    let whole = http.post(target, &asked).await.json();
    let arguments = |whole: &Value| {
        let call = &whole["choices"][0]["message"]["tool_calls"][0];
        call["function"]["arguments"].as_str().map(str::to_owned)
    };
    let all = arguments(&whole).unwrap();
    let n = whole["usage"]["completion_tokens"].as_u64().unwrap();
    let (mut cut, mut complete) = (0, 0);
    for max in 1..n {
        asked["max_tokens"] = max.into();
        let whole = http.post(target, &asked).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{whole}");
        let content = choice["message"]["content"].as_str().unwrap_or_default();
        // One byte may be anything.
        assert!(content.len() <= 1, "{max}: {whole}");
        if let Some(told) = arguments(&whole) {
            assert!(all.starts_with(&told), "{max}: {told}");
            cut += usize::from(told != all);
            complete += usize::from(told == all);
        }
    }
    assert!(cut > 5 && complete > 2, "{cut}, {complete} of {n}");
    // Ollama's calls have an object: one that is cut is none.
    let ollama = json!({
        "model": "caller", "stream": false, "messages": asked["messages"], "tools": asked["tools"],
        "options": {"num_predict": 1},
    });
    let whole = http.post("/api/chat", &ollama).await.json();
    assert_eq!(whole["done_reason"], "length", "{whole}");
    assert!(whole["message"].get("tool_calls").is_none());
    assert_eq!(http.stop().await, End::Drained);
}

/// A model may stay inside of a text of a strict call up to `max_tokens`: no grammar can end that
/// text for it. The end is told as one by length, and what came of the call is what OpenAI gives.
#[tokio::test]
async fn a_strict_call_that_stays_in_a_text_up_to_max_tokens_ends_by_length() {
    const MOST: u32 = 120;
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let mut long = parameters();
    // More than tokens of any kind bring in time.
    long["properties"]["text"] = json!({"type": "string", "minLength": 4000});
    let message = json!([{"role": "user", "content": "Tell me a story."}]);
    let function = json!({"name": "write", "strict": true, "parameters": long});
    let chat = json!({
        "model": "caller", "messages": message, "seed": 3, "tool_choice": "required",
        "max_tokens": MOST, "tools": [{"type": "function", "function": function}],
    });
    let whole = http.post("/v1/chat/completions", &chat).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "length", "{whole}");
    let arguments = &choice["message"]["tool_calls"][0]["function"]["arguments"];
    let arguments = arguments.as_str().unwrap();
    assert!(arguments.contains("\"text\""), "{whole}");
    assert!(serde_json::from_str::<Value>(arguments).is_err(), "{whole}");

    let mut tool = function.clone();
    tool["type"] = "function".into();
    let responses = json!({
        "model": "caller", "input": message, "seed": 3, "tool_choice": "required",
        "max_output_tokens": MOST, "tools": [tool],
    });
    let whole = http.post("/v1/responses", &responses).await.json();
    assert_eq!(whole["status"], "incomplete", "{whole}");
    let reason = &whole["incomplete_details"]["reason"];
    assert_eq!(reason, "max_output_tokens", "{whole}");
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["status"]),
        (&json!("function_call"), &json!("incomplete"))
    );

    // These two have arguments as an object alone, so what came is told as text.
    let messages = json!({
        "model": "caller", "messages": message, "seed": 3, "tool_choice": {"type": "any"},
        "max_tokens": MOST, "tools": [{"name": "write", "strict": true, "input_schema": long}],
    });
    let whole = http.post("/v1/messages", &messages).await.json();
    assert_eq!(whole["stop_reason"], "max_tokens", "{whole}");
    assert_eq!(whole["content"][0]["type"], "text", "{whole}");
    let said = whole["content"][0]["text"].as_str().unwrap();
    assert!(said.contains("\"text\""), "{whole}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn allowed_tools_are_the_only_ones() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let [(target, mut asked), ..] = questions();
    asked["max_tokens"] = 400.into();
    let other =
        json!({"type": "function", "function": {"name": "read", "parameters": parameters()}});
    asked["tools"].as_array_mut().unwrap().push(other);
    let read = json!([{"type": "function", "function": {"name": "read"}}]);
    asked["tool_choice"] =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": read}});
    let whole = http.post(target, &asked).await.json();
    let call = &whole["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "read", "{whole}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_stop_string_inside_of_arguments_makes_no_call_that_is_told_as_whole() {
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "caller", CALLER);
    let (target, mut asked) = questions()[0].clone();
    let reason = |asked: Value| {
        let http = &http;
        async move {
            let whole = http.post(target, &asked).await.json();
            whole["choices"][0]["finish_reason"].clone()
        }
    };
    assert_eq!(reason(asked.clone()).await, "tool_calls");
    asked["stop"] = "\"text\"".into();
    assert_eq!(reason(asked).await, "stop");
    assert_eq!(http.stop().await, End::Drained);
}
