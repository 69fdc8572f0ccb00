//! What the cache promises, one promise a test.

use rocmforge_tensor_cache::*;

const A: ModelId = ModelId(1);
const B: ModelId = ModelId(2);

/// One whose victims and moves are known: what is needed last goes, and anything may be moved.
fn cache(budget: u64) -> Cache {
    Cache::new(CacheConfig {
        align: 1,
        spread: false,
        slide_max: u64::MAX,
        ..CacheConfig::new(budget)
    })
}

fn hint(expects_next_pass: bool) -> PassHint {
    PassHint { expects_next_pass }
}

fn segment(model: ModelId, index: u32) -> SegmentId {
    SegmentId { model, index }
}

fn ordered(sizes: &[u64]) -> Vec<SegmentSpec> {
    sizes
        .iter()
        .map(|&bytes| SegmentSpec::ordered(bytes))
        .collect()
}

/// Acquires, completes the upload if there is one, and releases. Whether it was a hit.
fn touch(cache: &mut Cache, id: SegmentId, actions: &mut Vec<Action>) -> bool {
    let acquired = cache.acquire(id, actions).unwrap();
    if !matches!(acquired, Acquired::Resident(_)) {
        cache.uploaded(id);
    }
    cache.release(id);
    cache.assert_consistent();
    matches!(acquired, Acquired::Resident(_))
}

/// One pass over `segments` segments; the indices that hit.
fn pass(cache: &mut Cache, model: ModelId, segments: u32, expects_next_pass: bool) -> Vec<u32> {
    cache.pass_begin(model, hint(expects_next_pass)).unwrap();
    let mut actions = Vec::new();
    let hits = (0..segments)
        .filter(|&index| touch(cache, segment(model, index), &mut actions))
        .collect();
    cache.pass_end(model);
    hits
}

#[test]
fn a_cycle_larger_than_the_cache_hits_what_fits_under_belady_and_nothing_under_lru() {
    for (policy, least, most) in [(Policy::PassAware, 4, 5), (Policy::Lru, 0, 0)] {
        let mut cache = cache(50);
        cache.set_policy(policy);
        cache.register(A, &ordered(&[10; 8])).unwrap();
        pass(&mut cache, A, 8, true);
        for _ in 0..20 {
            let hits = pass(&mut cache, A, 8, true).len();
            assert!((least..=most).contains(&hits), "{policy:?}: {hits} hits");
        }
    }
}

#[test]
fn an_idle_model_gives_up_its_tail_and_keeps_its_prefix() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[10; 6])).unwrap();
    cache.register(B, &ordered(&[10; 6])).unwrap();
    pass(&mut cache, A, 6, false);
    pass(&mut cache, B, 6, true);
    let resident: Vec<_> = cache
        .residency(A)
        .unwrap()
        .iter()
        .map(|s| s.residency != SegmentState::Absent)
        .collect();
    assert_eq!(resident, [true, true, true, true, false, false]);
}

#[test]
fn what_a_request_waits_for_goes_after_what_was_used_later() {
    for (upcoming, goes) in [(vec![], A), (vec![A], B), (vec![ModelId(9), B, B], A)] {
        let mut cache = cache(120);
        let runs = ModelId(3);
        for model in [A, B, runs] {
            cache.register(model, &ordered(&[10; 6])).unwrap();
        }
        pass(&mut cache, A, 6, false);
        pass(&mut cache, B, 6, false);
        cache.foresee(&upcoming);
        pass(&mut cache, runs, 6, false);
        for model in [A, B] {
            let resident = cache.model_stats(model).usage.segments_resident;
            assert_eq!(resident == 0, model == goes, "{upcoming:?}: {resident}");
        }
    }
}

/// StreamOrder as in a Q4_K_M file of an 8B model, in MiB.
fn dense(layers: usize) -> Vec<u64> {
    let layer = |at: usize| if at.is_multiple_of(3) { 131 } else { 117 };
    [282]
        .into_iter()
        .chain((0..layers).map(layer))
        .chain([411])
        .collect()
}

#[test]
fn two_models_that_alternate_in_room_for_one_and_a_half_never_reload_a_whole_model() {
    let (a, b) = (dense(32), dense(24));
    let bytes = |sizes: &[u64]| sizes.iter().sum::<u64>();
    for passes in [[1, 1], [1, 5], [5, 1], [3, 8], [40, 2]] {
        for end_is_known in [true, false] {
            let mut cache = cache((bytes(&a) + bytes(&b)) * 3 / 4);
            cache.register(A, &ordered(&a)).unwrap();
            cache.register(B, &ordered(&b)).unwrap();
            for request in 0..40 {
                let (model, sizes) = [(A, &a), (B, &b)][request % 2];
                let uploaded = |cache: &Cache| cache.stats().total.counters.uploaded_bytes;
                let before = uploaded(&cache);
                for left in (0..passes[request % 2]).rev() {
                    pass(
                        &mut cache,
                        model,
                        sizes.len() as u32,
                        !end_is_known || left > 0,
                    );
                }
                cache.request_end(model);
                if request >= 2 {
                    let uploaded = uploaded(&cache) - before;
                    assert!(
                        uploaded * 10 < bytes(sizes) * 8,
                        "{passes:?}: {uploaded} of {}",
                        bytes(sizes)
                    );
                }
            }
        }
    }
}

#[test]
fn a_room_that_is_handed_on_keeps_the_same_segments_resident_and_uploads_across_passes() {
    let sizes = dense(32);
    let total: u64 = sizes.iter().sum();
    let mut cache = cache(total * 3 / 4);
    cache.register(A, &ordered(&sizes)).unwrap();
    let mut actions = Vec::new();
    let mut missed = Vec::new();
    for _ in 0..8 {
        cache.pass_begin(A, hint(true)).unwrap();
        let mut absent = Vec::new();
        for index in 0..sizes.len() as u32 {
            let hit = touch(&mut cache, segment(A, index), &mut actions);
            if !hit {
                absent.push(index);
                cache.recycle_slab(segment(A, index), &mut actions);
            }
        }
        cache.pass_end(A);
        missed.push(absent);
    }
    assert_eq!(missed[6], missed[7], "the same ones each time");
    let uploaded: u64 = missed[7].iter().map(|&i| sizes[i as usize]).sum();
    // What has no room, the slab that takes turns, and less than another for what sizes leave over.
    assert!(
        (total / 4..total / 4 + 2 * 131).contains(&uploaded),
        "{uploaded} of {total}"
    );
    let flying = cache.residency(A).unwrap();
    let flying = flying
        .iter()
        .filter(|s| matches!(s.residency, SegmentState::InFlight(_)));
    assert_eq!(flying.count(), 1, "between passes too");
    cache.request_end(A);
    assert!(
        !missed[7].is_empty() && !cache.recycle_slab(segment(A, 1), &mut actions),
        "no pass is known to come"
    );
}

#[test]
fn a_tied_embedding_stays_for_its_second_use_even_in_the_last_pass() {
    let mut cache = cache(40);
    let mut specs = ordered(&[10; 6]);
    specs[0].kind = SegmentKind::OrderedTied;
    cache.register(A, &specs).unwrap();
    cache.register(B, &ordered(&[10; 2])).unwrap();
    // B is asked in every other request: its next request is nearer than A's, but not
    // nearer than A's own head.
    for _ in 0..4 {
        pass(&mut cache, B, 2, false);
        let mut actions = Vec::new();
        cache.pass_begin(A, hint(false)).unwrap();
        (0..6).for_each(|index| _ = touch(&mut cache, segment(A, index), &mut actions));
        assert!(
            touch(&mut cache, segment(A, 0), &mut actions),
            "the head is the embedding"
        );
        cache.pass_end(A);
    }
    assert!(
        cache.stats().models[1].1.counters.hits > 0,
        "what B needs first was kept"
    );
}

#[test]
fn a_prefetch_takes_the_room_of_what_is_needed_later_and_of_nothing_else() {
    let mut cache = cache(40);
    cache.register(A, &ordered(&[10; 8])).unwrap();
    cache.pass_begin(A, hint(true)).unwrap();
    let mut actions = Vec::new();
    for index in [0, 1, 2] {
        touch(&mut cache, segment(A, index), &mut actions);
    }
    cache.acquire(segment(A, 3), &mut actions).unwrap();
    cache.uploaded(segment(A, 3));
    actions.clear();
    // 4 evicts 2, whose turn comes last; 5 evicts 1; 6 evicts 0; 7 would evict what comes before
    // it.
    for (next, victim) in [(4, Some(2)), (5, Some(1)), (6, Some(0)), (7, None)] {
        assert_eq!(
            cache.prefetch(segment(A, next), &mut actions),
            victim.is_some()
        );
        let evicted: Vec<_> = actions
            .drain(..)
            .filter_map(|action| evicted(&action))
            .collect();
        assert_eq!(
            evicted,
            Vec::from_iter(victim.map(|index| segment(A, index)))
        );
        if victim.is_some() {
            cache.uploaded(segment(A, next));
        }
    }
}

fn evicted(action: &Action) -> Option<SegmentId> {
    if let Action::Evict { segment, .. } = action {
        Some(*segment)
    } else {
        None
    }
}

#[test]
fn a_small_victim_is_spared_when_a_large_one_must_go_as_well() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[30, 50, 20])).unwrap();
    cache.register(B, &ordered(&[50])).unwrap();
    pass(&mut cache, A, 3, false);
    let mut actions = Vec::new();
    touch(&mut cache, segment(B, 0), &mut actions);
    assert_eq!(
        Vec::from_iter(actions.iter().filter_map(evicted)),
        [segment(A, 1)]
    );
}

#[test]
fn a_hole_is_made_by_moving_before_more_is_evicted() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[20; 5])).unwrap();
    cache.register(B, &ordered(&[40])).unwrap();
    pass(&mut cache, A, 5, false);
    let mut actions = Vec::new();
    cache.pin(segment(A, 3)).unwrap();
    touch(&mut cache, segment(B, 0), &mut actions);
    assert_eq!(
        Vec::from_iter(actions.iter().filter_map(evicted)),
        [segment(A, 4), segment(A, 2)]
    );
    assert_eq!(
        actions
            .iter()
            .filter(|action| matches!(action, Action::Move { .. }))
            .count(),
        1
    );
}

#[test]
fn blocks_gather_at_the_low_end_of_a_full_arena() {
    let mut cache = cache(1000);
    cache.register(A, &ordered(&[100; 10])).unwrap();
    cache.register(B, &ordered(&[700])).unwrap();
    pass(&mut cache, A, 10, true);
    let mut actions = Vec::new();
    let blocks = [0; 6].map(|_| {
        pass(&mut cache, A, 10, true);
        let block = cache
            .reserve(BlockKind::Kv, Some(A), 50, &mut actions)
            .unwrap();
        cache.assert_consistent();
        block
    });
    assert_eq!(
        blocks.map(|block| cache.block(block).offset),
        [0, 50, 100, 150, 200, 250]
    );
    touch(&mut cache, segment(B, 0), &mut actions);
}

#[test]
fn a_shrink_moves_what_fits_below_and_evicts_the_rest() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[10; 10])).unwrap();
    pass(&mut cache, A, 10, false);
    let mut actions = Vec::new();
    let said = cache.set_budget(50, &mut actions);
    assert!(said.reached && said.used == 50 && cache.arena_end() == 50);
    let resident: Vec<_> = cache
        .residency(A)
        .unwrap()
        .iter()
        .map(|s| s.residency != SegmentState::Absent)
        .collect();
    assert_eq!(
        resident,
        [
            true, true, true, true, true, false, false, false, false, false
        ],
        "the prefix stays"
    );
    cache.assert_consistent();
}

#[test]
fn a_shrink_never_fails_what_runs_and_ends_when_that_does() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[40, 40])).unwrap();
    let mut actions = Vec::new();
    let held = cache.acquire(segment(A, 0), &mut actions).unwrap().slab();
    cache.uploaded(segment(A, 0));
    let said = cache.set_budget(30, &mut actions);
    assert!(
        !said.reached && cache.residency(A).unwrap()[0].residency == SegmentState::Resident(held)
    );
    assert!(matches!(
        cache.acquire(segment(A, 1), &mut actions),
        Err(Error::NeverFits {
            need: 40,
            budget: 30,
            ..
        })
    ));
    cache.release(segment(A, 0));
    assert!(cache.finish_shrink(&mut actions) && cache.stats().total.usage.total() == 0);
}

#[test]
fn refusals_name_the_numbers() {
    let mut cache = cache(100);
    let error = cache
        .register(A, &ordered(&[10, 101]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("101") && error.contains("100"), "{error}");
    cache.register(A, &ordered(&[60, 60])).unwrap();
    let mut actions = Vec::new();
    cache.acquire(segment(A, 0), &mut actions).unwrap();
    let error = cache.acquire(segment(A, 1), &mut actions).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NoRoom {
                need: 60,
                available: 40,
                in_flight: 60,
                in_use: 0,
                ..
            }
        ),
        "{error:?}"
    );
    assert!(matches!(
        cache.unregister(A, &mut actions),
        Err(Error::Busy {
            in_use: 1,
            in_flight: 1,
            ..
        })
    ));
    assert!(matches!(
        cache.pin_model(A),
        Err(Error::NeverFits { pinned: 120, .. })
    ));
}

#[test]
#[should_panic(expected = "release without acquire")]
fn a_release_too_many_is_our_bug() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[10])).unwrap();
    cache.release(segment(A, 0));
}

/// StreamOrder as the attention, gate with up, and down of a Q4_K_M file of an 8B model, in 100 kB.
fn parts(layers: usize) -> Vec<u64> {
    let part = |at: usize| match at.is_multiple_of(2) {
        true => [236, 661, 330],
        false => [247, 661, 482],
    };
    (0..layers).flat_map(part).chain([4310]).collect()
}

#[test]
fn a_model_that_does_not_fit_gives_up_segments_of_one_size_that_lie_apart() {
    let sizes = parts(32);
    let total: u64 = sizes.iter().sum();
    for (percent, apart_max) in [(95, 9), (73, 7), (60, 7)] {
        for recycles_slab in [true, false] {
            let mut cache = Cache::new(CacheConfig {
                align: 1,
                ..CacheConfig::new(total * percent / 100)
            });
            cache.register(A, &ordered(&sizes)).unwrap();
            let mut actions = Vec::new();
            let mut missed = Vec::new();
            let mut before = cache.stats().total.counters;
            for round in 0..12 {
                if round == 6 {
                    before = cache.stats().total.counters;
                }
                missed.clear();
                cache.pass_begin(A, hint(true)).unwrap();
                for index in 0..sizes.len() as u32 {
                    let id = segment(A, index);
                    if !touch(&mut cache, id, &mut actions) {
                        missed.push(index);
                        if recycles_slab {
                            cache.recycle_slab(id, &mut actions);
                        }
                    }
                }
                cache.pass_end(A);
            }
            let what = format!("{percent} %, handed on: {recycles_slab}: {missed:?}");
            let counters = cache.stats().total.counters;
            assert_eq!(counters.moves, before.moves, "{what}");
            let size = sizes[missed[0] as usize];
            assert!(missed.iter().all(|&i| sizes[i as usize] == size), "{what}");
            let uploaded = (counters.uploaded_bytes - before.uploaded_bytes) / 6;
            let absent = total - total * percent / 100;
            assert!(uploaded < absent + 2 * size, "{what}: {uploaded}");
            let widest = missed.windows(2).map(|w| w[1] - w[0]).max();
            assert!(widest.unwrap() <= apart_max * 3, "{what}");
            let nearest = missed.windows(2).map(|w| w[1] - w[0]).min();
            assert!(nearest.unwrap() >= 3, "{what}");
        }
    }
}

#[test]
fn what_is_much_larger_than_the_need_stays_while_others_suffice() {
    // Segments of three sizes and a head that is larger than all of them.
    let sizes: Vec<u64> = (0..4).flat_map(|_| [3, 8, 4]).chain([540]).collect();
    let total: u64 = sizes.iter().sum();
    let mut cache = Cache::new(CacheConfig {
        align: 1,
        ..CacheConfig::new(total - 30)
    });
    cache.register(A, &ordered(&sizes)).unwrap();
    let mut uploaded = 0;
    for round in 0..8 {
        if round == 4 {
            uploaded = cache.stats().total.counters.uploaded_bytes;
        }
        pass(&mut cache, A, sizes.len() as u32, true);
    }
    let uploaded = (cache.stats().total.counters.uploaded_bytes - uploaded) / 4;
    assert!(
        uploaded <= 60,
        "{uploaded} bytes a pass where 30 are absent"
    );
}

#[test]
fn a_pinned_segment_whose_content_is_bad_goes_and_stays_pinned() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[40, 40])).unwrap();
    let mut actions = Vec::new();
    let id = segment(A, 0);
    touch(&mut cache, id, &mut actions);
    cache.pin(id).unwrap();
    assert!(matches!(
        cache.acquire(id, &mut actions),
        Ok(Acquired::Resident(_))
    ));
    assert!(!cache.evict_corrupt(id, &mut actions), "it is in use");
    cache.release(id);
    assert!(cache.evict_corrupt(id, &mut actions));
    cache.assert_consistent();
    let status = cache.residency(A).unwrap()[0];
    assert_eq!(
        (status.residency, status.pinned),
        (SegmentState::Absent, true)
    );
    assert!(!touch(&mut cache, id, &mut actions), "it comes again");
}

#[test]
fn a_model_fits_beside_what_may_not_go() {
    let mut cache = cache(100);
    cache.register(A, &ordered(&[30, 30])).unwrap();
    cache.register(B, &ordered(&[20, 20])).unwrap();
    let mut actions = Vec::new();
    for index in [0, 1] {
        touch(&mut cache, segment(B, index), &mut actions);
    }
    assert!(cache.fits(A) && cache.fits(B), "what is idle may go");
    cache.pin(segment(A, 0)).unwrap();
    touch(&mut cache, segment(A, 0), &mut actions);
    assert!(cache.fits(A), "its own pins are a part of it");
    cache.pin(segment(B, 0)).unwrap();
    let block = cache
        .reserve(BlockKind::Kv, Some(A), 20, &mut actions)
        .unwrap();
    assert!(cache.fits(A));
    touch(&mut cache, segment(B, 1), &mut actions);
    cache.pin(segment(B, 1)).unwrap();
    assert!(!cache.fits(A), "60 of 40 and 20");
    cache.free(block);
    assert!(cache.fits(A));
}

#[test]
fn a_block_between_two_passes_takes_what_the_model_gives_up_anyway() {
    let sizes: Vec<u64> = (0..4).flat_map(|_| [3, 8, 4]).chain([540]).collect();
    let head = sizes.len() as u32 - 1;
    let mut cache = Cache::new(CacheConfig {
        align: 1,
        ..CacheConfig::new(sizes.iter().sum::<u64>() - 16)
    });
    cache.register(A, &ordered(&sizes)).unwrap();
    let mut actions = Vec::new();
    // It lies highest, where no block is put.
    touch(&mut cache, segment(A, head), &mut actions);
    for _ in 0..8 {
        pass(&mut cache, A, sizes.len() as u32, true);
        cache
            .reserve(BlockKind::Kv, Some(A), 1, &mut actions)
            .unwrap();
        let there = cache.residency(A).unwrap()[head as usize].residency;
        assert_ne!(there, SegmentState::Absent, "540 went for want of 1");
    }
}

#[test]
fn what_is_brought_for_later_takes_the_room_of_idle_models_alone() {
    for policy in [Policy::PassAware, Policy::Lru] {
        let mut cache = cache(50);
        cache.set_policy(policy);
        cache.register(A, &ordered(&[10; 3])).unwrap();
        cache.register(B, &ordered(&[10; 8])).unwrap();
        let mut actions = Vec::new();
        pass(&mut cache, A, 3, false);
        cache.request_end(A);
        let mut bring = |cache: &mut Cache, model: ModelId| {
            let fits = |&index: &u32| cache.bring(segment(model, index), &mut actions);
            let brought: Vec<u32> = (0..8).filter(fits).collect();
            for &index in &brought {
                if !cache.holds(segment(model, index)) {
                    cache.uploaded(segment(model, index));
                }
            }
            cache.assert_consistent();
            brought
        };
        // A is idle and goes; what B has by then stays, also when all is asked for again.
        assert_eq!(bring(&mut cache, B), [0, 1, 2, 3, 4], "{policy:?}");
        let uploads = cache.model_stats(B).counters.uploads;
        assert_eq!(bring(&mut cache, B), [0, 1, 2, 3, 4], "{policy:?}");
        assert_eq!(cache.model_stats(B).counters.uploads, uploads);
        assert_eq!(cache.model_stats(B).counters.evictions, 0);
        // Nothing goes of a model that runs.
        cache.pass_begin(B, hint(true)).unwrap();
        assert_eq!(bring(&mut cache, A), [0u32; 0], "{policy:?}");
        cache.pass_end(B);
        cache.request_end(B);
        // What is pinned has a right to room.
        cache.pin(segment(B, 7)).unwrap();
        let mut actions = Vec::new();
        assert!(cache.bring(segment(B, 7), &mut actions));
        cache.uploaded(segment(B, 7));
        assert_eq!(cache.model_stats(B).counters.evictions, 1);
    }
}
