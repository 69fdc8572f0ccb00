//! Segments with the same content in several models, which share one slab.
//!
//! The caller decides which contents are the same ([`Cache::share`]). One segment of such a group
//! holds the slab, the others borrow it: their state is that of the holder. Actions name the holder
//! alone. While the group is absent, whichever is needed first becomes its holder, so that it is
//! uploaded from the file of the model that asks.
//!
//! *Invariants*, checked by `assert_consistent`:
//! - Each borrower's state is that of its holder, which borrows nothing.
//! - The bytes of a group count once in the ledger, and in the view of each of its models.
//! - A group is neither evicted nor moved while one of its segments is in use, and not evicted
//!   while one of them is pinned.

use std::collections::HashMap;

use crate::arena::Tenant;
use crate::state::{Role, Segment};
use crate::{Action, Cache, Error, EvictionCause, ModelId, SegmentId, SegmentKind, SegmentState};

/// Which segments borrow which slab.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    holders: HashMap<SegmentId, SegmentId>,
    borrowers: HashMap<SegmentId, Vec<SegmentId>>,
}

impl Sharing {
    fn borrowers(&self, holder: SegmentId) -> &[SegmentId] {
        self.borrowers.get(&holder).map_or(&[], Vec::as_slice)
    }
}

impl Cache {
    /// Lets two segments of the same content, with their groups, share the slab of `with`. The slab
    /// of the group of `segment` is evicted. Returns `false` and does nothing if that is impossible
    /// now: the group of `segment` is in use or in flight, or it is resident and `with` is not; or
    /// the two differ in size, a model has segments in both groups, or they are experts.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownSegment`.
    pub fn share(
        &mut self,
        segment: SegmentId,
        with: SegmentId,
        actions: &mut Vec<Action>,
    ) -> Result<bool, Error> {
        let (joins, holder) = (self.holder(segment), self.holder(with));
        let (found, other) = (self.segment(joins)?, self.segment(holder)?);
        let is_ordered = found.spec.kind == SegmentKind::Ordered;
        let is_in_use = found.refs + found.lent_refs > 0;
        let is_of_both = self.members(joins).any(|id| {
            let mut others = self.members(holder);
            others.any(|other| other.model == id.model)
        });
        if found.spec != other.spec || !is_ordered || is_in_use || is_of_both {
            return Ok(false);
        }
        match (found.state, other.state) {
            (SegmentState::Absent, _) => {}
            (SegmentState::Resident(slab), SegmentState::Resident(_)) => {
                self.arena.vacate(slab);
                self.gone(joins, slab, EvictionCause::Shared, actions);
            }
            (SegmentState::Resident(_) | SegmentState::InFlight(_), _) => return Ok(false),
        }
        let members: Vec<SegmentId> = self.members(joins).collect();
        for &member in &members {
            self.sharing.holders.remove(&member);
        }
        self.sharing.borrowers.remove(&joins);
        self.count_lent(joins);
        for member in members {
            self.borrow(member, holder);
        }
        self.assert_ledger();
        Ok(true)
    }

    /// The segment that holds the slab of `segment`: itself, unless it borrows.
    pub fn holder(&self, segment: SegmentId) -> SegmentId {
        let holder = self.sharing.holders.get(&segment);
        holder.copied().unwrap_or(segment)
    }

    /// All segments that use the slab of a holder, including itself.
    pub fn members(&self, holder: SegmentId) -> impl Iterator<Item = SegmentId> {
        let borrowers = self.sharing.borrowers(holder).iter().copied();
        std::iter::once(holder).chain(borrowers)
    }

    /// Bytes of slabs that several of these models share, counted once for each model but one: the
    /// excess of the models' sum.
    pub fn shared_among(&self, models: &[ModelId]) -> u64 {
        let groups = self.sharing.borrowers.keys().map(|&holder| {
            let of_models = self.members(holder).filter(|id| models.contains(&id.model));
            let bytes = self.segment(holder).map_or(0, |found| found.bytes);
            bytes * (of_models.count() as u64).saturating_sub(1)
        });
        groups.sum()
    }

    /// Whether any model in a holder's group is kept.
    pub(crate) fn keeps_any(&self, holder: SegmentId) -> bool {
        self.members(holder).any(|id| self.keeps(id.model))
    }

    /// Whether passes of `model`, or running requests of others, use a group.
    pub(crate) fn serves(&self, holder: SegmentId, model: ModelId) -> bool {
        let mut models = self.members(holder).map(|id| id.model);
        models.any(|id| id == model || self.models[&id].in_request)
    }

    /// Makes a segment of an absent group its holder. All other segments stay as they are.
    pub(crate) fn lead(&mut self, segment: SegmentId) {
        let holder = self.holder(segment);
        if holder != segment {
            self.hand_over(holder, segment);
        }
    }

    /// Removes a segment from its group; if it holds the slab, another one becomes the holder.
    pub(crate) fn leave(&mut self, segment: SegmentId) {
        if let Some(&heir) = self.sharing.borrowers(segment).first() {
            self.hand_over(segment, heir);
        }
        let Some(holder) = self.sharing.holders.remove(&segment) else {
            return;
        };
        let list = self.sharing.borrowers.get_mut(&holder);
        let list = list.expect("a holder of borrowers");
        list.retain(|id| *id != segment);
        if list.is_empty() {
            self.sharing.borrowers.remove(&holder);
        }
        self.change(segment, |found| {
            found.state = SegmentState::Absent;
            found.role = Role::Alone;
        });
        self.count_lent(holder);
    }

    fn borrow(&mut self, segment: SegmentId, holder: SegmentId) {
        let state = self.segment(holder).map(|found| found.state);
        let state = state.expect("the holder exists");
        self.sharing.holders.insert(segment, holder);
        let list = self.sharing.borrowers.entry(holder).or_default();
        list.push(segment);
        self.change(segment, |found| {
            found.role = Role::Borrower;
            found.state = state;
        });
        self.count_lent(holder);
    }

    /// Makes one of a holder's borrowers the holder of the slab, if there is one.
    fn hand_over(&mut self, holder: SegmentId, heir: SegmentId) {
        let state = self.segment(holder).map(|found| found.state);
        let state = state.expect("the holder exists");
        let mut others = self.sharing.borrowers.remove(&holder).unwrap_or_default();
        others.retain(|id| *id != heir);
        others.push(holder);
        for &other in &others {
            self.sharing.holders.insert(other, heir);
        }
        self.sharing.holders.remove(&heir);
        self.sharing.borrowers.insert(heir, others);
        self.change(holder, |found| found.role = Role::Borrower);
        self.count_lent(holder);
        self.count_lent(heir);
        if let Some(slab) = state.slab() {
            self.arena.vacate(slab);
            self.arena.occupy(slab, Tenant::Segment(heir));
            self.recency.pop(&holder);
            self.recency.put(heir, ());
        }
    }

    /// Recounts the uses and pins of a holder's borrowers.
    pub(crate) fn count_lent(&mut self, holder: SegmentId) {
        let (mut refs, mut pins) = (0, 0);
        for &id in self.sharing.borrowers(holder) {
            let found = self.segment(id).expect("a borrower exists");
            refs += u32::from(found.refs > 0);
            pins += u32::from(found.pinned);
        }
        let borrows = self.sharing.holders.contains_key(&holder);
        let lends = self.sharing.borrowers.contains_key(&holder);
        self.change(holder, |found| {
            (found.lent_refs, found.lent_pins) = (refs, pins);
            found.role = match (borrows, lends) {
                (true, _) => Role::Borrower,
                (false, true) => Role::Holder,
                (false, false) => Role::Alone,
            };
        });
    }

    /// Changes a segment, and the holder's counts of its borrowers.
    pub(crate) fn change_wants(&mut self, segment: SegmentId, how: impl FnOnce(&mut Segment)) {
        self.change(segment, how);
        if let Some(&holder) = self.sharing.holders.get(&segment) {
            self.count_lent(holder);
        }
    }

    /// Changes the state of a holder and of its borrowers.
    pub(crate) fn set_state(&mut self, holder: SegmentId, state: SegmentState) {
        self.change(holder, |found| found.state = state);
        let n = self.sharing.borrowers(holder).len();
        for at in 0..n {
            let borrower = self.sharing.borrowers(holder)[at];
            self.change(borrower, |found| found.state = state);
        }
    }

    /// Checks that roles, states and counts of groups agree.
    ///
    /// # Panics
    /// They do not agree.
    pub(crate) fn assert_sharing(&self) {
        let mut borrowers = 0;
        for (&holder, list) in &self.sharing.borrowers {
            let of = self.segment(holder).expect("a holder exists");
            assert_eq!(of.role, Role::Holder, "{holder}");
            assert!(!list.is_empty());
            let all = list.iter().map(|id| self.segment(*id).expect("it exists"));
            let (mut refs, mut pins) = (0, 0);
            for found in all {
                assert_eq!((found.role, found.state), (Role::Borrower, of.state));
                assert_eq!(found.spec, of.spec);
                refs += u32::from(found.refs > 0);
                pins += u32::from(found.pinned);
            }
            assert_eq!((refs, pins), (of.lent_refs, of.lent_pins), "{holder}");
            assert!(list.iter().all(|id| self.holder(*id) == holder));
            borrowers += list.len();
        }
        assert_eq!(borrowers, self.sharing.holders.len());
        let roles = self.models.values().flat_map(|model| &model.segments);
        let (mut borrow, mut hold) = (0, 0);
        for found in roles {
            borrow += usize::from(found.role == Role::Borrower);
            hold += usize::from(found.role == Role::Holder);
            let lends = found.role == Role::Holder;
            assert!(lends || found.lent_refs + found.lent_pins == 0);
        }
        let expected = (self.sharing.holders.len(), self.sharing.borrowers.len());
        assert_eq!((borrow, hold), expected);
    }
}
