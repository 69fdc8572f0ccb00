//! `strftime_now`: the time as templates write it.

use jiff::Zoned;
use jiff::fmt::strtime;

/// Now by a format of C's `strftime`, in UTC: where the daemon runs is no secret for templates to
/// tell.
pub(super) fn now(format: &str) -> Result<String, String> {
    strftime(
        format,
        &jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC),
    )
}

/// Python's `strftime` of a time without a zone, as transformers' `datetime.now()` is. Conversions
/// that are not known are kept as they are written.
fn strftime(format: &str, time: &Zoned) -> Result<String, String> {
    let config = strtime::Config::new().lenient(true);
    strtime::BrokenDownTime::from(time)
        .to_string_with_config(&config, translated(format, time))
        .map_err(|error| format!("strftime_now({format:?}): {error}"))
}

/// The format in the conversions that jiff has the same text for: those of the C locale and of
/// fractions are spelled out, a zone is nothing, and what Python does not know is no conversion.
fn translated(format: &str, time: &Zoned) -> String {
    let mut out = String::with_capacity(format.len());
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let behind = &rest[at + 1..];
        // Flags and a width, then what asks for another calendar, of which the C locale has none.
        let options = behind.find(|c: char| !"-_0^#123456789".contains(c));
        let (options, conversion) = behind.split_at(options.unwrap_or(behind.len()));
        let conversion = conversion.strip_prefix(['E', 'O']).unwrap_or(conversion);
        let Some(letter) = conversion.chars().next() else {
            out.push_str(&rest[at..].replace('%', "%%"));
            return out;
        };
        match letter {
            'c' => out.push_str("%a %b %e %H:%M:%S %Y"),
            'x' => out.push_str("%m/%d/%y"),
            'X' => out.push_str("%H:%M:%S"),
            'r' => out.push_str("%I:%M:%S %p"),
            'f' => out.push_str(&format!("{:06}", time.subsec_nanosecond() / 1000)),
            'z' | 'Z' => {}
            letter if "aAbBCdDeFgGhHIjklmMnpPRsStTuUVwWyY%".contains(letter) => {
                out.push('%');
                // In C `#` changes the case alone.
                out.push_str(&options.replace('#', ""));
                out.push(letter);
            }
            letter => {
                out.push_str("%%");
                out.push_str(&behind[..behind.len() - conversion.len()]);
                out.push(letter);
            }
        }
        rest = &conversion[letter.len_utf8()..];
    }
    out.push_str(rest);
    out
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
    fn conversions_are_those_of_python() {
        // From datetime(2026, 2, 3, 4, 5, 6).strftime, a time without a zone.
        for (format, text) in [
            ("%a %A %b %B %h", "Tue Tuesday Feb February Feb"),
            ("%c", "Tue Feb  3 04:05:06 2026"),
            ("%x %X %r %R", "02/03/26 04:05:06 04:05:06 AM 04:05"),
            ("%C %d %D %e %F", "20 03 02/03/26  3 2026-02-03"),
            ("%f %g %G %H %I %j", "000000 26 2026 04 04 034"),
            ("%k %l %m %M %p %P", " 4  4 02 05 AM am"),
            ("%s %S %T %u %U", "1770091506 06 04:05:06 2 05"),
            ("%V %w %W %y %Y", "06 2 05 26 2026"),
            ("[%z%Z][%n][%t][%%]", "[][\n][\t][%]"),
            ("%i %q %v %J %L %N %Q", "%i %q %v %J %L %N %Q"),
            ("%-d %-m %-I %-H %-j %_d", "3 2 4 4 34  3"),
            ("%#d %Ey %Od %5d %^a", "03 26 03 00003 TUE"),
            ("%\u{e9} 100%", "%\u{e9} 100%"),
        ] {
            assert_eq!(at(1_770_091_506, format), text, "{format}");
        }
    }
}
