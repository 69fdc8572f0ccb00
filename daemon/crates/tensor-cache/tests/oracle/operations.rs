//! One random operation each, on the cache and on the oracle, and what it had to answer.

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_tensor_cache::*;

use super::{ALIGN, MODELS, Model, Outcome, Seg, Whose, World};

impl World {
    pub(crate) fn register(&mut self, rng: &mut StdRng) {
        let model = Self::model_id(rng);
        let units_max = (self.end() / ALIGN / 2).max(1);
        let specs: Vec<_> = (0..rng.random_range(1..12))
            .map(|_| {
                let units = if self.uniform {
                    1
                } else {
                    rng.random_range(0..units_max.min(8)) + 1
                };
                let kind = match rng.random_range(0..12) {
                    0..=2 => SegmentKind::Expert,
                    3 => SegmentKind::OrderedTied,
                    _ => SegmentKind::Ordered,
                };
                SegmentSpec {
                    bytes: units * ALIGN - rng.random_range(0..ALIGN),
                    kind,
                }
            })
            .collect();
        let result = self.cache.register(model, &specs);
        let slot = &mut self.models[model.0 as usize];
        if slot.is_some() {
            assert_eq!(result, Err(Error::AlreadyRegistered(model)));
            return;
        }
        let end = self.budget / ALIGN * ALIGN;
        if specs
            .iter()
            .any(|spec| spec.bytes.div_ceil(ALIGN) * ALIGN > end)
        {
            assert!(matches!(result, Err(Error::NeverFits { .. })));
            return;
        }
        result.unwrap();
        let seg = |spec: &SegmentSpec| Seg {
            bytes: spec.bytes,
            kind: spec.kind,
            state: SegmentState::Absent,
            refs: 0,
            pinned: false,
            fresh: false,
            used_at: 0,
        };
        *slot = Some(Model {
            segs: specs.iter().map(seg).collect(),
            cursor: None,
            expects_next_pass: false,
        });
    }

    pub(crate) fn unregister(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let model = Self::model_id(rng);
        self.whose = Whose::Cause(EvictionCause::Unload);
        let result = self.cache.unregister(model, &mut self.actions);
        let Some(state) = &self.models[model.0 as usize] else {
            return assert_eq!(result, Err(Error::UnknownModel(model)));
        };
        let in_flight = |seg: &Seg| matches!(seg.state, SegmentState::InFlight(_));
        let busy = state.segs.iter().any(|seg| seg.refs > 0 || in_flight(seg))
            || self
                .blocks
                .iter()
                .any(|(_, _, owner, _)| *owner == Some(model));
        if busy {
            assert!(matches!(result, Err(Error::Busy { .. })));
            outcome.busy += 1;
        } else if state.segs.iter().any(|seg| seg.pinned) {
            assert!(matches!(result, Err(Error::Pinned { .. })));
            outcome.pinned += 1;
        } else {
            result.unwrap();
            self.apply_unordered(outcome);
            let state = self.models[model.0 as usize].take().unwrap();
            assert!(
                state
                    .segs
                    .iter()
                    .all(|seg| seg.state == SegmentState::Absent)
            );
        }
        assert!(self.actions.is_empty());
    }

    /// Applies evictions that were asked for, in no order of policy.
    fn apply_unordered(&mut self, outcome: &mut Outcome) {
        let clock = std::mem::replace(&mut self.clock, u64::MAX);
        self.apply(outcome);
        self.clock = clock;
    }

    pub(crate) fn acquire(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let Some(id) = self.segment_id(rng) else {
            return;
        };
        let seg = self.seg(id).clone();
        let surely = self.surely_fits(seg.slab_bytes());
        let never = seg.slab_bytes() + self.pinned_resident() > self.end();
        self.whose = Whose::Model(id.model);
        let result = self.cache.acquire(id, &mut self.actions);
        let evicted = self.actions.len();
        match (&result, seg.state) {
            (Ok(Acquired::Resident(slab)), SegmentState::Resident(at)) => {
                assert!(*slab == at && evicted == 0);
                outcome.hits += 1;
            }
            (Ok(Acquired::InFlight(slab)), SegmentState::InFlight(at)) => {
                assert!(*slab == at && evicted == 0);
                outcome.in_flight += 1;
            }
            (Ok(Acquired::Started(slab)), SegmentState::Absent) => {
                assert_eq!(
                    self.actions.last(),
                    Some(&Action::Upload {
                        segment: id,
                        slab: *slab
                    })
                );
                assert!(!never);
                outcome.started += 1;
            }
            (Err(Error::NeverFits { .. }), SegmentState::Absent) => {
                assert!(never && !surely);
                outcome.never_fits += 1;
            }
            (Err(Error::NoRoom { .. }), SegmentState::Absent) => {
                assert!(!never && !surely, "there was room for {id}");
                outcome.no_room += 1;
            }
            unexpected => panic!("acquire of {id}: {unexpected:?}"),
        }
        if result.is_err() {
            return assert!(self.actions.is_empty(), "a refusal has no actions");
        }
        self.apply(outcome);
        self.clock += 1;
        let clock = self.clock;
        let seg = self.seg(id);
        seg.refs += 1;
        seg.fresh = false;
        seg.used_at = clock;
        let kind = seg.kind;
        let model = self.models[id.model.0 as usize].as_mut().unwrap();
        if let Some(cursor) = &mut model.cursor
            && kind != SegmentKind::Expert
        {
            let again = kind == SegmentKind::OrderedTied && *cursor > id.index;
            *cursor = if again {
                model.segs.len() as u32
            } else {
                (*cursor).max(id.index + 1)
            };
        }
    }

    pub(crate) fn release(&mut self, rng: &mut StdRng) {
        let Some(id) = self.chosen(rng, |seg| seg.refs > 0) else {
            return;
        };
        self.cache.release(id);
        self.seg(id).refs -= 1;
    }

    pub(crate) fn prefetch(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let Some(id) = self.segment_id(rng) else {
            let unknown = SegmentId {
                model: ModelId(MODELS),
                index: 0,
            };
            return assert!(!self.cache.prefetch(unknown, &mut self.actions));
        };
        self.whose = Whose::Model(id.model);
        let started = self.cache.prefetch(id, &mut self.actions);
        let in_flight = self
            .segs()
            .filter(|(_, seg)| matches!(seg.state, SegmentState::InFlight(_)))
            .count();
        if !started {
            outcome.prefetch_refused += 1;
            return assert!(self.actions.is_empty());
        }
        assert!(
            self.seg(id).state == SegmentState::Absent && in_flight < self.max_in_flight as usize
        );
        let model = self.models[id.model.0 as usize].as_ref().unwrap();
        for action in &self.actions {
            let Action::Evict { segment, .. } = *action else {
                continue;
            };
            let victim = &self.models[segment.model.0 as usize].as_ref().unwrap().segs
                [segment.index as usize];
            let sooner = segment.model == id.model
                && victim.kind == SegmentKind::Ordered
                && model.segs[id.index as usize].kind == SegmentKind::Ordered
                && model
                    .cursor
                    .is_some_and(|cursor| (cursor..id.index).contains(&segment.index));
            assert!(
                self.policy == Policy::Lru || !sooner,
                "{segment} is needed before {id}"
            );
            assert!(
                self.policy == Policy::PassAware || !victim.fresh,
                "{segment} was prefetched for nothing"
            );
        }
        self.apply(outcome);
        self.clock += 1;
        let clock = self.clock;
        let seg = self.seg(id);
        seg.fresh = true;
        seg.used_at = clock;
        outcome.prefetched += 1;
    }

    pub(crate) fn replace(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let Some(id) = self.segment_id(rng) else {
            return;
        };
        let before = self.seg(id).clone();
        let is_flying = |seg: &Seg| matches!(seg.state, SegmentState::InFlight(_));
        let in_flight = self.segs().filter(|(_, seg)| is_flying(seg)).count();
        self.whose = Whose::Model(id.model);
        if !self.cache.recycle_slab(id, &mut self.actions) {
            return assert!(self.actions.is_empty());
        }
        assert!(in_flight < self.max_in_flight as usize && self.policy == Policy::PassAware);
        assert!(matches!(before.state, SegmentState::Resident(_)));
        assert!(before.refs == 0 && !before.pinned);
        let Some(Action::Upload { segment: next, .. }) = self.actions.last().copied() else {
            panic!("no upload: {:?}", self.actions);
        };
        assert!(next.model == id.model && self.seg(next).state == SegmentState::Absent);
        // The victim is named, however soon others are needed.
        self.apply_unordered(outcome);
        self.clock += 1;
        let clock = self.clock;
        let seg = self.seg(next);
        seg.fresh = true;
        seg.used_at = clock;
        outcome.replaced += 1;
    }

    pub(crate) fn uploaded(&mut self, rng: &mut StdRng) {
        let Some(id) = self.chosen(rng, |seg| matches!(seg.state, SegmentState::InFlight(_)))
        else {
            return;
        };
        self.cache.uploaded(id);
        let seg = self.seg(id);
        seg.state = SegmentState::Resident(seg.state.slab().unwrap());
    }

    pub(crate) fn upload_failed(&mut self, rng: &mut StdRng) {
        let Some(id) = self.chosen(rng, |seg| matches!(seg.state, SegmentState::InFlight(_)))
        else {
            return;
        };
        self.cache.upload_failed(id);
        let seg = self.seg(id);
        seg.state = SegmentState::Absent;
        seg.fresh = false;
    }

    pub(crate) fn reserve(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let kind = [BlockKind::Kv, BlockKind::Scratch, BlockKind::Staging][rng.random_range(0..3)];
        let owner = Some(Self::model_id(rng)).filter(|_| rng.random_bool(0.5));
        let owner = owner.filter(|model| self.models[model.0 as usize].is_some());
        let units = if self.uniform {
            1
        } else {
            rng.random_range(1..6)
        };
        let bytes = units * ALIGN - rng.random_range(0..ALIGN);
        let surely = self.surely_fits(units * ALIGN);
        self.whose = Whose::Cause(match kind {
            BlockKind::Kv => EvictionCause::Kv,
            BlockKind::Scratch | BlockKind::Staging => EvictionCause::Scratch,
        });
        match self.cache.reserve(kind, owner, bytes, &mut self.actions) {
            Ok(id) => {
                // What lay in the way of a block goes where it can, whatever the policy says of it.
                self.apply_unordered(outcome);
                let slab = self.cache.block(id);
                assert!(slab.bytes == units * ALIGN && slab.end() <= self.end());
                self.blocks.push((id, kind, owner, slab));
                assert!(self.used() <= self.end());
                outcome.reserved += 1;
            }
            Err(Error::NoRoom { .. } | Error::NeverFits { .. }) => {
                assert!(!surely && self.actions.is_empty());
                outcome.reserve_refused += 1;
            }
            Err(other) => panic!("reserve: {other}"),
        }
    }

    /// Blocks of a kind move down, into holes alone, and each one only where the ones before it
    /// leave none of its size below.
    pub(crate) fn gather(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let kind = match rng.random_bool(0.5) {
            true => BlockKind::Kv,
            false => BlockKind::Scratch,
        };
        let segments = self.segs().filter_map(|(_, seg)| seg.state.slab());
        let segments: Vec<Slab> = segments.collect();
        let moves = self.cache.gather(kind);
        for &(id, from, to) in &moves {
            let at = self.blocks.iter().position(|(block, ..)| *block == id);
            let at = at.expect("a block that was reserved");
            let (_, of_kind, _, slab) = self.blocks[at];
            assert!(
                of_kind == kind
                    && slab == from
                    && to.bytes == from.bytes
                    && to.offset < from.offset
            );
            let is_apart = |other: Slab| other.end() <= to.offset || to.end() <= other.offset;
            let mut others = self.blocks.iter().filter(|(other, ..)| *other != id);
            assert!(others.all(|(.., other)| is_apart(*other)), "{to:?}");
            self.blocks[at].3 = to;
        }
        for segment in segments {
            let mut blocks = self.blocks.iter().map(|(.., slab)| *slab);
            assert!(blocks.all(|b| b.end() <= segment.offset || segment.end() <= b.offset));
        }
        outcome.gathered += moves.len() as u64;
        assert_eq!(self.cache.gather(kind), [], "all are as low as they go");
    }

    pub(crate) fn free(&mut self, rng: &mut StdRng) {
        if !self.blocks.is_empty() {
            let (id, ..) = self
                .blocks
                .swap_remove(rng.random_range(0..self.blocks.len()));
            self.cache.free(id);
        }
    }

    pub(crate) fn pin(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let Some(id) = self.segment_id(rng) else {
            return;
        };
        let whole = rng.random_bool(0.2);
        let chosen = |other: SegmentId| {
            if whole {
                other.model == id.model
            } else {
                other == id
            }
        };
        let result = if whole {
            self.cache.pin_model(id.model)
        } else {
            self.cache.pin(id)
        };
        let stays = |(other, seg): &(SegmentId, &Seg)| seg.pinned || chosen(*other);
        let pinned: u64 = self
            .segs()
            .filter(stays)
            .map(|(_, seg)| seg.slab_bytes())
            .sum();
        let rest = self
            .segs()
            .filter(|found| !stays(found))
            .map(|(_, seg)| seg.slab_bytes())
            .max();
        if pinned + rest.unwrap_or(0) > self.end() {
            outcome.pin_refused += 1;
            return assert!(matches!(result, Err(Error::NeverFits { .. })));
        }
        result.unwrap();
        let ids: Vec<_> = self
            .segs()
            .map(|(id, _)| id)
            .filter(|id| chosen(*id))
            .collect();
        ids.into_iter().for_each(|id| self.seg(id).pinned = true);
    }

    pub(crate) fn unpin(&mut self, rng: &mut StdRng) {
        if rng.random_bool(0.3) {
            let model = Self::model_id(rng);
            let result = self.cache.unpin_model(model);
            match &mut self.models[model.0 as usize] {
                Some(state) => state.segs.iter_mut().for_each(|seg| seg.pinned = false),
                None => assert_eq!(result, Err(Error::UnknownModel(model))),
            }
        } else if let Some(id) = self.chosen(rng, |seg| seg.pinned) {
            self.cache.unpin(id).unwrap();
            self.seg(id).pinned = false;
        }
    }

    pub(crate) fn clear(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let model = Some(Self::model_id(rng)).filter(|_| rng.random_bool(0.5));
        self.whose = Whose::Cause(EvictionCause::Clear);
        let result = self.cache.clear(model, &mut self.actions);
        if let Some(model) = model.filter(|model| self.models[model.0 as usize].is_none()) {
            return assert_eq!(result, Err(Error::UnknownModel(model)));
        }
        let cleared = result.unwrap();
        let before = self.used();
        self.apply_unordered(outcome);
        assert_eq!(before - self.used(), cleared.freed);
        let in_scope = |id: SegmentId| model.is_none_or(|model| model == id.model);
        let kept: Vec<_> = self
            .segs()
            .filter(|(id, seg)| in_scope(*id) && seg.state != SegmentState::Absent)
            .map(|(id, seg)| match seg.state {
                SegmentState::InFlight(_) => (id, KeptBecause::InFlight),
                _ if seg.refs > 0 => (id, KeptBecause::InUse),
                _ => {
                    assert!(seg.pinned, "{id} was not cleared");
                    (id, KeptBecause::Pinned)
                }
            })
            .collect();
        assert_eq!(kept, cleared.kept);
    }

    pub(crate) fn set_budget(&mut self, rng: &mut StdRng, outcome: &mut Outcome) {
        let budget = rng.random_range(2..48) * ALIGN + rng.random_range(0..ALIGN);
        let shrinks = budget < self.budget;
        self.budget = budget;
        (self.used_max, self.end_max) =
            (self.used_max.max(self.end()), self.end_max.max(self.end()));
        self.whose = Whose::Cause(EvictionCause::Budget);
        let said = self.cache.set_budget(budget, &mut self.actions);
        self.apply_unordered(outcome);
        assert_eq!(said.reached, self.cache.budget_reached());
        assert_eq!(said.used, self.used());
        outcome.shrunk += u64::from(shrinks && said.reached);
        outcome.shrink_waits += u64::from(!said.reached);
        self.check_settled();
    }

    pub(crate) fn settle(&mut self, outcome: &mut Outcome) {
        let waited = !self.cache.budget_reached();
        self.whose = Whose::Cause(EvictionCause::Budget);
        let reached = self.cache.finish_shrink(&mut self.actions);
        assert!(waited || self.actions.is_empty());
        self.apply_unordered(outcome);
        outcome.settled_later += u64::from(waited && reached);
        self.check_settled();
    }

    /// After a shrink nothing is left outside that could have gone.
    fn check_settled(&self) {
        for (id, seg) in self.segs().filter(|(_, seg)| seg.evictable()) {
            let slab = seg.state.slab().unwrap();
            assert!(
                slab.end() <= self.end() && self.used() <= self.end(),
                "{id} could have gone"
            );
        }
    }

    pub(crate) fn set_policy(&mut self, rng: &mut StdRng) {
        self.policy = if rng.random_bool(0.6) {
            Policy::PassAware
        } else {
            Policy::Lru
        };
        self.cache.set_policy(self.policy);
    }

    pub(crate) fn pass_begin(&mut self, rng: &mut StdRng) {
        let model = Self::model_id(rng);
        let more = rng.random_bool(0.7);
        let result = self.cache.pass_begin(
            model,
            PassHint {
                expects_next_pass: more,
            },
        );
        match &mut self.models[model.0 as usize] {
            Some(state) => (state.cursor, state.expects_next_pass) = (Some(0), more),
            None => assert_eq!(result, Err(Error::UnknownModel(model))),
        }
    }

    pub(crate) fn pass_end(&mut self, rng: &mut StdRng) {
        let model = Self::model_id(rng);
        self.cache.pass_end(model);
        if let Some(state) = &mut self.models[model.0 as usize] {
            state.cursor = None;
        }
    }

    /// It changes who goes, and nothing of what holds for whoever goes. Unknown names and
    /// repeated ones are among them.
    pub(crate) fn foresee(&mut self, rng: &mut StdRng) {
        let n = rng.random_range(0..6);
        let upcoming: Vec<ModelId> = (0..n).map(|_| Self::model_id(rng)).collect();
        self.cache.foresee(&upcoming);
    }

    pub(crate) fn request_end(&mut self, rng: &mut StdRng) {
        let model = Self::model_id(rng);
        self.cache.request_end(model);
        if let Some(state) = &mut self.models[model.0 as usize] {
            state.expects_next_pass = false;
        }
    }
}
