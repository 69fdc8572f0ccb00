//! Times in the format of Ollama and Anthropic (RFC 3339).

use jiff::Timestamp;

/// Milliseconds since 1970 as RFC 3339, in UTC.
pub(in super::super) fn rfc3339(unix_ms: i64) -> String {
    let moment = Timestamp::from_millisecond(unix_ms);
    moment.unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

/// The time now, as RFC 3339.
pub(super) fn now() -> String {
    Timestamp::now().to_string()
}

/// The time after `time` from now, as RFC 3339.
pub(super) fn in_time(time: std::time::Duration) -> String {
    let then = Timestamp::now().checked_add(time);
    then.unwrap_or(Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_in_utc() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(rfc3339(i64::MAX), "1970-01-01T00:00:00Z");
    }
}
