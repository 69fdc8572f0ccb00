//! What a request gives the chat template, and where the template comes from.

use rocmforged::End;
use serde_json::{Value, json};

use crate::http::client::HttpDaemon;
use crate::templates::with_template;

/// What a request gives the template beside messages: shown as it is given to the model.
#[tokio::test]
async fn documents_efforts_and_the_end_of_the_prompt_reach_a_template() {
    const T: &str = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}|{{reasoning_effort}}|\
                     {% for d in documents or [] %}[{{d.title}}: {{d.text}}]{% endfor %}\
                     {% if add_generation_prompt %}<a>{% endif %}";
    let http = HttpDaemon::start().await;
    with_template(&http.daemon, "t", T);
    let asked = |more: &Value| {
        let mut asked = json!({"model": "t", "messages": [{"role": "user", "content": "hi"}]});
        let more = more.as_object().unwrap().clone();
        asked.as_object_mut().unwrap().extend(more);
        asked
    };
    let documents = json!([{"title": "T", "text": "x"}]);
    let rows = [
        (json!({}), "<user>hi||<a>"),
        (json!({"reasoning_effort": "high"}), "<user>hi|high|<a>"),
        (json!({"add_generation_prompt": false}), "<user>hi||"),
        (
            json!({"chat_template_kwargs": {"add_generation_prompt": false}}),
            "<user>hi||",
        ),
        (json!({"documents": documents}), "<user>hi||[T: x]<a>"),
        (
            json!({"chat_template_kwargs": {"documents": documents}}),
            "<user>hi||[T: x]<a>",
        ),
        (json!({"documents": ["y"]}), "<user>hi||[: y]<a>"),
    ];
    let mut counts = Vec::new();
    for (more, expected) in &rows {
        let reply = http.post("/apply-template", &asked(more)).await;
        assert_eq!(reply.status, 200, "{more}: {reply:?}");
        let prompt = reply.json()["prompt"].as_str().unwrap().to_owned();
        assert_eq!(prompt.trim_end(), *expected, "{more}");
        let mut chat = asked(more);
        chat["max_tokens"] = 1.into();
        let reply = http.post("/v1/chat/completions", &chat).await;
        assert_eq!(reply.status, 200, "{more}: {reply:?}");
        counts.push(reply.json()["usage"]["prompt_tokens"].as_u64().unwrap());
    }
    // What is shown is what the model gets.
    assert!(counts[1] > counts[0] && counts[2] < counts[0], "{counts:?}");
    assert_eq!((counts[2], counts[4]), (counts[3], counts[5]), "{counts:?}");
    assert!(counts[4] > counts[0], "{counts:?}");
    for (more, field) in [
        (json!({"documents": [5]}), "documents[0]"),
        (
            json!({"add_generation_prompt": true, "continue_final_message": true}),
            "add_generation_prompt",
        ),
    ] {
        let mut asked = asked(&more);
        asked["messages"][0]["role"] = "assistant".into();
        let reply = http.post("/v1/chat/completions", &asked).await;
        assert_eq!(reply.status, 400, "{more}: {reply:?}");
        assert!(reply.text.contains(field), "{more}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// Files that name a template, or have an empty one.
#[tokio::test]
async fn a_name_in_the_place_of_a_template_is_that_template() {
    let http = HttpDaemon::start().await;
    let chatml = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let phi = "<|user|>\nhi<|end|>\n<|assistant|>\n";
    for (name, template, expected, origin) in [
        ("named", "chatml", chatml, "chatml"),
        ("other", "phi3", phi, "phi3"),
        ("empty", "", chatml, "default"),
    ] {
        with_template(&http.daemon, name, template);
        let asked = json!({"model": name, "messages": [{"role": "user", "content": "hi"}]});
        let reply = http.post("/apply-template", &asked).await.json();
        assert_eq!(reply["prompt"], expected, "{name}");
        let props = http.get(&format!("/props?model={name}")).await.json();
        assert_eq!(props["chat_template_origin"], origin, "{name}");
    }
    with_template(&http.daemon, "unknown", "chatlm");
    let asked = json!({"model": "unknown", "messages": [{"role": "user", "content": "hi"}]});
    let reply = http.post("/v1/chat/completions", &asked).await;
    assert!(reply.status >= 400, "{reply:?}");
    for word in ["chatlm", "`template`", "chatml"] {
        assert!(reply.text.contains(word), "{word}: {reply:?}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
