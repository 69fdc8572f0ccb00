//! Segments of the same content that share a slab: single cases, and random operations against an
//! oracle that knows each slab once.

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_tensor_cache::*;

const ALIGN: u64 = 16;

fn id(model: u32, index: u32) -> SegmentId {
    SegmentId {
        model: ModelId(model),
        index,
    }
}

/// A cache of so many units, with models of segments of one unit.
fn cache(units: u64, models: &[u32]) -> Cache {
    let mut config = CacheConfig::new(units * ALIGN);
    config.align = ALIGN;
    let mut cache = Cache::new(config);
    for (model, &n) in (0..).zip(models) {
        let specs = vec![SegmentSpec::ordered(ALIGN); n as usize];
        cache.register(ModelId(model), &specs).unwrap();
    }
    cache
}

/// Has a segment resident, and gives it back.
fn bring(cache: &mut Cache, segment: SegmentId) -> Vec<Action> {
    let mut actions = Vec::new();
    if let Acquired::Started(_) = cache.acquire(segment, &mut actions).unwrap() {
        cache.uploaded(segment);
    }
    cache.release(segment);
    actions
}

#[test]
fn two_copies_become_one_and_the_other_is_freed() {
    let mut cache = cache(4, &[1, 1]);
    bring(&mut cache, id(0, 0));
    bring(&mut cache, id(1, 0));
    assert_eq!(cache.usage().resident, 2 * ALIGN);
    let mut actions = Vec::new();
    assert_eq!(cache.share(id(1, 0), id(0, 0), &mut actions), Ok(true));
    let [Action::Evict { segment, cause, .. }] = actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((segment, cause), (id(1, 0), EvictionCause::Shared));
    let usage = *cache.usage();
    assert_eq!((usage.resident, usage.borrowed), (ALIGN, ALIGN));
    let borrower = cache.model_stats(ModelId(1)).usage;
    assert_eq!((borrower.resident, borrower.borrowed), (ALIGN, ALIGN));
    // Both are there, in one slab.
    let mut actions = Vec::new();
    let slabs = [0, 1].map(|model| match cache.acquire(id(model, 0), &mut actions) {
        Ok(Acquired::Resident(slab)) => slab,
        other => panic!("{other:?}"),
    });
    assert_eq!(slabs[0], slabs[1]);
    // While one of them is in use neither goes.
    cache.release(id(0, 0));
    let cleared = cache.clear(None, &mut actions).unwrap();
    assert_eq!(cleared.kept, [(id(0, 0), KeptBecause::InUse)]);
    cache.release(id(1, 0));
    assert_eq!(cache.clear(None, &mut actions).unwrap().freed, ALIGN);
    cache.assert_consistent();
}

#[test]
fn a_group_is_uploaded_from_the_file_of_whoever_asks_first() {
    let mut cache = cache(4, &[1, 1]);
    let mut actions = Vec::new();
    assert_eq!(cache.share(id(1, 0), id(0, 0), &mut actions), Ok(true));
    assert!(actions.is_empty());
    let slab = cache.acquire(id(1, 0), &mut actions).unwrap().slab();
    let upload = Action::Upload {
        segment: id(1, 0),
        slab,
    };
    assert_eq!(actions, [upload]);
    let mut more = Vec::new();
    let other = cache.acquire(id(0, 0), &mut more);
    assert_eq!(other, Ok(Acquired::InFlight(slab)));
    assert_eq!((cache.holder(id(0, 0)), more.len()), (id(1, 0), 0));
    cache.uploaded(id(1, 0));
    assert!(cache.holds(id(0, 0)) && cache.holds(id(1, 0)));
    cache.assert_consistent();
}

#[test]
fn a_slab_outlives_the_model_that_held_it() {
    let mut cache = cache(4, &[1, 1, 1]);
    bring(&mut cache, id(0, 0));
    let mut actions = Vec::new();
    assert_eq!(cache.share(id(1, 0), id(0, 0), &mut actions), Ok(true));
    assert_eq!(cache.share(id(2, 0), id(1, 0), &mut actions), Ok(true));
    // It goes while another model's pass uses it.
    let slab = cache.acquire(id(2, 0), &mut actions).unwrap().slab();
    cache.unregister(ModelId(0), &mut actions).unwrap();
    assert!(actions.is_empty(), "{actions:?}");
    assert_eq!(cache.usage().resident, ALIGN);
    cache.release(id(2, 0));
    cache.unregister(ModelId(2), &mut actions).unwrap();
    let last = cache.residency(ModelId(1)).unwrap();
    assert_eq!(last[0].residency, SegmentState::Resident(slab));
    assert!(!last[0].borrowed);
    cache.unregister(ModelId(1), &mut actions).unwrap();
    assert_eq!(cache.usage().total(), 0);
}

/// Pairs of them were found apart, while the other pair was not there.
#[test]
fn two_groups_become_one() {
    let mut cache = cache(4, &[1, 1, 1, 1]);
    let mut actions = Vec::new();
    for (segment, with) in [(id(1, 0), id(0, 0)), (id(3, 0), id(2, 0))] {
        bring(&mut cache, segment);
        bring(&mut cache, with);
        assert_eq!(cache.share(segment, with, &mut actions), Ok(true));
    }
    assert_eq!(cache.usage().resident, 2 * ALIGN);
    cache.acquire(id(3, 0), &mut actions).unwrap();
    assert_eq!(cache.share(id(2, 0), id(0, 0), &mut actions), Ok(false));
    cache.release(id(3, 0));
    assert_eq!(cache.share(id(3, 0), id(1, 0), &mut actions), Ok(true));
    let usage = *cache.usage();
    assert_eq!((usage.resident, usage.borrowed), (ALIGN, 3 * ALIGN));
    let models: Vec<ModelId> = (0..4).map(ModelId).collect();
    assert_eq!(cache.shared_among(&models), 3 * ALIGN);
    assert_eq!(cache.shared_among(&models[1..3]), ALIGN);
    cache.assert_consistent();
}

/// The model that holds the slab is idle, and one that borrows it runs.
#[test]
fn what_a_running_model_borrows_of_an_idle_one_stays() {
    let mut cache = cache(3, &[2, 2, 1]);
    let mut actions = Vec::new();
    for segment in [id(0, 0), id(0, 1)] {
        bring(&mut cache, segment);
    }
    assert_eq!(cache.share(id(1, 1), id(0, 1), &mut actions), Ok(true));
    let hint = PassHint {
        expects_next_pass: true,
    };
    cache.pass_begin(ModelId(1), hint).unwrap();
    bring(&mut cache, id(1, 0));
    bring(&mut cache, id(1, 1));
    let gone = bring(&mut cache, id(2, 0));
    let [Action::Evict { segment, .. }, Action::Upload { .. }] = gone[..] else {
        panic!("{gone:?}")
    };
    // Without the other, the last one of the idle model would go.
    assert_eq!(segment, id(0, 0));
}

#[test]
fn what_is_unlike_or_in_the_way_is_not_shared() {
    let mut cache = cache(8, &[2, 2]);
    let specs = [SegmentSpec::ordered(2 * ALIGN), SegmentSpec::expert(ALIGN)];
    cache.register(ModelId(2), &specs).unwrap();
    let mut actions = Vec::new();
    let mut share = |cache: &mut Cache, a, b| cache.share(a, b, &mut actions);
    assert_eq!(share(&mut cache, id(0, 0), id(0, 1)), Ok(false));
    assert_eq!(share(&mut cache, id(0, 0), id(2, 0)), Ok(false));
    assert_eq!(share(&mut cache, id(2, 1), id(0, 0)), Ok(false));
    assert!(share(&mut cache, id(0, 0), id(3, 0)).is_err());
    // It is resident, and the other is not.
    bring(&mut cache, id(0, 0));
    assert_eq!(share(&mut cache, id(0, 0), id(1, 0)), Ok(false));
    // And the other way round it can.
    assert_eq!(share(&mut cache, id(1, 0), id(0, 0)), Ok(true));
    assert_eq!(share(&mut cache, id(1, 0), id(0, 0)), Ok(false));
    cache.assert_consistent();
}

#[derive(Clone, Copy, Debug)]
struct Seg {
    bytes: u64,
    ordered: bool,
    refs: u32,
    pinned: bool,
    group: u32,
}

/// What holds, kept from the answers and actions of the cache alone: each group has one state.
struct World {
    cache: Cache,
    segs: BTreeMap<SegmentId, Seg>,
    groups: BTreeMap<u32, SegmentState>,
    groups_ever: u32,
    blocks: Vec<(BlockId, u64)>,
    actions: Vec<Action>,
    counts: BTreeMap<&'static str, u64>,
}

const MODELS: u32 = 7;

impl World {
    fn new(rng: &mut StdRng) -> World {
        let mut config = CacheConfig::new(rng.random_range(6..30) * ALIGN);
        config.align = ALIGN;
        config.max_in_flight = rng.random_range(1..4);
        World {
            cache: Cache::new(config),
            segs: BTreeMap::new(),
            groups: BTreeMap::new(),
            groups_ever: 0,
            blocks: Vec::new(),
            actions: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn some(&self, rng: &mut StdRng, which: impl Fn(&Seg) -> bool) -> Option<SegmentId> {
        let all: Vec<_> = self.segs.iter().filter(|(_, seg)| which(seg)).collect();
        (!all.is_empty()).then(|| *all[rng.random_range(0..all.len())].0)
    }

    fn state(&self, segment: SegmentId) -> SegmentState {
        self.groups[&self.segs[&segment].group]
    }

    fn of_group(&self, group: u32) -> impl Iterator<Item = (&SegmentId, &Seg)> {
        self.segs.iter().filter(move |(_, seg)| seg.group == group)
    }

    fn models(&self) -> BTreeSet<ModelId> {
        self.segs.keys().map(|id| id.model).collect()
    }

    fn apply(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Evict {
                    segment,
                    slab,
                    cause,
                } => {
                    let group = self.segs[&segment].group;
                    let stays = |seg: &Seg| seg.refs > 0 || seg.pinned;
                    let may_go = cause == EvictionCause::Shared
                        || !self.of_group(group).any(|(_, seg)| stays(seg));
                    assert!(may_go, "{segment} went while it was used or pinned");
                    let before = self.groups.insert(group, SegmentState::Absent);
                    assert_eq!(before, Some(SegmentState::Resident(slab)));
                    self.count("evicted");
                }
                Action::Move { segment, from, to } => {
                    let group = self.segs[&segment].group;
                    assert!(!self.of_group(group).any(|(_, seg)| seg.refs > 0));
                    let before = self.groups.insert(group, SegmentState::Resident(to));
                    assert_eq!(before, Some(SegmentState::Resident(from)));
                    self.count("moved");
                }
                Action::Upload { segment, slab } => {
                    let group = self.segs[&segment].group;
                    let before = self.groups.insert(group, SegmentState::InFlight(slab));
                    assert_eq!(before, Some(SegmentState::Absent), "uploaded twice");
                    assert_eq!(self.cache.holder(segment), segment);
                    self.count("uploads");
                }
            }
        }
    }

    fn check(&self) {
        self.cache.assert_consistent();
        let slabs = self.groups.values().filter_map(SegmentState::slab);
        let blocks: u64 = self.blocks.iter().map(|(_, bytes)| bytes).sum();
        let used = slabs.map(|slab| slab.bytes).sum::<u64>() + blocks;
        assert_eq!(self.cache.usage().total(), used);
        let (mut resident, mut sum) = (0, 0);
        for (&group, state) in &self.groups {
            let members = self.of_group(group).count() as u64;
            assert!(members > 0, "a group of nobody");
            if let SegmentState::Resident(slab) = state {
                resident += slab.bytes;
                sum += slab.bytes * members;
            }
        }
        let usage = self.cache.usage();
        assert_eq!((usage.resident, usage.borrowed), (resident, sum - resident));
        for model in self.models() {
            for (index, said) in (0..).zip(self.cache.residency(model).unwrap()) {
                let segment = SegmentId { model, index };
                let seg = self.segs[&segment];
                assert_eq!(said.residency, self.state(segment), "{segment}");
                assert_eq!((said.refs, said.pinned), (seg.refs, seg.pinned));
            }
        }
    }

    fn register(&mut self, rng: &mut StdRng) {
        let model = ModelId(rng.random_range(0..MODELS));
        if self.models().contains(&model) {
            return;
        }
        let n = rng.random_range(1..6);
        let specs: Vec<_> = (0..n)
            .map(|_| match rng.random_bool(0.1) {
                true => SegmentSpec::expert(ALIGN),
                false => SegmentSpec::ordered(ALIGN * rng.random_range(1..3)),
            })
            .collect();
        if self.cache.register(model, &specs).is_err() {
            return;
        }
        for (index, spec) in (0..).zip(specs) {
            let group = self.groups_ever;
            self.groups_ever += 1;
            self.groups.insert(group, SegmentState::Absent);
            let seg = Seg {
                bytes: spec.bytes,
                ordered: spec.kind == SegmentKind::Ordered,
                refs: 0,
                pinned: false,
                group,
            };
            self.segs.insert(SegmentId { model, index }, seg);
        }
    }

    fn unregister(&mut self, rng: &mut StdRng) {
        let Some(SegmentId { model, .. }) = self.some(rng, |_| true) else {
            return;
        };
        let of_model = |world: &World| -> Vec<(SegmentId, Seg)> {
            let own = world.segs.iter().filter(|(id, _)| id.model == model);
            own.map(|(id, seg)| (*id, *seg)).collect()
        };
        let own = of_model(self);
        let is_flying = |id: SegmentId| matches!(self.state(id), SegmentState::InFlight(_));
        let own_upload = |id: SegmentId| is_flying(id) && self.cache.holder(id) == id;
        let is_busy = own.iter().any(|(id, seg)| seg.refs > 0 || own_upload(*id));
        let is_pinned = own.iter().any(|(_, seg)| seg.pinned);
        match self.cache.unregister(model, &mut self.actions) {
            Ok(()) => assert!(!is_busy && !is_pinned),
            Err(Error::Busy { .. }) => return assert!(is_busy),
            Err(Error::Pinned { .. }) => return assert!(!is_busy && is_pinned),
            Err(other) => panic!("{other}"),
        }
        self.apply();
        for (id, seg) in own {
            self.segs.remove(&id);
            if self.of_group(seg.group).next().is_none() {
                let state = self.groups.remove(&seg.group);
                assert_eq!(state, Some(SegmentState::Absent));
            } else {
                self.count("outlived");
            }
        }
    }

    fn share(&mut self, rng: &mut StdRng) {
        let (Some(a), Some(b)) = (self.some(rng, |s| s.ordered), self.some(rng, |_| true)) else {
            return;
        };
        let (seg, other) = (self.segs[&a], self.segs[&b]);
        let alike = other.ordered && seg.bytes == other.bytes;
        let models_of = |group| {
            let models = self.of_group(group).map(|(id, _)| id.model);
            models.collect::<BTreeSet<_>>()
        };
        let apart = models_of(seg.group).is_disjoint(&models_of(other.group));
        let is_resident = |id| matches!(self.state(id), SegmentState::Resident(_));
        let can = self.state(a) == SegmentState::Absent || is_resident(a) && is_resident(b);
        let idle = !self.of_group(seg.group).any(|(_, seg)| seg.refs > 0);
        let merges = [seg, other]
            .iter()
            .all(|s| self.of_group(s.group).count() > 1);
        let expected = alike && apart && can && idle;
        let shared = self.cache.share(a, b, &mut self.actions).unwrap();
        assert_eq!(shared, expected, "{a} with {b}");
        self.apply();
        if shared {
            self.groups.remove(&seg.group);
            let joins = self.segs.values_mut().filter(|s| s.group == seg.group);
            joins.for_each(|s| s.group = other.group);
            self.count("shared");
            if merges {
                self.count("merged");
            }
        }
    }

    fn acquire(&mut self, rng: &mut StdRng) {
        let Some(id) = self.some(rng, |_| true) else {
            return;
        };
        let before = self.state(id);
        match self.cache.acquire(id, &mut self.actions) {
            Ok(acquired) => {
                self.apply();
                let as_was = match acquired {
                    Acquired::Resident(slab) => SegmentState::Resident(slab),
                    Acquired::InFlight(slab) => SegmentState::InFlight(slab),
                    Acquired::Started(_) => SegmentState::Absent,
                };
                assert_eq!(as_was, before);
                assert_eq!(self.state(id).slab(), Some(acquired.slab()));
                self.segs.get_mut(&id).unwrap().refs += 1;
                self.count("acquired");
            }
            Err(Error::NoRoom { .. } | Error::NeverFits { .. }) => {
                assert!(before == SegmentState::Absent && self.actions.is_empty());
                self.count("refused");
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn end_upload(&mut self, rng: &mut StdRng, well: bool) {
        let flying = self.groups.iter();
        let flying = flying.filter(|(_, s)| matches!(s, SegmentState::InFlight(_)));
        let flying: Vec<u32> = flying.map(|(group, _)| *group).collect();
        if flying.is_empty() {
            return;
        }
        let group = flying[rng.random_range(0..flying.len())];
        let member = *self.of_group(group).next().unwrap().0;
        let holder = self.cache.holder(member);
        let slab = self.groups[&group].slab().unwrap();
        let state = match well {
            true => SegmentState::Resident(slab),
            false => SegmentState::Absent,
        };
        match well {
            true => self.cache.uploaded(holder),
            false => self.cache.upload_failed(holder),
        }
        self.groups.insert(group, state);
    }

    fn block(&mut self, rng: &mut StdRng) {
        if !self.blocks.is_empty() && rng.random_bool(0.7) {
            let at = rng.random_range(0..self.blocks.len());
            return self.cache.free(self.blocks.swap_remove(at).0);
        }
        let bytes = ALIGN * rng.random_range(1..4);
        let kind = BlockKind::Kv;
        if let Ok(id) = self.cache.reserve(kind, None, bytes, &mut self.actions) {
            self.blocks.push((id, bytes));
        }
        self.apply();
    }

    fn pin(&mut self, rng: &mut StdRng) {
        let unpin = rng.random_bool(0.7);
        let Some(id) = self.some(rng, |seg| seg.pinned == unpin) else {
            return;
        };
        let done = match unpin {
            true => self.cache.unpin(id),
            false => self.cache.pin(id),
        };
        if done.is_ok() {
            self.segs.get_mut(&id).unwrap().pinned = !unpin;
        }
    }

    fn step(&mut self, rng: &mut StdRng) {
        let model = ModelId(rng.random_range(0..MODELS));
        match rng.random_range(0..100) {
            0..=3 => self.register(rng),
            4 => self.unregister(rng),
            5..=20 => self.share(rng),
            21..=39 => self.acquire(rng),
            40..=61 => {
                if let Some(id) = self.some(rng, |seg| seg.refs > 0) {
                    self.cache.release(id);
                    self.segs.get_mut(&id).unwrap().refs -= 1;
                }
            }
            62..=66 => {
                if let Some(id) = self.some(rng, |_| true) {
                    match rng.random_range(0..3) {
                        0 => self.cache.prefetch(id, &mut self.actions),
                        1 => self.cache.bring(id, &mut self.actions),
                        _ => self.cache.recycle_slab(id, &mut self.actions),
                    };
                    self.apply();
                }
            }
            67..=84 => self.end_upload(rng, true),
            85 => self.end_upload(rng, false),
            86..=88 => self.block(rng),
            89..=90 => self.pin(rng),
            91 if rng.random_bool(0.2) => {
                let model = Some(model).filter(|id| self.models().contains(id));
                self.cache.clear(model, &mut self.actions).unwrap();
                self.apply();
            }
            92 if rng.random_bool(0.3) => {
                let budget = ALIGN * rng.random_range(4..30);
                self.cache.set_budget(budget, &mut self.actions);
                self.apply();
            }
            93 => {
                self.cache.finish_shrink(&mut self.actions);
                self.apply();
            }
            94..=97 => {
                let hint = PassHint {
                    expects_next_pass: rng.random_bool(0.5),
                };
                let _ = self.cache.pass_begin(model, hint);
            }
            98 => self.cache.pass_end(model),
            99 => {
                let policy = [Policy::PassAware, Policy::Lru][rng.random_range(0..2)];
                self.cache.set_policy(policy);
                self.cache.keep(&[model]);
            }
            _ => {}
        }
    }
}

#[test]
fn groups_agree_with_an_oracle_that_knows_each_slab_once() {
    let first: u64 = match std::env::var("ROCMFORGE_SEED") {
        Ok(seed) => seed.parse().expect("ROCMFORGE_SEED is a number"),
        Err(_) => rand::random_range(0..1 << 40),
    };
    let mut counts = BTreeMap::new();
    for seed in first..first + 240 {
        println!("ROCMFORGE_SEED={seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut world = World::new(&mut rng);
        for _ in 0..4_000 {
            world.step(&mut rng);
            world.check();
        }
        for (what, n) in world.counts {
            *counts.entry(what).or_insert(0) += n;
        }
    }
    println!("{counts:?}");
    let all = [
        "acquired", "evicted", "moved", "merged", "outlived", "refused", "shared", "uploads",
    ];
    for what in all {
        assert!(
            counts.get(what).is_some_and(|n| *n > 100),
            "{what}: {counts:?}"
        );
    }
}
