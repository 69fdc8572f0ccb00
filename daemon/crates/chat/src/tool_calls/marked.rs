//! Parses calls of a name and a JSON object with marks around each: Mistral, Kimi K2 and DeepSeek.
//!
//! JSON determines its own end, so that marks and fences in its strings are text. An invalid call
//! beside others is dropped.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::json::json_call;
use super::{ToolCall, is_object, texts};

/// Mark before a call of Kimi K2.
pub(super) const KIMI: &str = "<|tool_call_begin|>";
/// Mark between the name and the arguments in a call of Kimi K2.
pub(super) const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
/// Mark before a call of DeepSeek.
pub(super) const DEEPSEEK: &str = "<｜tool▁call▁begin｜>";
/// Mark before the name or the arguments in a call of DeepSeek.
pub(super) const DEEPSEEK_NAME: &str = "<｜tool▁sep｜>";
/// Mark before a call of Mistral, or a list of calls.
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";

/// The JSON object at the beginning of `text`, with control characters escaped, and the rest.
fn object(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let text = text.trim_start();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Map<String, Value>>();
    if let Some(Ok(_)) = values.next() {
        let (object, behind) = text.split_at(values.byte_offset());
        return Some((object.into(), behind));
    }
    let (object, behind) = text.split_at(texts::end(text)?);
    let object = texts::escaped(object);
    is_object(&object).then_some((object, behind))
}

fn called(name: &str, arguments: &str) -> Option<ToolCall> {
    let name = name.trim();
    (!name.is_empty()).then(|| ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

/// Parses the call after each `mark`. `read` returns the call at the beginning of a text, and the
/// rest.
fn each(
    text: &str,
    mark: &str,
    read: impl Fn(&str) -> Option<(ToolCall, &str)>,
) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((_, behind)) = rest.split_once(mark) {
        rest = behind;
        if let Some((call, behind)) = read(behind) {
            calls.push(call);
            rest = behind;
        }
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses Mistral's calls: a list; or `f[ARGS]{...}` or `f{...}`, each after its own mark,
/// optionally with an id.
pub(super) fn mistral(block: &str, _: &[Value]) -> Option<Vec<ToolCall>> {
    const MARK: &str = MISTRAL;
    let block = block.trim();
    if block.starts_with(MARK) || !block.starts_with(['[', '{']) {
        return each(&format!("{MARK}{block}"), MARK, mistral_call);
    }
    let mut calls = Vec::new();
    let block = texts::escaped(block);
    let mut rest = &*block;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                for one in &list {
                    calls.push(json_call(one)?);
                }
            }
            one => calls.push(json_call(&one)?),
        }
        rest = rest[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix(MARK).unwrap_or(rest).trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses one of Mistral's calls: a name, texts in brackets, and JSON.
fn mistral_call(text: &str) -> Option<(ToolCall, &str)> {
    let text = text.trim_start();
    let (name, rest) = text.split_at(text.find(ends_name)?);
    let (between, arguments) = rest.split_at(rest.find('{')?);
    let (arguments, behind) = object(arguments)?;
    let between = between.trim();
    let is_call = between.is_empty() || between.starts_with('[') && !between.contains(MISTRAL);
    Some((called(name, &arguments).filter(|_| is_call)?, behind))
}

/// Whether a name in Mistral's calls ends before this character.
pub(super) fn ends_name(c: char) -> bool {
    c.is_whitespace() || "[{".contains(c)
}

/// Parses Kimi K2's calls: `functions.f:0`, a mark and JSON, each between marks.
pub(super) fn kimi(block: &str, _: &[Value]) -> Option<Vec<ToolCall>> {
    each(block, KIMI, |text| {
        let (name, arguments) = text.split_once(KIMI_ARGUMENTS)?;
        let (arguments, behind) = object(arguments)?;
        let name = kimi_name(name);
        let call = called(name, &arguments).filter(|_| !name.contains(KIMI));
        Some((call?, behind))
    })
}

/// The tool's name in `functions.f:0`.
pub(super) fn kimi_name(written: &str) -> &str {
    let name = written.trim().trim_start_matches("functions.");
    name.rsplit_once(':').map_or(name, |(name, _)| name).trim()
}

/// Parses DeepSeek's calls: `function`, a mark, a name and JSON in a fence (V3, R1); or a name, a
/// mark and JSON (V3.1).
pub(super) fn deepseek(block: &str, _: &[Value]) -> Option<Vec<ToolCall>> {
    each(block, DEEPSEEK, |text| {
        let (before, behind) = text.split_once(DEEPSEEK_NAME)?;
        let behind = behind.trim_start();
        // A tool of V3.1 may have this name, too.
        let (name, arguments) = match before.trim() == "function" && !behind.starts_with('{') {
            true => behind.split_at(behind.find(['\n', '`'])?),
            false => (before, behind),
        };
        let arguments = arguments.trim_start();
        let fences = ["```json", "```"];
        let fenced = fences
            .iter()
            .find_map(|fence| arguments.strip_prefix(fence));
        let (arguments, behind) = object(fenced.unwrap_or(arguments))?;
        let call = called(name, &arguments).filter(|_| !name.contains(DEEPSEEK));
        Some((call?, behind))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        }
    }

    fn v3_1(arguments: &str) -> String {
        format!("<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    }

    fn r1(arguments: &str) -> String {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        )
    }

    #[test]
    fn fences_and_marks_in_arguments_are_text() {
        for content in [
            "```json {} ```",
            "# x\n```json\n{\"a\": 1}\n```\nend",
            "see ```x``` ok",
            "a <｜tool▁call▁end｜> b <｜tool▁call▁begin｜>c",
        ] {
            let arguments = json!({"path": "R", "content": content}).to_string();
            let expected = call("write_file", &arguments);
            for text in [v3_1(&arguments), r1(&arguments)] {
                assert_eq!(deepseek(&text, &[]), Some(vec![expected.clone()]), "{text}");
                let two = format!("{text}\n{text}");
                let twice = Some(vec![expected.clone(), expected.clone()]);
                assert_eq!(deepseek(&two, &[]), twice);
            }
        }
        // A tool whose name is the word that V3 has there.
        let text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>";
        let expected = Some(vec![call("function", "{\"a\": 1}")]);
        assert_eq!(deepseek(text, &[]), expected);
    }

    #[test]
    fn marks_and_space_of_mistral_lose_no_call() {
        let said = "{\"a\":\"say [TOOL_CALLS] now\"}";
        for (text, names) in [
            (format!(" f[ARGS]{said}"), "f"),
            (format!("\nf{said}[TOOL_CALLS]\n g [ARGS] {said}"), "fg"),
            (format!("f[CALL_ID]123456789[ARGS]{said}[TOOL_CALLS]"), "f"),
            (format!("f[ARGS]{{\"a\": [TOOL_CALLS]g[ARGS]{said}"), "g"),
            (format!("[TOOL_CALLS]f{said}"), "f"),
        ] {
            let names = names.chars().map(String::from);
            let expected: Vec<_> = names.map(|name| call(&name, said)).collect();
            assert_eq!(mistral(&text, &[]), Some(expected), "{text}");
        }
        let list = format!("[{{\"name\": \"f\", \"arguments\": {said}}}]");
        let one = mistral(&list, &[]).unwrap();
        assert_eq!((one.len(), &*one[0].name), (1, "f"));
        let two = mistral(&format!("{list}[TOOL_CALLS]{list}"), &[]).unwrap();
        assert_eq!(two, [one.clone(), one].concat());
        for none in [
            "is a mark {}",
            "f[ARGS]",
            "f[ARGS][1]",
            "[ARGS]{}",
            "{}",
            "",
        ] {
            assert_eq!(mistral(none, &[]), None, "{none}");
        }
    }

    #[test]
    fn one_bad_call_loses_no_others() {
        let kimi_call = |arguments: &str| {
            format!(
                "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            )
        };
        let good = call("f", "{\"a\": \"<|tool_call_end|>\"}");
        for bad in ["{\"a\":", "5", "[1]", "hello", "\"{}\""] {
            assert_eq!(kimi(&kimi_call(bad), &[]), None, "{bad}");
            assert_eq!(deepseek(&v3_1(bad), &[]), None, "{bad}");
            let text = [&good.arguments, bad, &good.arguments].map(kimi_call);
            let expected = Some(vec![good.clone(), good.clone()]);
            assert_eq!(kimi(&text.concat(), &[]), expected, "{bad}");
        }
        let cut = "<|tool_call_begin|>functions.g:0";
        let text = format!("{cut}{}{cut}", kimi_call(&good.arguments));
        assert_eq!(kimi(&text, &[]), Some(vec![good]));
    }
}
