//! Copies KV pages and states to host memory and back, and makes room there.
//!
//! What has to leave the device is copied behind the device's queued work, and its block is free at
//! once: whoever gets the block writes to it after the copy. So nobody waits for a copy. Only the
//! first copies wait for the allocation of host memory, or all if `always` is set.

use rocmforge_device::Plan;
use rocmforge_model::Model;
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, Slab};

use crate::api::When;
use crate::features::host_kv::{HostKv, HostSlot, pays};
use crate::features::prefix_cache::{Age, CachedPrefix, HeldSlots, NodeId, Realm, SlotLocation};
use crate::memory::Memory;

/// Why a page is not kept in the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotSaved {
    /// The place in host memory is being pinned: the page could be kept some milliseconds later.
    NotYet,
    /// There is no room, it is not worth it, or the device failed.
    Never,
}

/// What the host's memory had before it was given back.
pub(crate) struct ClosedHost {
    bytes: u64,
    /// Maximum bytes of KV pages and weights together, and of weights.
    pages: u64,
    weights: u64,
}

impl Memory {
    /// Lets KV pages use what weights leave of `bytes` bytes of host memory, if the device supports
    /// that.
    pub(crate) fn open_host_kv(&mut self, mode: When, bytes: u64) {
        let bytes = bytes & !(rocmforge_device::ALIGNMENT - 1);
        if mode != When::Never {
            let bytes = self.store.device.set_aside(bytes).unwrap_or(0);
            self.host_kv = HostKv::new(bytes, mode == When::Always);
        }
    }

    /// Bytes of host memory that weights and KV pages have allocated.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.cpu.kept_bytes() + self.host_kv.taken()
    }

    /// Limits weights and KV pages in host memory to `bytes` together, at most the configured
    /// budget. Memory beyond that is returned to the system, KV pages first.
    pub(crate) fn limit_host(&mut self, bytes: u64) {
        self.host_kv.set_limit(bytes);
        self.cpu.limit_kept(bytes);
        self.fit_host_kv();
    }

    /// Returns all unused host memory to the system and sets its limits to zero;
    /// [`Memory::open_host`] restores them from the returned value.
    pub(crate) fn close_host(&mut self) -> ClosedHost {
        let closed = ClosedHost {
            bytes: self.host_bytes(),
            pages: self.host_kv.limit(),
            weights: self.cpu.limit(),
        };
        self.limit_host(0);
        closed
    }

    /// Restores the limits of host memory after [`Memory::close_host`]; memory is allocated when it
    /// is needed. Returns the bytes that had to be given up for that.
    pub(crate) fn open_host(&mut self, closed: ClosedHost) -> u64 {
        let freed = closed.bytes.saturating_sub(self.host_bytes());
        self.host_kv.set_limit(closed.pages);
        self.cpu.limit_kept(closed.weights);
        self.fit_host_kv();
        freed
    }

    /// Adapts the room for KV pages after weights in host memory were added or freed.
    pub(crate) fn fit_host_kv(&mut self) {
        let end = self.host_kv.beside(self.cpu.kept_bytes());
        let end = end & !(rocmforge_device::ALIGNMENT - 1);
        if end == self.host_kv.end() {
            return;
        }
        if self.host_kv.highest() > end {
            for id in self.prefixes.stored_beyond(end) {
                let n = self.prefixes.drop_stored(id);
                self.host_kv.count_dropped(n);
            }
            self.sweep_host_kv();
        }
        // What is on its way back stays until it is there.
        let end = end.max(self.host_kv.highest());
        self.host_kv.set_end(end);
        if let Err(error) = self.store.device.set_aside(end) {
            self.store.note_loss(&error);
        }
    }

    /// Frees the slots of host memory that are no longer used.
    pub(crate) fn sweep_host_kv(&mut self) {
        for stored in self.prefixes.take_loose() {
            self.host_kv.free(stored);
        }
    }

    /// Whether copying `bytes` over the link `times` times takes less time than computing the
    /// `rows` rows of the model that they save.
    fn pays(&mut self, model: ModelId, bytes: u64, times: u32, rows: usize) -> bool {
        if self.host_kv.is_always() {
            return true;
        }
        let link = self
            .store
            .device
            .pace(1)
            .map(|pace| pace.upload_bytes_per_s);
        pays(bytes, times, rows, link, self.host_kv.row_seconds(model))
    }

    /// Finds a slot of `bytes` bytes in host memory for content of age `age`; older content is
    /// evicted for it.
    fn host_kv_room(&mut self, bytes: u64, age: Option<Age>) -> Option<HostSlot> {
        loop {
            if let Some(stored) = self.host_kv.take(bytes) {
                return Some(stored);
            }
            let oldest = self.prefixes.oldest_stored()?;
            if age.is_some_and(|age| age <= oldest) {
                return None;
            }
            let n = self.prefixes.drop_stored(oldest.2);
            self.host_kv.count_dropped(n);
            self.sweep_host_kv();
        }
    }

    /// Copies a range of the device to the host's memory.
    ///
    /// # Errors
    /// [`NotSaved`]: nothing was copied.
    fn save(&mut self, from: Slab, age: Option<Age>) -> Result<HostSlot, NotSaved> {
        let stored = self.host_kv_room(from.bytes, age).ok_or(NotSaved::Never)?;
        let waits = self.host_kv.is_always();
        match self
            .store
            .device
            .save(from.offset, stored.at, from.bytes, waits)
        {
            Ok(true) => return Ok(stored),
            Ok(false) => {
                self.host_kv.free(stored);
                return Err(NotSaved::NotYet);
            }
            Err(error) => {
                self.store.note_loss(&error);
                tracing::debug!(%error, "a page is not kept in the host's memory");
                self.host_kv.free(stored);
                if let rocmforge_device::Error::Memory { .. } = error {
                    self.host_kv.refused(stored, self.cpu.kept_bytes());
                }
            }
        }
        Err(NotSaved::Never)
    }

    /// Takes what a node has off the device and keeps it in the host's memory.
    ///
    /// # Errors
    /// [`NotSaved`]: nothing has changed.
    pub(crate) fn copy_to_host(&mut self, id: NodeId) -> Result<(), NotSaved> {
        let slots = self.prefixes.on_device(id);
        if !self.host_kv.is_on() || slots.is_empty() {
            return Err(NotSaved::Never);
        }
        let model = self.prefixes.model(id);
        let state = self.host_kv.state_slot(model);
        // Who goes on from a state need not compute what is before it.
        let rows = match slots.iter().any(|(slot, _)| Some(*slot) == state) {
            true => self.prefixes.positions(id),
            false => KV_PAGE_TOKENS,
        };
        let bytes = slots.iter().map(|(_, slab)| slab.bytes).sum();
        if !self.pays(model, bytes, 2, rows) {
            return Err(NotSaved::Never);
        }
        let age = Some(self.prefixes.age(id));
        let mut saved = Vec::with_capacity(slots.len());
        for &(slot, slab) in &slots {
            match self.save(slab, age) {
                Ok(stored) => saved.push((slot, stored)),
                Err(not_saved) => {
                    saved.into_iter().for_each(|(_, s)| self.host_kv.free(s));
                    self.fit_host_kv();
                    return Err(not_saved);
                }
            }
        }
        self.host_kv.count_saved(saved.len());
        for (slot, stored) in saved {
            let block = self.prefixes.store(id, slot, stored);
            self.store.free(block);
        }
        Ok(())
    }

    /// Copies a state to host memory, into an empty slot of a node. Returns whether it did.
    pub(crate) fn copy_state_to_host(
        &mut self,
        node: NodeId,
        slot: usize,
        from: Slab,
        model: ModelId,
    ) -> bool {
        let worth = self.host_kv.is_on() && !self.prefixes.has(node, slot) && {
            let rows = self.prefixes.positions(node);
            self.pays(model, from.bytes, 2, rows)
        };
        let Some(stored) = worth.then(|| self.save(from, None).ok()).flatten() else {
            self.fit_host_kv();
            return false;
        };
        // To make room may have cost the node.
        let kept = self.prefixes.put_stored(node, slot, stored);
        match kept {
            true => self.host_kv.count_saved(1),
            false => self.host_kv.free(stored),
        }
        kept
    }

    /// Finds the cached prefix that a sequence of these tokens can begin with. All pages that the
    /// sequence will use are on the device and held until [`Memory::let_go`]; the state is not
    /// held.
    pub(crate) fn find_prefix(
        &mut self,
        realm: Realm,
        of: &Model,
        tokens: &[u32],
        most: usize,
        predicts: bool,
    ) -> (CachedPrefix, HeldSlots) {
        let plan = of.plan();
        if self.host_kv.is_on() {
            let found = self.prefixes.find(realm, tokens, most, plan, true);
            let needed = self.needed(of, &found.nodes, predicts);
            for &(node, slot) in &needed {
                self.prefixes.hold(node, slot);
            }
            let last = found.nodes.last();
            let state = last.filter(|_| plan.state_elements > 0);
            // It is copied, wherever it is; meanwhile it stays there.
            let state = state.map(|&node| (node, plan.kv.len()));
            state.inspect(|&(node, slot)| {
                self.prefixes.hold(node, slot);
            });
            let there = needed
                .iter()
                .all(|&(node, slot)| self.bring_back(node, slot));
            state.inspect(|&(node, slot)| self.prefixes.let_go(node, slot));
            if there {
                return (found, needed);
            }
            self.let_go(needed);
        }
        let found = self.prefixes.find(realm, tokens, most, plan, false);
        let needed = self.needed(of, &found.nodes, predicts);
        let here = |&(node, slot): &(NodeId, usize)| {
            matches!(
                self.prefixes.place(node, slot),
                Some(SlotLocation::Device(..))
            )
        };
        let needed: HeldSlots = needed.into_iter().filter(here).collect();
        for &(node, slot) in &needed {
            self.prefixes.hold(node, slot);
        }
        (found, needed)
    }

    /// The slots of these nodes that a sequence which continues after them reads.
    fn needed(&self, of: &Model, nodes: &[NodeId], predicts: bool) -> HeldSlots {
        let plan: &Plan = of.plan();
        let mut needed = HeldSlots::new();
        for (slot, group) in plan.kv.iter().enumerate() {
            let first = group.first_page(nodes.len() * KV_PAGE_TOKENS);
            needed.extend(nodes.iter().skip(first).map(|&node| (node, slot)));
        }
        if let Some(block) = of.predictor().filter(|_| predicts) {
            let first = crate::request::kv::predicting_slot(plan);
            let slots = first..first + block.kv.len();
            let all = nodes
                .iter()
                .flat_map(|&n| slots.clone().map(move |s| (n, s)));
            needed.extend(all.filter(|&(n, s)| self.prefixes.has(n, s)));
        }
        needed
    }

    /// Releases held slots of the prefix cache.
    pub(crate) fn let_go(&mut self, held: HeldSlots) {
        for (node, slot) in held {
            self.prefixes.let_go(node, slot);
        }
    }

    /// Copies a held slot back to the device if it is in host memory. Returns whether it is on the
    /// device now.
    fn bring_back(&mut self, node: NodeId, slot: usize) -> bool {
        let Some(SlotLocation::Host(stored)) = self.prefixes.place(node, slot) else {
            return true;
        };
        let model = self.prefixes.model(node);
        if !self.pays(model, stored.bytes, 1, KV_PAGE_TOKENS) {
            return false;
        }
        let Ok((block, slab)) = self.reserve(BlockKind::Kv, Some(model), stored.bytes) else {
            return false;
        };
        if !self.restore(stored, slab.offset, block) {
            return false;
        }
        self.prefixes.bring_back(node, slot, (block, slab));
        self.sweep_host_kv();
        true
    }

    /// Copies cached content to a block that a sequence owns. Returns whether it did; if not, the
    /// block is freed.
    pub(crate) fn copy_to(
        &mut self,
        from: SlotLocation,
        to: Slab,
        (block, model): (BlockId, ModelId),
    ) -> bool {
        let from = match from {
            SlotLocation::Device(_, from) => from,
            SlotLocation::Host(stored) => return self.restore(stored, to.offset, block),
        };
        let copied = self
            .store
            .device
            .move_slab(from.offset, to.offset, to.bytes);
        if let Err(error) = copied {
            let error = self.store.device_error(Some(model), error);
            tracing::debug!(%error, "a kept state is not used");
            self.store.free(block);
            return false;
        }
        true
    }

    /// Copies content from host memory to a block of the device. Returns whether it did; if not,
    /// the block is freed.
    fn restore(&mut self, from: HostSlot, to: u64, block: BlockId) -> bool {
        let restored = self.store.device.restore(from.at, to, from.bytes);
        if let Err(error) = restored {
            self.store.note_loss(&error);
            tracing::debug!(%error, "a page does not come back from the host's memory");
            self.store.free(block);
            return false;
        }
        self.host_kv.count_restored();
        true
    }
}
