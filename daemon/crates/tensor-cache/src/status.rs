//! Queries of a cache that change nothing, and the check of all its invariants.

use std::collections::BTreeSet;

use crate::arena::Tenant;
use crate::state::{Model, Role, Segment, tally, tally_total};
use crate::{
    Cache, Counters, Error, ModelId, ModelStats, Policy, SegmentId, SegmentKind, SegmentState,
    SegmentStatus, Stats, Usage,
};

/// A segment that the current pass will use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upcoming {
    /// The segment.
    pub segment: SegmentId,
    /// Bytes of the segment's slab.
    pub bytes: u64,
    /// Residency of the segment.
    pub state: SegmentState,
    /// Whether the segment was uploaded, or is in flight, ahead of its first use.
    pub is_fresh: bool,
}

impl Upcoming {
    /// Whether the segment was uploaded ahead of a use that has not happened yet.
    pub fn is_ahead(&self) -> bool {
        match self.state {
            SegmentState::Absent => false,
            SegmentState::InFlight(_) => true,
            SegmentState::Resident(_) => self.is_fresh,
        }
    }
}

impl Cache {
    /// The budget in bytes, as set.
    pub fn budget(&self) -> u64 {
        self.config.budget
    }

    /// The eviction policy in force.
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Counters and memory of one model; zeros if it is not registered.
    pub fn model_stats(&self, model: ModelId) -> ModelStats {
        let stats = |model: &Model| ModelStats {
            counters: model.counters,
            usage: model.usage,
            segments: model.segments.len() as u64,
            bytes: model.bytes,
        };
        self.models.get(&model).map(stats).unwrap_or_default()
    }

    /// Counters and memory of all models. O(models).
    pub fn stats(&self) -> Stats {
        let models = self.models.keys().map(|&id| (id, self.model_stats(id)));
        let models: Vec<_> = models.collect();
        Stats {
            budget: self.config.budget,
            budget_reached: self.budget_reached(),
            policy: self.config.policy,
            total: ModelStats {
                counters: self.counters,
                usage: self.usage,
                segments: models.iter().map(|(_, model)| model.segments).sum(),
                bytes: models.iter().map(|(_, model)| model.bytes).sum(),
            },
            models,
        }
    }

    /// The state of every segment of a model, in their order.
    ///
    /// # Errors
    /// `UnknownModel`.
    pub fn residency(&self, model: ModelId) -> Result<Vec<SegmentStatus>, Error> {
        let state = self.models.get(&model).ok_or(Error::UnknownModel(model))?;
        let status = |found: &Segment| SegmentStatus {
            bytes: found.spec.bytes,
            kind: found.spec.kind,
            residency: found.state,
            refs: found.refs,
            pinned: found.pinned,
            borrowed: found.role == Role::Borrower,
        };
        Ok(state.segments.iter().map(status).collect())
    }

    /// Whether nothing of a model is resident, in flight or pinned.
    pub fn is_absent(&self, model: ModelId) -> bool {
        let is_absent = |state: &Model| {
            let usage = &state.usage;
            usage.segments_resident + usage.segments_in_flight + usage.segments_pinned == 0
        };
        self.models.get(&model).is_none_or(is_absent)
    }

    /// The counters and the ledger of all models together, and of blocks without an owner.
    pub fn total(&self) -> (Counters, Usage) {
        (self.counters, self.usage)
    }

    /// Whether all of a model fits beside blocks and the pinned segments of others; false if it is
    /// not registered.
    pub fn fits(&self, model: ModelId) -> bool {
        let state = self.models.get(&model);
        state.is_some_and(|state| self.excess(state) == 0)
    }

    /// The first absent segment of a model from index `from` on, in the order of a pass.
    /// O(segments).
    pub fn next_absent(&self, model: ModelId, from: u32) -> Option<SegmentId> {
        let state = self.models.get(&model)?;
        let first = state.ordered.partition_point(|&index| index < from);
        let mut later = state.ordered[first..].iter().copied();
        let absent = |index: &u32| state.segments[*index as usize].state == SegmentState::Absent;
        let index = later.find(absent)?;
        Some(SegmentId { model, index })
    }

    /// The ordered segments (not experts) of a model in the order in which passes reach them from
    /// index `from` on; if another pass is expected, followed by those before `from`.
    pub fn coming(&self, model: ModelId, from: u32) -> impl Iterator<Item = Upcoming> {
        let state = self.models.get(&model);
        let ordered = state.map_or(&[][..], |state| &state.ordered);
        let (before, after) = ordered.split_at(ordered.partition_point(|&index| index < from));
        let next = if state.is_some_and(|state| state.expects_next_pass) {
            before
        } else {
            &[]
        };
        let all = after.iter().chain(next).copied();
        all.filter_map(move |index| {
            let found = &state?.segments[index as usize];
            Some(Upcoming {
                segment: SegmentId { model, index },
                bytes: found.bytes,
                state: found.state,
                is_fresh: found.fresh,
            })
        })
    }

    /// The size of the segments that a model evicts for itself while it streams, if they all have
    /// one; see [`crate::stream_order`].
    pub fn streamed_size(&self, model: ModelId) -> Option<u64> {
        let (streaming, size) = self.streaming_size()?;
        (streaming == model).then_some(size)
    }

    /// Whether a segment is resident.
    pub fn holds(&self, segment: SegmentId) -> bool {
        let found = self.segment(segment);
        found.is_ok_and(|found| matches!(found.state, SegmentState::Resident(_)))
    }

    /// Whether a segment is resident and was used since its upload.
    pub fn stays(&self, segment: SegmentId) -> bool {
        let found = self.segment(segment);
        found.is_ok_and(|found| matches!(found.state, SegmentState::Resident(_)) && !found.fresh)
    }

    /// Whether the first `n` segments of a model are all resident.
    ///
    /// # Errors
    /// `UnknownModel`.
    pub fn is_resident(&self, model: ModelId, n: u32) -> Result<bool, Error> {
        let state = self.models.get(&model).ok_or(Error::UnknownModel(model))?;
        let mut first = state.segments.iter().take(n as usize);
        Ok(first.all(|found| matches!(found.state, SegmentState::Resident(_))))
    }

    /// A number that changes whenever a segment of a model is uploaded, evicted or moved; 0 if the
    /// model is not registered.
    pub fn changes(&self, model: ModelId) -> u64 {
        self.models.get(&model).map_or(0, |state| state.changes)
    }

    /// Counts a use of every segment of a model, for a pass that needs them all at once and ends
    /// before the cache is called again. Returns `false` and counts nothing if a segment is not
    /// resident, or was uploaded ahead of need and never used.
    pub fn use_all(&mut self, model: ModelId) -> bool {
        let Some(state) = self.models.get_mut(&model) else {
            return false;
        };
        let n = state.segments.len() as u64;
        if state.usage.segments_resident < n || state.segments.iter().any(|found| found.fresh) {
            return false;
        }
        if let Some(cursor) = &mut state.cursor {
            *cursor = n as u32;
            state.tied_done = true;
        }
        let bytes = state.bytes;
        self.count(model, |counters| {
            counters.hits += n;
            counters.hit_bytes += bytes;
        });
        true
    }

    /// Checks every invariant from the ground up, O(everything): for tests.
    ///
    /// # Panics
    /// An invariant does not hold.
    pub fn assert_consistent(&self) {
        self.arena.assert_consistent();
        assert_eq!(
            self.usage.total(),
            self.arena.used(),
            "the ledger and the arena disagree"
        );
        assert!(self.arena.used() <= self.limit);
        let (mut total, mut extents) = (Usage::default(), 0);
        for (&id, model) in &self.models {
            let mut usage = Usage {
                kv: model.usage.kv,
                scratch: model.usage.scratch,
                ..Usage::default()
            };
            usage.staging = model.usage.staging;
            let mut experts = BTreeSet::new();
            for (index, found) in (0u32..).zip(&model.segments) {
                tally(&mut usage, found, 1);
                tally_total(&mut total, found, 1);
                let segment = SegmentId { model: id, index };
                assert_eq!(
                    self.recency.contains(&segment),
                    found.state != SegmentState::Absent && found.role != Role::Borrower
                );
                if found.spec.kind == SegmentKind::Expert && found.state != SegmentState::Absent {
                    experts.insert((found.score.key(), index));
                }
            }
            assert_eq!(usage, model.usage, "the ledger of {id}");
            assert_eq!(experts, model.experts, "the experts of {id}");
            assert_eq!(
                model.held as usize,
                model.segments.iter().filter(|found| found.refs > 0).count()
            );
        }
        let blocks = self.usage;
        (total.kv, total.scratch, total.staging) = (blocks.kv, blocks.scratch, blocks.staging);
        assert_eq!(total, self.usage, "the ledger of all models");
        self.assert_sharing();
        for (slab, tenant) in self.arena.extents() {
            extents += 1;
            match tenant {
                Tenant::Segment(id) => assert_eq!(
                    self.segment(id).map(|found| found.state.slab()),
                    Ok(Some(slab))
                ),
                Tenant::Block(id) => assert_eq!(self.block(id), slab),
            }
        }
        let segments = self.usage.segments_resident + self.usage.segments_in_flight;
        assert_eq!(extents, segments + self.blocks.len() as u64);
    }
}
