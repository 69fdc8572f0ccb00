//! The naive oracle: what the cache holds, kept from its actions alone, and
//! what it was allowed to do.

mod operations;

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_tensor_cache::*;

const ALIGN: u64 = 16;
/// Models that may be registered; the first half is asked far more often.
const MODELS: u32 = 6;

/// What happened, so that a run that never reached a case fails.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) operations: u64,
    hits: u64,
    in_flight: u64,
    started: u64,
    no_room: u64,
    never_fits: u64,
    evictions: u64,
    /// By cause; nothing is spoiled or shared here.
    causes: [u64; EvictionCause::ALL.len()],
    moves: u64,
    moves_overlapping: u64,
    prefetched: u64,
    prefetch_refused: u64,
    replaced: u64,
    reserved: u64,
    reserve_refused: u64,
    gathered: u64,
    busy: u64,
    pinned: u64,
    pin_refused: u64,
    shrunk: u64,
    shrink_waits: u64,
    settled_later: u64,
    exact_lru: u64,
    exact_belady: u64,
}

impl Outcome {
    pub(crate) fn assert_everything_happened(&self) {
        let Outcome {
            hits,
            in_flight,
            started,
            no_room,
            never_fits,
            evictions,
            moves,
            ..
        } = *self;
        let Outcome {
            moves_overlapping,
            prefetched,
            prefetch_refused,
            replaced,
            reserved,
            reserve_refused,
            gathered,
            ..
        } = *self;
        let Outcome {
            busy,
            pinned,
            pin_refused,
            shrunk,
            shrink_waits,
            settled_later,
            ..
        } = *self;
        let Outcome {
            exact_lru,
            exact_belady,
            ..
        } = *self;
        for cause in EvictionCause::ALL {
            let never = matches!(cause, EvictionCause::Spoiled | EvictionCause::Shared);
            let n = self.causes[cause as usize];
            assert_eq!(n == 0, never, "{n} evictions by {cause:?}");
        }
        let all = [
            hits,
            in_flight,
            started,
            no_room,
            never_fits,
            evictions,
            moves,
            moves_overlapping,
            prefetched,
            prefetch_refused,
            replaced,
            reserved,
            reserve_refused,
            gathered,
            busy,
            pinned,
            pin_refused,
            shrunk,
            shrink_waits,
            settled_later,
            exact_lru,
            exact_belady,
        ];
        assert!(
            all.iter().all(|count| *count > 0),
            "something never happened: {self:#?}"
        );
    }
}

#[derive(Clone, Debug)]
struct Seg {
    bytes: u64,
    kind: SegmentKind,
    state: SegmentState,
    refs: u32,
    pinned: bool,
    /// Prefetched and not used since.
    fresh: bool,
    used_at: u64,
}

impl Seg {
    fn slab_bytes(&self) -> u64 {
        self.bytes.div_ceil(ALIGN) * ALIGN
    }

    fn evictable(&self) -> bool {
        matches!(self.state, SegmentState::Resident(_)) && self.refs == 0 && !self.pinned
    }
}

#[derive(Clone, Debug, Default)]
struct Model {
    segs: Vec<Seg>,
    cursor: Option<u32>,
    expects_next_pass: bool,
}

pub(crate) struct World {
    cache: Cache,
    models: Vec<Option<Model>>,
    blocks: Vec<(BlockId, BlockKind, Option<ModelId>, Slab)>,
    budget: u64,
    /// What the ledger and the arena's end may not exceed while a shrink waits.
    used_max: u64,
    end_max: u64,
    policy: Policy,
    max_in_flight: u32,
    /// All slabs have one size: then a miss evicts one victim at most, and
    /// which one is known exactly.
    uniform: bool,
    /// Of what a model has behind it, or ahead, any may go.
    spread: bool,
    clock: u64,
    actions: Vec<Action>,
    /// For whose sake the operation under way evicts.
    whose: Whose,
}

/// For whose sake segments go: the next one of a model's, or a cause that is
/// the same for all of them.
#[derive(Clone, Copy, Debug)]
enum Whose {
    Model(ModelId),
    Cause(EvictionCause),
}

impl World {
    pub(crate) fn new(rng: &mut StdRng) -> World {
        let uniform = rng.random_bool(0.3);
        let budget = rng.random_range(6..40) * ALIGN + rng.random_range(0..ALIGN);
        let mut config = CacheConfig::new(budget);
        config.align = ALIGN;
        config.max_in_flight = rng.random_range(1..4);
        config.slide_max = match rng.random_bool(0.3) {
            true => rng.random_range(0..5),
            false => u64::MAX,
        };
        config.spread = rng.random_bool(0.5);
        World {
            cache: Cache::new(config),
            models: (0..MODELS).map(|_| None).collect(),
            blocks: Vec::new(),
            budget,
            used_max: budget / ALIGN * ALIGN,
            end_max: budget / ALIGN * ALIGN,
            policy: Policy::PassAware,
            max_in_flight: config.max_in_flight,
            uniform,
            spread: config.spread,
            clock: 0,
            actions: Vec::new(),
            whose: Whose::Cause(EvictionCause::Clear),
        }
    }

    fn end(&self) -> u64 {
        self.budget / ALIGN * ALIGN
    }

    fn model_id(rng: &mut StdRng) -> ModelId {
        ModelId(if rng.random_bool(0.8) {
            rng.random_range(0..MODELS / 2)
        } else {
            rng.random_range(0..MODELS)
        })
    }

    /// A segment that exists: hot ids, and often the one that a pass needs next.
    fn segment_id(&self, rng: &mut StdRng) -> Option<SegmentId> {
        let model = Self::model_id(rng);
        let state = self.models[model.0 as usize].as_ref()?;
        let n = state.segs.len() as u32;
        let index = match state.cursor {
            Some(cursor) if rng.random_bool(0.7) => (cursor + rng.random_range(0..2)).min(n - 1),
            _ if rng.random_bool(0.5) => rng.random_range(0..n.min(3)),
            _ => rng.random_range(0..n),
        };
        Some(SegmentId { model, index })
    }

    fn chosen(&self, rng: &mut StdRng, which: impl Fn(&Seg) -> bool) -> Option<SegmentId> {
        let all: Vec<_> = self
            .segs()
            .filter(|(_, seg)| which(seg))
            .map(|(id, _)| id)
            .collect();
        (!all.is_empty()).then(|| all[rng.random_range(0..all.len())])
    }

    fn segs(&self) -> impl Iterator<Item = (SegmentId, &Seg)> {
        (0..)
            .zip(&self.models)
            .filter_map(|(at, model)| Some((ModelId(at), model.as_ref()?)))
            .flat_map(|(model, state)| {
                (0..)
                    .zip(&state.segs)
                    .map(move |(index, seg)| (SegmentId { model, index }, seg))
            })
    }

    fn seg(&mut self, id: SegmentId) -> &mut Seg {
        &mut self.models[id.model.0 as usize].as_mut().unwrap().segs[id.index as usize]
    }

    fn used(&self) -> u64 {
        let segments: u64 = self
            .segs()
            .filter_map(|(_, seg)| seg.state.slab())
            .map(|slab| slab.bytes)
            .sum();
        segments + self.blocks.iter().map(|(.., slab)| slab.bytes).sum::<u64>()
    }

    fn pinned_resident(&self) -> u64 {
        let held = |seg: &&Seg| seg.pinned && matches!(seg.state, SegmentState::Resident(_));
        self.segs()
            .map(|(_, seg)| seg)
            .filter(held)
            .map(Seg::slab_bytes)
            .sum()
    }

    /// Slabs of everything that holds one.
    fn slabs(&self) -> Vec<Slab> {
        let segments = self.segs().filter_map(|(_, seg)| seg.state.slab());
        segments
            .chain(self.blocks.iter().map(|(.., slab)| *slab))
            .collect()
    }

    /// Whether evicting all that may be evicted leaves a range of `bytes`, moving nothing:
    /// then a request must succeed.
    fn surely_fits(&self, bytes: u64) -> bool {
        let mut map = vec![false; (self.end() / ALIGN) as usize];
        let mut stays = 0;
        let fixed = self
            .segs()
            .filter(|(_, seg)| !seg.evictable())
            .filter_map(|(_, seg)| seg.state.slab());
        for slab in fixed.chain(self.blocks.iter().map(|(.., slab)| *slab)) {
            stays += slab.bytes;
            for unit in slab.offset / ALIGN..slab.end() / ALIGN {
                if let Some(taken) = map.get_mut(unit as usize) {
                    *taken = true;
                }
            }
        }
        let longest = map
            .split(|taken| *taken)
            .map(<[bool]>::len)
            .max()
            .unwrap_or(0) as u64
            * ALIGN;
        longest >= bytes && stays + bytes <= self.end()
    }

    /// Carries out the actions in order, checking that each is legal where it stands.
    fn apply(&mut self, outcome: &mut Outcome) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Evict {
                    segment,
                    slab,
                    cause,
                } => {
                    self.check_victim(segment, outcome);
                    let expected = match self.whose {
                        Whose::Model(model) if model == segment.model => EvictionCause::OwnPass,
                        Whose::Model(_) => EvictionCause::OtherModel,
                        Whose::Cause(cause) => cause,
                    };
                    assert_eq!(cause, expected, "{segment}");
                    outcome.causes[cause as usize] += 1;
                    let seg = self.seg(segment);
                    assert!(seg.evictable(), "{segment} was not evictable: {seg:?}");
                    assert_eq!(seg.state, SegmentState::Resident(slab));
                    seg.state = SegmentState::Absent;
                    seg.fresh = false;
                    outcome.evictions += 1;
                }
                Action::Move { segment, from, to } => {
                    let end = self.end();
                    let seg = self.seg(segment);
                    assert!(seg.refs == 0, "{segment} was moved in use");
                    assert_eq!(seg.state, SegmentState::Resident(from));
                    assert_ne!(from, to);
                    assert!(to.bytes == from.bytes && to.offset % ALIGN == 0 && to.end() <= end);
                    seg.state = SegmentState::Resident(to);
                    self.check_map();
                    outcome.moves += 1;
                    outcome.moves_overlapping +=
                        u64::from(from.offset < to.end() && to.offset < from.end());
                }
                Action::Upload { segment, slab } => {
                    let end = self.end();
                    let seg = self.seg(segment);
                    assert_eq!(
                        seg.state,
                        SegmentState::Absent,
                        "{segment} was uploaded twice"
                    );
                    assert!(
                        slab.bytes == seg.slab_bytes()
                            && slab.offset % ALIGN == 0
                            && slab.end() <= end
                    );
                    seg.state = SegmentState::InFlight(slab);
                    self.check_map();
                    assert!(self.used() <= end, "an upload above the budget");
                }
            }
        }
    }

    /// With equal sizes the victim is known: the least recently used; or a segment behind
    /// the cursor or of an idle model before any that lies ahead in a pass, and of a
    /// model's own the farthest.
    fn check_victim(&mut self, victim: SegmentId, outcome: &mut Outcome) {
        if !self.uniform || self.clock == u64::MAX {
            return;
        }
        let seg = self.seg(victim).clone();
        let evictable: Vec<_> = self
            .segs()
            .filter(|(_, seg)| seg.evictable())
            .map(|(id, seg)| (id, seg.clone()))
            .collect();
        if self.policy == Policy::Lru {
            assert!(
                evictable
                    .iter()
                    .all(|(_, other)| other.used_at >= seg.used_at),
                "{victim} is not the oldest"
            );
            outcome.exact_lru += 1;
            return;
        }
        if seg.kind != SegmentKind::Ordered {
            return;
        }
        let cursor = |id: SegmentId| self.models[id.model.0 as usize].as_ref().unwrap().cursor;
        let ahead = |id: SegmentId| cursor(id).is_some_and(|cursor| id.index >= cursor);
        let same_model = |id: &SegmentId| id.model == victim.model;
        let ordered = evictable
            .iter()
            .filter(|(_, seg)| seg.kind == SegmentKind::Ordered)
            .map(|(id, _)| *id);
        for other in ordered.filter(same_model) {
            let farther = match (ahead(victim), ahead(other)) {
                (true, false) => true,
                (false, true) => false,
                _ => other.index > victim.index && !self.spread,
            };
            assert!(!farther, "{victim} went while {other} was needed later");
        }
        outcome.exact_belady += 1;
    }

    fn check_map(&self) {
        let mut map = [false; 256];
        for slab in self.slabs() {
            assert!(slab.offset % ALIGN == 0 && slab.bytes % ALIGN == 0 && slab.bytes > 0);
            for unit in slab.offset / ALIGN..slab.end() / ALIGN {
                assert!(!map[unit as usize], "two slabs share byte {}", unit * ALIGN);
                map[unit as usize] = true;
            }
        }
    }

    /// Compares everything that can be asked with what is known.
    pub(crate) fn check(&mut self) {
        self.cache.assert_consistent();
        self.check_map();
        let stats = self.cache.stats();
        let mut totals = [0; 4];
        let mut listed = stats.models.iter();
        for (at, model) in (0..).zip(&self.models) {
            let Some(model) = model else {
                assert_eq!(
                    self.cache.residency(ModelId(at)),
                    Err(Error::UnknownModel(ModelId(at)))
                );
                continue;
            };
            let status = self.cache.residency(ModelId(at)).unwrap();
            assert_eq!(status.len(), model.segs.len());
            let mut sums = [0; 4]; // resident, in flight, in use, pinned
            for (said, seg) in status.iter().zip(&model.segs) {
                let (residency, refs, pinned) = (seg.state, seg.refs, seg.pinned);
                assert_eq!(
                    *said,
                    SegmentStatus {
                        bytes: seg.bytes,
                        kind: seg.kind,
                        residency,
                        refs,
                        pinned,
                        borrowed: false,
                    }
                );
                match seg.state {
                    SegmentState::Absent => {}
                    SegmentState::InFlight(_) => sums[1] += seg.slab_bytes(),
                    SegmentState::Resident(_) => {
                        sums[0] += seg.slab_bytes();
                        sums[2] += if seg.refs > 0 { seg.slab_bytes() } else { 0 };
                        sums[3] += if seg.pinned { seg.slab_bytes() } else { 0 };
                    }
                }
            }
            let (id, stated) = listed.next().unwrap();
            assert_eq!(*id, ModelId(at));
            let usage = stated.usage;
            assert_eq!(
                [usage.resident, usage.in_flight, usage.in_use, usage.pinned],
                sums
            );
            for kind in [BlockKind::Kv, BlockKind::Scratch, BlockKind::Staging] {
                assert_eq!(
                    of_kind(&usage, kind),
                    self.block_bytes(kind, Some(ModelId(at)))
                );
            }
            totals
                .iter_mut()
                .zip(sums)
                .for_each(|(total, sum)| *total += sum);
        }
        let usage = stats.total.usage;
        assert_eq!(
            [usage.resident, usage.in_flight, usage.in_use, usage.pinned],
            totals
        );
        let blocks: u64 = self.blocks.iter().map(|(.., slab)| slab.bytes).sum();
        assert_eq!(usage.blocks(), blocks);
        for (id, _, _, slab) in &self.blocks {
            assert_eq!(self.cache.block(*id), *slab);
        }
        let used = self.used();
        let end = self.slabs().iter().map(Slab::end).max().unwrap_or(0);
        assert_eq!(usage.total(), used);
        assert!(
            used <= self.used_max && end <= self.end_max,
            "{used} {end} of {} {}",
            self.used_max,
            self.end_max
        );
        self.used_max = used.max(self.end());
        self.end_max = end.max(self.end());
        assert_eq!(
            self.cache.budget_reached(),
            used <= self.end() && end <= self.end()
        );
        assert_eq!(self.cache.arena_end(), end);
        let counters = stats.total.counters;
        assert_eq!(counters.evictions_by.sum(), counters.evictions);
        assert!(counters.evictions <= counters.uploads && counters.prefetched <= counters.misses);
        assert!(self.actions.is_empty());
    }

    fn block_bytes(&self, kind: BlockKind, owner: Option<ModelId>) -> u64 {
        let blocks = self
            .blocks
            .iter()
            .filter(|(_, k, o, _)| *k == kind && *o == owner);
        blocks.map(|(.., slab)| slab.bytes).sum()
    }
}

fn of_kind(usage: &Usage, kind: BlockKind) -> u64 {
    match kind {
        BlockKind::Kv => usage.kv,
        BlockKind::Scratch => usage.scratch,
        BlockKind::Staging => usage.staging,
    }
}
