//! Operations on the device's whole memory: reallocation with another size, compaction, and the
//! check after the machine slept.

use std::collections::HashMap;

use rocmforge_device::{Loss, LossKind};
use rocmforge_tensor_cache::{BlockKind, ModelId, SegmentId, SegmentState, Slab};

use crate::api::error::Error;
use crate::store::Store;

/// Number of bytes of a segment that are remembered.
const WITNESS_BYTES: usize = 16;

/// The first bytes of segments on the device.
pub(super) type Witnesses = HashMap<SegmentId, [u8; WITNESS_BYTES]>;

impl Store {
    /// Waits for all uploads under way.
    pub(crate) fn wait_all(&mut self) {
        while !self.under_way.is_empty() {
            self.wait_any();
        }
    }

    /// Moves KV pages and states to the lowest possible offsets. Returns the bytes moved.
    pub(crate) fn gather(&mut self) -> Result<u64, Error> {
        let mut moved = 0;
        for (_, from, to) in self.cache.gather(BlockKind::Kv) {
            let ran = self.device.move_slab(from.offset, to.offset, from.bytes);
            ran.map_err(|error| self.device_error(None, error))?;
            moved += from.bytes;
        }
        Ok(moved)
    }

    /// Reallocates the arena; see [`Memory::renew`](crate::memory::Memory::renew). No upload may be
    /// in flight.
    pub(crate) fn renew(
        &mut self,
        bytes: u64,
        otherwise: u64,
        keep: &[Slab],
    ) -> Result<u64, Error> {
        let models: Vec<(ModelId, usize)> = self
            .sources
            .iter()
            .map(|(&model, source)| (model, source.layouts.len()))
            .collect();
        for (model, segments) in models {
            for index in 0..segments as u32 {
                let segment = SegmentId { model, index };
                let gone = self.cache.evict_corrupt(segment, &mut self.actions);
                assert!(gone, "{segment} is in use while the arena is renewed");
            }
        }
        self.execute()?;
        // Blocks do not move.
        let least = self
            .cache
            .arena_end()
            .max(crate::guards::budget::BUDGET_MIN);
        let mut sizes = vec![bytes.max(least)];
        let mut size = otherwise.max(least);
        while size > least {
            sizes.push(size);
            size = (size / 8 * 7) & !(rocmforge_device::ALIGNMENT - 1);
        }
        sizes.push(least);
        let keep: Vec<(u64, u64)> = keep.iter().map(|s| (s.offset, s.bytes)).collect();
        let capacity = self
            .device
            .renew(&sizes, &keep)
            .map_err(|e| self.device_error(None, e))?;
        let budget = bytes.min(capacity);
        self.cache.set_budget(budget, &mut self.actions);
        self.execute()?;
        self.free_bytes = self.device.free_bytes();
        Ok(budget)
    }

    /// Whether the driver's allocations exceed what the capacity needs: there was no memory for a
    /// smaller arena beside the old one.
    pub(crate) fn holds_unused(&self) -> bool {
        self.device
            .memory_use()
            .is_some_and(|m| m.unused_bytes() > 0)
    }

    /// The resident segments and their slabs.
    fn resident(&self) -> Vec<(SegmentId, Slab)> {
        // Of many models hardly one has any.
        let models = self.sources.keys();
        let some = models.filter(|&&model| !self.cache.is_absent(model));
        let resident = some.flat_map(|&model| {
            let segments = self.cache.residency(model).unwrap_or_default();
            (0..).zip(segments).filter_map(move |(index, status)| {
                let SegmentState::Resident(slab) = status.residency else {
                    return None;
                };
                Some((SegmentId { model, index }, slab))
            })
        });
        resident.collect()
    }

    /// Before the engine rests: remembers the first bytes of the resident segments at both ends of
    /// the arena. A segment always has the same content, so each is read once.
    pub(crate) fn remember(&mut self) {
        if self.device.volatile_memory().is_none() {
            return;
        }
        let all = self.resident();
        let first = all.iter().min_by_key(|(_, slab)| slab.offset);
        let last = all.iter().max_by_key(|(_, slab)| slab.offset);
        for &(segment, slab) in first.into_iter().chain(last) {
            let mut bytes = [0; WITNESS_BYTES];
            if self.witnesses.contains_key(&segment) || slab.bytes < WITNESS_BYTES as u64 {
                continue;
            }
            if let Err(error) = self.device.read_slab(slab.offset, &mut bytes) {
                self.note_loss(&error);
                return;
            }
            self.witnesses.insert(segment, bytes);
        }
    }

    /// After the machine slept: checks that the device works and its memory is intact, by the
    /// device's own marks and by the remembered bytes of resident segments.
    ///
    /// # Errors
    /// The device is lost.
    pub(crate) fn check(&mut self) -> Result<(), rocmforge_device::Error> {
        let Some(device) = self.device.volatile_memory() else {
            return Ok(());
        };
        device.check()?;
        let known: Vec<_> = self
            .resident()
            .into_iter()
            .filter_map(|(segment, slab)| Some((segment, slab, *self.witnesses.get(&segment)?)))
            .collect();
        for (segment, slab, expected) in known {
            let mut bytes = [0; WITNESS_BYTES];
            self.device.read_slab(slab.offset, &mut bytes)?;
            if bytes != expected {
                let reason = format!(
                    "{segment} is not what it was; the device's memory was reset or lost power"
                );
                let loss = Loss::new(LossKind::ContentsLost, reason);
                return Err(rocmforge_device::Error::Lost(loss));
            }
        }
        Ok(())
    }
}
