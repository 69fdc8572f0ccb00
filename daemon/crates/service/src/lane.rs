//! A lane of work: a few places, and a fair queue by client.
//!
//! ```text
//! Lane::enter -> waits (a queue a client) -> Place -> given back when it is dropped
//!                  |
//!                  +-> refused: the lane is full, and nobody waits with more than this client
//! ```
//!
//! A free place goes to the client with the fewest places, among equals to the one whose turn was
//! longest ago. The last free place goes only to a client that has none, so that long work of one
//! client leaves a place to others. If the queue is full, the newest entry of the client with the
//! most waiting entries is rejected.
//!
//! *Invariants:* the lock is held for a few looks at the queues, never across an await (clippy's
//! `await_holding_lock`) and not while a place is given. Whoever waits no more is out of the queue
//! (`Drop` of `Queued`), and a place that nobody takes goes on to the next (`Drop` of [`Place`];
//! test `who_waits_no_more_is_out_of_the_queue`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::peer::Peer;

/// A lane of work, with its places and its queue.
#[derive(Debug)]
pub(crate) struct Lane {
    state: Mutex<State>,
    places: usize,
    waiting_max: usize,
}

#[derive(Debug, Default)]
struct State {
    clients: BTreeMap<Peer, Client>,
    /// Counter for ids of entries and for turns.
    count: u64,
    running: usize,
    waiting: usize,
}

/// A client that has work in the lane.
#[derive(Debug, Default)]
struct Client {
    running: usize,
    waiting: VecDeque<Waiting>,
    /// Turn at which the client last got or returned a place, or arrived.
    turn: u64,
}

#[derive(Debug)]
struct Waiting {
    name: u64,
    place: oneshot::Sender<Place>,
}

/// The error of a lane whose queue is full.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// A place in a lane; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    lane: Arc<Lane>,
    peer: Peer,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lane.state().leave(self.peer);
        self.lane.give();
    }
}

/// An entry in the queue, removed when it is dropped.
struct Queued<'l> {
    lane: &'l Lane,
    peer: Peer,
    name: u64,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.lane.state().forget(self.peer, self.name);
    }
}

impl State {
    /// Forgets a client that has no place and no waiting entry.
    fn tidy(&mut self, peer: Peer) {
        let none = |client: &Client| client.running == 0 && client.waiting.is_empty();
        if self.clients.get(&peer).is_some_and(none) {
            self.clients.remove(&peer);
        }
    }

    fn leave(&mut self, peer: Peer) {
        if let Some(client) = self.clients.get_mut(&peer) {
            client.running -= 1;
            self.running -= 1;
            self.count += 1;
            client.turn = self.count;
        }
        self.tidy(peer);
    }

    fn forget(&mut self, peer: Peer, name: u64) {
        if let Some(client) = self.clients.get_mut(&peer) {
            let before = client.waiting.len();
            client.waiting.retain(|waiting| waiting.name != name);
            self.waiting -= before - client.waiting.len();
        }
        self.tidy(peer);
    }

    /// Rejects the newest entry of the client with the most waiting entries, if it has more than
    /// `peer` would have with one more. Returns whether there was one.
    fn make_room(&mut self, peer: Peer) -> bool {
        let mine = self.clients.get(&peer).map_or(0, |c| c.waiting.len());
        let most = self.clients.values_mut().max_by_key(|c| c.waiting.len());
        let Some(most) = most.filter(|most| most.waiting.len() > mine + 1) else {
            return false;
        };
        // Dropping its way to a place tells it.
        drop(most.waiting.pop_back());
        self.waiting -= 1;
        true
    }

    /// The next waiting entry that may take a place, if there is one.
    fn next(&mut self, places: usize) -> Option<(Peer, oneshot::Sender<Place>)> {
        let free = places - self.running;
        let waits = |(_, c): &(&Peer, &mut Client)| {
            !c.waiting.is_empty() && (free > 1 || free == 1 && c.running == 0)
        };
        let clients = self.clients.iter_mut().filter(waits);
        let (peer, client) = clients.min_by_key(|(_, c)| (c.running, c.turn))?;
        let waiting = client.waiting.pop_front()?;
        client.running += 1;
        self.running += 1;
        self.waiting -= 1;
        self.count += 1;
        client.turn = self.count;
        Some((*peer, waiting.place))
    }
}

impl Lane {
    /// A lane with `places` places, of which one client may have all but one, and a queue of at
    /// most `waiting_max`.
    pub(crate) fn new(places: usize, waiting_max: usize) -> Arc<Self> {
        assert!(places > 1, "a client has one, and leaves one");
        Arc::new(Self {
            state: Mutex::default(),
            places,
            waiting_max,
        })
    }

    /// Locks the counts. A poisoned lock is used: they are valid at every moment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// [`Full`] if the queue is full.
    pub(crate) async fn enter(self: &Arc<Self>, peer: Peer) -> Result<Place, Full> {
        let (place, given) = oneshot::channel();
        let name = {
            let mut state = self.state();
            if state.waiting >= self.waiting_max && !state.make_room(peer) {
                return Err(Full);
            }
            state.count += 1;
            state.waiting += 1;
            let (name, turn) = (state.count, state.count);
            let client = state.clients.entry(peer).or_insert_with(|| Client {
                turn,
                ..Client::default()
            });
            client.waiting.push_back(Waiting { name, place });
            name
        };
        let queued = Queued {
            lane: self,
            peer,
            name,
        };
        self.give();
        let place = given.await.map_err(|_| Full);
        drop(queued);
        place
    }

    /// Gives free places to waiting entries.
    fn give(self: &Arc<Self>) {
        loop {
            let next = self.state().next(self.places);
            let Some((peer, to)) = next else {
                return;
            };
            let place = Place {
                lane: Arc::clone(self),
                peer,
            };
            // If he waits no more it comes back, and goes to another one.
            drop(to.send(place));
        }
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
