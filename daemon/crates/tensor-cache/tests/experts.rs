//! Experts: one goes for another one of its size, and a pass that uses all of them misses
//! what there is no room for.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_tensor_cache::{
    Acquired, Action, BlockKind, Cache, CacheConfig, ModelId, PassHint, Policy, SegmentId,
    SegmentSpec,
};

/// A pass of a request that goes on.
const GOES_ON: PassHint = PassHint {
    expects_next_pass: true,
};

const LAYERS: u32 = 12;
const EXPERTS: u32 = 32;
const MODEL: ModelId = ModelId(1);

/// What some passes did.
#[derive(Default, Debug)]
struct Did {
    moved: u64,
    missed: u64,
}

/// A model whose layers have experts of two sizes, in a budget of half of it.
fn half() -> (Cache, u64) {
    half_by(Policy::PassAware)
}

fn half_by(policy: Policy) -> (Cache, u64) {
    let mut specs: Vec<SegmentSpec> = (0..LAYERS)
        .map(|_| SegmentSpec::ordered(200 << 10))
        .collect();
    for layer in 0..LAYERS {
        let bytes = if layer % 3 == 0 { 31_000 } else { 26_500 };
        specs.extend((0..EXPERTS).map(|_| SegmentSpec::expert(bytes)));
    }
    let total: u64 = specs.iter().map(|s| s.bytes).sum();
    let mut cache = Cache::new(CacheConfig {
        policy,
        ..CacheConfig::new(total / 2 + (600 << 10))
    });
    cache.register(MODEL, &specs).unwrap();
    let kv = cache.reserve(BlockKind::Kv, Some(MODEL), 600 << 10, &mut Vec::new());
    kv.unwrap();
    (cache, total)
}

fn pass(cache: &mut Cache, did: &mut Did, used: &mut dyn FnMut(u32) -> Vec<u32>) {
    let mut actions = Vec::new();
    let mut need = |cache: &mut Cache, index: u32| {
        let segment = SegmentId {
            model: MODEL,
            index,
        };
        let acquired = cache.acquire(segment, &mut actions).unwrap();
        for action in actions.drain(..) {
            match action {
                Action::Move { from, .. } => did.moved += from.bytes,
                Action::Upload { segment, slab } => {
                    did.missed += slab.bytes;
                    cache.uploaded(segment);
                }
                Action::Evict { .. } => {}
            }
        }
        assert!(!matches!(acquired, Acquired::InFlight(_)));
        cache.release(segment);
    };
    cache.pass_begin(MODEL, GOES_ON).unwrap();
    for layer in 0..LAYERS {
        need(cache, layer);
        for expert in used(layer) {
            need(cache, LAYERS + layer * EXPERTS + expert);
        }
    }
    cache.pass_end(MODEL);
    cache.assert_consistent();
}

#[test]
fn an_expert_goes_for_another_one_of_its_size_and_nothing_moves() {
    let (mut cache, _) = half();
    let mut rng = StdRng::seed_from_u64(3);
    let mut some = |_: u32| (0..4).map(|_| rng.random_range(0..EXPERTS)).collect();
    let mut early = Did::default();
    (0..60).for_each(|_| pass(&mut cache, &mut early, &mut some));
    let mut late = Did::default();
    (0..60).for_each(|_| pass(&mut cache, &mut late, &mut some));
    println!("{early:?}, then {late:?}");
    assert!(late.missed > 0);
    assert_eq!(late.moved, 0);
}

/// Layers of which experts are uploaded ahead.
const LAYERS_AHEAD: u32 = 2;

const PROMPTS: u64 = 20;

/// Long prompts, for which the experts of next layers are uploaded ahead, between passes of few
/// rows. Uploads of a prompt's pass, and how many experts were absent when it began.
fn prompts_ahead() -> (u64, u64) {
    let (mut cache, _) = half();
    let mut rng = StdRng::seed_from_u64(21);
    let mut some = |_: u32| (0..8).map(|_| rng.random_range(0..EXPERTS)).collect();
    let of_layer = |layer: u32| {
        let first = LAYERS + layer * EXPERTS;
        (first..first + EXPERTS).map(|index| SegmentId {
            model: MODEL,
            index,
        })
    };
    let (mut uploads, mut absent, mut actions) = (0, 0, Vec::new());
    let mut arrive = |cache: &mut Cache, actions: &mut Vec<Action>| {
        for action in actions.drain(..) {
            if let Action::Upload { segment, .. } = action {
                uploads += u64::from(segment.index >= LAYERS);
                cache.uploaded(segment);
            }
        }
    };
    for _ in 0..PROMPTS {
        (0..4).for_each(|_| pass(&mut cache, &mut Did::default(), &mut some));
        let all = (0..LAYERS).flat_map(of_layer);
        absent += all.filter(|&expert| !cache.holds(expert)).count() as u64;
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        for layer in 0..LAYERS {
            let attention = SegmentId {
                model: MODEL,
                index: layer,
            };
            for segment in std::iter::once(attention).chain(of_layer(layer)) {
                cache.acquire(segment, &mut actions).unwrap();
                arrive(&mut cache, &mut actions);
                cache.release(segment);
            }
            for expert in (layer + 1..LAYERS.min(layer + 1 + LAYERS_AHEAD)).flat_map(of_layer) {
                cache.prefetch_needed(expert, &mut actions);
                arrive(&mut cache, &mut actions);
            }
        }
        cache.pass_end(MODEL);
        cache.assert_consistent();
    }
    (uploads, absent)
}

#[test]
fn what_was_uploaded_ahead_does_not_go_before_its_use() {
    let (uploads, absent) = prompts_ahead();
    println!("{uploads} uploads where {absent} experts were absent");
    // Those that come ahead have the room of others meanwhile.
    let ahead = PROMPTS * u64::from(LAYERS_AHEAD * EXPERTS);
    assert!(absent > 1000 && uploads <= absent + ahead);
}

/// Experts of two sizes in room for some hundred of them, and small blocks that come and go, whose
/// holes no expert fits: nothing moves for each upload, and what is uploaded is what has no room.
#[test]
fn scattered_holes_that_are_a_small_part_move_nothing() {
    const EXPERT: [u64; 2] = [30 << 10, 26 << 10];
    const OF_EACH: u32 = 600;
    let end: u64 = 16 << 20;
    let mut cache = Cache::new(CacheConfig::new(end));
    let of_size = |bytes: u64| vec![SegmentSpec::expert(bytes); OF_EACH as usize];
    cache
        .register(MODEL, &EXPERT.map(of_size).concat())
        .unwrap();
    let mut rng = StdRng::seed_from_u64(13);
    let (mut blocks, mut actions) = (Vec::new(), Vec::new());
    let (mut uploads, mut moves) = (0, 0);
    for round in 0..12 {
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        for index in 0..2 * OF_EACH {
            if blocks.len() > 400 {
                let at = rng.random_range(0..blocks.len());
                cache.free(blocks.swap_remove(at));
            }
            let bytes = rng.random_range(1..5) << 8;
            let block = cache.reserve(BlockKind::Kv, Some(MODEL), bytes, &mut actions);
            blocks.push(block.unwrap());
            actions.clear();
            let segment = SegmentId {
                model: MODEL,
                index,
            };
            cache.acquire(segment, &mut actions).unwrap();
            for action in actions.drain(..) {
                match action {
                    Action::Upload { segment, .. } => {
                        cache.uploaded(segment);
                        uploads += u32::from(round >= 4);
                    }
                    Action::Move { .. } => moves += u32::from(round >= 4),
                    Action::Evict { .. } => {}
                }
            }
            cache.release(segment);
        }
        cache.pass_end(MODEL);
        cache.assert_consistent();
    }
    println!("{moves} moves, {uploads} uploads of {}", 8 * 2 * OF_EACH);
    assert!(uploads > 0 && moves <= uploads / 50, "{moves} of {uploads}");
}

/// Blocks do not move, so what is free between them is no room for an expert, however much it is;
/// where blocks are freed until there is room, it is used.
#[test]
fn holes_between_blocks_are_left_alone_until_one_is_long_enough() {
    const EXPERT: u64 = 30 << 10;
    const N: u32 = 1000;
    const BLOCK: u64 = EXPERT / 2;
    let mut cache = Cache::new(CacheConfig::new(16 << 20));
    let specs = vec![SegmentSpec::expert(EXPERT); N as usize];
    cache.register(MODEL, &specs).unwrap();
    let reserve = |cache: &mut Cache| {
        let block = cache.reserve(BlockKind::Kv, Some(MODEL), BLOCK, &mut Vec::new());
        block.unwrap()
    };
    let mut blocks: Vec<_> = (0..400).map(|_| reserve(&mut cache)).collect();
    // Every second one goes: 3 MB are free, in holes of half an expert.
    let mut others = Vec::new();
    for (at, block) in std::mem::take(&mut blocks).into_iter().enumerate() {
        match at % 2 {
            0 => cache.free(block),
            _ => others.push(block),
        }
    }
    let all = |cache: &mut Cache| {
        let (mut uploaded, mut evicted) = (0, 0);
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        for index in 0..N {
            let segment = SegmentId {
                model: MODEL,
                index,
            };
            let (came, went) = use_once(cache, segment);
            uploaded += came;
            evicted += went;
        }
        cache.pass_end(MODEL);
        cache.assert_consistent();
        (uploaded, evicted)
    };
    all(&mut cache);
    let moves = |cache: &Cache| cache.model_stats(MODEL).counters.moves;
    let before = moves(&cache);
    let (uploaded, evicted) = all(&mut cache);
    assert!(uploaded > 0, "they do not all have room");
    assert_eq!(evicted, uploaded, "one goes for another one");
    assert_eq!(moves(&cache), before);
    // Of the blocks that are left, those on both sides of some holes go.
    others.drain(..100).for_each(|block| cache.free(block));
    let (uploaded, evicted) = all(&mut cache);
    assert!(
        uploaded - evicted >= 90 * BLOCK * 2 * 9 / 10,
        "{uploaded} - {evicted}: what was freed is used"
    );
}

#[test]
fn a_pass_of_all_experts_misses_little_more_than_has_no_room() {
    let (mut cache, total) = half();
    let mut all = |_: u32| (0..EXPERTS).collect();
    (0..8).for_each(|_| pass(&mut cache, &mut Did::default(), &mut all));
    let mut did = Did::default();
    pass(&mut cache, &mut did, &mut all);
    println!("{did:?} of {total}");
    assert_eq!(did.moved, 0);
    assert!(did.missed < total * 6 / 10, "{} of {total}", did.missed);
}

/// Uses a segment, and tells the bytes that were uploaded for it and those of others that went.
fn use_once(cache: &mut Cache, segment: SegmentId) -> (u64, u64) {
    let mut actions = Vec::new();
    cache.acquire(segment, &mut actions).unwrap();
    let (mut uploaded, mut evicted) = (0, 0);
    for action in actions {
        match action {
            Action::Upload { segment, slab } => {
                uploaded += slab.bytes;
                cache.uploaded(segment);
            }
            Action::Evict { slab, .. } => evicted += slab.bytes,
            Action::Move { .. } => {}
        }
    }
    cache.release(segment);
    (uploaded, evicted)
}

const DENSE: ModelId = ModelId(2);
const DENSE_SEGMENTS: u32 = 20;
const DENSE_BYTES: u64 = 200 << 10;

fn dense(index: u32) -> SegmentId {
    SegmentId {
        model: DENSE,
        index,
    }
}

#[test]
fn a_model_whose_passes_come_between_slices_of_a_mixture_stays() {
    let (mut cache, _) = half();
    let specs = vec![SegmentSpec::ordered(DENSE_BYTES); DENSE_SEGMENTS as usize];
    cache.register(DENSE, &specs).unwrap();
    let mut rng = StdRng::seed_from_u64(7);
    let (mut of_dense, mut of_mixture, mut used) = (0, 0, 0);
    for round in 0..40 {
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        for layer in 0..LAYERS {
            let experts = (0..EXPERTS / 2).map(|_| rng.random_range(0..EXPERTS));
            let segments = experts.map(|expert| LAYERS + layer * EXPERTS + expert);
            for index in std::iter::once(layer).chain(segments) {
                let segment = SegmentId {
                    model: MODEL,
                    index,
                };
                of_mixture += use_once(&mut cache, segment).0;
            }
            // The mixture's pass is suspended meanwhile.
            cache.pass_begin(DENSE, GOES_ON).unwrap();
            for index in 0..DENSE_SEGMENTS {
                let (uploaded, _) = use_once(&mut cache, dense(index));
                of_dense += if round < 2 { 0 } else { uploaded };
                used += DENSE_BYTES;
            }
            cache.pass_end(DENSE);
        }
        cache.pass_end(MODEL);
    }
    assert!(of_mixture > 0);
    // It is used more often than any expert.
    assert!(of_dense < used / 200, "{of_dense} of {used} bytes");
}

#[test]
fn a_large_segment_takes_little_more_than_its_room_of_the_small_ones() {
    let (mut cache, _) = half();
    let large = vec![SegmentSpec::ordered(DENSE_BYTES); 4];
    cache.register(DENSE, &large).unwrap();
    let mut rng = StdRng::seed_from_u64(9);
    let mut some = |_: u32| (0..8).map(|_| rng.random_range(0..EXPERTS)).collect();
    (0..40).for_each(|_| pass(&mut cache, &mut Did::default(), &mut some));
    for index in 0..4 {
        let (uploaded, evicted) = use_once(&mut cache, dense(index));
        cache.assert_consistent();
        assert_eq!(uploaded, DENSE_BYTES);
        println!("{evicted} bytes went for {uploaded}");
        assert!(evicted <= 2 * DENSE_BYTES, "{evicted} bytes went");
    }
}

#[test]
fn what_was_used_without_being_brought_counts_as_used() {
    let (mut cache, _) = half();
    let segment = SegmentId {
        model: MODEL,
        index: LAYERS + 7,
    };
    assert_eq!(cache.warmth(segment), 0.0);
    cache.pass_begin(MODEL, PassHint::default()).unwrap();
    let before = cache.model_stats(MODEL).counters.misses;
    cache.done_without(segment).unwrap();
    assert!(cache.warmth(segment) > 0.0);
    assert_eq!(cache.model_stats(MODEL).counters.misses, before + 1);
    assert!(!cache.holds(segment));
    cache.assert_consistent();
}

#[test]
fn an_expert_that_nobody_asked_for_evicts_nothing() {
    for policy in [Policy::PassAware, Policy::Lru] {
        let (mut cache, _) = half_by(policy);
        let mut few = |_: u32| vec![3, 5, 8];
        pass(&mut cache, &mut Did::default(), &mut few);
        let held = |cache: &Cache| -> Vec<u32> {
            let all = 0..LAYERS + LAYERS * EXPERTS;
            let is_held = |index: &u32| {
                cache.holds(SegmentId {
                    model: MODEL,
                    index: *index,
                })
            };
            all.filter(is_held).collect()
        };
        let used = held(&cache);
        let (mut from, mut actions, mut brought) = (0, Vec::new(), Vec::new());
        while let Some(index) = cache.bring_spare_expert(MODEL, from, &mut actions) {
            for action in actions.drain(..) {
                match action {
                    Action::Upload { segment, .. } => cache.uploaded(segment),
                    Action::Evict { .. } => panic!("{action:?} for {index}"),
                    Action::Move { .. } => {}
                }
            }
            assert!(!used.contains(&index) && index >= LAYERS, "{index}");
            brought.push(index);
            from = index + 1;
        }
        cache.assert_consistent();
        // Half of the model has room, of which the pass used a part.
        assert!(brought.len() > used.len(), "{} of them", brought.len());
        let mut all = [used, brought].concat();
        all.sort_unstable();
        assert_eq!(held(&cache), all, "{policy:?}");
        // What comes too many at once waits.
        let (mut cache, _) = half_by(policy);
        let mut begun = 0;
        while cache
            .bring_spare_expert(MODEL, begun, &mut actions)
            .is_some()
        {
            begun += 1;
        }
        assert!(begun > 0 && begun < EXPERTS, "{begun} under way at once");
    }
}

/// How passes get absent experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Absent {
    Uploaded,
    ComputedElsewhere,
    /// The same, and uploaded when a layer lacks none.
    UploadedLater,
}

/// Experts that many passes lack, of which each layer prefers some, others from time to time.
fn lacking(absent: Absent) -> u64 {
    let (mut cache, _) = half();
    let mut rng = StdRng::seed_from_u64(11);
    let (mut actions, mut left, mut lacking) = (Vec::new(), Vec::new(), 0);
    let run = |cache: &mut Cache, actions: &mut Vec<Action>| {
        for action in actions.drain(..) {
            if let Action::Upload { segment, .. } = action {
                cache.uploaded(segment);
            }
        }
    };
    for number in 0..400 {
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        for layer in 0..LAYERS {
            let id = |index| SegmentId {
                model: MODEL,
                index,
            };
            cache.acquire(id(layer), &mut actions).unwrap();
            run(&mut cache, &mut actions);
            cache.release(id(layer));
            let mut absent_here = Vec::new();
            for _ in 0..4 {
                let rare = rng.random_range(0..EXPERTS);
                let often = number / 80 * 5 + rare / 4;
                let expert = if rng.random_bool(0.8) { often } else { rare } % EXPERTS;
                let segment = id(LAYERS + layer * EXPERTS + expert);
                if cache.holds(segment) {
                    cache.acquire(segment, &mut actions).unwrap();
                    cache.release(segment);
                } else if !absent_here.contains(&segment) {
                    absent_here.push(segment);
                }
            }
            let n = absent_here.len();
            lacking += n as u64;
            for (i, segment) in absent_here.into_iter().enumerate() {
                // Of many some are uploaded in any case.
                if absent == Absent::Uploaded || 2 * i + 1 < n && n > 1 {
                    cache.acquire(segment, &mut actions).unwrap();
                    run(&mut cache, &mut actions);
                    cache.release(segment);
                } else {
                    cache.done_without(segment).unwrap();
                    left.push(segment);
                }
            }
            if n == 0 && absent == Absent::UploadedLater {
                while let Some(segment) = left.pop() {
                    if cache.prefetch_for_later(segment, &mut actions) {
                        run(&mut cache, &mut actions);
                        break;
                    }
                }
            }
        }
        cache.pass_end(MODEL);
        cache.assert_consistent();
    }
    lacking
}

#[test]
fn what_is_uploaded_later_is_there_nearly_as_often_as_what_is_waited_for() {
    let [waited, never, later] = [
        Absent::Uploaded,
        Absent::ComputedElsewhere,
        Absent::UploadedLater,
    ]
    .map(lacking);
    println!("lacking: {waited} waited for, {never} never, {later} later");
    // Most of what is lost by not uploading comes back.
    assert!(never > waited, "{never} of {waited}");
    assert!(3 * later.saturating_sub(waited) < never - waited);
}

#[test]
fn nothing_goes_for_an_expert_that_is_used_later() {
    let (mut cache, _) = half();
    let mut often = |_: u32| (0..8).collect();
    (0..40).for_each(|_| pass(&mut cache, &mut Did::default(), &mut often));
    let mut actions = Vec::new();
    let mut filler = (0..LAYERS * EXPERTS).map(|index| SegmentId {
        model: MODEL,
        index: LAYERS + index,
    });
    // Room that nobody has is taken; then what is never used brings nothing more.
    let begun = filler.clone().filter(|&segment| {
        let begun = cache.prefetch_for_later(segment, &mut actions);
        for action in actions.drain(..) {
            match action {
                Action::Upload { segment, .. } => cache.uploaded(segment),
                Action::Evict { .. } => panic!("{action:?}"),
                Action::Move { .. } => {}
            }
        }
        begun
    });
    assert!(begun.count() > 0);
    let rare = filler.rfind(|&segment| !cache.holds(segment)).unwrap();
    for _ in 0..200 {
        cache.pass_begin(MODEL, GOES_ON).unwrap();
        cache.done_without(rare).unwrap();
        cache.pass_end(MODEL);
    }
    // Now it is used more than others.
    assert!(cache.prefetch_for_later(rare, &mut actions));
    let evicted = |action: &Action| matches!(action, Action::Evict { .. });
    assert!(actions.iter().any(evicted), "{actions:?}");
    assert!(!cache.prefetch_for_later(
        SegmentId {
            index: 1 << 20,
            ..rare
        },
        &mut actions
    ));
}
