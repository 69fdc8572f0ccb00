//! Python's `json.dumps`, as `tojson` of `transformers` calls it.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

use super::protect::Marks;
use super::python;

/// Most spaces of an indent.
const INDENT_MAX: usize = 16;

struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    ascii: bool,
    /// What protects text, and is no character of it.
    marks: Marks,
}

/// The filter: `ensure_ascii`, `indent`, `separators` and `sort_keys`, in this
/// order or by name.
pub(super) fn to_json(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let given = |i: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(i) {
            Some(value) => Some(value.clone()),
            None => named.get(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ascii = given(0, "ensure_ascii")?;
    let indent = given(1, "indent")?;
    let separators = given(2, "separators")?;
    let sort_keys = given(3, "sort_keys")?;
    named.assert_all_used()?;
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(INDENT_MAX)),
    });
    let mut style = Style {
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        key: ": ".to_owned(),
        indent,
        sort_keys: sort_keys.is_some_and(|value| value.is_true()),
        ascii: ascii.is_some_and(|value| value.is_true()),
        marks: Marks::in_force(),
    };
    if let Some(pair) = separators {
        style.item = pair.get_item_by_index(0)?.to_string();
        style.key = pair.get_item_by_index(1)?.to_string();
    }
    let json = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot serialize to JSON").with_source(error)
    })?;
    let mut out = String::new();
    write(&json, &style, 0, &mut out);
    Ok(Value::from(out))
}

fn write(value: &Json, style: &Style, depth: usize, out: &mut String) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Json::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => out.push_str(&python::float(float)),
            _ => out.push_str(&number.to_string()),
        },
        Json::String(text) => write_string(text, style, out),
        Json::Array(list) => {
            out.push('[');
            for (i, item) in list.iter().enumerate() {
                begin_item(i == 0, style, depth, out);
                write(item, style, depth + 1, out);
            }
            end_items(list.is_empty(), style, depth, out);
            out.push(']');
        }
        Json::Object(map) => {
            out.push('{');
            let mut members: Vec<_> = map.iter().collect();
            if style.sort_keys {
                members.sort_by_key(|(key, _)| *key);
            }
            for (i, (key, member)) in members.into_iter().enumerate() {
                begin_item(i == 0, style, depth, out);
                write_string(key, style, out);
                out.push_str(&style.key);
                write(member, style, depth + 1, out);
            }
            end_items(map.is_empty(), style, depth, out);
            out.push('}');
        }
    }
}

fn begin_item(first: bool, style: &Style, depth: usize, out: &mut String) {
    if !first {
        out.push_str(&style.item);
    }
    new_line(style, depth + 1, out);
}

fn end_items(none: bool, style: &Style, depth: usize, out: &mut String) {
    if !none {
        new_line(style, depth, out);
    }
}

fn new_line(style: &Style, depth: usize, out: &mut String) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        (0..depth).for_each(|_| out.push_str(indent));
    }
}

fn write_string(text: &str, style: &Style, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        // A stand-in is written as what it stands for where that is escaped.
        let Some(meant) = style.marks.meant(c).unwrap_or(Some(c)) else {
            out.push(c);
            continue;
        };
        match meant {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            meant if meant < ' ' || (style.ascii && meant > '~') => {
                for unit in meant.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}
