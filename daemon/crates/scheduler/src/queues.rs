//! The queues of waiting sequences. Between clients the one that was served least goes first,
//! within a client and class the sequence that arrived first.
//!
//! A client's *service* is the time that its rows took in passes, in microseconds. A client that
//! arrives, or returns, starts at the least service of those that have sequences, so that unused
//! service is not saved up (start-time fair queueing). Each client has one queue for each class. A
//! queue whose first sequence waited too long is *overdue* and goes before all that are not (of
//! clients that have their share of places or KV behind others: `places.rs`, `room.rs`); a queue
//! that was just served is not overdue, so a client with many requests cannot overrule fairness by
//! sending them early.

use std::collections::BTreeMap;

use crate::sequence::{Class, ClientId, SeqId};

/// Maximum number of clients without sequences whose service is remembered.
const CLIENTS_REMEMBERED: usize = 4096;

/// Service and number of sequences of a client.
#[derive(Clone, Copy, Debug, Default)]
struct Client {
    service: u64,
    /// Number of the client's sequences, running or waiting.
    sequences: usize,
}

/// The waiting sequences of a client and class, and when the queue was last served.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    /// Waiting sequences by number of arrival.
    pub(crate) waiting: BTreeMap<u64, SeqId>,
    /// The number of passes planned when one of the queue's sequences was last admitted for the
    /// first time.
    pub(crate) admitted_at: u64,
    /// Number of the last pass with prompt rows of this queue, or at which it had no prompt to
    /// compute.
    pub(crate) prompt_at: u64,
    /// Number of the queue's sequences, running or waiting.
    sequences: usize,
}

/// The queues of all clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queues {
    clients: BTreeMap<ClientId, Client>,
    queues: BTreeMap<(ClientId, Class), Queue>,
}

impl Queues {
    /// Adds a sequence to a client's queue.
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

    /// Removes a sequence from a client's counts.
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

    /// The least service of any client that has sequences, in microseconds.
    fn least_service(&self) -> u64 {
        let active = self.clients.values().filter(|c| c.sequences > 0);
        active.map(|c| c.service).min().unwrap_or(0)
    }

    /// Charges a client with the microseconds that its rows took in a pass. A client without
    /// sequences may be forgotten.
    pub(crate) fn charge(&mut self, client: ClientId, took_us: u64) {
        if let Some(known) = self.clients.get_mut(&client) {
            known.service += took_us;
        }
    }

    /// Microseconds that a client with sequences was served, relative to other clients.
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

    /// Queues of a client for this class and more urgent ones.
    pub(crate) fn of_client(&self, client: ClientId, class: Class) -> impl Iterator<Item = &Queue> {
        let queues = self
            .queues
            .range((client, Class::Interactive)..=(client, class));
        queues.map(|(_, queue)| queue)
    }

    /// Number of clients that have sequences.
    pub(crate) fn clients(&self) -> usize {
        let active = self.clients.values().filter(|c| c.sequences > 0);
        active.count()
    }

    /// Number of a client's waiting sequences.
    pub(crate) fn waiting_of(&self, client: ClientId) -> usize {
        let of_client = (client, Class::Interactive)..=(client, Class::Batch);
        let queues = self.queues.range(of_client);
        queues.map(|(_, queue)| queue.waiting.len()).sum()
    }

    /// Number of all waiting sequences.
    pub(crate) fn waiting(&self) -> usize {
        self.queues.values().map(|q| q.waiting.len()).sum()
    }
}
