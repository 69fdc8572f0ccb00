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

/// A tool call that the model made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the called tool.
    pub name: String,
    /// The arguments: a JSON object as text.
    pub arguments: String,
}

impl ToolCall {
    /// The call as plain text, for clients that accept only calls with an object of arguments.
    pub fn as_text(&self) -> String {
        let Self { name, arguments } = self;
        // What is cut stays cut.
        let end = if arguments.ends_with('}') { "}" } else { "" };
        let name = Value::from(&**name);
        format!("{{\"name\": {name}, \"arguments\": {arguments}{end}")
    }
}

/// A request's tools, in OpenAI's format.
#[derive(Debug, Clone, Default)]
pub struct Tools {
    /// Description of each tool: `{"type": "function", "function": {...}}`.
    pub described: Vec<Value>,
    /// Whether only the first call of an output counts (`parallel_tool_calls` is false).
    pub single: bool,
    /// The call that the output has to be, if one is forced.
    pub forced: Option<Forced>,
}

/// Which tool the output has to call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forced {
    /// Any of the request's tools.
    Any,
    /// The tool with this name.
    Named(String),
}

/// A tool in OpenAI's format, made of its parts.
pub fn described(name: &str, description: Option<&str>, parameters: &Value) -> Value {
    json!({"type": "function", "function": {
        "name": name,
        "description": description.unwrap_or_default(),
        "parameters": parameters,
    }})
}

/// Copies `strict` from the request's tool to the description for the model.
pub fn keep_strict(said: &Value, tool: &mut Value) {
    if said["strict"] == true {
        tool["function"]["strict"] = true.into();
    }
}

/// Whether a text is a JSON object, as the arguments of every call are.
pub fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}
