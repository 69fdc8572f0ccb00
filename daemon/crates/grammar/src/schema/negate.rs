//! What a schema does not describe, as a schema.
//!
//! A schema is all of its keywords, so its negation is any of theirs. It is exact, but that a
//! negated `integer` leaves out all numbers.

use serde_json::{Map, Value, json};

use super::pattern;

/// All types of JSON Schema.
pub(super) const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// The negation of a rewritten schema; where there is none, the keyword that has none.
pub(super) fn negated(schema: &Value) -> Result<Value, String> {
    let members = match schema {
        Value::Bool(is_any) => return Ok((!is_any).into()),
        Value::Object(members) => members,
        _ => return Err("schema".to_owned()),
    };
    let mut any = Vec::new();
    for (key, value) in members {
        any.extend(of_keyword(key, value)?);
    }
    Ok(any_of(any))
}

/// Any of these; nothing is any of none.
pub(super) fn any_of(mut list: Vec<Value>) -> Value {
    match list.len() {
        0 => false.into(),
        1 => list.remove(0),
        _ => json!({"anyOf": list}),
    }
}

/// The ways in which a value does not satisfy a keyword.
fn of_keyword(key: &str, value: &Value) -> Result<Vec<Value>, String> {
    let list = || value.as_array().map_or(&[][..], Vec::as_slice);
    let whole = || value.as_u64().ok_or_else(|| key.to_owned());
    Ok(match key {
        "type" => {
            let names = super::document::types_of(value);
            let is_named = |name: &str| {
                names.contains(&name) || name == "number" && names.contains(&"integer")
            };
            let left: Vec<_> = TYPES.into_iter().filter(|name| !is_named(name)).collect();
            if left.is_empty() {
                Vec::new()
            } else {
                vec![json!({"type": left})]
            }
        }
        "const" => vec![other_than(value).ok_or_else(|| key.to_owned())?],
        "enum" => {
            let others: Option<Vec<_>> = list().iter().map(other_than).collect();
            vec![json!({"allOf": others.ok_or_else(|| key.to_owned())?})]
        }
        "minimum" => vec![json!({"type": "number", "exclusiveMaximum": value})],
        "maximum" => vec![json!({"type": "number", "exclusiveMinimum": value})],
        "exclusiveMinimum" => vec![json!({"type": "number", "maximum": value})],
        "exclusiveMaximum" => vec![json!({"type": "number", "minimum": value})],
        "minLength" => below("string", "maxLength", whole()?),
        "maxLength" => vec![json!({"type": "string", "minLength": whole()? + 1})],
        "minItems" => below("array", "maxItems", whole()?),
        "maxItems" => vec![json!({"type": "array", "minItems": whole()? + 1})],
        "required" => {
            let without = |name: &Value| {
                let name = name.as_str().unwrap_or_default();
                json!({"type": "object", "properties": {name: false}})
            };
            list().iter().map(without).collect()
        }
        "properties" => {
            let members = value.as_object().into_iter().flatten();
            let with = members.map(|(name, schema)| {
                let other = negated(schema)?;
                Ok(json!({"type": "object", "properties": {name: other}, "required": [name]}))
            });
            let with: Result<Vec<_>, String> = with.collect();
            with?.into_iter().filter(|one| !is_never(one)).collect()
        }
        "anyOf" | "oneOf" => {
            let others: Result<Vec<_>, _> = list().iter().map(negated).collect();
            vec![json!({"allOf": others?})]
        }
        "allOf" => list().iter().map(negated).collect::<Result<_, _>>()?,
        _ => return Err(key.to_owned()),
    })
}

/// Whether a property of an object that is looked for can have no value.
fn is_never(with: &Value) -> bool {
    let mut values = with["properties"]
        .as_object()
        .into_iter()
        .flat_map(Map::values);
    values.any(|value| *value == false)
}

fn below(kind: &str, key: &str, least: u64) -> Vec<Value> {
    match least.checked_sub(1) {
        Some(most) => vec![json!({"type": kind, key: most})],
        None => Vec::new(),
    }
}

/// A schema for all values but this one; `None` for lists and objects.
fn other_than(value: &Value) -> Option<Value> {
    let (kind, others) = match value {
        Value::Null => ("null", Vec::new()),
        Value::Bool(is) => ("boolean", vec![json!({"const": !is})]),
        Value::Number(_) => (
            "number",
            vec![
                json!({"type": "number", "exclusiveMaximum": value}),
                json!({"type": "number", "exclusiveMinimum": value}),
            ],
        ),
        Value::String(text) => {
            let pattern = pattern::other_than(text);
            (
                "string",
                vec![json!({"type": "string", "pattern": pattern})],
            )
        }
        Value::Array(_) | Value::Object(_) => return None,
    };
    let left: Vec<_> = TYPES.into_iter().filter(|name| *name != kind).collect();
    Some(any_of([vec![json!({"type": left})], others].concat()))
}
