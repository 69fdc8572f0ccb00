//! Parses calls between `<tool_call>` and `</tool_call>`, in one of these notations:
//!
//! ```text
//! {"name": "f", "arguments": {"a": 1}}                                      Hermes, Qwen 2.5 and 3
//! <function=f><parameter=a>1</parameter></function>                         Qwen 3 Coder, Qwen 3.5
//! f<arg_key>a</arg_key><arg_value>1</arg_value>                             GLM 4.5 and later
//! ```
//!
//! In the last two a value is text if the tool's schema says so; otherwise JSON if it parses as
//! such.

use serde_json::Value;

use super::json::json_calls;
use super::{ToolCall, tagged};

/// Mark that opens a call.
pub(crate) const OPEN: &str = "<tool_call>";
/// Mark that closes a call.
pub(crate) const CLOSE: &str = "</tool_call>";

/// Parses the calls between [`OPEN`] and [`CLOSE`]; `None` if there are none.
pub(crate) fn parse(block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let block = block.trim();
    if block.starts_with(['{', '[']) {
        return json_calls(block, tools);
    }
    match block.starts_with("<function=") {
        true => tagged::functions(block, tools),
        false => tagged::keys_and_values(block, tools),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tool_calls::described;

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
