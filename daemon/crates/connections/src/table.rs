//! The table of connections, and which one is closed when there are too many.
//!
//! ```text
//! fewer than the bound, and the user below their share  -> an ordinary place
//! else, where a connection without calls can be closed  -> its place: the one that was idle
//!                                                          longest, of this user at their share,
//!                                                          otherwise of the user with most
//!                                                          connections
//! else                                                  -> a reserved place, for health and status
//!                                                          only; the oldest reserved connection
//!                                                          makes room where there are too many
//! ```
//!
//! *Invariants:* a user alone cannot take all ordinary places, where there are two; whoever
//! connects is served at once, if only with health and status (tests below). The lock is held for a
//! look through the table, never across a wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rocmforge_service::arrival::Caller;
use tokio::sync::oneshot;

/// Number of reserved places.
pub(crate) const RESERVE_MAX: usize = 32;
/// Maximum number of reserved places of one user.
const RESERVE_SHARE: usize = 8;

/// The table of open connections.
#[derive(Debug)]
pub struct Table {
    ordinary_max: usize,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    next: u64,
    open: HashMap<u64, Place>,
}

#[derive(Debug)]
struct Place {
    uid: u32,
    reserved: bool,
    calls: usize,
    /// Time at which the connection was opened, or became idle.
    since: Instant,
    /// Sender that closes the connection; `None` once it was used.
    close: Option<oneshot::Sender<()>>,
}

impl Place {
    fn counts(&self, reserved: bool) -> bool {
        self.reserved == reserved && self.close.is_some()
    }
}

/// A connection's place in the table, freed when it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    table: Arc<Table>,
    id: u64,
    /// Whether the connection uses a reserved place, which serves health and status only.
    pub(crate) reserved: bool,
}

impl Table {
    /// A table with `ordinary_max` ordinary places.
    pub fn new(ordinary_max: usize) -> Arc<Self> {
        Arc::new(Self {
            ordinary_max,
            places: Mutex::default(),
        })
    }

    /// Maximum number of ordinary connections of one user.
    fn share(&self) -> usize {
        (self.ordinary_max * 3 / 4).max(1)
    }

    /// Locks the table. A poisoned lock is used: it is valid at every moment.
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a new connection of this user; the receiver signals that it has to close.
    pub(crate) fn enter(self: &Arc<Self>, caller: Caller) -> (Ticket, oneshot::Receiver<()>) {
        let uid = caller.uid;
        let mut places = self.lock();
        let all = places.count(false, None);
        let own = places.count(false, Some(uid));
        let of = if own >= self.share() {
            Some(uid)
        } else {
            places.largest_user()
        };
        let room = all < self.ordinary_max && own < self.share();
        let reserved = !room && !places.close_idlest(of);
        if reserved {
            if places.count(true, Some(uid)) >= RESERVE_SHARE {
                places.close_oldest_reserved(Some(uid));
            } else if places.count(true, None) >= RESERVE_MAX {
                places.close_oldest_reserved(None);
            }
        }
        let (close, closed) = oneshot::channel();
        let id = places.next;
        places.next += 1;
        places.open.insert(
            id,
            Place {
                uid,
                reserved,
                calls: 0,
                since: Instant::now(),
                close: Some(close),
            },
        );
        let ticket = Ticket {
            table: Arc::clone(self),
            id,
            reserved,
        };
        (ticket, closed)
    }

    /// Closes the connection that has been without calls for longest, of any user, when file
    /// descriptors are short. Returns whether there was one.
    pub fn close_one(&self) -> bool {
        self.lock().close_idlest(None)
    }
}

impl Places {
    fn count(&self, reserved: bool, uid: Option<u32>) -> usize {
        let of = |place: &&Place| place.counts(reserved) && uid.is_none_or(|uid| place.uid == uid);
        self.open.values().filter(of).count()
    }

    fn largest_user(&self) -> Option<u32> {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for place in self.open.values().filter(|place| place.counts(false)) {
            *counts.entry(place.uid).or_default() += 1;
        }
        counts
            .into_iter()
            .max_by_key(|&(uid, n)| (n, uid))
            .map(|(uid, _)| uid)
    }

    fn close_idlest(&mut self, uid: Option<u32>) -> bool {
        self.close_first(|place| {
            place.counts(false) && place.calls == 0 && uid.is_none_or(|uid| place.uid == uid)
        })
    }

    fn close_oldest_reserved(&mut self, uid: Option<u32>) {
        self.close_first(|place| place.counts(true) && uid.is_none_or(|uid| place.uid == uid));
    }

    /// Closes the connection that has been in its state for longest, among those for which `of` is
    /// true. Returns whether there was one.
    fn close_first(&mut self, of: impl Fn(&Place) -> bool) -> bool {
        let first = self
            .open
            .iter_mut()
            .filter(|(_, place)| of(place))
            .min_by_key(|(id, place)| (place.since, **id));
        match first.and_then(|(_, place)| place.close.take()) {
            // It may have ended by itself.
            Some(close) => close.send(()).is_ok(),
            None => false,
        }
    }
}

impl Ticket {
    /// Records that a call begins on the connection.
    pub(crate) fn begin(&self) {
        if let Some(place) = self.table.lock().open.get_mut(&self.id) {
            place.calls += 1;
        }
    }

    /// Signals the connection to close. Returns whether it was not signalled before.
    pub(crate) fn close(&self) -> bool {
        let mut places = self.table.lock();
        let close = places.open.get_mut(&self.id).and_then(|p| p.close.take());
        close.is_some_and(|close| close.send(()).is_ok())
    }

    /// Records that a call on the connection ended.
    pub(crate) fn end(&self) {
        if let Some(place) = self.table.lock().open.get_mut(&self.id) {
            place.calls = place.calls.saturating_sub(1);
            place.since = Instant::now();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.table.lock().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(uid: u32) -> Caller {
        Caller {
            uid,
            gid: uid,
            pid: 1,
        }
    }

    fn is_closed(closed: &mut oneshot::Receiver<()>) -> bool {
        closed.try_recv().is_ok()
    }

    #[test]
    fn the_longest_idle_connection_makes_room() {
        let table = Table::new(4);
        let mut open: Vec<_> = [1, 1, 1, 2].map(|uid| table.enter(caller(uid))).into();
        open[0].0.begin();
        let (ticket, _closed) = table.enter(caller(4));
        assert!(!ticket.reserved);
        let closed: Vec<bool> = open.iter_mut().map(|(_, c)| is_closed(c)).collect();
        assert_eq!(
            closed,
            [false, true, false, false],
            "the oldest without calls of the user with most"
        );
        open[0].0.end();
        let _next = table.enter(caller(3));
        assert!(is_closed(&mut open[2].1), "the first ended later than that");
    }

    #[test]
    fn a_user_at_their_share_makes_room_for_themselves() {
        let table = Table::new(8);
        let mut other = table.enter(caller(2));
        let mut own: Vec<_> = (0..6).map(|_| table.enter(caller(1))).collect();
        let (seventh, _closed) = table.enter(caller(1));
        assert!(!seventh.reserved);
        assert!(is_closed(&mut own[0].1) && !is_closed(&mut other.1));
    }

    #[test]
    fn busy_connections_stay_and_the_reserve_answers() {
        let table = Table::new(4);
        let busy: Vec<_> = [1, 1, 1, 2].map(|uid| table.enter(caller(uid))).into();
        busy.iter().for_each(|(ticket, _)| ticket.begin());
        let mut reserved: Vec<_> = (0..RESERVE_SHARE).map(|_| table.enter(caller(3))).collect();
        assert!(reserved.iter().all(|(ticket, _)| ticket.reserved));
        let _another = table.enter(caller(3));
        assert!(is_closed(&mut reserved[0].1), "a user has so many of them");
        let many: Vec<_> = (0..2 * RESERVE_MAX as u32)
            .map(|n| table.enter(caller(100 + n)))
            .collect();
        assert_eq!(table.lock().count(true, None), RESERVE_MAX);
        drop((busy, reserved, many));
        let (ticket, _closed) = table.enter(caller(3));
        assert!(!ticket.reserved, "places come back");
    }
}
