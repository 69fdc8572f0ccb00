//! Experts: which one goes for another one of its size, and what is known of their next uses.
//!
//! A use is predicted from recency and frequency (`forecast.rs`), and where its layer lies: what
//! the pass under way has been at is not used before the next pass. So the one that goes is the
//! coldest of all or, where a pass uses nearly all of them in order, as a long prompt does, the
//! one that was used just now.
//!
//! One goes for another one of the same size: its slab is the other's, and nothing moves. The
//! experts of a layer have one size, and those of all layers have few.

use crate::arena::Side;
use crate::room::VictimFilter;
use crate::state::{Model, Segment};
use crate::victims::expert_that_goes_first;
use crate::{Action, Cache, EvictionCause, Policy, SegmentId, SegmentKind, SegmentState, Slab};

/// How many of the segments that were used last are looked at for those that may go.
const RECENT_MAX: usize = 1024;

/// How many of the experts that were used last, and may go, are compared.
const COMPARED: usize = 8;

/// The part of the arena that holes too short for an expert may be before they are joined.
const SCATTERED_PART: u64 = 64;

/// So many experts fit into that part at least, or no hole is left alone: to a small arena it is a
/// loss.
const SCATTERED_EXPERTS: u64 = 4;

/// Times that what was found of free room holds, while there is not more of it.
const UNJOINED_ASKS: u32 = 512;

/// Free bytes of which no hole for an expert could be made at a low cost: they lie between blocks,
/// which do not move.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unjoined {
    /// Bytes of the expert.
    bytes: u64,
    /// The fewest that were free since.
    free: u64,
    asks_left: u32,
}

impl Cache {
    /// Makes room for an expert where one of its model goes for it, and says where; `None`,
    /// and nothing done, where it is no expert, where free room is to be used, or where
    /// something else should go.
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

    /// Whether what is free lies in holes too short for an expert of `bytes`, and is so little that
    /// it is left alone: to join holes, others would move for each upload.
    fn is_scattered(&self, bytes: u64) -> bool {
        let most = self.arena.end() / SCATTERED_PART;
        let free = self.arena.end().saturating_sub(self.arena.used());
        self.may_leave_holes(bytes) && free < most + bytes && self.arena.longest_hole() < bytes
    }

    /// Whether the arena is so large that holes too short for an expert of `bytes` are no loss.
    fn may_leave_holes(&self, bytes: u64) -> bool {
        self.arena.end() / SCATTERED_PART >= SCATTERED_EXPERTS * bytes
    }

    /// Whether no hole for an expert of `bytes` can be made of what is free without much moving. It
    /// is looked at again only when more was freed, since it takes the time of all holes.
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

    /// Of the evictable experts of a model that have `bytes`: the coldest, or one of those that
    /// were used last, whichever is used again latest.
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

    /// Passes until an expert is used again: by how often it was used, and by the place of its
    /// layer.
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

    /// How much an expert was used, the last uses counting most; 0 for one that
    /// never was, or does not exist.
    pub fn warmth(&self, segment: SegmentId) -> f64 {
        self.segment(segment)
            .map_or(0.0, |found| found.score.value())
    }

    /// Counts a use of a segment that is not there and is not brought in: its work was done
    /// elsewhere. The pass under way moves past it, as by `acquire`.
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

    /// Begins an upload of an expert that the pass under way will need for certain, unless it is
    /// resident or in flight, or too many are. Whether it began one.
    pub fn prefetch_needed(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        if let Some(model) = self.models.get_mut(&segment.model)
            && let Some(found) = model.segments.get(segment.index as usize)
            && model.cursor.is_some_and(|cursor| found.place > cursor)
        {
            model.uses_all_experts = true;
        }
        self.prefetch_over_used(segment, actions)
    }

    /// Begins an upload of an expert that nobody waits for, unless too many are under way, or there
    /// is room only in place of one that is used again sooner. Whether it began one.
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

    /// Begins an upload in the place of what is used later than now.
    fn prefetch_over_used(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let now = crate::forecast::NextUse {
            requests: 0,
            segments: 0,
        };
        self.prefetch_within(segment, VictimFilter::UsedAfter(now), actions)
    }

    /// Begins an upload of the first absent expert of a model from an index on, into room that
    /// nobody has, unless too many uploads are under way. Its index, if it began one.
    /// O(segments from there to it).
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
    /// Whether an expert was uploaded ahead of its layer in a pass that uses nearly all: in the
    /// place of another one it would be uploaded twice.
    fn comes_fresh(&self, expert: &Segment) -> bool {
        let is_ahead = self.cursor.is_some_and(|cursor| expert.place >= cursor);
        self.uses_all_experts && expert.fresh && is_ahead
    }
}
