//! Places that one client has taken, and others who want one.

use rocmforge_scheduler::*;

use crate::bench::{Bench, comes_of};

const TURN: u64 = 8;

fn bench(running_max: usize) -> Bench {
    let mut bench = Bench::with(Config {
        running_max,
        turn_passes: TURN,
        ..Config::default()
    });
    bench.budget = 1 << 40;
    bench.spans_max = 256;
    bench.models[0].rows_max = 512;
    bench
}

fn running_of(bench: &Bench, client: u64) -> usize {
    let of = |s: &SequenceStatus| s.running && s.arrival.client == ClientId(client);
    bench.scheduler.sequences().filter(of).count()
}

/// Passes until a sequence runs.
fn passes_until_it_runs(bench: &mut Bench, seq: SeqId, most: u64) -> u64 {
    for passes in 0..=most {
        bench.pass();
        if bench.scheduler.sequence(seq).is_none_or(|s| s.running) {
            return passes;
        }
    }
    panic!("{seq:?} waits for more than {most} passes");
}

#[test]
fn a_client_that_has_all_places_gives_one_to_another() {
    let mut bench = bench(64);
    let long: Vec<SeqId> = (0..65).map(|_| bench.comes(4, 4000)).collect();
    (0..1000).for_each(|_| _ = bench.pass().unwrap());
    let other = comes_of(&mut bench, 1, Class::Interactive, 8, 8);
    assert_eq!(passes_until_it_runs(&mut bench, other, 0), 0);
    assert_eq!(
        bench.actions,
        [Action::Yielded(long[63]), Action::Admitted(other)]
    );
    let mut passes = 0;
    while bench.scheduler.sequence(other).is_some() {
        bench.pass().unwrap();
        assert!(bench.actions.is_empty(), "{:?}", bench.actions);
        passes += 1;
    }
    assert!(passes <= 8, "{passes}");
    bench.pass().unwrap();
    assert_eq!(bench.actions, [Action::Admitted(long[63])]);
    while bench.pass().is_some() {}
    assert_eq!(bench.scheduler.sequences().count(), 0, "all end");
}

#[test]
fn each_gets_its_share_and_then_nobody_yields() {
    let mut bench = bench(12);
    for client in 0..3 {
        (0..20).for_each(|_| _ = comes_of(&mut bench, client, Class::Interactive, 2, 500));
        (0..2 * TURN).for_each(|_| _ = bench.pass().unwrap());
    }
    assert_eq!([0, 1, 2].map(|c| running_of(&bench, c)), [4, 4, 4]);
    for _ in 0..200 {
        bench.pass().unwrap();
        assert!(bench.actions.is_empty(), "{:?}", bench.actions);
    }
}

#[test]
fn those_who_yield_take_turns_and_have_some_passes_between() {
    let mut bench = bench(4);
    (0..4).for_each(|_| _ = bench.comes(4, 2000));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let mut yielded = Vec::new();
    let mut admitted_at = std::collections::BTreeMap::new();
    for _ in 0..40 {
        let other = comes_of(&mut bench, 1, Class::Interactive, 4, 3);
        // The place goes back before the next one comes.
        while bench.scheduler.sequence(other).is_some() || running_of(&bench, 0) < 4 {
            bench.pass().unwrap();
            for action in bench.actions.clone() {
                let passes = bench.scheduler.passes();
                match action {
                    Action::Yielded(seq) => {
                        let since = admitted_at.get(&seq).copied().unwrap_or(0);
                        assert!(passes - since >= TURN, "{seq:?} came at {since}");
                        yielded.push(seq);
                    }
                    Action::Admitted(seq) => _ = admitted_at.insert(seq, passes),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    assert_eq!(yielded.len(), 40, "one for each turn of the other");
    for seq in 1..=4 {
        let times = yielded.iter().filter(|s| s.0 == seq).count();
        assert_eq!(times, 10, "of {seq}");
    }
}

#[test]
fn interactive_keeps_its_place_from_batch_and_batch_gives_to_batch() {
    let mut bench = bench(4);
    (0..4).for_each(|_| _ = bench.comes(4, 300));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let batch = comes_of(&mut bench, 1, Class::Batch, 4, 4);
    for _ in 0..100 {
        bench.pass().unwrap();
        assert!(!bench.running(batch));
    }
    let mut bench = self::bench(4);
    (0..4).for_each(|_| _ = comes_of(&mut bench, 0, Class::Batch, 4, 300));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let batch = comes_of(&mut bench, 1, Class::Batch, 4, 4);
    assert_eq!(passes_until_it_runs(&mut bench, batch, 0), 0);
}

#[test]
fn slow_readers_give_their_places_first() {
    let mut bench = bench(4);
    let seqs: Vec<SeqId> = (0..4).map(|_| bench.comes(4, 300)).collect();
    let slow = seqs[1];
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    bench.scheduler.set_ready(slow, false);
    (0..TURN).for_each(|_| _ = bench.pass().unwrap());
    let other = comes_of(&mut bench, 1, Class::Interactive, 4, 3);
    bench.pass().unwrap();
    assert_eq!(
        bench.actions,
        [Action::Yielded(slow), Action::Admitted(other)]
    );
    // It is back as soon as its reader reads and there is a place.
    while bench.scheduler.sequence(other).is_some() {
        bench.pass().unwrap();
    }
    bench.pass().unwrap();
    assert!(!bench.running(slow));
    bench.scheduler.set_ready(slow, true);
    bench.pass().unwrap();
    assert!(bench.running(slow));
}

#[test]
fn slow_readers_of_one_hold_up_no_other_who_has_its_share() {
    let mut bench = bench(4);
    let slow: Vec<SeqId> = (0..2).map(|_| bench.comes(4, 300)).collect();
    let others: Vec<SeqId> = (0..4)
        .map(|_| comes_of(&mut bench, 1, Class::Interactive, 4, 300))
        .collect();
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    assert!(!bench.running(others[2]), "each has two");
    slow.iter()
        .for_each(|s| bench.scheduler.set_ready(*s, false));
    (0..=TURN).for_each(|_| _ = bench.pass().unwrap());
    assert_eq!(running_of(&bench, 1), 4);
    // Their client has a right to its places as soon as its readers read.
    slow.iter()
        .for_each(|s| bench.scheduler.set_ready(*s, true));
    (0..=TURN).for_each(|_| _ = bench.pass().unwrap());
    assert_eq!(running_of(&bench, 0), 2);
}
