//! The pool under short jobs, panics, nesting, several callers and idleness.

use super::*;
use std::sync::atomic::AtomicU32;

/// How often something is tried: `times`, and few times by Miri, which takes a thousand times as
/// long; `.ci/miri` starts it with several orders of the threads' steps.
fn repeats(times: usize) -> usize {
    if cfg!(miri) { times.min(20) } else { times }
}

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap()
}

#[test]
fn every_item_runs_exactly_once() {
    for threads in [1, 2, 3, 8] {
        let pool = pool(threads);
        for (n_items, chunk) in [
            (0, 1),
            (1, 1),
            (7, 3),
            (64, 0),
            (1000, 1),
            (1000, 37),
            (5, 100),
        ] {
            let counts: Vec<AtomicU32> = (0..n_items).map(|_| AtomicU32::new(0)).collect();
            pool.run(n_items, chunk, |range| {
                assert!(range.len() <= chunk.max(1));
                for i in range {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(
                counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                "{threads} {n_items} {chunk}"
            );
        }
    }
}

#[test]
fn the_caller_does_its_own_while_the_others_begin() {
    for threads in [1, 2, 4] {
        let pool = pool(threads);
        let (begun, mut own) = (AtomicBool::new(false), 0);
        let counts: Vec<AtomicU32> = (0..100).map(|_| AtomicU32::new(0)).collect();
        let count = |range: Range<usize>| {
            begun.store(true, Ordering::Release);
            for i in range {
                counts[i].fetch_add(1, Ordering::Relaxed);
            }
        };
        pool.run_beside(100, 3, count, || {
            // Comes to an end only if somebody else begins.
            wait_until(|| threads == 1 || begun.load(Ordering::Acquire));
            own += 1;
        });
        assert_eq!(own, 1);
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        let mut own = 0;
        pool.run_beside(0, 1, |_| panic!("there is nothing"), || own += 1);
        assert_eq!(own, 1);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            pool.run_beside(100, 3, |_| (), || panic!("its own"));
        }));
        assert!(failed.is_err());
        pool.run(10, 1, |_| ());
    }
}

#[test]
fn many_short_jobs_with_and_without_parking_between() {
    let pool = pool(4);
    let total = AtomicUsize::new(0);
    let jobs = repeats(20_000);
    for job in 0..jobs {
        pool.run(8, 1, |range| {
            total.fetch_add(range.len(), Ordering::Relaxed);
        });
        if job % (jobs / 5) == 0 {
            std::thread::sleep(SPIN * 4);
        }
    }
    assert_eq!(total.load(Ordering::Relaxed), jobs * 8);
}

#[test]
fn broadcast_reaches_every_thread_once() {
    let pool = pool(5);
    for _ in 0..repeats(50) {
        let calls: Vec<AtomicU32> = (0..5).map(|_| AtomicU32::new(0)).collect();
        let threads = Mutex::new(std::collections::HashSet::new());
        pool.broadcast(|worker| {
            calls[worker].fetch_add(1, Ordering::Relaxed);
            threads.lock().unwrap().insert(std::thread::current().id());
        });
        assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        assert_eq!(threads.lock().unwrap().len(), 5);
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    for threads in [1, 2, 4] {
        let pool = pool(threads);
        for round in 0..repeats(20) {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(100, 1, |range| {
                    assert!(range.start != 37, "item 37 of round {round}")
                });
            }));
            let payload = caught.expect_err("the panic was lost");
            let message = payload.downcast_ref::<String>().unwrap();
            assert!(
                message.contains(&format!("item 37 of round {round}")),
                "{message}"
            );
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.broadcast(|worker| assert!(worker + 1 != threads, "the last worker"));
            }));
            assert!(caught.is_err());
            let done = AtomicUsize::new(0);
            pool.run(10, 1, |range| {
                done.fetch_add(range.len(), Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 10);
        }
    }
}

#[test]
fn a_nested_call_is_refused_and_harmless() {
    for threads in [1, 3] {
        let pool = pool(threads);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(4, 1, |_| pool.run(4, 1, |_| ()));
        }));
        let message = *caught
            .expect_err("nesting went through")
            .downcast::<&str>()
            .unwrap();
        assert!(message.contains("inside a job"), "{message}");
        pool.run(4, 1, |_| ());
    }
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = pool(3);
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..repeats(500) {
                    pool.run(16, 2, |range| {
                        total.fetch_add(range.len(), Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 3 * repeats(500) * 16);
}

#[test]
fn rows_are_split_without_overlap() {
    let pool = pool(3);
    let mut out = vec![0u32; 41 * 7];
    pool.run_rows(&mut out, 7, 4, |rows, block| {
        assert_eq!(block.len(), rows.len() * 7);
        for (row, values) in rows.zip(block.chunks_exact_mut(7)) {
            for v in values {
                *v += u32::try_from(row).unwrap() + 1;
            }
        }
    });
    assert!(
        out.iter()
            .enumerate()
            .all(|(i, &v)| v == u32::try_from(i / 7).unwrap() + 1)
    );
}

#[test]
fn workers_park_when_idle() {
    let pool = pool(3);
    pool.broadcast(|_| ());
    let deadline = Instant::now() + Duration::from_secs(20);
    while !pool
        .shared
        .parked
        .iter()
        .all(|flag| flag.0.load(Ordering::SeqCst))
    {
        assert!(Instant::now() < deadline, "the workers never parked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn too_many_threads_are_refused_by_name() {
    let error = Pool::new(NonZeroUsize::new(MAX_POOL_THREADS + 1).unwrap()).unwrap_err();
    assert!(error.to_string().contains("--threads"), "{error}");
}
