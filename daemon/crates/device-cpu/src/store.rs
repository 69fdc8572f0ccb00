//! Weights in the host kernels' form that answers needed, in a bounded part of the arena.
//!
//! A segment that was answered out of its file once is kept here from then on while there is room:
//! what a card's budget leaves out is much the same from pass to pass. One goes for another one of
//! its size only when it was not asked for in a long time. Where the part becomes smaller, what
//! lies beyond its new end moves into places that such ones leave, or goes.

use std::collections::HashMap;
use std::sync::Arc;

use rocmforge_device::SegmentLayout;

/// A model's number and a segment's index.
pub(super) type Key = (u64, u32);

/// A segment that was not asked for during so many answers for each one that is kept may go.
const IDLE: u64 = 8;

/// Weights that are kept in the CPU kernels' layout, by segment.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// Bytes that it may ever take, from the arena's start.
    most: u64,
    /// Bytes that it may take now.
    bytes: u64,
    /// Bytes that were handed out.
    used: u64,
    kept: HashMap<Key, Kept>,
    /// Places that are free again, by their size.
    free: HashMap<u64, Vec<u64>>,
    /// Counts what was asked for.
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    layout: Arc<SegmentLayout>,
    slab: u64,
    asked: u64,
}

/// A segment that lies elsewhere now, and has to be copied there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

impl Store {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most,
            bytes: most,
            ..Self::default()
        }
    }

    /// Bytes that it may ever take.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Lets it take so many bytes from now on, [`Store::most`] at the most. What lies beyond a
    /// smaller end moves, those first that were asked for last, or goes where there is no place for
    /// it. What has to be copied, in this order.
    pub(super) fn set_bytes(&mut self, bytes: u64) -> Vec<Moved> {
        self.bytes = bytes.min(self.most);
        if self.used <= self.bytes {
            return Vec::new();
        }
        let end = |kept: &Kept| {
            kept.slab
                + kept
                    .layout
                    .bytes
                    .next_multiple_of(rocmforge_device::ALIGNMENT)
        };
        let limit = self.bytes;
        let beyond = self.kept.extract_if(|_, kept| end(kept) > limit);
        let mut beyond: Vec<(Key, Kept)> = beyond.collect();
        self.used = self.kept.values().map(end).max().unwrap_or(0);
        let used = self.used;
        for (size, places) in &mut self.free {
            places.retain(|place| place + size <= used);
        }
        beyond.sort_unstable_by_key(|(_, kept)| std::cmp::Reverse(kept.asked));
        let mut moved = Vec::new();
        for (key, kept) in beyond {
            let Some(to) = self.room_for(kept.layout.bytes, kept.asked) else {
                continue;
            };
            moved.push(Moved {
                from: kept.slab,
                to,
                bytes: kept.layout.bytes,
            });
            self.kept.insert(key, Kept { slab: to, ..kept });
        }
        // At most one lies across the new end: it is the lowest, and others may come to lie where
        // it was.
        moved.sort_unstable_by_key(|moved| moved.from);
        moved
    }

    /// Whether a segment is kept.
    pub(super) fn has(&self, key: Key) -> bool {
        self.kept.contains_key(&key)
    }

    /// Whether a segment of so many bytes has a place without another one's going.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let bytes = bytes.next_multiple_of(rocmforge_device::ALIGNMENT);
        self.used + bytes <= self.bytes || self.free.get(&bytes).is_some_and(|f| !f.is_empty())
    }

    /// Bytes of it up to the end of what was handed out.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// A kept segment.
    pub(super) fn find(&mut self, key: Key) -> Option<(Arc<SegmentLayout>, u64)> {
        self.clock += 1;
        let kept = self.kept.get_mut(&key)?;
        kept.asked = self.clock;
        Some((Arc::clone(&kept.layout), kept.slab))
    }

    /// A segment is about to be asked for: if it is kept, it does not go for another one meanwhile.
    pub(super) fn hold(&mut self, key: Key) {
        if let Some(kept) = self.kept.get_mut(&key) {
            kept.asked = self.clock;
        }
    }

    /// A place for a segment of so many bytes, if there is one.
    pub(super) fn room(&mut self, bytes: u64) -> Option<u64> {
        self.room_for(bytes, u64::MAX)
    }

    /// Makes room for a segment that was asked for at a time: none that was asked for since goes.
    fn room_for(&mut self, bytes: u64, asked: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(rocmforge_device::ALIGNMENT);
        if let Some(slab) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Some(slab);
        }
        if self.used + bytes <= self.bytes {
            let slab = self.used;
            self.used += bytes;
            return Some(slab);
        }
        let patience = IDLE * self.kept.len() as u64;
        let alike = self.kept.iter().filter(|(_, kept)| {
            let size = kept
                .layout
                .bytes
                .next_multiple_of(rocmforge_device::ALIGNMENT);
            size == bytes && kept.asked < asked && kept.asked + patience < self.clock
        });
        let (&key, _) = alike.min_by_key(|(_, kept)| kept.asked)?;
        self.kept.remove(&key).map(|kept| kept.slab)
    }

    /// A segment lies at a place that [`Store::room`] gave.
    pub(super) fn keep(&mut self, key: Key, layout: Arc<SegmentLayout>, slab: u64) {
        let asked = self.clock;
        self.kept.insert(
            key,
            Kept {
                layout,
                slab,
                asked,
            },
        );
    }

    /// A place that [`Store::room`] gave is not used.
    pub(super) fn give_back(&mut self, bytes: u64, slab: u64) {
        let bytes = bytes.next_multiple_of(rocmforge_device::ALIGNMENT);
        self.free.entry(bytes).or_default().push(slab);
    }

    /// A model is gone.
    pub(super) fn forget(&mut self, model: u64) {
        let gone: Vec<Kept> = self
            .kept
            .extract_if(|key, _| key.0 == model)
            .map(|(_, kept)| kept)
            .collect();
        for kept in gone {
            self.give_back(kept.layout.bytes, kept.slab);
        }
        if self.kept.is_empty() {
            (self.used, self.free) = (0, HashMap::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(bytes: u64) -> Arc<SegmentLayout> {
        Arc::new(SegmentLayout {
            tensors: Vec::new(),
            bytes,
        })
    }

    fn put(store: &mut Store, key: Key, bytes: u64) -> Option<u64> {
        let slab = store.room(bytes)?;
        store.keep(key, layout(bytes), slab);
        Some(slab)
    }

    #[test]
    fn what_has_room_is_kept_and_the_rest_is_not() {
        let mut store = Store::new(4096);
        assert_eq!(put(&mut store, (1, 0), 2048), Some(0));
        assert!(store.has_room(2048) && !store.has((1, 1)));
        assert_eq!(put(&mut store, (1, 1), 2048), Some(2048));
        assert!(!store.has_room(2048) && store.has((1, 1)));
        assert_eq!(put(&mut store, (1, 2), 2048), None, "none was idle");
        assert_eq!(store.find((1, 1)).map(|f| f.1), Some(2048));
        assert!(store.find((1, 2)).is_none());
    }

    /// Of two that fill it, nobody asked for (1, 0) in a long time.
    fn full_of_an_idle_one_and_another() -> Store {
        let mut store = Store::new(4096);
        put(&mut store, (1, 0), 2048);
        put(&mut store, (1, 1), 2048);
        (0..40).for_each(|_| assert!(store.find((1, 1)).is_some()));
        store
    }

    #[test]
    fn what_was_not_asked_for_in_a_long_time_goes() {
        let mut store = full_of_an_idle_one_and_another();
        assert_eq!(put(&mut store, (2, 0), 1024), None, "of another size");
        assert_eq!(put(&mut store, (2, 0), 2048), Some(0));
        assert!(store.find((1, 0)).is_none());
    }

    #[test]
    fn what_is_about_to_be_asked_for_does_not_go_for_another() {
        let mut store = full_of_an_idle_one_and_another();
        store.hold((1, 0));
        store.hold((1, 2));
        assert_eq!(put(&mut store, (1, 2), 2048), None);
        assert!(store.has((1, 0)) && !store.has((1, 2)));
    }

    #[test]
    fn what_was_asked_for_last_moves_into_the_places_of_the_idle() {
        let mut store = Store::new(8192);
        for segment in 0..4 {
            put(&mut store, (1, segment), 2048);
        }
        (0..40).for_each(|i| assert!(store.find((1, 1 + i % 3)).is_some()));
        store.find((1, 3));
        // Of 2 and 3, which lie beyond, the one that was asked for last takes the place of the idle
        // one.
        let moved = store.set_bytes(4096);
        let one = Moved {
            from: 6144,
            to: 0,
            bytes: 2048,
        };
        assert_eq!(moved, [one]);
        assert!(store.has((1, 1)) && store.has((1, 3)), "{store:?}");
        assert!(!store.has((1, 0)) && !store.has((1, 2)), "{store:?}");
        assert_eq!(store.used(), 4096);
        assert!(!store.has_room(2048));
        // What it may take again it takes when it is asked to.
        assert_eq!(store.set_bytes(1 << 20), []);
        assert_eq!(put(&mut store, (1, 0), 4096), Some(4096));
        assert!(!store.has_room(256), "more than it may ever take");
    }

    /// Any sizes, in any order: what is kept is what was put there, lies below the end, and no two
    /// overlap.
    #[test]
    fn what_is_kept_is_whole_wherever_the_end_is() {
        use rand::rngs::StdRng;
        use rand::{RngExt, SeedableRng};
        const UNIT: u64 = rocmforge_device::ALIGNMENT;
        let mut rng = StdRng::seed_from_u64(11);
        let mut store = Store::new(64 * UNIT);
        // Whose each unit of the memory is.
        let mut memory: Vec<Key> = vec![(0, 0); 64];
        let range = |at: u64, bytes: u64| (at / UNIT) as usize..((at + bytes) / UNIT) as usize;
        let (mut moves, mut lost, mut next) = (0, 0, 0);
        for _ in 0..20_000 {
            let before = store.kept.len();
            match rng.random_range(0..20) {
                0 => {
                    let end = UNIT * rng.random_range(0..=64);
                    for one in store.set_bytes(end) {
                        let from = range(one.from, one.bytes);
                        memory.copy_within(from, range(one.to, one.bytes).start);
                        moves += 1;
                    }
                    assert!(store.used() <= end);
                    lost += before - store.kept.len();
                }
                1 => store.forget(rng.random_range(1..4)),
                2..6 => {
                    next += 1;
                    let key = (rng.random_range(1..4), next);
                    let bytes = UNIT * [2, 3, 4, 7][rng.random_range(0..4)];
                    if let Some(slab) = put(&mut store, key, bytes) {
                        memory[range(slab, bytes)].fill(key);
                    }
                }
                _ => {
                    let most = store.kept.keys().max().copied();
                    most.inspect(|key| assert!(store.find(*key).is_some()));
                }
            }
            for (key, kept) in &store.kept {
                let its = &memory[range(kept.slab, kept.layout.bytes)];
                assert!(its.iter().all(|unit| unit == key), "{key:?}: {its:?}");
                assert!(kept.slab + kept.layout.bytes <= store.used());
            }
        }
        assert!(moves > 0 && lost > 0, "{moves} moved, {lost} lost");
    }

    #[test]
    fn a_model_that_goes_leaves_its_room() {
        let mut store = Store::new(4096);
        put(&mut store, (1, 0), 2048);
        put(&mut store, (2, 0), 2048);
        store.forget(1);
        assert_eq!(store.used(), 4096);
        assert_eq!(put(&mut store, (2, 1), 2048), Some(0));
        store.forget(2);
        assert_eq!(store.used(), 0);
        assert_eq!(put(&mut store, (3, 0), 4096), Some(0));
    }
}
