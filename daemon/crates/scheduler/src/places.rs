//! Preemption for places: which sequence gives its place to which, if all places
//! ([`Config::running_max`]) are taken.
//!
//! A client's *share* is an equal part of the places among the clients that want some, at least
//! one. If all places are taken, a waiting sequence whose client has fewer than its share takes the
//! place of a client that has more: from the client with the most, the newest of the sequences that
//! were preempted least. Before that, a sequence of another client whose reader has had no room for
//! a while is preempted for any: it computes nothing. Interactive sequences are counted without
//! batch ones, and are not preempted for them.
//!
//! So that sequences do not just come and go, a sequence has some passes before it is preempted
//! here, and one that was preempted often must have generated more, too. A client that has its
//! share waits behind those that have not; otherwise it would take back their places with each
//! sequence that ends.
//!
//! [`Config::running_max`]: crate::Config::running_max

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, SeqId, Sequence};

/// Number of preemptions after which a sequence gives its place away only once it has generated
/// more.
const FREE_YIELDS: u32 = 4;

/// The places that clients hold, counting only sequences at least as urgent as a class.
pub(crate) struct Places {
    /// Places held by each client that has or wants some.
    held: BTreeMap<ClientId, usize>,
    share: usize,
}

impl Places {
    fn held(&self, client: ClientId) -> usize {
        self.held.get(&client).copied().unwrap_or(0)
    }

    /// Whether a client has at least its share of places.
    pub(crate) fn has_its_share(&self, client: ClientId) -> bool {
        self.held(client) >= self.share
    }

    fn has_more(&self, client: ClientId) -> bool {
        self.held(client) > self.share
    }
}

impl Scheduler {
    /// The places held by sequences that are at least as urgent as this class.
    pub(crate) fn places(&self, class: Class) -> Places {
        let mut held: BTreeMap<ClientId, usize> = BTreeMap::new();
        for s in self.running_sequences().filter(|s| s.class() <= class) {
            *held.entry(s.arrival.client).or_default() += 1;
        }
        for client in self.clients_that_wait(class) {
            held.entry(client).or_default();
        }
        let share = self.config.running_max / held.len().max(1);
        Places {
            held,
            share: share.max(1),
        }
    }

    /// Clients of waiting sequences that are at least as urgent as this class and whose readers
    /// read.
    pub(crate) fn clients_that_wait(&self, class: Class) -> impl Iterator<Item = ClientId> {
        let queues = self.queues.iter().filter(move |((_, of), _)| *of <= class);
        queues
            .filter(|(_, queue)| queue.waiting.values().any(|seq| self.sequences[seq].ready))
            .map(|((client, _), _)| client)
    }

    /// Sequences that give their place to a waiting one, so that the rest leaves memory for it;
    /// `None` if there are free places, or no sequence has to give its own.
    pub(crate) fn who_gives_a_place_to(
        &self,
        s: &Sequence,
        fits: impl Fn(&[SeqId]) -> bool,
    ) -> Option<Vec<SeqId>> {
        if self.running.len() < self.config.running_max {
            return None;
        }
        let mut places = self.places(s.arrival.class);
        let (mut kept, mut yielding) = (self.running.clone(), Vec::new());
        while let Some(other) = self.next_to_give(s, &kept, &places) {
            let (seq, client) = (other.arrival.seq, other.arrival.client);
            if other.class() <= s.arrival.class {
                places.held.entry(client).and_modify(|held| *held -= 1);
            }
            kept.retain(|kept| *kept != seq);
            yielding.push(seq);
            if fits(&kept) {
                return Some(yielding);
            }
        }
        None
    }

    /// The first of the sequences that keep running to give its place to a waiting one.
    fn next_to_give(&self, s: &Sequence, kept: &[SeqId], places: &Places) -> Option<&Sequence> {
        let others = kept.iter().map(|seq| &self.sequences[seq]).filter(|other| {
            !other.in_pass
                && !other.arrival.promised
                && other.arrival.client != s.arrival.client
                && other.class() >= s.arrival.class
        });
        let first = |other: &&Sequence| order_to_give(places.held(other.arrival.client), other);
        let slow = others.clone().filter(|other| self.is_slow(other));
        slow.min_by_key(first).or_else(|| {
            let may = !places.has_its_share(s.arrival.client);
            let over = others.filter(|other| {
                may && places.has_more(other.arrival.client) && self.has_had_a_turn(other)
            });
            over.min_by_key(first)
        })
    }

    /// Whether a sequence's reader has had no room for so long that others may use its place.
    fn is_slow(&self, s: &Sequence) -> bool {
        let since = s.unready_since;
        since.is_some_and(|since| self.passes - since >= self.config.turn_passes)
    }

    /// Whether a sequence has used its place enough to give it away.
    pub(crate) fn has_had_a_turn(&self, s: &Sequence) -> bool {
        self.has_had_passes(s) && (s.yields < FREE_YIELDS || s.known > s.known_at_admission)
    }

    /// Whether a sequence has had its place for the minimum number of passes.
    pub(crate) fn has_had_passes(&self, s: &Sequence) -> bool {
        self.passes - s.admitted_at >= self.config.turn_passes
    }
}

/// Sort key of sequences that may give something up, given what their client holds; the least goes
/// first.
pub(crate) fn order_to_give<T: Ord>(held: T, s: &Sequence) -> impl Ord + use<T> {
    (Reverse(held), s.yields, Reverse(s.seniority()))
}
