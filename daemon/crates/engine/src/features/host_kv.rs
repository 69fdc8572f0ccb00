//! The KV cache in host memory: KV pages and recurrent states that have to leave the device are
//! copied to the host, if copying them back takes less time than recomputing them.
//!
//! This module allocates the slots of host memory and decides; `host_kv/copies.rs` moves the bytes,
//! and [`crate::features::prefix_cache`] knows which prefix they belong to. The host's budget is
//! shared with the weights that the CPU computes with ([`crate::features::cpu_compute`]): weights
//! have priority, since each pass of a model that does not fit uses them; KV pages get the rest.
//!
//! *Invariant:* no two slots overlap, and each lies below the end (test
//! `places_do_not_overlap_and_come_back_as_one`).

pub(crate) mod copies;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::ModelId;

use crate::api::HostTier;

/// Weight of a new sample in a moving average.
const WEIGHT: f64 = 0.2;

/// A slot of host memory that holds a KV page or a recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostSlot {
    /// Offset of the slot's first byte.
    pub(crate) at: u64,
    /// Size of the slot in bytes.
    pub(crate) bytes: u64,
}

/// Measured prompt rate of a model, and where its states are kept.
#[derive(Debug, Default)]
struct ModelRates {
    /// Seconds that the device takes for a row of a prompt; `None` if not measured.
    row_seconds: Option<f64>,
    /// Index of the recurrent states among the slots of a prefix-cache node of this model.
    state_slot: Option<usize>,
}

/// Allocator of host memory slots for KV cache, and the measured rates of models.
#[derive(Debug, Default)]
pub(crate) struct HostKv {
    /// Maximum bytes of host memory for weights and KV pages together.
    most: u64,
    /// Current limit in bytes, below the budget under memory pressure.
    limit: u64,
    /// Whether evicted KV pages are kept even if recomputing them would be faster.
    always: bool,
    /// Slots have to end below this offset, in bytes.
    end: u64,
    /// Highest offset that slots have reached since they last had to shrink: host memory is
    /// allocated up to here.
    taken: u64,
    /// Free ranges below the end, by offset, with their bytes. No two touch.
    free: BTreeMap<u64, u64>,
    models: HashMap<ModelId, ModelRates>,
    counts: HostTier,
}

/// Whether copying bytes over the link takes less time than recomputing the rows. True if the rates
/// are not measured yet.
pub(crate) fn pays(
    bytes: u64,
    times: u32,
    rows: usize,
    link_bytes_per_s: Option<f64>,
    row_seconds: Option<f64>,
) -> bool {
    let (Some(link), Some(row)) = (link_bytes_per_s, row_seconds) else {
        return true;
    };
    bytes as f64 * f64::from(times) / link < rows as f64 * row
}

impl HostKv {
    /// A host KV cache of at most `most` bytes, weights included.
    pub(crate) fn new(most: u64, always: bool) -> Self {
        let mut host_kv = Self {
            most,
            limit: most,
            always,
            ..Self::default()
        };
        host_kv.set_end(most);
        host_kv
    }

    /// Whether there is a KV cache in host memory.
    pub(crate) fn is_on(&self) -> bool {
        self.end > 0
    }

    /// Whether KV pages are copied regardless of measured times.
    pub(crate) fn is_always(&self) -> bool {
        self.always
    }

    /// Bytes left for KV pages beside `weights` bytes of weights.
    pub(crate) fn beside(&self, weights: u64) -> u64 {
        self.most.min(self.limit).saturating_sub(weights)
    }

    /// Limits weights and KV pages together to `bytes`. The caller then moves the end of the pages.
    pub(crate) fn set_limit(&mut self, bytes: u64) {
        self.limit = bytes;
    }

    /// Maximum bytes of weights and KV pages together now.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of host memory allocated for slots, used and free ones, without memory that the device
    /// has pinned ahead.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Offset in bytes that slots have to end below now.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Offset in bytes at which the highest slot ends.
    pub(crate) fn highest(&self) -> u64 {
        let last = self.free.iter().next_back();
        let at_the_end = last.filter(|(at, bytes)| **at + **bytes == self.end);
        at_the_end.map_or(self.end, |(at, _)| *at)
    }

    /// Records that the device was closed, which returned the memory above the highest slot to the
    /// system.
    pub(crate) fn device_was_closed(&mut self) {
        self.taken = self.taken.min(self.highest());
    }

    /// Records that the system had no memory for a slot beside `weights` bytes of weights: the
    /// limit becomes what lies below the slot.
    pub(crate) fn refused(&mut self, place: HostSlot, weights: u64) {
        self.most = self.most.min(place.at + weights);
    }

    /// Moves the end of the area for slots to offset `end`. The caller has made sure that no slot
    /// lies beyond it.
    pub(crate) fn set_end(&mut self, end: u64) {
        let before = std::mem::replace(&mut self.end, end);
        self.taken = self.taken.min(end);
        if end > before {
            self.give_back(HostSlot {
                at: before,
                bytes: end - before,
            });
            return;
        }
        let beyond = self.free.split_off(&end);
        let mut gone: u64 = beyond.values().sum();
        if let Some((&at, bytes)) = self.free.iter_mut().next_back()
            && at + *bytes > end
        {
            gone += at + *bytes - end;
            *bytes = end - at;
        }
        assert_eq!(gone, before - end, "something lies behind the end");
    }

    /// Takes the lowest free slot of `bytes` bytes; `None` if there is no room.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<HostSlot> {
        let (&at, &free) = self.free.iter().find(|(_, free)| **free >= bytes)?;
        self.free.remove(&at);
        if free > bytes {
            self.free.insert(at + bytes, free - bytes);
        }
        self.counts.bytes += bytes;
        self.taken = self.taken.max(at + bytes);
        Some(HostSlot { at, bytes })
    }

    /// Frees a slot.
    pub(crate) fn free(&mut self, stored: HostSlot) {
        self.counts.bytes -= stored.bytes;
        self.give_back(stored);
    }

    fn give_back(&mut self, HostSlot { mut at, mut bytes }: HostSlot) {
        if let Some((&before, &free)) = self.free.range(..at).next_back() {
            assert!(before + free <= at, "a place is given back once");
            if before + free == at {
                self.free.remove(&before);
                (at, bytes) = (before, bytes + free);
            }
        }
        if let Some(behind) = self.free.remove(&(at + bytes)) {
            bytes += behind;
        }
        self.free.insert(at, bytes);
    }

    /// Records the time of a pass that had only rows of prompts.
    pub(crate) fn note_prompt(&mut self, model: ModelId, rows: usize, took: Duration) {
        if rows < KV_PAGE_TOKENS {
            // What a pass costs whatever it computes would count as the rows'.
            return;
        }
        let sample = took.as_secs_f64() / rows as f64;
        let row = &mut self.models.entry(model).or_default().row_seconds;
        let before = row.unwrap_or(sample);
        *row = Some(before + (sample - before) * WEIGHT);
    }

    /// Takes over the time of a row that an earlier process measured, until this process measures
    /// its own.
    pub(crate) fn recall_row(&mut self, model: ModelId, seconds: f64) {
        let row = &mut self.models.entry(model).or_default().row_seconds;
        row.get_or_insert(seconds);
    }

    /// Seconds that the device takes for a row of a prompt; `None` if not measured.
    pub(crate) fn row_seconds(&self, model: ModelId) -> Option<f64> {
        self.models.get(&model)?.row_seconds
    }

    /// Records at which index a model's states are among the slots of its prefix-cache nodes.
    pub(crate) fn note_state_slot(&mut self, model: ModelId, slot: usize) {
        self.models.entry(model).or_default().state_slot = Some(slot);
    }

    /// Index of a model's states among the slots of its prefix-cache nodes; `None` if none was
    /// kept.
    pub(crate) fn state_slot(&self, model: ModelId) -> Option<usize> {
        self.models.get(&model)?.state_slot
    }

    /// Forgets the state of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.models.remove(&model);
    }

    /// Counts `n` pages and states that were copied to host memory.
    pub(crate) fn count_saved(&mut self, n: usize) {
        self.counts.saved += n as u64;
    }

    /// Counts a page that was copied back to the device.
    pub(crate) fn count_restored(&mut self) {
        self.counts.restored += 1;
    }

    /// Counts `n` pages and states that were evicted without a copy.
    pub(crate) fn count_dropped(&mut self, n: usize) {
        self.counts.dropped += n as u64;
    }

    /// Counts `n` positions that a preempted request recomputes.
    pub(crate) fn count_again(&mut self, n: usize) {
        self.counts.again_tokens += n as u64;
    }

    /// The published status of the KV cache in host memory.
    pub(crate) fn status(&self) -> HostTier {
        HostTier {
            budget_bytes: self.end,
            ..self.counts
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn what_comes_back_faster_than_it_is_computed_pays() {
        // 4 MiB over 25 GB/s twice are 0.34 ms; 32 rows at 5000 a second take 6.4 ms.
        let (page, link, row) = (4 << 20, Some(25e9), Some(1.0 / 5000.0));
        assert!(pays(page, 2, 32, link, row));
        assert!(!pays(page, 2, 32, Some(1e9), row), "8.4 ms");
        assert!(pays(page, 1, 32, Some(1e9), row), "4.2 ms");
        assert!(!pays(page, 2, 32, link, Some(1e-6)), "0.03 ms");
        // A state of 60 MiB is worth it behind 1000 positions, and not behind 32.
        assert!(pays(60 << 20, 2, 1000, Some(5e9), row));
        assert!(!pays(60 << 20, 2, 32, Some(5e9), row));
    }

    #[test]
    fn what_was_not_measured_is_tried() {
        assert!(pays(1 << 40, 2, 1, None, Some(1e-6)));
        assert!(pays(1 << 40, 2, 1, Some(1.0), None));
    }

    #[test]
    fn a_short_pass_says_nothing_of_rows() {
        let mut host_kv = HostKv::new(0, false);
        host_kv.note_prompt(ModelId(1), KV_PAGE_TOKENS - 1, Duration::from_secs(1));
        assert_eq!(host_kv.row_seconds(ModelId(1)), None);
        host_kv.note_prompt(ModelId(1), 100, Duration::from_secs(1));
        assert_eq!(host_kv.row_seconds(ModelId(1)), Some(0.01));
        host_kv.forget(ModelId(1));
        assert_eq!(host_kv.row_seconds(ModelId(1)), None);
    }

    #[test]
    fn places_do_not_overlap_and_come_back_as_one() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut host_kv = HostKv::new(1 << 16, false);
        let mut held: Vec<HostSlot> = Vec::new();
        let mut refused = 0;
        for _ in 0..20_000 {
            if rng.random_bool(0.55) {
                let bytes = 256 * rng.random_range(1..24);
                match host_kv.take(bytes) {
                    Some(new) => {
                        let apart = |old: &HostSlot| {
                            new.at + new.bytes <= old.at || old.at + old.bytes <= new.at
                        };
                        assert!(held.iter().all(apart) && new.at + new.bytes <= host_kv.end());
                        held.push(new);
                    }
                    None => refused += 1,
                }
            } else if !held.is_empty() {
                host_kv.free(held.swap_remove(rng.random_range(0..held.len())));
            }
            let sum: u64 = held.iter().map(|s| s.bytes).sum();
            assert_eq!(host_kv.status().bytes, sum);
        }
        assert!(refused > 0);
        held.drain(..).for_each(|s| host_kv.free(s));
        assert_eq!(
            host_kv.take(1 << 16),
            Some(HostSlot {
                at: 0,
                bytes: 1 << 16
            })
        );
    }

    #[test]
    fn memory_is_taken_up_to_the_highest_place_and_kept_until_the_end_is_below() {
        let mut host_kv = HostKv::new(4096, false);
        assert_eq!(host_kv.taken(), 0);
        let (low, high) = (host_kv.take(1024).unwrap(), host_kv.take(2048).unwrap());
        host_kv.free(high);
        host_kv.free(low);
        assert_eq!(host_kv.taken(), 3072);
        host_kv.set_limit(2048);
        assert_eq!((host_kv.beside(0), host_kv.beside(512)), (2048, 1536));
        host_kv.set_end(host_kv.beside(512));
        assert_eq!(host_kv.taken(), 1536);
        host_kv.set_limit(1 << 20);
        assert_eq!(host_kv.beside(0), 4096, "as much as there may be");
        host_kv.set_end(4096);
        assert_eq!(host_kv.taken(), 1536);
    }

    #[test]
    fn a_device_that_is_closed_gives_back_what_is_above_the_highest_place() {
        let mut host_kv = HostKv::new(4096, false);
        let (low, high) = (host_kv.take(1024).unwrap(), host_kv.take(2048).unwrap());
        host_kv.device_was_closed();
        assert_eq!(host_kv.taken(), 3072);
        host_kv.free(high);
        assert_eq!(host_kv.taken(), 3072, "it is pinned still");
        host_kv.device_was_closed();
        assert_eq!(host_kv.taken(), 1024);
        host_kv.free(low);
        host_kv.device_was_closed();
        assert_eq!(host_kv.taken(), 0);
    }

    #[test]
    fn the_end_moves_where_nothing_lies() {
        let mut host_kv = HostKv::new(4096, false);
        let low = host_kv.take(1024).unwrap();
        host_kv.set_end(2048);
        assert_eq!((host_kv.take(2048), host_kv.end()), (None, 2048));
        host_kv.set_end(1024);
        assert!(host_kv.take(256).is_none());
        host_kv.set_end(4096);
        host_kv.free(low);
        assert_eq!(host_kv.take(4096).map(|s| s.at), Some(0));
    }
}
