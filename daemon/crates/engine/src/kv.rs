//! What a sequence holds on the device: pages of keys and values for each group of the plan, taken one at a time as the
//! sequence grows and given back behind the group's window, and its recurrent state.

use rocmforge_device::{ALIGNMENT, NO_PAGE, Plan};
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, Slab};

use crate::error::Error;
use crate::residency::Residency;

/// The pages of one group, by page number.
#[derive(Debug, Default)]
struct Pages {
    blocks: Vec<Option<BlockId>>,
    /// Arena offsets; [`NO_PAGE`] where the sequence holds none.
    offsets: Vec<u64>,
    /// Pages before this one were given back.
    first: usize,
}

/// The memory of one sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceMemory {
    groups: Vec<Pages>,
    state: Option<BlockId>,
}

impl SequenceMemory {
    /// Arena offsets of the pages, for each group.
    pub(crate) fn pages(&self) -> Vec<&[u64]> {
        self.groups.iter().map(|g| g.offsets.as_slice()).collect()
    }

    /// Arena offset of the recurrent state; 0 where there is none.
    pub(crate) fn state_offset(&self, residency: &Residency) -> u64 {
        self.state
            .map_or(0, |block| residency.cache.block(block).offset)
    }

    /// All slabs.
    pub(crate) fn slabs<'a>(&'a self, residency: &'a Residency) -> impl Iterator<Item = Slab> + 'a {
        let pages = self.groups.iter().flat_map(|g| g.blocks.iter().flatten());
        pages
            .chain(&self.state)
            .map(|&block| residency.cache.block(block))
    }

    /// Makes room for a pass over positions `first..end`: pages that no row of it reads go, those that it writes come.
    pub(crate) fn prepare(
        &mut self,
        residency: &mut Residency,
        model: ModelId,
        plan: &Plan,
        first: usize,
        end: usize,
    ) -> Result<(), Error> {
        self.groups.resize_with(plan.kv.len(), Pages::default);
        for (pages, group) in self.groups.iter_mut().zip(&plan.kv) {
            let behind = group.first_page(first).min(pages.blocks.len());
            for page in pages.first..behind {
                pages.offsets[page] = NO_PAGE;
                if let Some(block) = pages.blocks[page].take() {
                    residency.free(block);
                }
            }
            pages.first = pages.first.max(behind);
            while pages.blocks.len() < group.layout.pages_for(end) {
                let bytes = group.layout.page_bytes() as u64;
                let (block, slab) = residency.reserve(BlockKind::Kv, Some(model), bytes)?;
                pages.blocks.push(Some(block));
                pages.offsets.push(slab.offset);
            }
        }
        if plan.state_elements > 0 && self.state.is_none() {
            let bytes = plan.state_elements * 4;
            let (block, _) = residency.reserve(BlockKind::Kv, Some(model), bytes)?;
            self.state = Some(block);
        }
        Ok(())
    }

    /// Gives everything back.
    pub(crate) fn free(&mut self, residency: &mut Residency) {
        for group in self.groups.drain(..) {
            group
                .blocks
                .into_iter()
                .flatten()
                .for_each(|b| residency.free(b));
        }
        if let Some(block) = self.state.take() {
            residency.free(block);
        }
    }
}

/// Bytes that a sequence of `n_tokens` positions holds at most, computed by passes of at most `rows` rows.
pub(crate) fn bytes_for(plan: &Plan, n_tokens: usize, rows: usize) -> u64 {
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
    let pages: u64 = plan
        .kv
        .iter()
        .map(|group| {
            let page = aligned(group.layout.page_bytes() as u64);
            group.pages_at_most(n_tokens, rows) as u64 * page
        })
        .sum();
    pages + aligned(plan.state_elements * 4)
}
