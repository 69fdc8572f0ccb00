//! State that all requests with a promised gap share.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;

use crate::api::BrokenGaps;

/// State of all promised gaps between tokens.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    /// Whether any request may have a promised gap. If not, the other fields are not used.
    pub(crate) any: bool,
    /// The models whose weights are protected from eviction for promises.
    pub(crate) kept: Vec<ModelId>,
    /// Numbers of gaps that were longer than promised.
    pub(crate) broken: BrokenGaps,
    /// For each request without a promise that waits because of promises: since when.
    held_since: HashMap<SeqId, Instant>,
}

impl Promises {
    /// Records whether any request has a promise; without one, no request waits because of
    /// promises.
    pub(crate) fn note_any(&mut self, any: bool) {
        self.any = any;
        if !any {
            self.held_since.clear();
        }
    }

    /// Sets the requests that wait because of promises now.
    pub(crate) fn note_held(&mut self, held: impl Iterator<Item = SeqId>, now: Instant) {
        let before = std::mem::take(&mut self.held_since);
        let since = |seq: SeqId| (seq, before.get(&seq).copied().unwrap_or(now));
        self.held_since = held.map(since).collect();
    }

    /// Longest time that a waiting request has waited because of promises.
    pub(crate) fn held_longest(&self, now: Instant) -> Duration {
        let first = self.held_since.values().min();
        first.map_or(Duration::ZERO, |since| {
            now.saturating_duration_since(*since)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_remembered_since_it_began_to() {
        let mut promises = Promises::default();
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        assert_eq!(promises.held_longest(at(5)), Duration::ZERO);
        promises.note_held([SeqId(1)].into_iter(), at(5));
        promises.note_held([SeqId(1), SeqId(2)].into_iter(), at(7));
        assert_eq!(promises.held_longest(at(9)), Duration::from_secs(4));
        promises.note_held([SeqId(2)].into_iter(), at(10));
        assert_eq!(promises.held_longest(at(11)), Duration::from_secs(4));
        promises.note_held(std::iter::empty(), at(12));
        promises.note_held([SeqId(2)].into_iter(), at(13));
        assert_eq!(promises.held_longest(at(14)), Duration::from_secs(1));
    }

    #[test]
    fn nobody_waits_for_promises_that_have_ended() {
        let mut promises = Promises::default();
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        promises.note_any(true);
        promises.note_held([SeqId(1)].into_iter(), at(0));
        promises.note_any(true);
        assert_eq!(promises.held_longest(at(31)), Duration::from_secs(31));
        // The promise ends, and another one is asked for later.
        promises.note_any(false);
        assert_eq!(promises.held_longest(at(40)), Duration::ZERO);
        promises.note_any(true);
        assert_eq!(promises.held_longest(at(80)), Duration::ZERO);
        promises.note_held([SeqId(1)].into_iter(), at(81));
        assert_eq!(promises.held_longest(at(82)), Duration::from_secs(1));
    }
}
