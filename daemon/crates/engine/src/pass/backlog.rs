//! Estimate of the work that is queued on a device, corrected by the times that the device
//! measures.
//!
//! A GPU accepts work faster than it does it. So the time in which a slice of a pass queues its
//! work says little about its cost, and the next one that waits for the GPU also waits for that
//! work. The backlog charges each slice for the work that it queued, and credits a slice that waits
//! with the work that others queued before. On a device that computes synchronously the backlog is
//! always empty.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rocmforge_device::{TimedTicket, TimedWork};
use rocmforge_tensor_cache::ModelId;

use crate::pass::work::Amount;

/// Estimate of when the device has done its queued work.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    done_at: Option<Instant>,
    /// Slices that the device times and has not completed, as far as is known, in their order.
    timed: VecDeque<TimedSlice>,
    /// Time since which the first of these slices has been the first in the queue.
    since: Option<Instant>,
}

/// A slice of a pass that the device times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimedSlice {
    pub(crate) ticket: TimedTicket,
    pub(crate) model: ModelId,
    pub(crate) rows: u32,
    pub(crate) amount: Amount,
    /// Time that the device takes for the slice, by estimate.
    pub(crate) work: Duration,
    /// Estimated end of the slice on the device; set by [`Backlog::push`].
    pub(crate) due: Instant,
    /// Whether the slice waited for nothing but the device.
    pub(crate) is_undisturbed: bool,
}

/// The remaining time of the first timed slice is assumed to be at least one part in this many of
/// its estimate, until the device has completed it.
const LEFT_LEAST: u32 = 4;

/// Times of a slice of a pass, from which its charge follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SliceWork {
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    /// Estimated device time of the work that the slice queued, by measured rates; zero if none are
    /// known.
    pub(crate) work: Duration,
    /// Whether the slice ended by waiting for the device.
    pub(crate) waited: bool,
}

impl Backlog {
    /// How long the device still needs for its queued work, from `now` on.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        let left = |done: Instant| done.saturating_duration_since(now);
        self.done_at.map_or(Duration::ZERO, left).max(self.least())
    }

    /// Minimum time that the device still needs for the timed slices that it has not completed.
    fn least(&self) -> Duration {
        let mut slices = self.timed.iter();
        let Some(first) = slices.next() else {
            return Duration::ZERO;
        };
        first.work / LEFT_LEAST + slices.map(|slice| slice.work).sum::<Duration>()
    }

    /// Adds a timed slice that was given to the device and has been charged.
    pub(crate) fn push(&mut self, mut slice: TimedSlice, now: Instant) {
        self.since.get_or_insert(now);
        slice.due = self.done_at.unwrap_or(now);
        self.timed.push_back(slice);
    }

    /// Number of timed slices that the device has not completed, and since when the first of them
    /// has been the first.
    pub(crate) fn under_way(&self) -> (usize, Option<Instant>) {
        (self.timed.len(), self.since)
    }

    /// Takes the first timed slice if the device has completed it, with its measured time. The
    /// estimated ends of the work behind it are moved by the difference ([`Backlog::was_done`]),
    /// but not before the other timed slices can end.
    pub(crate) fn take_done(
        &mut self,
        now: Instant,
        look: impl FnOnce(TimedTicket) -> TimedWork,
    ) -> Option<(TimedSlice, Option<Duration>)> {
        let TimedWork::Done(took) = look(self.timed.front()?.ticket) else {
            return None;
        };
        let slice = self.timed.pop_front()?;
        self.since = (!self.timed.is_empty()).then_some(now);
        self.was_done(slice.due, now);
        let mut free_at = now;
        for behind in &mut self.timed {
            free_at += behind.work;
            behind.due = behind.due.max(free_at);
        }
        self.done_at = self.done_at.map(|done| done.max(free_at));
        Some((slice, took))
    }

    /// Notes that work due at `due` is done by now. Returns the time by which later work is due
    /// earlier.
    pub(crate) fn was_done(&mut self, due: Instant, now: Instant) -> Duration {
        let early = due.saturating_duration_since(now);
        self.done_at = self.done_at.map(|done| (done - early).max(now));
        for slice in self.timed.iter_mut().filter(|slice| slice.due >= due) {
            slice.due = (slice.due - early).max(now);
        }
        early
    }

    /// Adds `more` to the device's queued work. Returns the time at which it will be done.
    pub(crate) fn add(&mut self, now: Instant, more: Duration) -> Instant {
        let done = self.done_at.map_or(now, |done| done.max(now)) + more;
        self.done_at = Some(done);
        done
    }

    /// The time that a slice is charged with.
    pub(crate) fn charge(&mut self, slice: SliceWork) -> Duration {
        let SliceWork {
            begun,
            ended,
            work,
            waited,
        } = slice;
        let elapsed = ended.saturating_duration_since(begun);
        let free_at = self.done_at.map_or(begun, |done| done.max(begun));
        if !waited {
            self.done_at = Some(free_at + work);
            return elapsed.max(work);
        }
        // Until then it waited for others' work.
        let own = ended.saturating_duration_since(free_at);
        self.done_at = Some(ended);
        own.max(work.min(elapsed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn timed(begin: Instant, ticket: u64, work: u64) -> TimedSlice {
        TimedSlice {
            ticket: TimedTicket(ticket),
            model: ModelId(0),
            rows: 512,
            amount: Amount::default(),
            work: ms(work),
            due: begin,
            is_undisturbed: true,
        }
    }

    #[test]
    fn what_the_device_has_not_done_is_left_whatever_was_estimated() {
        let (mut backlog, begin) = (Backlog::default(), Instant::now());
        for (at, work) in [(0, 4), (1, 8)] {
            backlog.charge(given(begin, [at, at + 1], work, false));
            backlog.push(timed(begin, at, work), begin + ms(at + 1));
        }
        assert_eq!(backlog.left(begin + ms(2)), ms(10));
        // The first takes far longer than estimated: a quarter of it and the second are left.
        let under_way = |_| TimedWork::UnderWay;
        assert!(backlog.take_done(begin + ms(50), under_way).is_none());
        assert_eq!(backlog.left(begin + ms(50)), ms(9));
        assert_eq!(backlog.under_way(), (2, Some(begin + ms(1))));
        let (slice, took) = backlog
            .take_done(begin + ms(60), |_| TimedWork::Done(Some(ms(59))))
            .expect("it is done");
        assert_eq!((slice.ticket, took), (TimedTicket(0), Some(ms(59))));
        assert_eq!(backlog.left(begin + ms(61)), ms(7));
        // A pass that the device does not time is behind them.
        let due = backlog.add(begin + ms(61), ms(3));
        assert_eq!(due, begin + ms(71));
        assert_eq!(backlog.under_way(), (1, Some(begin + ms(60))));
        // Done sooner than estimated: only what is behind it is left.
        let second = backlog.take_done(begin + ms(62), |_| TimedWork::Done(None));
        assert!(second.is_some_and(|(slice, took)| slice.ticket.0 == 1 && took.is_none()));
        assert_eq!(backlog.left(begin + ms(62)), ms(3));
        assert_eq!(backlog.under_way(), (0, None));
    }

    fn given(begin: Instant, from_to: [u64; 2], work: u64, waited: bool) -> SliceWork {
        SliceWork {
            begun: begin + ms(from_to[0]),
            ended: begin + ms(from_to[1]),
            work: ms(work),
            waited,
        }
    }

    #[test]
    fn who_waits_is_not_charged_with_what_others_gave() {
        let (mut backlog, begin) = (Backlog::default(), Instant::now());
        let prompt = backlog.charge(given(begin, [0, 3], 40, false));
        assert_eq!(prompt, ms(40), "what it gave, and not the time of that");
        assert_eq!(backlog.left(begin + ms(3)), ms(37));
        assert_eq!(backlog.left(begin + ms(90)), ms(0));
        let tokens = backlog.charge(given(begin, [3, 42], 1, true));
        assert_eq!(tokens, ms(2), "37 ms of it were the prompt's");
        let again = backlog.charge(given(begin, [50, 52], 1, true));
        assert_eq!(again, ms(2), "nothing was left");
    }

    #[test]
    fn an_estimate_that_is_too_long_charges_at_least_the_work() {
        let (mut backlog, begin) = (Backlog::default(), Instant::now());
        backlog.charge(given(begin, [0, 1], 100, false));
        assert_eq!(backlog.charge(given(begin, [1, 5], 3, true)), ms(3));
        // What was waited for is done.
        assert_eq!(backlog.charge(given(begin, [5, 9], 3, true)), ms(4));
    }

    #[test]
    fn what_is_done_before_it_was_due_brings_all_behind_it_forward() {
        let (mut backlog, begin) = (Backlog::default(), Instant::now());
        backlog.charge(given(begin, [0, 1], 10, false));
        let due = backlog.add(begin + ms(1), ms(5));
        assert_eq!(due, begin + ms(15));
        backlog.charge(given(begin, [1, 2], 20, false));
        assert_eq!(backlog.left(begin + ms(2)), ms(33));
        assert_eq!(backlog.was_done(due, begin + ms(8)), ms(7));
        assert_eq!(backlog.left(begin + ms(8)), ms(20));
        // What is done later than it was due changes nothing: who looked may have come late.
        assert_eq!(backlog.was_done(begin + ms(20), begin + ms(25)), ms(0));
        assert_eq!(backlog.left(begin + ms(25)), ms(3));
    }

    #[test]
    fn without_rates_a_slice_is_charged_with_its_time() {
        let (mut backlog, begin) = (Backlog::default(), Instant::now());
        for at in 0..4 {
            let slice = given(begin, [3 * at, 3 * at + 3], 0, at % 2 == 0);
            assert_eq!(backlog.charge(slice), ms(3));
        }
    }
}
