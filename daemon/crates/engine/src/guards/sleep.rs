//! Detects that the machine slept: the clock that counts sleep has gained on the one that does not.
//!
//! After a sleep a GPU's memory may be lost although every call works. So the engine asks before
//! every step and after every rest, which costs two readings of a clock, and has the device checked
//! if the machine slept.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A gain above this is a sleep; below it the two clocks are only read at different moments.
const GAIN_MIN: Duration = Duration::from_millis(200);

/// The readings of two clocks, one that counts time asleep and one that does not: the system's, or
/// a test's.
#[derive(Clone)]
pub struct Clocks(Arc<dyn Fn() -> (Duration, Duration) + Send + Sync>);

impl Clocks {
    /// Clocks whose readings come from `read`.
    pub fn reading(read: impl Fn() -> (Duration, Duration) + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }
}

impl Default for Clocks {
    fn default() -> Self {
        Self::reading(|| {
            let read = |clock| {
                let time = nix::time::clock_gettime(clock).map(Duration::from);
                time.unwrap_or_default()
            };
            // A delay between the two at worst asks for a check that finds nothing wrong.
            let with_sleep = read(nix::time::ClockId::CLOCK_BOOTTIME);
            (with_sleep, read(nix::time::ClockId::CLOCK_MONOTONIC))
        })
    }
}

impl fmt::Debug for Clocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clocks")
    }
}

/// Detects that the machine slept.
#[derive(Debug)]
pub(crate) struct SleepClock {
    clocks: Clocks,
    /// How far the clock that counts sleep was ahead when sleep was last detected.
    ahead: Duration,
}

impl SleepClock {
    pub(crate) fn new(clocks: Clocks) -> Self {
        let ahead = ahead(&clocks);
        Self { clocks, ahead }
    }

    /// How long the machine slept since the last call; `None` if it did not.
    pub(crate) fn slept(&mut self) -> Option<Duration> {
        let ahead = ahead(&self.clocks);
        let gain = ahead.saturating_sub(self.ahead);
        if gain < GAIN_MIN {
            return None;
        }
        self.ahead = ahead;
        Some(gain)
    }
}

fn ahead(clocks: &Clocks) -> Duration {
    let (with_sleep, without) = (clocks.0)();
    with_sleep.saturating_sub(without)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use super::*;

    /// A clock that has been told what to read, in milliseconds.
    fn clock(readings: &[(u64, u64)]) -> SleepClock {
        let readings: VecDeque<_> = readings.iter().copied().collect();
        let readings = Mutex::new(readings);
        SleepClock::new(Clocks::reading(move || {
            let next = readings.lock().unwrap().pop_front();
            let (with_sleep, without) = next.expect("a reading is left");
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
        assert_eq!(clock.slept(), None);
        assert_eq!(clock.slept(), Some(Duration::from_secs(3600)));
        assert_eq!(clock.slept(), None);
        assert_eq!(clock.slept(), Some(Duration::from_millis(500)));
    }

    #[test]
    fn reading_the_clocks_one_after_the_other_is_no_sleep() {
        // A preempted reader sees the second clock later, or an earlier reading was the late one.
        let mut clock = clock(&[
            (1_000, 1_050),
            (2_000, 2_000),
            (3_000, 3_090),
            (4_000, 3_900),
        ]);
        for _ in 0..3 {
            assert_eq!(clock.slept(), None);
        }
    }

    #[test]
    fn many_small_gains_add_up_to_a_sleep() {
        let readings: Vec<(u64, u64)> = (0..10).map(|i| (1_000 + i * 100, 1_000)).collect();
        let mut clock = clock(&readings);
        let told = (0..9).filter_map(|_| clock.slept()).count();
        assert!(told > 0);
    }

    #[test]
    fn the_systems_clocks_run_together_here() {
        let mut clock = SleepClock::new(Clocks::default());
        assert_eq!(clock.slept(), None);
    }
}
