//! Who goes first: between clients the one that was served least, within a client and class the one
//! that came first.
//!
//! A client's *service* is the time that its rows took in passes, in microseconds. One that comes,
//! or comes back, starts at the least service of those that have sequences, so that nobody saves
//! up (start-time fair queueing). Each client has a queue a class. A queue whose first sequence
//! waited too long is *overdue* and goes before all that are not (of clients that have their share
//! of places or KV behind others: `places.rs`, `room.rs`); a queue that was just served is not
//! overdue, so a client that asks much cannot overrule fairness by asking early.

use std::collections::BTreeMap;

use crate::sequence::{Class, ClientId, SeqId};

/// Clients without sequences whose service is remembered at most.
const CLIENTS_REMEMBERED: usize = 4096;

/// A client.
#[derive(Clone, Copy, Debug, Default)]
struct Client {
    service: u64,
    /// Sequences of the client, running or waiting.
    sequences: usize,
}

/// The sequences of a client and class that wait, and when it was served.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    /// Queued sequences by number of arrival.
    pub(crate) waiting: BTreeMap<u64, SeqId>,
    /// The number of passes when one of them was last admitted for the first time.
    pub(crate) admitted_at: u64,
    /// The number of the last pass with rows of a prompt of it, or of that at which there was none
    /// to compute.
    pub(crate) prompt_at: u64,
    /// Sequences of the queue, running or waiting.
    sequences: usize,
}

/// The queues of all clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queues {
    clients: BTreeMap<ClientId, Client>,
    queues: BTreeMap<(ClientId, Class), Queue>,
}

impl Queues {
    /// A sequence comes.
    pub(crate) fn enter(&mut self, client: ClientId, class: Class, passes: u64) {
        let least = self.least_service();
        let known = self.clients.entry(client).or_default();
        if known.sequences == 0 {
            known.service = known.service.max(least);
        }
        known.sequences += 1;
        let queue = self.queues.entry((client, class)).or_insert_with(|| Queue {
            prompt_at: passes,
            ..Queue::default()
        });
        queue.sequences += 1;
    }

    /// A sequence goes for good.
    pub(crate) fn leave(&mut self, client: ClientId, class: Class) {
        let queue = self.queue_mut(client, class);
        queue.sequences -= 1;
        if queue.sequences == 0 {
            assert!(
                queue.waiting.is_empty(),
                "a client whose sequences wait is counted"
            );
            self.queues.remove(&(client, class));
        }
        let known = self.clients.get_mut(&client).expect("it came");
        known.sequences -= 1;
        if known.sequences > 0 {
            return;
        }
        if self.queues.is_empty() {
            self.clients.clear();
            return;
        }
        // Who is not ahead of the others starts with them when it comes back, remembered or not.
        let least = self.least_service();
        self.clients
            .retain(|_, c| c.sequences > 0 || c.service > least);
        let idle = self.clients.iter().filter(|(_, c)| c.sequences == 0);
        if idle.clone().count() > CLIENTS_REMEMBERED {
            let nearest = idle.min_by_key(|(_, c)| c.service).map(|(id, _)| *id);
            nearest.map(|id| self.clients.remove(&id));
        }
    }

    /// The least service of those that have sequences.
    fn least_service(&self) -> u64 {
        let active = self.clients.values().filter(|c| c.sequences > 0);
        active.map(|c| c.service).min().unwrap_or(0)
    }

    /// Charges a client with the microseconds that its rows took of a pass. A client without
    /// sequences may be forgotten.
    pub(crate) fn charge(&mut self, client: ClientId, took_us: u64) {
        if let Some(known) = self.clients.get_mut(&client) {
            known.service += took_us;
        }
    }

    /// Work computed for a client that has sequences, relative to others.
    pub(crate) fn service(&self, client: ClientId) -> u64 {
        self.clients[&client].service
    }

    pub(crate) fn queue_mut(&mut self, client: ClientId, class: Class) -> &mut Queue {
        let queue = self.queues.get_mut(&(client, class));
        queue.expect("a client with sequences has a queue")
    }

    pub(crate) fn queue(&self, client: ClientId, class: Class) -> &Queue {
        &self.queues[&(client, class)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = ((ClientId, Class), &Queue)> {
        self.queues.iter().map(|(key, queue)| (*key, queue))
    }

    /// Queues of a client whose sequences are not less urgent than a class.
    pub(crate) fn of_client(&self, client: ClientId, class: Class) -> impl Iterator<Item = &Queue> {
        let queues = self
            .queues
            .range((client, Class::Interactive)..=(client, class));
        queues.map(|(_, queue)| queue)
    }

    /// Clients that have sequences.
    pub(crate) fn clients(&self) -> usize {
        let active = self.clients.values().filter(|c| c.sequences > 0);
        active.count()
    }

    /// Sequences of a client that wait.
    pub(crate) fn waiting_of(&self, client: ClientId) -> usize {
        let of_client = (client, Class::Interactive)..=(client, Class::Batch);
        let queues = self.queues.range(of_client);
        queues.map(|(_, queue)| queue.waiting.len()).sum()
    }

    /// Sequences that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.queues.values().map(|q| q.waiting.len()).sum()
    }
}
