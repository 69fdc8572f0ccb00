//! Passes a slab on from a segment that a pass has used to the next absent one.

use crate::arena::{Side, Tenant};
use crate::{Action, Cache, EvictionCause, Policy, SegmentId, SegmentKind, SegmentState, Slab};

impl Cache {
    /// Gives the slab of a segment that a pass has just used to the absent segment of its model
    /// that is needed next, if a known pass needs that sooner, and begins the upload. Returns
    /// whether it did.
    ///
    /// Free memory is used first. In a model that does not fit, the same segments then stay
    /// resident from pass to pass, the others take turns in one slab, and uploads go on while other
    /// segments are used, also from the end of a pass to the beginning of the next.
    pub fn recycle_slab(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let Ok(found) = self.segment(segment) else {
            return false;
        };
        let (SegmentState::Resident(slab), true) = (found.state, found.is_evictable()) else {
            return false;
        };
        if self.config.policy != Policy::PassAware || found.spec.kind == SegmentKind::Expert {
            return false;
        }
        let model = &self.models[&segment.model];
        let outlook = self.outlook(segment.model, model);
        let next_use = |index: u32| outlook.next_use(index, &model.segments[index as usize]);
        let absent = model.ordered.iter().filter_map(|&index| {
            let state = model.segments[index as usize].state;
            (state == SegmentState::Absent).then(|| (next_use(index), index))
        });
        let Some((needed, index)) = absent.min() else {
            return false;
        };
        let next = SegmentId { index, ..segment };
        let in_flight = self.usage.segments_in_flight;
        let known = needed.requests == 0;
        if !known
            || needed >= self.next_use(segment)
            || in_flight >= u64::from(self.config.max_in_flight)
        {
            return false;
        }
        let bytes = model.segments[index as usize].bytes;
        if self.arena.used() + bytes <= self.arena.end() {
            return self.prefetch(next, actions);
        }
        if slab.bytes / 2 > bytes {
            // The room of a large one would be lost on it: it stays, and small ones take turns.
            return self.streaming_size().is_some() && self.prefetch(next, actions);
        }
        self.arena.vacate(slab);
        let fits = self.arena.used() + bytes <= self.arena.end();
        let Some(offset) = self.arena.hole(bytes, Side::High).filter(|_| fits) else {
            self.arena.occupy(slab, Tenant::Segment(segment));
            return self.prefetch(next, actions);
        };
        self.evicted(segment, slab, EvictionCause::OwnPass, actions);
        self.begin_upload(next, Slab { offset, bytes }, actions);
        self.change(next, |found| found.fresh = true);
        self.assert_ledger();
        true
    }
}
