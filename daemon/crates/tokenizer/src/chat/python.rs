//! What templates expect of Python and of `transformers` beyond Jinja.

use std::fmt;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

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
        |message: String| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, "raise_exception");
            Err(error.with_source(Raised(message)))
        },
    );
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        strftime(&format, now.map_or(0, |since| since.as_secs()))
    });
    environment.add_filter("tojson", to_json);
}

/// `json.dumps` with `ensure_ascii=False`: `", "` and `": "` between items
/// unless indented.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Others of json.dumps' options are accepted, as templates pass them.
    let _: (Option<bool>, Option<Value>, Option<bool>) = (
        options.get("ensure_ascii")?,
        options.get("separators")?,
        options.get("sort_keys")?,
    );
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "cannot serialize to JSON").with_source(error)
    };
    match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, pretty);
            value.serialize(&mut serializer).map_err(failed)?;
        }
        None => {
            let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, OneLine);
            value.serialize(&mut serializer).map_err(failed)?;
        }
    }
    Ok(Value::from(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Python's spacing of JSON on one line.
struct OneLine;

impl serde_json::ser::Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

/// `{% generation %}` and `{% endgeneration %}` mark the assistant's part for
/// training and print their body; `if true` does the same.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let Some(close) = rest.find("%}") else {
            break;
        };
        let inner = &rest[..close];
        let replaced = match inner.trim_matches(['-', '+', ' ', '\t', '\n', '\r']) {
            "generation" => inner.replace("generation", "if true"),
            "endgeneration" => inner.replace("endgeneration", "endif"),
            _ => continue,
        };
        out.push_str(&replaced);
        rest = &rest[close..];
    }
    out.push_str(rest);
    out
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// C's `strftime` for `seconds` since 1970 in UTC: the conversions that
/// templates use. Others are kept as they are written.
fn strftime(format: &str, seconds: u64) -> String {
    let days = seconds / 86_400;
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // %-d is glibc's %d without padding.
        let (padded, conversion) = match chars.next() {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        let two = |n: u64| {
            if padded {
                format!("{n:02}")
            } else {
                n.to_string()
            }
        };
        let text = match conversion {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

/// Year, month and day of a day since 1970-01-01 (Gregorian; the algorithm of
/// H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468; // days since 0000-03-01
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_known_seconds() {
        // From date -u -d @N.
        assert_eq!(strftime("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(
            strftime("%A %F %T %p", 951_782_399),
            "Monday 2000-02-28 23:59:59 PM"
        );
        assert_eq!(
            strftime("%-d %B %Y, %I:%M", 1_709_164_800),
            "29 February 2024, 12:00"
        );
        assert_eq!(
            strftime("%y%m%d %H%% %q %", 4_107_542_399),
            "000228 23% %q %"
        );
    }

    #[test]
    fn generation_tags_become_true_conditions() {
        assert_eq!(
            without_generation_tags(
                "{% if a %}{%- generation -%}x{% endgeneration %}{{ generation }}{% endif %}"
            ),
            "{% if a %}{%- if true -%}x{% endif %}{{ generation }}{% endif %}"
        );
        assert_eq!(without_generation_tags("a {% b"), "a {% b");
    }
}
