//! What a device was given to do and has not done yet, by estimate.
//!
//! A card takes work faster than it does it. So the time in which a slice of a pass gave its work
//! says little of what it costs, and whoever waits for the card next waits for that work, too. The
//! backlog charges each slice with what it gave, and takes from one that waits what others gave
//! before. On a device that does its work at once nothing is ever left.

use std::time::{Duration, Instant};

/// When the device has done all that it was given.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backlog {
    done_at: Option<Instant>,
}

/// A slice of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SliceWork {
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    /// How long the device takes for what it was given, by measured rates; zero if none are known.
    pub(crate) work: Duration,
    /// It ended with waiting for the device.
    pub(crate) waited: bool,
}

impl Backlog {
    /// How long the device takes from now on for what it was given.
    pub(crate) fn left(self, now: Instant) -> Duration {
        self.done_at
            .map_or(Duration::ZERO, |done| done.saturating_duration_since(now))
    }

    /// What was to be done at `due` is done by now: what comes behind it will be sooner, too, by
    /// the time that is returned.
    pub(crate) fn was_done(&mut self, due: Instant, now: Instant) -> Duration {
        let early = due.saturating_duration_since(now);
        self.done_at = self.done_at.map(|done| (done - early).max(now));
        early
    }

    /// The device takes so much longer for what it was given. When it will have done all of it.
    pub(crate) fn add(&mut self, now: Instant, more: Duration) -> Instant {
        let done = self.done_at.map_or(now, |done| done.max(now)) + more;
        self.done_at = Some(done);
        done
    }

    /// What a slice is charged with.
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
