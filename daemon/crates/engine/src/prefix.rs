//! Beginnings of prompts whose keys, values and recurrent states are still on the device: found by content, shared by
//! sequences, kept when no sequence uses them any more, and given up when their room is wanted.
//!
//! A node stands for [`KV_PAGE_TOKENS`] tokens after the tokens of its parent; it has a page for each group of the plan,
//! and for models with recurrent layers the state behind it. It is found by its parent and its tokens themselves, not by a
//! sum of them: two beginnings never pass for each other. Beginnings of different models, or of different askers, have
//! nothing in common.
//!
//! ```text
//!   (model, asker) -- 32 tokens -- 32 tokens -- 32 tokens        a node's slots: page of group 0, of group 1, .., state
//!                          \------ 32 tokens                     absent where a window has passed or none was taken
//! ```
//!
//! *Invariants*, checked by the tests below: a slot that a sequence holds is not given up; a node with children is not; a
//! parent was used no earlier than its children; `kept_bytes` is the sum of the slots that no sequence holds.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use rocmforge_device::Plan;
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{BlockId, ModelId, Slab};

/// Most nodes: 4 million tokens. The oldest go for new ones.
const NODES_MAX: usize = 1 << 17;

/// Names a node; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u64);

/// Whose beginnings are shared: those of one model and one asker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Realm {
    pub(crate) model: ModelId,
    pub(crate) asker: u64,
}

/// What a node is found by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    realm: Realm,
    parent: Option<NodeId>,
    tokens: Box<[u32]>,
}

/// A page or a state, and the sequences that use it.
#[derive(Debug)]
struct Slot {
    block: BlockId,
    slab: Slab,
    users: u32,
}

#[derive(Debug)]
struct Node {
    key: Key,
    /// Nodes above it.
    depth: u32,
    /// A page for each group, then the state.
    slots: Vec<Option<Slot>>,
    children: u32,
    /// Slots in use, each once for each user.
    users: u32,
    /// When it was used last.
    used: u64,
}

/// A beginning that was found.
#[derive(Debug, Default)]
pub(crate) struct Beginning {
    /// Its nodes, the first of the prompt first.
    pub(crate) nodes: Vec<NodeId>,
    /// How many of them the prompt has in common with what is known, usable or not: where prompts part.
    pub(crate) common: usize,
}

/// All beginnings.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    nodes: HashMap<NodeId, Node>,
    by_content: HashMap<Key, NodeId>,
    /// Nodes of which no slot is in use, the one to go first first: children before their parents.
    idle: BTreeSet<(u64, Reverse<u32>, NodeId)>,
    next: u64,
    clock: u64,
    kept_bytes: u64,
    kept_of: HashMap<ModelId, u64>,
}

impl Prefixes {
    /// Bytes that no sequence uses.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// The same, of one model.
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

    /// The longest beginning of `tokens` from whose end a sequence can go on, of `pages` pages at most.
    pub(crate) fn find(
        &self,
        realm: Realm,
        tokens: &[u32],
        pages: usize,
        plan: &Plan,
    ) -> Beginning {
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
            let mut goes_on = plan.state_elements == 0 || node.slots[plan.kv.len()].is_some();
            for ((group, unbroken), slot) in plan.kv.iter().zip(&mut unbroken).zip(&node.slots) {
                *unbroken = slot.as_ref().map_or(0, |_| *unbroken + 1);
                goes_on &= *unbroken >= end - group.first_page(end * KV_PAGE_TOKENS).min(end);
            }
            if goes_on {
                usable = end;
            }
        }
        let common = nodes.len();
        nodes.truncate(usable);
        Beginning { nodes, common }
    }

    /// The node of these tokens after a parent.
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

    /// A node of these tokens after a parent, without slots; the one that is there if there is one. `None` if the parent is
    /// gone, or there are as many as there may be and all are in use.
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
            return None;
        }
        let depth = match parent {
            None => 0,
            Some(parent) => {
                let parent = self.nodes.get_mut(&parent)?;
                parent.children += 1;
                parent.depth + 1
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
        };
        self.idle.insert((node.used, Reverse(depth), id));
        self.nodes.insert(id, node);
        Some(id)
    }

    /// Puts a block into an empty slot. The giver goes on to hold it, if he is `held`. Whether the slot was empty.
    pub(crate) fn put(
        &mut self,
        id: NodeId,
        slot: usize,
        (block, slab): (BlockId, Slab),
        held: bool,
    ) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else {
            return false;
        };
        if node.slots[slot].is_some() {
            return false;
        }
        node.slots[slot] = Some(Slot {
            block,
            slab,
            users: 0,
        });
        let model = node.key.realm.model;
        self.kept_more(model, slab.bytes);
        if held {
            self.hold(id, slot);
        }
        true
    }

    /// A sequence uses a slot from now on, which is there. Where it lies.
    pub(crate) fn hold(&mut self, id: NodeId, slot: usize) -> Slab {
        let node = self.nodes.get_mut(&id).expect("a found node is there");
        let held = node.slots[slot].as_mut().expect("a found slot is there");
        let (slab, first) = (held.slab, held.users == 0);
        held.users += 1;
        if node.users == 0 {
            self.idle.remove(&(node.used, Reverse(node.depth), id));
        }
        node.users += 1;
        let model = node.key.realm.model;
        if first {
            self.kept_less(model, slab.bytes);
        }
        slab
    }

    /// A sequence uses a slot no more.
    pub(crate) fn let_go(&mut self, id: NodeId, slot: usize) {
        let node = self.nodes.get_mut(&id).expect("a held node is there");
        let held = node.slots[slot].as_mut().expect("a held slot is there");
        held.users -= 1;
        let (bytes, last) = (held.slab.bytes, held.users == 0);
        node.users -= 1;
        if node.users == 0 {
            self.idle.insert((node.used, Reverse(node.depth), id));
        }
        let model = node.key.realm.model;
        if last {
            self.kept_more(model, bytes);
        }
    }

    /// Whether a slot has something.
    pub(crate) fn has(&self, id: NodeId, slot: usize) -> bool {
        let node = self.nodes.get(&id);
        node.is_some_and(|n| n.slots[slot].is_some())
    }

    /// Gives up a slot that no sequence uses; its block is the caller's to free.
    pub(crate) fn take(&mut self, id: NodeId, slot: usize) -> Option<BlockId> {
        let node = self.nodes.get_mut(&id)?;
        let taken = node.slots[slot].take_if(|s| s.users == 0)?;
        let model = node.key.realm.model;
        self.kept_less(model, taken.slab.bytes);
        Some(taken.block)
    }

    /// Where the slots of a node lie that sequences use.
    pub(crate) fn slab(&self, id: NodeId, slot: usize) -> Slab {
        let slot = self.nodes[&id].slots[slot].as_ref();
        slot.expect("a held slot is there").slab
    }

    /// A beginning was used, up to this node.
    pub(crate) fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let mut next = Some(id);
        while let Some(id) = next {
            self.renew(id, self.clock);
            next = self.nodes.get(&id).and_then(|n| n.key.parent);
        }
    }

    /// Moves a node up in the order of use.
    fn renew(&mut self, id: NodeId, used: u64) {
        let Some(node) = self.nodes.get_mut(&id).filter(|n| n.used < used) else {
            return;
        };
        if node.users == 0 {
            self.idle.remove(&(node.used, Reverse(node.depth), id));
            self.idle.insert((used, Reverse(node.depth), id));
        }
        node.used = used;
    }

    /// Gives up what was used longest ago; its blocks are the caller's to free. Whether there was something.
    pub(crate) fn give_up(&mut self, freed: &mut Vec<BlockId>) -> bool {
        // A parent that no sequence uses may have a child that one does: where a window has passed. What it holds itself
        // may go.
        let found = self.idle.iter().find(|(_, _, id)| {
            let node = &self.nodes[id];
            node.children == 0 || node.slots.iter().any(Option::is_some)
        });
        let Some(&(_, _, id)) = found else {
            return false;
        };
        let n_slots = self.nodes[&id].slots.len();
        freed.extend((0..n_slots).filter_map(|slot| self.take(id, slot)));
        if self.nodes[&id].children == 0 {
            self.remove(id);
        }
        true
    }

    /// Gives up what a model has, of which no sequence runs.
    pub(crate) fn forget(&mut self, model: ModelId, freed: &mut Vec<BlockId>) {
        let of_model = |n: &&NodeId| self.nodes[n].key.realm.model == model;
        let mut ids: Vec<NodeId> = self.nodes.keys().filter(of_model).copied().collect();
        ids.sort_unstable_by_key(|id| Reverse(self.nodes[id].depth));
        for id in ids {
            let slots = self.nodes[&id].slots.len();
            freed.extend((0..slots).filter_map(|slot| self.take(id, slot)));
            let node = &self.nodes[&id];
            if node.users == 0 && node.children == 0 {
                self.remove(id);
            }
        }
        self.kept_of.remove(&model);
    }

    fn remove(&mut self, id: NodeId) {
        let node = self.nodes.remove(&id).expect("a node is removed once");
        assert!(node.children == 0 && node.users == 0, "{node:?} is in use");
        self.idle.remove(&(node.used, Reverse(node.depth), id));
        self.by_content.remove(&node.key);
        if let Some(parent) = node.key.parent.and_then(|p| self.nodes.get_mut(&p)) {
            parent.children -= 1;
        }
    }

    /// Checks the sums.
    #[cfg(test)]
    fn assert_consistent(&self) {
        let mut kept = 0;
        for (id, node) in &self.nodes {
            let users: u32 = node.slots.iter().flatten().map(|s| s.users).sum();
            assert_eq!(users, node.users);
            let idle = (node.used, Reverse(node.depth), *id);
            assert_eq!(self.idle.contains(&idle), users == 0);
            let slots = node.slots.iter().flatten();
            kept += slots
                .filter(|s| s.users == 0)
                .map(|s| s.slab.bytes)
                .sum::<u64>();
            let children = self.nodes.values().filter(|n| n.key.parent == Some(*id));
            assert_eq!(children.count() as u32, node.children);
            assert_eq!(self.by_content.get(&node.key), Some(id));
            if let Some(parent) = node.key.parent {
                assert!(self.nodes[&parent].used >= node.used);
            }
        }
        assert_eq!(kept, self.kept_bytes);
        assert_eq!(self.by_content.len(), self.nodes.len());
        assert!(self.idle.len() <= self.nodes.len());
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use rocmforge_tensor_cache::{BlockKind, Cache, CacheConfig};

    use super::*;

    const REALM: Realm = Realm {
        model: ModelId(0),
        asker: 7,
    };

    /// Blocks of a ledger.
    struct Blocks(Cache);

    impl Blocks {
        fn new() -> Blocks {
            Blocks(Cache::new(CacheConfig::new(1 << 30)))
        }

        fn take(&mut self) -> (BlockId, Slab) {
            let block = self
                .0
                .reserve(BlockKind::Kv, None, 4096, &mut Vec::new())
                .unwrap();
            (block, self.0.block(block))
        }

        fn free(&mut self, blocks: &mut Vec<BlockId>) {
            blocks.drain(..).for_each(|b| self.0.free(b));
        }
    }

    /// The nodes of a path of so many tokens each, with a page each.
    fn path(prefixes: &mut Prefixes, blocks: &mut Blocks, tokens: &[u32]) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = Vec::new();
        let mut freed = Vec::new();
        for &token in tokens {
            let chunk = [token; KV_PAGE_TOKENS];
            let at = nodes.last().copied();
            let node = prefixes.add(REALM, at, &chunk, 1, &mut freed).unwrap();
            let block = blocks.take();
            if !prefixes.put(node, 0, block, false) {
                blocks.0.free(block.0);
            }
            nodes.push(node);
        }
        blocks.free(&mut freed);
        nodes
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_children_before_parents() {
        let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
        let first = path(&mut prefixes, &mut blocks, &[1, 2, 3]);
        let second = path(&mut prefixes, &mut blocks, &[1, 2, 4]);
        assert_eq!(first[..2], second[..2]);
        prefixes.assert_consistent();
        let mut freed = Vec::new();
        let there = |prefixes: &Prefixes, id: NodeId| prefixes.nodes.contains_key(&id);
        assert!(prefixes.give_up(&mut freed));
        assert!(!there(&prefixes, first[2]) && there(&prefixes, second[2]));
        prefixes.hold(second[1], 0);
        assert!(prefixes.give_up(&mut freed));
        assert!(!there(&prefixes, second[2]));
        prefixes.assert_consistent();
        // What is held stays, and so does the way to it; the parent's own page may go.
        assert!(prefixes.give_up(&mut freed));
        assert!(there(&prefixes, second[0]) && !prefixes.has(second[0], 0));
        assert!(!prefixes.give_up(&mut freed));
        prefixes.let_go(second[1], 0);
        while prefixes.give_up(&mut freed) {}
        assert_eq!((prefixes.nodes.len(), prefixes.kept_bytes()), (0, 0));
        prefixes.assert_consistent();
    }

    #[test]
    fn realms_have_nothing_in_common() {
        let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
        path(&mut prefixes, &mut blocks, &[1]);
        let chunk = [1; KV_PAGE_TOKENS];
        assert!(prefixes.child(REALM, None, &chunk).is_some());
        for (model, asker) in [(1, 7), (0, 8)] {
            let model = ModelId(model);
            assert_eq!(prefixes.child(Realm { model, asker }, None, &chunk), None);
        }
        let mut freed = Vec::new();
        prefixes.forget(ModelId(1), &mut freed);
        assert!(freed.is_empty());
        prefixes.forget(ModelId(0), &mut freed);
        assert_eq!((freed.len(), prefixes.nodes.len()), (1, 0));
        prefixes.assert_consistent();
    }

    #[test]
    fn any_order_of_use_leaves_the_sums_right() {
        let mut rng = StdRng::seed_from_u64(5);
        let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
        let mut held: Vec<(NodeId, usize)> = Vec::new();
        let mut freed = Vec::new();
        for step in 0..20_000 {
            match rng.random_range(0..10) {
                0..3 => {
                    let length = rng.random_range(1..6);
                    let tokens: Vec<u32> = (0..length).map(|_| rng.random_range(0..3)).collect();
                    path(&mut prefixes, &mut blocks, &tokens);
                }
                3..6 => {
                    let mut ids: Vec<NodeId> = prefixes.nodes.keys().copied().collect();
                    ids.sort_unstable();
                    if !ids.is_empty() {
                        let id = ids[rng.random_range(0..ids.len())];
                        if prefixes.has(id, 0) {
                            prefixes.hold(id, 0);
                            held.push((id, 0));
                        }
                        prefixes.touch(id);
                    }
                }
                6..8 if !held.is_empty() => {
                    let (id, slot) = held.swap_remove(rng.random_range(0..held.len()));
                    prefixes.let_go(id, slot);
                }
                8 => {
                    prefixes.give_up(&mut freed);
                }
                _ => {
                    let ids: Vec<NodeId> = prefixes.nodes.keys().copied().collect();
                    if let Some(&id) = ids.first() {
                        freed.extend(prefixes.take(id, 0));
                    }
                }
            }
            blocks.free(&mut freed);
            if step % 50 == 0 {
                prefixes.assert_consistent();
                for &(id, slot) in &held {
                    assert!(prefixes.has(id, slot));
                }
            }
        }
        held.into_iter()
            .for_each(|(id, slot)| prefixes.let_go(id, slot));
        while prefixes.give_up(&mut freed) {}
        blocks.free(&mut freed);
        assert_eq!((prefixes.nodes.len(), prefixes.kept_bytes()), (0, 0));
        assert_eq!(blocks.0.usage().kv, 0);
    }
}
