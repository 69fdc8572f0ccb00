//! Evictions on request, and the recorded cause of every eviction.

use crate::state::{Role, Segment};
use crate::{
    Action, BlockKind, Cache, Cleared, Error, EvictionCause, KeptBecause, ModelId, SegmentId,
    SegmentState, Slab,
};

/// What room is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// For a segment of this model.
    Segment(ModelId),
    /// For a block of this kind.
    Block(BlockKind),
    /// For a smaller budget.
    Budget,
}

impl For {
    /// Cause of an eviction of a segment of `victim`.
    pub(crate) fn cause(self, victim: ModelId) -> EvictionCause {
        match self {
            Self::Segment(model) if model == victim => EvictionCause::OwnPass,
            Self::Segment(_) => EvictionCause::OtherModel,
            Self::Block(BlockKind::Kv) => EvictionCause::Kv,
            Self::Block(BlockKind::Scratch | BlockKind::Staging) => EvictionCause::Scratch,
            Self::Budget => EvictionCause::Budget,
        }
    }
}

impl Cache {
    /// Evicts every segment that may be evicted, of one model or of all. Blocks stay, and so do
    /// slabs that a model borrows from one that is not chosen.
    ///
    /// # Errors
    /// `UnknownModel`.
    pub fn clear(
        &mut self,
        model: Option<ModelId>,
        actions: &mut Vec<Action>,
    ) -> Result<Cleared, Error> {
        self.evict_all(model, EvictionCause::Clear, actions)
    }

    pub(crate) fn evict_all(
        &mut self,
        model: Option<ModelId>,
        cause: EvictionCause,
        actions: &mut Vec<Action>,
    ) -> Result<Cleared, Error> {
        if let Some(model) = model.filter(|model| !self.models.contains_key(model)) {
            return Err(Error::UnknownModel(model));
        }
        let mut cleared = Cleared::default();
        let chosen = self
            .models
            .iter()
            .filter(|(id, _)| model.is_none_or(|model| model == **id));
        let mut victims = Vec::new();
        for (&model, state) in chosen {
            for (index, found) in (0u32..).zip(&state.segments) {
                let segment = SegmentId { model, index };
                if found.role == Role::Borrower {
                    // Its slab is another model's.
                    continue;
                }
                let because = match found.state {
                    SegmentState::Absent => continue,
                    SegmentState::InFlight(_) => KeptBecause::InFlight,
                    SegmentState::Resident(_) if found.refs + found.lent_refs > 0 => {
                        KeptBecause::InUse
                    }
                    SegmentState::Resident(_) if found.stays() => KeptBecause::Pinned,
                    SegmentState::Resident(slab) => {
                        victims.push((segment, slab));
                        continue;
                    }
                };
                cleared.kept.push((segment, because));
            }
        }
        for (segment, slab) in victims {
            self.arena.vacate(slab);
            self.evicted(segment, slab, cause, actions);
            cleared.freed += slab.bytes;
            cleared.segments += 1;
        }
        self.assert_ledger();
        Ok(cleared)
    }

    /// Evicts a resident segment whose content turned out to be bad, pinned or not, with the
    /// segments that share its slab. Returns `false` and does nothing while one of them is in use;
    /// a segment that is not resident needs no eviction.
    ///
    /// # Panics
    /// The segment does not exist.
    pub fn evict_corrupt(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let segment = self.holder(segment);
        let found = self
            .segment(segment)
            .expect("only what exists can be spoiled");
        let SegmentState::Resident(slab) = found.state else {
            return true;
        };
        if found.refs + found.lent_refs > 0 {
            return false;
        }
        self.arena.vacate(slab);
        self.gone(segment, slab, EvictionCause::Spoiled, actions);
        self.assert_ledger();
        true
    }

    /// Records an eviction whose memory the arena has freed already.
    pub(crate) fn evicted(
        &mut self,
        segment: SegmentId,
        slab: Slab,
        cause: EvictionCause,
        actions: &mut Vec<Action>,
    ) {
        assert!(
            self.segment(segment).is_ok_and(Segment::is_evictable),
            "{segment} may not be evicted"
        );
        self.gone(segment, slab, cause, actions);
    }

    pub(crate) fn gone(
        &mut self,
        segment: SegmentId,
        slab: Slab,
        cause: EvictionCause,
        actions: &mut Vec<Action>,
    ) {
        self.forget(segment);
        self.count(segment.model, |counters| {
            counters.evictions += 1;
            counters.evicted_bytes += slab.bytes;
            counters.evictions_by.count(cause);
        });
        actions.push(Action::Evict {
            segment,
            slab,
            cause,
        });
    }

    pub(crate) fn forget(&mut self, segment: SegmentId) {
        self.set_state(segment, SegmentState::Absent);
        self.change(segment, |found| found.fresh = false);
        self.recency.pop(&segment);
        let model = self.models.get_mut(&segment.model).expect("changed above");
        let score = model.segments[segment.index as usize].score;
        model.experts.remove(&(score.key(), segment.index));
    }
}
