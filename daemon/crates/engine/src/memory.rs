//! The memory of the device and of the host, and who shares it: weights, the prefix cache, KV
//! caches of draft models, and what the CPU computes with.
//!
//! [`Store`] knows the device and its cache. This module decides what is given up if a weight or a
//! KV page does not fit, because only here all holders of memory are known:
//!
//! ```text
//! no room --> wait for uploads ahead of need --> give up KV caches of draft models
//!         --> give up the oldest cached prefix --> Error::Exhausted
//! ```

use std::sync::Arc;

use rocmforge_device::Device;
use rocmforge_tensor_cache::{
    Acquired, BlockId, BlockKind, Cache, Cleared, Error as CacheError, ModelId, SegmentId, Slab,
};

use crate::api::error::{Error, from_cache, from_unregister};
use crate::api::{PreloadRoom, RequestCacheUse};
use crate::features::cpu_compute::CpuCompute;
use crate::features::equal_segments::EqualSegments;
use crate::features::host_kv::HostKv;
use crate::features::kv_disk::KvDisk;
use crate::features::prefix_cache::Prefixes;
use crate::features::speculation::draft_kv::DraftKvCache;
use crate::store::{Resident, Store};

/// The device's memory with its segment cache, and the features that hold some of it.
pub(crate) struct Memory {
    pub(crate) store: Store,
    /// State of CPU compute.
    pub(crate) cpu: CpuCompute,
    /// Cached prefixes of prompts (KV pages and states) in device memory.
    pub(crate) prefixes: Prefixes,
    /// The part of the cached prefixes that is in host memory.
    pub(crate) host_kv: HostKv,
    /// The KV cache on disk, if there is one.
    pub(crate) kv_disk: Option<KvDisk>,
    /// Segments of several models with the same content.
    pub(crate) equal: EqualSegments,
    /// KV caches that draft models hold for sequences.
    pub(crate) draft_kv: DraftKvCache,
    /// Bytes of weights that are kept in preference to cached prefixes that no sequence uses.
    pub(crate) wanted_weights: u64,
    /// Bytes of KV cache that preempted requests had: as many bytes of cached prefixes may be kept
    /// until the requests resume.
    pub(crate) preempted_kv: u64,
    /// Bytes of cached prefixes that may leave the device in this turn of the loop although nothing
    /// else wants their room.
    pub(crate) trim_left: u64,
    /// A cached prefix above the limit is to leave the device once its place in the host's memory
    /// is pinned.
    pub(crate) trim_waits: bool,
}

/// A held segment: resident, or with its upload in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Acquisition {
    /// The segment is resident in this slab.
    Resident(Slab),
    /// The segment's upload into this slab is in flight.
    InFlight(Slab),
}

impl Memory {
    pub(crate) fn new(device: Box<dyn Device>, cache: Cache, cpu: CpuCompute) -> Self {
        Self {
            store: Store::new(device, cache),
            cpu,
            prefixes: Prefixes::default(),
            host_kv: HostKv::default(),
            kv_disk: None,
            equal: EqualSegments::default(),
            draft_kv: DraftKvCache::default(),
            wanted_weights: 0,
            preempted_kv: 0,
            trim_left: u64::MAX,
            trim_waits: false,
        }
    }

    /// The budget in force, in bytes.
    pub(crate) fn budget(&self) -> u64 {
        self.store.budget()
    }

    /// Reserves the block of the ledger that the device asks for (vendor libraries and kernels need
    /// memory outside the arena) and gives it to the device.
    pub(crate) fn take_reserve(&mut self) -> Result<(), Error> {
        let budget = self.budget();
        let bytes = self.store.device.reserve_bytes(budget);
        if bytes > 0 {
            let (_, slab) = self.reserve(BlockKind::Staging, None, bytes)?;
            self.store.set_reserve(slab)?;
        }
        Ok(())
    }

    /// Unregisters a model that nobody uses, after its uploads in flight have ended.
    pub(crate) fn unregister(&mut self, model: ModelId) -> Result<(), Error> {
        self.store.drop_uploads(model);
        self.write_all_notes();
        self.give_up_reads(|of| of == model);
        self.forget_prefixes(model);
        self.forget_draft_kv(model);
        if let Err(error) = self.store.unregister_segments(model) {
            let source = self.store.sources.get(&model);
            return Err(from_unregister(source.map_or("?", |s| &s.name), error));
        }
        self.store.execute_and_discard()?;
        self.store.forget_contents(model);
        self.equal.forget(model);
        // What the host brings of it is waited for.
        let waiting = self.store.wait_for_file(model);
        self.cpu.forget(model);
        drop(waiting);
        self.host_kv.forget(model);
        if let Some(disk) = &mut self.kv_disk {
            disk.forget(model);
        }
        self.fit_host_kv();
        self.store.forget_source(model);
        Ok(())
    }

    /// Notes uploads that have ended. A failed one is forgotten: whoever needs the segment starts a
    /// new upload and gets its error.
    pub(crate) fn collect(&mut self) {
        self.store.collect_uploads();
        for model in self.store.spoiled_models() {
            // Cached prefixes may have been computed with it.
            self.distrust_prefixes(model);
        }
        self.store.evict_spoiled();
        self.equal.share(&mut self.store);
    }

    /// Makes a segment resident and holds it until [`Store::release`]. Does not poll uploads in
    /// flight: callers run [`Memory::collect`] once before they acquire several segments.
    pub(crate) fn acquire(
        &mut self,
        segment: SegmentId,
        counts: &mut RequestCacheUse,
    ) -> Result<Slab, Error> {
        let slab = match self.begin_acquire(segment, counts)? {
            Acquisition::Resident(slab) => return Ok(slab),
            Acquisition::InFlight(slab) => slab,
        };
        self.store.wait_for_held(segment)?;
        Ok(slab)
    }

    /// [`Memory::acquire`] that does not wait for an upload: the segment is held, and its upload
    /// may be in flight.
    pub(crate) fn begin_acquire(
        &mut self,
        segment: SegmentId,
        counts: &mut RequestCacheUse,
    ) -> Result<Acquisition, Error> {
        let mut collected = false;
        loop {
            match self.store.try_acquire(segment) {
                Ok(Acquired::Resident(slab)) => {
                    counts.hits += 1;
                    return Ok(Acquisition::Resident(slab));
                }
                Ok(Acquired::InFlight(slab) | Acquired::Started(slab)) => {
                    counts.misses += 1;
                    counts.uploaded_bytes += slab.bytes;
                    if let Err(error) = self.store.execute() {
                        self.store.release(segment);
                        return Err(error);
                    }
                    return Ok(Acquisition::InFlight(slab));
                }
                Err(CacheError::NoRoom { .. }) if !collected => {
                    self.collect();
                    collected = true;
                }
                // What is in the way may be uploads that were started ahead of need.
                Err(CacheError::NoRoom { .. }) if self.store.under_way() > 0 => {
                    self.store.wait_any();
                }
                Err(CacheError::NoRoom { .. }) if self.make_way() => {}
                Err(error) => return Err(from_cache(error)),
            }
        }
    }

    /// Uploads a segment ahead of its use, and waits for it; the segment is held as by
    /// [`Memory::acquire`]. `None` if `room` has no place for it.
    pub(crate) fn bring(
        &mut self,
        segment: SegmentId,
        room: PreloadRoom,
        counts: &mut RequestCacheUse,
    ) -> Result<Option<Slab>, Error> {
        let has_room = match room {
            PreloadRoom::Free if self.store.device.is_closed() => false,
            PreloadRoom::Free => self.store.begin_bringing_into_free(segment)?,
            PreloadRoom::Idle => self.store.begin_bringing(segment)?,
            PreloadRoom::Any => true,
        };
        match has_room {
            true => self.acquire(segment, counts).map(Some),
            false => Ok(None),
        }
    }

    /// If all segments of a model are resident, counts a use of each and returns where they are.
    /// Nothing is held: the caller must be done with the addresses before it calls the cache again.
    pub(crate) fn all_resident(
        &mut self,
        model: ModelId,
        counts: &mut RequestCacheUse,
    ) -> Result<Option<Arc<Resident>>, Error> {
        self.collect();
        self.store.all_resident(model, counts)
    }

    /// Reserves a block of `bytes` bytes from the budget, and evicts weights for it if necessary.
    pub(crate) fn reserve(
        &mut self,
        kind: BlockKind,
        owner: Option<ModelId>,
        bytes: u64,
    ) -> Result<(BlockId, Slab), Error> {
        self.collect();
        self.trim_prefixes(bytes);
        loop {
            match self.store.try_reserve(kind, owner, bytes) {
                Ok(block) => {
                    if let Err(error) = self.store.execute() {
                        self.store.free(block);
                        return Err(error);
                    }
                    return Ok((block, self.store.cache.block(block)));
                }
                Err(CacheError::NoRoom { .. }) if self.store.under_way() > 0 => {
                    self.store.wait_any();
                }
                Err(CacheError::NoRoom { .. }) if self.make_way() => {}
                Err(error) => return Err(from_cache(error)),
            }
        }
    }

    /// Gives up memory that no request needs (draft KV caches, then cached prefixes), so that a
    /// request fits. Returns whether anything was given up.
    fn make_way(&mut self) -> bool {
        self.give_up_draft_kv() || self.give_up_oldest()
    }

    /// Gives up the draft model's KV cache that was used longest ago. Returns whether there was
    /// one.
    pub(crate) fn give_up_draft_kv(&mut self) -> bool {
        let Some(draft) = self.draft_kv.take_oldest() else {
            return false;
        };
        tracing::debug!(
            positions = draft.past,
            "a draft model's KV cache of a sequence is given up"
        );
        draft.free(self);
        true
    }

    /// Gives up all KV caches that a draft model holds for sequences.
    fn forget_draft_kv(&mut self, model: ModelId) {
        for draft in self.draft_kv.take_of(model) {
            draft.free(self);
        }
    }

    /// Whether a draft model's weights of `bytes` bytes fit beside the weights that running
    /// requests need. True also if the latter do not fit themselves: then they are streamed, and
    /// the cost of drafting is measured.
    pub(crate) fn leaves_room(&self, bytes: u64) -> bool {
        let in_use = self.store.cache.usage().blocks() - self.prefixes.kept_bytes();
        let left = self.budget().saturating_sub(in_use);
        match left.checked_sub(self.wanted_weights) {
            Some(free) => bytes <= free,
            None => true,
        }
    }

    /// Evicts all weights and cached prefixes that are not in use, of one model or of all, and
    /// returns the memory to the system.
    pub(crate) fn clear(&mut self, model: Option<ModelId>) -> Result<Cleared, Error> {
        self.collect();
        self.write_all_notes();
        let prefixes = match model {
            Some(model) => self.forget_prefixes(model),
            None => self.drop_all(),
        };
        let mut cleared = self.store.clear(model)?;
        cleared.freed += prefixes;
        Ok(cleared)
    }

    /// Compacts KV pages and states, so that free memory is contiguous. Evicts all weights that are
    /// not pinned or in use, and gives up the KV caches of draft models. Returns the bytes moved;
    /// who holds a page looks up its new place ([`SequenceMemory::locate`]).
    ///
    /// No pass may be under way.
    ///
    /// [`SequenceMemory::locate`]: crate::request::kv::SequenceMemory::locate
    pub(crate) fn gather(&mut self) -> Result<u64, Error> {
        self.store.wait_all();
        self.collect();
        self.give_up_reads(|_| true);
        while self.give_up_draft_kv() {}
        self.store.clear(None)?;
        let moved = self.store.gather()?;
        let cache = &self.store.cache;
        self.prefixes.moved(|block| cache.block(block));
        Ok(moved)
    }

    /// Changes the budget of the cache and of the arena to `bytes`. Returns how many bytes are
    /// still in use above it.
    pub(crate) fn set_budget(&mut self, bytes: u64) -> Result<u64, Error> {
        self.collect();
        if bytes < self.budget() {
            // They cannot move out of the way.
            self.give_up_all();
        }
        self.store.set_budget(bytes)
    }

    /// Returns all memory to the driver and allocates `bytes` of it again; if the driver refuses,
    /// `otherwise` bytes, and then as many as it gives. Returns the new budget in bytes. All
    /// weights are evicted; blocks stay, but of their content only that of the slabs in `keep`.
    /// Nothing may be in use.
    pub(crate) fn renew(
        &mut self,
        bytes: u64,
        otherwise: u64,
        keep: &[Slab],
    ) -> Result<u64, Error> {
        self.store.wait_all();
        self.collect();
        // What is not in `keep` is lost, also what came from the disk for who has not begun.
        self.give_up_reads(|_| true);
        self.give_up_all();
        self.store.renew(bytes, otherwise, keep)
    }
}
