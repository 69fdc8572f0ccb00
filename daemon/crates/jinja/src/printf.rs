//! `text % values`, Python's older formatting.

use crate::fault::{R, fail};
use crate::format::{Spec, float_digits};
use crate::operators::sized;
use crate::repr;
use crate::value::Value;

/// Columns that a field may be filled to.
const WIDTH_MAX: usize = 1 << 20;

/// The values, as they are used up.
struct Values<'v> {
    all: &'v Value,
    items: Vec<Value>,
    at: usize,
    /// Whether names were looked up.
    by_name: bool,
}

impl Values<'_> {
    fn next(&mut self) -> R<Value> {
        match self.items.get(self.at) {
            Some(value) => {
                self.at += 1;
                Ok(value.clone())
            }
            None => fail("not enough arguments for format string"),
        }
    }
}

/// Formats `value`; a tuple holds several.
///
/// # Errors
///
/// If a conversion is unknown or does not take its value, and where there are too many or too few.
pub(crate) fn printf(text: &str, value: &Value) -> R<String> {
    let items = match value {
        Value::Tuple(items) | Value::Group(items) => items.to_vec(),
        other => vec![other.clone()],
    };
    let mut values = Values {
        all: value,
        items,
        at: 0,
        by_name: false,
    };
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = conversion(&rest[at + 1..], &mut values, &mut out)?;
        sized(out.len())?;
    }
    out.push_str(rest);
    // What could be asked for members by name.
    let takes_names = matches!(
        value,
        Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_)
    );
    if values.at < values.items.len() && !values.by_name && !takes_names {
        return fail("not all arguments converted during string formatting");
    }
    Ok(out)
}

/// One conversion; returns what follows it.
fn conversion<'t>(text: &'t str, values: &mut Values<'_>, out: &mut String) -> R<&'t str> {
    let mut rest = text;
    let mut named = None;
    if let Some(inner) = rest.strip_prefix('(') {
        let Some(end) = inner.find(')') else {
            return fail("incomplete format key");
        };
        let Value::Dict(members) = values.all else {
            return fail("format requires a mapping");
        };
        let name = &inner[..end];
        values.by_name = true;
        named = members.borrow().get_str(name);
        if named.is_none() {
            return fail(format!("'{name}'"));
        }
        rest = &inner[end + 1..];
    }
    let mut spec = Spec::default();
    while let Some(flag) = rest.chars().next().filter(|c| "-+ #0".contains(*c)) {
        match flag {
            '-' => spec.align = Some('<'),
            '+' => spec.sign = Some('+'),
            ' ' if spec.sign != Some('+') => spec.sign = Some(' '),
            '#' => spec.alternate = true,
            '0' => spec.zero = true,
            _ => {}
        }
        rest = &rest[1..];
    }
    if let Some((width, behind)) = size(rest, values)? {
        if width < 0 {
            spec.align = Some('<');
        }
        spec.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
        rest = behind;
    }
    if let Some(behind) = rest.strip_prefix('.') {
        let (precision, behind) = size(behind, values)?.unwrap_or((0, behind));
        spec.precision = Some(usize::try_from(precision.max(0)).unwrap_or(usize::MAX));
        rest = behind;
    }
    if spec.width > WIDTH_MAX
        || spec
            .precision
            .is_some_and(|precision| precision > WIDTH_MAX)
    {
        return fail("a field would be too wide");
    }
    let rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
    let Some(kind) = rest.chars().next() else {
        return fail("incomplete format");
    };
    let behind = &rest[kind.len_utf8()..];
    if kind == '%' && text.starts_with('%') {
        out.push('%');
        return Ok(behind);
    }
    if !"diouxXeEfFgGcrsa".contains(kind) {
        return fail(format!("unsupported format character '{kind}'"));
    }
    let value = match named {
        Some(value) => value,
        None => values.next()?,
    };
    out.push_str(&converted(&value, kind, spec)?);
    Ok(behind)
}

/// A width or a precision: digits, or a star for the next value.
fn size<'t>(text: &'t str, values: &mut Values<'_>) -> R<Option<(i128, &'t str)>> {
    if let Some(rest) = text.strip_prefix('*') {
        let value = values.next()?;
        return match value.as_int() {
            Some(n) => Ok(Some((n, rest))),
            None => fail("* wants int"),
        };
    }
    let len = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    if len == 0 {
        return Ok(None);
    }
    match text[..len].parse() {
        Ok(n) => Ok(Some((n, &text[len..]))),
        Err(_) => fail("width too big"),
    }
}

fn converted(value: &Value, kind: char, spec: Spec) -> R<String> {
    let expected = |what: &str| -> R<String> {
        fail(format!(
            "%{kind} format: {what} is required, not {}",
            value.type_name()
        ))
    };
    match kind {
        's' | 'r' | 'a' | 'c' => as_text(value, kind, spec),
        'd' | 'i' | 'u' | 'o' | 'x' | 'X' => {
            let n = match value {
                Value::Float(x) if matches!(kind, 'd' | 'i' | 'u') => {
                    if !x.is_finite() || x.abs() >= 1e38 {
                        return fail("cannot convert float to integer");
                    }
                    *x as i128
                }
                other => match other.as_int() {
                    Some(n) => n,
                    None if matches!(kind, 'd' | 'i' | 'u') => return expected("a real number"),
                    None => return expected("an integer"),
                },
            };
            let size = n.unsigned_abs();
            let (prefix, digits) = match kind {
                'o' => ("0o", format!("{size:o}")),
                'x' => ("0x", format!("{size:x}")),
                'X' => ("0X", format!("{size:X}")),
                _ => ("", size.to_string()),
            };
            let least = spec.precision.unwrap_or(0);
            let digits = format!("{digits:0>least$}");
            let prefix = if spec.alternate { prefix } else { "" };
            Ok(numeric(n < 0, prefix, &digits, spec))
        }
        _ => {
            let Some(x) = value.as_float() else {
                return fail(format!("must be real number, not {}", value.type_name()));
            };
            let digits = float_digits(x.abs(), kind, spec.precision.unwrap_or(6), spec.alternate);
            Ok(numeric(
                x.is_sign_negative() && !x.is_nan(),
                "",
                &digits,
                spec,
            ))
        }
    }
}

/// A value as text, or as one character.
fn as_text(value: &Value, kind: char, spec: Spec) -> R<String> {
    match kind {
        's' | 'r' | 'a' => {
            let text = match kind {
                's' => repr::text(value)?.to_string(),
                'r' => repr::repr(value)?,
                _ => crate::format::ascii(&repr::repr(value)?),
            };
            let kept = match spec.precision {
                Some(most) => text.chars().take(most).collect(),
                None => text,
            };
            let align = Some(spec.align.unwrap_or('>'));
            Ok(spec_padded(
                &kept,
                Spec {
                    align,
                    zero: false,
                    ..spec
                },
            ))
        }
        _ => {
            let c = match (value.as_str(), value.as_int()) {
                (Some(text), _) if text.chars().count() == 1 => text.to_owned(),
                (None, Some(n)) => match u32::try_from(n).ok().and_then(char::from_u32) {
                    Some(c) => c.to_string(),
                    None => return fail("%c arg not in range(0x110000)"),
                },
                _ => return fail("%c requires int or char"),
            };
            let align = Some(spec.align.unwrap_or('>'));
            Ok(spec_padded(
                &c,
                Spec {
                    align,
                    zero: false,
                    ..spec
                },
            ))
        }
    }
}

fn numeric(is_negative: bool, prefix: &str, digits: &str, spec: Spec) -> String {
    let sign = match (is_negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    };
    let used = sign.len() + prefix.len() + digits.chars().count();
    if spec.zero && spec.align.is_none() {
        let zeros = "0".repeat(spec.width.saturating_sub(used));
        return format!("{sign}{prefix}{zeros}{digits}");
    }
    let align = Some(spec.align.unwrap_or('>'));
    spec_padded(&format!("{sign}{prefix}{digits}"), Spec { align, ..spec })
}

fn spec_padded(text: &str, spec: Spec) -> String {
    spec.padded(text, '>')
}
