//! Keywords that depend on whether a value matches another schema: `not`, `if`, `dependent...`.

use serde_json::{Map, Value, json};

use super::document::Place;
use super::negate::{any_of, negated};
use super::rewriter::{Outcome, Rewriter, refused};

/// The negation of a rewritten schema, or why there is none.
pub(super) fn negation(place: &Place<'_>, key: &str, schema: &Value) -> Outcome<Value> {
    negated(schema).map_err(|of| {
        let why = format!("{key} cannot be enforced with {of} in it; leave it out");
        refused(place, key, &why)
    })
}

/// Rewrites `if` with `then` and `else`; nothing if neither restricts anything.
pub(super) fn if_then_else<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    members: &'s Map<String, Value>,
) -> Outcome<Option<Value>> {
    let mut part = |key: &str| {
        let value = members.get(key).filter(|value| !value.is_null());
        value
            .map(|value| rewriter.schema(&place.below(key, value)))
            .transpose()
    };
    let (then, other) = (part("then")?, part("else")?);
    if then.is_none() && other.is_none() {
        return Ok(None);
    }
    let condition = part("if")?.unwrap_or(true.into());
    let otherwise = negation(place, "if", &condition)?;
    Ok(Some(either(condition, then, otherwise, other)))
}

/// A condition with what follows from it, or its negation with what follows from that.
fn either(condition: Value, then: Option<Value>, otherwise: Value, other: Option<Value>) -> Value {
    let both = |condition: Value, more: Option<Value>| match more {
        None => condition,
        Some(more) => json!({"allOf": [condition, more]}),
    };
    any_of(vec![both(condition, then), both(otherwise, other)])
}

/// What follows for an object that has a property of this name.
pub(super) fn with_property(name: &str, then: Value) -> Value {
    let has = json!({"type": "object", "required": [name]});
    let has_not = json!({"properties": {name: false}});
    either(has, Some(then), has_not, None)
}

/// Whether schemas have nothing but `required`, of one name or several.
pub(super) fn are_required_alone(schemas: &[Value]) -> bool {
    let alone = |schema: &Value| {
        let members = schema.as_object();
        members.is_some_and(|members| members.len() == 1 && members.contains_key("required"))
    };
    schemas.iter().all(alone)
}

/// Exactly one of schemas that have a negation.
pub(super) fn exactly_one(schemas: &[Value]) -> Value {
    let one = |at: usize| {
        let others = schemas.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.filter_map(|(_, schema)| negated(schema).ok());
        let all: Vec<Value> = std::iter::once(schemas[at].clone()).chain(others).collect();
        json!({"allOf": all})
    };
    any_of((0..schemas.len()).map(one).collect())
}
