//! Tests: what stands behind `is`.

use crate::args::Args;
use crate::ast::{Comparison, Operator};
use crate::compare;
use crate::eval::compared;
use crate::fault::{R, fail};
use crate::filters;
use crate::operators;
use crate::repr;
use crate::value::{Key, Value};

/// The names of all tests.
pub(crate) const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

/// Whether a test holds.
///
/// # Errors
///
/// If there is no such test, or it cannot be made of this value.
pub(crate) fn test(name: &str, value: &Value, args: Args) -> R<bool> {
    let by = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = by {
        let others = args.only(name, 1, 1)?;
        return compared(comparison, value, &others[0]);
    }
    if matches!(name, "divisibleby" | "sameas") {
        let others = args.only(name, 1, 1)?;
        return match name {
            "sameas" => Ok(compare::is_same(value, &others[0])),
            _ => divides(value, &others[0]),
        };
    }
    args.only(name, 0, 0)?;
    plain(name, value)
}

fn divides(value: &Value, by: &Value) -> R<bool> {
    let rest = operators::binary(Operator::Mod, value, by)?;
    compare::equal(&rest, &Value::Int(0))
}

/// A test without arguments.
fn plain(name: &str, value: &Value) -> R<bool> {
    let rest = |wanted: i128| -> R<bool> {
        let rest = operators::binary(Operator::Mod, value, &Value::Int(2))?;
        compare::equal(&rest, &Value::Int(wanted))
    };
    Ok(match name {
        "odd" => rest(1)?,
        "even" => rest(0)?,
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "filter" | "test" => {
            // Names are looked up in a dict, which takes no list.
            Key::of(value)?;
            value.as_str().is_some_and(|wanted| match name {
                "filter" => filters::is_known(wanted),
                _ => NAMES.contains(&wanted),
            })
        }
        "none" => value.is_none(),
        "boolean" => matches!(value, Value::Bool(_)),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "lower" => {
            let text = repr::text(value)?;
            is_cased(&text, char::is_lowercase, char::is_uppercase)
        }
        "upper" => {
            let text = repr::text(value)?;
            is_cased(&text, char::is_uppercase, char::is_lowercase)
        }
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => matches!(
            value,
            Value::Undefined(_)
                | Value::Str(_)
                | Value::Bytes(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Group(_)
                | Value::Dict(_)
                | Value::Range(_)
        ),
        "iterable" => match value {
            Value::Iter(_) | Value::Loop(_) => true,
            other => other.len().is_some(),
        },
        "callable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Bound(_)
                | Value::Function(_)
                | Value::Macro(_)
                | Value::Loop(_)
                | Value::Joiner(_)
        ),
        "escaped" => matches!(value, Value::Str(text) if text.safe),
        _ => return fail(format!("No test named '{name}'.")),
    })
}

/// Whether a text has a letter of a case, and none of the other.
pub(crate) fn is_cased(text: &str, of: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    let is_title = |c: char| matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ');
    text.chars().any(of) && !text.chars().any(|c| other(c) || is_title(c))
}
