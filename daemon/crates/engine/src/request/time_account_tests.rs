//! What time accounts make of what they are told.

use super::*;
use crate::clock::Clock;

const OWN: ModelId = ModelId(1);
const OTHER: ModelId = ModelId(2);

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

const fn of(model: ModelId, client: u64) -> Occupant {
    Occupant { model, client }
}

/// An account, and when it begins.
fn account() -> (TimeAccount, Instant) {
    let begun = Clock.now();
    (TimeAccount::new(begun, None), begun)
}

#[test]
fn one_that_is_not_admitted_waits_in_the_queue_behind_whoever_runs() {
    let (mut account, begun) = account();
    account.wait(begun + ms(5), OWN, Meanwhile::Slice(of(OWN, 7)), 0);
    account.wait(begun + ms(8), OWN, Meanwhile::Slice(of(OTHER, 8)), 0);
    account.wait(begun + ms(9), OWN, Meanwhile::Between(None), 0);
    assert_eq!(account.parts().of(Part::Queue), ms(9));
    let behind = account.behind().iter().map(|b| (b.whom, b.took));
    let behind: Vec<_> = behind.collect();
    assert_eq!(behind, [(of(OWN, 7), ms(5)), (of(OTHER, 8), ms(3))]);
}

#[test]
fn one_that_is_admitted_waits_in_the_queue_of_its_model_until_it_is_computed_first() {
    let (mut account, begun) = account();
    account.stand(Standing::Ready);
    account.wait(begun + ms(2), OWN, Meanwhile::Slice(of(OWN, 7)), 0);
    account.wait(begun + ms(5), OWN, Meanwhile::Slice(of(OTHER, 7)), 0);
    account.compute(begun + ms(6), Part::Prompt, SliceUse::default(), 0);
    account.wait(begun + ms(10), OWN, Meanwhile::Slice(of(OWN, 7)), 0);
    account.wait(begun + ms(11), OWN, Meanwhile::Between(None), 0);
    let parts = account.parts();
    let took = [
        (Part::Queue, 2),
        (Part::OtherModels, 3),
        (Part::Prompt, 1),
        (Part::OwnModel, 4),
        (Part::Rest, 1),
    ];
    for (part, n) in took {
        assert_eq!(parts.of(part), ms(n), "{part:?}");
    }
    assert_eq!(parts.total(), ms(11));
}

#[test]
fn a_pass_that_the_device_computes_has_its_time_while_others_run() {
    let (mut account, begun) = account();
    account.compute(begun + ms(1), Part::Decode, SliceUse::default(), 0);
    account.computes(Part::Decode, ms(2), Some((of(OTHER, 7), ms(3))));
    account.stand(Standing::Computing);
    account.wait(begun + ms(5), OWN, Meanwhile::Slice(of(OTHER, 8)), 0);
    assert_eq!(account.parts().of(Part::OtherModels), ms(3), "given before");
    assert_eq!(account.parts().of(Part::Decode), ms(2));
    // What it found has come: of what follows the device had only what it takes.
    account.stand(Standing::Ready);
    account.wait(begun + ms(11), OWN, Meanwhile::Slice(of(OTHER, 8)), 0);
    assert_eq!(account.parts().of(Part::Decode), ms(3));
    assert_eq!(account.parts().of(Part::OtherModels), ms(8));
    account.compute(begun + ms(12), Part::Decode, SliceUse::default(), 0);
    account.wait(begun + ms(13), OWN, Meanwhile::Between(None), 0);
    assert_eq!(account.parts().of(Part::Decode), ms(4));
    assert_eq!(account.parts().of(Part::Rest), ms(1), "the pass is over");
    assert_eq!(account.parts().total(), ms(13));
    // Of one that takes longer than was thought it is the device's.
    account.computes(Part::Decode, ms(2), None);
    account.stand(Standing::Computing);
    account.wait(begun + ms(23), OWN, Meanwhile::Between(None), 0);
    assert_eq!(account.parts().of(Part::Decode), ms(14));
}

#[test]
fn what_it_waits_for_itself_counts_whatever_others_do() {
    let cases = [
        (Standing::ReaderFull, Part::Reader),
        (Standing::FromDisk, Part::Disk),
        (Standing::Uploading, Part::Uploads),
    ];
    for (standing, part) in cases {
        let (mut account, begun) = account();
        account.stand(standing);
        account.wait(begun + ms(5), OWN, Meanwhile::Slice(of(OTHER, 8)), 100);
        account.wait(begun + ms(6), OWN, Meanwhile::Between(None), 20);
        assert_eq!(account.parts().of(part), ms(6), "{part:?}");
        let link = match part {
            Part::Reader => LinkTime::default(),
            _ => LinkTime {
                bytes: 120,
                took: ms(6),
            },
        };
        assert_eq!(account.link(), link, "{part:?}");
    }
    let (mut account, begun) = account();
    account.stand(Standing::Preempted);
    account.wait(begun + ms(5), OWN, Meanwhile::Slice(of(OWN, 8)), 0);
    assert_eq!(account.parts().first_cause(), Part::Preempted);
    assert_eq!(account.behind()[0].whom, of(OWN, 8));
}

#[test]
fn a_slice_is_split_by_what_it_waited_for_and_the_rest_is_the_devices() {
    let (mut account, begun) = account();
    let used = SliceUse {
        disk: ms(1),
        uploads: ms(20),
        cpu: ms(3),
        sampling: ms(2),
        earlier: Some((of(OTHER, 9), ms(4))),
        work: Duration::ZERO,
    };
    account.compute(begun + ms(40), Part::Decode, used, 1000);
    let parts = account.parts();
    let took = [
        (Part::Disk, 1),
        (Part::Uploads, 20),
        (Part::CpuCompute, 3),
        (Part::Sampling, 2),
        (Part::OtherModels, 4),
        (Part::Decode, 10),
    ];
    for (part, n) in took {
        assert_eq!(parts.of(part), ms(n), "{part:?}");
    }
    let link = LinkTime {
        bytes: 1000,
        took: ms(40),
    };
    assert_eq!(account.link(), link);
    // What was measured can be more than there was, where clocks were read at other times.
    account.compute(begun + ms(45), Part::Decode, used, 0);
    assert_eq!(account.parts().total(), ms(45));
}

#[test]
fn prompts_of_others_in_its_pass_take_their_share_of_its_decoding() {
    let (mut account, begun) = account();
    account.compute(begun + ms(4), Part::Decode, SliceUse::default(), 0);
    account.compute(begun + ms(10), Part::Decode, SliceUse::default(), 0);
    account.end_pass(0.75, Some(of(OWN, 5)));
    let parts = account.parts();
    assert_eq!(parts.of(Part::OwnModel), Duration::from_micros(7500));
    assert_eq!(parts.total(), ms(10));
    // The next pass has nobody's prompt.
    account.compute(begun + ms(20), Part::Decode, SliceUse::default(), 0);
    account.end_pass(0.0, None);
    let parts = account.parts();
    assert_eq!(parts.of(Part::OwnModel), Duration::from_micros(7500));
}

#[test]
fn uploads_between_passes_are_ones_own_or_others() {
    let (mut account, begun) = account();
    account.stand(Standing::Ready);
    let waits = |model, uploads, disk| {
        Meanwhile::Between(Some(WaitsFor {
            model,
            uploads: ms(uploads),
            disk: ms(disk),
        }))
    };
    account.wait(begun + ms(9), OWN, waits(OWN, 3, 5), 10);
    account.wait(begun + ms(11), OWN, waits(OTHER, 9, 1), 10);
    let parts = account.parts();
    assert_eq!(parts.of(Part::Disk), ms(5));
    assert_eq!(parts.of(Part::Uploads), ms(3));
    assert_eq!(parts.of(Part::OtherModels), ms(2), "no more than there was");
    assert_eq!(parts.of(Part::Rest), ms(1));
    assert_eq!(account.link().bytes, 10);
}

#[test]
fn those_it_waited_for_longest_are_kept() {
    let (mut account, begun) = account();
    let mut at = begun;
    for client in 0..100 {
        at += ms(1 + client % 10);
        account.wait(at, OWN, Meanwhile::Slice(of(OWN, client)), 0);
    }
    assert_eq!(account.behind().len(), WAITED_FOR_MAX);
    assert!(account.behind().iter().all(|b| b.took >= ms(8)));
    assert_eq!(account.parts().total(), at - begun);
}

#[test]
fn whatever_happens_the_parts_add_up() {
    // A linear congruential generator: the cases are the same each time.
    let mut seed = 1_u64;
    let mut draw = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % n
    };
    let standings = [
        Standing::Queued,
        Standing::Ready,
        Standing::Preempted,
        Standing::ReaderFull,
        Standing::FromDisk,
        Standing::Uploading,
        Standing::Follows,
    ];
    for _ in 0..200 {
        let (mut account, begun) = account();
        let mut at = begun;
        for _ in 0..100 {
            at += Duration::from_micros(draw(5000));
            let whom = of(ModelId(draw(3) as u32), draw(5));
            let some = Duration::from_micros(draw(4000));
            match draw(4) {
                0 => account.stand(standings[draw(7) as usize]),
                1 => account.wait(at, OWN, Meanwhile::Slice(whom), 1),
                2 => {
                    let waits = WaitsFor {
                        model: whom.model,
                        uploads: some,
                        disk: some / 2,
                    };
                    account.wait(at, OWN, Meanwhile::Between(Some(waits)), 1);
                }
                _ => {
                    let used = SliceUse {
                        disk: some,
                        uploads: Duration::from_micros(draw(4000)),
                        cpu: Duration::from_micros(draw(1000)),
                        sampling: Duration::from_micros(draw(1000)),
                        earlier: Some((whom, some)),
                        work: some,
                    };
                    account.compute(at, Part::Decode, used, 1);
                    let work = Duration::from_micros(draw(2000));
                    let known = [None, Some(work)];
                    account.note_uploads(
                        some,
                        known[draw(2) as usize],
                        work,
                        known[draw(2) as usize],
                    );
                    account.end_pass(draw(12) as f64 / 10.0, Some(whom));
                }
            }
            account.all_to(Part::Rest, at);
            assert_eq!(account.parts().total(), at - begun);
        }
    }
}

#[test]
fn a_device_that_waits_for_uploads_itself_computes_no_longer_than_its_work_takes() {
    let slice = |account: &mut TimeAccount, part, at, work| {
        let used = SliceUse {
            uploads: ms(10),
            work,
            ..SliceUse::default()
        };
        account.compute(at, part, used, 0);
    };
    let fresh = account;
    // Waits that were seen, the link's time, what the work takes, and the uploads that come of it.
    let cases = [
        (80, Some(ms(5)), 75),
        (80, None, 72),
        (30, Some(ms(5)), 30),
        (5, Some(ms(5)), 10),
    ];
    for (link, known, uploads) in cases {
        for part in [Part::Decode, Part::Prompt] {
            let (mut account, begun) = account();
            slice(&mut account, part, begun + ms(80), ms(8));
            account.note_uploads(ms(link), known, ms(4), None);
            account.end_pass(0.0, None);
            let parts = account.parts();
            assert_eq!(parts.of(Part::Uploads), ms(uploads), "{link} {known:?}");
            assert_eq!(parts.of(part), ms(80 - uploads), "{link} {known:?}");
        }
    }
    // Where no rate of such passes is known, it is what they take at least.
    let (mut account, begun) = account();
    slice(&mut account, Part::Decode, begun + ms(80), ms(0));
    account.note_uploads(ms(80), None, ms(30), None);
    assert_eq!(account.parts().of(Part::Uploads), ms(50));
    // The same where the rate of its first slice alone is not known, as of a first long prompt.
    let (mut account, begun) = fresh();
    slice(&mut account, Part::Prompt, begun + ms(40), ms(0));
    slice(&mut account, Part::Prompt, begun + ms(80), ms(8));
    account.note_uploads(ms(80), None, ms(50), None);
    assert_eq!(account.parts().of(Part::Uploads), ms(30));
    // A rate that other models are slower by says no more than its own tokens do.
    let (mut account, begun) = fresh();
    slice(&mut account, Part::Prompt, begun + ms(80), ms(70));
    account.note_uploads(ms(80), None, ms(60), Some(ms(20)));
    assert_eq!(account.parts().of(Part::Uploads), ms(60));
}
