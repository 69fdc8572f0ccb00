//! What a sequence holds has moved.

use rocmforge_device::NO_PAGE;
use rocmforge_ops::Plan;

use crate::memory::Memory;
use crate::request::kv::{PageOwner, Pages, SequenceMemory, predicting_slot};

impl Pages {
    /// Looks up where the pages lie.
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
    /// Blocks have moved ([`Memory::gather`]): looks up where its pages lie. Its state is looked up
    /// for each pass.
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
