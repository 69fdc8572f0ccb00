//! Parses calls whose parameters are in separate tags.
//!
//! ```text
//! <function=f><parameter=a>1</parameter></function>
//! <invoke name="f"><parameter name="a">1</parameter></invoke>
//! f<arg_key>a</arg_key><arg_value>1</arg_value>
//! ```
//!
//! A value ends at its closing tag. If that is missing, it ends where the next parameter or the end
//! of the call can be distinguished from text. Of two values of one name the first counts.

pub(crate) mod coming;

use serde_json::{Map, Value};

use super::ToolCall;
use super::typed::Parameters;

/// The tags of a notation.
#[derive(Debug)]
struct Tags {
    /// Text before a parameter's name.
    open: String,
    /// Text after the name.
    named: String,
    /// Text before the value, if it has its own tag.
    value: String,
    /// Text after the value.
    close: String,
    /// Text before a call's name; empty if each call has its own block.
    call: String,
    /// Text after a call's parameters; empty if there is none.
    call_close: String,
    /// Text after all calls that some models write; else empty.
    all: String,
    /// Whether names are in quotation marks and may be followed by attributes.
    quoted: bool,
}

/// Parses `<function=f>...</function>`, one or several.
pub(super) fn functions(block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    Tags::functions().calls(block, tools)
}

/// Parses `<invoke name="f">...</invoke>`, one or several, with a prefix in each tag. A value is
/// text if its tag says so.
pub(crate) fn invokes(block: &str, prefix: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let tags = Tags::invokes(prefix);
    let block = block.trim_end();
    tags.calls(block.strip_suffix(&*tags.all).unwrap_or(block), tools)
}

/// Parses a name followed by keys and values in tags.
pub(super) fn keys_and_values(block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let tags = Tags::keys_and_values();
    let end = block.find(&tags.open).unwrap_or(block.len());
    let (name, body) = block.split_at(end);
    let name = name.trim();
    let (arguments, _) = tags.arguments(body, Parameters::of(name, tools)?, tools);
    Some(vec![called(name, arguments)])
}

/// Whether a parameter's tag says that its value is text.
fn says_text(attributes: &str) -> bool {
    attributes.contains("string=\"true\"")
}

/// The value of a parameter, from its text.
fn value_of(parameters: Parameters, key: &str, is_text: bool, text: &str) -> Value {
    match is_text {
        true => text.into(),
        false => parameters.value(key, text),
    }
}

fn called(name: &str, arguments: Map<String, Value>) -> ToolCall {
    ToolCall {
        name: name.to_owned(),
        arguments: Value::Object(arguments).to_string(),
    }
}

impl Tags {
    /// The tags of [`functions`].
    fn functions() -> Self {
        Self {
            open: "<parameter=".to_owned(),
            named: ">".to_owned(),
            value: String::new(),
            close: "</parameter>".to_owned(),
            call: "<function=".to_owned(),
            call_close: "</function>".to_owned(),
            all: String::new(),
            quoted: false,
        }
    }

    /// The tags of [`invokes`].
    fn invokes(prefix: &str) -> Self {
        Self {
            open: format!("<{prefix}parameter name=\""),
            named: "\"".to_owned(),
            value: String::new(),
            close: format!("</{prefix}parameter>"),
            call: format!("<{prefix}invoke name=\""),
            call_close: format!("</{prefix}invoke>"),
            all: format!("</{prefix}function_calls>"),
            quoted: true,
        }
    }

    /// The tags of [`keys_and_values`].
    fn keys_and_values() -> Self {
        Self {
            open: "<arg_key>".to_owned(),
            named: "</arg_key>".to_owned(),
            value: "<arg_value>".to_owned(),
            close: "</arg_value>".to_owned(),
            call: String::new(),
            call_close: String::new(),
            all: String::new(),
            quoted: false,
        }
    }

    /// Parses all calls of a block. If tags alone would make a call, calls without a known tool's
    /// name are dropped.
    fn calls(&self, block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        let mut rest = block;
        while let Some((_, behind)) = rest.split_once(&*self.call) {
            let Some((name, _, body)) = self.head(behind) else {
                break;
            };
            let parameters = match Parameters::of(name, tools) {
                None if self.quoted => Parameters::unknown(),
                None => {
                    rest = body;
                    continue;
                }
                Some(parameters) => parameters,
            };
            let (arguments, behind) = self.arguments(body, parameters, tools);
            calls.push(called(name, arguments));
            rest = behind;
        }
        (!calls.is_empty()).then_some(calls)
    }

    /// The name in a tag, the tag's attributes, and the text after the tag.
    fn head<'t>(&self, text: &'t str) -> Option<(&'t str, &'t str, &'t str)> {
        let (name, behind) = text.split_once(&*self.named)?;
        let (attributes, behind) = match self.quoted {
            true => behind.split_once('>')?,
            false => ("", behind),
        };
        Some((name.trim(), attributes, behind))
    }

    /// Parses the parameters of a call at the beginning of `text`; returns them and the text after
    /// the call.
    fn arguments<'t>(
        &self,
        text: &'t str,
        parameters: Parameters,
        tools: &[Value],
    ) -> (Map<String, Value>, &'t str) {
        let mut arguments = Map::new();
        let mut rest = text;
        loop {
            let next = |tag: &str| rest.find(tag).filter(|_| !tag.is_empty());
            let found = [&self.open, &self.call_close, &self.call].map(|tag| next(tag));
            let Some(first) = found.into_iter().flatten().min() else {
                return (arguments, "");
            };
            if found[0] != Some(first) {
                return (arguments, &rest[first..]);
            }
            let Some((key, attributes, behind)) = self.head(&rest[first + self.open.len()..])
            else {
                return (arguments, "");
            };
            let behind = match behind.trim_start().strip_prefix(&*self.value) {
                Some(value) if !self.value.is_empty() => value,
                _ => behind,
            };
            let is_new = |key: &str| parameters.has(key) && !arguments.contains_key(key);
            let (text, behind) = self.value(behind, tools, |next| next != key && is_new(next));
            let value = value_of(parameters, key, says_text(attributes), text);
            // The first of a name counts, which may have been told before.
            arguments.entry(key).or_insert(value);
            rest = behind;
        }
    }

    /// Finds the value at the beginning of `text`; returns it and the rest.
    fn value<'t>(
        &self,
        text: &'t str,
        tools: &[Value],
        is_parameter: impl Fn(&str) -> bool,
    ) -> (&'t str, &'t str) {
        let close = text.find(&self.close);
        let until = &text[..close.unwrap_or(text.len())];
        let on_lines = text.starts_with('\n');
        let missing = until.match_indices('<').map(|(at, _)| at).find(|&at| {
            let before = until[..at].trim_end_matches([' ', '\t']);
            let begins = !on_lines || before.ends_with('\n');
            begins && self.begins_parameter(&text[at..], &is_parameter)
                || self.ends_call(&text[at..], tools)
        });
        let (value, behind) = match (missing, close) {
            (Some(at), _) => text.split_at(at),
            (None, Some(at)) => (until, &text[at + self.close.len()..]),
            (None, None) => (text, ""),
        };
        // The templates put each on lines of its own.
        let value = value.strip_prefix('\n').unwrap_or(value);
        (value.strip_suffix('\n').unwrap_or(value), behind)
    }

    /// Whether the tag of another parameter begins here that is not given elsewhere: a tag of one
    /// that is given later is only text.
    fn begins_parameter(&self, text: &str, is_parameter: impl Fn(&str) -> bool) -> bool {
        let Some(behind) = text.strip_prefix(&*self.open) else {
            return false;
        };
        let Some((key, _)) = behind.split_once(&*self.named) else {
            return false;
        };
        let tag = &text[..self.open.len() + key.len() + self.named.len()];
        let end = behind.find(&self.call_close).filter(|&at| at > 0);
        is_parameter(key.trim()) && !behind[..end.unwrap_or(behind.len())].contains(tag)
    }

    /// Whether the call ends here: the end or another call follows, not a parameter.
    fn ends_call(&self, text: &str, tools: &[Value]) -> bool {
        let behind = text.strip_prefix(&*self.call_close);
        let Some(behind) = behind.filter(|_| !self.call_close.is_empty()) else {
            return false;
        };
        let next = behind.trim_start();
        let name = next.strip_prefix(&*self.call);
        let name = name.and_then(|next| Some(next.split_once(&*self.named)?.0));
        next.is_empty() || name.is_some_and(|name| Parameters::of(name.trim(), tools).is_some())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::described;
    use super::*;

    fn tools() -> Vec<Value> {
        let text = json!({"type": "string"});
        let f = json!({"properties": {"a": text, "b": {"type": "integer"}, "c": text}});
        let g = json!({"properties": {"path": text}});
        vec![described("f", None, &f), described("g", None, &g)]
    }

    fn call(name: &str, arguments: &Value) -> ToolCall {
        ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_string(),
        }
    }

    /// What every form reads from the same calls, written with these tags.
    fn read(text: &str) -> [Option<Vec<ToolCall>>; 2] {
        let quoted = text
            .replace("<function=f>", "<x:invoke name=\"f\">")
            .replace("<function=g>", "<x:invoke name=\"g\">")
            .replace("</function>", "</x:invoke>")
            .replace("</parameter>", "</x:parameter>");
        let quoted = ["a", "b", "c", "path"].iter().fold(quoted, |text, key| {
            let tag = format!("<x:parameter name=\"{key}\">");
            text.replace(&format!("<parameter={key}>"), &tag)
        });
        [functions(text, &tools()), invokes(&quoted, "x:", &tools())]
    }

    #[test]
    fn a_missing_closing_tag_swallows_nothing() {
        let both = Some(vec![call("f", &json!({"a": "x", "b": 1}))]);
        for text in [
            "<function=f>\n<parameter=a>\nx\n<parameter=b>\n1\n</parameter>\n</function>",
            "<function=f><parameter=a>x<parameter=b>1</parameter></function>",
            "<function=f>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n</function>\n",
            "<function=f>\n<parameter=a>\nx\n<parameter=b>\n1\n</function>",
        ] {
            let arguments = |calls: Option<Vec<ToolCall>>| {
                let calls = calls.unwrap();
                assert_eq!(calls.len(), 1, "{text}");
                serde_json::from_str::<Value>(&calls[0].arguments).unwrap()
            };
            for calls in read(text) {
                assert_eq!(arguments(calls), arguments(both.clone()), "{text}");
            }
        }
        let glm =
            "f\n<arg_key>a</arg_key>\n<arg_value>x\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>";
        assert_eq!(keys_and_values(glm, &tools()), both);
    }

    #[test]
    fn tags_in_a_value_that_is_closed_are_text() {
        for value in [
            "see <parameter=b> and\n</function>\nthen",
            "see\n<parameter=b>\nhere",
            "see\n<parameter=other>\n<function=f>\nhere",
        ] {
            let text = format!(
                "<function=f>\n<parameter=a>\n{value}\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>"
            );
            let expected = Some(vec![call("f", &json!({"a": value, "b": 1}))]);
            assert_eq!(functions(&text, &tools()), expected, "{value}");
        }
        let glm = "f\n<arg_key>a</arg_key>\n<arg_value>x\n<arg_value>y</arg_value>";
        let expected = Some(vec![call("f", &json!({"a": "x\n<arg_value>y"}))]);
        assert_eq!(keys_and_values(glm, &tools()), expected);
    }

    #[test]
    fn several_calls_of_one_block_are_told_apart() {
        let expected = Some(vec![
            call("f", &json!({"a": "x"})),
            call("g", &json!({"path": "y"})),
        ]);
        for text in [
            "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n\
             <function=g>\n<parameter=path>\ny\n</parameter>\n</function>",
            "<function=f>\n<parameter=a>\nx\n</function>\n\
             <function=g>\n<parameter=path>\ny\n</parameter>\n</function>",
            "<function=f>\n<parameter=a>\nx\n</parameter>\n\
             <function=g>\n<parameter=path>\ny\n</function>\n",
        ] {
            for calls in read(text) {
                assert_eq!(calls, expected, "{text}");
            }
        }
        // What names no tool loses none of the others.
        let text = "<function=f></function>\n<function=other></function>";
        assert_eq!(functions(text, &tools()), Some(vec![call("f", &json!({}))]));
    }
}
