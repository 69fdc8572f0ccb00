//! Filters of numbers.

use std::borrow::Cow;

use unicode_general_category::{GeneralCategory, get_general_category};

use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::format::float_digits;
use crate::lexer::is_space;
use crate::value::Value;

/// Applies a filter of numbers.
pub(super) fn apply(name: &str, value: &Value, args: Args) -> R<Value> {
    match name {
        "abs" => {
            args.none(name)?;
            match (value, value.as_int()) {
                (Value::Float(x), _) => Ok(Value::Float(x.abs())),
                (_, Some(n)) => Ok(Value::Int(n.abs())),
                (Value::Undefined(why), _) => fail(&**why),
                _ => fail(format!(
                    "bad operand type for abs(): '{}'",
                    value.type_name()
                )),
            }
        }
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            let base = base.as_ref().map_or(Ok(10), args::int)?;
            Ok(match whole(value, base)? {
                Some(n) => Value::Int(n),
                None => default.unwrap_or(Value::Int(0)),
            })
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            Ok(match real(value)? {
                Some(x) => Value::Float(x),
                None => default.unwrap_or(Value::Float(0.0)),
            })
        }
        "round" => round(value, args),
        _ => {
            let [binary] = args.bind(name, ["binary"], 0)?;
            let Some(x) = real(value)? else {
                return fail("could not convert to float");
            };
            Ok(Value::from(file_size(x, args::flag(binary.as_ref()))))
        }
    }
}

/// `int(value)`, by way of a real number where that is needed.
fn whole(value: &Value, base: i128) -> R<Option<i128>> {
    if let Value::Undefined(why) = value {
        return fail(&**why);
    }
    if let Value::Str(text) = value {
        let radix = u32::try_from(base)
            .ok()
            .filter(|base| *base == 0 || (2..=36).contains(base));
        if let Some(n) = radix.and_then(|radix| parse_int(&text.text, radix)) {
            return Ok(Some(n));
        }
    } else if let Some(n) = value.as_int() {
        return Ok(Some(n));
    }
    if let Value::Float(x) = value
        && x.is_infinite()
    {
        return fail("cannot convert float infinity to integer");
    }
    match real(value)?.filter(|x| x.is_finite()) {
        Some(x) if x.abs() >= 1e38 => fail("a whole number takes more than 128 bits"),
        Some(x) => Ok(Some(x as i128)),
        None => Ok(None),
    }
}

/// The text with the digits of all scripts as those of ASCII, which Python reads as numbers.
fn with_digits(text: &str) -> Cow<'_, str> {
    match text.is_ascii() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(text.chars().map(|c| digit(c).unwrap_or(c)).collect()),
    }
}

/// The digit of ASCII that is meant by a digit of another script: their blocks have ten each.
fn digit(c: char) -> Option<char> {
    let is_digit = |c: char| get_general_category(c) == GeneralCategory::DecimalNumber;
    if !is_digit(c) {
        return None;
    }
    let mathematical = 0x1d7ce..=0x1d7ff_u32;
    let code = u32::from(c);
    if mathematical.contains(&code) {
        return char::from_digit((code - mathematical.start()) % 10, 10);
    }
    let behind = |n: u32| char::from_u32(code.wrapping_sub(n)).is_some_and(is_digit);
    let n = (1..10).take_while(|n| behind(*n)).count() as u32;
    char::from_digit(n, 10)
}

fn parse_int(text: &str, radix: u32) -> Option<i128> {
    let text = with_digits(text.trim_matches(is_space));
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(&text)),
    };
    let prefix = digits.get(..2).map(str::to_ascii_lowercase);
    let of_prefix = match prefix.as_deref() {
        Some("0b") => Some(2),
        Some("0o") => Some(8),
        Some("0x") => Some(16),
        _ => None,
    };
    let (digits, radix) = match of_prefix {
        Some(found) if radix == 0 || radix == found => {
            (digits[2..].strip_prefix('_').unwrap_or(&digits[2..]), found)
        }
        _ if radix == 0 => (digits, 10),
        _ => (digits, radix),
    };
    let is_apart = |text: &str| {
        text.is_empty()
            || text.starts_with(['_', '+', '-'])
            || text.ends_with('_')
            || text.contains("__")
    };
    if is_apart(digits) {
        return None;
    }
    let n = i128::from_str_radix(&digits.replace('_', ""), radix).ok()?;
    Some(if negative { -n } else { n })
}

/// `float(value)`.
fn real(value: &Value) -> R<Option<f64>> {
    match value {
        Value::Undefined(why) => fail(&**why),
        Value::Str(text) => {
            let text = with_digits(text.text.trim_matches(is_space));
            let apart = text.starts_with('_') || text.ends_with('_') || text.contains("__");
            let text = if apart { "" } else { &text }.replace('_', "");
            Ok(text.parse().ok())
        }
        other => Ok(other.as_float()),
    }
}

fn round(value: &Value, args: Args) -> R<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.as_ref().map_or(Ok(0), args::int)?;
    let method = match &method {
        None => "common",
        Some(method) => args::text(method)?,
    };
    if !matches!(method, "common" | "ceil" | "floor") {
        return fail("method must be common, ceil or floor");
    }
    if let Value::Undefined(why) = value {
        return fail(&**why);
    }
    let Some(x) = value.as_float() else {
        return fail(format!(
            "type {} doesn't define __round__ method",
            value.type_name()
        ));
    };
    if method != "common" {
        let power = 10_f64.powi(i32::try_from(precision).unwrap_or(0));
        let scaled = x * power;
        if !scaled.is_finite() {
            return fail(format!("cannot convert float {scaled} to integer"));
        }
        let moved = if method == "ceil" {
            scaled.ceil()
        } else {
            scaled.floor()
        };
        // A whole number has no zero below zero.
        return Ok(Value::Float((moved + 0.0) / power));
    }
    if let Some(n) = value.as_int() {
        return Ok(Value::Int(round_int(n, precision)));
    }
    Ok(Value::Float(round_float(x, precision)))
}

/// A whole number, to tens, hundreds and so on where the precision is negative.
fn round_int(n: i128, precision: i128) -> i128 {
    let Ok(zeros) = u32::try_from(-precision) else {
        return n;
    };
    let Some(unit) = 10_i128.checked_pow(zeros) else {
        return 0;
    };
    let (below, rest) = (n.div_euclid(unit) * unit, n.rem_euclid(unit));
    let is_up = match (rest * 2).cmp(&unit) {
        std::cmp::Ordering::Less => false,
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => (below / unit) % 2 != 0,
    };
    if is_up && zeros > 0 {
        below + unit
    } else {
        below
    }
}

fn round_float(x: f64, precision: i128) -> f64 {
    if !x.is_finite() {
        return x;
    }
    match usize::try_from(precision) {
        Ok(places) if places > 323 => x,
        // Digits are rounded as the number is, with halves to even ones.
        Ok(places) => format!("{x:.places$}").parse().unwrap_or(x),
        Err(_) if precision < -308 => 0.0_f64.copysign(x),
        Err(_) => {
            let power = 10_f64.powi(i32::try_from(-precision).unwrap_or(308));
            let scaled = x / power;
            let rounded = scaled.round_ties_even();
            rounded * power
        }
    }
}

fn file_size(x: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if x == 1.0 {
        return "1 Byte".to_owned();
    }
    if x < base {
        return format!("{} Bytes", x as i128);
    }
    let infix = if binary { "i" } else { "" };
    let prefixes = [
        if binary { "K" } else { "k" },
        "M",
        "G",
        "T",
        "P",
        "E",
        "Z",
        "Y",
    ];
    let mut unit = base;
    let mut shown = String::new();
    for prefix in prefixes {
        unit *= base;
        let size = base * x / unit;
        let is_negative = size.is_sign_negative() && !size.is_nan();
        let digits = float_digits(size.abs(), 'f', 1, false);
        shown = format!(
            "{}{digits} {prefix}{infix}B",
            if is_negative { "-" } else { "" }
        );
        if x < unit {
            break;
        }
    }
    shown
}
