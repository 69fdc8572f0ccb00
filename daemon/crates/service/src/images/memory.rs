//! Memory for images: one budget for all requests, of which one client may have three quarters.
//!
//! ```text
//! ImageMemory::reserve -> waits (a queue a client) -> Reserved -> given back when it is dropped
//!      |                    |
//!      |                    +-> refused: too many wait, or too long
//!      +-> refused: more than one client can have
//! ```
//!
//! A request reserves all that it needs at once, so that none holds a part and waits for the rest.
//! The client that holds least is next, among equals the one that has waited longest; no other
//! overtakes it unless its own client's share is used up. So a large image does not wait forever
//! behind small ones.
//!
//! *Invariants:* what is reserved never passes the budget, nor a client's part its share
//! (`one_client_cannot_take_all_of_the_memory`); the lock is never held across an await.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::peer::Peer;

/// Maximum number of waiting requests of all clients. Each holds the bytes of its images already,
/// which are counted once it has memory: 512 MiB at the largest size of a request.
const WAITING_MAX: usize = 32;
/// Maximum number of waiting requests of one client.
const WAITING_MAX_OF_CLIENT: usize = 24;
/// Default budget in bytes.
pub(super) const DEFAULT_BYTES: u64 = 2 << 30;

/// The budget of memory for images, and its queue.
#[derive(Debug)]
pub(super) struct ImageMemory {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    max: u64,
    held: u64,
    waiting: usize,
    /// Counter for ids of waiting entries.
    count: u64,
    clients: BTreeMap<Peer, Client>,
}

#[derive(Debug, Default)]
struct Client {
    held: u64,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    name: u64,
    bytes: u64,
    given: oneshot::Sender<Reserved>,
}

/// Why memory for images is not reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The request needs more than one client may have.
    TooMuch {
        /// Maximum bytes of one client.
        share: u64,
    },
    /// Too many requests wait.
    Full,
}

/// A reserved part of the budget; given back when it is dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    memory: Arc<ImageMemory>,
    peer: Peer,
    bytes: u64,
}

impl Reserved {
    /// Splits `bytes` off this reservation, or all of it if it is smaller.
    pub(super) fn split(&mut self, bytes: u64) -> Reserved {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Reserved {
            memory: Arc::clone(&self.memory),
            peer: self.peer,
            bytes,
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.memory.state().give_back(self.peer, self.bytes);
        self.memory.give();
    }
}

/// An entry in the queue, removed when it is dropped.
struct Queued<'m> {
    memory: &'m Arc<ImageMemory>,
    peer: Peer,
    name: u64,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.memory.state().forget(self.peer, self.name);
        // He may have been the one for whom there was no room.
        self.memory.give();
    }
}

impl State {
    fn share(&self) -> u64 {
        self.max / 4 * 3
    }

    fn tidy(&mut self, peer: Peer) {
        let none = |client: &Client| client.held == 0 && client.waiting.is_empty();
        if self.clients.get(&peer).is_some_and(none) {
            self.clients.remove(&peer);
        }
    }

    fn give_back(&mut self, peer: Peer, bytes: u64) {
        self.held -= bytes;
        if let Some(client) = self.clients.get_mut(&peer) {
            client.held -= bytes;
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

    /// Adds bytes to a client's reservations.
    fn take(&mut self, peer: Peer, bytes: u64) {
        self.held += bytes;
        self.clients.entry(peer).or_default().held += bytes;
    }

    /// The next waiting entry, if there is room for it.
    fn next(&mut self) -> Option<(Peer, Waiting)> {
        let (share, free) = (self.share(), self.max.saturating_sub(self.held));
        let clients = self.clients.iter_mut();
        let able = clients.filter_map(|(peer, client)| {
            let first = client.waiting.front()?;
            let fits = client.held + first.bytes <= share;
            fits.then_some((client.held, first.name, *peer, first.bytes))
        });
        let (_, _, peer, bytes) = able.min()?;
        if bytes > free {
            return None;
        }
        let waiting = self.clients.get_mut(&peer)?.waiting.pop_front()?;
        self.waiting -= 1;
        self.take(peer, waiting.bytes);
        Some((peer, waiting))
    }
}

impl ImageMemory {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                max,
                held: 0,
                waiting: 0,
                count: 0,
                clients: BTreeMap::new(),
            }),
        })
    }

    /// Locks the counts. A poisoned lock is used: they are valid at every moment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the budget in bytes.
    pub(super) fn set_max(&self, max: u64) {
        self.state().max = max;
    }

    /// The budget, and the reserved part of it, in bytes.
    pub(super) fn used(&self) -> (u64, u64) {
        let state = self.state();
        (state.max, state.held)
    }

    /// Reserves bytes for a client if they are free now and no entry waits.
    pub(super) fn try_reserve(self: &Arc<Self>, peer: Peer, bytes: u64) -> Option<Reserved> {
        let mut state = self.state();
        let own = state.clients.get(&peer).map_or(0, |client| client.held);
        let fits = state.held + bytes <= state.max && own + bytes <= state.share();
        if !fits || state.waiting > 0 {
            return None;
        }
        state.take(peer, bytes);
        drop(state);
        Some(Reserved {
            memory: Arc::clone(self),
            peer,
            bytes,
        })
    }

    /// Waits until `bytes` bytes are reserved. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// [`Refused`] if they exceed a client's share, or too many requests wait.
    pub(super) async fn reserve(
        self: &Arc<Self>,
        peer: Peer,
        bytes: u64,
    ) -> Result<Reserved, Refused> {
        let (given, mine) = oneshot::channel();
        let name = {
            let mut state = self.state();
            let share = state.share();
            if bytes > share {
                return Err(Refused::TooMuch { share });
            }
            let own = state.clients.get(&peer).map_or(0, |c| c.waiting.len());
            if state.waiting >= WAITING_MAX || own >= WAITING_MAX_OF_CLIENT {
                return Err(Refused::Full);
            }
            state.count += 1;
            state.waiting += 1;
            let name = state.count;
            let client = state.clients.entry(peer).or_default();
            client.waiting.push_back(Waiting { name, bytes, given });
            name
        };
        let queued = Queued {
            memory: self,
            peer,
            name,
        };
        self.give();
        let reserved = mine.await.map_err(|_| Refused::Full);
        drop(queued);
        reserved
    }

    /// Reserves free bytes for waiting entries.
    fn give(self: &Arc<Self>) {
        loop {
            let next = self.state().next();
            let Some((peer, waiting)) = next else {
                return;
            };
            let reserved = Reserved {
                memory: Arc::clone(self),
                peer,
                bytes: waiting.bytes,
            };
            // If he waits no more it comes back, and goes to another one.
            drop(waiting.given.send(reserved));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const A: Peer = Peer::User(1);
    const B: Peer = Peer::User(2);

    async fn soon<T>(of: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_millis(20), of)
            .await
            .ok()
    }

    #[tokio::test]
    async fn one_client_cannot_take_all_of_the_memory() {
        let memory = ImageMemory::new(100);
        assert_eq!(
            memory.reserve(A, 76).await.err(),
            Some(Refused::TooMuch { share: 75 })
        );
        let first = memory.reserve(A, 70).await.unwrap();
        assert!(soon(memory.reserve(A, 10)).await.is_none(), "its share");
        let other = memory.reserve(B, 30).await.unwrap();
        assert_eq!(memory.used(), (100, 100));
        assert!(memory.try_reserve(B, 1).is_none());
        drop(first);
        assert_eq!(memory.used(), (100, 30));
        let again = memory.reserve(A, 70).await.unwrap();
        drop((again, other));
        assert_eq!(memory.used(), (100, 0));
        assert!(memory.state().clients.is_empty(), "nothing is left of them");
    }

    #[tokio::test]
    async fn a_large_image_does_not_wait_behind_small_ones_forever() {
        let memory = ImageMemory::new(100);
        let held = memory.reserve(A, 40).await.unwrap();
        let large = {
            let memory = Arc::clone(&memory);
            tokio::spawn(async move { memory.reserve(B, 70).await })
        };
        tokio::task::yield_now().await;
        assert!(!large.is_finished());
        // It would fit, and comes later.
        assert!(soon(memory.reserve(A, 10)).await.is_none());
        assert!(memory.try_reserve(A, 10).is_none());
        drop(held);
        let large = large.await.unwrap().unwrap();
        assert!(memory.reserve(A, 30).await.is_ok());
        drop(large);
    }

    #[tokio::test]
    async fn parts_of_what_is_reserved_are_given_back_by_themselves() {
        let memory = ImageMemory::new(100);
        let mut whole = memory.reserve(A, 60).await.unwrap();
        let part = whole.split(20);
        let rest = whole.split(99);
        drop(whole);
        assert_eq!(memory.used(), (100, 60));
        drop(rest);
        assert_eq!(memory.used(), (100, 20));
        drop(part);
        assert_eq!(memory.used(), (100, 0));
    }

    #[tokio::test]
    async fn those_who_wait_are_bounded_and_leave_nothing_behind() {
        let memory = ImageMemory::new(4);
        let held = memory.reserve(A, 3).await.unwrap();
        let wait = |peer: Peer| {
            let memory = Arc::clone(&memory);
            tokio::spawn(async move { memory.reserve(peer, 2).await.map(drop) })
        };
        let waiting: Vec<_> = (0..WAITING_MAX_OF_CLIENT).map(|_| wait(A)).collect();
        while memory.state().waiting < WAITING_MAX_OF_CLIENT {
            tokio::task::yield_now().await;
        }
        assert_eq!(memory.reserve(A, 2).await.err(), Some(Refused::Full));
        assert!(soon(memory.reserve(B, 2)).await.is_none(), "B waits, too");
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        for waiting in waiting {
            assert!(waiting.await.is_err());
        }
        drop(held);
        let state = memory.state();
        assert_eq!((state.held, state.waiting, state.clients.len()), (0, 0, 0));
    }
}
