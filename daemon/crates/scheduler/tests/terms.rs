//! One text whose KV fills the room, and others who have none: they share it in time.

use rocmforge_scheduler::*;

use crate::bench::{A, B, Bench};

/// A pass is a millisecond here.
const TERM: u64 = 50_000;
const RETURNS: u64 = 4;

/// A bench whose budget holds one text of 4,000 positions of model A, and nothing beside it.
fn bench() -> Bench {
    let mut bench = Bench::with(Config {
        turn_passes: 8,
        patience_passes: 200,
        term_us: TERM,
        term_returns: RETURNS,
        ..Config::default()
    });
    bench.budget = 4_300;
    bench
}

fn comes_for(bench: &mut Bench, model: ModelId, tokens: u32, more: u32) -> SeqId {
    let arrival = Arrival {
        model,
        ..bench.arrival(tokens, more)
    };
    bench.come(arrival)
}

/// A pass. What it took.
fn pass(bench: &mut Bench) -> u64 {
    let plan = bench.pass().expect("somebody goes on");
    crate::bench::took_us(&plan)
}

fn yields(bench: &Bench, seq: SeqId) -> bool {
    bench.actions.contains(&Action::Yielded(seq))
}

#[test]
fn one_that_has_all_room_gives_it_for_a_while_and_comes_back() {
    let mut bench = bench();
    let large = bench.comes(10, 3_990);
    for _ in 0..20 {
        pass(&mut bench);
    }
    let small = comes_for(&mut bench, B, 200, 8);
    let mut waited = 20_000;
    while !bench.running(small) {
        waited += pass(&mut bench);
    }
    assert!(yields(&bench, large), "{:?}", bench.actions);
    assert!((TERM..TERM + 10_000).contains(&waited), "{waited}");
    // It goes on as soon as there is room.
    while bench.scheduler.sequence(small).is_some() {
        pass(&mut bench);
        assert!(!bench.running(large));
    }
    pass(&mut bench);
    assert!(bench.running(large));
    while bench.scheduler.sequences().count() > 0 {
        pass(&mut bench);
    }
}

#[test]
fn small_requests_that_come_again_and_again_and_a_large_one_have_half_of_the_time_each() {
    let mut bench = bench();
    let large = bench.comes(10, 3_990);
    let (mut time, mut of_large, mut longest, mut yielded) = (0, 0, 0, 0);
    let mut waits = 0;
    while bench.scheduler.sequence(large).is_some() {
        // Two at a time: behind each of them one waits or runs.
        let small = |bench: &Bench, runs: bool| {
            let small = bench.scheduler.sequences();
            small
                .filter(|s| s.arrival.model == B && (!runs || s.running))
                .count()
        };
        while small(&bench, false) < 2 {
            comes_for(&mut bench, B, 200, 8);
        }
        let ran = bench.running(large);
        let took = pass(&mut bench);
        time += took;
        of_large += took * u64::from(ran);
        yielded += u64::from(yields(&bench, large));
        waits = match small(&bench, true) {
            0 => waits + took,
            _ => 0,
        };
        longest = longest.max(waits);
    }
    // 3,990 tokens and what is computed again.
    let part = of_large * 100 / time;
    assert!((40..75).contains(&part), "{part} % of {time} us");
    assert!(
        yielded > 10 && yielded <= time / (2 * TERM) + 1,
        "{yielded} in {time} us"
    );
    let price = 1_000 * 4_000 / 64;
    assert!(longest <= TERM.max(price * RETURNS) + 20_000, "{longest}");
}

#[test]
fn a_term_is_long_beside_what_it_costs_to_come_back() {
    let mut bench = bench();
    // Its prompt takes 58 passes of 64 rows, of which it has 50 in its first term.
    let large = bench.comes(3_700, 300);
    let mut admitted_at = 0;
    let mut terms = Vec::new();
    let mut time = 0;
    while bench.scheduler.sequence(large).is_some() {
        let waits = bench.scheduler.sequences().any(|s| s.arrival.model == B);
        if !waits {
            comes_for(&mut bench, B, 200, 8);
        }
        let ran = bench.running(large);
        let took = pass(&mut bench);
        if ran && yields(&bench, large) {
            terms.push(time - admitted_at);
        }
        if !ran && bench.running(large) {
            admitted_at = time;
        }
        time += took;
    }
    // Before it has come back once, it is known by its prompt.
    assert!(terms.len() > 1, "{terms:?}");
    let returns = &terms[1..];
    assert!(
        returns.iter().all(|term| *term >= 50_000 * RETURNS),
        "{terms:?}"
    );
}

#[test]
fn a_long_prompt_gives_its_room_in_each_of_its_terms() {
    let mut bench = bench();
    bench.models[0].rows_max = 8;
    let large = bench.comes(3_900, 90);
    let (mut yielded, mut had) = (0, 0);
    loop {
        if !bench.scheduler.sequences().any(|s| s.arrival.model == B) {
            comes_for(&mut bench, B, 200, 8);
        }
        bench.actions = bench.admit();
        if had > 8 && bench.actions.contains(&Action::Admitted(large)) {
            // Most of what it had is there still.
            bench.scheduler.reused(large, had - 8);
        }
        yielded += u64::from(yields(&bench, large));
        let Some(Next::Pass(plan)) = bench.with_view(Scheduler::next) else {
            panic!("somebody goes on");
        };
        bench.computed(&plan);
        let now = bench.scheduler.sequence(large).unwrap();
        had = had.max(now.n_past);
        if now.known > 3_900 {
            break;
        }
    }
    // 488 passes of its own, and more than four of its terms, in which it says nothing.
    assert!(yielded > 6, "{yielded} terms");
}

#[test]
fn whom_nobody_keeps_from_running_takes_nothing() {
    let mut bench = bench();
    let large = bench.comes(10, 3_000);
    let small = comes_for(&mut bench, B, 100, 600);
    // Its model runs something.
    let more = comes_for(&mut bench, B, 400, 400);
    for _ in 0..500 {
        pass(&mut bench);
        assert!(bench.running(large) && bench.running(small) && !bench.running(more));
    }
    // Nor does one of the same model.
    let mut bench = self::bench();
    let (large, next) = (bench.comes(10, 3_990), bench.comes(10, 990));
    for _ in 0..500 {
        pass(&mut bench);
        assert!(bench.running(large) && !bench.running(next));
    }
    assert_eq!(bench.scheduler.sequence(next).unwrap().arrival.model, A);
}
