//! How much of the budget cached prefixes may take, and when they are evicted.
//!
//! Weights that a running request needs have priority: a cached prefix saves its computation once,
//! a missing weight is uploaded for every pass. Weights that nobody needs now can be uploaded again
//! several times faster than a prompt is computed; they are evicted for prefixes, up to a part of
//! the budget.

use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, Slab};

use crate::features::host_kv::copies::NotSaved;
use crate::features::prefix_cache::{NodeId, Realm};
use crate::memory::Memory;

/// Cached prefixes that no request uses take at most one part in this many of the budget, unless
/// preempted requests had more.
const PART_MAX: u64 = 4;

/// Cached prefixes take at most one part in this many of the budget while weights of running
/// requests are streamed: there prompts are computed slowest.
const PART_STREAMED: u64 = 16;

/// Bytes above the limit that leave the device in a turn of the loop while requests run: about a
/// page.
const BYTES_WHILE_BUSY: u64 = 4 << 20;

/// Bytes above the limit that leave the device in a turn of the loop while no request runs.
const BYTES_WHILE_IDLE: u64 = 256 << 20;

/// There at most one part in so many of what is missing is missing for the sake of cached prefixes.
const PART_MISSING: u64 = 4;

impl Memory {
    /// Sets the bytes of weights that have priority over cached prefixes, and the bytes of KV cache
    /// that preempted requests had.
    pub(crate) fn set_wanted_weights(&mut self, bytes: u64, preempted_kv: u64) {
        (self.wanted_weights, self.preempted_kv) = (bytes, preempted_kv);
        self.trim_prefixes(0);
    }

    /// Maximum bytes of unused cached prefixes while `more` bytes are about to be reserved.
    pub(super) fn prefix_limit(&self, more: u64) -> u64 {
        let usage = self.store.cache.usage();
        let in_use = usage.blocks() - self.prefixes.kept_bytes();
        let left = self.store.budget().saturating_sub(in_use + more);
        match left.checked_sub(self.wanted_weights) {
            Some(free) => free.min((self.store.budget() / PART_MAX).max(self.preempted_kv)),
            None => {
                let missing = self.wanted_weights - left;
                (missing / PART_MISSING)
                    .min(self.store.budget() / PART_STREAMED)
                    .min(left / 2)
            }
        }
    }

    /// Gives up what is above the limit, the oldest first. The end of a long prompt brings
    /// gigabytes above it, and what leaves the device is copied. So beyond the `more` bytes that
    /// are about to be reserved, and while nothing else wants the room, a turn of the loop gives
    /// up [`Memory::trim_left`] at most, and what is to be written
    /// to disk, or its place in the host's memory is being pinned, stays until that is done.
    pub(crate) fn trim_prefixes(&mut self, more: u64) {
        if self.prefixes.kept_bytes() == 0 {
            return;
        }
        let limit = self.prefix_limit(more);
        let unwanted = self.unwanted_bytes();
        let first = self.prefixes.kept_bytes();
        while self.prefixes.kept_bytes() > limit {
            let kept = self.prefixes.kept_bytes();
            // Otherwise weights that nobody wants now would go for what is reserved.
            let makes_room = first - kept < more;
            let may_stay = !makes_room && kept.saturating_add(more) <= unwanted;
            let oldest = self.prefixes.oldest().filter(|_| may_stay);
            let stays = may_stay && self.trim_left == 0
                || oldest.is_some_and(|node| self.waits_to_be_written(node));
            if stays || !self.give_up_if(may_stay) {
                return;
            }
            if may_stay {
                let gone = kept.saturating_sub(self.prefixes.kept_bytes());
                self.trim_left = self.trim_left.saturating_sub(gone);
            }
        }
    }

    /// Begins a turn of the engine's loop behind passes, if any ran: gives up more of what is above
    /// the limit. Whether there is more of it that could go in the next turn.
    pub(crate) fn trim_in_turn(&mut self, is_busy: bool) -> bool {
        self.trim_left = match is_busy {
            true => BYTES_WHILE_BUSY,
            false => BYTES_WHILE_IDLE,
        };
        self.trim_waits = false;
        self.trim_prefixes(0);
        self.trim_left == 0
    }

    /// Bytes of the budget that neither blocks in use nor wanted weights need.
    fn unwanted_bytes(&self) -> u64 {
        let in_use = self.store.cache.usage().blocks() - self.prefixes.kept_bytes();
        let left = self.store.budget().saturating_sub(in_use);
        left.saturating_sub(self.wanted_weights)
    }

    /// Evicts a speculatively kept state, else the oldest unused prefix content: it moves to host
    /// memory if that is worthwhile, or is dropped. Returns whether there was any.
    pub(crate) fn give_up_oldest(&mut self) -> bool {
        self.give_up_if(false)
    }

    /// [`Memory::give_up_oldest`]; a prefix that `may_stay` stays while its copy to disk would have
    /// to wait, and while its place in the host's memory is being pinned: then
    /// [`Memory::trim_waits`] is set.
    fn give_up_if(&mut self, may_stay: bool) -> bool {
        if self.give_up_spare(None) {
            return true;
        }
        let oldest = self.prefixes.oldest();
        if oldest.is_some_and(|node| !self.write_before_eviction(node, may_stay)) {
            return false;
        }
        match oldest.map(|node| self.copy_to_host(node)) {
            Some(Ok(())) => true,
            Some(Err(NotSaved::NotYet)) if may_stay => {
                self.trim_waits = true;
                false
            }
            _ => self.drop_oldest(),
        }
    }

    fn drop_oldest(&mut self) -> bool {
        let mut freed = Vec::new();
        let some = self.prefixes.give_up(&mut freed);
        self.host_kv.count_dropped(freed.len());
        self.free_all(freed);
        some
    }

    /// Evicts everything on the device that no sequence needs, including draft KV caches. Returns
    /// the bytes of cached prefixes among it.
    pub(crate) fn give_up_all(&mut self) -> u64 {
        while self.give_up_draft_kv() {}
        let kept = self.prefixes.kept_bytes();
        while self.prefixes.kept_bytes() > 0 && self.give_up_oldest() {}
        kept - self.prefixes.kept_bytes()
    }

    /// Drops all prefix content that no sequence uses, also in host memory. Returns the bytes freed
    /// on the device.
    pub(crate) fn drop_all(&mut self) -> u64 {
        let kept = self.prefixes.kept_bytes();
        while let Some((_, _, node)) = self.prefixes.oldest_stored() {
            let n = self.prefixes.drop_stored(node);
            self.host_kv.count_dropped(n);
        }
        while self.prefixes.kept_bytes() > 0 && self.drop_oldest() {}
        self.sweep_host_kv();
        kept - self.prefixes.kept_bytes()
    }

    /// Drops a model's prefix content that no sequence uses. Returns the bytes freed on the device.
    pub(crate) fn forget_prefixes(&mut self, model: ModelId) -> u64 {
        let kept = self.prefixes.kept_bytes();
        let mut freed = Vec::new();
        self.prefixes.forget(model, &mut freed);
        self.free_all(freed);
        kept - self.prefixes.kept_bytes()
    }

    /// Drops a model's cached prefixes, also on disk, because their content may be wrong.
    pub(crate) fn distrust_prefixes(&mut self, model: ModelId) {
        self.distrust_disk(model);
        self.forget_prefixes(model);
    }

    /// Frees blocks of cached prefixes, and slots of host memory that are no longer used.
    fn free_all(&mut self, blocks: Vec<BlockId>) {
        blocks.into_iter().for_each(|block| self.store.free(block));
        self.sweep_host_kv();
    }

    /// Drops the content of one slot, unless a sequence uses it.
    pub(crate) fn give_up(&mut self, node: NodeId, slot: usize) {
        let block = self.prefixes.take(node, slot);
        self.free_all(block.into_iter().collect());
    }

    /// Adds a node for these tokens below a parent, with the given number of slots; `None` if the
    /// parent was evicted.
    pub(crate) fn add_prefix(
        &mut self,
        realm: Realm,
        parent: Option<NodeId>,
        tokens: &[u32],
        slots: usize,
    ) -> Option<NodeId> {
        let mut freed = Vec::new();
        let node = self.prefixes.add(realm, parent, tokens, slots, &mut freed);
        self.free_all(freed);
        node
    }

    /// Keeps a copy of a sequence's state in an empty slot, if the device or host memory has room.
    /// Returns whether it is kept.
    pub(crate) fn keep_state(
        &mut self,
        node: NodeId,
        slot: usize,
        state: BlockId,
        model: ModelId,
    ) -> bool {
        self.host_kv.note_state_slot(model, slot);
        let from = self.store.cache.block(state);
        self.keep_state_here(node, slot, from, model)
            || self.copy_state_to_host(node, slot, from, model)
    }

    fn keep_state_here(&mut self, node: NodeId, slot: usize, from: Slab, model: ModelId) -> bool {
        let limit = self.prefix_limit(from.bytes);
        if from.bytes > limit {
            return false;
        }
        // What is above the limit leaves in portions.
        let most = limit.max(self.prefixes.kept_bytes());
        while self.prefixes.kept_bytes() + from.bytes > most {
            if !self.give_up_oldest() {
                return false;
            }
        }
        self.copy_state(node, slot, from, model)
    }

    /// Copies a state into an empty slot, on the device. Returns whether it did.
    pub(super) fn copy_state(
        &mut self,
        node: NodeId,
        slot: usize,
        from: Slab,
        model: ModelId,
    ) -> bool {
        let Ok((block, to)) = self.reserve(BlockKind::Kv, Some(model), from.bytes) else {
            return false;
        };
        let copied = self
            .store
            .device
            .move_slab(from.offset, to.offset, from.bytes);
        if let Err(error) = copied {
            // A loss is noted, and ends the engine at its next look.
            let error = self.store.device_error(Some(model), error);
            tracing::debug!(%error, "a state is not kept");
            self.store.free(block);
            return false;
        }
        // The reservation may have cost the node.
        let kept = self.prefixes.put(node, slot, (block, to), false);
        if !kept {
            self.store.free(block);
        }
        kept
    }
}
