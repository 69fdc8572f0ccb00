//! The order in which segments are evicted: farthest next use first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Bound;

use crate::forecast::NextUse;
use crate::room::Outlook;
use crate::state::{Model, Segment};
use crate::{Cache, ModelId, Policy, SegmentId, SegmentKind, Slab};

/// A segment counts as much larger than what is needed from this factor on.
const LARGE: u64 = 2;

/// Evictable segments, the farthest next use (or the least recent) first.
pub(crate) enum Victims {
    Farthest {
        /// Ordered by the next use that [`trade`] assigned; the last element is the segment's own
        /// next use.
        heap: BinaryHeap<(NextUse, SegmentId, NextUse)>,
        outlooks: Vec<(ModelId, Outlook)>,
    },
    /// In reverse order: the last element is evicted next.
    LeastRecent(Vec<SegmentId>),
}

/// Evictable segments, those of kept models first (so that they are evicted last).
fn kept_first(cache: &Cache, segments: impl Iterator<Item = SegmentId>) -> Vec<SegmentId> {
    let (mut kept, others): (Vec<_>, Vec<_>) = segments.partition(|s| cache.keeps_any(*s));
    kept.extend(others);
    kept
}

impl Victims {
    /// The eviction order when `need` bytes are needed.
    pub(crate) fn new(cache: &Cache, need: u64) -> Victims {
        if cache.config.policy == Policy::Lru {
            return Victims::LeastRecent(
                // Those of models that are kept come last, and so are the first in reverse.
                kept_first(cache, cache.recency.iter().map(|(segment, ())| *segment)),
            );
        }
        let streaming = cache.streaming_size();
        let mut heap = Vec::new();
        let mut outlooks = Vec::new();
        for (&id, state) in cache
            .models
            .iter()
            .filter(|(_, state)| state.usage.segments_resident > 0)
        {
            let outlook = cache.outlook(id, state);
            let first = heap.len();
            for &index in &state.ordered {
                let found = &state.segments[index as usize];
                if found.is_evictable() {
                    let segment = SegmentId { model: id, index };
                    let next_use = outlook.next_use(index, found);
                    let next_use = cache.next_use_of_group(segment, next_use);
                    heap.push((next_use, segment, next_use));
                }
            }
            if state.in_request {
                let size = streaming
                    .filter(|(model, _)| *model == id)
                    .map(|(_, size)| size);
                trade(&mut heap[first..], state, size, need);
            }
            heap.extend(coldest(id, state, &outlook, Bound::Unbounded));
            outlooks.push((id, outlook));
        }
        Victims::Farthest {
            heap: heap.into(),
            outlooks,
        }
    }

    pub(crate) fn next(&mut self, cache: &Cache) -> Option<(NextUse, SegmentId, Slab)> {
        let (next_use, segment) = match self {
            Victims::LeastRecent(segments) => loop {
                let segment = segments.pop()?;
                if cache.segment(segment).is_ok_and(Segment::is_evictable) {
                    break (
                        NextUse {
                            requests: 0,
                            segments: 0,
                        },
                        segment,
                    );
                }
            },
            Victims::Farthest { heap, outlooks } => {
                let (_, segment, next_use) = heap.pop()?;
                let state = &cache.models[&segment.model];
                let found = &state.segments[segment.index as usize];
                if found.spec.kind == SegmentKind::Expert {
                    let at = outlooks
                        .binary_search_by_key(&segment.model, |(id, _)| *id)
                        .expect("it has an outlook");
                    let after = Bound::Excluded((found.score.key(), segment.index));
                    heap.extend(coldest(segment.model, state, &outlooks[at].1, after));
                }
                (next_use, segment)
            }
        };
        let slab = cache.segment(segment).ok()?.state.slab()?;
        Some((next_use, segment, slab))
    }
}

/// The next use of a model's coldest expert, if nothing of any other model is evicted before it:
/// the same as by [`Victims::new`] in a fraction of its time, since nothing is sorted. (Trading
/// next uses leaves the farthest of them what it is.)
///
/// The model's segments that are not experts are ignored. Each of its passes uses them, and several
/// experts of another size in their place would leave a hole.
pub(crate) fn expert_that_goes_first(cache: &Cache, model: ModelId) -> Option<NextUse> {
    let own = &cache.models[&model];
    let outlook = cache.outlook(model, own);
    let (expert, ..) = coldest(model, own, &outlook, Bound::Unbounded)?;
    let go_later = |id: ModelId, state: &Model| {
        let outlook = cache.outlook(id, state);
        let later = |index: &u32| {
            let found = &state.segments[*index as usize];
            outlook.next_use(*index, found) > expert && found.is_evictable()
        };
        let experts = coldest(id, state, &outlook, Bound::Unbounded);
        experts.is_none_or(|(other, ..)| other <= expert) && !state.ordered.iter().any(later)
    };
    let mut others = cache
        .models
        .iter()
        .filter(|(id, state)| **id != model && state.usage.segments_resident > 0);
    others
        .all(|(&id, state)| go_later(id, state))
        .then_some(expert)
}

/// Lets the segments that a model's pass has not reached yet (between two passes: all) trade their
/// next uses, so that those much larger than needed are evicted last: any of them will be uploaded
/// again in this pass, as a whole.
///
/// If the model evicts its own segments of one `size`, those that the pass has used go first, in
/// the order of their ranks, then those ahead of it, and only then any of other sizes: one of them
/// would leave a hole that no other fits, and in each pass from then on something would move.
/// Segments uploaded ahead of use go after those of their size.
fn trade(
    candidates: &mut [(NextUse, SegmentId, NextUse)],
    model: &Model,
    size: Option<u64>,
    need: u64,
) {
    let cursor = model.cursor.unwrap_or(0);
    let is_large = |index: u32| model.segments[index as usize].bytes / LARGE > need;
    let Some(size) = size else {
        let behind = candidates.partition_point(|(_, segment, _)| segment.index < cursor);
        return reorder(&mut candidates[behind..], |index| {
            (u8::from(is_large(index)), 0)
        });
    };
    reorder(candidates, |index| {
        let found = &model.segments[index as usize];
        let rank = match found.fresh {
            true => u32::MAX,
            false => model.sizes.rank(index),
        };
        match (found.bytes == size, index < cursor) {
            (true, true) => (0, rank),
            (true, false) => (1, rank),
            (false, true) => (2, 0),
            (false, false) => (3 + u8::from(is_large(index)), 0),
        }
    });
}

/// Gives the farthest next use to the candidate that is smallest by `order`; among equals, to the
/// one whose own next use is farthest.
fn reorder(candidates: &mut [(NextUse, SegmentId, NextUse)], order: impl Fn(u32) -> (u8, u32)) {
    let mut next_uses: Vec<NextUse> = candidates.iter().map(|(next_use, ..)| *next_use).collect();
    next_uses.sort_unstable_by_key(|&next_use| Reverse(next_use));
    candidates
        .sort_unstable_by_key(|(_, segment, next_use)| (order(segment.index), Reverse(*next_use)));
    for (candidate, next_use) in candidates.iter_mut().zip(next_uses) {
        candidate.0 = next_use;
    }
}

/// The coldest evictable expert of a model after a given score.
fn coldest(
    model: ModelId,
    state: &Model,
    outlook: &Outlook,
    after: Bound<(u64, u32)>,
) -> Option<(NextUse, SegmentId, NextUse)> {
    let mut experts = state.experts.range((after, Bound::Unbounded));
    let (_, index) = experts.find(|(_, index)| state.segments[*index as usize].is_evictable())?;
    let next_use = outlook.next_use(*index, &state.segments[*index as usize]);
    Some((
        next_use,
        SegmentId {
            model,
            index: *index,
        },
        next_use,
    ))
}
