//! Parses conversations of OpenAI's and Ollama's clients.

use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::{ChatImage, Content, Message, Seen, ToolCall};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::media;
use super::picture::{self, Said};

/// A JSON string or a list.
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

    /// The stop strings without empty ones, which some clients send for none.
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
    /// The call of an assistant's message in the format before tools.
    function_call: Option<WireFunction>,
}

/// A tool call in an earlier message of the assistant.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct WireToolCall {
    id: Option<String>,
    function: Option<WireFunction>,
    /// Call of a tool whose input is text, in conversations that began on another server.
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

/// The type of a reasoning part, and the member with its text.
const THINKING: &str = "thinking";

/// Converts messages to the form that templates take.
pub(super) fn messages(wire: Vec<WireMessage>) -> Result<Vec<Message>, Failure> {
    let each = wire.into_iter().enumerate();
    each.map(|(at, message)| one(at, message)).collect()
}

fn one(at: usize, wire: WireMessage) -> Result<Message, Failure> {
    let mut reasoning = wire.reasoning_content.or(wire.reasoning).or(wire.thinking);
    let field = |part: usize| format!("messages[{at}].content[{part}]");
    let said = match wire.content {
        None => Said::default(),
        Some(TextOr::Text(text)) => Content::Text(text).into(),
        Some(TextOr::List(mut parts)) => {
            if wire.role == "assistant" {
                take_thoughts(&mut parts, &mut reasoning, field)?;
            }
            text_parts(parts, field)?
        }
    };
    let images = wire.images.unwrap_or_default();
    let Said { content, seen } = with_images(said, &images, |image| {
        format!("messages[{at}].images[{image}]")
    });
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
    if let Some(function) = wire.function_call {
        calls.push(ToolCall {
            id: None,
            name: function.name,
            arguments: function.arguments,
        });
    }
    Ok(Message {
        role,
        content,
        seen,
        reasoning_content: reasoning,
        tool_calls: calls,
        tool_call_id: wire.tool_call_id,
        name: wire.name.or(wire.tool_name),
        parse_special: false,
    })
}

/// The content of a message with images in Ollama's list: texts in their places for other models,
/// and the images first for a model that reads them. `field` names an image by index.
pub(super) fn with_images(said: Said, images: &[Value], field: impl Fn(usize) -> String) -> Said {
    if images.is_empty() {
        return said;
    }
    let each = images.iter().enumerate();
    let each = each.map(|(at, image)| Seen::Image(picture::of_ollama(image, field(at))));
    let mut seen: Vec<_> = each.collect();
    match (&said.content, said.seen.is_empty()) {
        (_, false) => seen.extend(said.seen),
        (Content::None, true) => {}
        (Content::Text(text), true) if text.is_empty() => {}
        (Content::Text(text), true) => {
            seen.push(Seen::Part(json!({"type": "text", "text": text})));
        }
        (Content::Parts(parts), true) => seen.extend(parts.iter().cloned().map(Seen::Part)),
    }
    let told = vec![media::IMAGE; images.len()].join("\n");
    let content = match said.content {
        Content::None => Content::Text(told),
        Content::Text(text) => Content::Text(beside_images(&text, images.len())),
        Content::Parts(mut parts) => {
            parts.push(json!({"type": "text", "text": told}));
            Content::Parts(parts)
        }
    };
    Said { content, seen }
}

/// A text preceded by the replacement texts for `n` images.
pub(super) fn beside_images(text: &str, n: usize) -> String {
    let told = vec![media::IMAGE; n].join("\n");
    match (text.is_empty(), n) {
        (_, 0) => text.to_owned(),
        (true, _) => told,
        (false, _) => format!("{text}\n{told}"),
    }
}

/// Deserializes a model's name; empty if it is missing.
pub(super) fn model_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Option::<String>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Moves reasoning parts in Mistral's format out of an assistant's message: `thinking` is a text,
/// or parts of text. They are ignored if the message has reasoning of its own.
fn take_thoughts(
    parts: &mut [Value],
    reasoning: &mut Option<String>,
    field: impl Fn(usize) -> String,
) -> Result<(), Failure> {
    let mut thought = String::new();
    for (at, part) in parts.iter_mut().enumerate() {
        if part["type"] != THINKING {
            continue;
        }
        let said = take(part, THINKING);
        let text = match &said {
            Value::String(text) => Some(text.clone()),
            Value::Array(texts) => texts.iter().map(|text| text["text"].as_str()).collect(),
            _ => None,
        };
        let message = "it has no thinking that is a text or a list of parts of text; give one";
        thought += &text.ok_or_else(|| failure::invalid(&field(at), message))?;
    }
    if !thought.is_empty() {
        reasoning.get_or_insert(thought);
    }
    Ok(())
}

/// Appends reasoning to a message: the model may reason again after its calls.
pub(super) fn add_thought(message: &mut Message, thought: String) {
    match &mut message.reasoning_content {
        Some(all) => *all = format!("{all}\n{thought}"),
        none => *none = Some(thought),
    }
}

/// Takes a member out of an object; null if it is missing or the value is not an object.
pub(super) fn take(value: &mut Value, key: &str) -> Value {
    value.get_mut(key).map(Value::take).unwrap_or_default()
}

/// Takes a string member out of an object.
pub(super) fn take_text(
    value: &mut Value,
    key: &str,
    field: impl Fn() -> String,
) -> Result<String, Failure> {
    match take(value, key) {
        Value::String(text) => Ok(text),
        _ => {
            let message = format!("it has no {key}; give one");
            Err(failure::invalid(&field(), &message))
        }
    }
}

/// Converts parts of a message to text; further members of a part are kept for the template.
/// Documents become their text, and media that models here cannot read become a note. Images are
/// also kept for models that read them.
pub(super) fn text_parts(
    parts: Vec<Value>,
    field: impl Fn(usize) -> String,
) -> Result<Said, Failure> {
    let mut texts = Vec::with_capacity(parts.len());
    let mut images = Vec::with_capacity(parts.len());
    for (at, mut part) in parts.into_iter().enumerate() {
        let kind = kind_of(&part, || field(at))?;
        let key = match kind {
            // What an answer's message has taken for itself.
            THINKING if part.get(THINKING).is_some_and(Value::is_null) => continue,
            "refusal" => "refusal",
            _ => "text",
        };
        if !matches!(kind, "text" | "input_text" | "output_text" | "refusal") {
            texts.push((media::text_of(kind, &part, &field(at))?, Value::Null));
            images.push(picture::of_part(kind, &part, &field(at)));
            continue;
        }
        match take(&mut part, key) {
            Value::String(text) => {
                texts.push((text, part));
                images.push(None);
            }
            _ => {
                let message = format!("it has no {key}; give one");
                return Err(failure::invalid(&field(at), &message));
            }
        }
    }
    Ok(of_texts(texts, images))
}

/// The content for texts with further members, some of which stand in place of an image.
fn of_texts(mut texts: Vec<(String, Value)>, images: Vec<Option<ChatImage>>) -> Said {
    // One part without more is what a text is.
    if let [(text, part)] = texts.as_mut_slice()
        && part
            .as_object()
            .is_none_or(|part| part.keys().all(|key| is_of_text(key)))
    {
        let content = Content::Text(std::mem::take(text));
        let seen = images.into_iter().flatten().map(Seen::Image).collect();
        return Said { content, seen };
    }
    if texts.is_empty() {
        return Said::default();
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
    let parts: Vec<_> = texts.into_iter().map(part).collect();
    Said {
        seen: Seen::of_parts(&parts, images),
        content: Content::Parts(parts),
    }
}

/// The type of a part; a part without a type is text.
pub(super) fn kind_of(part: &Value, field: impl Fn() -> String) -> Result<&str, Failure> {
    match part.get("type") {
        None | Some(Value::Null) => Ok("text"),
        Some(Value::String(kind)) => Ok(kind),
        Some(other) => {
            let message = format!("{other} is no type of a part; give a text such as \"text\"");
            Err(failure::invalid(&format!("{}.type", field()), &message))
        }
    }
}

/// Whether a member is the text of a text part.
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

    /// Some of these once vanished from the prompt without a word.
    #[test]
    fn a_part_that_cannot_be_read_is_refused_by_its_place() {
        let bad = |part: Value| {
            let text = json!({"type": "text", "text": "a"});
            read(json!([{"role": "assistant", "content": [text, part]}]))
        };
        let nested = json!([{"type": "text", "text": "a"}, {"type": "robot"}]);
        for (part, place, words) in [
            (json!({"type": "robot"}), "", "robot"),
            (json!({"type": 5, "text": "a"}), ".type", "5 is no type"),
            (json!({"type": "text", "text": 5}), "", "no text"),
            (json!("a"), "", "no text"),
            (json!(null), "", "no text"),
            (json!({"type": "refusal", "text": "a"}), "", "no refusal"),
            (json!({"type": "thinking", "text": "a"}), "", "no thinking"),
            (
                json!({"type": "thinking", "thinking": {"a": 1}}),
                "",
                "no thinking",
            ),
            (
                json!({"type": "thinking", "thinking": [{"type": "x"}]}),
                "",
                "no thinking",
            ),
            (
                json!({"type": "search_result", "content": nested}),
                ".content[1]",
                "robot",
            ),
            (
                json!({"type": "search_result", "content": 5}),
                ".content",
                "neither",
            ),
            (
                json!({"type": "document", "source": {"type": "content", "content": nested}}),
                ".source.content[1]",
                "robot",
            ),
        ] {
            let failure = bad(part.clone()).unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(*field, format!("messages[0].content[1]{place}"), "{part}");
            assert!(message.contains(words), "{part}: {message}");
        }
    }

    #[test]
    fn a_call_in_the_form_before_tools_is_one() {
        let call = json!({"name": "f", "arguments": "{}"});
        let chat = read(json!([{"role": "assistant", "content": null, "function_call": call}]));
        let calls = &chat.unwrap()[0].tool_calls;
        assert_eq!((calls.len(), calls[0].name.as_str()), (1, "f"));
    }
}
