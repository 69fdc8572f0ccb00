//! Which requests are kept, who sees them, and what their reports are.

use super::*;

fn ended(number: u64, peer: Peer, took_ms: u64) -> Ended {
    let at = Instant::now();
    Ended {
        number,
        id: Some(format!("req-{number}")),
        call: "Generate",
        model: "tiny".to_owned(),
        peer,
        at,
        handed_over: Some(at + Duration::from_millis(2)),
        ended: at + Duration::from_millis(took_ms),
        code: "Ok",
        slots: vec![TimesSlot::default()],
    }
}

fn viewer(peer: Peer, is_admin: bool) -> Viewer {
    Viewer { peer, is_admin }
}

#[test]
fn the_ring_keeps_the_last_requests_alone() {
    let recent = RecentRequests::default();
    for _ in 0..2 * KEPT_MAX {
        recent.keep(ended(recent.number(), Peer::Local, 5));
    }
    let seen = recent.seen_by(&viewer(Peer::Local, false));
    assert_eq!(seen.len(), KEPT_MAX);
    assert_eq!(seen[0].number, 2 * KEPT_MAX as u64);
}

#[test]
fn a_client_sees_its_own_requests_and_an_admin_all() {
    let recent = RecentRequests::default();
    recent.keep(ended(1, Peer::User(7), 5));
    recent.keep(ended(2, Peer::User(8), 9));
    let numbers = |viewer: &Viewer| {
        let seen = recent.seen_by(viewer);
        seen.iter().map(|e| e.number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&viewer(Peer::User(7), false)), [1]);
    assert_eq!(numbers(&viewer(Peer::Local, false)), [0_u64; 0]);
    assert_eq!(numbers(&viewer(Peer::Local, true)), [2, 1]);
    let last = |peer, is_admin| recent.last_seen_by(&viewer(peer, is_admin));
    assert_eq!(last(Peer::User(7), false), Some(1));
    assert_eq!(last(Peer::Local, false), None);
    assert_eq!(last(Peer::Local, true), Some(2));
}

#[test]
fn who_follows_the_requests_that_end_finds_them() {
    let recent = RecentRequests::default();
    let mut follows = recent.kept.subscribe();
    assert!(!follows.has_changed().unwrap());
    recent.keep(ended(1, Peer::Local, 5));
    assert!(follows.has_changed().unwrap());
    follows.mark_unchanged();
    recent.keep(ended(2, Peer::Local, 5));
    assert!(follows.has_changed().unwrap());
}

#[test]
fn a_request_that_the_engine_never_had_still_adds_up() {
    let one = ended(1, Peer::Local, 10);
    let report = one.report(&|_| "someone".to_owned());
    assert_eq!(report.parts.len(), 2);
    assert!((report.total_ms - 10.0).abs() < 1e-9);
    assert_eq!((&*report.cause, &*report.client), ("rest", "someone"));
}

#[test]
fn a_request_that_waits_for_its_model_to_be_opened_says_so_first() {
    let mut slow = ended(1, Peer::Local, 10);
    slow.handed_over = Some(slow.at + Duration::from_millis(9));
    let report = slow.report(&|_| "someone".to_owned());
    assert_eq!(report.cause, "preparing");
    assert_eq!(report.tokens_per_s, None);
}
