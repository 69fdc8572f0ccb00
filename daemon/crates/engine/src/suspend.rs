//! Whether the machine slept: what the clock that counts sleep gained on the one that does not.
//!
//! After a sleep a card's memory may be gone although every call works. So the engine asks [`SleepClock::slept`] before it
//! works after a rest, and from time to time while it works, and has the device checked if it did.

use std::time::{Duration, Instant};

/// A gain above this is a sleep; below it the two clocks are only read at different moments.
const GAIN_MIN: Duration = Duration::from_millis(200);

/// While there is work, the clocks are compared at most this often.
const PERIOD: Duration = Duration::from_secs(1);

/// Reads both clocks: time with sleep counted, and without.
type ReadClocks = Box<dyn FnMut() -> (Duration, Duration) + Send>;

/// The two clocks.
pub(crate) struct SleepClock {
    read: ReadClocks,
    /// What the clock that counts sleep was ahead when it was looked at last.
    ahead: Duration,
    looked_at: Instant,
}

impl SleepClock {
    /// The system's clocks.
    pub(crate) fn system() -> Self {
        Self::reading(Box::new(|| {
            let read = |clock| {
                let time = nix::time::clock_gettime(clock).map(Duration::from);
                time.unwrap_or_default()
            };
            // In this order: a delay in between makes a gain smaller, never larger.
            let with_sleep = read(nix::time::ClockId::CLOCK_BOOTTIME);
            (with_sleep, read(nix::time::ClockId::CLOCK_MONOTONIC))
        }))
    }

    fn reading(mut read: ReadClocks) -> Self {
        let (with_sleep, without) = read();
        Self {
            read,
            ahead: with_sleep.saturating_sub(without),
            looked_at: Instant::now(),
        }
    }

    /// How long the machine slept since the last look, if it did. `always` looks even if the last look is only a moment
    /// ago.
    pub(crate) fn slept(&mut self, always: bool) -> Option<Duration> {
        if !always && self.looked_at.elapsed() < PERIOD {
            return None;
        }
        self.looked_at = Instant::now();
        let (with_sleep, without) = (self.read)();
        let ahead = with_sleep.saturating_sub(without);
        let gain = ahead.saturating_sub(self.ahead);
        if gain < GAIN_MIN {
            return None;
        }
        self.ahead = ahead;
        Some(gain)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A clock that has been told what to read, in milliseconds.
    fn clock(readings: &[(u64, u64)]) -> SleepClock {
        let mut readings: VecDeque<_> = readings.iter().copied().collect();
        SleepClock::reading(Box::new(move || {
            let (with_sleep, without) = readings.pop_front().expect("a reading is left");
            (
                Duration::from_millis(with_sleep),
                Duration::from_millis(without),
            )
        }))
    }

    #[test]
    fn a_jump_is_told_once_and_with_its_length() {
        let mut clock = clock(&[
            (10_000, 7_000),
            (11_000, 8_000),
            (3_612_000, 9_000),
            (3_613_000, 10_000),
            (3_614_500, 11_000),
        ]);
        assert_eq!(clock.slept(true), None);
        assert_eq!(clock.slept(true), Some(Duration::from_secs(3600)));
        assert_eq!(clock.slept(true), None);
        assert_eq!(clock.slept(true), Some(Duration::from_millis(500)));
    }

    #[test]
    fn reading_the_clocks_one_after_the_other_is_no_sleep() {
        // A preempted reader sees the second clock later, or an earlier reading was the late one.
        let mut clock = clock(&[(1_000, 1_050), (2_000, 2_000), (3_000, 3_090), (4_000, 3_900)]);
        for _ in 0..3 {
            assert_eq!(clock.slept(true), None);
        }
    }

    #[test]
    fn many_small_gains_add_up_to_a_sleep() {
        let readings: Vec<(u64, u64)> = (0..10).map(|i| (1_000 + i * 100, 1_000)).collect();
        let mut clock = clock(&readings);
        let told = (0..9).filter_map(|_| clock.slept(true)).count();
        assert!(told > 0);
    }

    #[test]
    fn work_looks_only_now_and_then() {
        let mut clock = clock(&[(0, 0), (5_000, 0)]);
        assert_eq!(clock.slept(false), None);
        assert_eq!(clock.slept(true), Some(Duration::from_secs(5)));
    }

    #[test]
    fn the_systems_clocks_run_together_here() {
        let mut clock = SleepClock::system();
        assert_eq!(clock.slept(true), None);
    }
}
