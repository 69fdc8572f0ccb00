//! KV that one client has taken, and others who want some; places of the queue that one leaves.

use rocmforge_scheduler::*;

use crate::bench::{B, Bench, comes_of};

const TURN: u64 = 8;

fn config() -> Config {
    Config {
        turn_passes: TURN,
        patience_passes: 200,
        ..Config::default()
    }
}

/// A bench whose budget holds four texts of 1,000 positions and not a fifth.
fn bench() -> Bench {
    let mut bench = Bench::with(config());
    // The largest segment, scratch of an eighth, and the rest.
    bench.budget = 4_700;
    bench
}

fn ends(bench: &mut Bench, seq: SeqId, most: u64) {
    for _ in 0..most {
        if bench.scheduler.sequence(seq).is_none() {
            return;
        }
        bench.pass();
    }
    panic!("{seq:?} has not ended after {most} passes");
}

#[test]
fn a_client_that_has_all_room_gives_some_to_another() {
    let mut bench = bench();
    let long: Vec<SeqId> = (0..5).map(|_| bench.comes(10, 990)).collect();
    // Longer than patience: old texts keep no room from those who have less.
    (0..300).for_each(|_| _ = bench.pass().unwrap());
    assert!(bench.running(long[3]) && !bench.running(long[4]));
    let other = comes_of(&mut bench, 1, Class::Interactive, 700, 8);
    bench.pass().unwrap();
    assert_eq!(
        bench.actions,
        [Action::Yielded(long[3]), Action::Admitted(other)]
    );
    ends(&mut bench, other, 200);
    bench.pass().unwrap();
    assert_eq!(bench.actions, [Action::Admitted(long[3])]);
    while bench.pass().is_some() {}
    assert_eq!(bench.scheduler.sequences().count(), 0, "all end");
}

#[test]
fn requests_that_come_again_and_again_wait_shortly_and_all_texts_end() {
    let mut bench = bench();
    (0..8).for_each(|_| _ = bench.comes(10, 990));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let (mut longest, mut passes) = (0, 0);
    // A text that yielded computes what it had again.
    while bench.scheduler.sequences().count() > 0 && passes < 40_000 {
        let other = comes_of(&mut bench, 1, Class::Interactive, 600, 20);
        let mut waited = 0;
        while !bench.running(other) {
            bench.pass().unwrap();
            waited += 1;
        }
        longest = longest.max(waited);
        while bench.scheduler.sequence(other).is_some() {
            bench.pass().unwrap();
            passes += 1;
        }
        passes += waited;
        if bench.scheduler.sequences().all(|s| s.arrival.client.0 != 0) {
            break;
        }
    }
    assert!(longest <= 2 * TURN, "{longest}");
    let left = bench.scheduler.sequences().count();
    assert_eq!(left, 0, "all texts end beside them, after {passes} passes");
}

#[test]
fn the_last_text_of_a_client_gives_nothing_before_its_term_is_over() {
    let mut bench = Bench::with(Config {
        // Longer than the text is.
        term_us: 1 << 40,
        ..config()
    });
    bench.budget = 4_700;
    let long = bench.comes(10, 3_990);
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let other = comes_of(&mut bench, 1, Class::Interactive, 600, 8);
    while bench.scheduler.sequence(long).is_some() {
        bench.pass().unwrap();
        assert!(!bench.running(other) || bench.scheduler.sequence(long).is_none());
    }
    ends(&mut bench, other, 100);
}

#[test]
fn what_is_more_than_a_share_waits() {
    let mut bench = bench();
    let long: Vec<SeqId> = (0..4).map(|_| bench.comes(10, 990)).collect();
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    // Its client would have 3,000, and the other 1,000 or 2,000.
    let other = comes_of(&mut bench, 1, Class::Interactive, 2_000, 1_000);
    for _ in 0..100 {
        bench.pass().unwrap();
        assert!(long.iter().all(|s| bench.running(*s)));
    }
    ends(&mut bench, other, 10_000);
}

#[test]
fn half_of_the_room_is_given() {
    let mut bench = bench();
    (0..4).for_each(|_| _ = bench.comes(10, 990));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let other = comes_of(&mut bench, 1, Class::Interactive, 1_500, 500);
    bench.pass().unwrap();
    assert!(bench.running(other));
    let left = bench.scheduler.sequences().filter(|s| s.running).count();
    assert_eq!(left, 3, "two texts of the other and this one");
}

#[test]
fn clients_with_open_ended_texts_do_not_trade_their_room() {
    let mut bench = bench();
    bench.budget = 14_000;
    for n in 0..6 {
        let arrival = Arrival {
            client: ClientId(n % 2),
            open_ended: true,
            whole: false,
            ..bench.arrival(1_000, 4_000)
        };
        bench.come(arrival);
    }
    let mut by_shares = 0;
    for _ in 0..20_000 {
        if bench.pass().is_none() {
            break;
        }
        let yields = |a: &&Action| matches!(a, Action::Yielded(_));
        let admits = |a: &Action| matches!(a, Action::Admitted(_));
        // Those that yield because texts grow come before anybody is admitted.
        let at = bench.actions.iter().rposition(admits).unwrap_or(0);
        let for_another = bench.actions[..at].iter().filter(yields).count();
        by_shares += usize::from(for_another > 0);
    }
    assert_eq!(bench.scheduler.sequences().count(), 0, "all end");
    // Where a share was taken of what is wanted, too, there were 8.
    assert!(by_shares <= 1, "{by_shares}");
}

#[test]
fn interactive_keeps_its_room_from_batch() {
    let mut bench = bench();
    (0..4).for_each(|_| _ = bench.comes(10, 990));
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let batch = comes_of(&mut bench, 1, Class::Batch, 600, 8);
    for _ in 0..100 {
        bench.pass().unwrap();
        assert!(!bench.running(batch));
    }
}

#[test]
fn one_client_leaves_places_of_the_queue_to_others() {
    let mut bench = Bench::with(Config {
        waiting_max: 256,
        ..Config::default()
    });
    let mut come = |client: u64| {
        let arrival = Arrival {
            client: ClientId(client),
            ..bench.arrival(4, 4)
        };
        bench.scheduler.arrive(arrival)
    };
    let mut taken = [0; 3];
    for client in [0, 1] {
        while come(client).is_ok() {
            taken[client as usize] += 1;
        }
    }
    assert_eq!(taken, [224, 28, 0]);
    let refused = come(0).unwrap_err();
    let expected = NotTaken::LeftToOthers {
        of_client: 224,
        free: 4,
    };
    assert_eq!(refused, expected);
    // Whoever has nothing there comes in as long as any place is free.
    for client in 2..6 {
        assert_eq!(come(client), Ok(()), "{client}");
    }
    let full = come(6).unwrap_err();
    let expected = NotTaken::QueueFull {
        waiting: 256,
        waiting_max: 256,
    };
    assert_eq!(full, expected);
}

/// One that comes for model B, of the client whose texts are of model A.
fn comes_for_b(bench: &mut Bench, tokens: u32, more: u32) -> SeqId {
    let arrival = Arrival {
        model: B,
        ..bench.arrival(tokens, more)
    };
    bench.come(arrival)
}

#[test]
fn a_request_for_a_small_model_does_not_wait_for_texts_of_a_large_one() {
    let mut bench = bench();
    // The fifth waits for room, and came first.
    let large: Vec<SeqId> = (0..5).map(|_| bench.comes(10, 950)).collect();
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    assert!(bench.running(large[3]) && !bench.running(large[4]));
    // Many more than may pass one that comes first.
    for _ in 0..40 {
        let small = comes_for_b(&mut bench, 20, 10);
        bench.pass().unwrap();
        assert_eq!(bench.actions, [Action::Admitted(small)]);
        ends(&mut bench, small, 100);
    }
    while bench.pass().is_some() {}
    assert_eq!(bench.scheduler.sequences().count(), 0, "all end");
}

#[test]
fn a_model_that_has_all_room_gives_some_to_another() {
    let mut bench = bench();
    let large: Vec<SeqId> = (0..4).map(|_| bench.comes(10, 990)).collect();
    (0..20).for_each(|_| _ = bench.pass().unwrap());
    let small = comes_for_b(&mut bench, 700, 8);
    bench.pass().unwrap();
    let given = [Action::Yielded(large[3]), Action::Admitted(small)];
    assert_eq!(bench.actions, given);
    // What has yielded comes back when that has ended, and the rest was never disturbed.
    ends(&mut bench, small, 200);
    bench.pass().unwrap();
    assert_eq!(bench.actions, [Action::Admitted(large[3])]);
    assert!(large[..3].iter().all(|seq| bench.running(*seq)));
}
