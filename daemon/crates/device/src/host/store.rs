//! Weights in the host kernels' form that answers needed, in a bounded part of the arena.
//!
//! A segment that was answered out of its file once is kept here from then on while there is room: what a card's budget leaves
//! out is much the same from pass to pass. One goes for another one of its size only when it was not asked for in a long time.

use std::collections::HashMap;
use std::sync::Arc;

use crate::SegmentLayout;

/// A model's number and a segment's index.
pub(super) type Key = (u64, u32);

/// A segment that was not asked for during so many answers for each one that is kept may go.
const IDLE: u64 = 8;

/// Which segments are kept, and where.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// Bytes that it may take, from the arena's start.
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

impl Store {
    pub(super) fn new(bytes: u64) -> Self {
        Self {
            bytes,
            ..Self::default()
        }
    }

    /// Bytes that it may take.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a segment is kept.
    pub(super) fn has(&self, key: Key) -> bool {
        self.kept.contains_key(&key)
    }

    /// Whether a segment of so many bytes has a place without another one's going.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let bytes = bytes.next_multiple_of(crate::ALIGNMENT);
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

    /// A place for a segment of so many bytes, if there is one.
    pub(super) fn room(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(crate::ALIGNMENT);
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
            let size = kept.layout.bytes.next_multiple_of(crate::ALIGNMENT);
            size == bytes && kept.asked + patience < self.clock
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
        let bytes = bytes.next_multiple_of(crate::ALIGNMENT);
        self.free.entry(bytes).or_default().push(slab);
    }

    /// A model is gone. Returns whether nothing is kept any more.
    pub(super) fn forget(&mut self, model: u64) -> bool {
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
        self.kept.is_empty()
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

    #[test]
    fn what_was_not_asked_for_in_a_long_time_goes() {
        let mut store = Store::new(4096);
        put(&mut store, (1, 0), 2048);
        put(&mut store, (1, 1), 2048);
        (0..40).for_each(|_| assert!(store.find((1, 1)).is_some()));
        assert_eq!(put(&mut store, (2, 0), 1024), None, "of another size");
        assert_eq!(put(&mut store, (2, 0), 2048), Some(0));
        assert!(store.find((1, 0)).is_none());
    }

    #[test]
    fn a_model_that_goes_leaves_its_room() {
        let mut store = Store::new(4096);
        put(&mut store, (1, 0), 2048);
        put(&mut store, (2, 0), 2048);
        assert!(!store.forget(1));
        assert_eq!(put(&mut store, (2, 1), 2048), Some(0));
        assert!(store.forget(2));
        assert_eq!(put(&mut store, (3, 0), 4096), Some(0));
    }
}
