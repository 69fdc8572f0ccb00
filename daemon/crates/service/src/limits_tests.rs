//! Which limits a peer has, and what counts against them.

use rocmforge_failure::Kind;

use super::*;

fn who(entries: &[&str]) -> Who {
    let entries: Vec<String> = entries.iter().map(|e| (*e).to_owned()).collect();
    Who::parse(&entries).unwrap()
}

fn running(n: u32) -> PeerLimits {
    PeerLimits {
        running: Some(n),
        ..PeerLimits::default()
    }
}

fn rule(entries: &[&str], limits: PeerLimits) -> Rule {
    Rule {
        who: who(entries),
        tokens: Vec::new(),
        limits,
    }
}

#[test]
fn a_users_limits_win_over_its_groups_and_those_over_everyones_key_by_key() {
    let ci = TokenName::new("ci").unwrap();
    let queued = PeerLimits {
        queued: Some(9),
        ..PeerLimits::default()
    };
    let rules = [
        rule(&["4001"], running(1)),
        rule(&["@7"], running(2)),
        rule(&["*"], running(3)),
        rule(&["*"], queued),
        rule(&["@8"], running(4)),
        Rule {
            tokens: vec![ci],
            ..rule(&[], running(5))
        },
    ];
    let of = |peer, gids: &[u32]| {
        let limits = limits_of(&rules, peer, gids);
        (limits.running, limits.queued)
    };
    assert_eq!(of(Peer::User(4001), &[7, 8]), (Some(1), Some(9)));
    assert_eq!(of(Peer::User(4002), &[7]), (Some(2), Some(9)));
    assert_eq!(
        of(Peer::User(4002), &[7, 8]),
        (Some(4), Some(9)),
        "the last"
    );
    assert_eq!(of(Peer::User(4002), &[]), (Some(3), Some(9)));
    assert_eq!(of(Peer::Token(ci), &[7]), (Some(5), Some(9)));
    assert_eq!(of(Peer::Local, &[]), (Some(3), Some(9)));
    assert_eq!(
        limits_of(&rules[..2], Peer::Local, &[]),
        PeerLimits::default()
    );
}

#[test]
fn bytes_count_while_their_request_is_under_way() {
    let used = Used::new(Peer::User(1));
    let limits = PeerLimits {
        prompt_bytes: Some(100),
        ..PeerLimits::default()
    };
    let enter = |bytes| Ticket::new(Arc::clone(&used), limits, bytes);
    let first = enter(60).unwrap();
    let refused = enter(41).unwrap_err();
    assert_eq!(refused.kind(), Kind::ResourceExhausted);
    assert_eq!(refused.metadata()["limit"], "prompt_bytes");
    assert!(
        refused.message().contains("prompt_bytes = 100"),
        "{refused:?}"
    );
    assert!(refused.retry_after().is_some());
    let never = enter(101).unwrap_err();
    assert_eq!(never.retry_after(), None, "no waiting helps");
    let second = enter(40).unwrap();
    drop((first, second));
    assert!(enter(100).is_ok());
    assert_eq!(used.sums().prompt_bytes, 0);
    assert_eq!(
        used.refused[Limit::PromptBytes as usize].load(Ordering::Relaxed),
        2
    );
}

#[test]
fn tokens_flow_off_at_the_limits_rate() {
    let used = Used::new(Peer::User(1));
    let limits = PeerLimits {
        tokens_per_minute: Some(600),
        ..PeerLimits::default()
    };
    let enter = || Ticket::new(Arc::clone(&used), limits, 0);
    let ticket = enter().unwrap();
    ticket.take_prompt(500).unwrap();
    ticket.note_generated(300);
    let refused = enter().unwrap_err();
    // 201 too many, at ten a second.
    let wait = refused.retry_after().unwrap().as_secs_f64();
    assert!((15.0..=20.1).contains(&wait), "{wait}");
    assert_eq!(refused.metadata()["max"], "600");
    used.sums().at -= Duration::from_secs(30);
    let ticket = enter().unwrap();
    assert!(ticket.take_prompt(400).unwrap_err().retry_after().is_some());
    assert_eq!(ticket.take_prompt(601).unwrap_err().retry_after(), None);
    ticket.take_prompt(50).unwrap();
    assert_eq!(used.tokens.load(Ordering::Relaxed), 850);
    used.sums().at -= Duration::from_secs(3600);
    assert!(
        ticket.take_prompt(600).is_ok(),
        "no more than all of it flows off"
    );
}

#[test]
fn idle_peers_are_forgotten_and_busy_ones_are_not() {
    let book = LimitBook::default();
    let busy = book.used(Peer::Local);
    for uid in 0..PEERS_KEPT as u32 {
        let used = book.used(Peer::User(uid));
        used.sums().at -= Duration::from_secs(61);
    }
    book.used(Peer::User(u32::MAX));
    let peers = book.peers.lock().unwrap();
    assert!(peers.len() <= 3, "{}", peers.len());
    assert!(Arc::ptr_eq(&peers[&Peer::Local], &busy));
}
