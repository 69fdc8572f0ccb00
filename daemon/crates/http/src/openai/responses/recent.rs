//! A least-recently-used store with limits on each client's entries and bytes, and on all bytes.
//!
//! *Invariant:* no client has more than its bounds, and all together have no more than theirs
//! (tests below). What was used longest ago goes first: a client's own where the client is at its
//! bound, and that of the client with the most bytes where all are.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Limits on what is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Maximum number of entries of a client.
    pub(super) entries: usize,
    /// Maximum number of bytes of a client.
    pub(super) client_bytes: usize,
    /// Maximum number of bytes of all clients together.
    pub(super) bytes: usize,
}

/// The entries of all clients, by name.
#[derive(Debug)]
pub(super) struct Recent<C, V> {
    bounds: Bounds,
    clients: HashMap<C, Client<V>>,
    bytes: usize,
    /// Counter of uses.
    clock: u64,
}

#[derive(Debug)]
struct Client<V> {
    entries: HashMap<String, Entry<V>>,
    /// Names of entries by their last use.
    order: BTreeMap<u64, String>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: usize,
    used: u64,
}

impl<C: Copy + Eq + Hash, V: Clone> Recent<C, V> {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            clients: HashMap::new(),
            bytes: 0,
            clock: 0,
        }
    }

    /// Stores an entry of `bytes` bytes; one larger than a client's limit is not stored.
    pub(super) fn keep(&mut self, client: C, name: String, value: V, bytes: usize) {
        let bytes = bytes + name.len();
        self.forget(client, &name);
        if bytes > self.bounds.client_bytes.min(self.bounds.bytes) {
            return;
        }
        self.clock += 1;
        let own = self.clients.entry(client).or_insert_with(|| Client {
            entries: HashMap::new(),
            order: BTreeMap::new(),
            bytes: 0,
        });
        own.order.insert(self.clock, name.clone());
        let entry = Entry {
            value,
            bytes,
            used: self.clock,
        };
        own.entries.insert(name, entry);
        own.bytes += bytes;
        self.bytes += bytes;
        self.make_room(client);
    }

    /// Removes the least recently used entries beyond the limits.
    fn make_room(&mut self, client: C) {
        let is_beyond = |own: &Client<V>, bounds: &Bounds| {
            own.entries.len() > bounds.entries || own.bytes > bounds.client_bytes
        };
        while self
            .clients
            .get(&client)
            .is_some_and(|own| is_beyond(own, &self.bounds))
        {
            self.drop_oldest(client);
        }
        while self.bytes > self.bounds.bytes {
            let largest = self.clients.iter().max_by_key(|(_, own)| own.bytes);
            let Some(largest) = largest.map(|(client, _)| *client) else {
                return;
            };
            self.drop_oldest(largest);
        }
    }

    fn drop_oldest(&mut self, client: C) {
        let own = self.clients.get(&client);
        let oldest = own.and_then(|own| own.order.values().next().cloned());
        if let Some(name) = oldest {
            self.forget(client, &name);
        }
    }

    /// The entry of this name; counts as a use.
    pub(super) fn get(&mut self, client: C, name: &str) -> Option<V> {
        let own = self.clients.get_mut(&client)?;
        let entry = own.entries.get_mut(name)?;
        self.clock += 1;
        if let Some(name) = own.order.remove(&entry.used) {
            own.order.insert(self.clock, name);
        }
        entry.used = self.clock;
        Some(entry.value.clone())
    }

    /// Removes an entry. Returns whether there was one.
    pub(super) fn forget(&mut self, client: C, name: &str) -> bool {
        let Some(own) = self.clients.get_mut(&client) else {
            return false;
        };
        let Some(entry) = own.entries.remove(name) else {
            return false;
        };
        own.order.remove(&entry.used);
        own.bytes -= entry.bytes;
        self.bytes -= entry.bytes;
        if own.entries.is_empty() {
            self.clients.remove(&client);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        entries: 4,
        client_bytes: 100,
        bytes: 150,
    };

    fn kept(recent: &Recent<u8, u32>, client: u8) -> Vec<String> {
        let own = recent.clients.get(&client);
        let names = own.map(|own| own.order.values().cloned().collect());
        names.unwrap_or_default()
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let mut recent = Recent::new(BOUNDS);
        for (n, name) in (0..).zip(["a", "b", "c", "d"]) {
            recent.keep(1, name.to_owned(), n, 1);
        }
        assert_eq!(recent.get(1, "a"), Some(0));
        recent.keep(1, "e".to_owned(), 4, 1);
        assert_eq!(kept(&recent, 1), ["c", "d", "a", "e"]);
        assert_eq!(recent.get(1, "b"), None);
        assert_eq!(recent.get(2, "a"), None);
        // A name is there once.
        recent.keep(1, "c".to_owned(), 7, 1);
        assert_eq!((recent.get(1, "c"), kept(&recent, 1).len()), (Some(7), 4));
        assert!(recent.forget(1, "c") && !recent.forget(1, "c"));
    }

    #[test]
    fn clients_and_all_of_them_have_bounds() {
        let mut recent = Recent::new(BOUNDS);
        for n in 0..50_u32 {
            for client in [1, 2, 3] {
                let bytes = [59, 19, 9][usize::from(client) - 1];
                recent.keep(client, (n % 10).to_string(), n, bytes);
                let sums = recent.clients.values().map(|own| own.bytes);
                assert_eq!(sums.sum::<usize>(), recent.bytes);
                assert!(recent.bytes <= BOUNDS.bytes);
                for own in recent.clients.values() {
                    assert!(own.bytes <= BOUNDS.client_bytes && own.entries.len() <= 4);
                    assert_eq!(own.entries.len(), own.order.len());
                }
            }
        }
        // The small one is never the one that gives way.
        assert_eq!(kept(&recent, 3).len(), 4);
        recent.keep(3, "x".to_owned(), 0, 100);
        assert_eq!(recent.get(3, "x"), None);
        for client in [1, 2, 3] {
            for name in kept(&recent, client) {
                recent.forget(client, &name);
            }
        }
        assert!(recent.clients.is_empty() && recent.bytes == 0);
    }
}
