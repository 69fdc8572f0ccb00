//! Which tokens log-probabilities are told of, and where these stand in the text.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::{HttpDaemon, LLAMA};
use crate::templates::with_template;

const COMPLETIONS: &str = "/v1/completions";

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
        let last = &content.last().unwrap()["token"];
        assert_ne!(last, ".", "{whole}");
        assert_eq!(content, joined(&streamed, "content"), "{model}");
    }
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
