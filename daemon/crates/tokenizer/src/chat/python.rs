//! What templates expect of Python and of `transformers` beyond Jinja:
//! functions, filters and tests.

use std::fmt;

use jiff::Zoned;
use jiff::fmt::strtime;
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::globals;

use super::protect::Marks;
use super::{json, lists, source};

/// What a template says through `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_function(
        "raise_exception",
        |message: Value| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, "raise_exception");
            Err(error.with_source(Raised(message.to_string())))
        },
    );
    environment.add_function("strftime_now", |format: String| strftime(&format, &now()));
    environment.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    environment.add_function("joiner", globals::joiner);
    environment.add_function(source::LIST_FUNCTION, lists::changing);
    environment.add_filter("tojson", json::to_json);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter(source::PERCENT_FILTER, percent);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("string", |value: &Value| match float_text(value) {
        Some(text) => Value::from(text),
        None if value.kind() == ValueKind::String => value.clone(),
        None => Value::from(value.to_string()),
    });
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    // What has a length and can be indexed: strings and dicts too.
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined
        )
    });
    environment.add_test("callable", |value: &Value| match value.kind() {
        ValueKind::Plain => true,
        // A macro is a map of what is known about it.
        ValueKind::Map => {
            let has = |name| value.get_attr(name).is_ok_and(|attr| !attr.is_undefined());
            has("caller") && has("arguments") && value.to_string().starts_with("<macro ")
        }
        _ => false,
    });
}

/// The length; 0 for what is undefined, as in Jinja.
fn length(value: &Value) -> Result<usize, Error> {
    let counted = || value.try_iter().ok().map(Iterator::count);
    match (value.kind(), value.len()) {
        (ValueKind::Undefined, _) => Ok(0),
        (_, Some(len)) => Ok(len),
        (ValueKind::Iterable, None) => Ok(counted().unwrap_or(0)),
        (kind, None) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a value of type {kind} has no length"),
        )),
    }
}

/// HTML in the spellings of Python's MarkupSafe. Nothing else escapes. Jinja also does where a text
/// is added to one that is `|safe`, with or without escaping by itself; the one known template that
/// comes to that, of Functionary 3.1, does not mean it: its authors' prompts have plain quotes.
fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let marks = Marks::in_force();
    let text = float_text(value).unwrap_or_else(|| value.to_string());
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match marks.meant(c).flatten().unwrap_or(c) {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    Value::from_safe_string(out)
}

/// `text % value`; a tuple holds several values.
fn percent(text: &str, value: &Value) -> Result<String, Error> {
    if value.is_tuple() {
        let values: Vec<Value> = value.try_iter()?.collect();
        format(FormatStyle::Printf, text, &values)
    } else {
        format(FormatStyle::Printf, text, std::slice::from_ref(value))
    }
}

/// The text of a floating-point value as Python writes it; `None` for others.
pub(super) fn float_text(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    f64::try_from(value.clone()).ok().map(float)
}

/// Python's `repr` of a float: the shortest digits that give it back, with an
/// exponent below 1e-4 and from 1e16.
pub(super) fn float(value: f64) -> String {
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

/// Now, in UTC: where the daemon runs is no secret for templates to tell.
fn now() -> Zoned {
    jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC)
}

/// C's `strftime`. Conversions that are not known are kept as they are written.
fn strftime(format: &str, time: &Zoned) -> Result<String, Error> {
    let config = strtime::Config::new().lenient(true);
    strtime::BrokenDownTime::from(time)
        .to_string_with_config(&config, format)
        .map_err(|error| {
            let error = format!("strftime_now({format:?}): {error}");
            Error::new(ErrorKind::InvalidOperation, error)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64, format: &str) -> String {
        let time = jiff::Timestamp::from_second(seconds).unwrap();
        strftime(format, &time.to_zoned(jiff::tz::TimeZone::UTC)).unwrap()
    }

    #[test]
    fn dates_of_known_seconds() {
        // From date -u -d @N.
        assert_eq!(at(0, "%d %b %Y"), "01 Jan 1970");
        assert_eq!(
            at(951_782_399, "%A %F %T %p"),
            "Monday 2000-02-28 23:59:59 PM"
        );
        assert_eq!(
            at(1_709_164_800, "%-d %B %Y, %I:%M"),
            "29 February 2024, 12:00"
        );
        assert_eq!(at(4_107_542_399, "%y%m%d %H%% %"), "000228 23% %");
        assert_eq!(at(1_709_164_800, "%j %U %e"), "060 08 29");
    }

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
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
