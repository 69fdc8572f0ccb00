//! Calls of tools in a model's text, and the descriptions of tools that it is given.
//!
//! [`forms`] tells how the families write calls. Between `<tool_call>` and `</tool_call>` stand:
//!
//! ```text
//! {"name": "f", "arguments": {"a": 1}}                                      Hermes, Qwen 2.5 and 3
//! <function=f><parameter=a>1</parameter></function>                         Qwen 3 Coder, Qwen 3.5
//! f<arg_key>a</arg_key><arg_value>1</arg_value>                             GLM 4.5 and later
//! ```
//!
//! In the last two a value is text where the tool's schema says so, and JSON where it parses as
//! such otherwise.

pub mod forms;
mod gemma;
pub mod given;
pub(crate) mod headers;
pub(crate) mod heads;
pub mod held;
mod marked;
mod python;
pub(crate) mod reading;
pub(crate) mod tagged;
pub(crate) mod texts;
mod typed;

use serde_json::{Map, Value, json};

/// What opens a call.
pub const OPEN: &str = "<tool_call>";
/// What closes a call.
pub const CLOSE: &str = "</tool_call>";
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

/// The calls that stand between [`OPEN`] and [`CLOSE`], or nothing if there are none.
pub(crate) fn parse(block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let block = block.trim();
    if block.starts_with(['{', '[']) {
        return forms::json_calls(block, tools);
    }
    match block.starts_with("<function=") {
        true => tagged::functions(block, tools),
        false => tagged::keys_and_values(block, tools),
    }
}

/// Whether a text is a JSON object, as the arguments of every call are.
pub fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Vec<Value> {
        let parameters =
            json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        vec![described("weather", None, &parameters)]
    }

    fn call(arguments: &str) -> Option<Vec<ToolCall>> {
        let (name, arguments) = ("weather".into(), arguments.into());
        Some(vec![ToolCall { name, arguments }])
    }

    #[test]
    fn three_forms_are_read() {
        let expected = call(r#"{"city":"12","days":3}"#);
        for block in [
            "\n{\"name\": \"weather\", \"arguments\": {\"city\": \"12\", \"days\": 3}}\n",
            "\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n",
            "weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
        ] {
            assert_eq!(parse(block, &tools()), expected, "{block}");
        }
        let text = r#"{"name": "weather", "arguments": "{\"city\":\"x\"}"}"#;
        assert_eq!(parse(text, &tools()), call(r#"{"city":"x"}"#));
        assert_eq!(parse("weather", &tools()), call("{}"));
    }

    #[test]
    fn what_is_no_call_is_none() {
        for block in [
            "",
            "{\"name\": ",
            "{}",
            "not a call",
            "<function=weather",
            "other",
            "{\"name\": \"\", \"arguments\": {}}",
        ] {
            assert_eq!(parse(block, &tools()), None, "{block}");
        }
    }

    #[test]
    fn arguments_are_an_object() {
        let block = |said: &str| format!("{{\"name\": \"weather\", \"arguments\": {said}}}");
        for none in ["5", "[1]", "true", "\"hello\"", "\"[1]\"", "\"5\""] {
            assert_eq!(parse(&block(none), &tools()), None, "{none}");
        }
        for empty in ["{}", "null", "\"{}\"", "\"\""] {
            assert_eq!(parse(&block(empty), &tools()), call("{}"), "{empty}");
        }
    }

    #[test]
    fn several_objects_of_one_block_are_a_call_each() {
        let one = "{\"name\": \"weather\", \"arguments\": {}}";
        let expected = call("{}").map(|call| [call.clone(), call].concat());
        for block in [format!("{one}\n{one}"), format!("[{one}, {one}]")] {
            assert_eq!(parse(&block, &tools()), expected, "{block}");
        }
    }
}
