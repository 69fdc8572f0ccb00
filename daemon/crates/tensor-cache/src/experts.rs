//! Eviction of experts: which one is evicted for another of its size, and predictions of their next
//! uses.
//!
//! A use is predicted from recency and frequency (`forecast.rs`), and from the expert's layer: a
//! layer that the current pass has left is not used before the next pass. So the victim is the
//! coldest of all or, if a pass uses nearly all of them in order, as a long prompt does, the one
//! that was used just now.
//!
//! An expert is evicted for another one of the same size, which takes its slab, so that nothing
//! moves. The experts of a layer have one size, and those of all layers have few.

use crate::arena::Side;
use crate::room::VictimFilter;
use crate::state::{Model, Segment};
use crate::victims::expert_that_goes_first;
use crate::{Action, Cache, EvictionCause, Policy, SegmentId, SegmentKind, SegmentState, Slab};

/// Maximum number of recently used segments that are searched for evictable ones.
const RECENT_MAX: usize = 1024;

/// Maximum number of recently used evictable experts that are compared.
const COMPARED: usize = 8;

/// Holes too short for an expert are left alone if they are at most one part in this many of the
/// arena.
const SCATTERED_PART: u64 = 64;

/// Holes are left alone only if that part of the arena is at least as large as this many experts: a
/// small arena cannot afford them.
const SCATTERED_EXPERTS: u64 = 4;

/// Number of queries for which a finding about free memory stays valid, if no more becomes free.
const UNJOINED_ASKS: u32 = 512;

/// Free bytes of which no hole for an expert could be made cheaply: they lie between blocks, which
/// do not move.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unjoined {
    /// Bytes of the expert that did not fit.
    bytes: u64,
    /// Smallest number of free bytes since.
    free: u64,
    asks_left: u32,
}

impl Cache {
    /// Makes room for an expert by evicting one of its model, and returns where. `None`, with
    /// nothing done, if the segment is no expert, if free memory should be used, or if something
    /// else should be evicted.
    pub(crate) fn room_of_another_expert(
        &mut self,
        segment: SegmentId,
        filter: VictimFilter,
        actions: &mut Vec<Action>,
    ) -> Option<Slab> {
        let found = self.segment(segment).ok()?;
        let bytes = found.bytes;
        if found.spec.kind != SegmentKind::Expert
            || self.config.policy != Policy::PassAware
            || filter == VictimFilter::Nothing
        {
            return None;
        }
        let (used, end) = (self.arena.used(), self.arena.end());
        let full = used <= end
            && (used + bytes > end || self.is_scattered(bytes) || self.is_unjoined(bytes));
        if !full {
            return None;
        }
        let next_use = expert_that_goes_first(self, segment.model)?;
        if matches!(filter, VictimFilter::UsedAfter(least) if next_use <= least) {
            return None;
        }
        let victim = self.expert_to_go(segment, bytes)?;
        let slab = self.segment(victim).ok()?.state.slab()?;
        self.arena.vacate(slab);
        self.evicted(victim, slab, EvictionCause::OwnPass, actions);
        let offset = self
            .arena
            .hole(bytes, Side::High)
            .expect("the room of another one of its size");
        Some(Slab { offset, bytes })
    }

    /// Whether free memory lies in holes too short for an expert of `bytes` bytes, and is so little
    /// that it is left alone: joining holes would move other segments for each upload.
    fn is_scattered(&self, bytes: u64) -> bool {
        let most = self.arena.end() / SCATTERED_PART;
        let free = self.arena.end().saturating_sub(self.arena.used());
        self.may_leave_holes(bytes) && free < most + bytes && self.arena.longest_hole() < bytes
    }

    /// Whether the arena is so large that holes too short for an expert of `bytes` bytes may be
    /// left.
    fn may_leave_holes(&self, bytes: u64) -> bool {
        self.arena.end() / SCATTERED_PART >= SCATTERED_EXPERTS * bytes
    }

    /// Whether no hole for an expert of `bytes` bytes can be made of free memory with few moves.
    /// Checked again only when more was freed, since it scans all holes.
    fn is_unjoined(&mut self, bytes: u64) -> bool {
        if self.arena.longest_hole() >= bytes || !self.may_leave_holes(bytes) {
            return false;
        }
        let free = self.arena.end().saturating_sub(self.arena.used());
        if let Some(known) = &mut self.unjoined
            && known.bytes <= bytes
            && free < known.free + bytes
            && known.asks_left > 0
        {
            known.free = known.free.min(free);
            known.asks_left -= 1;
            return true;
        }
        let joins = self
            .place(bytes, 0, Side::High, self.slide_max(bytes))
            .is_some();
        self.unjoined = (!joins).then_some(Unjoined {
            bytes,
            free,
            asks_left: UNJOINED_ASKS,
        });
        !joins
    }

    /// Among a model's evictable experts of `bytes` bytes: the coldest, or one of those used last,
    /// whichever is expected to be used again latest.
    fn expert_to_go(&self, of: SegmentId, bytes: u64) -> Option<SegmentId> {
        let model = &self.models[&of.model];
        let may_go = |index: u32| {
            let found = &model.segments[index as usize];
            let is = found.spec.kind == SegmentKind::Expert && !model.comes_fresh(found);
            let inside = found
                .state
                .slab()
                .is_some_and(|s| s.end() <= self.arena.end());
            is && found.bytes == bytes && inside && found.is_evictable()
        };
        let coldest = model.experts.iter().map(|(_, index)| *index);
        let coldest = coldest.into_iter().find(|&index| may_go(index))?;
        let recent = self.recency.iter().take(RECENT_MAX).map(|(id, ())| *id);
        let recent = recent.filter(|id| id.model == of.model).map(|id| id.index);
        let recent = recent.filter(|&index| may_go(index)).take(COMPARED);
        let until = |index: u32| self.passes_until(of, index);
        let index = recent.fold(coldest, |latest, index| {
            match until(index) > until(latest) {
                true => index,
                false => latest,
            }
        });
        Some(SegmentId { index, ..of })
    }

    /// Expected number of passes until an expert is used again, by its past uses and the place of
    /// its layer.
    fn passes_until(&self, of: SegmentId, index: u32) -> f64 {
        let model = &self.models[&of.model];
        let found = &model.segments[index as usize];
        let rare = found.score.passes_ahead(model.passes) - 1.0;
        let (n, cursor) = (model.ordered.len() as f64, model.cursor.unwrap_or(0));
        let (place, cursor) = (f64::from(found.place), f64::from(cursor));
        match place > cursor {
            true if model.uses_all_experts => (place - cursor) / n,
            true => rare + (place - cursor) / n,
            false => rare + (n - cursor + place) / n,
        }
    }

    /// Score of an expert's uses, recent ones counting most; 0 if it was never used or does not
    /// exist.
    pub fn warmth(&self, segment: SegmentId) -> f64 {
        self.segment(segment)
            .map_or(0.0, |found| found.score.value())
    }

    /// Counts a use of an absent segment that is not uploaded, because its work was done on the
    /// CPU. The current pass moves past it, as with `acquire`.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownSegment`.
    pub fn done_without(&mut self, segment: SegmentId) -> Result<(), crate::Error> {
        let bytes = self.segment(segment)?.bytes;
        self.count(segment.model, |counters| {
            counters.misses += 1;
            counters.miss_bytes += bytes;
        });
        self.pass_over(segment);
        Ok(())
    }

    /// Begins to upload an expert that the current pass will certainly need, unless it is resident
    /// or in flight, or too many uploads are. Returns whether it began one.
    pub fn prefetch_needed(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        if let Some(model) = self.models.get_mut(&segment.model)
            && let Some(found) = model.segments.get(segment.index as usize)
            && model.cursor.is_some_and(|cursor| found.place > cursor)
        {
            model.uses_all_experts = true;
        }
        self.prefetch_over_used(segment, actions)
    }

    /// Begins to upload an expert that no pass waits for, unless too many uploads are in flight, or
    /// only one that is used again sooner could be evicted. Returns whether it began one.
    pub fn prefetch_for_later(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let Ok(found) = self.segment(segment) else {
            return false;
        };
        let bytes = found.bytes;
        if self.arena.used() + bytes > self.arena.end() {
            let victim = self.expert_to_go(segment, bytes);
            let until = |s: SegmentId| self.passes_until(s, s.index);
            if victim.is_none_or(|victim| until(victim) <= until(segment)) {
                return false;
            }
        }
        self.prefetch_over_used(segment, actions)
    }

    /// Begins to upload a segment in the place of one that is used later than now.
    fn prefetch_over_used(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let now = crate::forecast::NextUse {
            requests: 0,
            segments: 0,
        };
        self.prefetch_within(segment, VictimFilter::UsedAfter(now), actions)
    }

    /// Begins to upload the first absent expert of a model from an index on, into free memory,
    /// unless too many uploads are in flight. Returns its index if it began one. O(segments from
    /// the index to it).
    pub fn bring_spare_expert(
        &mut self,
        model: crate::ModelId,
        from: u32,
        actions: &mut Vec<Action>,
    ) -> Option<u32> {
        let state = self.models.get(&model)?;
        let mut later = (from..).zip(state.segments.get(from as usize..)?);
        let absent = |found: &Segment| {
            found.spec.kind == SegmentKind::Expert && found.state == SegmentState::Absent
        };
        let (index, _) = later.find(|(_, found)| absent(found))?;
        let segment = SegmentId { model, index };
        self.prefetch_within(segment, VictimFilter::Nothing, actions)
            .then_some(index)
    }
}

impl Model {
    /// Whether an expert was uploaded ahead of its layer in a pass that uses nearly all experts: if
    /// evicted for another one, it would be uploaded twice.
    fn comes_fresh(&self, expert: &Segment) -> bool {
        let is_ahead = self.cursor.is_some_and(|cursor| expert.place >= cursor);
        self.uses_all_experts && expert.fresh && is_ahead
    }
}
