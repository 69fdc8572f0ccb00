//! Cached prefixes in host memory: which are evicted first, and their moves there and back.

use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{BlockId, ModelId, Slab};

use super::{Age, NodeId, Prefixes, Slot, SlotLocation};
use crate::features::host_kv::HostSlot;

impl Prefixes {
    /// The node whose content on the device is evicted next.
    pub(crate) fn oldest(&self) -> Option<NodeId> {
        self.idle.first().map(|(_, _, id)| *id)
    }

    /// Age of the node whose content in host memory is evicted next.
    pub(crate) fn oldest_stored(&self) -> Option<Age> {
        self.stored.first().copied()
    }

    /// Age of an existing node, which decides the order of eviction.
    pub(crate) fn age(&self, id: NodeId) -> Age {
        self.nodes[&id].age(id)
    }

    /// Model of an existing node.
    pub(crate) fn model(&self, id: NodeId) -> ModelId {
        self.nodes[&id].key.realm.model
    }

    /// Number of positions from the beginning of the prompt to a node's end.
    pub(crate) fn positions(&self, id: NodeId) -> usize {
        (self.nodes[&id].depth as usize + 1) * KV_PAGE_TOKENS
    }

    /// Slots of a node with content on the device; none if the node is gone.
    pub(crate) fn on_device(&self, id: NodeId) -> Vec<(usize, Slab)> {
        let slots = self
            .nodes
            .get(&id)
            .into_iter()
            .flat_map(|node| node.slots.iter().enumerate());
        let here = slots.filter_map(|(i, s)| Some((i, s.as_ref()?.on_device()?.1)));
        here.collect()
    }

    /// Replaces a slot's unused content on the device by its copy in host memory. Returns the
    /// block, which the caller has to free.
    pub(crate) fn store(&mut self, id: NodeId, slot: usize, stored: HostSlot) -> BlockId {
        let (model, before) = self.change(id, |node| {
            let held = node.slots[slot].as_mut().expect("it has something");
            assert_eq!(held.users, 0, "what is in use stays");
            let before = std::mem::replace(&mut held.place, SlotLocation::Host(stored));
            (node.key.realm.model, before)
        });
        let SlotLocation::Device(block, slab) = before else {
            panic!("it was stored before")
        };
        self.kept_less(model, slab.bytes);
        block
    }

    /// Puts content in host memory into an empty slot. Returns whether the slot was empty.
    pub(crate) fn put_stored(&mut self, id: NodeId, slot: usize, stored: HostSlot) -> bool {
        if !self.nodes.contains_key(&id) || self.has(id, slot) {
            return false;
        }
        self.change(id, |node| {
            let place = SlotLocation::Host(stored);
            node.slots[slot] = Some(Slot { place, users: 0 });
        });
        true
    }

    /// Records that a slot which a sequence holds was copied back to the device.
    pub(crate) fn bring_back(&mut self, id: NodeId, slot: usize, (block, slab): (BlockId, Slab)) {
        let before = self.change(id, |node| {
            let held = node.slots[slot].as_mut().expect("a held slot is there");
            assert!(held.users > 0, "it is held while it comes back");
            std::mem::replace(&mut held.place, SlotLocation::Device(block, slab))
        });
        let SlotLocation::Host(stored) = before else {
            panic!("it was on the device")
        };
        self.loose.push(stored);
    }

    /// Drops a node's content in host memory. Returns the number of pages and states dropped.
    pub(crate) fn drop_stored(&mut self, id: NodeId) -> usize {
        let slots = 0..self.nodes[&id].slots.len();
        let stored = |slot: &usize| matches!(self.place(id, *slot), Some(SlotLocation::Host(_)));
        let stored: Vec<usize> = slots.filter(stored).collect();
        let before = self.loose.len();
        for slot in stored {
            let block = self.take(id, slot);
            assert!(block.is_none(), "it was stored");
        }
        self.remove_if_bare(id);
        self.loose.len() - before
    }

    /// Nodes with content in host memory beyond the offset `end`.
    pub(crate) fn stored_beyond(&self, end: u64) -> Vec<NodeId> {
        let beyond = |id: &NodeId| {
            let slots = self.nodes[id].slots.iter().flatten();
            slots.filter_map(Slot::stored).any(|s| s.at + s.bytes > end)
        };
        let nodes = self.stored.iter().map(|(_, _, id)| *id);
        nodes.filter(beyond).collect()
    }

    /// Takes the slots of host memory that are no longer used, for the caller to free.
    pub(crate) fn take_loose(&mut self) -> Vec<HostSlot> {
        std::mem::take(&mut self.loose)
    }
}
