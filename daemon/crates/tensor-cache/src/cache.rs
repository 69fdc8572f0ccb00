//! The cache: models, segments and blocks, and the operations for the engine. Making room is in
//! `room.rs`.
//!
//! Owned by the engine thread. Each operation runs to its end or changes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lru::LruCache;

use crate::arena::{Arena, Side, Tenant};
use crate::evict::For;
use crate::experts::Unjoined;
use crate::forecast::{History, Score};
use crate::room::VictimFilter;
use crate::sharing::Sharing;
use crate::state::{Block, Model, Role, Segment, tally, tally_total};
use crate::stream_order::StreamOrder;
use crate::{
    Acquired, Action, BYTES_MAX, BlockId, Counters, Error, EvictionCause, MODELS_MAX, ModelId,
    PassHint, Policy, SEGMENTS_MAX, SegmentId, SegmentKind, SegmentSpec, SegmentState, SetBudget,
    Slab, Usage,
};

/// Configuration of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// Maximum bytes of weights, uploads and blocks together.
    pub budget: u64,
    /// Alignment of slabs in bytes, a power of two: each slab's offset and length are multiples of
    /// it.
    pub align: u64,
    /// The eviction policy.
    pub policy: Policy,
    /// Number of uploads in flight from which on `prefetch` starts none; `acquire` always may.
    pub max_in_flight: u32,
    /// Maximum number of bytes that are moved inside the arena for each byte of a hole, before one
    /// more segment is evicted instead. With 4 there are a tenth of the moves that there are
    /// without a limit, for at most one percentage point of hit ratio.
    pub slide_max: u64,
    /// Whether a model that does not fit, while no other one runs, evicts its own segments of one
    /// size, spread evenly over the pass, instead of the one needed last. Each pass misses about
    /// the same bytes, moves none, and the computation between two misses hides the upload of the
    /// next.
    pub spread: bool,
}

impl CacheConfig {
    /// A configuration with this budget in bytes, slabs aligned to 256 bytes, the default policy,
    /// at most 4 uploads in flight, and few moves.
    pub fn new(budget: u64) -> CacheConfig {
        CacheConfig {
            budget,
            align: 256,
            policy: Policy::default(),
            max_in_flight: 4,
            slide_max: 4,
            spread: true,
        }
    }
}

/// Decides what is resident. See the crate's documentation for states and invariants.
pub struct Cache {
    pub(crate) config: CacheConfig,
    pub(crate) arena: Arena,
    /// Upper limit of the ledger in bytes: the budget, or what a shrink has reached so far.
    pub(crate) limit: u64,
    pub(crate) models: BTreeMap<ModelId, Model>,
    pub(crate) blocks: HashMap<BlockId, Block>,
    pub(crate) blocks_ever: u64,
    /// Segments that hold a slab, most recently used first.
    pub(crate) recency: LruCache<SegmentId, ()>,
    /// Number of requests of all models so far.
    pub(crate) request_clock: u64,
    /// Number of passes of all models so far.
    pub(crate) pass_clock: u64,
    /// Number of models that requests wait for.
    pub(crate) awaited: u32,
    pub(crate) usage: Usage,
    pub(crate) counters: Counters,
    pub(crate) sharing: Sharing,
    /// Free memory in which no hole for an expert can be made cheaply, as last found.
    pub(crate) unjoined: Option<Unjoined>,
}

impl Cache {
    /// An empty cache. `config.align` must be a power of two; it is a constant of the device.
    pub fn new(config: CacheConfig) -> Cache {
        assert!(
            config.align.is_power_of_two(),
            "the alignment {} is not a power of two",
            config.align
        );
        let end = config.budget.min(BYTES_MAX) & !(config.align - 1);
        Cache {
            arena: Arena::new(end),
            limit: end,
            config,
            models: BTreeMap::new(),
            blocks: HashMap::new(),
            blocks_ever: 0,
            recency: LruCache::unbounded(),
            request_clock: 0,
            pass_clock: 0,
            awaited: 0,
            usage: Usage::default(),
            counters: Counters::default(),
            sharing: Sharing::default(),
            unjoined: None,
        }
    }

    /// Registers a model and its segments. Uploads and evicts nothing.
    ///
    /// # Errors
    /// `AlreadyRegistered`; `OutOfRange` for an empty list, an empty segment or too many;
    /// `NeverFits` if a segment is larger than the budget.
    pub fn register(&mut self, model: ModelId, segments: &[SegmentSpec]) -> Result<(), Error> {
        if self.models.contains_key(&model) {
            return Err(Error::AlreadyRegistered(model));
        }
        in_range(
            "the number of models",
            self.models.len() as u64 + 1,
            MODELS_MAX as u64,
        )?;
        in_range(
            "the number of segments",
            segments.len() as u64,
            SEGMENTS_MAX as u64,
        )?;
        let mut sizes = Vec::with_capacity(segments.len());
        for spec in segments {
            in_range("the size of a segment", spec.bytes, BYTES_MAX)?;
            let need = self.rounded(spec.bytes);
            if need > self.arena.end() {
                return Err(Error::NeverFits {
                    need,
                    budget: self.config.budget,
                    pinned: 0,
                });
            }
            sizes.push(need);
        }
        let ordered = (0u32..)
            .zip(segments)
            .filter(|(_, spec)| spec.kind != SegmentKind::Expert)
            .map(|(i, _)| i);
        let model_state = Model {
            ordered: ordered.collect(),
            segments: segments
                .iter()
                .map(|&spec| Segment {
                    spec,
                    bytes: self.rounded(spec.bytes),
                    state: SegmentState::Absent,
                    refs: 0,
                    pinned: false,
                    role: Role::Alone,
                    lent_refs: 0,
                    lent_pins: 0,
                    fresh: false,
                    place: 0,
                    score: Score::default(),
                })
                .collect(),
            sizes: StreamOrder::new(&sizes),
            experts: BTreeSet::new(),
            bytes: sizes.iter().sum(),
            usage: Usage::default(),
            counters: Counters::default(),
            held: 0,
            changes: 0,
            blocks: 0,
            cursor: None,
            uses_all_experts: false,
            tied_done: false,
            expects_next_pass: false,
            in_request: false,
            requests: 0,
            passes: 0,
            passes_before: 0,
            begun: self.pass_clock,
            history: History::new(self.request_clock),
            awaited: None,
            kept: false,
        };
        self.models.insert(model, model_state);
        Ok(())
    }

    /// Unregisters a model, and evicts its resident segments.
    ///
    /// # Errors
    /// `UnknownModel`; `Busy` while a segment is in use or in flight, or a block is owned
    /// by it; `Pinned` while a segment is pinned.
    pub fn unregister(&mut self, model: ModelId, actions: &mut Vec<Action>) -> Result<(), Error> {
        let state = self.models.get(&model).ok_or(Error::UnknownModel(model))?;
        let is_own_upload = |found: &&Segment| {
            found.role != Role::Borrower && matches!(found.state, SegmentState::InFlight(_))
        };
        let in_flight = match state.usage.segments_in_flight {
            0 => 0,
            _ => state.segments.iter().filter(is_own_upload).count() as u32,
        };
        let in_use = state.held;
        if in_use > 0 || in_flight > 0 || state.blocks > 0 {
            return Err(Error::Busy {
                model,
                in_use,
                in_flight,
                blocks: state.blocks,
            });
        }
        if state.usage.segments_pinned > 0 {
            return Err(Error::Pinned {
                model,
                segments: state.usage.segments_pinned as u32,
            });
        }
        let groups = (0u32..).zip(&state.segments);
        let groups = groups.filter(|(_, found)| found.role != Role::Alone);
        let groups: Vec<u32> = groups.map(|(index, _)| index).collect();
        for index in groups {
            self.leave(SegmentId { model, index });
        }
        self.evict_all(Some(model), EvictionCause::Unload, actions)?;
        let state = self.models.remove(&model).expect("found above");
        assert_eq!(
            state.usage,
            Usage::default(),
            "a model that is forgotten holds nothing"
        );
        Ok(())
    }

    /// Marks a segment as in use, and moves the current pass past it. If it is absent, room is made
    /// and an upload begins; the caller waits for it (`uploaded`) before the bytes are read.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownSegment`; `NoRoom` if segments in the way are in use or in
    /// flight now (retry after a release or an upload); `NeverFits` if no release would help.
    pub fn acquire(
        &mut self,
        segment: SegmentId,
        actions: &mut Vec<Action>,
    ) -> Result<Acquired, Error> {
        let (state, bytes) = {
            let found = self.segment(segment)?;
            (found.state, found.bytes)
        };
        // A prefetch is of the whole group.
        let fresh = self.segment(self.holder(segment))?.fresh;
        let acquired = match state {
            SegmentState::Resident(slab) => Acquired::Resident(slab),
            SegmentState::InFlight(slab) => Acquired::InFlight(slab),
            SegmentState::Absent => {
                let whose = For::Segment(segment.model);
                let slab = match self.room_of_another_expert(segment, VictimFilter::Any, actions) {
                    Some(slab) => slab,
                    None => self.make_room(bytes, Side::High, VictimFilter::Any, whose, actions)?,
                };
                self.begin_upload(segment, slab, actions);
                Acquired::Started(slab)
            }
        };
        let missed = fresh || matches!(acquired, Acquired::Started(_));
        self.count(segment.model, |counters| {
            if missed {
                counters.misses += 1;
                counters.miss_bytes += bytes;
                counters.prefetched += u64::from(fresh);
            } else {
                counters.hits += 1;
                counters.hit_bytes += bytes;
            }
        });
        self.change_wants(segment, |found| {
            found.refs = found.refs.checked_add(1).expect("fewer than 2^32 holders");
        });
        let holder = self.holder(segment);
        self.change(holder, |found| found.fresh = false);
        self.recency.promote(&holder);
        let model = self.models.get_mut(&segment.model).expect("found above");
        if model.segments[segment.index as usize].refs == 1 {
            model.held += 1;
        }
        self.pass_over(segment);
        self.assert_ledger();
        Ok(acquired)
    }

    /// Moves the current pass past a segment, and counts a use if it is an expert.
    pub(crate) fn pass_over(&mut self, segment: SegmentId) {
        let model = self.models.get_mut(&segment.model).expect("it exists");
        let found = &mut model.segments[segment.index as usize];
        match (&mut model.cursor, found.spec.kind) {
            (Some(cursor), SegmentKind::OrderedTied) if *cursor > segment.index => {
                *cursor = model.segments.len() as u32;
                model.tied_done = true;
            }
            (Some(cursor), SegmentKind::Ordered | SegmentKind::OrderedTied) => {
                *cursor = (*cursor).max(segment.index + 1);
            }
            (cursor, SegmentKind::Expert) => {
                found.place = cursor.unwrap_or(found.place);
                let holds_slab = model.experts.remove(&(found.score.key(), segment.index));
                found.score = found.score.used(model.passes);
                if holds_slab {
                    model.experts.insert((found.score.key(), segment.index));
                }
            }
            (None, _) => {}
        }
    }

    /// Releases a segment. It stays resident until something else needs the memory.
    ///
    /// # Panics
    /// The segment is not in use: the caller lost count.
    pub fn release(&mut self, segment: SegmentId) {
        self.change_wants(segment, |found| {
            found.refs = found.refs.checked_sub(1).expect("release without acquire");
        });
        let model = self.models.get_mut(&segment.model).expect("changed above");
        if model.segments[segment.index as usize].refs == 0 {
            model.held -= 1;
        }
    }

    /// Begins to upload a segment that will be needed, unless it is resident or in flight,
    /// `max_in_flight` uploads are under way, or room could only be made by evicting something that
    /// is needed sooner. Returns whether it began one.
    pub fn prefetch(&mut self, segment: SegmentId, actions: &mut Vec<Action>) -> bool {
        let filter = match self.config.policy {
            Policy::PassAware if self.segment(segment).is_ok() => {
                VictimFilter::UsedAfter(self.next_use(segment))
            }
            _ => VictimFilter::AlreadyUsed,
        };
        self.prefetch_within(segment, filter, actions)
    }

    pub(crate) fn prefetch_within(
        &mut self,
        segment: SegmentId,
        filter: VictimFilter,
        actions: &mut Vec<Action>,
    ) -> bool {
        let Ok(found) = self.segment(segment) else {
            return false;
        };
        let bytes = found.bytes;
        if found.state != SegmentState::Absent
            || self.usage.segments_in_flight >= u64::from(self.config.max_in_flight)
        {
            return false;
        }
        let filter = match self.config.policy {
            Policy::Lru if filter != VictimFilter::Nothing => VictimFilter::AlreadyUsed,
            Policy::PassAware | Policy::Lru => filter,
        };
        let whose = For::Segment(segment.model);
        let room = self.room_of_another_expert(segment, filter, actions);
        let slab = match room {
            Some(slab) => slab,
            None => match self.make_room(bytes, Side::High, filter, whose, actions) {
                Ok(slab) => slab,
                Err(_) => return false,
            },
        };
        self.begin_upload(segment, slab, actions);
        self.change(segment, |found| found.fresh = true);
        self.assert_ledger();
        true
    }

    /// Records that the upload of a segment is complete.
    ///
    /// # Panics
    /// No upload of the segment was in flight.
    pub fn uploaded(&mut self, segment: SegmentId) {
        let state = self.segment(segment).map(|found| found.state);
        let Ok(SegmentState::InFlight(slab)) = state else {
            panic!("{segment} was not in flight")
        };
        self.set_state(segment, SegmentState::Resident(slab));
    }

    /// Records that the upload of a segment failed: its slab is freed. Whoever holds the segment
    /// must still release it, and may acquire it again.
    ///
    /// # Panics
    /// No upload of the segment was in flight.
    pub fn upload_failed(&mut self, segment: SegmentId) {
        let slab = match self.segment(segment).map(|found| found.state) {
            Ok(SegmentState::InFlight(slab)) => slab,
            _ => panic!("{segment} was not in flight"),
        };
        self.arena.vacate(slab);
        self.forget(segment);
        self.count(segment.model, |counters| counters.upload_failures += 1);
        self.assert_ledger();
    }

    /// Records that a pass of a model begins at its first segment. A pass still under way counts as
    /// ended.
    ///
    /// # Errors
    /// `UnknownModel`.
    pub fn pass_begin(&mut self, model: ModelId, hint: PassHint) -> Result<(), Error> {
        let state = self
            .models
            .get_mut(&model)
            .ok_or(Error::UnknownModel(model))?;
        if !state.in_request {
            self.request_clock += 1;
            state
                .history
                .request(self.request_clock, state.requests == 0);
            state.requests += 1;
            state.passes_before = state.passes;
            state.in_request = true;
        }
        self.pass_clock += 1;
        state.begun = self.pass_clock;
        state.passes += 1;
        state.cursor = Some(0);
        state.uses_all_experts = false;
        state.tied_done = false;
        state.expects_next_pass = hint.expects_next_pass;
        Ok(())
    }

    /// Records that the pass of a model ended, complete or not. No effect if none is under way.
    pub fn pass_end(&mut self, model: ModelId) {
        if let Some(state) = self.models.get_mut(&model)
            && state.cursor.take().is_some()
        {
            state.in_request = state.expects_next_pass;
        }
    }

    /// Records that no further pass of the model is expected for now, whatever the last hint said
    /// (an end-of-text token, a cancelled request). Called after `pass_end`, or within the last
    /// pass as soon as it is known.
    pub fn request_end(&mut self, model: ModelId) {
        if let Some(state) = self.models.get_mut(&model) {
            state.expects_next_pass = false;
            state.in_request = state.cursor.is_some();
        }
    }

    /// Sets the budget in bytes. A smaller one evicts and moves at once what it may; segments in
    /// use, in flight or pinned and blocks stay, and `finish_shrink` does the rest later. No
    /// running work fails.
    pub fn set_budget(&mut self, bytes: u64, actions: &mut Vec<Action>) -> SetBudget {
        let bytes = bytes.min(BYTES_MAX);
        let end = bytes & !(self.config.align - 1);
        self.config.budget = bytes;
        self.arena.set_end(end);
        self.limit = end.max(self.arena.used());
        let reached = self.finish_shrink(actions);
        SetBudget {
            reached,
            used: self.arena.used(),
        }
    }

    /// Offset at which the highest slab ends: the arena's memory beyond it can be returned.
    pub fn arena_end(&self) -> u64 {
        self.arena.highest()
    }

    /// Whether the ledger is within the budget. Otherwise a shrink waits for releases: call
    /// `finish_shrink` after them.
    pub fn budget_reached(&self) -> bool {
        self.arena.used() <= self.arena.end() && self.arena.highest() <= self.arena.end()
    }

    /// Changes the eviction policy.
    pub fn set_policy(&mut self, policy: Policy) {
        self.config.policy = policy;
    }

    pub(crate) fn rounded(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.config.align)
    }

    pub(crate) fn segment(&self, segment: SegmentId) -> Result<&Segment, Error> {
        let model = self
            .models
            .get(&segment.model)
            .ok_or(Error::UnknownModel(segment.model))?;
        let segments = model.segments.len() as u32;
        model
            .segments
            .get(segment.index as usize)
            .ok_or(Error::UnknownSegment { segment, segments })
    }

    /// Changes a segment, which must exist, and updates the sums of the ledger.
    pub(crate) fn change(&mut self, segment: SegmentId, how: impl FnOnce(&mut Segment)) {
        let model = self
            .models
            .get_mut(&segment.model)
            .expect("the model is registered");
        let found = model
            .segments
            .get_mut(segment.index as usize)
            .expect("the model has this segment");
        tally(&mut model.usage, found, -1);
        tally_total(&mut self.usage, found, -1);
        let before = found.state;
        how(found);
        model.changes += u64::from(found.state != before);
        tally(&mut model.usage, found, 1);
        tally_total(&mut self.usage, found, 1);
    }

    pub(crate) fn count(&mut self, model: ModelId, how: impl Fn(&mut Counters)) {
        how(&mut self.counters);
        how(&mut self
            .models
            .get_mut(&model)
            .expect("the model is registered")
            .counters);
    }

    /// The sums of the ledger over all models and blocks.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    pub(crate) fn begin_upload(
        &mut self,
        segment: SegmentId,
        slab: Slab,
        actions: &mut Vec<Action>,
    ) {
        self.lead(segment);
        self.arena.occupy(slab, Tenant::Segment(segment));
        assert_eq!(
            self.segment(segment).map(|found| found.state),
            Ok(SegmentState::Absent),
            "one upload of a segment at a time"
        );
        self.set_state(segment, SegmentState::InFlight(slab));
        self.recency.put(segment, ());
        let model = self.models.get_mut(&segment.model).expect("changed above");
        let found = &model.segments[segment.index as usize];
        if found.spec.kind == SegmentKind::Expert {
            model.experts.insert((found.score.key(), segment.index));
        }
        self.count(segment.model, |counters| {
            counters.uploads += 1;
            counters.uploaded_bytes += slab.bytes;
        });
        actions.push(Action::Upload { segment, slab });
    }

    /// Checks the ledger in two ways (the sums of segments and blocks against the extents of the
    /// arena), and lowers the limit while a shrink goes on.
    pub(crate) fn assert_ledger(&mut self) {
        let used = self.arena.used();
        assert_eq!(
            self.usage.total(),
            used,
            "the ledger and the arena disagree"
        );
        assert!(
            used <= self.limit,
            "{used} bytes used of {} allowed",
            self.limit
        );
        self.limit = self.arena.end().max(used);
    }
}

pub(crate) fn in_range(what: &'static str, value: u64, max: u64) -> Result<(), Error> {
    if value == 0 || value > max {
        Err(Error::OutOfRange { what, value, max })
    } else {
        Ok(())
    }
}
