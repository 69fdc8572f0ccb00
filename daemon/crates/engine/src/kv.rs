//! The KV pages of one sequence: blocks of the ledger, taken one at a time as the sequence grows.

use rocmforge_kernels::host::ops::{KV_PAGE_TOKENS, KvLayout};
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, Slab};

use crate::error::Error;
use crate::residency::Residency;

/// Pages of a sequence, in the order of its positions.
#[derive(Debug, Default)]
pub(crate) struct KvPages {
    blocks: Vec<BlockId>,
    offsets: Vec<u64>,
}

impl KvPages {
    /// Arena offsets of the pages.
    pub(crate) fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The pages' slabs.
    pub(crate) fn slabs<'a>(&'a self, residency: &'a Residency) -> impl Iterator<Item = Slab> + 'a {
        self.blocks
            .iter()
            .map(|&block| residency.cache.block(block))
    }

    /// Makes room for `n_tokens` positions.
    pub(crate) fn grow(
        &mut self,
        residency: &mut Residency,
        model: ModelId,
        layout: &KvLayout,
        n_tokens: usize,
    ) -> Result<(), Error> {
        while self.blocks.len() < layout.pages_for(n_tokens) {
            let (block, slab) =
                residency.reserve(BlockKind::Kv, Some(model), layout.page_bytes() as u64)?;
            self.blocks.push(block);
            self.offsets.push(slab.offset);
        }
        Ok(())
    }

    /// Gives all pages back.
    pub(crate) fn free(&mut self, residency: &mut Residency) {
        self.offsets.clear();
        for block in self.blocks.drain(..) {
            residency.free(block);
        }
    }
}

/// Bytes of the pages that `n_tokens` positions need.
pub(crate) fn bytes_for(layout: &KvLayout, n_tokens: usize) -> u64 {
    let page = (layout.page_bytes() as u64).next_multiple_of(rocmforge_device::ALIGNMENT);
    n_tokens.div_ceil(KV_PAGE_TOKENS) as u64 * page
}
