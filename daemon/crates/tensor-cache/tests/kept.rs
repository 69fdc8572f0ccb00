//! Models that are kept.

use rocmforge_tensor_cache::*;

const A: ModelId = ModelId(1);
const B: ModelId = ModelId(2);

/// A pass over segments of 10 bytes.
fn pass(cache: &mut Cache, model: ModelId, segments: u32, expects_next_pass: bool) {
    cache
        .pass_begin(model, PassHint { expects_next_pass })
        .unwrap();
    for index in 0..segments {
        let segment = SegmentId { model, index };
        let acquired = cache.acquire(segment, &mut Vec::new()).unwrap();
        if !matches!(acquired, Acquired::Resident(_)) {
            cache.uploaded(segment);
        }
        cache.release(segment);
        cache.assert_consistent();
    }
    cache.pass_end(model);
}

/// Fills a cache with two models' segments, of which the first model's are the next victims.
fn with_a_kept_model(policy: Policy) -> Cache {
    let mut cache = Cache::new(CacheConfig {
        align: 1,
        policy,
        ..CacheConfig::new(100)
    });
    cache.register(A, &[SegmentSpec::ordered(10); 5]).unwrap();
    cache.register(B, &[SegmentSpec::ordered(10); 8]).unwrap();
    pass(&mut cache, A, 5, false);
    cache.foresee(&[B]);
    cache.keep(&[A]);
    cache
}

fn resident(cache: &Cache, model: ModelId) -> usize {
    let all = cache.residency(model).unwrap();
    let there = |s: &&SegmentStatus| matches!(s.residency, SegmentState::Resident(_));
    all.iter().filter(there).count()
}

#[test]
fn a_model_that_is_kept_gives_nothing_up_to_others() {
    for policy in [Policy::PassAware, Policy::Lru] {
        let mut cache = with_a_kept_model(policy);
        assert!(cache.keeps(A) && !cache.keeps(B));
        for _ in 0..10 {
            pass(&mut cache, B, 8, true);
            assert_eq!(resident(&cache, A), 5, "{policy:?}");
        }
        let mut actions = Vec::new();
        let block = cache
            .reserve(BlockKind::Kv, None, 30, &mut actions)
            .unwrap();
        assert_eq!(resident(&cache, A), 5, "{policy:?}");
        cache.free(block);
        cache.keep(&[]);
        pass(&mut cache, B, 8, true);
        pass(&mut cache, B, 8, true);
        assert!(
            resident(&cache, A) < 5,
            "{policy:?}: it is not kept any more"
        );
    }
}

#[test]
fn what_has_no_other_room_has_that_of_a_model_that_is_kept() {
    for policy in [Policy::PassAware, Policy::Lru] {
        let mut cache = with_a_kept_model(policy);
        pass(&mut cache, B, 8, true);
        let mut actions = Vec::new();
        // Without a kept segment there are 50.
        let block = cache
            .reserve(BlockKind::Kv, None, 70, &mut actions)
            .unwrap();
        assert_eq!(resident(&cache, A), 3, "{policy:?}");
        assert!(cache.keeps(A), "what is left is kept");
        cache.free(block);
        assert!(cache.set_budget(20, &mut actions).reached);
        assert!(resident(&cache, A) <= 2);
        cache.assert_consistent();
    }
}
