//! Counters and sums, per model and in total.

use crate::{EvictionCause, ModelId, Policy};

/// Events since the start, or since the model was registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Acquires that needed no upload of their own.
    pub hits: u64,
    /// Acquires whose bytes had to be uploaded for them, by the acquire itself
    /// or by a prefetch before it.
    pub misses: u64,
    /// Bytes of the hits.
    pub hit_bytes: u64,
    /// Bytes of the misses.
    pub miss_bytes: u64,
    /// Misses whose upload a prefetch had begun before the acquire.
    pub prefetched: u64,
    /// Uploads begun.
    pub uploads: u64,
    /// Bytes of the uploads begun.
    pub uploaded_bytes: u64,
    /// Uploads that failed.
    pub upload_failures: u64,
    /// Segments evicted.
    pub evictions: u64,
    /// Bytes evicted.
    pub evicted_bytes: u64,
    /// Segments evicted, by cause; their sum is `evictions`.
    pub evictions_by: Evictions,
    /// Segments moved to make a hole.
    pub moves: u64,
    /// Bytes moved.
    pub moved_bytes: u64,
}

/// Evicted segments by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions([u64; EvictionCause::ALL.len()]);

impl Evictions {
    /// Number of segments evicted for this cause.
    pub fn of(&self, cause: EvictionCause) -> u64 {
        self.0[cause as usize]
    }

    /// Number of evicted segments, of all causes.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Counts one eviction.
    pub fn count(&mut self, cause: EvictionCause) {
        self.0[cause as usize] += 1;
    }
}

/// Bytes held now, in slabs, that is rounded to the alignment. A slab that several models share
/// counts in each of them, and once in the sum of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Complete on the device.
    pub resident: u64,
    /// Uploads under way.
    pub in_flight: u64,
    /// Of the resident: held by passes.
    pub in_use: u64,
    /// Of the resident: pinned.
    pub pinned: u64,
    /// In slabs of other models' segments with the same content. Of one model: part of `resident`.
    /// Of all together: not part of it, and saved.
    pub borrowed: u64,
    /// Blocks of keys and values.
    pub kv: u64,
    /// Blocks of working memory.
    pub scratch: u64,
    /// Blocks of staging buffers.
    pub staging: u64,
    /// How many segments are resident.
    pub segments_resident: u64,
    /// How many segments are in flight.
    pub segments_in_flight: u64,
    /// How many segments are pinned, resident or not.
    pub segments_pinned: u64,
}

impl Usage {
    /// Sum of the bytes of all blocks.
    pub fn blocks(&self) -> u64 {
        self.kv + self.scratch + self.staging
    }

    /// What counts against the budget.
    pub fn total(&self) -> u64 {
        self.resident + self.in_flight + self.blocks()
    }
}

/// One model, or all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelStats {
    /// Events.
    pub counters: Counters,
    /// Bytes held now.
    pub usage: Usage,
    /// Registered segments.
    pub segments: u64,
    /// Bytes of all registered segments, in slabs.
    pub bytes: u64,
}

/// The whole ledger at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// The budget as set.
    pub budget: u64,
    /// Whether everything lies inside the budget (false only while a shrink waits for releases).
    pub budget_reached: bool,
    /// The policy in force.
    pub policy: Policy,
    /// Sum over models, including those unregistered since (counters) and blocks
    /// without an owner (usage).
    pub total: ModelStats,
    /// Registered models, in the order of their numbers.
    pub models: Vec<(ModelId, ModelStats)>,
}
