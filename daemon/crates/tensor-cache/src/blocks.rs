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
    /// Reserves a block in the same ledger, evicting weights for it. It is never evicted, and
    /// moves by [`Cache::gather`] alone.
    ///
    /// # Errors
    /// `UnknownModel` for the owner; `OutOfRange` for 0 bytes or too many blocks; `NoRoom` and
    /// `NeverFits` as in `acquire`.
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

    /// Moves blocks of a kind as low as they go without anything else moving, the lowest first, so
    /// that what is free lies in one piece above them, but for holes before what stays. Returns
    /// each move, to be carried out in this order, with the semantics of memmove.
    ///
    /// Nothing but this moves a block: the caller knows everyone who remembers where one lies.
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

    /// Where a block lies, for as long as it is reserved and not moved by [`Cache::gather`].
    ///
    /// # Panics
    /// If it was freed.
    pub fn block(&self, block: BlockId) -> Slab {
        self.blocks
            .get(&block)
            .expect("a block is not used after it was freed")
            .slab
    }

    /// Gives a block back.
    ///
    /// # Panics
    /// If it was freed before.
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
