//! Tracks the gaps between a request's tokens: the longest one, its cause, and those longer than
//! promised.

use std::time::{Duration, Instant};

use crate::api::{Gap, GapCause};

/// Total time of the engine by use, since start-up, as seen by one model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// Time of slices of the model's own passes.
    pub(crate) own: Duration,
    /// Time of slices of other models' passes.
    pub(crate) others: Duration,
    /// Time of waits for uploads, which is also contained in the slices.
    pub(crate) uploads: Duration,
}

/// State of one request's gaps between tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gaps {
    /// Time of the last tokens, and the engine's times by use at that moment.
    last: Option<(Instant, Spent)>,
    longest: Option<Gap>,
    /// The longest gap that the request is promised.
    promised: Option<Duration>,
    /// Number of gaps that were longer than promised.
    broken: u32,
    /// Whether the client does not read, so that the promised gap does not run.
    is_paused: bool,
}

impl Gaps {
    /// The gaps of a request with its promised longest gap.
    pub(crate) fn new(promised: Option<Duration>) -> Self {
        Self {
            promised,
            ..Self::default()
        }
    }

    /// The longest gap that the request is promised.
    pub(crate) fn promised(&self) -> Option<Duration> {
        self.promised
    }

    /// The promised gap, and the number of gaps that were longer.
    pub(crate) fn told(&self) -> Option<(Duration, u32)> {
        Some((self.promised?, self.broken))
    }

    /// Time at which the next tokens are due by the promise; `None` before the first token and
    /// while the client does not read.
    pub(crate) fn due(&self) -> Option<Instant> {
        let (last, _) = self.last.filter(|_| !self.is_paused)?;
        last.checked_add(self.promised?)
    }

    /// Whether the promised gap does not run because the client does not read.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Records whether the client's channel has room now. Time without room does not count towards
    /// a promised gap.
    pub(crate) fn note_reader(&mut self, has_room: bool, now: Instant, spent: Spent) {
        if self.promised.is_none() {
            return;
        }
        if std::mem::replace(&mut self.is_paused, !has_room) && has_room && self.last.is_some() {
            self.last = Some((now, spent));
        }
    }

    /// Notes that tokens of the request were generated now. Returns the gap before them if it is
    /// longer than promised.
    pub(crate) fn note(&mut self, now: Instant, spent: Spent) -> Option<Gap> {
        let (then, before) = self.last.replace((now, spent))?;
        let took = now.saturating_duration_since(then);
        let is_broken = self.promised.is_some_and(|promised| took > promised);
        self.broken += u32::from(is_broken);
        let is_longest = self.longest.is_none_or(|longest| longest.took < took);
        if !is_broken && !is_longest {
            return None;
        }
        let gap = Gap {
            took,
            cause: cause(took, before, spent),
        };
        if is_longest {
            self.longest = Some(gap);
        }
        is_broken.then_some(gap)
    }

    pub(crate) fn longest(&self) -> Option<Gap> {
        self.longest
    }
}

/// What took most of a gap.
fn cause(took: Duration, before: Spent, after: Spent) -> GapCause {
    let own = after.own.saturating_sub(before.own);
    let others = after.others.saturating_sub(before.others);
    let uploads = after
        .uploads
        .saturating_sub(before.uploads)
        .min(own + others);
    let rest = took.saturating_sub(own + others);
    if rest > own.max(others) {
        GapCause::Waiting
    } else if uploads > (own + others) / 2 {
        GapCause::Uploads
    } else if others > own {
        GapCause::OtherModels
    } else {
        GapCause::OwnPasses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn spent(own: u64, others: u64, uploads: u64) -> Spent {
        Spent {
            own: Duration::from_millis(own),
            others: Duration::from_millis(others),
            uploads: Duration::from_millis(uploads),
        }
    }

    #[test]
    fn the_longest_gap_has_its_own_cause() {
        let mut gaps = Gaps::default();
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        gaps.note(at(0), spent(5, 100, 0));
        assert_eq!(gaps.longest(), None, "one token has no gap");
        gaps.note(at(10), spent(13, 101, 0));
        gaps.note(at(50), spent(20, 132, 0));
        gaps.note(at(55), spent(24, 133, 0));
        let longest = Gap {
            took: Duration::from_millis(40),
            cause: GapCause::OtherModels,
        };
        assert_eq!(gaps.longest(), Some(longest));
    }

    #[test]
    fn a_gap_that_is_promised_counts_while_its_reader_reads() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut gaps = Gaps::new(Some(Duration::from_millis(20)));
        assert_eq!(gaps.due(), None, "from the first token on");
        gaps.note(at(100), Spent::default());
        assert_eq!(gaps.due(), Some(at(120)));
        assert_eq!(gaps.note(at(120), Spent::default()), None);
        gaps.note_reader(false, at(125), Spent::default());
        assert_eq!(gaps.due(), None);
        gaps.note_reader(false, at(500), Spent::default());
        gaps.note_reader(true, at(900), Spent::default());
        assert_eq!(gaps.due(), Some(at(920)));
        gaps.note_reader(true, at(910), Spent::default());
        assert_eq!(gaps.due(), Some(at(920)), "it had room before");
        let broken = gaps.note(at(921), spent(19, 0, 0)).unwrap();
        assert_eq!(broken.took, Duration::from_millis(21));
        assert_eq!(broken.cause, GapCause::OwnPasses);
        assert_eq!((gaps.broken, gaps.longest()), (1, Some(broken)));
        // The longest is told as it was, and each that is too long counts.
        assert!(gaps.note(at(960), spent(19, 39, 0)).is_some());
        assert!(gaps.note(at(990), spent(19, 60, 0)).is_some());
        assert_eq!(gaps.told(), Some((Duration::from_millis(20), 3)));
        assert_eq!(gaps.longest().unwrap().took, Duration::from_millis(39));
        // Without a promise nothing is broken, and a reader's time is part of a gap.
        let mut gaps = Gaps::new(None);
        gaps.note(at(0), Spent::default());
        gaps.note_reader(false, at(1), Spent::default());
        gaps.note_reader(true, at(90), Spent::default());
        assert_eq!(gaps.note(at(100), Spent::default()), None);
        assert_eq!(gaps.longest().unwrap().took, Duration::from_millis(100));
        assert_eq!((gaps.due(), gaps.told()), (None, None));
    }

    #[test]
    fn each_cause_is_told_from_the_others() {
        let of = |own, others, uploads| {
            cause(
                Duration::from_millis(100),
                Spent::default(),
                spent(own, others, uploads),
            )
        };
        assert_eq!(of(80, 10, 0), GapCause::OwnPasses);
        assert_eq!(of(10, 80, 0), GapCause::OtherModels);
        assert_eq!(of(60, 35, 50), GapCause::Uploads);
        assert_eq!(of(5, 5, 0), GapCause::Waiting);
    }
}
