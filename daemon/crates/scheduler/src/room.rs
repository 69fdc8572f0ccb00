//! Who gives his KV to whom where the budget has no room for more.
//!
//! A client's *share* of the KV that is promised is what each has if those that run or want to run
//! have as much. Where a waiting sequence of a client with less does not fit, those that have
//! theirs give some: of the one with the most, the newest of those that yielded least, as long as
//! the giver still has at least what the one who takes will have then. So nobody gives his last
//! sequence here, and two clients do not trade one room to and fro: they share it in time
//! (`terms.rs`). What cannot be made to fit so waits, and so does what comes for a client that has
//! its share of places. In the same way the models of one client share what it has: all that come
//! by HTTP without a key are one client, and a request for a small model does not wait for the ends
//! of those for a large one. As with places (`places.rs`), a sequence has some passes for itself
//! before it yields here, and a client that has its share waits behind those that have not; other
//! than there, readers without room are not asked first. Where KV runs short because texts grow,
//! the client with the most gives first, if it has more than its share.

use std::collections::BTreeMap;

use crate::places::order_to_give;
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, ModelId, SeqId, Sequence};
use crate::view::View;

/// Among whom room is shared.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Among {
    Clients,
    /// The models that one client asks.
    ModelsOf(ClientId),
}

/// A party that shares room with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Party {
    Client(ClientId),
    Model(ModelId),
}

impl Among {
    /// Whose sequence it is, if it is of one of them.
    fn party(self, s: &Sequence) -> Option<Party> {
        let client = s.arrival.client;
        match self {
            Self::Clients => Some(Party::Client(client)),
            Self::ModelsOf(of) => (client == of).then_some(Party::Model(s.arrival.model)),
        }
    }
}

/// What a party has.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// KV cache that is promised, in bytes.
    bytes: u64,
    sequences: usize,
}

/// The KV that is promised, as one who waits in a class counts it.
#[derive(Clone)]
pub(crate) struct Room {
    /// Memory held by each party that has or wants some.
    held: BTreeMap<Party, Held>,
    bytes: u64,
}

impl Room {
    fn held(&self, party: Party) -> Held {
        self.held.get(&party).copied().unwrap_or_default()
    }

    /// Whether one has more than it has a right to.
    fn has_more(&self, party: Party) -> bool {
        u128::from(self.held(party).bytes) * self.parties() > u128::from(self.bytes)
    }

    fn parties(&self) -> u128 {
        self.held.len().max(1) as u128
    }

    /// Whether one has as much as it has a right to. One that has nothing has not.
    fn has_its_share(&self, party: Party) -> bool {
        let bytes = self.held(party).bytes;
        bytes > 0 && u128::from(bytes) * self.parties() >= u128::from(self.bytes)
    }

    /// Whether a client has as much as it has a right to.
    pub(crate) fn client_has_its_share(&self, client: ClientId) -> bool {
        self.has_its_share(Party::Client(client))
    }

    /// Whether a model has as much as it has a right to, and others want some.
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
    /// The KV of sequences that are not less urgent than this class.
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

    /// Parties that wait for room in a class.
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

    /// The newest of the least urgent sequences of the client that has most KV, and more than its
    /// share; never the last that a client has.
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

    /// Who gives his KV so that a waiting sequence, promised so many positions, fits beside those
    /// who are left of `kept`; `None` if nobody has to, or it would not be enough.
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

    /// Who of those that share gives so many bytes to a waiting sequence.
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

/// Bytes of what a running sequence is promised.
pub(crate) fn promised_bytes(s: &Sequence, view: &View<'_>) -> u64 {
    view.costs.kv_bytes(s.arrival.model, s.promised)
}
