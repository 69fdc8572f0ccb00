//! `str.format`, and Python's formats of numbers and texts.

mod fields;

use crate::fault::{R, fail};
use crate::repr;
use crate::value::Value;

pub(crate) use fields::{format, format_map};

/// Columns that a field may be filled to.
const WIDTH_MAX: usize = 1 << 20;

/// How a value is formatted: what stands behind the colon.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    pub(crate) fill: char,
    pub(crate) align: Option<char>,
    /// `-`, `+` or a space.
    pub(crate) sign: Option<char>,
    pub(crate) alternate: bool,
    pub(crate) zero: bool,
    pub(crate) width: usize,
    pub(crate) grouping: Option<char>,
    pub(crate) precision: Option<usize>,
    pub(crate) kind: Option<char>,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            fill: ' ',
            align: None,
            sign: None,
            alternate: false,
            zero: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: None,
        }
    }
}

impl Spec {
    fn of(text: &str) -> R<Spec> {
        let mut spec = Spec::default();
        let mut rest = text;
        let mut has_fill = false;
        let is_align = |c: Option<char>| c.filter(|c| "<>=^".contains(*c));
        let mut chars = rest.chars();
        let (first, second) = (chars.next(), chars.next());
        if let (Some(fill), Some(align)) = (first, is_align(second)) {
            (spec.fill, spec.align) = (fill, Some(align));
            has_fill = true;
            rest = &rest[fill.len_utf8() + 1..];
        } else if let Some(align) = is_align(first) {
            spec.align = Some(align);
            rest = &rest[1..];
        }
        if let Some(sign) = rest.chars().next().filter(|c| "+- ".contains(*c)) {
            spec.sign = Some(sign);
            rest = &rest[1..];
        }
        rest = rest.strip_prefix('z').unwrap_or(rest);
        if let Some(behind) = rest.strip_prefix('#') {
            spec.alternate = true;
            rest = behind;
        }
        if let Some(behind) = rest.strip_prefix('0') {
            spec.zero = true;
            spec.fill = if has_fill { spec.fill } else { '0' };
            rest = behind;
        }
        (spec.width, rest) = number(rest)?;
        if let Some(by) = rest.chars().next().filter(|c| ",_".contains(*c)) {
            spec.grouping = Some(by);
            rest = &rest[1..];
        }
        if let Some(behind) = rest.strip_prefix('.') {
            let (precision, behind) = match behind.starts_with(|c: char| c.is_ascii_digit()) {
                true => number(behind)?,
                false => return fail("Format specifier missing precision"),
            };
            (spec.precision, rest) = (Some(precision), behind);
        }
        let mut chars = rest.chars();
        spec.kind = chars.next();
        match chars.next() {
            Some(_) => fail(format!("Invalid format specifier '{text}'")),
            None => Ok(spec),
        }
    }

    /// The text within its columns.
    pub(crate) fn padded(self, text: &str, align: char) -> String {
        let pad = self.width.saturating_sub(text.chars().count());
        let fill = |n: usize| std::iter::repeat_n(self.fill, n).collect::<String>();
        match self.align.unwrap_or(align) {
            '<' => format!("{text}{}", fill(pad)),
            '^' => format!("{}{text}{}", fill(pad / 2), fill(pad - pad / 2)),
            _ => format!("{}{text}", fill(pad)),
        }
    }
}

fn number(text: &str) -> R<(usize, &str)> {
    let len = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(len);
    let n = if digits.is_empty() {
        Ok(0)
    } else {
        digits.parse()
    };
    match n {
        Ok(n) if n <= WIDTH_MAX => Ok((n, rest)),
        _ => fail("Too many decimal digits in format string"),
    }
}

/// `format(value, spec)`.
///
/// # Errors
///
/// If the specification does not fit the value.
pub(crate) fn formatted(value: &Value, spec: &str) -> R<String> {
    if spec.is_empty() {
        return Ok(repr::text(value)?.to_string());
    }
    let parsed = Spec::of(spec)?;
    match value {
        Value::Str(text) => of_text(&text.text, parsed),
        Value::Float(x) => of_float(*x, parsed),
        Value::Int(n) => of_int(*n, parsed),
        Value::Bool(b) => of_int(i128::from(*b), parsed),
        other => fail(format!(
            "unsupported format string passed to {}.__format__",
            other.type_name()
        )),
    }
}

fn of_text(text: &str, spec: Spec) -> R<String> {
    if let Some(kind) = spec.kind.filter(|kind| *kind != 's') {
        return unknown(kind, "str");
    }
    if spec.sign.is_some() {
        return fail("Sign not allowed in string format specifier");
    }
    if spec.alternate {
        return fail("Alternate form (#) not allowed in string format specifier");
    }
    if spec.align == Some('=') {
        return fail("'=' alignment not allowed in string format specifier");
    }
    if let Some(by) = spec.grouping {
        return fail(format!("Cannot specify '{by}' with 's'."));
    }
    let kept: String = match spec.precision {
        Some(most) => text.chars().take(most).collect(),
        None => text.to_owned(),
    };
    Ok(spec.padded(&kept, '<'))
}

fn unknown(kind: char, of: &str) -> R<String> {
    fail(format!(
        "Unknown format code '{kind}' for object of type '{of}'"
    ))
}

/// Groups of three have commas in decimal digits alone.
fn check_grouping(spec: Spec) -> R<()> {
    match (spec.grouping, spec.kind) {
        (Some(by @ ','), Some(kind @ ('b' | 'o' | 'x' | 'X' | 'c' | 'n')))
        | (Some(by @ '_'), Some(kind @ ('c' | 'n'))) => {
            fail(format!("Cannot specify '{by}' with '{kind}'."))
        }
        _ => Ok(()),
    }
}

fn of_int(n: i128, spec: Spec) -> R<String> {
    check_grouping(spec)?;
    let size = n.unsigned_abs();
    let (prefix, digits, group) = match spec.kind {
        None | Some('d' | 'n') => ("", size.to_string(), 3),
        Some('b') => ("0b", format!("{size:b}"), 4),
        Some('o') => ("0o", format!("{size:o}"), 4),
        Some('x') => ("0x", format!("{size:x}"), 4),
        Some('X') => ("0X", format!("{size:X}"), 4),
        Some('c') => {
            if spec.sign.is_some() {
                return fail("Sign not allowed with integer format specifier 'c'");
            }
            if spec.alternate {
                return fail("Alternate form (#) not allowed with integer format specifier 'c'");
            }
            let c = u32::try_from(n).ok().and_then(char::from_u32);
            return match c {
                Some(c) => Ok(spec.padded(&c.to_string(), '<')),
                None => fail("%c arg not in range(0x110000)"),
            };
        }
        Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => return of_float(n as f64, spec),
        Some(kind) => return unknown(kind, "int"),
    };
    if spec.precision.is_some() {
        return fail("Precision not allowed in integer format specifier");
    }
    let prefix = if spec.alternate { prefix } else { "" };
    Ok(signed(n < 0, prefix, &digits, "", spec, group))
}

fn of_float(x: f64, spec: Spec) -> R<String> {
    check_grouping(spec)?;
    let is_negative = x.is_sign_negative() && !x.is_nan();
    let size = x.abs();
    let text = match spec.kind {
        None => match spec.precision {
            None => with_alternate(repr::float(size), spec.alternate),
            Some(precision) => {
                let text = float_digits(size, 'g', precision.max(1), spec.alternate);
                let text = text.strip_suffix('.').unwrap_or(&text).to_owned();
                with_alternate(with_point(text, size, precision), spec.alternate)
            }
        },
        Some('n') => float_digits(size, 'g', spec.precision.unwrap_or(6), spec.alternate),
        Some('%') => {
            let digits = float_digits(
                size * 100.0,
                'f',
                spec.precision.unwrap_or(6),
                spec.alternate,
            );
            format!("{digits}%")
        }
        Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G')) => {
            float_digits(size, kind, spec.precision.unwrap_or(6), spec.alternate)
        }
        Some(kind) => return unknown(kind, "float"),
    };
    let whole = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(whole);
    Ok(signed(is_negative, "", digits, rest, spec, 3))
}

/// The alternate form has a point in any case: `1.e+22`.
fn with_alternate(text: String, alternate: bool) -> String {
    match text.split_once('e') {
        Some((digits, exponent)) if alternate && !digits.contains('.') => {
            format!("{digits}.e{exponent}")
        }
        _ => text,
    }
}

/// A float without a kind has a point, or an exponent, in any case.
fn with_point(text: String, size: f64, precision: usize) -> String {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text;
    }
    // The exponent comes one digit earlier than in 'g'.
    match text.len() >= precision.max(1) && (size >= 1.0 || size == 0.0) {
        true => float_digits(size, 'e', precision.max(1) - 1, false)
            .split_once('e')
            .map(|(digits, exponent)| {
                let digits = match digits.contains('.') {
                    true => digits.trim_end_matches('0').trim_end_matches('.'),
                    false => digits,
                };
                format!("{digits}e{exponent}")
            })
            .unwrap_or(text),
        false => format!("{text}.0"),
    }
}

/// Sign, prefix and digits in their columns, with separators of groups.
fn signed(
    is_negative: bool,
    prefix: &str,
    digits: &str,
    rest: &str,
    spec: Spec,
    group: usize,
) -> String {
    let sign = match (is_negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    };
    let beside = sign.len() + prefix.len() + rest.len();
    let zero_fills =
        spec.zero && spec.align.is_none() || spec.align == Some('=') && spec.fill == '0';
    let mut digits = digits.to_owned();
    if let Some(by) = spec.grouping {
        let least = if zero_fills {
            spec.width.saturating_sub(beside)
        } else {
            0
        };
        digits = grouped(&digits, by, group, least);
    } else if zero_fills {
        let least = spec.width.saturating_sub(beside);
        digits = format!("{digits:0>least$}");
    }
    if spec.align == Some('=') {
        let pad = spec.width.saturating_sub(beside + digits.len());
        let fill: String = std::iter::repeat_n(spec.fill, pad).collect();
        return format!("{sign}{prefix}{fill}{digits}{rest}");
    }
    spec.padded(&format!("{sign}{prefix}{digits}{rest}"), '>')
}

/// Digits with a separator between groups, filled with zeros to `least` columns.
fn grouped(digits: &str, by: char, group: usize, least: usize) -> String {
    let mut digits = digits.to_owned();
    let columns = |n: usize| n + n.saturating_sub(1) / group;
    while columns(digits.len()) < least {
        digits.insert(0, '0');
    }
    let mut out = String::new();
    for (at, c) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(group) {
            out.push(by);
        }
        out.push(c);
    }
    out
}

/// The digits of a number that is not negative, by C's `%e`, `%f` or `%g`.
pub(crate) fn float_digits(x: f64, kind: char, precision: usize, alternate: bool) -> String {
    if !x.is_finite() {
        let text = if x.is_nan() { "nan" } else { "inf" };
        return match kind.is_ascii_uppercase() {
            true => text.to_uppercase(),
            false => text.to_owned(),
        };
    }
    let text = match kind.to_ascii_lowercase() {
        'f' => {
            let text = format!("{x:.precision$}");
            if alternate && precision == 0 {
                format!("{text}.")
            } else {
                text
            }
        }
        'e' => exponential(x, precision, alternate),
        _ => general(x, precision.max(1), alternate),
    };
    match kind.is_ascii_uppercase() {
        true => text.to_uppercase(),
        false => text,
    }
}

fn exponential(x: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{x:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let point = if alternate && precision == 0 { "." } else { "" };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}{point}e{sign}{exponent:0>2}")
}

fn general(x: f64, precision: usize, alternate: bool) -> String {
    let rounded = exponential(x, precision - 1, false);
    let exponent: i64 = rounded
        .split_once('e')
        .and_then(|(_, exponent)| exponent.parse().ok())
        .unwrap_or(0);
    let trimmed = |text: &str| match text.contains('.') && !alternate {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= precision as i64 {
        let (digits, exponent) = rounded.split_once('e').unwrap_or((&rounded, "+00"));
        let point = if alternate && precision == 1 { "." } else { "" };
        return format!("{}{point}e{exponent}", trimmed(digits));
    }
    let decimals = (precision as i64 - 1 - exponent).max(0) as usize;
    let text = format!("{x:.decimals$}");
    let point = if alternate && decimals == 0 { "." } else { "" };
    format!("{}{point}", trimmed(&text))
}

/// The text with escapes for what is not ASCII.
pub(crate) fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match u32::from(c) {
            0..=0x7f => out.push(c),
            code @ 0x80..=0xff => out.push_str(&format!("\\x{code:02x}")),
            code @ 0x100..=0xffff => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}
