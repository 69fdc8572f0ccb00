//! Gives host memory back while the machine is short of memory.
//!
//! ```text
//!            stalled >= the bound               stalled < half of it, for a while
//!   calm --------------------> a step of the host's ------------------------------> a step may be
//!                              memory goes back                                     taken again
//! ```
//!
//! The system counts for how long work stood still for want of memory
//! ([`Stalls`](rocmforge_device::Stalls)). The count is read every two seconds, between passes or
//! while there is no work; its growth divided by the time is the share. It is not read while the
//! daemon holds no such memory, so that an idle daemon sleeps. KV pages and states are given back
//! before weights, the least recently used first.
//!
//! Memory that may be taken again is allocated when it is needed, not before. If the machine is
//! short of memory soon after that, the daemon itself may be the cause, and the next step waits
//! twice as long.
//!
//! *Invariant:* the limit never falls below an eighth of the host budget, so that running models
//! stay usable, if slowly, and never exceeds the budget
//! (`what_stays_is_between_an_eighth_and_all`).

use std::time::{Duration, Instant};

use crate::api::HostPressureStatus;
use crate::api::config::HostPressure;

/// The limit stays at one part in this many of the host budget, whatever other programs want.
const FLOOR_PART: u64 = 8;
/// The limit changes by one part in this many of the host budget at a time.
const STEP_PART: u64 = 8;
/// Maximum change of the limit at a time, in bytes: unpinning this much takes a part of a second,
/// in which the engine does nothing else.
const STEP_MAX_BYTES: u64 = 2 << 30;
/// Memory pressure counts as over when it is below the configured share divided by this.
const CALM_PART: f64 = 2.0;
/// Maximum wait before the limit grows by a step, as a multiple of the configured calm time. A
/// shortage later than this after a growth is not attributed to the daemon.
const PATIENCE_MAX: u32 = 60;
/// A reading that is late by more than this many intervals is not used: it says nothing about now.
const LATE: u32 = 30;

/// The current limit of host memory, and the readings that led to it.
#[derive(Debug)]
pub(crate) struct PressureWatch {
    config: HostPressure,
    /// Host budget in bytes, without memory pressure.
    budget: u64,
    /// Host budget in bytes now.
    limit: u64,
    /// Whether the system has no counts of stalls.
    is_blind: bool,
    /// Time and values of the last reading of the counts.
    seen: Option<(Instant, Vec<Option<u64>>)>,
    /// Start of the present time without memory pressure.
    calm_since: Option<Instant>,
    /// Time of the last growth of the host budget, unless it shrank since.
    grown_at: Option<Instant>,
    /// How long there must be no memory pressure before the budget grows.
    patience: Duration,
    shrinks: u64,
    grows: u64,
}

/// Result of a reading of the counts of stalls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Look {
    /// Share of the time during which tasks waited for memory, in percent.
    pub(crate) stalled: f64,
    pub(crate) change: Change,
}

/// A change of the host budget, to this number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    Shrink(u64),
    Grow(u64),
}

/// The largest growth of a stall counter as a percentage of `time`; `None` if no counter could be
/// read.
fn stalled(before: &[Option<u64>], now: &[Option<u64>], time: Duration) -> Option<f64> {
    let grown = before.iter().zip(now);
    let grown = grown.filter_map(|(before, now)| (*now)?.checked_sub((*before)?));
    let most = grown.max()? as f64 / 1e6;
    Some((most / time.as_secs_f64() * 100.0).min(100.0))
}

impl PressureWatch {
    /// A watch over a host budget of `budget` bytes.
    pub(crate) fn new(config: HostPressure, budget: u64) -> Self {
        let is_blind = config.stalls.read().iter().all(Option::is_none);
        if is_blind {
            tracing::info!(
                target: "memory",
                files = ?config.stalls.files(),
                "the system does not count waits for memory: none of the host's goes back when it is short"
            );
        }
        Self {
            patience: config.calm,
            config,
            budget,
            limit: budget,
            is_blind,
            seen: None,
            calm_since: None,
            grown_at: None,
            shrinks: 0,
            grows: 0,
        }
    }

    /// Interval of checks while the host holds `held` bytes; `None` for no checks.
    pub(crate) fn interval(&self, held: u64) -> Option<Duration> {
        let matters = held > self.floor() || (held > 0 && self.limit < self.budget);
        (matters && !self.is_blind).then_some(self.config.every)
    }

    pub(crate) fn status(&self, held: u64) -> HostPressureStatus {
        HostPressureStatus {
            percent: self.config.percent,
            is_blind: self.is_blind,
            held_bytes: held,
            given_up_bytes: self.budget - self.limit,
            shrinks: self.shrinks,
            grows: self.grows,
        }
    }

    fn floor(&self) -> u64 {
        whole(self.budget / FLOOR_PART)
    }

    fn step(&self) -> u64 {
        whole(self.budget / STEP_PART).clamp(rocmforge_device::ALIGNMENT, STEP_MAX_BYTES)
    }

    /// Reads the counts of stalls if a reading is due.
    pub(crate) fn look(&mut self, held: u64, now: Instant) -> Option<Look> {
        let Some(every) = self.interval(held) else {
            self.seen = None;
            self.calm_since = None;
            // All that there was is gone with who had it: what comes next is given up anew, if need
            // be.
            let whole = held == 0 && self.limit < self.budget;
            return whole.then(|| self.changed(0.0, Change::Grow(self.budget)));
        };
        let since = self.seen.as_ref().map(|(at, _)| now.duration_since(*at));
        if since.is_some_and(|since| since < every) {
            return None;
        }
        let counts = self.config.stalls.read();
        let (before, counted) = self.seen.replace((now, counts))?;
        let since = now.duration_since(before);
        if since > every * LATE {
            self.calm_since = None;
            return None;
        }
        let counts = &self.seen.as_ref()?.1;
        let stalled = stalled(&counted, counts, since)?;
        let change = self.change(stalled, held, (before, now));
        (change != Change::None).then(|| self.changed(stalled, change))
    }

    fn changed(&mut self, stalled: f64, change: Change) -> Look {
        match change {
            Change::None => {}
            Change::Shrink(limit) => {
                self.limit = limit;
                self.shrinks += 1;
            }
            Change::Grow(limit) => {
                self.limit = limit;
                self.grows += 1;
            }
        }
        Look { stalled, change }
    }

    /// The change that a share of stalled time between the readings `before` and `now` calls for,
    /// while the engine holds `held` bytes of host memory.
    fn change(&mut self, stalled: f64, held: u64, (before, now): (Instant, Instant)) -> Change {
        if stalled >= self.config.percent {
            self.calm_since = None;
            if let Some(grown) = self.grown_at.take() {
                let longest = self.config.calm * PATIENCE_MAX;
                self.patience = match now.duration_since(grown) < longest {
                    true => (self.patience * 2).min(longest),
                    false => self.config.calm,
                };
            }
            let limit = self.limit.min(held).saturating_sub(self.step());
            let limit = whole(limit).max(self.floor());
            return match limit < self.limit.min(held) {
                true => Change::Shrink(limit),
                false => Change::None,
            };
        }
        if stalled >= self.config.percent / CALM_PART || self.limit == self.budget {
            self.calm_since = None;
            return Change::None;
        }
        let since = *self.calm_since.get_or_insert(before);
        if now.duration_since(since) < self.patience {
            return Change::None;
        }
        self.calm_since = Some(now);
        self.grown_at = Some(now);
        Change::Grow((self.limit + self.step()).min(self.budget))
    }
}

/// Rounds bytes down to whole units of allocation.
fn whole(bytes: u64) -> u64 {
    bytes & !(rocmforge_device::ALIGNMENT - 1)
}

#[cfg(test)]
mod tests {
    use rocmforge_device::Stalls;

    use super::*;

    const MIB: u64 = 1 << 20;
    const ALL: u64 = 128 * MIB;
    const STEP: u64 = 16 * MIB;

    /// Of 128 MiB, with counts in no file.
    fn watch() -> PressureWatch {
        let mut watch = PressureWatch::new(HostPressure::default(), ALL);
        watch.is_blind = false;
        watch
    }

    /// Looks every two seconds.
    struct Looks {
        watch: PressureWatch,
        now: Instant,
    }

    impl Looks {
        fn new() -> Self {
            Self {
                watch: watch(),
                now: Instant::now(),
            }
        }

        /// The next look, at so many percent.
        fn at(&mut self, stalled: f64, held: u64) -> Change {
            let before = self.now;
            self.now += Duration::from_secs(2);
            let change = self.watch.change(stalled, held, (before, self.now));
            self.watch.changed(stalled, change);
            change
        }

        /// Looks at no pressure until something comes of one; how many seconds that took.
        fn calm(&mut self, held: u64) -> (u64, Change) {
            for looks in 1..10_000 {
                match self.at(0.0, held) {
                    Change::None => {}
                    change => return (2 * looks, change),
                }
            }
            panic!("nothing was taken again: {:?}", self.watch)
        }
    }

    #[test]
    fn a_share_is_the_larger_one_of_what_both_counts_grew_by() {
        let share = |before: &[Option<u64>], now: &[Option<u64>]| {
            stalled(before, now, Duration::from_secs(2))
        };
        assert_eq!(share(&[Some(5), None], &[Some(5), None]), Some(0.0));
        let now = [Some(200_000), Some(1_000_100)];
        assert_eq!(share(&[Some(0), Some(100)], &now), Some(50.0));
        assert_eq!(share(&[Some(0), None], &now), Some(10.0));
        // Anew after the group was, or read while it changed.
        assert_eq!(share(&[Some(300_000), Some(100)], &now), Some(50.0));
        assert_eq!(share(&[Some(300_000)], &now), None);
        assert_eq!(share(&[None, None], &now), None);
        assert_eq!(share(&[], &[]), None);
        assert_eq!(share(&[Some(0)], &[Some(u64::MAX)]), Some(100.0));
    }

    #[test]
    fn a_step_goes_at_each_look_under_pressure_and_comes_back_after_calm() {
        let mut looks = Looks::new();
        assert_eq!(looks.at(9.9, ALL), Change::None);
        assert_eq!(looks.at(10.0, ALL), Change::Shrink(ALL - STEP));
        assert_eq!(looks.at(80.0, ALL - STEP), Change::Shrink(ALL - 2 * STEP));
        let held = ALL - 2 * STEP;
        // Between the bounds nothing happens, however long.
        for _ in 0..100 {
            assert_eq!(looks.at(7.0, held), Change::None);
        }
        assert_eq!(looks.calm(held), (10, Change::Grow(ALL - STEP)));
        // What ends the calm begins it anew.
        assert_eq!(looks.at(0.0, held), Change::None);
        assert_eq!(looks.at(6.0, held), Change::None);
        assert_eq!(looks.calm(held), (10, Change::Grow(ALL)));
        for _ in 0..100 {
            assert_eq!(looks.at(0.0, held), Change::None, "there is no more");
        }
        let status = looks.watch.status(held);
        assert_eq!((status.shrinks, status.grows), (2, 2));
        assert_eq!(status.given_up_bytes, 0);
    }

    #[test]
    fn what_goes_is_of_what_is_held() {
        let mut looks = Looks::new();
        assert_eq!(looks.at(50.0, 40 * MIB), Change::Shrink(24 * MIB));
        // Less than a step above what stays.
        assert_eq!(looks.at(50.0, 20 * MIB), Change::Shrink(16 * MIB));
        assert_eq!(looks.at(50.0, 16 * MIB), Change::None);
        assert_eq!(looks.at(50.0, MIB), Change::None);
        assert_eq!(looks.at(50.0, 0), Change::None);
    }

    #[test]
    fn who_takes_memory_again_too_soon_waits_longer_the_next_time() {
        let mut looks = Looks::new();
        looks.at(50.0, ALL);
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(looks.calm(ALL).0);
            // Two steps under the same pressure count as one.
            looks.at(50.0, ALL);
            looks.at(50.0, ALL);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600, 600, 600]);
        // Pressure that comes long after is not of our making.
        looks.calm(ALL);
        for _ in 0..301 {
            looks.at(6.0, ALL);
        }
        looks.at(50.0, ALL);
        assert_eq!(looks.calm(ALL).0, 10);
    }

    #[test]
    fn what_stays_is_between_an_eighth_and_all() {
        use rand::rngs::StdRng;
        use rand::{RngExt, SeedableRng};
        let mut rng = StdRng::seed_from_u64(5);
        for budget in [0, 256, 3000, 10 * MIB + 77, ALL, 1 << 40] {
            let mut looks = Looks::new();
            looks.watch.budget = budget;
            looks.watch.limit = budget;
            let mut lowest = budget;
            for _ in 0..5_000 {
                let held = match looks.watch.limit {
                    0 => 0,
                    most => rng.random_range(0..=most),
                };
                let stalled = [0.0, 0.0, 0.0, 7.0, 10.0, 100.0][rng.random_range(0..6)];
                let before = looks.watch.limit;
                let change = looks.at(stalled, held);
                let limit = looks.watch.limit;
                assert!(
                    (budget / 8 / 256 * 256..=budget).contains(&limit),
                    "{limit}"
                );
                match change {
                    Change::None => assert_eq!(limit, before),
                    Change::Shrink(_) => assert!(limit < held && stalled >= 10.0),
                    Change::Grow(_) => assert!(limit > before && stalled < 5.0),
                }
                lowest = lowest.min(limit);
            }
            assert!(budget < 256 * 8 || lowest < budget, "nothing ever went");
        }
    }

    #[test]
    fn nothing_is_looked_at_where_nothing_can_go_or_come() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory");
        let count = |us: u64| std::fs::write(&file, format!("some total={us}\n")).unwrap();
        count(0);
        let mut watch = PressureWatch::new(
            HostPressure {
                stalls: Stalls::at(vec![file.clone()]),
                ..HostPressure::default()
            },
            ALL,
        );
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert_eq!(watch.interval(0), None);
        assert_eq!(watch.interval(16 * MIB), None, "that stays");
        let every = Duration::from_secs(2);
        assert_eq!(watch.interval(17 * MIB), Some(every));
        // The first look has nothing to compare with.
        count(10_000_000);
        assert_eq!(watch.look(ALL, at(0)), None);
        count(20_000_000);
        assert_eq!(watch.look(ALL, at(1)), None, "too soon");
        let look = watch.look(ALL, at(2)).unwrap();
        assert_eq!(look.change, Change::Shrink(ALL - STEP));
        assert_eq!(watch.interval(MIB), Some(every), "some can come back");
        // A look that comes much too late compares with nothing either.
        count(900_000_000);
        assert_eq!(watch.look(ALL, at(100)), None);
        assert_eq!(watch.look(ALL, at(102)), None, "no growth");
        // A count that goes away says nothing.
        std::fs::remove_file(&file).unwrap();
        assert_eq!(watch.look(ALL, at(104)), None);
        // What nobody holds any more is not given up.
        assert_eq!(watch.interval(0), None);
        let look = watch.look(0, at(105)).unwrap();
        assert_eq!((look.change, watch.limit), (Change::Grow(ALL), ALL));
        assert_eq!(watch.look(0, at(106)), None);
    }

    #[test]
    fn a_system_that_counts_nothing_is_told_and_left_alone() {
        let config = HostPressure {
            stalls: Stalls::at(vec!["/nonexistent/memory".into()]),
            ..HostPressure::default()
        };
        let mut watch = PressureWatch::new(config, ALL);
        assert!(watch.status(ALL).is_blind);
        assert_eq!(watch.interval(ALL), None);
        assert_eq!(watch.look(ALL, Instant::now()), None);
    }
}
