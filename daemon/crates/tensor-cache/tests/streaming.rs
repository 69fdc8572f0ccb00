//! A model that is streamed while uploads run ahead of their use.

use rocmforge_tensor_cache::*;

const A: ModelId = ModelId(1);

/// Acquires, completes the upload if there is one, and releases.
fn touch(cache: &mut Cache, id: SegmentId, actions: &mut Vec<Action>) {
    let acquired = cache.acquire(id, actions).unwrap();
    if !matches!(acquired, Acquired::Resident(_)) {
        cache.uploaded(id);
    }
    cache.release(id);
}

/// Three segments a layer. Of the missing ones of the middle size every third is brought ahead of
/// its use, two at a time, and the others are computed elsewhere: what is missing is of one size at
/// the end, and nothing moves any more.
#[test]
fn uploads_ahead_leave_segments_of_one_size_missing() {
    const SIZES: [u64; 3] = [24, 66, 33];
    const N: u32 = 96;
    let sizes: Vec<u64> = SIZES.iter().copied().cycle().take(N as usize).collect();
    let whole: u64 = sizes.iter().sum();
    let mut cache = Cache::new(CacheConfig {
        align: 1,
        ..CacheConfig::new(whole * 3 / 5)
    });
    let specs: Vec<SegmentSpec> = sizes
        .iter()
        .map(|&bytes| SegmentSpec::ordered(bytes))
        .collect();
    cache.register(A, &specs).unwrap();
    let mut actions = Vec::new();
    for request in 0..3 {
        for n in 0..24 {
            cache
                .pass_begin(
                    A,
                    PassHint {
                        expects_next_pass: n < 23,
                    },
                )
                .unwrap();
            let before = cache.model_stats(A).counters.moves;
            for index in 0..N {
                let this = SegmentId { model: A, index };
                if cache.holds(this) || index % 3 != 1 {
                    touch(&mut cache, this, &mut actions);
                } else {
                    cache.done_without(this).unwrap();
                }
                // Every third of the missing, the nearest first; those of other sizes in any case.
                let ahead = cache.coming(A, index + 1);
                let fresh = ahead.filter(Upcoming::is_ahead).count();
                let missing = |found: &Upcoming| {
                    let index = found.segment.index;
                    found.state == SegmentState::Absent && (index % 3 != 1 || index % 9 == 1)
                };
                let next = cache.coming(A, index + 1).find(missing);
                if let Some(next) = next.filter(|_| fresh < 2 && (n > 0 || index > 5))
                    && cache.prefetch(next.segment, &mut actions)
                {
                    cache.uploaded(next.segment);
                }
                cache.assert_consistent();
            }
            cache.pass_end(A);
            let moves = cache.model_stats(A).counters.moves - before;
            assert!(
                n < 8 || moves == 0,
                "{moves} moves in pass {n} of {request}"
            );
        }
        let absent = cache.coming(A, 0);
        let absent = absent.filter(|found| found.state == SegmentState::Absent);
        let sizes: Vec<u64> = absent.map(|found| found.bytes).collect();
        assert!(
            sizes.len() > 8 && sizes.iter().all(|&b| b == 66),
            "{sizes:?}"
        );
    }
}

#[test]
fn what_is_brought_into_free_room_evicts_nothing() {
    const B: ModelId = ModelId(2);
    for policy in [Policy::PassAware, Policy::Lru] {
        let mut cache = Cache::new(CacheConfig {
            align: 1,
            ..CacheConfig::new(50)
        });
        cache.set_policy(policy);
        cache.register(A, &[SegmentSpec::ordered(10); 3]).unwrap();
        cache.register(B, &[SegmentSpec::ordered(10); 8]).unwrap();
        let mut actions = Vec::new();
        let segment = |model, index| SegmentId { model, index };
        // A was used, and no request of it runs.
        let hint = PassHint {
            expects_next_pass: false,
        };
        cache.pass_begin(A, hint).unwrap();
        for index in 0..3 {
            touch(&mut cache, segment(A, index), &mut actions);
        }
        cache.pass_end(A);
        cache.request_end(A);
        // Not even a pinned segment takes room from it.
        cache.pin(segment(B, 7)).unwrap();
        let mut bring = |index| cache.bring_into_free(segment(B, index), &mut actions);
        let brought: Vec<u32> = (0..8).filter(|&index| bring(index)).collect();
        assert_eq!(brought, [0, 1], "{policy:?}");
        assert!(bring(0), "it is in flight");
        for index in brought {
            cache.uploaded(segment(B, index));
        }
        cache.assert_consistent();
        assert_eq!(cache.model_stats(A).counters.evictions, 0);
        assert_eq!(cache.model_stats(B).counters.uploads, 2);
        assert!(!cache.bring_into_free(segment(B, 9), &mut actions));
    }
}
