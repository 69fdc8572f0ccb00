//! Blocks: memory that is not weights, in the same ledger and the same arena.

use crate::arena::{Side, Tenant};
use crate::cache::in_range;
use crate::evict::For;
use crate::room::VictimFilter;
use crate::state::Block;
use crate::{
    Action, BLOCKS_MAX, BYTES_MAX, BlockId, BlockKind, Cache, Error, ModelId, Slab, Usage,
};

impl Cache {
    /// Reserves a block (memory that is not weights) in the ledger, evicting weights for it. A
    /// block is never evicted, and only [`Cache::gather`] moves it.
    ///
    /// # Errors
    /// `UnknownModel` for the owner; `OutOfRange` for 0 bytes or too many blocks; `NoRoom`
    /// and `NeverFits` as in `acquire`.
    pub fn reserve(
        &mut self,
        kind: BlockKind,
        owner: Option<ModelId>,
        bytes: u64,
        actions: &mut Vec<Action>,
    ) -> Result<BlockId, Error> {
        if let Some(model) = owner.filter(|model| !self.models.contains_key(model)) {
            return Err(Error::UnknownModel(model));
        }
        in_range("the size of a block", bytes, BYTES_MAX)?;
        in_range(
            "the number of blocks",
            self.blocks.len() as u64 + 1,
            BLOCKS_MAX as u64,
        )?;
        let slab = self.make_room(
            self.rounded(bytes),
            Side::Low,
            VictimFilter::Any,
            For::Block(kind),
            actions,
        )?;
        let id = BlockId(self.blocks_ever);
        self.blocks_ever += 1;
        self.arena.occupy(slab, Tenant::Block(id));
        self.blocks.insert(id, Block { kind, owner, slab });
        *kind_bytes(&mut self.usage, kind) += slab.bytes;
        if let Some(model) = owner.and_then(|model| self.models.get_mut(&model)) {
            model.blocks += 1;
            *kind_bytes(&mut model.usage, kind) += slab.bytes;
        }
        self.assert_ledger();
        Ok(id)
    }

    /// Moves the blocks of a kind to the lowest possible offsets, the lowest first, without moving
    /// anything else, so that free memory above them is contiguous except for holes before what
    /// stays. Returns each move, to be carried out in this order, with the semantics of memmove.
    ///
    /// Nothing else moves a block, so the caller has to update all remembered offsets.
    pub fn gather(&mut self, kind: BlockKind) -> Vec<(BlockId, Slab, Slab)> {
        let of_kind = |(_, tenant): (Slab, Tenant)| match tenant {
            Tenant::Block(id) if self.blocks[&id].kind == kind => Some(id),
            Tenant::Block(_) | Tenant::Segment(_) => None,
        };
        let blocks: Vec<BlockId> = self.arena.extents().filter_map(of_kind).collect();
        let mut moves = Vec::new();
        for id in blocks {
            let from = self.blocks[&id].slab;
            self.arena.vacate(from);
            let lowest = self.arena.hole(from.bytes, Side::Low);
            let offset = lowest.map_or(from.offset, |offset| offset.min(from.offset));
            let to = Slab { offset, ..from };
            self.arena.occupy(to, Tenant::Block(id));
            if to != from {
                self.blocks.get_mut(&id).expect("it lies there").slab = to;
                moves.push((id, from, to));
            }
        }
        // Free room may lie in one piece now.
        self.unjoined = None;
        self.assert_ledger();
        moves
    }

    /// The slab of a block, valid until it is freed or moved by [`Cache::gather`].
    ///
    /// # Panics
    /// The block was freed.
    pub fn block(&self, block: BlockId) -> Slab {
        self.blocks
            .get(&block)
            .expect("a block is not used after it was freed")
            .slab
    }

    /// Frees a block.
    ///
    /// # Panics
    /// The block was freed before.
    pub fn free(&mut self, block: BlockId) {
        let Block { kind, owner, slab } =
            self.blocks.remove(&block).expect("a block is freed once");
        self.arena.vacate(slab);
        *kind_bytes(&mut self.usage, kind) -= slab.bytes;
        if let Some(model) = owner.and_then(|model| self.models.get_mut(&model)) {
            model.blocks -= 1;
            *kind_bytes(&mut model.usage, kind) -= slab.bytes;
        }
        self.assert_ledger();
    }
}

fn kind_bytes(usage: &mut Usage, kind: BlockKind) -> &mut u64 {
    match kind {
        BlockKind::Kv => &mut usage.kv,
        BlockKind::Scratch => &mut usage.scratch,
        BlockKind::Staging => &mut usage.staging,
    }
}
