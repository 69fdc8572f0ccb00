//! The fields of `str.format`.

use std::rc::Rc;

use super::{ascii, formatted};
use crate::access;
use crate::args::Args;
use crate::fault::{Fault, R, fail};
use crate::operators::sized;
use crate::repr;
use crate::run::Run;
use crate::value::Value;

/// What fields are looked up in.
enum Source<'a> {
    Args(&'a Args),
    Map(&'a Value),
}

/// `text.format(...)`.
///
/// # Errors
///
/// If a field is not there, or cannot be formatted as it asks.
pub(crate) fn format(run: &Run<'_>, text: &str, args: Args) -> R<String> {
    let mut auto = Numbering::Unknown;
    fill(run, text, &Source::Args(&args), &mut auto, 2)
}

/// `text.format_map(map)`.
///
/// # Errors
///
/// As [`format`].
pub(crate) fn format_map(run: &Run<'_>, text: &str, map: &Value) -> R<String> {
    fill(run, text, &Source::Map(map), &mut Numbering::Unknown, 2)
}

/// Whether fields are numbered by hand.
enum Numbering {
    Unknown,
    Auto(usize),
    Manual,
}

fn fill(
    run: &Run<'_>,
    text: &str,
    source: &Source<'_>,
    auto: &mut Numbering,
    levels: u32,
) -> R<String> {
    if levels == 0 {
        return fail("Max string recursion exceeded");
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let behind = &rest[at + 1..];
        let brace = &rest[at..=at];
        if behind.starts_with(brace) {
            out.push_str(brace);
            rest = &behind[1..];
            continue;
        }
        if brace == "}" {
            return fail("Single '}' encountered in format string");
        }
        let Some(end) = field_len(behind) else {
            return fail(match behind.is_empty() {
                true => "Single '{' encountered in format string",
                false => "expected '}' before end of string",
            });
        };
        out.push_str(&field(run, &behind[..end], source, auto, levels)?);
        sized(out.len())?;
        rest = &behind[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Bytes before the brace that ends a field.
fn field_len(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

fn field(
    run: &Run<'_>,
    text: &str,
    source: &Source<'_>,
    auto: &mut Numbering,
    levels: u32,
) -> R<String> {
    let (head, spec) = text.split_once(':').unwrap_or((text, ""));
    let (name, conversion) = match head.split_once('!') {
        Some((name, conversion)) => (name, Some(conversion)),
        None => (head, None),
    };
    let value = looked_up(run, name, source, auto)?;
    let spec = match spec.contains('{') {
        true => fill(run, spec, source, auto, levels - 1)?,
        false => spec.to_owned(),
    };
    let value = match conversion {
        None => value,
        Some("s") => Value::text(repr::text(&value)?),
        Some("r") => Value::from(repr::repr(&value)?),
        Some("a") => Value::from(ascii(&repr::repr(&value)?)),
        Some(other) => {
            return fail(format!("Unknown conversion specifier {other}"));
        }
    };
    formatted(&value, &spec)
}

/// The value of a name with its members.
fn looked_up(run: &Run<'_>, name: &str, source: &Source<'_>, auto: &mut Numbering) -> R<Value> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let mut value = match first {
        "" => {
            let at = match auto {
                Numbering::Unknown => 0,
                Numbering::Auto(at) => *at,
                Numbering::Manual => {
                    return fail(
                        "cannot switch from manual field specification to automatic field numbering",
                    );
                }
            };
            *auto = Numbering::Auto(at + 1);
            positional(source, at)?
        }
        digits if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            if matches!(auto, Numbering::Auto(_)) {
                return fail(
                    "cannot switch from automatic field numbering to manual field specification",
                );
            }
            *auto = Numbering::Manual;
            positional(source, digits.parse().unwrap_or(usize::MAX))?
        }
        name => by_name(source, name)?,
    };
    while !path.is_empty() {
        if let Some(inner) = path.strip_prefix('[') {
            let Some(end) = inner.find(']') else {
                return fail("Missing ']' in format string");
            };
            let key = match inner[..end].parse::<i128>() {
                Ok(at) => Value::Int(at),
                Err(_) => Value::text(&inner[..end]),
            };
            value = access::item(run, &value, &key)?;
            path = &inner[end + 1..];
        } else {
            let inner = &path[1..];
            let end = inner.find(['.', '[']).unwrap_or(inner.len());
            let name: Rc<str> = inner[..end].into();
            value = access::attribute(run, &value, &name)?;
            path = &inner[end..];
        }
    }
    Ok(value)
}

fn positional(source: &Source<'_>, at: usize) -> R<Value> {
    match source {
        Source::Args(args) => match args.positional.get(at) {
            Some(value) => Ok(value.clone()),
            None => fail(format!(
                "Replacement index {at} out of range for positional args tuple"
            )),
        },
        Source::Map(_) => fail("Format string contains positional fields"),
    }
}

fn by_name(source: &Source<'_>, name: &str) -> R<Value> {
    let found = match source {
        Source::Args(args) => {
            let mut named = args.named.iter();
            let found = named.find(|(given, _)| &**given == name);
            found.map(|(_, value)| value.clone())
        }
        Source::Map(Value::Dict(map)) => map.borrow().get_str(name),
        Source::Map(other) => {
            return fail(format!("'{}' object is not a mapping", other.type_name()));
        }
    };
    found.ok_or_else(|| Fault::new(format!("'{name}'")))
}
