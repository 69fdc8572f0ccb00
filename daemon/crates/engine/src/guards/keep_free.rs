//! Keeps GPU memory free for other programs.
//!
//! ```text
//!          free < kept                        free > kept + margin, for a while
//!   calm ----------------> the budget shrinks ---------------------------------> it grows again,
//!                          by what is missing                                    by what is free
//!                                                                                beyond
//! ```
//!
//! The driver's count of free bytes is looked at between passes, ten times a second while there is
//! work, and once a second while there is none; a query queues nothing on the device. The budget
//! shrinks as if a client had set it: segments are evicted, and chunks of the arena are returned to
//! the driver; running work keeps what it needs. When others have left, the budget grows by what
//! was given up, and no more.
//!
//! Memory that other processes held when the daemon took its own at the start counts as given up
//! then, also where nothing is kept free: a predecessor whose memory the driver had not taken back
//! yet, or a game, does not cut the budget for good. Where a driver counts nothing, or refuses what
//! its count says is free, growing is tried at longer and longer intervals.
//!
//! *Invariant:* the budget never falls below an eighth of what it would be, so that models stay
//! usable, if slowly (test `an_eighth_of_the_budget_stays`).

use std::time::{Duration, Instant};

use crate::api::error::Error;
use crate::api::{Budget, KeepFreeStatus};
use crate::guards::budget::BUDGET_MIN;

/// Time between two checks of free memory while there is work.
pub(crate) const WHILE_BUSY: Duration = Duration::from_millis(100);
/// Time between two checks of free memory while there is no work.
pub(crate) const WHILE_IDLE: Duration = Duration::from_secs(1);
/// How long memory has to be free before the budget grows again.
const CALM: Duration = Duration::from_secs(5);
/// Maximum wait before the next attempt to grow the budget after the driver refused memory.
const PAUSE_MAX: Duration = Duration::from_secs(600);
/// Number of refusals in a row after which the next attempt does not become later and smaller any
/// more.
const REFUSALS_MAX: u32 = 7;
/// Before the budget grows, one part in this many of the memory to keep free has to be free in
/// addition.
const MARGIN_PART: u64 = 4;
/// The budget changes in steps of one part in this many of the device's memory, within bounds. The
/// arena's chunks are as large, so that they are returned whole: a chunk that is cut has to be
/// replaced by a smaller one, for which there may be no memory.
const STEP_PART: u64 = 64;
const STEP_MIN_BYTES: u64 = 16 << 20;
const STEP_MAX_BYTES: u64 = 1 << 30;
/// Granularity in bytes in which drivers map memory.
const GRANULE_BYTES: u64 = 2 << 20;
/// At least one part in this many of the budget stays, whatever other programs want.
const FLOOR_PART: u64 = 8;

/// State of `keep_free`: the bytes to keep free, and by how much the budget was reduced.
#[derive(Debug)]
pub(crate) struct KeepFree {
    /// Bytes of device memory to keep free; 0 for none.
    bytes: u64,
    /// Once it was changed, the budget is a multiple of this many bytes.
    step: u64,
    looked_at: Instant,
    /// Time since which enough GPU memory is free to grow the budget.
    calm_since: Option<Instant>,
    /// Bytes by which the budget is reduced now for other programs.
    given_up: u64,
    /// Number of times in a row that the driver refused memory for a larger budget.
    refusals: u32,
    /// Time before which the budget does not grow again.
    pause_until: Option<Instant>,
    /// Bytes that have to stay free when the budget grows, if more than `bytes`.
    left: u64,
    shrinks: u64,
    grows: u64,
}

/// Change of the budget that follows from a count of free bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The budget shrinks by this many bytes.
    Shrink(u64),
    /// The budget grows by this many bytes.
    Grow(u64),
}

impl KeepFree {
    /// The guard for a device with `memory` bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `kept` is all of the memory or more.
    pub(crate) fn new(kept: Option<Budget>, memory: u64, now: Instant) -> Result<Self, Error> {
        let bytes = match kept {
            None => 0,
            Some(Budget::Bytes(bytes)) => bytes,
            Some(Budget::Percent(percent)) => (memory as f64 * percent / 100.0) as u64,
        };
        if bytes >= memory {
            return Err(Error::InvalidArgument {
                field: "keep_free",
                message: format!(
                    "keep_free of {bytes} bytes leaves nothing of the device's {memory} bytes; set a smaller value"
                ),
            });
        }
        Ok(Self {
            bytes,
            step: (memory / STEP_PART)
                .clamp(STEP_MIN_BYTES, STEP_MAX_BYTES)
                .next_multiple_of(GRANULE_BYTES),
            looked_at: now,
            calm_since: None,
            given_up: 0,
            refusals: 0,
            pause_until: None,
            left: 0,
            shrinks: 0,
            grows: 0,
        })
    }

    /// Whether any memory has to be kept free.
    pub(crate) fn is_on(&self) -> bool {
        self.bytes > 0
    }

    /// Whether the count of free bytes may change the budget.
    pub(crate) fn watches(&self) -> bool {
        self.is_on() || self.given_up > 0
    }

    pub(crate) fn status(&self) -> Option<KeepFreeStatus> {
        self.watches().then_some(KeepFreeStatus {
            bytes: self.bytes,
            given_up_bytes: self.given_up,
            shrinks: self.shrinks,
            grows: self.grows,
        })
    }

    /// Bytes of device memory to keep free; 0 for none.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records that the budget was set by a command or at start. It would be `withheld` bytes
    /// larger if other programs left, and grows by that once more than `left` bytes are free.
    pub(crate) fn budget_was_set(&mut self, withheld: u64, left: u64) {
        self.given_up = if self.is_on() { withheld } else { 0 };
        self.left = left;
        self.calm_since = None;
        self.refusals = 0;
        self.pause_until = None;
    }

    /// Records that other processes held memory when the budget was allocated, which is `bytes`
    /// smaller until they leave.
    pub(crate) fn budget_was_cut(&mut self, bytes: u64) {
        self.given_up += bytes;
    }

    /// Whether the count of free bytes has to be read now, if that is done every `every`.
    pub(crate) fn is_due(&mut self, now: Instant, every: Duration) -> bool {
        let is_due = self.watches() && now.saturating_duration_since(self.looked_at) >= every;
        if is_due {
            self.looked_at = now;
        }
        is_due
    }

    /// Records that the budget was changed by this change.
    pub(crate) fn was_changed(&mut self, change: Change) {
        match change {
            Change::None => return,
            Change::Shrink(by) => {
                self.given_up += by;
                self.shrinks += 1;
            }
            Change::Grow(by) => {
                self.given_up -= by;
                self.grows += 1;
            }
        }
        self.calm_since = None;
        self.refusals = 0;
    }

    /// Records that the driver refused memory for a larger budget. Returns whether that is
    /// the first refusal since the budget last changed or was set.
    pub(crate) fn was_refused(&mut self, now: Instant) -> bool {
        let pause = (CALM * (1 << self.refusals)).min(PAUSE_MAX);
        self.pause_until = Some(now + pause);
        self.calm_since = None;
        self.refusals = (self.refusals + 1).min(REFUSALS_MAX);
        self.refusals == 1
    }

    /// The largest budget up to `wanted` bytes that leaves enough memory free; `free` bytes are
    /// free with the present budget of `budget` bytes.
    pub(crate) fn most(&self, free: u64, budget: u64, wanted: u64) -> u64 {
        if !self.is_on() {
            return wanted;
        }
        let most = (budget + free).saturating_sub(self.bytes);
        wanted.min(most.max(self.floor(wanted)))
    }

    /// The part of a budget, in bytes, that stays whatever other programs want.
    fn floor(&self, budget: u64) -> u64 {
        let floor = (budget + self.given_up) / FLOOR_PART;
        floor.max(BUDGET_MIN).next_multiple_of(self.step)
    }

    /// The change of the budget that a count of `free` bytes calls for.
    pub(crate) fn change(&mut self, free: u64, budget: u64, now: Instant) -> Change {
        if free < self.bytes {
            self.calm_since = None;
            let floor = self.floor(budget);
            let left = budget.saturating_sub(self.bytes - free);
            let left = (left / self.step * self.step).max(floor);
            return match left < budget {
                true => Change::Shrink(budget - left),
                false => Change::None,
            };
        }
        let beyond = free.saturating_sub(self.bytes.max(self.left));
        let beyond = beyond.saturating_sub(self.bytes / MARGIN_PART);
        // What the driver refuses although it counts it as free.
        let beyond = beyond.saturating_sub(u64::from(self.refusals) * self.step);
        if self.pause_until.is_some_and(|until| now < until) {
            return Change::None;
        }
        let more = match beyond >= self.given_up {
            true => self.given_up,
            false => ((budget + beyond) / self.step * self.step).saturating_sub(budget),
        };
        if more == 0 {
            self.calm_since = None;
            return Change::None;
        }
        let since = *self.calm_since.get_or_insert(now);
        match now.duration_since(since) >= CALM {
            true => Change::Grow(more),
            false => Change::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn keeping(bytes: u64) -> KeepFree {
        KeepFree::new(Some(Budget::Bytes(bytes)), 1024 * MIB, Instant::now()).unwrap()
    }

    #[test]
    fn what_is_missing_goes_and_comes_back_when_it_was_free_for_a_while() {
        let mut kept = keeping(64 * MIB);
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert_eq!(kept.change(64 * MIB, 512 * MIB, at(0)), Change::None);
        // By whole steps.
        let change = kept.change(24 * MIB, 512 * MIB, at(1));
        assert_eq!(change, Change::Shrink(48 * MIB));
        kept.given_up = 48 * MIB;
        // Within the margin nothing comes back, however long.
        assert_eq!(kept.change(80 * MIB, 464 * MIB, at(2)), Change::None);
        assert_eq!(kept.change(80 * MIB, 464 * MIB, at(20)), Change::None);
        // Beyond it, after a while of calm, which a want in between ends.
        let beyond = 104 * MIB;
        assert_eq!(kept.change(beyond, 464 * MIB, at(21)), Change::None);
        let change = kept.change(63 * MIB, 464 * MIB, at(22));
        assert_eq!(change, Change::Shrink(16 * MIB));
        assert_eq!(kept.change(beyond, 464 * MIB, at(23)), Change::None);
        assert_eq!(kept.change(beyond, 464 * MIB, at(27)), Change::None);
        let change = kept.change(beyond, 464 * MIB, at(28));
        assert_eq!(change, Change::Grow(16 * MIB));
        // Never more than was given up.
        let change = kept.change(900 * MIB, 464 * MIB, at(40));
        assert_eq!(change, Change::Grow(48 * MIB));
    }

    /// Once a share of what was free grew to nearly all of it after seconds, though nobody had
    /// left.
    #[test]
    fn a_share_of_what_is_free_grows_only_as_others_leave() {
        let mut kept = keeping(16 * MIB);
        kept.budget_was_set(512 * MIB, 128 * MIB);
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        for s in [0, 60] {
            assert_eq!(kept.change(128 * MIB, 256 * MIB, at(s)), Change::None);
        }
        assert_eq!(kept.change(340 * MIB, 256 * MIB, at(61)), Change::None);
        let grown = kept.change(340 * MIB, 256 * MIB, at(70));
        assert_eq!(grown, Change::Grow(208 * MIB));
        // Others may take what was left, down to what is kept free.
        assert_eq!(kept.change(16 * MIB, 256 * MIB, at(71)), Change::None);
    }

    /// Once a budget that was cut at the start stayed so for good.
    #[test]
    fn a_cut_at_the_start_comes_back_as_others_leave_where_nothing_is_kept_free() {
        let mut kept = KeepFree::new(None, 1024 * MIB, Instant::now()).unwrap();
        assert!(!kept.watches() && kept.status().is_none());
        kept.budget_was_set(0, 0);
        kept.budget_was_cut(700 * MIB);
        assert_eq!(kept.status().unwrap().given_up_bytes, 700 * MIB);
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert_eq!(kept.change(8 * MIB, 100 * MIB, at(0)), Change::None);
        assert_eq!(kept.change(300 * MIB, 100 * MIB, at(1)), Change::None);
        let grown = kept.change(300 * MIB, 100 * MIB, at(6));
        assert_eq!(grown, Change::Grow(300 * MIB));
        kept.given_up = 400 * MIB;
        assert_eq!(
            kept.change(0, 400 * MIB, at(7)),
            Change::None,
            "it never shrinks"
        );
        assert_eq!(kept.change(u64::MAX, 400 * MIB, at(8)), Change::None);
        let grown = kept.change(u64::MAX, 400 * MIB, at(13));
        assert_eq!(grown, Change::Grow(400 * MIB));
    }

    #[test]
    fn what_the_driver_refuses_is_asked_for_later_and_less_of_it() {
        let mut kept = KeepFree::new(None, 1024 * MIB, Instant::now()).unwrap();
        kept.budget_was_cut(500 * MIB);
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert_eq!(kept.change(320 * MIB, 64 * MIB, at(0)), Change::None);
        let grown = kept.change(320 * MIB, 64 * MIB, at(5));
        assert_eq!(grown, Change::Grow(320 * MIB));
        assert!(kept.was_refused(at(5)), "the first time is told");
        for s in [6, 9] {
            assert_eq!(kept.change(320 * MIB, 64 * MIB, at(s)), Change::None);
        }
        assert_eq!(kept.change(320 * MIB, 64 * MIB, at(10)), Change::None);
        let grown = kept.change(320 * MIB, 64 * MIB, at(15));
        assert_eq!(grown, Change::Grow(304 * MIB));
        for _ in 0..40 {
            assert!(!kept.was_refused(at(20)));
        }
        assert_eq!(kept.refusals, REFUSALS_MAX);
        assert!(kept.pause_until.unwrap() <= at(20) + PAUSE_MAX);
    }

    #[test]
    fn an_eighth_of_the_budget_stays() {
        let mut kept = keeping(512 * MIB);
        let now = Instant::now();
        assert_eq!(kept.change(0, 80 * MIB, now), Change::Shrink(64 * MIB));
        kept.given_up = 64 * MIB;
        assert_eq!(kept.change(0, 16 * MIB, now), Change::None);
    }

    #[test]
    fn a_budget_that_comes_back_leaves_free_what_is_to_be() {
        let kept = keeping(64 * MIB);
        assert_eq!(kept.most(1000 * MIB, 2 * MIB, 512 * MIB), 512 * MIB);
        assert_eq!(kept.most(162 * MIB, 2 * MIB, 512 * MIB), 100 * MIB);
        assert_eq!(kept.most(0, 2 * MIB, 512 * MIB), 64 * MIB, "an eighth");
        let off = KeepFree::new(None, 1024 * MIB, Instant::now()).unwrap();
        assert_eq!(off.most(0, 2 * MIB, 512 * MIB), 512 * MIB);
    }

    #[test]
    fn shares_are_of_the_devices_memory_and_all_of_it_is_refused() {
        let kept = KeepFree::new(Some(Budget::Percent(25.0)), 1024 * MIB, Instant::now()).unwrap();
        assert_eq!(kept.bytes, 256 * MIB);
        assert!(KeepFree::new(Some(Budget::Percent(100.0)), 1024 * MIB, Instant::now()).is_err());
        assert!(
            KeepFree::new(Some(Budget::Bytes(1024 * MIB)), 1024 * MIB, Instant::now()).is_err()
        );
        assert!(
            !KeepFree::new(None, 1024 * MIB, Instant::now())
                .unwrap()
                .is_on()
        );
    }

    #[test]
    fn a_change_is_counted_and_what_was_given_up_is_known() {
        let start = Instant::now();
        let mut kept = KeepFree::new(Some(Budget::Bytes(64 * MIB)), 1024 * MIB, start).unwrap();
        assert!(!kept.is_due(start, WHILE_BUSY), "too soon");
        assert!(kept.is_due(start + WHILE_BUSY, WHILE_BUSY));
        assert!(
            !kept.is_due(start + WHILE_BUSY, WHILE_BUSY),
            "looked at just now"
        );
        kept.was_changed(Change::Shrink(48 * MIB));
        kept.was_changed(Change::Grow(16 * MIB));
        kept.was_changed(Change::None);
        let status = kept.status().unwrap();
        assert_eq!((status.shrinks, status.grows), (1, 1));
        assert_eq!(status.given_up_bytes, 32 * MIB);
    }
}
