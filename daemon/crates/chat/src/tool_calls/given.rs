//! Removes null members from tool schemas: they mean that nothing is set.
//!
//! Go's and C#'s libraries write them for unset fields. A template would loop over a null, and a
//! grammar would reject it.

use serde_json::{Map, Value};

/// Schema keywords whose value is a schema, or a list of schemas.
const SCHEMAS: [&str; 15] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
];
/// Schema keywords whose value is an object of schemas by name.
const BY_NAME: [&str; 5] = [
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
];
/// Schema keywords whose value may meaningfully be null.
const VALUES: [&str; 4] = ["default", "const", "example", "examples"];
/// Maximum depth of a schema that is processed, the same as that of parsed JSON.
const DEPTH_MAX: usize = 128;

/// Removes null members from a schema.
pub fn without_nulls(schema: &mut Value) {
    leave_out(schema, DEPTH_MAX);
}

fn leave_out(schema: &mut Value, depth: usize) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    match schema {
        Value::Object(schema) => {
            schema.retain(|key, value| !value.is_null() || VALUES.contains(&key.as_str()));
            for (key, value) in schema {
                if SCHEMAS.contains(&key.as_str()) {
                    leave_out(value, depth);
                } else if BY_NAME.contains(&key.as_str())
                    && let Value::Object(named) = value
                {
                    named.values_mut().for_each(|schema| one(schema, depth));
                }
            }
        }
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| one(schema, depth)),
        _ => {}
    }
}

/// Processes a schema inside of another; a null one becomes a schema that allows everything.
fn one(schema: &mut Value, depth: usize) {
    if schema.is_null() {
        *schema = Map::new().into();
    }
    leave_out(schema, depth);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_that_are_null_are_left_out_and_values_stay() {
        let mut schema = json!({
            "type": "object", "properties": {
                "properties": {"type": "string", "description": null, "enum": null, "default": null},
                "list": {"type": "array", "items": {"type": "object", "properties": null, "required": null}},
                "any": null,
                "either": {"anyOf": [{"const": null}, {"type": "object", "properties": null}, null]},
            },
            "required": null, "additionalProperties": null, "$defs": null, "enum": [null, {"properties": null}],
        });
        without_nulls(&mut schema);
        let expected = json!({
            "type": "object", "properties": {
                "properties": {"type": "string", "default": null},
                "list": {"type": "array", "items": {"type": "object"}},
                "any": {},
                "either": {"anyOf": [{"const": null}, {"type": "object"}, {}]},
            },
            "enum": [null, {"properties": null}],
        });
        assert_eq!(schema, expected);
        let mut nothing = Value::Null;
        without_nulls(&mut nothing);
        assert_eq!(nothing, Value::Null);
    }
}
