//! Ten thousand lives of a tiny model on one device: nothing grows. Alone in its process,
//! whose memory it measures.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod fake;

use std::time::{Duration, Instant};

use fake::{Runtime, greedy, load, run, tiny};
use rocmforge_fake_hip::Live;

const ROUNDS: usize = 10_000;

/// Rounds after which everything that is kept is there.
const WARM_UP: usize = 500;

/// Most that the process may grow by after the warm-up: what allocators keep of other sizes. A leak
/// of 420 bytes a round is more.
const GROWTH_MAX: u64 = 4 << 20;

const BUDGET: u64 = 2 << 20;

/// Most events that uploads keep for later (`device-gpu/src/uploads/events.rs`): as
/// many as were needed at once, which depends on how the threads run. One that leaks a round
/// is more after so many rounds.
const SPARE_EVENTS_MAX: u64 = 256;

/// Resident memory of this process in bytes.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// A staging thread may let go of the last upload a moment after the engine is done with it.
async fn settles_at(runtime: &Runtime, live: Live, round: usize) {
    for _ in 0..1000 {
        let now = runtime.live();
        let others = Live {
            events: live.events,
            ..now
        };
        if others == live && now.events <= live.events + SPARE_EVENTS_MAX {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("round {round}: {:?}, and before {live:?}", runtime.live());
}

#[tokio::test]
async fn ten_thousand_loads_generations_and_unloads_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::write(dir.path(), 1, 5);
    let runtime = Runtime::new();
    let engine = runtime.start(BUDGET).unwrap();
    let begin = Instant::now();
    let (mut live, mut resident, mut expected) = (Live::default(), 0, Vec::new());
    for round in 0..ROUNDS {
        if round == WARM_UP {
            // Long enough for what was let go of late.
            tokio::time::sleep(Duration::from_millis(100)).await;
            (live, resident) = (runtime.live(), resident_bytes());
        }
        let model = load(&engine, &path, "m").await.unwrap();
        let (ids, _) = run(&engine, greedy(&model, "once", 3)).await.unwrap();
        drop(model);
        engine.unload("m", false).await.unwrap();
        if round == 0 {
            expected.clone_from(&ids);
        }
        assert_eq!(ids, expected, "round {round}");
        if round > WARM_UP {
            settles_at(&runtime, live, round).await;
        }
    }
    let grown = resident_bytes().saturating_sub(resident);
    println!(
        "{ROUNDS} rounds in {:?}: {live:?}, {} allocations; {resident} bytes of memory after {WARM_UP} and {grown} more at the end",
        begin.elapsed(),
        engine.snapshot().device.allocations,
    );
    assert_eq!(
        live.registrations, 0,
        "an unloaded model's file stays registered"
    );
    assert_eq!(live.graphs, 0, "an unloaded model's recordings stay");
    assert!(grown < GROWTH_MAX, "{grown} bytes");
    let cache = engine.snapshot().cache;
    assert_eq!(
        cache.kv_bytes + cache.scratch_bytes + cache.in_flight_bytes,
        0
    );
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}
