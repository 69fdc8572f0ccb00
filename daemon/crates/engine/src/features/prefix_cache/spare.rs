//! States that are kept on the chance that a prompt parts there.
//!
//! A kept state saves the tokens up to the one before it, if a prompt parts between them and the
//! next. One where prompts parted, or end, saves them for each that comes. On a chance it saves few
//! tokens to few prompts, and takes the bytes of many pages, each of which saves its tokens to
//! every prompt that comes that far. So such a state has only room that nothing else takes, and
//! goes before any page; where a sequence begins with it, prompts part there, and it is kept like
//! the others.

use rocmforge_tensor_cache::{BlockId, ModelId};

use super::{Age, NodeId, Prefixes};
use crate::memory::Memory;

/// The part of what prefixes may have that such states have at most.
const PART_MAX: u64 = 2;

impl Prefixes {
    /// What a slot has is kept on a chance from now on.
    pub(super) fn make_spare(&mut self, id: NodeId, slot: usize) {
        self.change(id, |node| node.spare = Some(slot));
    }

    /// What a slot has is kept like anything else from now on.
    pub(crate) fn settle(&mut self, id: NodeId, slot: usize) {
        let is_spare = self.nodes.get(&id).and_then(|node| node.spare) == Some(slot);
        if is_spare {
            self.change(id, |node| node.spare = None);
        }
    }

    /// The state that is kept on a chance and goes next, of those in the order of use before
    /// `before`: its node and its slot.
    pub(super) fn next_spare(&self, before: Option<u64>) -> Option<(NodeId, usize)> {
        let &(used, _, id) = self.spare.first()?;
        match before {
            Some(before) if used >= before => None,
            _ => Some((id, self.nodes[&id].spare?)),
        }
    }

    /// Bytes of all of them.
    pub(super) fn spare_bytes(&self) -> u64 {
        let slabs = self.spare.iter().filter_map(|(_, _, id)| {
            let node = &self.nodes[id];
            node.slots[node.spare?].as_ref()?.on_device()
        });
        slabs.map(|(_, slab)| slab.bytes).sum()
    }

    /// When a node was used last.
    fn used(&self, id: NodeId) -> u64 {
        let (used, _, _): Age = self.age(id);
        used
    }
}

impl Memory {
    /// Maximum number of states of `bytes` bytes that are kept on a chance.
    pub(crate) fn spare_states_max(&self, bytes: u64) -> usize {
        let most = self.prefix_limit(0) / PART_MAX / bytes.max(1);
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Gives up the state that is kept on a chance and goes next, of those that were used before
    /// `before`. Whether there was one.
    pub(super) fn give_up_spare(&mut self, before: Option<u64>) -> bool {
        let spare = self.prefixes.next_spare(before);
        spare
            .inspect(|&(node, slot)| self.give_up(node, slot))
            .is_some()
    }

    /// Keeps a copy of a sequence's state in an empty slot on a chance: in room that nothing but
    /// older ones of its kind has. Whether it is kept.
    pub(crate) fn keep_spare_state(
        &mut self,
        node: NodeId,
        slot: usize,
        state: BlockId,
        model: ModelId,
    ) -> bool {
        if !self.prefixes.contains(node) {
            return false;
        }
        let from = self.store.cache.block(state);
        let (limit, used) = (self.prefix_limit(from.bytes), self.prefixes.used(node));
        let is_full = |memory: &Self| {
            let (all, spare) = (memory.prefixes.kept_bytes(), memory.prefixes.spare_bytes());
            all + from.bytes > limit || spare + from.bytes > limit / PART_MAX
        };
        while is_full(self) {
            if !self.give_up_spare(Some(used)) {
                return false;
            }
        }
        let kept = self.copy_state(node, slot, from, model);
        if kept {
            self.prefixes.make_spare(node, slot);
        }
        kept
    }
}
