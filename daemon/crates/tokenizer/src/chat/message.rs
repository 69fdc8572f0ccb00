//! What a chat consists of, and the variables that a template sees of it.

use serde_json::{Map, Value};

use super::ChatTemplate;
use super::images::Seen;
use super::shape::{Shape, text_part, thinking_part};

/// A chat that is to be rendered.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// Descriptions of the functions that the model may call, as applications
    /// send them: `{"type": "function", "function": {...}}`.
    pub tools: Vec<Value>,
    /// Texts that the answer may rest on, which take the place of `documents` in
    /// [`template_kwargs`](Self::template_kwargs); few templates know them.
    pub documents: Vec<Value>,
    /// More variables for the template, such as `enable_thinking`. They cannot
    /// replace those that this type has fields for.
    pub template_kwargs: Map<String, Value>,
    /// How the rendered chat ends.
    pub ending: Ending,
    /// Names of control tokens in messages, tools, documents and arguments are
    /// these tokens. Only for text that the application itself wrote.
    pub parse_special: bool,
}

impl Chat {
    /// A chat of `messages` that the model is to answer.
    #[must_use]
    pub fn new(messages: Vec<Message>) -> Chat {
        Chat {
            messages,
            ..Chat::default()
        }
    }

    /// Bytes of the texts of messages and documents, for the choice of who works on it.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        let said = self.messages.iter().map(Message::byte_len).sum::<usize>();
        said + self.documents.iter().map(value_len).sum::<usize>()
    }
}

/// How a rendered chat ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ending {
    /// With the opening of the model's answer (`add_generation_prompt`).
    #[default]
    Answer,
    /// In the last message, left open, so that the model goes on with it
    /// (`continue_final_message`).
    Continue,
    /// After the last message.
    Closed,
}

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Message {
    /// Role of the message: `system`, `user`, `assistant`, `tool`, or another that the template
    /// knows.
    pub role: String,
    /// Content of the message.
    pub content: Content,
    /// What takes the place of `content` for a model that reads images, where some are among it
    /// ([`Chat::take_images`]); else empty.
    pub seen: Vec<Seen>,
    /// What the model thought before it answered. A template gets it under each of the names that
    /// it reads.
    pub reasoning_content: Option<String>,
    /// Calls that the model made.
    pub tool_calls: Vec<ToolCall>,
    /// The call that this message answers.
    pub tool_call_id: Option<String>,
    /// Name of the speaker or of the function.
    pub name: Option<String>,
    /// As [`Chat::parse_special`], for this message alone.
    pub parse_special: bool,
}

impl Message {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message {
            role: role.into(),
            content: Content::Text(content.into()),
            ..Message::default()
        }
    }
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Content {
    /// Nothing, as beside a tool call.
    #[default]
    None,
    /// A text.
    Text(String),
    /// Parts such as `{"type": "text", "text": "..."}`, whose further members a template gets, too.
    /// Texts alone are joined with a line end for templates that know no parts.
    Parts(Vec<Value>),
}

/// A call of a function.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolCall {
    /// The call's id.
    pub id: Option<String>,
    /// The function.
    pub name: String,
    /// The call's arguments: an object, or an object as JSON text.
    pub arguments: Value,
}

/// How a template gets the arguments of tool calls: most want an object, some
/// a JSON text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arguments {
    Object,
    Text,
}

/// The variables that clients cannot set through `template_kwargs`.
const RESERVED: [&str; 5] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
];

impl Chat {
    /// True if a template may have to see the arguments in another form.
    pub(super) fn has_arguments(&self) -> bool {
        self.messages.iter().any(|m| !m.tool_calls.is_empty())
    }

    /// The variables of a template. `text` sees every string that the
    /// application did not vouch for, and may change it.
    pub(super) fn variables(
        &self,
        template: &ChatTemplate,
        shape: Shape,
        arguments: Arguments,
        text: &mut dyn FnMut(Place, &mut String),
    ) -> Map<String, Value> {
        let mut skip = |_: Place, _: &mut String| {};
        let mut variables = Map::new();
        let mut messages = Vec::with_capacity(self.messages.len());
        for message in &self.messages {
            let mut value = message.value(shape, arguments);
            let trusted = self.parse_special || message.parse_special;
            for (key, field) in &mut value {
                let place = match key.as_str() {
                    "role" => Place::Role,
                    _ => Place::Text,
                };
                visit(field, place, if trusted { &mut skip } else { text });
            }
            messages.push(Value::Object(value));
        }
        let mut add = |key: &str, mut value: Value| {
            let visitor = if self.parse_special {
                &mut skip
            } else {
                &mut *text
            };
            visit(&mut value, Place::Text, visitor);
            variables.insert(key.to_owned(), value);
        };
        let list = |list: &[Value]| match list {
            [] => Value::Null,
            list => Value::Array(list.to_vec()),
        };
        add("tools", list(&self.tools));
        add("documents", Value::Null);
        for (key, value) in &self.template_kwargs {
            if !RESERVED.contains(&key.as_str()) {
                add(key, value.clone());
            }
        }
        if !self.documents.is_empty() {
            add("documents", list(&self.documents));
        }
        variables.insert("messages".to_owned(), Value::Array(messages));
        let answer = self.ending == Ending::Answer;
        variables.insert("add_generation_prompt".to_owned(), answer.into());
        variables.insert("bos_token".to_owned(), template.bos.clone().into());
        variables.insert("eos_token".to_owned(), template.eos.clone().into());
        variables
    }
}

/// Where a string stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A message's role, which templates put between parts of a name.
    Role,
    /// Anything else.
    Text,
}

/// Shows `text` every string in `value`, names of members among them.
fn visit(value: &mut Value, place: Place, text: &mut dyn FnMut(Place, &mut String)) {
    match value {
        Value::String(string) => text(place, string),
        Value::Array(list) => list.iter_mut().for_each(|item| visit(item, place, text)),
        Value::Object(map) => {
            let members = std::mem::take(map);
            for (mut key, mut member) in members {
                text(place, &mut key);
                visit(&mut member, place, text);
                map.insert(key, member);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

impl Message {
    fn value(&self, shape: Shape, arguments: Arguments) -> Map<String, Value> {
        let mut value = Map::new();
        let mut add = |key: &str, member: Value| value.insert(key.to_owned(), member);
        add("role", self.role.as_str().into());
        let reasoning = self.reasoning_content.as_deref();
        let thought = reasoning.filter(|text| shape.thinking_part && !text.is_empty());
        add("content", self.content.value(shape, thought));
        if let Some(text) = reasoning {
            for name in shape.reasoning_names(!self.tool_calls.is_empty()) {
                add(name, text.into());
            }
        }
        for (key, text) in [("tool_call_id", &self.tool_call_id), ("name", &self.name)] {
            if let Some(text) = text {
                add(key, text.as_str().into());
            }
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| call.value(arguments));
            add("tool_calls", calls.collect());
        }
        value
    }

    /// Bytes of all its texts, for the choice of who works on it.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        let content = match &self.content {
            Content::None => 0,
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts.iter().map(value_len).sum(),
        };
        let calls = self.tool_calls.iter();
        let seen = self.seen.iter().map(Seen::byte_len).sum::<usize>();
        self.role.len()
            + content
            + seen
            + self.reasoning_content.as_ref().map_or(0, String::len)
            + calls
                .map(|call| call.name.len() + value_len(&call.arguments))
                .sum::<usize>()
    }
}

/// Bytes of the strings in a value, about.
pub(super) fn value_len(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(value_len).sum(),
        Value::Object(map) => map.iter().map(|(key, v)| key.len() + value_len(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}

impl Content {
    /// The content as a template takes it, with `thought` as a part in front.
    fn value(&self, shape: Shape, thought: Option<&str>) -> Value {
        let said = match self {
            Content::None => Value::Null,
            Content::Text(text) if shape.wraps_texts => Value::Array(vec![text_part(text)]),
            Content::Text(text) => text.as_str().into(),
            Content::Parts(parts) if shape.takes_parts => Value::Array(parts.clone()),
            Content::Parts(parts) => match texts(parts) {
                Some(texts) => texts.join("\n").into(),
                None => Value::Array(parts.clone()),
            },
        };
        let Some(thought) = thought else {
            return said;
        };
        let mut parts = vec![thinking_part(thought)];
        match said {
            Value::String(text) if !text.is_empty() => parts.push(text_part(&text)),
            Value::Array(more) => parts.extend(more),
            _ => {}
        }
        Value::Array(parts)
    }
}

/// The texts of parts that are nothing else.
fn texts(parts: &[Value]) -> Option<Vec<&str>> {
    let each = parts.iter().map(|part| match part["type"].as_str() {
        Some("text") | None => part["text"].as_str(),
        Some(_) => None,
    });
    each.collect()
}

fn no_arguments(form: Arguments) -> Value {
    match form {
        Arguments::Object => Map::new().into(),
        Arguments::Text => "{}".into(),
    }
}

impl ToolCall {
    fn value(&self, form: Arguments) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), self.name.as_str().into());
        let arguments = match (&self.arguments, form) {
            // What some clients send of a call without arguments.
            (Value::Null, form) => no_arguments(form),
            (Value::String(text), form) if text.trim().is_empty() => no_arguments(form),
            (Value::String(text), Arguments::Object) => match serde_json::from_str(text) {
                Ok(Value::Object(map)) => Value::Object(map),
                _ => Value::String(text.clone()),
            },
            (Value::String(text), Arguments::Text) => Value::String(text.clone()),
            (value, Arguments::Object) => value.clone(),
            (value, Arguments::Text) => value.to_string().into(),
        };
        function.insert("arguments".to_owned(), arguments);
        let mut value = Map::new();
        if let Some(id) = &self.id {
            value.insert("id".to_owned(), id.as_str().into());
        }
        value.insert("type".to_owned(), "function".into());
        value.insert("function".to_owned(), Value::Object(function));
        Value::Object(value)
    }
}
