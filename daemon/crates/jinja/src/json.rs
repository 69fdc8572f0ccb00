//! Python's `json.dumps`, as `tojson` of `transformers` calls it.

use std::fmt::Write as _;

use crate::Host;
use crate::args::{self, Args};
use crate::compare::{LEVELS_MAX, sort_by_keys};
use crate::fault::{Fault, R, fail};
use crate::operators::sized;
use crate::repr;
use crate::value::Value;

/// Maximum number of spaces of an indent.
const INDENT_MAX: usize = 64;

struct Style<'h> {
    indent: Option<String>,
    item: String,
    key: String,
    sorts: bool,
    ascii: bool,
    host: &'h Host<'h>,
}

/// The filter: `ensure_ascii`, `indent`, `separators` and `sort_keys`, in this order or by name.
///
/// # Errors
///
/// If a value is none of JSON.
pub(crate) fn to_json(host: &Host<'_>, value: &Value, args: Args) -> R<String> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort_keys] = args.bind("tojson", names, 0)?;
    let indent = match args::some(indent) {
        None => None,
        Some(Value::Str(text)) => Some(text.text.to_string()),
        Some(other) => Some(" ".repeat(args::size(&other)?.min(INDENT_MAX))),
    };
    let mut style = Style {
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        key: ": ".to_owned(),
        indent,
        sorts: args::flag(sort_keys.as_ref()),
        ascii: args::flag(ascii.as_ref()),
        host,
    };
    if let Some(pair) = args::some(separators) {
        match pair.items()?.as_slice() {
            [item, key] => {
                style.item = repr::text(item)?.to_string();
                style.key = repr::text(key)?.to_string();
            }
            _ => return fail("separators are a pair"),
        }
    }
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out)
}

impl Style<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> R<()> {
        if depth > LEVELS_MAX {
            return Err(Fault::Depth);
        }
        sized(out.len())?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Value::Int(n) => {
                // Writing to a string cannot fail.
                let _ = write!(out, "{n}");
            }
            Value::Float(x) => out.push_str(&float(*x)),
            Value::Str(text) => self.string(&text.text, out),
            Value::List(_) | Value::Tuple(_) | Value::Group(_) => {
                let items = value.items()?;
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.begin(at, depth, out);
                    self.write(item, depth + 1, out)?;
                }
                self.end(items.len(), depth, out);
                out.push(']');
            }
            Value::Dict(dict) => {
                let dict = dict.borrow();
                let members = dict.iter().map(|(key, value)| (key.clone(), value.clone()));
                let mut members: Vec<_> = members.collect();
                if self.sorts {
                    sort_by_keys(&mut members, false)?;
                }
                out.push('{');
                for (at, (key, member)) in members.iter().enumerate() {
                    self.begin(at, depth, out);
                    self.name(key, out)?;
                    out.push_str(&self.key);
                    self.write(member, depth + 1, out)?;
                }
                self.end(members.len(), depth, out);
                out.push('}');
            }
            other => {
                return fail(format!(
                    "Object of type {} is not JSON serializable",
                    other.type_name()
                ));
            }
        }
        Ok(())
    }

    /// A key, which JSON has as a text.
    fn name(&self, key: &Value, out: &mut String) -> R<()> {
        match key {
            Value::Str(text) => self.string(&text.text, out),
            Value::None => out.push_str("\"null\""),
            Value::Bool(b) => out.push_str(if *b { "\"true\"" } else { "\"false\"" }),
            Value::Int(n) => {
                let _ = write!(out, "\"{n}\"");
            }
            Value::Float(x) => {
                let _ = write!(out, "\"{}\"", float(*x));
            }
            other => {
                return fail(format!(
                    "keys must be str, int, float, bool or None, not {}",
                    other.type_name()
                ));
            }
        }
        Ok(())
    }

    fn begin(&self, at: usize, depth: usize, out: &mut String) {
        if at > 0 {
            out.push_str(&self.item);
        }
        self.new_line(depth + 1, out);
    }

    fn end(&self, n: usize, depth: usize, out: &mut String) {
        if n > 0 {
            self.new_line(depth, out);
        }
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            // A symbol is written as what it stands for where that is escaped.
            let Some(meant) = (self.host.meant)(c).unwrap_or(Some(c)) else {
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
                meant if meant < ' ' || (self.ascii && meant > '~') => {
                    for unit in meant.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn float(x: f64) -> String {
    if x.is_nan() {
        "NaN".to_owned()
    } else if x.is_infinite() {
        if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        repr::float(x)
    }
}
