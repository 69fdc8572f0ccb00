//! Decides when memory is given up because another process uses the GPU, and when it is taken
//! again.
//!
//! ```text
//!          another process grows, or is busy for a while
//!   alone -----------------------------------------------> yielding
//!     ^                                                      |
//!     +---- it has gone, or has done nothing for long -------+
//! ```
//!
//! A desktop holds memory all the time, and shows a window now and then. So growth counts from the
//! lowest that others held within the last minutes, and a busy share once it has lasted. The level
//! stays what it was while memory is given up: an idle process that has not exited has to be idle
//! for long before it counts as a part of the desktop.
//!
//! This is a value: its methods are given the observations and the time.

use std::time::{Duration, Instant};

use rocmforge_gpu_driver::others::OthersUse;

use crate::api::config::YieldTo;
use crate::api::error::Error;
use crate::api::{Budget, YieldStatus};

/// Other processes count as using the GPU once they hold one part in this many of its memory more
/// than before, within bounds: a compute context takes that much, a window of a desktop does not.
const GROWTH_PART: u64 = 512;
const GROWTH_MIN_BYTES: u64 = 128 << 20;
const GROWTH_MAX_BYTES: u64 = 256 << 20;
/// Factor on the growth that counts if the observed memory may include this process's own.
const INEXACT: u64 = 4;
/// GPU utilization in percent from which on other processes count as busy, if it lasts.
const BUSY_PERCENT: u32 = 20;
const BUSY_FOR: Duration = Duration::from_millis(500);
/// Change of the bytes of other processes from which their number is published again.
const NEWS_BYTES: u64 = 16 << 20;
/// How long a refused amount of memory is not requested again.
const REFUSAL_LASTS: Duration = Duration::from_secs(1);
/// How long the lowest memory use counts as the level from which growth is measured.
const LEVEL_LASTS: Duration = Duration::from_secs(60);

/// The lowest memory use of other processes within the last one to two times [`LEVEL_LASTS`].
#[derive(Debug, Clone, Copy)]
struct Level {
    now: u64,
    before: u64,
    since: Instant,
}

impl Level {
    fn new(bytes: u64, since: Instant) -> Self {
        Self {
            now: bytes,
            before: bytes,
            since,
        }
    }

    fn lowest(&self) -> u64 {
        self.now.min(self.before)
    }

    fn note(&mut self, bytes: u64, at: Instant) {
        if at.saturating_duration_since(self.since) >= LEVEL_LASTS {
            (self.before, self.now, self.since) = (self.now, bytes, at);
        }
        self.now = self.now.min(bytes);
    }
}

/// Observations of other processes while memory is given up for them.
#[derive(Debug, Clone, Copy)]
struct Yielding {
    /// Time since which other processes have used as little as before they came.
    gone_since: Option<Instant>,
    /// Time since which other processes have been idle, and the bytes that they held then.
    quiet_since: Option<(Instant, u64)>,
    /// The budget to restore, in bytes.
    before: u64,
    /// Whether other processes were busy at the last observation; kept while observing fails.
    was_busy: bool,
}

/// What the engine is to do about other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The budget stays as it is.
    Stay,
    /// Memory is to be given up, for this reason.
    Begin(Reason),
    /// The budget may grow again.
    End,
}

/// Why memory is given up to other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Other processes hold this many bytes more than before.
    Growth(u64),
    /// Other processes keep the GPU busy for this share of the time, in percent.
    Busy(u32),
}

/// State of `yield_to`: decides when memory is given up for other processes.
#[derive(Debug)]
pub(crate) struct YieldGuard {
    /// The size in bytes that the budget shrinks to.
    to: u64,
    growth: u64,
    calm: Duration,
    quiet: Duration,
    level: Option<Level>,
    busy_since: Option<Instant>,
    yielding: Option<Yielding>,
    seen: OthersUse,
    /// Bytes held by others when they were last published.
    told: u64,
    count: u64,
    /// A budget in bytes that the driver refused while memory was given up, and when.
    refused: Option<(u64, Instant)>,
}

impl YieldGuard {
    /// The guard for a device with `memory` bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a budget that is not below the memory.
    pub(crate) fn new(config: &YieldTo, memory: u64) -> Result<Self, Error> {
        let to = match config.to {
            Budget::Bytes(bytes) => bytes,
            Budget::Percent(percent) => (memory as f64 * percent / 100.0) as u64,
        };
        if to >= memory {
            return Err(Error::InvalidArgument {
                field: "yield_to",
                message: format!(
                    "{to} bytes are all of the device's {memory}, and nothing is given up; say what is to be kept, or 0"
                ),
            });
        }
        Ok(Self {
            to,
            growth: (memory / GROWTH_PART).clamp(GROWTH_MIN_BYTES, GROWTH_MAX_BYTES),
            calm: config.calm,
            quiet: config.quiet,
            level: None,
            busy_since: None,
            yielding: None,
            seen: OthersUse::default(),
            told: 0,
            count: 0,
            refused: None,
        })
    }

    /// The size in bytes that the budget shrinks to; 0 if the device is closed instead.
    pub(crate) fn to(&self) -> u64 {
        self.to
    }

    /// The budget to restore, in bytes, while memory is given up; else `None`.
    pub(crate) fn before(&self) -> Option<u64> {
        self.yielding.map(|yielding| yielding.before)
    }

    /// Records that the budget was set while memory is given up: it is restored later instead of
    /// the earlier one.
    pub(crate) fn budget_was_set(&mut self, bytes: u64) {
        if let Some(yielding) = &mut self.yielding {
            yielding.before = bytes;
        }
    }

    /// Notes that the driver refused a budget of `bytes` while memory is given up.
    pub(crate) fn was_refused(&mut self, bytes: u64, now: Instant) {
        self.refused = Some((bytes, now));
    }

    /// Whether a budget of `bytes` may be requested now: after a refusal not for [`REFUSAL_LASTS`].
    pub(crate) fn may_take(&self, bytes: u64, now: Instant) -> bool {
        let is_refused = |(refused, at): (u64, Instant)| {
            bytes >= refused && now.saturating_duration_since(at) < REFUSAL_LASTS
        };
        !self.refused.is_some_and(is_refused)
    }

    pub(crate) fn status(&self) -> YieldStatus {
        YieldStatus {
            to_bytes: self.to,
            others_bytes: self.seen.bytes,
            is_yielding: self.yielding.is_some(),
            count: self.count,
        }
    }

    /// Whether what others hold differs from what was published last.
    pub(crate) fn is_news(&mut self) -> bool {
        let is_news = self.seen.bytes.abs_diff(self.told) >= NEWS_BYTES;
        if is_news {
            self.told = self.seen.bytes;
        }
        is_news
    }

    /// Takes what other processes use now (`None` if unknown) and decides whether to give memory
    /// up. `budget` is restored afterwards.
    pub(crate) fn see(&mut self, seen: Option<OthersUse>, budget: u64, now: Instant) -> Turn {
        let lowest = self.level.map_or(0, |level| level.lowest());
        // Who cannot be seen counts as gone.
        let seen = seen.unwrap_or(OthersUse {
            bytes: lowest,
            is_exact: true,
            busy_percent: Some(0),
        });
        self.seen = seen;
        let growth = match seen.is_exact {
            true => self.growth,
            false => self.growth * INEXACT,
        };
        match self.yielding {
            Some(yielding) => self.see_on(yielding, seen, growth, now),
            None => self.see_alone(seen, growth, budget, now),
        }
    }

    fn see_alone(&mut self, seen: OthersUse, growth: u64, budget: u64, now: Instant) -> Turn {
        let level = self.level.get_or_insert(Level::new(seen.bytes, now));
        let grown = seen.bytes.saturating_sub(level.lowest());
        let busy = seen.busy_percent.filter(|busy| *busy >= BUSY_PERCENT);
        let busy_for = match busy {
            Some(_) => now.saturating_duration_since(*self.busy_since.get_or_insert(now)),
            None => {
                self.busy_since = None;
                Duration::ZERO
            }
        };
        let reason = match busy {
            _ if grown >= growth => Reason::Growth(grown),
            Some(percent) if busy_for >= BUSY_FOR => Reason::Busy(percent),
            _ => {
                level.note(seen.bytes, now);
                return Turn::Stay;
            }
        };
        self.busy_since = None;
        self.count += 1;
        self.yielding = Some(Yielding {
            gone_since: None,
            quiet_since: None,
            before: budget,
            was_busy: matches!(reason, Reason::Busy(_)),
        });
        Turn::Begin(reason)
    }

    fn see_on(&mut self, was: Yielding, seen: OthersUse, growth: u64, now: Instant) -> Turn {
        let lowest = self.level.map_or(0, |level| level.lowest());
        let rests = match seen.busy_percent {
            Some(busy) => busy < BUSY_PERCENT / 2,
            None => !was.was_busy,
        };
        let is_gone = rests && seen.bytes < lowest + growth / 2;
        let gone_since = is_gone.then(|| was.gone_since.unwrap_or(now));
        let quiet = was.quiet_since.unwrap_or((now, seen.bytes));
        let is_quiet = rests && seen.busy_percent.is_some() && seen.bytes < quiet.1 + growth;
        let quiet_since = is_quiet.then_some(quiet);
        let lasted = |since: Instant| now.saturating_duration_since(since);
        if gone_since.is_some_and(|since| lasted(since) >= self.calm) {
            self.yielding = None;
            return Turn::End;
        }
        if quiet_since.is_some_and(|(since, _)| lasted(since) >= self.quiet) {
            // What they hold is theirs from now on, as a desktop's is.
            self.level = Some(Level::new(seen.bytes, now));
            self.yielding = None;
            return Turn::End;
        }
        self.yielding = Some(Yielding {
            gone_since,
            quiet_since,
            ..was
        });
        Turn::Stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    const MIB: u64 = 1 << 20;
    const BUDGET: u64 = 20 << 30;

    /// Of a card with 24 GiB: 128 MiB are growth.
    fn guard() -> YieldGuard {
        let config = YieldTo::new(Budget::Percent(10.0));
        YieldGuard::new(&config, 24 << 30).unwrap()
    }

    fn holds(mib: u64, busy: u32) -> Option<OthersUse> {
        Some(OthersUse {
            bytes: mib * MIB,
            is_exact: true,
            busy_percent: Some(busy),
        })
    }

    fn unknown(mib: u64) -> Option<OthersUse> {
        let seen = holds(mib, 0)?;
        Some(OthersUse {
            busy_percent: None,
            ..seen
        })
    }

    /// Milliseconds, what is seen, and what is to be done then.
    fn goes(guard: &mut YieldGuard, start: Instant, looks: &[(u64, Option<OthersUse>, Turn)]) {
        for &(ms, seen, turn) in looks {
            let at = start + Duration::from_millis(ms);
            assert_eq!(guard.see(seen, BUDGET, at), turn, "at {ms}: {seen:?}");
        }
    }

    const GROWN: fn(u64) -> Turn = |mib| Turn::Begin(Reason::Growth(mib * MIB));

    #[test]
    fn a_process_that_comes_is_yielded_to_at_once_until_it_has_gone_for_a_while() {
        let (mut guard, start) = (guard(), Clock.now());
        assert_eq!(guard.to(), (24 << 30) / 10);
        goes(
            &mut guard,
            start,
            &[
                (0, holds(400, 3), Turn::Stay),
                (100, holds(500, 3), Turn::Stay),
                (200, holds(528, 3), GROWN(128)),
                (300, holds(8000, 90), Turn::Stay),
                // Half of the growth is near enough to nothing, once it has lasted.
                (60_000, holds(463, 9), Turn::Stay),
                (64_900, holds(463, 9), Turn::Stay),
                (64_950, holds(465, 9), Turn::Stay),
                (65_000, holds(400, 0), Turn::Stay),
                (69_950, holds(400, 0), Turn::Stay),
                (70_000, holds(400, 0), Turn::End),
                (70_100, holds(527, 0), Turn::Stay),
                (70_200, holds(528, 0), GROWN(128)),
            ],
        );
        assert_eq!((guard.before(), guard.status().count), (Some(BUDGET), 2));
        guard.budget_was_set(7);
        assert_eq!(guard.before(), Some(7));
    }

    #[test]
    fn a_busy_process_is_yielded_to_once_that_has_lasted() {
        let (mut guard, start) = (guard(), Clock.now());
        goes(
            &mut guard,
            start,
            &[
                (0, holds(900, 80), Turn::Stay),
                (400, holds(900, 80), Turn::Stay),
                (450, holds(900, 19), Turn::Stay),
                (500, holds(900, 20), Turn::Stay),
                (950, holds(900, 60), Turn::Stay),
                (1000, holds(900, 60), Turn::Begin(Reason::Busy(60))),
                // Less busy is busy still, down to the half, and also where nobody says.
                (2000, unknown(900), Turn::Stay),
                (8000, unknown(900), Turn::Stay),
                (9000, holds(900, 10), Turn::Stay),
                (9100, holds(900, 9), Turn::Stay),
                (14_100, holds(900, 9), Turn::End),
            ],
        );
    }

    #[test]
    fn a_desktop_that_grows_little_by_little_is_no_reason() {
        let (mut guard, start) = (guard(), Clock.now());
        for minute in 0..100 {
            let seen = holds(400 + minute * 50, 5);
            let at = start + Duration::from_secs(minute * 60);
            assert_eq!(guard.see(seen, BUDGET, at), Turn::Stay, "minute {minute}");
        }
        // What it gives back lowers the level at once.
        let at = start + Duration::from_secs(6000);
        assert_eq!(guard.see(holds(1000, 0), BUDGET, at), Turn::Stay);
        assert_eq!(guard.see(holds(1128, 0), BUDGET, at), GROWN(128));
    }

    #[test]
    fn a_process_that_stays_and_does_nothing_for_long_keeps_what_it_has() {
        let (mut guard, start) = (guard(), Clock.now());
        goes(
            &mut guard,
            start,
            &[
                (0, holds(0, 0), Turn::Stay),
                (100, holds(6000, 0), GROWN(6000)),
                (1000, holds(6000, 0), Turn::Stay),
                (300_000, holds(6100, 9), Turn::Stay),
                // It was busy once more.
                (300_900, holds(6100, 10), Turn::Stay),
                (301_000, holds(6100, 0), Turn::Stay),
                (600_999, holds(6100, 0), Turn::Stay),
                (601_000, holds(6100, 0), Turn::End),
                (601_100, holds(6200, 0), Turn::Stay),
                (601_200, holds(6228, 0), GROWN(128)),
            ],
        );
        // Where nobody says how busy they are, they have to go.
        for s in [700, 100_000] {
            let at = start + Duration::from_secs(s);
            assert_eq!(guard.see(unknown(6300), BUDGET, at), Turn::Stay);
        }
    }

    #[test]
    fn what_may_be_ours_has_to_grow_more_and_what_nobody_sees_is_gone() {
        let (mut guard, start) = (guard(), Clock.now());
        let counted = |mib: u64| {
            Some(OthersUse {
                bytes: mib * MIB,
                is_exact: false,
                busy_percent: None,
            })
        };
        goes(
            &mut guard,
            start,
            &[
                (0, None, Turn::Stay),
                (100, counted(400), Turn::Stay),
                (200, counted(511), Turn::Stay),
                (300, counted(512), GROWN(512)),
                (400, None, Turn::Stay),
                (5400, None, Turn::End),
            ],
        );
    }

    #[test]
    fn what_was_refused_is_not_asked_for_again_at_once() {
        let (mut guard, start) = (guard(), Clock.now());
        let at = |ms| start + Duration::from_millis(ms);
        assert!(guard.may_take(BUDGET, at(0)));
        guard.was_refused(1000, at(0));
        for (ms, bytes, may) in [
            (999, 1000, false),
            (999, 1001, false),
            (999, 999, true),
            (1000, 1000, true),
        ] {
            assert_eq!(guard.may_take(bytes, at(ms)), may, "{bytes} at {ms}");
        }
    }

    #[test]
    fn what_is_kept_is_less_than_all() {
        let of = |to| YieldGuard::new(&YieldTo::new(to), 24 << 30);
        assert!(of(Budget::Bytes(24 << 30)).is_err());
        assert!(of(Budget::Percent(100.0)).is_err());
        assert_eq!(of(Budget::Bytes(0)).unwrap().to(), 0);
    }
}
