//! What the cache promises, one promise a test.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use rocmforge_tensor_cache::*;

const A: ModelId = ModelId(1);
const B: ModelId = ModelId(2);

fn cache(budget: u64) -> Cache {
    Cache::new(CacheConfig {
        align: 1,
        ..CacheConfig::new(budget)
    })
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
fn pass(cache: &mut Cache, model: ModelId, segments: u32, more: bool) -> Vec<u32> {
    cache.pass_begin(model, PassHint { more }).unwrap();
    let mut actions = Vec::new();
    let hits = (0..segments)
        .filter(|&index| touch(cache, segment(model, index), &mut actions))
        .collect();
    cache.pass_end(model);
    hits
}

#[test]
fn a_cycle_larger_than_the_cache_hits_what_fits_under_belady_and_nothing_under_lru() {
    for (policy, least, most) in [(Policy::Belady, 4, 5), (Policy::Lru, 0, 0)] {
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
        .map(|s| s.residency != Residency::Absent)
        .collect();
    assert_eq!(resident, [true, true, true, true, false, false]);
}
