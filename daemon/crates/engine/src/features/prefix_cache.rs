//! The prefix cache: prefixes of prompts whose KV pages and recurrent states are kept. They are
//! found by content, shared by sequences, kept when no sequence uses them any more, and evicted
//! when their memory on the device is needed. Evicted pages may be stored in host memory
//! ([`crate::features::host_kv`]), where they are found as well; they are copied back to be used.
//!
//! A node stands for [`KV_PAGE_TOKENS`] tokens after the tokens of its parent; it has a page for
//! each group of the plan, and for models with recurrent layers the state behind it. It is found by
//! its parent and its tokens themselves, not by a hash: two prefixes are never confused. Prefixes
//! of different models, different clients, different adapters ([`crate::model::adapters`]) or
//! different RoPE divisors ([`crate::model::rotations`]) share nothing.
//!
//! ```text
//!   (model, asker) -- 32 tokens -- 32 tokens -- 32 tokens    a node's slots: page of group 0,
//!                          \------ 32 tokens                 of group 1, .., state; absent where a
//!                                                            window has passed or none was taken
//! ```
//!
//! *Invariants* (test `any_order_of_use_leaves_the_sums_right`): a slot that a sequence holds is
//! not given up; a node with children is not; a parent was used no earlier than its children;
//! `kept_bytes` is the sum of the slots on the device that no sequence holds; each place in the
//! host's memory is that of one slot, or is loose.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use rocmforge_device::Plan;
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{BlockId, ModelId, Slab};

use crate::features::host_kv::HostSlot;
use crate::model::adapters::AdapterKey;

/// Maximum number of nodes (4 million tokens). The oldest are evicted for new ones.
const NODES_MAX: usize = 1 << 17;

/// Id of a node of the prefix cache; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u64);

/// Key of a group of requests that share cached prefixes: same model and client, same RoPE
/// divisors, same adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Realm {
    pub(crate) model: ModelId,
    pub(crate) asker: u64,
    /// Whether the sequence's keys are rotated by the RoPE divisors for long sequences.
    pub(crate) long: bool,
    /// The sequence's LoRA adapters with their scales.
    pub(crate) adapters: AdapterKey,
}

/// Key under which a node is found: its realm, its parent and its tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    realm: Realm,
    parent: Option<NodeId>,
    tokens: Box<[u32]>,
}

/// A cached KV page or state, and the number of sequences that use it.
#[derive(Debug)]
struct Slot {
    place: SlotLocation,
    users: u32,
}

/// Location of a cached page or state: on the device or in host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SlotLocation {
    /// On the device, in the arena: block and slab.
    Device(BlockId, Slab),
    /// In host memory, in this slot.
    Host(HostSlot),
}

impl Slot {
    fn on_device(&self) -> Option<(BlockId, Slab)> {
        match self.place {
            SlotLocation::Device(block, slab) => Some((block, slab)),
            SlotLocation::Host(_) => None,
        }
    }

    fn stored(&self) -> Option<HostSlot> {
        match self.place {
            SlotLocation::Host(stored) => Some(stored),
            SlotLocation::Device(..) => None,
        }
    }
}

/// Order in which nodes are evicted: least recently used first, and among equals children before
/// their parents.
pub(crate) type Age = (u64, Reverse<u32>, NodeId);

#[derive(Debug)]
struct Node {
    key: Key,
    /// Number of nodes above this node.
    depth: u32,
    /// A KV page for each KV group of the plan, then the recurrent state; `None` where nothing is
    /// cached.
    slots: Vec<Option<Slot>>,
    children: u32,
    /// Number of uses of the node's slots by sequences; a slot counts once for each user.
    users: u32,
    /// Logical time of the node's last use.
    used: u64,
    /// Index of the slot whose state is kept speculatively (`spare.rs`); `None` if it has none.
    spare: Option<usize>,
}

impl Node {
    fn age(&self, id: NodeId) -> Age {
        (self.used, Reverse(self.depth), id)
    }

    fn has_on_device(&self) -> bool {
        let mut slots = self.slots.iter().flatten();
        slots.any(|s| s.on_device().is_some())
    }

    /// Whether the node has an unused speculatively kept state on the device (`spare.rs`).
    fn has_spare(&self) -> bool {
        let slot = self.spare.and_then(|slot| self.slots[slot].as_ref());
        slot.is_some_and(|s| s.users == 0 && s.on_device().is_some())
    }

    fn has_stored(&self) -> bool {
        self.slots.iter().flatten().any(|s| s.stored().is_some())
    }
}

/// Slots that a caller holds, as node and slot index.
pub(crate) type HeldSlots = Vec<(NodeId, usize)>;

/// The longest cached prefix that was found for a prompt.
#[derive(Debug, Default)]
pub(crate) struct CachedPrefix {
    /// The prefix's nodes, from the beginning of the prompt.
    pub(crate) nodes: Vec<NodeId>,
    /// Number of pages that the prompt has in common with known prompts, whether their pages are
    /// cached or not.
    pub(crate) common: usize,
}

/// All cached prefixes, as a tree of nodes.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    nodes: HashMap<NodeId, Node>,
    by_content: HashMap<Key, NodeId>,
    /// Evictable nodes: none of their slots is in use, and they have something on the device, or
    /// nothing at all and no children.
    idle: BTreeSet<Age>,
    /// Nodes of which no slot is in use and which have something in host memory.
    stored: BTreeSet<Age>,
    /// Nodes with an unused speculatively kept state on the device (`spare.rs`).
    spare: BTreeSet<Age>,
    /// Slots of host memory that are no longer used and have to be freed.
    loose: Vec<HostSlot>,
    next: u64,
    clock: u64,
    kept_bytes: u64,
    kept_of: HashMap<ModelId, u64>,
}

impl Prefixes {
    /// Bytes of cached prefixes on the device that no sequence uses.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Bytes of one model's cached prefixes on the device that no sequence uses.
    pub(crate) fn kept_bytes_of(&self, model: ModelId) -> u64 {
        self.kept_of.get(&model).copied().unwrap_or(0)
    }

    fn kept_more(&mut self, model: ModelId, bytes: u64) {
        self.kept_bytes += bytes;
        *self.kept_of.entry(model).or_default() += bytes;
    }

    fn kept_less(&mut self, model: ModelId, bytes: u64) {
        self.kept_bytes -= bytes;
        let of_model = self.kept_of.get_mut(&model);
        *of_model.expect("what is kept is of a model") -= bytes;
    }

    /// The longest cached prefix of `tokens` that a sequence can continue from, of at most `pages`
    /// pages, with pages in host memory if `with_stored`.
    pub(crate) fn find(
        &self,
        realm: Realm,
        tokens: &[u32],
        pages: usize,
        plan: &Plan,
        with_stored: bool,
    ) -> CachedPrefix {
        let is_there = |slot: &Option<Slot>| {
            let there = |s: &Slot| with_stored || s.on_device().is_some();
            slot.as_ref().is_some_and(there)
        };
        let mut nodes = Vec::new();
        // For each group the pages in a row that are there, up to the last node.
        let mut unbroken = vec![0; plan.kv.len()];
        let mut usable = 0;
        for chunk in tokens.chunks_exact(KV_PAGE_TOKENS).take(pages) {
            let Some(id) = self.child(realm, nodes.last().copied(), chunk) else {
                break;
            };
            nodes.push(id);
            let node = &self.nodes[&id];
            let end = nodes.len();
            let mut goes_on = plan.state_elements == 0 || is_there(&node.slots[plan.kv.len()]);
            for ((group, unbroken), slot) in plan.kv.iter().zip(&mut unbroken).zip(&node.slots) {
                *unbroken = if is_there(slot) { *unbroken + 1 } else { 0 };
                goes_on &= *unbroken >= end - group.first_page(end * KV_PAGE_TOKENS).min(end);
            }
            if goes_on {
                usable = end;
            }
        }
        let common = nodes.len();
        nodes.truncate(usable);
        CachedPrefix { nodes, common }
    }

    /// The node for these tokens after `parent`, if there is one.
    pub(crate) fn child(
        &self,
        realm: Realm,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<NodeId> {
        let key = Key {
            realm,
            parent,
            tokens: tokens.into(),
        };
        self.by_content.get(&key).copied()
    }

    /// Adds a node for these tokens after `parent`, without content, or returns the existing one.
    /// `None` if the parent was evicted, or if the maximum number of nodes is reached and all are
    /// in use.
    pub(crate) fn add(
        &mut self,
        realm: Realm,
        parent: Option<NodeId>,
        tokens: &[u32],
        n_slots: usize,
        freed: &mut Vec<BlockId>,
    ) -> Option<NodeId> {
        // As old as its parent: a parent is never older than its children, so that these go first.
        let used = match parent {
            None => {
                self.clock += 1;
                self.clock
            }
            Some(parent) => self.nodes.get(&parent)?.used,
        };
        if let Some(there) = self.child(realm, parent, tokens) {
            self.renew(there, used);
            return Some(there);
        }
        if self.nodes.len() >= NODES_MAX && !self.give_up(freed) {
            let oldest = self.oldest_stored();
            oldest.map(|(_, _, id)| self.drop_stored(id));
            if self.nodes.len() >= NODES_MAX {
                return None;
            }
        }
        let depth = match parent {
            None => 0,
            Some(id) => {
                self.nodes.get(&id)?;
                self.change(id, |parent| {
                    parent.children += 1;
                    parent.depth + 1
                })
            }
        };
        let id = NodeId(self.next);
        self.next += 1;
        let key = Key {
            realm,
            parent,
            tokens: tokens.into(),
        };
        self.by_content.insert(key.clone(), id);
        let node = Node {
            key,
            depth,
            slots: (0..n_slots).map(|_| None).collect(),
            children: 0,
            users: 0,
            used,
            spare: None,
        };
        self.idle.insert(node.age(id));
        self.nodes.insert(id, node);
        Some(id)
    }

    /// Changes an existing node, and updates the orders of eviction.
    fn change<T>(&mut self, id: NodeId, how: impl FnOnce(&mut Node) -> T) -> T {
        let node = self.nodes.get_mut(&id).expect("a found node is there");
        let before = node.age(id);
        let result = how(node);
        let after = node.age(id);
        let free = node.users == 0;
        let (on_device, stored, spare) =
            (node.has_on_device(), node.has_stored(), node.has_spare());
        let idle = free && (on_device || (node.children == 0 && !stored));
        for (set, is_in) in [
            (&mut self.idle, idle),
            (&mut self.stored, free && stored),
            (&mut self.spare, spare),
        ] {
            if !is_in || before != after {
                set.remove(&before);
            }
            if is_in {
                set.insert(after);
            }
        }
        result
    }

    /// Puts a block into a slot that has nothing on the device; with `held` the caller goes on to
    /// hold it. Returns whether the block was taken.
    pub(crate) fn put(
        &mut self,
        id: NodeId,
        slot: usize,
        (block, slab): (BlockId, Slab),
        held: bool,
    ) -> bool {
        let Some(node) = self.nodes.get(&id) else {
            return false;
        };
        match &node.slots[slot] {
            Some(there) if there.users > 0 || there.on_device().is_some() => return false,
            // What was computed again is worth more than its copy.
            Some(there) => self.loose.extend(there.stored()),
            None => {}
        }
        let model = node.key.realm.model;
        self.change(id, |node| {
            let place = SlotLocation::Device(block, slab);
            node.slots[slot] = Some(Slot { place, users: 0 });
            node.spare.take_if(|spare| *spare == slot);
        });
        self.kept_more(model, slab.bytes);
        if held {
            self.hold(id, slot);
        }
        true
    }

    /// Holds a slot, which must have content, for a sequence. Returns where the content is.
    pub(crate) fn hold(&mut self, id: NodeId, slot: usize) -> SlotLocation {
        let (model, place, first) = self.change(id, |node| {
            node.users += 1;
            let held = node.slots[slot].as_mut().expect("a found slot is there");
            held.users += 1;
            let (place, first) = (held.place, held.users == 1);
            // Prompts part there.
            node.spare.take_if(|spare| *spare == slot);
            (node.key.realm.model, place, first)
        });
        if let (SlotLocation::Device(_, slab), true) = (place, first) {
            self.kept_less(model, slab.bytes);
        }
        place
    }

    /// Releases a slot that a sequence held.
    pub(crate) fn let_go(&mut self, id: NodeId, slot: usize) {
        let (model, place, last) = self.change(id, |node| {
            node.users -= 1;
            let held = node.slots[slot].as_mut().expect("a held slot is there");
            held.users -= 1;
            (node.key.realm.model, held.place, held.users == 0)
        });
        if let (SlotLocation::Device(_, slab), true) = (place, last) {
            self.kept_more(model, slab.bytes);
        }
    }

    /// Whether a node exists.
    pub(crate) fn contains(&self, id: NodeId) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Whether a slot has content, on the device or in host memory.
    pub(crate) fn has(&self, id: NodeId, slot: usize) -> bool {
        self.place(id, slot).is_some()
    }

    /// Location of a slot's content; `None` if it has none.
    pub(crate) fn place(&self, id: NodeId, slot: usize) -> Option<SlotLocation> {
        let slot = self.nodes.get(&id)?.slots[slot].as_ref();
        slot.map(|s| s.place)
    }

    /// Removes the content of a slot that no sequence uses. Returns its block, which the caller has
    /// to free.
    pub(crate) fn take(&mut self, id: NodeId, slot: usize) -> Option<BlockId> {
        self.nodes.get(&id)?;
        let (model, taken) = self.change(id, |node| {
            let taken = node.slots[slot].take_if(|s| s.users == 0);
            if taken.is_some() {
                node.spare.take_if(|spare| *spare == slot);
            }
            (node.key.realm.model, taken)
        });
        match taken?.place {
            SlotLocation::Device(block, slab) => {
                self.kept_less(model, slab.bytes);
                Some(block)
            }
            SlotLocation::Host(stored) => {
                self.loose.push(stored);
                None
            }
        }
    }

    /// Slab of a slot that a sequence holds, on the device.
    pub(crate) fn slab(&self, id: NodeId, slot: usize) -> Slab {
        let slot = self.nodes[&id].slots[slot].as_ref();
        let place = slot.and_then(Slot::on_device);
        place.expect("what a sequence uses is on the device").1
    }

    /// Updates the slabs after blocks have moved: `at` returns each block's new slab.
    pub(crate) fn moved(&mut self, at: impl Fn(BlockId) -> Slab) {
        let nodes = self.nodes.values_mut();
        for slot in nodes.flat_map(|node| node.slots.iter_mut().flatten()) {
            if let SlotLocation::Device(block, slab) = &mut slot.place {
                *slab = at(*block);
            }
        }
    }

    /// Marks a prefix as used now, up to this node.
    pub(crate) fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let mut next = Some(id);
        while let Some(id) = next {
            self.renew(id, self.clock);
            next = self.nodes.get(&id).and_then(|n| n.key.parent);
        }
    }

    /// Sets the time of a node's last use.
    fn renew(&mut self, id: NodeId, used: u64) {
        if self.nodes.get(&id).is_some_and(|n| n.used < used) {
            self.change(id, |node| node.used = used);
        }
    }

    /// Evicts the least recently used content from the device; its blocks are added to `freed`,
    /// which the caller has to free. Returns whether there was any.
    pub(crate) fn give_up(&mut self, freed: &mut Vec<BlockId>) -> bool {
        // A parent that no sequence uses may have a child that one does: where a window has passed.
        // What it holds itself may go.
        let Some(&(_, _, id)) = self.idle.first() else {
            return false;
        };
        let n_slots = self.nodes[&id].slots.len();
        freed.extend((0..n_slots).filter_map(|slot| self.take(id, slot)));
        self.remove_if_bare(id);
        true
    }

    /// Forgets all prefixes of a model that has no running sequence; its blocks are added to
    /// `freed`.
    pub(crate) fn forget(&mut self, model: ModelId, freed: &mut Vec<BlockId>) {
        let of_model = |n: &&NodeId| self.nodes[n].key.realm.model == model;
        let mut ids: Vec<NodeId> = self.nodes.keys().filter(of_model).copied().collect();
        ids.sort_unstable_by_key(|id| Reverse(self.nodes[id].depth));
        for id in ids {
            let slots = self.nodes[&id].slots.len();
            freed.extend((0..slots).filter_map(|slot| self.take(id, slot)));
            self.remove_if_bare(id);
        }
        self.kept_of.remove(&model);
    }

    /// Removes a node that has no content and no children.
    fn remove_if_bare(&mut self, id: NodeId) {
        let node = &self.nodes[&id];
        if node.users > 0 || node.children > 0 || node.slots.iter().any(Option::is_some) {
            return;
        }
        let node = self.nodes.remove(&id).expect("looked at above");
        self.idle.remove(&node.age(id));
        self.spare.remove(&node.age(id));
        self.by_content.remove(&node.key);
        if let Some(parent) = node.key.parent.filter(|p| self.nodes.contains_key(p)) {
            self.change(parent, |parent| parent.children -= 1);
        }
    }
}

pub(crate) mod partings;
mod room;
mod spare;
mod stored;
#[cfg(test)]
mod tests;
