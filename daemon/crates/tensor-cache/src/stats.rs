//! Counters and sums, per model and in total.

use crate::{EvictionCause, ModelId, Policy};

/// Counts of events since the start, or since the model was registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of acquires that needed no upload of their own.
    pub hits: u64,
    /// Number of acquires whose segment had to be uploaded for them, by the acquire itself or by a
    /// prefetch before it.
    pub misses: u64,
    /// Bytes of the segments that were hits.
    pub hit_bytes: u64,
    /// Bytes of the segments that were misses.
    pub miss_bytes: u64,
    /// Number of misses whose upload a prefetch had begun before the acquire.
    pub prefetched: u64,
    /// Number of uploads begun.
    pub uploads: u64,
    /// Bytes of the uploads begun.
    pub uploaded_bytes: u64,
    /// Number of uploads that failed.
    pub upload_failures: u64,
    /// Number of evicted segments.
    pub evictions: u64,
    /// Bytes of evicted segments.
    pub evicted_bytes: u64,
    /// Number of evicted segments by cause; their sum is `evictions`.
    pub evictions_by: Evictions,
    /// Number of segments that were moved to make a hole.
    pub moves: u64,
    /// Bytes of segments that were moved.
    pub moved_bytes: u64,
}

/// Number of evicted segments by cause.
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

/// Bytes of slabs in use now, rounded up to the alignment. A slab that several models share counts
/// in each of them, and once in the sum of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of resident segments.
    pub resident: u64,
    /// Bytes of segments in flight.
    pub in_flight: u64,
    /// Bytes of resident segments that passes use.
    pub in_use: u64,
    /// Bytes of resident pinned segments.
    pub pinned: u64,
    /// Bytes of segments that use the slab of another model's equal segment. For one model they are
    /// part of `resident`; for all models together they are not, and are saved.
    pub borrowed: u64,
    /// Bytes of blocks of KV cache and states.
    pub kv: u64,
    /// Bytes of scratch blocks.
    pub scratch: u64,
    /// Bytes of blocks of staging buffers.
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

    /// Bytes that count against the budget.
    pub fn total(&self) -> u64 {
        self.resident + self.in_flight + self.blocks()
    }
}

/// Counters and memory of one model, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelStats {
    /// Counts of events.
    pub counters: Counters,
    /// Bytes in use now.
    pub usage: Usage,
    /// Number of registered segments.
    pub segments: u64,
    /// Bytes of all registered segments, in slabs.
    pub bytes: u64,
}

/// The state of the whole ledger at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// The budget in bytes, as set.
    pub budget: u64,
    /// Whether the ledger is within the budget (false only while a shrink waits for releases).
    pub budget_reached: bool,
    /// The eviction policy in force.
    pub policy: Policy,
    /// Sum over models, including those unregistered since (counters) and blocks
    /// without an owner (usage).
    pub total: ModelStats,
    /// Statistics of each registered model, in the order of their ids.
    pub models: Vec<(ModelId, ModelStats)>,
}
