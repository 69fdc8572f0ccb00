//! Beginnings against the rules that they promise.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_tensor_cache::{BlockKind, Cache, CacheConfig};

use super::*;
use crate::features::host_kv::HostKv;

const REALM: Realm = Realm {
    model: ModelId(0),
    asker: 7,
    long: false,
    adapters: AdapterKey([0; 32]),
};

impl Prefixes {
    /// Checks the sums and the orders.
    fn assert_consistent(&self) {
        let mut kept = 0;
        for (id, node) in &self.nodes {
            let users: u32 = node.slots.iter().flatten().map(|s| s.users).sum();
            assert_eq!(users, node.users);
            let (here, stored) = (node.has_on_device(), node.has_stored());
            let idle = users == 0 && (here || (node.children == 0 && !stored));
            assert_eq!(self.idle.contains(&node.age(*id)), idle);
            let waits = users == 0 && stored;
            assert_eq!(self.stored.contains(&node.age(*id)), waits);
            assert_eq!(self.spare.contains(&node.age(*id)), node.has_spare());
            assert!(node.spare.is_none_or(|slot| node.slots[slot].is_some()));
            let slots = node.slots.iter().flatten().filter(|s| s.users == 0);
            let slabs = slots.filter_map(|s| s.on_device());
            kept += slabs.map(|(_, slab)| slab.bytes).sum::<u64>();
            let children = self.nodes.values().filter(|n| n.key.parent == Some(*id));
            assert_eq!(children.count() as u32, node.children);
            assert_eq!(self.by_content.get(&node.key), Some(id));
            if let Some(parent) = node.key.parent {
                assert!(self.nodes[&parent].used >= node.used);
            }
        }
        let spare = self.nodes.values().filter(|node| node.has_spare());
        assert_eq!(spare.count(), self.spare.len());
        assert_eq!(kept, self.kept_bytes);
        assert_eq!(self.by_content.len(), self.nodes.len());
        assert!(self.idle.len() <= self.nodes.len() && self.stored.len() <= self.nodes.len());
    }

    /// Places in the host's memory that slots are in.
    fn places(&self) -> Vec<HostSlot> {
        let slots = self.nodes.values().flat_map(|n| n.slots.iter().flatten());
        slots.filter_map(Slot::stored).collect()
    }
}

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
fn what_is_kept_on_a_chance_goes_first_until_a_sequence_begins_with_it() {
    let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
    let nodes = path(&mut prefixes, &mut blocks, &[1, 2, 3]);
    let other = path(&mut prefixes, &mut blocks, &[4]);
    let used = |prefixes: &Prefixes, id: NodeId| prefixes.age(id).0;
    prefixes.make_spare(nodes[0], 0);
    prefixes.make_spare(nodes[1], 0);
    prefixes.make_spare(other[0], 0);
    prefixes.assert_consistent();
    assert_eq!(prefixes.spare_bytes(), 3 * 4096);
    // What was used longest ago, and of that what is deeper.
    assert_eq!(prefixes.next_spare(None), Some((nodes[1], 0)));
    let first = Some(used(&prefixes, nodes[0]));
    assert_eq!(prefixes.next_spare(first), None, "of the same use");
    let later = Some(used(&prefixes, other[0]));
    assert_eq!(prefixes.next_spare(later), Some((nodes[1], 0)));
    // In use it does not go, and then it is like any other.
    prefixes.hold(nodes[1], 0);
    prefixes.assert_consistent();
    assert_eq!(prefixes.next_spare(None), Some((nodes[0], 0)));
    prefixes.let_go(nodes[1], 0);
    assert_eq!(prefixes.next_spare(None), Some((nodes[0], 0)));
    prefixes.settle(nodes[0], 0);
    prefixes.touch(nodes[2]);
    assert_eq!(prefixes.next_spare(None), Some((other[0], 0)));
    let taken = prefixes.take(other[0], 0);
    assert!(taken.is_some() && prefixes.next_spare(None).is_none());
    assert_eq!(prefixes.spare_bytes(), 0);
    prefixes.assert_consistent();
}

#[test]
fn realms_have_nothing_in_common() {
    let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
    path(&mut prefixes, &mut blocks, &[1]);
    let chunk = [1; KV_PAGE_TOKENS];
    assert!(prefixes.child(REALM, None, &chunk).is_some());
    let cases = [
        (1, 7, false, 0),
        (0, 8, false, 0),
        (0, 7, true, 0),
        (0, 7, false, 1),
    ];
    for (model, asker, long, adapter) in cases {
        let other = Realm {
            model: ModelId(model),
            asker,
            long,
            adapters: AdapterKey([adapter; 32]),
        };
        assert_eq!(prefixes.child(other, None, &chunk), None);
    }
    let mut freed = Vec::new();
    prefixes.forget(ModelId(1), &mut freed);
    assert!(freed.is_empty());
    prefixes.forget(ModelId(0), &mut freed);
    assert_eq!((freed.len(), prefixes.nodes.len()), (1, 0));
    prefixes.assert_consistent();
}

#[test]
fn what_is_stored_is_found_and_goes_by_itself() {
    let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
    let mut host_kv = HostKv::new(1 << 20, false);
    let nodes = path(&mut prefixes, &mut blocks, &[1, 2]);
    let last = prefixes.oldest().unwrap();
    assert_eq!(last, nodes[1], "children before their parents");
    let block = prefixes.store(last, 0, host_kv.take(4096).unwrap());
    blocks.0.free(block);
    prefixes.assert_consistent();
    assert_eq!(
        (prefixes.kept_bytes(), prefixes.positions(last)),
        (4096, 64)
    );
    assert_eq!(prefixes.oldest(), Some(nodes[0]));
    // It comes back for a sequence, and its place is free.
    assert!(matches!(prefixes.hold(last, 0), SlotLocation::Host(_)));
    assert_eq!(prefixes.oldest_stored(), None, "what is held stays");
    prefixes.bring_back(last, 0, blocks.take());
    assert_eq!(prefixes.take_loose().len(), 1);
    prefixes.let_go(last, 0);
    prefixes.assert_consistent();
    assert_eq!(prefixes.kept_bytes(), 8192);
    // Without a copy of the child the parent's is of use, and the other way round it goes, too.
    for &node in nodes.iter().rev() {
        let block = prefixes.store(node, 0, host_kv.take(4096).unwrap());
        blocks.0.free(block);
    }
    assert_eq!(prefixes.oldest(), None);
    assert_eq!(prefixes.oldest_stored().unwrap().2, nodes[1]);
    assert_eq!(prefixes.drop_stored(nodes[1]), 1);
    assert_eq!(prefixes.drop_stored(nodes[0]), 1);
    assert!(prefixes.nodes.is_empty());
    prefixes.assert_consistent();
}

#[test]
fn any_order_of_use_leaves_the_sums_right() {
    let mut rng = StdRng::seed_from_u64(5);
    let (mut prefixes, mut blocks) = (Prefixes::default(), Blocks::new());
    let mut held: Vec<(NodeId, usize)> = Vec::new();
    let mut freed = Vec::new();
    let mut host_kv = HostKv::new(8 * 4096, false);
    let mut brought_back = 0;
    for step in 0..20_000 {
        match rng.random_range(0..14) {
            13 => {
                let mut ids: Vec<NodeId> = prefixes.nodes.keys().copied().collect();
                ids.sort_unstable();
                if !ids.is_empty() {
                    let id = ids[rng.random_range(0..ids.len())];
                    let is_free = prefixes.nodes[&id].slots[0]
                        .as_ref()
                        .is_some_and(|slot| slot.users == 0);
                    match is_free {
                        true => prefixes.make_spare(id, 0),
                        false => prefixes.settle(id, 0),
                    }
                }
            }
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
                        if let SlotLocation::Host(_) = prefixes.hold(id, 0) {
                            prefixes.bring_back(id, 0, blocks.take());
                            brought_back += 1;
                        }
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
            9..11 => {
                if let Some(id) = prefixes.oldest()
                    && let Some(&(slot, _)) = prefixes.on_device(id).first()
                    && let Some(place) = host_kv.take(4096)
                {
                    freed.push(prefixes.store(id, slot, place));
                }
            }
            11 => {
                if let Some((_, _, id)) = prefixes.oldest_stored() {
                    assert_eq!(prefixes.drop_stored(id), 1);
                }
            }
            _ => {
                let ids: Vec<NodeId> = prefixes.nodes.keys().copied().collect();
                if let Some(&id) = ids.first() {
                    freed.extend(prefixes.take(id, 0));
                }
            }
        }
        blocks.free(&mut freed);
        prefixes
            .take_loose()
            .into_iter()
            .for_each(|s| host_kv.free(s));
        if step % 50 == 0 {
            prefixes.assert_consistent();
            let places = prefixes.places();
            let sum: u64 = places.iter().map(|s| s.bytes).sum();
            assert_eq!(sum, host_kv.status().bytes);
            for &(id, slot) in &held {
                assert!(prefixes.has(id, slot));
            }
        }
    }
    held.into_iter()
        .for_each(|(id, slot)| prefixes.let_go(id, slot));
    assert!(brought_back > 0);
    while let Some((_, _, id)) = prefixes.oldest_stored() {
        prefixes.drop_stored(id);
    }
    while prefixes.give_up(&mut freed) {}
    prefixes
        .take_loose()
        .into_iter()
        .for_each(|s| host_kv.free(s));
    assert_eq!(host_kv.status().bytes, 0);
    blocks.free(&mut freed);
    assert_eq!((prefixes.nodes.len(), prefixes.kept_bytes()), (0, 0));
    assert_eq!(blocks.0.usage().kv, 0);
}
