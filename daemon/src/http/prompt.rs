//! Conversations as OpenAI's and Ollama's clients write them.

use rocmforge_service::failure::{self, Failure};
use rocmforge_tokenizer::{Content, Message, ToolCall};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::media;

/// A text, or a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list")]
pub(super) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

impl TextOr<String> {
    pub(super) fn into_list(self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text],
            Self::List(list) => list,
        }
    }

    /// Stop strings without the empty ones, which some clients send for none.
    pub(super) fn stops(self) -> Self {
        let mut list = self.into_list();
        list.retain(|stop| !stop.is_empty());
        Self::List(list)
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct WireMessage {
    pub(super) role: String,
    pub(super) content: Option<TextOr<Value>>,
    pub(super) name: Option<String>,
    pub(super) tool_name: Option<String>,
    pub(super) tool_call_id: Option<String>,
    pub(super) tool_calls: Option<Vec<WireToolCall>>,
    pub(super) reasoning_content: Option<String>,
    pub(super) reasoning: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) images: Option<Vec<Value>>,
}

/// A call of an earlier answer.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct WireToolCall {
    id: Option<String>,
    function: Option<WireFunction>,
    /// Of tools whose input is a text, in conversations that another server began.
    custom: Option<WireCustom>,
}

#[derive(Debug, Clone, Deserialize)]
struct WireCustom {
    name: String,
    #[serde(default)]
    input: Value,
}

#[derive(Debug, Clone, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// The messages as templates see them.
pub(super) fn messages(wire: Vec<WireMessage>) -> Result<Vec<Message>, Failure> {
    let each = wire.into_iter().enumerate();
    each.map(|(at, message)| one(at, message)).collect()
}

fn one(at: usize, wire: WireMessage) -> Result<Message, Failure> {
    let mut reasoning = wire.reasoning_content.or(wire.reasoning).or(wire.thinking);
    let content = match wire.content {
        None => Content::None,
        Some(TextOr::Text(text)) => Content::Text(text),
        Some(TextOr::List(mut parts)) => {
            if wire.role == "assistant" {
                take_thoughts(&mut parts, &mut reasoning);
            }
            text_parts(parts, |part| format!("messages[{at}].content[{part}]"))?
        }
    };
    let content = with_images(content, wire.images.map_or(0, |images| images.len()));
    // What instructs the model is called so by newer clients.
    let role = match wire.role.as_str() {
        "developer" => "system".to_owned(),
        _ => wire.role,
    };
    let mut calls = Vec::new();
    for (n, call) in wire.tool_calls.unwrap_or_default().into_iter().enumerate() {
        let (name, arguments) = match (call.function, call.custom) {
            (Some(function), _) => (function.name, function.arguments),
            (None, Some(custom)) => (custom.name, json!({"input": custom.input})),
            (None, None) => {
                let field = format!("messages[{at}].tool_calls[{n}]");
                return Err(failure::invalid(&field, "it has no function; give one"));
            }
        };
        calls.push(ToolCall {
            id: call.id,
            name,
            arguments,
        });
    }
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning,
        tool_calls: calls,
        tool_call_id: wire.tool_call_id,
        name: wire.name.or(wire.tool_name),
        parse_special: false,
    })
}

/// What a message says, with what is told in place of each of its images.
fn with_images(content: Content, n: usize) -> Content {
    if n == 0 {
        return content;
    }
    let told = vec![media::IMAGE; n].join("\n");
    match content {
        Content::None => Content::Text(told),
        Content::Text(text) => Content::Text(beside_images(&text, n)),
        Content::Parts(mut parts) => {
            parts.push(json!({"type": "text", "text": told}));
            Content::Parts(parts)
        }
    }
}

/// A text with what is told in place of each of `n` images beside it.
pub(super) fn beside_images(text: &str, n: usize) -> String {
    let told = vec![media::IMAGE; n].join("\n");
    match (text.is_empty(), n) {
        (_, 0) => text.to_owned(),
        (true, _) => told,
        (false, _) => format!("{text}\n{told}"),
    }
}

/// The name of a model, or an empty one where there is none.
pub(super) fn model_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Option::<String>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Takes parts of reasoning out of an answer, in Mistral's form: `thinking` is a text, or parts of
/// text. They count where the message has no reasoning of its own.
fn take_thoughts(parts: &mut Vec<Value>, reasoning: &mut Option<String>) {
    let mut thought = String::new();
    parts.retain(|part| {
        if part["type"] != "thinking" {
            return true;
        }
        match &part["thinking"] {
            Value::String(text) => thought.push_str(text),
            Value::Array(texts) => {
                thought.extend(texts.iter().filter_map(|text| text["text"].as_str()))
            }
            _ => {}
        }
        false
    });
    if !thought.is_empty() {
        reasoning.get_or_insert(thought);
    }
}

/// The member of an object; null where there is none, or where it is no object.
pub(super) fn take(value: &mut Value, key: &str) -> Value {
    value.get_mut(key).map(Value::take).unwrap_or_default()
}

/// Parts of a message as text, with their further members, which reach the template: documents are
/// what is in them, and what models here cannot read leaves a text that says so.
pub(super) fn text_parts(
    parts: Vec<Value>,
    field: impl Fn(usize) -> String,
) -> Result<Content, Failure> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, mut part) in parts.into_iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or("text");
        let key = match kind {
            "refusal" => "refusal",
            _ => "text",
        };
        if !matches!(kind, "text" | "input_text" | "output_text" | "refusal") {
            let text = media::text_of(kind, &part).ok_or_else(|| {
                let message = format!("a part of the type {kind} is not known here; leave it out");
                failure::unsupported_field(&field(at), &message)
            })?;
            texts.push((text, Value::Null));
            continue;
        }
        match take(&mut part, key) {
            Value::String(text) => texts.push((text, part)),
            _ => {
                let message = format!("it has no {key}; give one");
                return Err(failure::invalid(&field(at), &message));
            }
        }
    }
    // One part without more is what a text is.
    if let [(text, part)] = texts.as_mut_slice()
        && part
            .as_object()
            .is_none_or(|part| part.keys().all(|key| is_of_text(key)))
    {
        return Ok(Content::Text(std::mem::take(text)));
    }
    if texts.is_empty() {
        return Ok(Content::None);
    }
    let part = |(text, part): (String, Value)| {
        let mut whole = Map::new();
        whole.insert("type".to_owned(), "text".into());
        whole.insert("text".to_owned(), text.into());
        if let Value::Object(more) = part {
            whole.extend(more.into_iter().filter(|(key, _)| !is_of_text(key)));
        }
        Value::Object(whole)
    };
    Ok(Content::Parts(texts.into_iter().map(part).collect()))
}

/// Whether a part of text has this member for its text.
fn is_of_text(key: &str) -> bool {
    matches!(key, "type" | "text" | "refusal")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, Failure> {
        messages(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn messages_are_read_in_the_forms_that_clients_write() {
        let chat = read(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "7", "unknown": [1, 2]},
        ]))
        .unwrap();
        assert_eq!(chat[0].role, "system");
        assert_eq!(chat[1].content, Content::Text("a".into()));
        assert!(matches!(&chat[2].content, Content::Parts(parts) if parts.len() == 2));
        assert_eq!(chat[3].content, Content::None);
        assert_eq!(chat[3].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(chat[3].tool_calls[0].name, "f");
        assert_eq!(chat[4].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn further_members_of_parts_are_kept() {
        let chat = read(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {"x": 1}}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b", "n": 2}]},
        ]))
        .unwrap();
        assert_eq!(
            chat[0].content,
            Content::Parts(vec![
                json!({"type": "text", "text": "a", "cache_control": {"x": 1}})
            ])
        );
        assert_eq!(
            chat[1].content,
            Content::Parts(vec![
                json!({"type": "text", "text": "a"}),
                json!({"type": "text", "text": "b", "n": 2}),
            ])
        );
    }

    #[test]
    fn parts_of_reasoning_are_reasoning() {
        let chat = read(json!([
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "I "}, {"type": "text", "text": "think."}]},
                {"type": "text", "text": "a"}]},
            {"role": "assistant", "reasoning": "own", "content": [{"type": "thinking", "thinking": "other"}]},
        ]))
        .unwrap();
        assert_eq!(chat[0].reasoning_content.as_deref(), Some("I think."));
        assert_eq!(chat[0].content, Content::Text("a".into()));
        assert_eq!(chat[1].reasoning_content.as_deref(), Some("own"));
        assert_eq!(chat[1].content, Content::None);
    }

    #[test]
    fn what_other_servers_answered_is_read() {
        let chat = read(json!([
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        ]))
        .unwrap();
        assert_eq!(chat[0].content, Content::Text("No.".into()));
        assert_eq!(chat[1].tool_calls[0].arguments, json!({"input": "x"}));
        let none = read(json!([{"role": "assistant", "tool_calls": [{"id": "1"}]}]));
        let failure = none.unwrap_err();
        assert_eq!(failure.fields()[0].0, "messages[0].tool_calls[0]");
    }

    #[test]
    fn a_conversation_lives_on_with_an_image_in_it() {
        let chat = read(json!([
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": "x"}]},
            {"role": "user", "content": "a", "images": ["x", "y"]},
            {"role": "user", "images": ["x"]},
        ]))
        .unwrap();
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(
            chat[0].content,
            Content::Parts(vec![text("a"), text(media::IMAGE)])
        );
        assert_eq!(chat[1].content, Content::Text(media::IMAGE.into()));
        let two = format!("a\n{0}\n{0}", media::IMAGE);
        assert_eq!(chat[2].content, Content::Text(two));
        assert_eq!(chat[3].content, Content::Text(media::IMAGE.into()));
    }

    #[test]
    fn a_part_of_no_known_type_is_refused_by_its_place() {
        let odd = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "robot"}]}]);
        let failure = read(odd).unwrap_err();
        assert_eq!(failure.fields()[0].0, "messages[0].content[1]");
        assert!(failure.message().contains("robot"), "{failure:?}");
    }
}
