//! Making room: which segments go, which move, and in what order that is decided.
//!
//! 1. A hole that fits, as it is.
//! 2. If the free bytes suffice, the cheapest slide of idle segments that makes such a hole.
//! 3. Otherwise the segment whose next use is farthest goes, and again from 1; behind the first
//!    few, several go before the next look, which takes the time of all holes. At the end,
//!    victims that proved unnecessary (a small one, before a large one went, or one outside the
//!    range that was found) are spared, the ones needed soonest first.
//!
//! Until the end only the arena is touched, so that a refusal can take everything back.

use crate::arena::{Shift, Side, Tenant};
use crate::evict::For;
use crate::forecast::NextUse;
use crate::state::{Model, Role, Segment};
use crate::victims::Victims;
use crate::{
    Action, Cache, Error, EvictionCause, ModelId, Policy, SegmentId, SegmentKind, SegmentState,
    Slab,
};

/// The segments that may be evicted for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VictimFilter {
    /// Any evictable segment.
    Any,
    /// Only segments that are needed later than this.
    UsedAfter(NextUse),
    /// Only segments that a pass has used (for LRU, which does not predict).
    AlreadyUsed,
    /// Only segments of models other than this one that have no running request.
    OfIdleOther(ModelId),
    /// No segment: nothing is evicted.
    Nothing,
}

/// Expected next uses of the segments of one model.
pub(crate) struct Outlook {
    segments: u64,
    /// Index of the segment that the current pass uses next; `None` between passes.
    cursor: Option<u64>,
    tied_done: bool,
    /// Expected start of the pass after the current one: in requests, or segments from now.
    next_pass: NextUse,
    passes: u64,
    /// Whether the model is kept, so that all of its segments count as needed at once.
    kept: bool,
}

impl Outlook {
    pub(crate) fn next_use(&self, index: u32, segment: &Segment) -> NextUse {
        if self.kept {
            return NextUse {
                requests: 0,
                segments: 0,
            };
        }
        let index = u64::from(index);
        let soon = |segments| NextUse {
            requests: 0,
            segments,
        };
        let in_next_pass = |segments| NextUse {
            segments: self.next_pass.segments + segments,
            ..self.next_pass
        };
        match (segment.spec.kind, self.cursor) {
            (SegmentKind::Expert, _) => {
                let passes = segment.score.passes_ahead(self.passes) - 0.5;
                in_next_pass((passes * self.segments as f64) as u64)
            }
            (_, Some(cursor)) if index >= cursor => soon(index - cursor),
            (SegmentKind::OrderedTied, Some(cursor)) if !self.tied_done => {
                soon(self.segments - cursor)
            }
            _ => in_next_pass(index),
        }
    }
}

/// The result of `choose`, to be committed: the place, the moves and the victims.
struct Placement {
    victims: Vec<(SegmentId, Slab)>,
    shifts: Vec<Shift>,
    offset: u64,
}

/// A model that has been waiting for its next pass for this many passes, times the number of
/// waiting models, counts as idle.
const ROUNDS_MAX: u64 = 4;

/// Maximum number of segments of other models' passes that run before a model's next pass begins.
const SLICE_SEGMENTS: u64 = 128;

/// Number of victims after each of which a place is searched; beyond that, whenever the number of
/// victims has grown by half, and then the number needed is found by bisection. Each search scans
/// all holes, and a large segment may need hundreds of small experts as victims.
const VICTIMS_ONE_BY_ONE: usize = 8;

/// Maximum number of victims inside the found range that are tested for being unnecessary.
const SPARED_MAX: usize = 8;

/// Number of passes from which on a request counts as long, if there are other models.
const PASSES_MIN: u64 = 4;

impl Cache {
    /// Makes room for `bytes` bytes and returns the offset, which the caller has to occupy.
    pub(crate) fn make_room(
        &mut self,
        bytes: u64,
        side: Side,
        filter: VictimFilter,
        whose: For,
        actions: &mut Vec<Action>,
    ) -> Result<Slab, Error> {
        let (budget, pinned) = (self.config.budget, self.usage().pinned);
        if bytes > self.arena.end().saturating_sub(pinned) {
            return Err(Error::NeverFits {
                need: bytes,
                budget,
                pinned,
            });
        }
        if side == Side::Low
            && let Some(slab) = self.clear_low_end(bytes, whose, actions)
        {
            return Ok(slab);
        }
        if let Some(plan) = self.choose(bytes, 0, side, filter) {
            let offset = plan.offset;
            self.commit(plan, whose, actions);
            return Ok(Slab { offset, bytes });
        }
        let fixed = |tenant| match tenant {
            Tenant::Segment(id) => !self.segment(id).is_ok_and(Segment::is_evictable),
            Tenant::Block(_) => true,
        };
        let usage = self.usage();
        Err(Error::NoRoom {
            need: bytes,
            available: self.arena.longest_without(fixed),
            budget,
            in_use: usage.in_use,
            in_flight: usage.in_flight,
            pinned,
            blocks: usage.blocks(),
        })
    }

    /// Continues a shrink of the budget with memory that was released since. Returns whether the
    /// budget is reached.
    pub fn finish_shrink(&mut self, actions: &mut Vec<Action>) -> bool {
        if self.budget_reached() {
            return true;
        }
        let mut excess = self.arena.used().saturating_sub(self.arena.end());
        let mut victims = Victims::new(self, excess);
        let mut evict = Vec::new();
        while excess > 0
            && let Some((_, segment, slab)) = victims.next(self)
        {
            evict.push((segment, slab));
            excess = excess.saturating_sub(slab.bytes);
        }
        for (segment, slab) in evict {
            self.arena.vacate(slab);
            self.evicted(segment, slab, EvictionCause::Budget, actions);
        }
        let beyond: Vec<_> = self
            .arena
            .extents()
            .rev()
            .take_while(|(slab, _)| slab.end() > self.arena.end())
            .collect();
        for (slab, tenant) in beyond {
            let Tenant::Segment(segment) = tenant else {
                continue;
            };
            let (idle, pinned) = self
                .segment(segment)
                .map(|found| (found.is_idle(), found.stays()))
                .expect("it has a slab");
            if !idle
                || self.segment(segment).map(|found| found.state)
                    != Ok(SegmentState::Resident(slab))
            {
                continue;
            }
            let filter = match self.config.policy {
                _ if pinned => VictimFilter::Any,
                Policy::PassAware => VictimFilter::UsedAfter(self.next_use(segment)),
                Policy::Lru => VictimFilter::Nothing,
            };
            if let Some(plan) = self.choose(slab.bytes, slab.bytes, Side::High, filter) {
                let to = Slab {
                    offset: plan.offset,
                    bytes: slab.bytes,
                };
                self.commit(plan, For::Budget, actions);
                self.shift(
                    Shift {
                        segment,
                        from: slab,
                        to,
                    },
                    actions,
                );
            } else if !pinned {
                self.arena.vacate(slab);
                self.evicted(segment, slab, EvictionCause::Budget, actions);
            }
        }
        self.assert_ledger();
        self.budget_reached()
    }

    /// Expected next use of an existing segment, or of a borrower of its slab.
    pub(crate) fn next_use(&self, segment: SegmentId) -> NextUse {
        let own = self.own_next_use(segment);
        self.next_use_of_group(segment, own)
    }

    /// The next use of a segment's slab by any model that shares it; `own` is the next use by the
    /// segment's own model.
    pub(crate) fn next_use_of_group(&self, segment: SegmentId, own: NextUse) -> NextUse {
        let role = self.models[&segment.model].segments[segment.index as usize].role;
        if role != Role::Holder {
            return own;
        }
        let borrowers = self.members(segment).skip(1);
        borrowers
            .map(|id| self.own_next_use(id))
            .fold(own, Ord::min)
    }

    fn own_next_use(&self, segment: SegmentId) -> NextUse {
        let model = &self.models[&segment.model];
        self.outlook(segment.model, model)
            .next_use(segment.index, &model.segments[segment.index as usize])
    }

    /// What is known of the next passes of a model: models that expect more passes take turns, the
    /// one first that has waited longest, after the passes under way. O(models).
    pub(crate) fn outlook(&self, id: ModelId, model: &Model) -> Outlook {
        let waiting = |model: &Model| {
            model.cursor.is_none() && model.expects_next_pass && !self.is_stale(model)
        };
        let length = |model: &Model| model.segments.len() as u64;
        // Passes of several models run in slices, so a long one does not keep the next from
        // beginning: a mixture's pass has thousands of segments, and another model's next pass
        // begins after a few of them.
        let slice = |segments: u64| segments.min(SLICE_SEGMENTS);
        let mut ahead = 0;
        let next_pass = if model.expects_next_pass && !self.is_stale(model) {
            for (other_id, other) in &self.models {
                let left = |cursor: u32| length(other) - u64::from(cursor);
                ahead += match other.cursor {
                    Some(cursor) if *other_id == id => left(cursor),
                    Some(cursor) => slice(left(cursor)),
                    None if *other_id == id => 0,
                    None if waiting(other) && other.begun < model.begun => slice(length(other)),
                    None => 0,
                };
            }
            NextUse {
                requests: 0,
                segments: ahead,
            }
        } else {
            NextUse {
                requests: self.requests_ahead(model),
                segments: 0,
            }
        };
        let (cursor, tied_done) = (model.cursor.map(u64::from), model.tied_done);
        Outlook {
            segments: length(model),
            cursor,
            tied_done,
            next_pass,
            passes: model.passes,
            kept: model.kept,
        }
    }

    /// The model that evicts its own segments of one size, and that size; see
    /// [`crate::stream_order`]. `None` if other models run or soon will: it takes some evictions
    /// before only one size is missing.
    pub(crate) fn streaming_size(&self) -> Option<(ModelId, u64)> {
        let mut running = self.models.iter().filter(|(_, model)| model.in_request);
        let (&id, model) = running.next().filter(|_| self.config.spread)?;
        let mut others = self.models.iter().filter(|(other, _)| **other != id);
        let goes_on = model.expects_next_pass && model.passes - model.passes_before >= PASSES_MIN;
        let lasts = goes_on || others.all(|(_, other)| other.requests == 0);
        if running.next().is_some() || !lasts {
            return None;
        }
        let size = model.sizes.pick_size(self.excess(model))?;
        Some((id, size))
    }

    /// Bytes of a model that do not fit beside blocks and the pinned segments of others.
    pub(crate) fn excess(&self, model: &Model) -> u64 {
        let others_pinned = self.usage().pinned - model.usage.pinned;
        let taken = self.usage().blocks() + others_pinned;
        let room = self.arena.end().saturating_sub(taken);
        model.bytes.saturating_sub(room)
    }

    fn is_stale(&self, model: &Model) -> bool {
        let rounds = self.pass_clock - model.begun;
        model.cursor.is_none() && rounds > ROUNDS_MAX * (self.models.len() as u64 + 1)
    }

    /// Makes room for a block at the lowest offset where nothing must stay: segments there move to
    /// holes elsewhere, or are evicted if there are none. So blocks, which do not move, gather at
    /// the low end, and large segments keep a contiguous range above them. `None`, with nothing
    /// done, if no such range can be freed.
    fn clear_low_end(&mut self, bytes: u64, whose: For, actions: &mut Vec<Action>) -> Option<Slab> {
        let goes = |id: SegmentId| {
            self.segment(id).is_ok_and(Segment::is_evictable) && !self.keeps_any(id)
        };
        let fixed = |tenant| match tenant {
            Tenant::Segment(id) => !goes(id),
            Tenant::Block(_) => true,
        };
        let window = self.arena.lowest_without(bytes, fixed)?;
        let mut excess = (self.arena.used() + bytes).saturating_sub(self.arena.end());
        let mut taken = Vec::new();
        if excess > 0 {
            let mut victims = Victims::new(self, excess);
            while excess > 0 {
                let (_, segment, slab) = victims.next(self)?;
                taken.push((segment, slab));
                excess = excess.saturating_sub(slab.bytes);
            }
        }
        for &(segment, slab) in &taken {
            self.arena.vacate(slab);
            self.evicted(segment, slab, whose.cause(segment.model), actions);
        }
        let inside: Vec<_> = self.arena.overlapping(window).collect();
        for (from, tenant) in inside {
            let Tenant::Segment(segment) = tenant else {
                unreachable!("no block is in the window")
            };
            if let Some(offset) = self.arena.hole_outside(from.bytes, window) {
                let to = Slab {
                    offset,
                    bytes: from.bytes,
                };
                self.shift(Shift { segment, from, to }, actions);
            } else {
                self.arena.vacate(from);
                self.evicted(segment, from, whose.cause(segment.model), actions);
            }
        }
        Some(window)
    }

    /// Decides how to make room for `bytes`, of which `credit` are in the ledger already. Leaves
    /// the arena without the victims, or unchanged if there is no way. Expensive slides are the
    /// last choice.
    fn choose(
        &mut self,
        bytes: u64,
        credit: u64,
        side: Side,
        filter: VictimFilter,
    ) -> Option<Placement> {
        // Where the same segments come and go, moves are few, and what they join stays together.
        // Which experts come and go is another matter in each pass.
        let by_pass = |id: ModelId| !self.models[&id].has_experts();
        let cheap = match self.streaming_size() {
            Some((id, _)) if by_pass(id) => u64::MAX,
            Some(_) | None => self.slide_max(bytes),
        };
        let plan = self.choose_within(bytes, credit, side, filter, cheap);
        if plan.is_none() && cheap < u64::MAX {
            return self.choose_within(bytes, credit, side, filter, u64::MAX);
        }
        plan
    }

    /// Maximum number of bytes that are moved for a hole of `bytes`, while there is another way.
    pub(crate) fn slide_max(&self, bytes: u64) -> u64 {
        self.config.slide_max.saturating_mul(bytes)
    }

    fn choose_within(
        &mut self,
        bytes: u64,
        credit: u64,
        side: Side,
        filter: VictimFilter,
        slide_max: u64,
    ) -> Option<Placement> {
        let mut taken: Vec<(SegmentId, Slab)> = Vec::new();
        let mut victims = None;
        // So many victims were too few, and behind so many the next look is.
        let (mut too_few, mut look_at) = (0, 0);
        let mut place = loop {
            if taken.len() >= look_at {
                if let Some(place) = self.place(bytes, credit, side, slide_max) {
                    break place;
                }
                too_few = taken.len();
                look_at = match too_few {
                    n if n < VICTIMS_ONE_BY_ONE => n + 1,
                    n => n + n / 2,
                };
            }
            let victims = victims.get_or_insert_with(|| Victims::new(self, bytes));
            let allowed = loop {
                let next = match filter {
                    VictimFilter::Nothing => None,
                    _ => victims.next(self),
                };
                match (filter, next) {
                    // Those behind it may be needed later: their order is that of their ranks.
                    (VictimFilter::UsedAfter(least), Some((next_use, ..))) if next_use <= least => {
                    }
                    (VictimFilter::OfIdleOther(than), Some((_, segment, _)))
                        if self.serves(segment, than) => {}
                    (
                        VictimFilter::OfIdleOther(_) | VictimFilter::AlreadyUsed,
                        Some((_, segment, _)),
                    ) if self.keeps_any(segment) => {}
                    (VictimFilter::AlreadyUsed, Some((_, segment, _))) => {
                        break next
                            .filter(|_| self.segment(segment).is_ok_and(|found| !found.fresh));
                    }
                    _ => break next,
                }
            };
            let Some((_, segment, slab)) = allowed else {
                // Behind the last of them nobody has looked.
                let found = match taken.len() < look_at {
                    true => self.place(bytes, credit, side, slide_max),
                    false => None,
                };
                if let Some(place) = found {
                    break place;
                }
                for (segment, slab) in taken {
                    self.arena.occupy(slab, Tenant::Segment(segment));
                }
                return None;
            };
            self.arena.vacate(slab);
            taken.push((segment, slab));
        };
        let fits = |cache: &Cache| cache.place(bytes, credit, side, slide_max);
        self.take_fewest(too_few, &mut taken, &mut place, fits);
        self.spare(&mut taken, &mut place, (bytes, credit), fits);
        let (shifts, offset) = place;
        Some(Placement {
            victims: taken,
            shifts,
            offset,
        })
    }

    /// Puts back all victims but those without which nothing fits; `too_few` of them are known not
    /// to suffice. O(log victims) searches.
    fn take_fewest(
        &mut self,
        mut too_few: usize,
        taken: &mut Vec<(SegmentId, Slab)>,
        place: &mut (Vec<Shift>, u64),
        fits: impl Fn(&Cache) -> Option<(Vec<Shift>, u64)>,
    ) {
        while taken.len() > too_few + 1 {
            let half = usize::midpoint(too_few, taken.len());
            for &(segment, slab) in &taken[half..] {
                self.arena.occupy(slab, Tenant::Segment(segment));
            }
            if let Some(found) = fits(self) {
                *place = found;
                taken.truncate(half);
                continue;
            }
            for &(_, slab) in &taken[half..] {
                self.arena.vacate(slab);
            }
            too_few = half;
        }
    }

    /// Puts back victims that turned out to be unnecessary, those needed soonest first.
    fn spare(
        &mut self,
        taken: &mut Vec<(SegmentId, Slab)>,
        place: &mut (Vec<Shift>, u64),
        (bytes, credit): (u64, u64),
        fits: impl Fn(&Cache) -> Option<(Vec<Shift>, u64)>,
    ) {
        let mut tries = 0;
        for at in (0..taken.len().saturating_sub(1)).rev() {
            let (segment, slab) = taken[at];
            if self.arena.used() + slab.bytes + bytes - credit > self.arena.end() {
                continue;
            }
            let (from, to) = touched(place, bytes);
            // What lies elsewhere is not in its way.
            if slab.end() <= from || slab.offset >= to {
                self.arena.occupy(slab, Tenant::Segment(segment));
                taken.remove(at);
                continue;
            }
            if tries >= SPARED_MAX {
                continue;
            }
            tries += 1;
            self.arena.occupy(slab, Tenant::Segment(segment));
            if let Some(better) = fits(self) {
                *place = better;
                taken.remove(at);
            } else {
                self.arena.vacate(slab);
            }
        }
    }

    /// A place for `bytes` without evictions, moving at most `slide_max` bytes.
    pub(crate) fn place(
        &self,
        bytes: u64,
        credit: u64,
        side: Side,
        slide_max: u64,
    ) -> Option<(Vec<Shift>, u64)> {
        if self.arena.used() + bytes - credit > self.arena.end() {
            return None;
        }
        if let Some(offset) = self.arena.hole(bytes, side) {
            return Some((Vec::new(), offset));
        }
        let movable = |segment| self.segment(segment).is_ok_and(Segment::is_idle);
        self.arena.slide(bytes, slide_max, movable)
    }

    fn commit(&mut self, plan: Placement, whose: For, actions: &mut Vec<Action>) {
        for (segment, slab) in plan.victims {
            self.evicted(segment, slab, whose.cause(segment.model), actions);
        }
        for shift in plan.shifts {
            self.shift(shift, actions);
        }
    }

    fn shift(&mut self, shift: Shift, actions: &mut Vec<Action>) {
        let Shift { segment, from, to } = shift;
        self.arena.vacate(from);
        self.arena.occupy(to, Tenant::Segment(segment));
        assert!(
            self.segment(segment).is_ok_and(Segment::is_idle),
            "{segment} may not be moved"
        );
        self.set_state(segment, SegmentState::Resident(to));
        self.count(segment.model, |counters| {
            counters.moves += 1;
            counters.moved_bytes += to.bytes;
        });
        actions.push(Action::Move { segment, from, to });
    }
}

/// The range of the arena that a place of `bytes` and the moves for it touch, as (start, end).
fn touched((shifts, offset): &(Vec<Shift>, u64), bytes: u64) -> (u64, u64) {
    let ends = |shift: &Shift| {
        let (from, to) = (shift.from, shift.to);
        (from.offset.min(to.offset), from.end().max(to.end()))
    };
    let own = (*offset, offset + bytes);
    shifts
        .iter()
        .map(ends)
        .fold(own, |all, one| (all.0.min(one.0), all.1.max(one.1)))
}
