//! Parses calls that are JSON objects.

use serde_json::Value;

use super::{ToolCall, is_object, texts};

/// Parses a call from a JSON object: `name` or `tool_name`, and `arguments` or `parameters`, an
/// object or its text.
pub(super) fn json_call(value: &Value) -> Option<ToolCall> {
    let value = match value.get("function") {
        Some(function) if function.is_object() => function,
        _ => value,
    };
    let arguments = ["arguments", "parameters"]
        .into_iter()
        .find_map(|key| value.get(key));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_owned(),
        Some(Value::String(text)) => texts::escaped(text).into_owned(),
        Some(object) => object.to_string(),
    };
    if !is_object(&arguments) {
        return None;
    }
    let name = ["name", "tool_name"]
        .into_iter()
        .find_map(|key| value[key].as_str())?;
    (!name.is_empty()).then(|| ToolCall {
        name: name.to_owned(),
        arguments,
    })
}

/// Parses calls from a JSON object, a list of them, or several one after the other.
pub(crate) fn json_calls(block: &str, _: &[Value]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let block = texts::escaped(block.trim());
    for value in serde_json::Deserializer::from_str(&block).into_iter::<Value>() {
        match value.ok()? {
            Value::Array(list) => {
                for one in &list {
                    calls.push(json_call(one)?);
                }
            }
            one => calls.push(json_call(&one)?),
        }
    }
    (!calls.is_empty()).then_some(calls)
}
