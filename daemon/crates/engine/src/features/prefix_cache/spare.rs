//! Recurrent states that are kept speculatively, in case a prompt diverges there.
//!
//! A state saves tokens only to prompts that diverge between it and the next state. One at a place
//! where prompts diverged or end saves them to each later prompt. A speculative one saves few
//! tokens to few prompts, and takes the bytes of many pages, each of which saves its tokens to
//! every prompt with that prefix. So a speculative state only uses memory that nothing else takes,
//! and is evicted before any page; once a sequence begins with it, it is kept like the others.

use rocmforge_tensor_cache::{BlockId, ModelId};

use super::{Age, NodeId, Prefixes};
use crate::memory::Memory;

/// Speculatively kept states take at most one part in this many of what cached prefixes may take.
const PART_MAX: u64 = 2;

impl Prefixes {
    /// Marks the state in a slot as kept speculatively.
    pub(super) fn make_spare(&mut self, id: NodeId, slot: usize) {
        self.change(id, |node| node.spare = Some(slot));
    }

    /// Marks the content of a slot as kept normally.
    pub(crate) fn settle(&mut self, id: NodeId, slot: usize) {
        let is_spare = self.nodes.get(&id).and_then(|node| node.spare) == Some(slot);
        if is_spare {
            self.change(id, |node| node.spare = None);
        }
    }

    /// The speculatively kept state that is evicted next, among those last used before `before`:
    /// its node and slot.
    pub(super) fn next_spare(&self, before: Option<u64>) -> Option<(NodeId, usize)> {
        let &(used, _, id) = self.spare.first()?;
        match before {
            Some(before) if used >= before => None,
            _ => Some((id, self.nodes[&id].spare?)),
        }
    }

    /// Bytes of all speculatively kept states on the device.
    pub(super) fn spare_bytes(&self) -> u64 {
        let slabs = self.spare.iter().filter_map(|(_, _, id)| {
            let node = &self.nodes[id];
            node.slots[node.spare?].as_ref()?.on_device()
        });
        slabs.map(|(_, slab)| slab.bytes).sum()
    }

    /// Logical time of a node's last use.
    fn used(&self, id: NodeId) -> u64 {
        let (used, _, _): Age = self.age(id);
        used
    }
}

impl Memory {
    /// Maximum number of speculatively kept states of `bytes` bytes each.
    pub(crate) fn spare_states_max(&self, bytes: u64) -> usize {
        let most = self.prefix_limit(0) / PART_MAX / bytes.max(1);
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Evicts the next speculatively kept state, among those last used before `before`. Returns
    /// whether there was one.
    pub(super) fn give_up_spare(&mut self, before: Option<u64>) -> bool {
        let spare = self.prefixes.next_spare(before);
        spare
            .inspect(|&(node, slot)| self.give_up(node, slot))
            .is_some()
    }

    /// Keeps a copy of a sequence's state speculatively in an empty slot: in unused memory, or in
    /// place of an older speculative state. Returns whether it is kept.
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
        let others = self.prefixes.kept_bytes() - self.prefixes.spare_bytes();
        if others + from.bytes > limit {
            // What is above the limit leaves in portions; older states would go for nothing.
            return false;
        }
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
