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

/// C's `strftime`. Conversions that are not known are kept as they are written.
fn strftime(format: &str, time: &Zoned) -> Result<String, String> {
    let config = strtime::Config::new().lenient(true);
    strtime::BrokenDownTime::from(time)
        .to_string_with_config(&config, format)
        .map_err(|error| format!("strftime_now({format:?}): {error}"))
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
}
