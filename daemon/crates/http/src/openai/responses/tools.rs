//! The tools of a request to `/v1/responses`, and its calls in that dialect's items.
//!
//! A tool of a namespace, as agents offer those of each MCP server, is a function
//! `NAMESPACE__NAME` for the model; its call names both apart, as it was offered.

use std::collections::{BTreeMap, BTreeSet};

use rocmforge_chat::tool_calls::{self, Tools};
use rocmforge_chat::tools;
use rocmforge_failure::{self as failure, Failure};
use serde_json::{Value, json};

use super::super::super::prompt::take;

/// Beginnings of the types of tools that only OpenAI's servers have; a date may follow. They are
/// dropped, since agents offer them with every request and work without.
const LEFT_OUT: [&str; 11] = [
    "local_shell",
    "shell",
    "apply_patch",
    "web_search",
    "image_generation",
    "file_search",
    "code_interpreter",
    "computer",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
];

/// Maps function names that the model knows to the request's names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Names {
    /// The namespace and the name of each function that has one.
    spaces: BTreeMap<String, (String, String)>,
    /// Custom tools, which take text instead of an object.
    custom: BTreeSet<String>,
}

impl Names {
    /// Names for the tools that a request offers.
    pub(super) fn of(tools: &[Value]) -> Self {
        let custom = tools.iter().filter(|tool| tool["type"] == "custom");
        let custom = custom.filter_map(|tool| tool["name"].as_str().map(str::to_owned));
        let spaces = tools.iter().filter(|tool| tool["type"] == "namespace");
        let names = spaces.flat_map(|space| {
            let members = space["tools"].as_array().into_iter().flatten();
            members.filter_map(|tool| {
                let names = (space["name"].as_str()?, tool["name"].as_str()?);
                let (space, name) = names;
                Some((flat(space, name), (space.to_owned(), name.to_owned())))
            })
        });
        Self {
            spaces: names.collect(),
            custom: custom.collect(),
        }
    }

    /// Whether the function is a custom tool, which takes text.
    pub(super) fn is_custom(&self, called: &str) -> bool {
        self.custom.contains(called)
    }

    /// Writes the request's names of a call into its item.
    pub(super) fn put(&self, called: &str, item: &mut Value) {
        match self.spaces.get(called) {
            Some((space, name)) => {
                item["namespace"] = space.as_str().into();
                item["name"] = name.as_str().into();
            }
            None => item["name"] = called.into(),
        }
    }
}

/// The name under which the model knows a function of a namespace.
pub(super) fn flat(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The tools as functions, in the format of chat completions.
pub(super) fn functions(
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<Tools, Failure> {
    let (mut described, mut leaves_out) = (Vec::new(), false);
    for (at, mut tool) in tools.unwrap_or_default().into_iter().enumerate() {
        let field = format!("tools[{at}]");
        match tool["type"].as_str() {
            Some("function") => described.push(function(tool, None, &field)?),
            Some("namespace") => {
                let Some(space) = tool["name"].as_str().map(str::to_owned) else {
                    let message = "missing; give the namespace's name";
                    return Err(failure::invalid(&format!("{field}.name"), message));
                };
                let Value::Array(members) = take(&mut tool, "tools") else {
                    continue;
                };
                for (n, member) in members.into_iter().enumerate() {
                    if member["type"] == "function" {
                        let field = format!("{field}.tools[{n}]");
                        described.push(function(member, Some(&space), &field)?);
                    }
                }
            }
            Some("custom") => described.push(custom(&tool, &field)?),
            Some(kind) if is_left_out(kind) => {
                tracing::debug!(kind, "a tool that models here cannot call is left out");
                leaves_out = true;
            }
            _ => return Err(tools::no_function(at, &tool["type"])),
        }
    }
    let is_none_left = leaves_out && described.is_empty();
    // A choice of what is left out is none.
    let choice = choice.filter(|choice| {
        let forces = choice.is_object() || **choice == "required";
        let is_out = choice["type"].as_str().is_some_and(is_left_out);
        !(is_out || is_none_left && forces)
    });
    let choice = choice.cloned().map(by_flat_names);
    tools::checked(Some(described), choice.as_ref(), parallel)
}

/// The tool choice with the function names that the model knows.
fn by_flat_names(mut choice: Value) -> Value {
    let flatten = |tool: &mut Value| {
        if tool["type"] == "custom" {
            tool["type"] = "function".into();
        }
        if let (Some(space), Some(name)) = (tool["namespace"].as_str(), tool["name"].as_str()) {
            *tool = json!({"type": "function", "name": flat(space, name)});
        }
    };
    flatten(&mut choice);
    if let Some(Value::Array(allowed)) = choice.get_mut("tools") {
        allowed.iter_mut().for_each(flatten);
    }
    choice
}

fn is_left_out(kind: &str) -> bool {
    LEFT_OUT.iter().any(|begin| kind.starts_with(begin))
}

/// A custom tool as a function whose only argument is a text.
fn custom(tool: &Value, field: &str) -> Result<Value, Failure> {
    let Some(name) = tool["name"].as_str() else {
        let message = "missing; give the tool's name";
        return Err(failure::invalid(&format!("{field}.name"), message));
    };
    let mut about = tool["description"].as_str().unwrap_or_default().to_owned();
    if let Some(grammar) = tool["format"]["definition"].as_str() {
        let syntax = tool["format"]["syntax"].as_str().unwrap_or_default();
        about.push_str(&format!(
            "\n\nThe input follows this {syntax} grammar:\n{grammar}"
        ));
    }
    let input = json!({"type": "object", "required": ["input"], "additionalProperties": false,
        "properties": {"input": {"type": "string"}}});
    Ok(tool_calls::described(name, Some(about.trim()), &input))
}

/// The text argument of a custom tool's call.
pub(super) fn custom_input(arguments: &str) -> String {
    let parsed = serde_json::from_str::<Value>(arguments).ok();
    let input = parsed.as_ref().and_then(|parsed| parsed["input"].as_str());
    input.unwrap_or(arguments).to_owned()
}

fn function(mut tool: Value, namespace: Option<&str>, field: &str) -> Result<Value, Failure> {
    let Some(name) = tool["name"].as_str().map(str::to_owned) else {
        return Err(failure::invalid(
            &format!("{field}.name"),
            "missing; give the function's name",
        ));
    };
    let name = namespace.map_or(name.clone(), |space| flat(space, &name));
    let parameters = take(&mut tool, "parameters");
    let description = tool["description"].as_str();
    let mut function = tool_calls::described(&name, description, &parameters);
    tool_calls::keep_strict(&tool, &mut function);
    Ok(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_namespaces_are_functions_that_are_called_by_both_names() {
        let lookup =
            json!({"type": "function", "name": "lookup", "parameters": {"type": "object"}});
        let tools = vec![
            lookup.clone(),
            json!({"type": "namespace", "name": "mcp__t", "tools": [lookup, {"type": "robot"}]}),
        ];
        let names = Names::of(&tools);
        let offered = functions(Some(tools.clone()), None, None).unwrap();
        let told = offered.described.iter();
        let told: Vec<_> = told.map(|tool| tool["function"]["name"].clone()).collect();
        assert_eq!(told, ["lookup", "mcp__t__lookup"]);
        let mut item = json!({});
        names.put("mcp__t__lookup", &mut item);
        assert_eq!(item, json!({"namespace": "mcp__t", "name": "lookup"}));
        item = json!({});
        names.put("lookup", &mut item);
        assert_eq!(item, json!({"name": "lookup"}));
        let choice = json!({"type": "function", "namespace": "mcp__t", "name": "lookup"});
        let forced = functions(Some(tools.clone()), Some(&choice), None);
        let named = tool_calls::Forced::Named("mcp__t__lookup".to_owned());
        assert_eq!(forced.unwrap().forced, Some(named));
        let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [choice]});
        let allowed = functions(Some(tools), Some(&allowed), None).unwrap();
        let told = allowed.described.iter();
        let told: Vec<_> = told.map(|tool| tool["function"]["name"].clone()).collect();
        assert_eq!(told, ["mcp__t__lookup"]);
    }

    #[test]
    fn a_tool_that_takes_a_text_is_a_function_of_one() {
        let format = json!({"type": "grammar", "syntax": "lark", "definition": "start: /x/"});
        let tools =
            vec![json!({"type": "custom", "name": "patch", "description": "d", "format": format})];
        assert!(Names::of(&tools).is_custom("patch"));
        let choice = json!({"type": "custom", "name": "patch"});
        let offered = functions(Some(tools), Some(&choice), None).unwrap();
        let function = &offered.described[0]["function"];
        assert_eq!(function["parameters"]["required"], json!(["input"]));
        let about = function["description"].as_str().unwrap();
        assert!(
            about.starts_with("d\n") && about.contains("start: /x/"),
            "{about}"
        );
        assert_eq!(
            offered.forced,
            Some(tool_calls::Forced::Named("patch".to_owned()))
        );
        assert_eq!(custom_input(r#"{"input": "a\nb"}"#), "a\nb");
        assert_eq!(custom_input("{\"inp"), "{\"inp");
    }

    #[test]
    fn tools_that_cannot_be_called_are_left_out_and_others_refused() {
        let kinds = LEFT_OUT.map(|kind| json!({"type": kind}));
        for choice in [
            json!(null),
            json!("required"),
            json!({"type": "web_search_preview"}),
        ] {
            let none = functions(Some(kinds.to_vec()), Some(&choice), None).unwrap();
            assert!(none.described.is_empty() && none.forced.is_none());
        }
        let dated = json!({"type": "web_search_2025_08_26"});
        assert!(functions(Some(vec![dated]), None, None).is_ok());
        for (tool, field) in [
            (json!({"type": "robot"}), "tools[0].type"),
            (json!({"type": "custom"}), "tools[0].name"),
            (json!({"type": "function"}), "tools[0].name"),
            (json!({"type": "namespace", "tools": []}), "tools[0].name"),
            (
                json!({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}),
                "tools[0].tools[0].name",
            ),
        ] {
            let failure = functions(Some(vec![tool]), None, None).unwrap_err();
            assert_eq!(failure.fields()[0].0, field);
        }
    }
}
