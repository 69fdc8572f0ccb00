//! Tools of Anthropic's requests: the client's own, Anthropic's tools that a client runs, and tools
//! that Anthropic's servers run.
//!
//! The last are removed, and the model is told so: Claude Code offers them with some requests, and
//! a rejected request would end the session.

use rocmforge_chat::tool_calls::{self, Tools};
use rocmforge_chat::tools;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::{Content, Message};
use serde_json::{Value, json};

use super::super::prompt::take;

/// Maximum number of tools that the system prompt lists as not available.
const MISSING_MAX: usize = 32;
/// Maximum length of a missing tool's name that the model is told, in characters.
const NAME_MAX_CHARS: usize = 64;

/// The tools in OpenAI's format, and the names of those that are not available.
pub(super) fn read(
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
) -> Result<(Tools, Vec<String>), Failure> {
    let single = choice.is_some_and(|choice| choice["disable_parallel_tool_use"] == true);
    let (mut described, mut missing) = (Vec::new(), Vec::new());
    for (at, mut tool) in tools.unwrap_or_default().into_iter().enumerate() {
        let kind = tool["type"].as_str().unwrap_or("custom").to_owned();
        let own = (kind != "custom").then(|| schema_of(&kind)).flatten();
        if kind != "custom" && own.is_none() && !tool["input_schema"].is_object() {
            let name = [&tool["name"], &tool["mcp_server_name"]];
            let name = name.into_iter().find_map(Value::as_str).unwrap_or(&kind);
            tracing::debug!(kind, "a tool that is not available here is left out");
            missing.push(name.to_owned());
            continue;
        }
        let Some(name) = tool["name"].as_str().map(str::to_owned) else {
            return Err(failure::invalid(
                &format!("tools[{at}].name"),
                "missing; give the tool's name",
            ));
        };
        let (about, schema) = match own {
            Some((about, schema)) => (Some(about.to_owned()), schema),
            None => (
                tool["description"].as_str().map(str::to_owned),
                take(&mut tool, "input_schema"),
            ),
        };
        let mut function = tool_calls::described(&name, about.as_deref(), &schema);
        tool_calls::keep_strict(&tool, &mut function);
        described.push(function);
    }
    let choice = chosen(choice, &described, &missing);
    let tools = tools::checked(Some(described), choice.as_ref(), single.then_some(false))?;
    Ok((tools, missing))
}

/// The tool choice in OpenAI's format; `None` if it names a tool that is not available.
fn chosen(choice: Option<&Value>, described: &[Value], missing: &[String]) -> Option<Value> {
    let choice = choice?;
    let named = |name: &str| missing.iter().any(|missing| missing == name);
    match choice["type"].as_str()? {
        kind @ ("auto" | "none") => Some(kind.into()),
        "tool" if choice["name"].as_str().is_some_and(named) => None,
        _ if described.is_empty() && !missing.is_empty() => None,
        _ => Some(choice.clone()),
    }
}

/// Name and parameters of Anthropic's tools that a client runs: requests only give their type.
fn schema_of(kind: &str) -> Option<(&'static str, Value)> {
    let name = kind.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
    let text = json!({"type": "string"});
    let number = json!({"type": "integer"});
    Some(match name {
        "bash" => (
            "Runs a command in a shell that stays open between calls.",
            json!({"type": "object", "properties": {
                "command": text,
                "restart": {"type": "boolean", "description": "Restarts the shell."},
            }}),
        ),
        "text_editor" => (
            "Views and edits files: view, create, str_replace, insert.",
            json!({"type": "object", "required": ["command", "path"], "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": text, "file_text": text, "old_str": text, "new_str": text,
                "insert_line": number, "insert_text": text,
                "view_range": {"type": "array", "items": number},
            }}),
        ),
        "memory" => (
            "Keeps notes in files below /memories.",
            json!({"type": "object", "required": ["command"], "properties": {
                "command": {"type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
                "path": text, "file_text": text, "old_str": text, "new_str": text,
                "insert_line": number, "insert_text": text, "old_path": text, "new_path": text,
            }}),
        ),
        _ => return None,
    })
}

/// The names of MCP servers in a request, which are not available.
pub(super) fn servers(servers: Option<&[Value]>) -> impl Iterator<Item = String> + use<> {
    let servers = servers.unwrap_or_default().iter();
    let names = servers.map(|server| server["name"].as_str().unwrap_or("an MCP server"));
    let names: Vec<_> = names.map(str::to_owned).collect();
    names.into_iter()
}

/// Appends to the system prompt which tools are not available.
pub(super) fn tell_missing(missing: &[String], messages: &mut Vec<Message>) {
    if missing.is_empty() {
        return;
    }
    let names = missing.iter().take(MISSING_MAX);
    let names = names.map(|name| name.chars().take(NAME_MAX_CHARS).collect::<String>());
    let note = format!(
        "Not available here, and not to be called: {}. Answer without them.",
        names.collect::<Vec<_>>().join(", ")
    );
    match messages.first_mut() {
        Some(Message {
            role,
            content: Content::Text(text),
            ..
        }) if role == "system" => *text = format!("{text}\n\n{note}"),
        _ => messages.insert(0, Message::new("system", note)),
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_chat::tool_calls::Forced;

    use super::*;

    #[test]
    fn tools_of_other_machines_are_left_out_and_told() {
        let search = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8});
        let own = json!({"name": "f", "input_schema": {"type": "object"}});
        let forced = json!({"type": "tool", "name": "web_search"});
        for choice in [None, Some(&forced), Some(&json!({"type": "any"}))] {
            let (tools, missing) = read(Some(vec![search.clone()]), choice).unwrap();
            assert!(tools.described.is_empty() && tools.forced.is_none());
            assert_eq!(missing, ["web_search"]);
        }
        let any = json!({"type": "any"});
        let (tools, _) = read(Some(vec![search, own]), Some(&any)).unwrap();
        assert_eq!(
            (tools.described.len(), tools.forced),
            (1, Some(Forced::Any))
        );
        let mcp = json!({"type": "mcp_toolset", "mcp_server_name": "s"});
        assert_eq!(read(Some(vec![mcp]), None).unwrap().1, ["s"]);

        let mut messages = vec![
            Message::new("system", "Be brief."),
            Message::new("user", "hi"),
        ];
        tell_missing(&["web_search".to_owned()], &mut messages);
        let Content::Text(system) = &messages[0].content else {
            panic!("{messages:?}");
        };
        assert!(system.starts_with("Be brief.\n\n") && system.contains("web_search"));
        let mut messages = vec![Message::new("user", "hi")];
        tell_missing(&["w".to_owned()], &mut messages);
        assert_eq!((messages.len(), &*messages[0].role), (2, "system"));
        tell_missing(&[], &mut messages);
        assert_eq!(messages.len(), 2);
    }

    #[test]
    fn tools_that_a_client_runs_itself_are_described() {
        for (kind, name, property) in [
            ("bash_20250124", "bash", "command"),
            (
                "text_editor_20250728",
                "str_replace_based_edit_tool",
                "old_str",
            ),
            ("memory_20250818", "memory", "path"),
        ] {
            let tool = json!({"type": kind, "name": name});
            let (tools, missing) = read(Some(vec![tool]), None).unwrap();
            assert!(missing.is_empty());
            let function = &tools.described[0]["function"];
            assert_eq!(function["name"], name);
            assert!(function["parameters"]["properties"][property].is_object());
        }
    }

    #[test]
    fn a_tool_without_a_name_is_refused_by_its_field() {
        let failure = read(Some(vec![json!({"input_schema": {}})]), None).unwrap_err();
        assert_eq!(failure.fields()[0].0, "tools[0].name");
    }
}
