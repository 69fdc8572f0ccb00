//! Which tokens log-probabilities are told of, and where these stand in the text.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA};
use crate::templates::with_template;

const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

/// The first choice of a whole answer, and those of the chunks of a stream.
async fn both(http: &HttpDaemon, route: &str, asked: &Value) -> (Value, Vec<Value>) {
    let whole = http.post(route, asked).await;
    assert_eq!(whole.status, 200, "{asked}: {whole:?}");
    let mut asked = asked.clone();
    asked["stream"] = true.into();
    let reply = http.post(route, &asked).await;
    let data = reply.events().into_iter().map(|(_, data)| data);
    let chunks = data.filter(|data| data != "[DONE]");
    let choice = |data: String| serde_json::from_str::<Value>(&data).unwrap()["choices"][0].take();
    (
        whole.json()["choices"][0].take(),
        chunks.map(choice).collect(),
    )
}

/// The lists under `key` of what is told of log-probabilities, behind one another.
fn joined(choices: &[Value], key: &str) -> Vec<Value> {
    let lists = choices.iter().map(|choice| &choice["logprobs"][key]);
    lists
        .filter_map(Value::as_array)
        .flatten()
        .cloned()
        .collect()
}

/// The texts of a response's messages, each with its log-probabilities: of a whole one, and of the
/// deltas of a stream.
async fn messages(http: &HttpDaemon, asked: &Value) -> [Vec<(String, Vec<Value>)>; 2] {
    let of = |response: &Value| -> Vec<(String, Vec<Value>)> {
        let items = response["output"].as_array().unwrap().iter();
        let messages = items.filter(|item| item["type"] == "message");
        messages
            .map(|item| told(&item["content"][0], "text"))
            .collect()
    };
    let reply = http.post(RESPONSES, asked).await;
    assert_eq!(reply.status, 200, "{asked}: {reply:?}");
    let whole = of(&reply.json());
    let mut asked = asked.clone();
    asked["stream"] = true.into();
    let mut streamed: Vec<(String, Vec<Value>)> = Vec::new();
    for (name, data) in http.post(RESPONSES, &asked).await.events() {
        let data: Value = serde_json::from_str(&data).unwrap();
        match name.as_str() {
            "response.content_part.added" if data["part"]["type"] == "output_text" => {
                streamed.push(Default::default());
            }
            "response.output_text.delta" => {
                let (text, scores) = streamed.last_mut().unwrap();
                let more = told(&data, "delta");
                text.push_str(&more.0);
                scores.extend(more.1);
            }
            "response.output_text.done" => assert_eq!(Some(&told(&data, "text")), streamed.last()),
            "response.completed" => assert_eq!(of(&data["response"]), streamed),
            _ => {}
        }
    }
    [whole, streamed]
}

/// The text under `key`, and the log-probabilities beside it.
fn told(data: &Value, key: &str) -> (String, Vec<Value>) {
    let text = data[key].as_str().unwrap().to_owned();
    (text, data["logprobs"].as_array().unwrap().clone())
}

/// The number of the one token that `text` is.
async fn id(http: &HttpDaemon, text: &str) -> String {
    let asked = json!({"model": LLAMA, "content": text});
    let ids = http.post("/tokenize", &asked).await.json();
    let [id] = &ids["tokens"].as_array().unwrap()[..] else {
        panic!("{text:?}: {ids}");
    };
    id.to_string()
}

/// Whether a token has a name and no text.
fn is_control(token: &str) -> bool {
    token.starts_with("<|")
}

#[tokio::test]
async fn all_tokens_before_a_stop_string_are_told_and_none_of_its_own() {
    let http = HttpDaemon::start().await;
    // The text has control tokens, which are nothing in it.
    let asked = json!({
        "model": LLAMA, "prompt": "\n\n", "temperature": 0, "max_tokens": 60, "stop": ".", "logprobs": 0,
    });
    let (whole, streamed) = both(&http, COMPLETIONS, &asked).await;
    let tokens = joined(std::slice::from_ref(&whole), "tokens");
    let spelled = tokens.iter().map(|token| token.as_str().unwrap());
    let (control, said): (Vec<_>, Vec<_>) = spelled.partition(|token| is_control(token));
    assert!(!control.is_empty(), "{whole}");
    assert_eq!(said.concat(), whole["text"].as_str().unwrap());
    assert_eq!(tokens, joined(&streamed, "tokens"));

    // A stop string inside of a thought, and behind one whose mark is none of the text.
    let template = "{{ messages[0].content }}";
    with_template(&http.daemon, "thinks", &format!("{template}<think>"));
    let marks = "{# <think> </think> #}";
    with_template(&http.daemon, "says", &format!("{template}{marks}"));
    for (model, format) in [("thinks", " a b\\."), ("says", "<think> a</think> b c\\.")] {
        let asked = json!({
            "model": model, "messages": [{"role": "user", "content": "42 - 30 = ?"}], "temperature": 0,
            "max_tokens": 60, "stop": ".", "logprobs": true, "guided_regex": format,
        });
        let (whole, streamed) = both(&http, "/v1/chat/completions", &asked).await;
        let content = joined(std::slice::from_ref(&whole), "content");
        assert_eq!(content, joined(&streamed, "content"), "{model}");
        // What is thought, and marks, have no place beside the content.
        let tokens = content.iter().map(|token| token["token"].as_str().unwrap());
        let said = whole["message"]["content"].as_str().unwrap_or_default();
        assert_eq!(tokens.collect::<String>().trim(), said.trim(), "{whole}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_response_tells_of_its_texts_and_not_of_the_marks_around_them() {
    let http = HttpDaemon::start().await;
    // A thought that ends, before a text that is held to a format. Each token of it comes once:
    // the one with the largest bias, until the penalty takes that away. The prompt has some of
    // them, too, further back than the penalty looks.
    let far = "\n".repeat(16);
    let template = format!("{{{{ messages[0].content }}}}<think>{far}{{# </think> #}}");
    with_template(&http.daemon, "thinks", &template);
    let mut bias = serde_json::Map::new();
    for (nth, token) in (0..).zip([" a", "<", "/", "th", "in", "k", ">"]) {
        bias.insert(id(&http, token).await, (100 - 12 * nth).into());
    }
    let thinks = json!({
        "model": "thinks", "logit_bias": bias, "repeat_penalty": 1000, "repeat_last_n": 12,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": "b"}}},
    });
    // Calls inside of a text that is held to a format; of two calls one counts.
    with_template(
        &http.daemon,
        "calls",
        "{{ messages[0].content }}{# <tool_call> #}",
    );
    let call = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>";
    let calls = |n: usize| {
        let text = format!("x{} y", call.repeat(n));
        json!({
            "model": "calls", "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "parallel_tool_calls": false,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": text}}},
        })
    };
    for (mut asked, expected) in [
        (thinks, vec!["\"b\""]),
        (calls(1), vec!["\"x", "y\""]),
        (calls(2), vec!["\"x", "y\""]),
    ] {
        let more = json!({
            "input": "42 - 30 = ?", "temperature": 0, "max_output_tokens": 200,
            "include": ["message.output_text.logprobs"],
        });
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let [whole, streamed] = messages(&http, &asked).await;
        let texts: Vec<_> = whole.iter().map(|(text, _)| text).collect();
        assert_eq!(texts, expected, "{asked}");
        for (text, scores) in &whole {
            let tokens = scores.iter().map(|token| token["token"].as_str().unwrap());
            assert_eq!(tokens.collect::<String>().trim(), text, "{whole:?}");
        }
        assert_eq!(whole, streamed, "{asked}");
    }
    // A chat completion, likewise: none of the thought has a place beside the content.
    let asked = json!({
        "model": "thinks", "messages": [{"role": "user", "content": "42 - 30 = ?"}], "temperature": 0,
        "max_tokens": 200, "logprobs": true, "logit_bias": bias, "repeat_penalty": 1000,
        "repeat_last_n": 12, "json_schema": {"const": "b"},
    });
    let (whole, streamed) = both(&http, "/v1/chat/completions", &asked).await;
    assert_eq!(whole["message"]["content"], "\"b\"", "{whole}");
    assert!(whole["message"]["reasoning_content"].is_string(), "{whole}");
    let content = joined(std::slice::from_ref(&whole), "content");
    let tokens = content.iter().map(|token| token["token"].as_str().unwrap());
    assert_eq!(tokens.collect::<String>().trim(), "\"b\"", "{whole}");
    assert_eq!(content, joined(&streamed, "content"));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn the_place_of_a_token_is_the_number_of_characters_before_it() {
    let http = HttpDaemon::start().await;
    // Characters of several tokens; and control tokens, of which only those of a prompt that is
    // given as text are in the text.
    let prompts = [
        "h\u{e9}llo \u{1f600}",
        "\n\n",
        "a<|im_end|>\n<|im_start|>user\nb",
    ];
    for (prompt, echo) in prompts.iter().flat_map(|p| [(p, false), (p, true)]) {
        let asked = json!({
            "model": LLAMA, "prompt": prompt, "echo": echo, "temperature": 0, "max_tokens": 24, "logprobs": 0,
        });
        let (whole, streamed) = both(&http, COMPLETIONS, &asked).await;
        let text: Vec<char> = whole["text"].as_str().unwrap().chars().collect();
        let told = std::slice::from_ref(&whole);
        let places = joined(told, "text_offset");
        assert_eq!(places, joined(&streamed, "text_offset"));
        let mut seen = 0;
        for (token, place) in joined(told, "tokens").iter().zip(&places) {
            let place = place.as_u64().unwrap() as usize;
            assert!((seen..=text.len()).contains(&place), "{whole}");
            seen = place;
            let token = token.as_str().unwrap();
            let there: String = text[place..].iter().take(token.chars().count()).collect();
            assert!(
                there == token || is_control(token) || token.starts_with("bytes:"),
                "{token:?} at {place}: {whole}"
            );
        }
    }
    assert_eq!(http.stop().await, End::Drained);
}
