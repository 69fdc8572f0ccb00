//! The one place where the engine's thread reads the time.
//!
//! Decisions get the time as an argument. Code that measures how long its own work takes reads this
//! clock.

use std::time::Instant;

/// The system's monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Clock;

impl Clock {
    /// The time now.
    pub(crate) fn now(self) -> Instant {
        Instant::now()
    }
}
