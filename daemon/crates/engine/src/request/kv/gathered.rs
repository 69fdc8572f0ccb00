//! Updates the addresses of a sequence's KV pages after blocks have moved.

use rocmforge_device::NO_PAGE;
use rocmforge_ops::Plan;

use crate::memory::Memory;
use crate::request::kv::{PageOwner, Pages, SequenceMemory, predicting_slot};

impl Pages {
    /// Updates the pages' arena offsets.
    fn locate(&mut self, memory: &Memory, slot: usize) {
        for (offset, held) in self.offsets.iter_mut().zip(&self.held) {
            *offset = match *held {
                None => NO_PAGE,
                Some(PageOwner::Own(block)) => memory.store.cache.block(block).offset,
                Some(PageOwner::Shared(node)) => memory.prefixes.slab(node, slot).offset,
            };
        }
    }
}

impl SequenceMemory {
    /// Updates the arena offsets of the sequence's pages after blocks have moved
    /// ([`Memory::gather`]). Its state's offset is looked up for each pass anyway.
    pub(crate) fn locate(&mut self, memory: &Memory, plan: &Plan) {
        for (slot, pages) in self.groups.iter_mut().enumerate() {
            pages.locate(memory, slot);
        }
        let of_block = self.predicting.iter_mut().flat_map(|p| &mut p.groups);
        for (group, pages) in of_block.enumerate() {
            pages.locate(memory, predicting_slot(plan) + group);
        }
    }
}
