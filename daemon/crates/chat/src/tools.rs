//! Checks of a request's tools, and the constraint of an output with tools. How models write calls
//! is in [`crate::tool_calls`].

use rocmforge_failure::{self as failure, Failure};
use rocmforge_grammar::{Grammar, Piece, Trigger};
use serde_json::{Value, json};

use crate::format::Format;
use crate::model::ChatModel;
use crate::tool_calls::forms::{self, Headers};
use crate::tool_calls::given;
use crate::tool_calls::held::{self, Function};
use crate::tool_calls::{Forced, Tools};

/// Maximum number of tools of a request.
pub const TOOLS_MAX: usize = 512;

/// Checks tools in OpenAI's format. `choice` is `tool_choice`; for `none` the tools are dropped.
///
/// # Errors
/// INVALID_ARGUMENT and UNIMPLEMENTED with the field.
pub fn checked(
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<Tools, Failure> {
    checked_as("tool_choice", tools, choice, parallel)
}

/// As [`checked`], with another name for the field `tool_choice`.
///
/// # Errors
///
/// As [`checked`].
pub fn checked_as(
    field: &str,
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<Tools, Failure> {
    let mut described = tools.unwrap_or_default();
    for tool in &mut described {
        if let Some(schema) = tool.pointer_mut("/function/parameters") {
            given::without_nulls(schema);
        }
    }
    let mut forced = None;
    let (allowed, mode) = choice.map_or((None, None), allowed_by);
    if let Some(names) = allowed {
        described.retain(|tool| names.contains(&tool["function"]["name"]));
    }
    match mode.or(choice) {
        None | Some(Value::Null) => {}
        Some(Value::String(word)) if word == "auto" => {}
        Some(Value::String(word)) if word == "none" => return Ok(Tools::default()),
        Some(other) => forced = Some(forced_by(field, other, &described)?),
    }
    if described.len() > TOOLS_MAX {
        return Err(failure::invalid(
            "tools",
            &format!("{} tools; at most {TOOLS_MAX}", described.len()),
        ));
    }
    for (at, tool) in described.iter().enumerate() {
        if tool["type"] != "function" {
            return Err(no_function(at, &tool["type"]));
        }
        if tool["function"]["name"].as_str().is_none_or(str::is_empty) {
            return Err(failure::invalid(
                &format!("tools[{at}].function.name"),
                "missing; give the function's name",
            ));
        }
    }
    Ok(Tools {
        described,
        single: parallel == Some(false) || matches!(forced, Some(Forced::Named(_))),
        forced,
    })
}

/// The failure for a tool at index `at` that is not a function.
pub fn no_function(at: usize, kind: &Value) -> Failure {
    let field = format!("tools[{at}].type");
    match kind {
        Value::Null => failure::invalid(&field, "missing; give \"function\""),
        kind => failure::unsupported_field(
            &field,
            &format!("{kind} is not available here; give tools of the type function"),
        ),
    }
}

/// The names of tools that `tool_choice` allows, and its mode. In chat completions both are nested
/// one level deeper than in responses.
fn allowed_by(choice: &Value) -> (Option<Vec<Value>>, Option<&Value>) {
    if choice["type"] != "allowed_tools" {
        return (None, None);
    }
    let within = choice.get("allowed_tools").unwrap_or(choice);
    let Some(tools) = within["tools"].as_array() else {
        return (None, None);
    };
    let name = |tool: &Value| tool.get("function").unwrap_or(tool)["name"].clone();
    (
        Some(tools.iter().map(name).collect()),
        Some(&within["mode"]),
    )
}

/// The forced call of a `tool_choice`: "required" or Anthropic's `{"type": "any"}`, or a function
/// by name in the format of OpenAI's or Anthropic's APIs.
fn forced_by(field: &str, choice: &Value, described: &[Value]) -> Result<Forced, Failure> {
    let refuse = |message: &str| Err(failure::invalid(field, message));
    if described.is_empty() {
        return refuse("there is no tool to call; give tools, or leave it unset");
    }
    let kind = choice["type"].as_str();
    if choice == "required" || kind == Some("any") {
        return Ok(Forced::Any);
    }
    let named = [&choice["function"]["name"], &choice["name"]];
    let name = match kind {
        Some("function" | "tool") => named.into_iter().find_map(Value::as_str),
        _ => None,
    };
    match name {
        Some(name)
            if described
                .iter()
                .any(|tool| tool["function"]["name"] == name) =>
        {
            Ok(Forced::Named(name.to_owned()))
        }
        Some(name) => refuse(&format!("no tool is named '{name}'; name one of tools")),
        None => refuse(&format!(
            "{choice} is no choice that is known here; give auto, none, required (any), or a tool by its name"
        )),
    }
}

/// The name of the tool that has to be called; the first tool's if any may be.
pub fn forced_name(tools: &Tools) -> Option<&str> {
    match tools.forced.as_ref()? {
        Forced::Named(name) => Some(name),
        Forced::Any => tools.described.first()?["function"]["name"].as_str(),
    }
}

/// The constraint of an output with these tools: forced calls, calls or the request's format, and
/// calls of strict tools from their mark on.
///
/// # Errors
/// The format cannot be combined with tools, or the model's calls cannot be constrained.
pub fn format(
    tools: &Tools,
    format: Option<Format>,
    model: &ChatModel<'_>,
) -> Result<(Option<Format>, Option<Trigger>), Failure> {
    let is_strict = |tool: &Value| tool["function"]["strict"] == true;
    let has_strict = tools.described.iter().any(is_strict);
    if tools.described.is_empty() || (tools.forced.is_none() && format.is_none() && !has_strict) {
        return Ok((format, None));
    }
    let is_auto = tools.forced.is_none() && format.is_none();
    let field = match &format {
        Some(format) => format.field,
        None if is_auto => "tools",
        None => "tool_choice",
    };
    let or = instead_of_calls(
        tools.forced.as_ref(),
        format.map(|format| format.grammar),
        field,
    )?;
    let wanted = tools.described.iter().filter(|tool| match &tools.forced {
        Some(Forced::Named(name)) => tool["function"]["name"] == **name,
        _ => true,
    });
    let functions: Vec<_> = wanted
        .map(|tool| Function {
            name: tool["function"]["name"].as_str().unwrap_or_default(),
            schema: held::arguments_of(&tool["function"], !is_auto || is_strict(tool)),
        })
        .collect();
    let source = model.template_source();
    let has_headers = source.is_some_and(|source| Headers::of(source).is_some());
    let shape = source.and_then(|source| held::shape(source, &functions, !tools.single));
    // There a format stands behind another header than calls.
    let Some(shape) = shape.filter(|_| or.is_none() || !has_headers) else {
        return Err(failure::unsupported_field(
            field,
            &format!(
                "the chat template of model '{}' writes tool calls in a format that the output cannot be constrained to; leave it \
                 unset, or leave tools out",
                model.name
            ),
        ));
    };
    if is_auto {
        let trigger = Trigger {
            mark: shape.open,
            at_start: shape.at_start,
            then_ends: shape.then_ends,
            once: tools.single,
        };
        return Ok((
            Some(Format::new(Grammar::Written(shape.block), field)),
            Some(trigger),
        ));
    }
    // Behind a header the mark has come already.
    let open = if has_headers {
        Piece::All(Vec::new())
    } else {
        Piece::Mark(shape.open)
    };
    let one = Piece::All(vec![open, shape.block]);
    let calls = match shape.between {
        Some(between) => Piece::Several(Box::new(one), Box::new(between)),
        None => one,
    };
    let held = match or {
        Some(schema) => Piece::Any(vec![calls, Piece::Json(schema)]),
        None => calls,
    };
    Ok((Some(Format::new(Grammar::Written(held), field)), None))
}

/// The JSON schema of an output that may come instead of calls.
fn instead_of_calls(
    forced: Option<&Forced>,
    grammar: Option<Grammar>,
    field: &str,
) -> Result<Option<Value>, Failure> {
    match (forced, grammar) {
        (_, None) => Ok(None),
        (None, Some(Grammar::JsonObject)) => Ok(Some(json!({"type": "object"}))),
        (None, Some(Grammar::JsonSchema(schema))) => Ok(Some(schema)),
        (None, Some(_)) => {
            let message = "not together with tools; leave one of them out";
            Err(failure::unsupported_field(field, message))
        }
        (Some(_), Some(_)) => {
            let message = "not together with a tool_choice that forces a call; leave one out";
            Err(failure::invalid(field, message))
        }
    }
}

/// Rejects tools for a model whose calls would not be recognized.
///
/// # Errors
/// UNIMPLEMENTED with the field.
pub fn check_model(tools: &Tools, model: &ChatModel<'_>) -> Result<(), Failure> {
    let knows = || model.template_source().is_some_and(forms::reads);
    if tools.described.is_empty() || knows() {
        return Ok(());
    }
    Err(failure::unsupported_field(
        "tools",
        &format!(
            "the chat template of model '{}' has no supported tool-call format; leave tools out, set tool_choice to none, or use another model",
            model.name
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool_calls::described;

    fn tools() -> Vec<Value> {
        let parameters =
            json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        vec![described("weather", None, &parameters)]
    }

    #[test]
    fn choices_are_read_and_others_are_refused_by_name() {
        let forced = |choice: Value| checked(Some(tools()), Some(&choice), None);
        let named = Some(Forced::Named("weather".into()));
        for (choice, expected) in [
            (json!("required"), Some(Forced::Any)),
            (json!({"type": "any"}), Some(Forced::Any)),
            (
                json!({"type": "function", "function": {"name": "weather"}}),
                named.clone(),
            ),
            (
                json!({"type": "function", "name": "weather"}),
                named.clone(),
            ),
            (json!({"type": "tool", "name": "weather"}), named),
        ] {
            assert_eq!(forced(choice).unwrap().forced, expected);
        }
        for choice in [
            json!("always"),
            json!({"type": "function", "function": {"name": "other"}}),
            json!({"type": "function"}),
            json!({"type": "allowed_tools", "mode": "required", "tools": []}),
            json!({"type": "allowed_tools"}),
        ] {
            let failure = forced(choice).unwrap_err();
            assert_eq!(failure.fields()[0].0, "tool_choice");
        }
        let two = || vec![tools().remove(0), described("snow", None, &json!({}))];
        let named = |choice: &Value| checked(Some(two()), Some(choice), None).unwrap();
        let snow = json!([{"type": "function", "function": {"name": "snow"}}]);
        for (choice, forced) in [
            (
                json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "snow"}]}),
                None,
            ),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": snow}}),
                Some(Forced::Any),
            ),
        ] {
            let allowed = named(&choice);
            assert_eq!(allowed.described[0]["function"]["name"], "snow");
            assert_eq!((allowed.described.len(), allowed.forced), (1, forced));
        }
        assert!(checked(None, Some(&json!("required")), None).is_err());
        let none = checked(Some(tools()), Some(&json!("none")), None).unwrap();
        assert!(none.described.is_empty());
        let auto = checked(Some(tools()), Some(&json!("auto")), Some(false)).unwrap();
        assert!(auto.single && auto.described.len() == 1);
        let unnamed = vec![json!({"type": "function", "function": {}})];
        assert!(checked(Some(unnamed), None, None).is_err());
        let other = vec![json!({"type": "web_search"})];
        let failure = checked(Some(other), None, None).unwrap_err();
        assert_eq!(failure.fields()[0].0, "tools[0].type");
        assert!(
            failure
                .message()
                .contains("\"web_search\" is not available")
        );
    }

    #[test]
    fn a_tool_without_a_type_is_told_that_it_is_missing() {
        let untyped = vec![json!({"name": "f"})];
        let failure = checked(Some(untyped), None, None).unwrap_err();
        let (field, message) = &failure.fields()[0];
        assert_eq!(field, "tools[0].type");
        assert_eq!(message, "missing; give \"function\"");
    }
}
