//! Calls of tools in a model's text, and the descriptions of tools that it is given.
//!
//! [`forms`] tells how the families write calls.

pub mod forms;
mod gemma;
pub mod given;
pub(crate) mod headers;
pub(crate) mod heads;
pub mod held;
mod hermes;
pub(crate) mod json;
pub(crate) mod known;
mod marked;
pub(crate) mod pieces;
mod python;
pub(crate) mod reading;
pub(crate) mod tagged;
pub(crate) mod texts;
mod typed;

use serde_json::{Map, Value, json};

/// A call that the model made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// An object, as JSON text.
    pub arguments: String,
}

impl ToolCall {
    /// The call as a text, for whoever is told of calls only with an object of arguments.
    pub fn as_text(&self) -> String {
        let Self { name, arguments } = self;
        // What is cut stays cut.
        let end = if arguments.ends_with('}') { "}" } else { "" };
        let name = Value::from(&**name);
        format!("{{\"name\": {name}, \"arguments\": {arguments}{end}")
    }
}

/// What a request says of tools, in OpenAI's shape.
#[derive(Debug, Clone, Default)]
pub struct Tools {
    /// `{"type": "function", "function": {...}}` each.
    pub described: Vec<Value>,
    /// Only the first call of an answer counts.
    pub single: bool,
    /// The answer is a call: of any of them, or of the one with this name.
    pub forced: Option<Forced>,
}

/// Which tool has to be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forced {
    /// Whichever.
    Any,
    /// The one of this name.
    Named(String),
}

/// A tool in OpenAI's shape, from its parts.
pub fn described(name: &str, description: Option<&str>, parameters: &Value) -> Value {
    json!({"type": "function", "function": {
        "name": name,
        "description": description.unwrap_or_default(),
        "parameters": parameters,
    }})
}

/// Tells the model's side of a tool what the request's says of `strict`.
pub fn keep_strict(said: &Value, tool: &mut Value) {
    if said["strict"] == true {
        tool["function"]["strict"] = true.into();
    }
}

/// Whether a text is a JSON object, as the arguments of every call are.
pub fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}
