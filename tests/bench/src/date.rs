//! The day of a measurement.

/// Today in UTC, as `2026-11-21`.
pub(crate) fn today() -> String {
    jiff::Timestamp::now().strftime("%F").to_string()
}
