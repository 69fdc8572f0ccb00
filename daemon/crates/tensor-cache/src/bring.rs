//! Uploads that a client asked for ahead of a segment's use (preloads).

use crate::arena::Side;
use crate::evict::For;
use crate::room::VictimFilter;
use crate::{Action, Cache, SegmentId, SegmentState};

impl Cache {
    /// Begins to upload a segment ahead of its use, into free memory or that of models without
    /// running requests; segments of its own model or of running ones are not evicted for it,
    /// unless the segment is pinned. Returns whether it is resident or in flight now.
    pub fn bring(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let is_pinned = self.segment(segment).is_ok_and(|found| found.pinned);
        let filter = match is_pinned {
            true => VictimFilter::Any,
            false => VictimFilter::OfIdleOther(segment.model),
        };
        self.bring_within(segment, filter, actions)
    }

    /// Begins to upload a segment ahead of its use, into free memory only: nothing is evicted for
    /// it. Returns whether it is resident or in flight now.
    pub fn bring_into_free(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        self.bring_within(segment, VictimFilter::Nothing, actions)
    }

    fn bring_within(
        &mut self,
        segment: SegmentId,
        filter: VictimFilter,
        actions: &mut Vec<Action>,
    ) -> bool {
        let Ok(found) = self.segment(segment) else {
            return false;
        };
        let (bytes, whose) = (found.bytes, For::Segment(segment.model));
        if found.state != SegmentState::Absent {
            return true;
        }
        let Ok(slab) = self.make_room(bytes, Side::High, filter, whose, actions) else {
            return false;
        };
        self.begin_upload(segment, slab, actions);
        self.change(segment, |found| found.fresh = true);
        self.assert_ledger();
        true
    }
}
