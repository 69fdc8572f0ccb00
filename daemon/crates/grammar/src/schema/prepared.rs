//! A schema as it is compiled: checked, rewritten, and with the options that it is compiled with.

use serde_json::{Value, json};

use super::rewrite::rewritten;
use crate::size::{Size, check_size, refused};
use crate::{Error, limits};

/// A checked schema, with bounds on white space unless it has options of its own, and with `oneOf`
/// as `anyOf` unless its options refuse that: what fits two of them is let through, as by llama.cpp
/// and Ollama. `size` counts together what is compiled together.
pub(crate) fn prepared(schema: &Value, size: &mut Size) -> Result<Value, Error> {
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        let message = "a schema is an object, or true or false; give one";
        return Err(refused(message.to_owned()));
    }
    check_size(&schema.to_string(), limits::SCHEMA_MAX_BYTES)?;
    size.add(schema, 0)?;
    size.check_patterns()?;
    let own_options = schema.get("x-guidance").cloned();
    let mut schema = rewritten(schema)?;
    set_options(&mut schema, own_options)?;
    Ok(schema)
}

/// Gives a rewritten schema its own options, or bounds of white space, and `oneOf` as `anyOf`.
pub(crate) fn set_options(schema: &mut Value, own: Option<Value>) -> Result<(), Error> {
    let Value::Object(schema) = schema else {
        return Ok(());
    };
    schema.extend(own.map(|options| ("x-guidance".to_owned(), options)));
    let options = schema.get("x-guidance").and_then(Value::as_object);
    let text = options.and_then(|o| o.keys().find(|k| k.ends_with("_separator")));
    if let Some(option) = text {
        return Err(refused(format!(
            "x-guidance with {option} may give what is no JSON; leave it out"
        )));
    }
    let options = schema
        .entry("x-guidance")
        .or_insert_with(|| json!({"whitespace_pattern": limits::JSON_SPACE}));
    if let Value::Object(options) = options {
        options.entry("coerce_one_of").or_insert(true.into());
    }
    Ok(())
}
