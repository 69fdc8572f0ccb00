//! Preemption for KV memory: which sequences give their KV to which, if the budget has no room for
//! more.
//!
//! A client's *share* of the promised KV is an equal part among the clients that run or want to
//! run. If a waiting sequence of a client with less does not fit, clients that have their share
//! give some: the one with the most, its newest sequence of those that were preempted least, as
//! long as the giver still has at least what the taker will have then. So no client gives its last
//! sequence here, and two clients do not pass the same memory to and fro: they share it in time
//! (`terms.rs`). A sequence that cannot be made to fit this way waits, and so does one whose client
//! has its share of places. In the same way the models of one client share its KV: all HTTP
//! requests without a key are one client, and a request for a small model does not wait for the
//! ends of those for a large one. As with places (`places.rs`), a sequence has some passes before
//! it is preempted here, and a client that has its share waits behind those that have not; unlike
//! there, sequences with slow readers do not go first. If KV runs short because sequences grow, the
//! client with the most gives first, if it has more than its share.

use std::collections::BTreeMap;

use crate::places::order_to_give;
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, ModelId, SeqId, Sequence};
use crate::view::View;

/// The group of parties that share KV memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Among {
    Clients,
    /// The models of one client's sequences.
    ModelsOf(ClientId),
}

/// A party that shares KV memory with others: a client, or a model of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Party {
    Client(ClientId),
    Model(ModelId),
}

impl Among {
    /// The party that a sequence belongs to; `None` if it does not belong to this group.
    fn party(self, s: &Sequence) -> Option<Party> {
        let client = s.arrival.client;
        match self {
            Self::Clients => Some(Party::Client(client)),
            Self::ModelsOf(of) => (client == of).then_some(Party::Model(s.arrival.model)),
        }
    }
}

/// What a party holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// KV cache that is promised, in bytes.
    bytes: u64,
    sequences: usize,
}

/// The KV promised to each party, counting only sequences at least as urgent as a class.
#[derive(Clone)]
pub(crate) struct Room {
    /// What each party holds that has or wants KV.
    held: BTreeMap<Party, Held>,
    bytes: u64,
}

impl Room {
    fn held(&self, party: Party) -> Held {
        self.held.get(&party).copied().unwrap_or_default()
    }

    /// Whether a party has more than its share.
    fn has_more(&self, party: Party) -> bool {
        u128::from(self.held(party).bytes) * self.parties() > u128::from(self.bytes)
    }

    fn parties(&self) -> u128 {
        self.held.len().max(1) as u128
    }

    /// Whether a party has at least its share; one without any KV never has.
    fn has_its_share(&self, party: Party) -> bool {
        let bytes = self.held(party).bytes;
        bytes > 0 && u128::from(bytes) * self.parties() >= u128::from(self.bytes)
    }

    /// Whether a client has at least its share of KV.
    pub(crate) fn client_has_its_share(&self, client: ClientId) -> bool {
        self.has_its_share(Party::Client(client))
    }

    /// Whether a model has at least its share, and others want some.
    pub(crate) fn model_has_its_share(&self, model: ModelId) -> bool {
        self.held.len() > 1 && self.has_its_share(Party::Model(model))
    }

    fn give(&mut self, party: Party, bytes: u64) {
        let held = self.held.entry(party).or_default();
        held.bytes -= bytes;
        held.sequences -= 1;
        self.bytes -= bytes;
    }
}

impl Scheduler {
    /// The KV held by sequences that are at least as urgent as this class.
    pub(crate) fn room(&self, among: Among, class: Class, view: &View<'_>) -> Room {
        let mut held: BTreeMap<Party, Held> = BTreeMap::new();
        let mut all = 0;
        if matches!(among, Among::Clients) && self.queues.clients() < 2 {
            return Room { held, bytes: all };
        }
        for s in self.running_sequences().filter(|s| s.class() <= class) {
            let Some(party) = among.party(s) else {
                continue;
            };
            let bytes = promised_bytes(s, view);
            let of_party = held.entry(party).or_default();
            of_party.bytes += bytes;
            of_party.sequences += 1;
            all += bytes;
        }
        for party in self.parties_that_wait(among, class) {
            held.entry(party).or_default();
        }
        Room { held, bytes: all }
    }

    /// Parties with sequences that wait for KV memory in a class.
    fn parties_that_wait(&self, among: Among, class: Class) -> Vec<Party> {
        match among {
            Among::Clients => self.clients_that_wait(class).map(Party::Client).collect(),
            Among::ModelsOf(client) => {
                let queues = self.queues.of_client(client, class);
                let firsts = queues.flat_map(|queue| self.firsts(queue));
                firsts.map(|s| Party::Model(s.arrival.model)).collect()
            }
        }
    }

    /// The newest of the least urgent sequences of the client with most KV, if that is more than
    /// its share; never a client's last sequence.
    pub(crate) fn newest_of_the_greediest(&self, view: &View<'_>) -> Option<SeqId> {
        let class = self.running_sequences().map(Sequence::class).max()?;
        let room = self.room(Among::Clients, class, view);
        let of_class = self.running_sequences().filter(|s| s.class() == class);
        let may = of_class.filter(|s| {
            let client = Party::Client(s.arrival.client);
            !s.in_pass
                && !s.arrival.promised
                && room.held(client).sequences > 1
                && room.has_more(client)
        });
        let held = |s: &Sequence| room.held(Party::Client(s.arrival.client)).bytes;
        let greediest = may.max_by_key(|s| (held(s), s.seniority()));
        greediest.map(|s| s.arrival.seq)
    }

    /// Sequences that give their KV so that a waiting one, promised `promised` positions, fits
    /// beside the rest of `kept`; `None` if none has to, or it would not suffice.
    pub(crate) fn who_gives_room_to(
        &self,
        s: &Sequence,
        promised: u32,
        kept: &[SeqId],
        view: &View<'_>,
        fits: impl Fn(&[SeqId]) -> bool,
    ) -> Option<Vec<SeqId>> {
        if kept.len() >= self.config.running_max {
            return None;
        }
        let client = s.arrival.client;
        let wanted = view.costs.kv_bytes(s.arrival.model, promised);
        let of_clients = match self.places(s.arrival.class).has_its_share(client) {
            true => None,
            false => self.givers(Among::Clients, (s, wanted), kept.to_vec(), view, &fits),
        };
        of_clients.or_else(|| {
            let among = Among::ModelsOf(client);
            self.givers(among, (s, wanted), kept.to_vec(), view, &fits)
        })
    }

    /// Among parties that share KV, the sequences that give `wanted` bytes to a waiting one.
    fn givers(
        &self,
        among: Among,
        (s, wanted): (&Sequence, u64),
        mut kept: Vec<SeqId>,
        view: &View<'_>,
        fits: impl Fn(&[SeqId]) -> bool,
    ) -> Option<Vec<SeqId>> {
        let own = among.party(s)?;
        let before = self.room(among, s.arrival.class, view);
        if before.has_its_share(own) {
            return None;
        }
        let mut room = before.clone();
        let would_have = room.held(own).bytes + wanted;
        let mut yielding = Vec::new();
        loop {
            let others = kept.iter().map(|seq| &self.sequences[seq]);
            let others = others.filter_map(|other| Some((among.party(other)?, other)));
            let may = others.filter(|(party, other)| {
                let held = room.held(*party).bytes;
                *party != own
                    && !other.in_pass
                    && !other.arrival.promised
                    && other.class() == s.arrival.class
                    && before.has_its_share(*party)
                    && held.saturating_sub(promised_bytes(other, view)) >= would_have
                    && self.has_had_a_turn(other)
            });
            let first =
                |(party, other): &(Party, &Sequence)| order_to_give(room.held(*party).bytes, other);
            let (party, other) = may.min_by_key(first)?;
            let seq = other.arrival.seq;
            room.give(party, promised_bytes(other, view));
            kept.retain(|kept| *kept != seq);
            yielding.push(seq);
            if fits(&kept) {
                return Some(yielding);
            }
        }
    }
}

/// Bytes of KV that a running sequence is promised.
pub(crate) fn promised_bytes(s: &Sequence, view: &View<'_>) -> u64 {
    view.costs.kv_bytes(s.arrival.model, s.promised)
}
