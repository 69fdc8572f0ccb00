//! The gaps between a request's tokens: the longest one, and what the engine did meanwhile.

use std::time::{Duration, Instant};

use crate::api::{Gap, GapCause};

/// What the engine's time went to since it started, as one model sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// Slices of the model's own passes.
    pub(crate) own: Duration,
    /// Slices of other models' passes.
    pub(crate) others: Duration,
    /// Waits for uploads, which are in slices as well.
    pub(crate) uploads: Duration,
}

/// The gaps of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gaps {
    /// When its last tokens came, and what had been spent then.
    last: Option<(Instant, Spent)>,
    longest: Option<Gap>,
}

impl Gaps {
    /// Tokens of it came now.
    pub(crate) fn note(&mut self, now: Instant, spent: Spent) {
        let Some((then, before)) = self.last.replace((now, spent)) else {
            return;
        };
        let took = now.saturating_duration_since(then);
        if self.longest.is_some_and(|longest| longest.took >= took) {
            return;
        }
        let cause = cause(took, before, spent);
        self.longest = Some(Gap { took, cause });
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
