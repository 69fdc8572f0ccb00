//! Templates in the style of the well-known families, against what Python's
//! Jinja makes of them (`templates/expect.py` writes the expectations).

use std::path::Path;

use rocmforge_tokenizer::{ChatTemplate, Error, Message};
use serde_json::Value;

#[test]
fn rendering_agrees_with_jinja() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&read("cases.json")).unwrap();
    for name in [
        "chatml",
        "llama3",
        "mistral",
        "gemma",
        "deepseek",
        "pythonisms",
    ] {
        let template = ChatTemplate::new(&read(&format!("{name}.jinja")), "<s>", "</s>").unwrap();
        let expected: Vec<Value> =
            serde_json::from_str(&read(&format!("{name}.expected.json"))).unwrap();
        assert_eq!(cases.len(), expected.len());
        for (i, (case, expected)) in cases.iter().zip(&expected).enumerate() {
            let messages: Vec<Message> = case["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| Message::new(m["role"].as_str().unwrap(), m["content"].as_str().unwrap()))
                .collect();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            match (template.render(&messages, prompt), &expected["raised"]) {
                (Ok(text), Value::Null) => {
                    assert_eq!(text, expected["text"].as_str().unwrap(), "{name}, case {i}");
                }
                (Err(Error::TemplateRaised { message }), Value::String(raised)) => {
                    assert_eq!(message, *raised, "{name}, case {i}");
                }
                (ours, _) => panic!("{name}, case {i}: {ours:?} where Jinja gives {expected}"),
            }
        }
    }
}

/// Features one by one: each template of `probes.json` gives what Python's
/// Jinja gives, or fails as it does.
#[test]
fn features_agree_with_jinja() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let probes: Vec<String> = serde_json::from_str(&read("probes.json")).unwrap();
    let expected: Vec<Value> = serde_json::from_str(&read("probes.expected.json")).unwrap();
    assert_eq!(probes.len(), expected.len());
    let messages = [
        Message::new("user", "Hi é"),
        Message::new("assistant", "Yes."),
    ];
    let mut wrong = Vec::new();
    for (probe, expected) in probes.iter().zip(&expected) {
        let template = ChatTemplate::new(probe, "<s>", "</s>").unwrap();
        match (template.render(&messages, true), expected["text"].as_str()) {
            (Ok(ours), Some(text)) if ours == text => {}
            (Err(_), None) => {}
            (ours, _) => wrong.push(format!("{probe}\n  ours  {ours:?}\n  jinja {expected}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
