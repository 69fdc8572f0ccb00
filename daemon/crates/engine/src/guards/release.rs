//! The device's memory, given back while there are no requests: after a time, or at once by a
//! command. The next request takes it again.

use std::time::{Duration, Instant};

use crate::api::IdleRelease;

/// How long until a failed closing of the device is tried again; doubled each time up to a maximum.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const AGAIN_DOUBLED_MAX: u32 = 10;
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(600);

/// Whether the device's memory is released, and when it will be.
#[derive(Debug)]
pub(crate) struct MemoryRelease {
    config: IdleRelease,
    /// Time of the last work on the device.
    worked: Instant,
    /// The budget before the release, while memory is released.
    before: Option<u64>,
    /// Time of the next attempt to close the device, and the number of failed ones; `None` if none
    /// is due.
    again: Option<(Instant, u32)>,
    count: u64,
}

impl MemoryRelease {
    pub(crate) fn new(config: IdleRelease, now: Instant) -> Self {
        Self {
            config,
            worked: now,
            before: None,
            again: None,
            count: 0,
        }
    }

    /// Sets the configuration from now on.
    pub(crate) fn configure(&mut self, config: IdleRelease) {
        self.config = config;
    }

    /// Whether host memory is given back as well.
    pub(crate) fn takes_host(&self) -> bool {
        self.config.host
    }

    /// Records that there is work at `now`, or was until now.
    pub(crate) fn note_work(&mut self, now: Instant) {
        self.worked = now;
    }

    /// How long there has been no work at `now`.
    pub(crate) fn idle_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.worked)
    }

    /// How long until the device's memory has to be released; `None` if it will not be, or is
    /// already.
    ///
    /// While it is released: how long until the next attempt to close the device.
    pub(crate) fn due_in(&self, now: Instant) -> Option<Duration> {
        if let (Some(_), Some((at, _))) = (self.before, self.again) {
            return Some(at.saturating_duration_since(now));
        }
        let after = self.config.after.filter(|_| self.before.is_none())?;
        Some((self.worked + after).saturating_duration_since(now))
    }

    /// Records that memory was released, and the budget before; also for a repeated release.
    pub(crate) fn released(&mut self, before: u64) {
        if self.before.is_none() {
            self.before = Some(before);
            self.count += 1;
        }
    }

    /// Records that the device could not be closed; closing is tried again, later each time.
    pub(crate) fn close_failed(&mut self, now: Instant) {
        let tries = self.again.map_or(0, |(_, tries)| tries + 1);
        let pause = (AGAIN_AFTER * (1 << tries.min(AGAIN_DOUBLED_MAX))).min(AGAIN_AFTER_MAX);
        self.again = Some((now + pause, tries));
    }

    /// Records that the device is closed, or stays open for pinned weights.
    pub(crate) fn close_ended(&mut self) {
        self.again = None;
    }

    /// Takes the budget to restore, so that the memory no longer counts as released.
    pub(crate) fn take_before(&mut self) -> Option<u64> {
        self.again = None;
        self.before.take()
    }

    /// The budget that the next request restores; `None` if memory is not released.
    pub(crate) fn before(&self) -> Option<u64> {
        self.before
    }

    /// Number of releases so far.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    #[test]
    fn a_device_that_cannot_be_closed_is_closed_later_and_later() {
        let s = Duration::from_secs;
        let begun = Clock.now();
        let never = IdleRelease {
            after: None,
            host: false,
        };
        let mut release = MemoryRelease::new(never, begun);
        release.released(7);
        assert_eq!(release.due_in(begun), None);
        for (tries, pause) in [1, 2, 4, 8, 16].into_iter().enumerate() {
            release.close_failed(begun);
            assert_eq!(release.due_in(begun), Some(s(pause)), "{tries}");
        }
        (0..40).for_each(|_| release.close_failed(begun));
        assert_eq!(release.due_in(begun), Some(AGAIN_AFTER_MAX));
        release.close_ended();
        assert_eq!(release.due_in(begun), None);
        release.close_failed(begun);
        assert_eq!(release.due_in(begun), Some(s(1)));
        // Whoever uses it ends that.
        release.take_before();
        release.released(7);
        assert_eq!(release.due_in(begun), None);
    }

    #[test]
    fn it_is_due_once_behind_the_last_work() {
        let s = Duration::from_secs;
        let begun = Clock.now();
        let after = |after| IdleRelease { after, host: false };
        let mut release = MemoryRelease::new(after(Some(s(60))), begun);
        assert_eq!(release.due_in(begun + s(10)), Some(s(50)));
        release.note_work(begun + s(30));
        assert_eq!(release.due_in(begun + s(40)), Some(s(50)));
        assert_eq!(release.due_in(begun + s(95)), Some(Duration::ZERO));
        release.released(7);
        release.released(3);
        assert_eq!(release.due_in(begun + s(99)), None);
        assert_eq!((release.before(), release.count()), (Some(7), 1));
        assert_eq!(release.take_before(), Some(7));
        assert_eq!((release.take_before(), release.count()), (None, 1));
        assert_eq!(release.due_in(begun + s(99)), Some(Duration::ZERO));
        release.configure(after(None));
        assert_eq!(release.due_in(begun + s(1_000_000)), None);
    }
}
