//! Values as text: Python's `str` and `repr`.

use std::fmt::Write as _;
use std::rc::Rc;

use unicode_general_category::{GeneralCategory, get_general_category};

use crate::compare::LEVELS_MAX;
use crate::fault::{Fault, R};
use crate::value::{Dict, Value, ViewKind};

/// `str(value)`.
///
/// # Errors
///
/// If lists are nested too deeply.
pub(crate) fn text(value: &Value) -> R<Rc<str>> {
    Ok(match value {
        Value::Str(text) => Rc::clone(&text.text),
        Value::Undefined(_) => "".into(),
        other => repr(other)?.into(),
    })
}

/// Appends `str(value)`.
pub(crate) fn push_text(value: &Value, out: &mut String) -> R<()> {
    match value {
        Value::Str(text) => out.push_str(&text.text),
        Value::Undefined(_) => {}
        other => push_repr(other, out, 0)?,
    }
    Ok(())
}

/// `repr(value)`.
///
/// # Errors
///
/// If lists are nested too deeply.
pub(crate) fn repr(value: &Value) -> R<String> {
    let mut out = String::new();
    push_repr(value, &mut out, 0)?;
    Ok(out)
}

fn push_repr(value: &Value, out: &mut String, level: usize) -> R<()> {
    if level > LEVELS_MAX {
        return Err(Fault::Depth);
    }
    let sequence = |items: &[Value], out: &mut String| -> R<()> {
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(", ");
            }
            push_repr(item, out, level + 1)?;
        }
        Ok(())
    };
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(n) => push_display(out, n),
        Value::Float(x) => out.push_str(&float(*x)),
        Value::Str(text) if text.safe => {
            out.push_str("Markup(");
            push_quoted(&text.text, out);
            out.push(')');
        }
        Value::Str(text) => push_quoted(&text.text, out),
        Value::Bytes(bytes) => push_bytes(bytes, out),
        Value::List(list) => {
            out.push('[');
            match list.try_borrow() {
                Ok(items) => sequence(&items, out)?,
                Err(_) => out.push_str("..."),
            }
            out.push(']');
        }
        Value::Tuple(items) | Value::Group(items) => {
            out.push('(');
            sequence(items, out)?;
            out.push_str(if items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => push_members("{", &dict.borrow(), "}", out, level)?,
        Value::Namespace(dict) => {
            push_members("<Namespace {", &dict.borrow(), "}>", out, level)?;
        }
        Value::View(_, kind) => {
            out.push_str(match kind {
                ViewKind::Keys => "dict_keys([",
                ViewKind::Values => "dict_values([",
                ViewKind::Items => "dict_items([",
            });
            sequence(&value.items()?, out)?;
            out.push_str("])");
        }
        Value::Range(range) => {
            let (start, stop, step) = (range.start, range.stop, range.step);
            match step {
                1 => push_display(out, format_args!("range({start}, {stop})")),
                _ => push_display(out, format_args!("range({start}, {stop}, {step})")),
            }
        }
        other => push_object(other, out),
    }
    Ok(())
}

/// The members of a dict, between its brackets.
fn push_members(open: &str, dict: &Dict, close: &str, out: &mut String, level: usize) -> R<()> {
    out.push_str(open);
    for (at, (key, member)) in dict.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        push_repr(key, out, level + 1)?;
        out.push_str(": ");
        push_repr(member, out, level + 1)?;
    }
    out.push_str(close);
    Ok(())
}

/// What has no items: Python shows its place in memory, too.
fn push_object(value: &Value, out: &mut String) {
    match value {
        Value::Macro(it) => match &it.node.name {
            Some(name) => push_display(out, format_args!("<Macro '{name}'>")),
            None => out.push_str("<Macro anonymous>"),
        },
        Value::Loop(it) => {
            let known = it.index0.get() + 1;
            push_display(
                out,
                format_args!("<LoopContext {known}/{}>", it.known_length()),
            );
        }
        Value::Iter(items) => push_display(out, format_args!("<{} object>", items.borrow().kind)),
        Value::Bound(_) => out.push_str("<built-in method>"),
        Value::Function(_) => out.push_str("<function>"),
        Value::Cycler(_) => out.push_str("<Cycler object>"),
        Value::Joiner(_) => out.push_str("<Joiner object>"),
        other => push_display(out, format_args!("<{} object>", other.type_name())),
    }
}

fn push_display(out: &mut String, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = write!(out, "{value}");
}

/// The text in quotes, as Python shows it.
pub(crate) fn push_quoted(text: &str, out: &mut String) {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => match c as u32 {
                n @ 0..=0xff => push_display(out, format_args!("\\x{n:02x}")),
                n @ 0x100..=0xffff => push_display(out, format_args!("\\u{n:04x}")),
                n => push_display(out, format_args!("\\U{n:08x}")),
            },
        }
    }
    out.push(quote);
}

fn push_bytes(bytes: &[u8], out: &mut String) {
    let quote = match bytes.contains(&b'\'') && !bytes.contains(&b'"') {
        true => '"',
        false => '\'',
    };
    out.push('b');
    out.push(quote);
    for &byte in bytes {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            byte if char::from(byte) == quote => out.extend(['\\', quote]),
            b' '..=b'~' => out.push(char::from(byte)),
            byte => push_display(out, format_args!("\\x{byte:02x}")),
        }
    }
    out.push(quote);
}

/// Whether `repr` shows the character as it is.
pub(crate) fn is_printable(c: char) -> bool {
    use GeneralCategory as G;
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    !matches!(
        get_general_category(c),
        G::Control
            | G::Format
            | G::Surrogate
            | G::PrivateUse
            | G::Unassigned
            | G::LineSeparator
            | G::ParagraphSeparator
            | G::SpaceSeparator
    )
}

/// Python's `repr` of a float: the shortest digits that give it back, with an exponent below 1e-4
/// and from 1e16.
#[must_use]
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        };
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_does() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e20, "1e+20"),
            (1.5e-7, "1.5e-07"),
            (-0.0001, "-0.0001"),
            (-0.0, "-0.0"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn what_cannot_be_printed_is_shown_by_its_number() {
        let mut out = String::new();
        push_quoted("a'b\"\u{1}\u{ad}\u{2028}é😀\u{e000}", &mut out);
        assert_eq!(out, "'a\\'b\"\\x01\\xad\\u2028é😀\\ue000'");
    }
}
