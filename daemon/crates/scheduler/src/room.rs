//! Who gives his KV to whom where the budget has no room for more.
//!
//! A client's *share* of the KV that is promised is what each has if those that run or want to run
//! have as much. Where a waiting sequence of a client with less does not fit, those that have
//! theirs give some: of the one with the most, the newest of those that yielded least, as long as
//! the giver still has at least what the one who takes will have then. So nobody gives his last
//! sequence, which would only be computed twice, and two clients do not trade one room to and fro.
//! What cannot be made to fit so waits, and so does what comes for a client that has its share of
//! places. As with those (`places.rs`), a sequence has some passes for itself before it yields
//! here, and a client that has its share waits behind those that have not; other than there,
//! readers without room are not asked first. Where KV runs short because texts grow, the client
//! with the most gives first, if it has more than its share.

use std::collections::BTreeMap;

use crate::places::order_to_give;
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, SeqId, Sequence};
use crate::view::View;

/// What a client has.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// KV that it is promised.
    bytes: u64,
    sequences: usize,
}

/// The KV that clients are promised, as one who waits in a class counts it.
#[derive(Clone)]
pub(crate) struct Room {
    /// Of each client that has some or wants some.
    held: BTreeMap<ClientId, Held>,
    bytes: u64,
}

impl Room {
    fn held(&self, client: ClientId) -> Held {
        self.held.get(&client).copied().unwrap_or_default()
    }

    /// Whether a client has more than it has a right to.
    fn has_more(&self, client: ClientId) -> bool {
        u128::from(self.held(client).bytes) * self.clients() > u128::from(self.bytes)
    }

    fn clients(&self) -> u128 {
        self.held.len().max(1) as u128
    }

    /// Whether a client has as much as it has a right to. One that has nothing has not.
    pub(crate) fn has_its_share(&self, client: ClientId) -> bool {
        let bytes = self.held(client).bytes;
        bytes > 0 && u128::from(bytes) * self.clients() >= u128::from(self.bytes)
    }

    fn give(&mut self, client: ClientId, bytes: u64) {
        let held = self.held.entry(client).or_default();
        held.bytes -= bytes;
        held.sequences -= 1;
        self.bytes -= bytes;
    }
}

impl Scheduler {
    /// The KV of sequences that are not less urgent than this class.
    pub(crate) fn room(&self, class: Class, view: &View<'_>) -> Room {
        let mut held: BTreeMap<ClientId, Held> = BTreeMap::new();
        let mut all = 0;
        if self.queues.clients() < 2 {
            return Room { held, bytes: all };
        }
        for s in self.running_sequences().filter(|s| s.class() <= class) {
            let bytes = promised_bytes(s, view);
            let of_client = held.entry(s.arrival.client).or_default();
            of_client.bytes += bytes;
            of_client.sequences += 1;
            all += bytes;
        }
        for client in self.clients_that_wait(class) {
            held.entry(client).or_default();
        }
        Room { held, bytes: all }
    }

    /// The newest of the least urgent sequences of the client that has most KV, and more than its
    /// share; never the last that a client has.
    pub(crate) fn newest_of_the_greediest(&self, view: &View<'_>) -> Option<SeqId> {
        let class = self.running_sequences().map(Sequence::class).max()?;
        let room = self.room(class, view);
        let of_class = self.running_sequences().filter(|s| s.class() == class);
        let may = of_class.filter(|s| {
            let client = s.arrival.client;
            !s.in_pass
                && !s.arrival.promised
                && room.held(client).sequences > 1
                && room.has_more(client)
        });
        let greediest = may.max_by_key(|s| (room.held(s.arrival.client).bytes, s.seniority()));
        greediest.map(|s| s.arrival.seq)
    }

    /// Who gives his KV so that a waiting sequence, promised so many positions, fits beside those
    /// who are left of `kept`; `None` if nobody has to, or it would not be enough.
    pub(crate) fn who_gives_room_to(
        &self,
        s: &Sequence,
        promised: u32,
        mut kept: Vec<SeqId>,
        view: &View<'_>,
        fits: impl Fn(&[SeqId]) -> bool,
    ) -> Option<Vec<SeqId>> {
        if kept.len() >= self.config.running_max {
            return None;
        }
        if self.places(s.arrival.class).has_its_share(s.arrival.client) {
            return None;
        }
        let wanted = view.costs.kv_bytes(s.arrival.model, promised);
        let before = self.room(s.arrival.class, view);
        if before.has_its_share(s.arrival.client) {
            return None;
        }
        let mut room = before.clone();
        let would_have = room.held(s.arrival.client).bytes + wanted;
        let mut yielding = Vec::new();
        loop {
            let others = kept.iter().map(|seq| &self.sequences[seq]);
            let may = others.filter(|other| {
                let held = room.held(other.arrival.client).bytes;
                other.arrival.client != s.arrival.client
                    && !other.in_pass
                    && !other.arrival.promised
                    && other.class() == s.arrival.class
                    && before.has_its_share(other.arrival.client)
                    && held.saturating_sub(promised_bytes(other, view)) >= would_have
                    && self.has_had_a_turn(other)
            });
            let other = may.min_by_key(|other| {
                let held = room.held(other.arrival.client).bytes;
                order_to_give(held, other)
            })?;
            let seq = other.arrival.seq;
            room.give(other.arrival.client, promised_bytes(other, view));
            kept.retain(|kept| *kept != seq);
            yielding.push(seq);
            if fits(&kept) {
                return Some(yielding);
            }
        }
    }
}

/// Bytes of what a running sequence is promised.
fn promised_bytes(s: &Sequence, view: &View<'_>) -> u64 {
    view.costs.kv_bytes(s.arrival.model, s.promised)
}
