//! Reasons for which a sequence cannot run, with numbers.

use crate::sequence::ModelId;

/// Minimum memory that running sequences need of the budget, by parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Bytes of KV pages and states for all promised positions.
    pub kv_bytes: u64,
    /// Bytes of a pass's scratch.
    pub scratch_bytes: u64,
    /// Bytes of the largest segment that must be resident.
    pub segment_bytes: u64,
    /// Bytes that no sequence can have: pinned weights and the device's own block.
    pub held_bytes: u64,
}

impl Demand {
    /// The sum of the parts.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.beside_scratch().saturating_add(self.scratch_bytes)
    }

    /// The sum of all parts but scratch.
    #[must_use]
    pub fn beside_scratch(&self) -> u64 {
        self.kv_bytes
            .saturating_add(self.segment_bytes)
            .saturating_add(self.held_bytes)
    }
}

/// The reason for which the scheduler ends a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The sequence does not fit even alone.
    #[error(
        "the request needs {} bytes and the budget is {budget_bytes}: {} for the KV of {positions} tokens, {} for scratch, \
         {} for the largest segment, {} held by pins and the device; ask for fewer tokens, unpin, or raise the budget",
        demand.total(), demand.kv_bytes, demand.scratch_bytes, demand.segment_bytes, demand.held_bytes
    )]
    NeverFits {
        /// Model of the sequence.
        model: ModelId,
        /// Number of positions that the sequence must be promised.
        positions: u32,
        /// Memory that the sequence needs alone.
        demand: Demand,
        /// The budget in bytes.
        budget_bytes: u64,
    },
    /// A sequence that has begun cannot continue even alone: the budget shrank, pins took memory,
    /// or it is open-ended and fills the budget.
    #[error(
        "no room for the KV of position {position}: the request needs {} bytes of a budget of {budget_bytes}; \
         ask for fewer tokens, unpin, or raise the budget",
        demand.total()
    )]
    NoRoom {
        /// Model of the sequence.
        model: ModelId,
        /// The first position for which there is no memory.
        position: u32,
        /// Memory that the sequence needs alone.
        demand: Demand,
        /// The budget in bytes.
        budget_bytes: u64,
    },
    /// The driver refused memory too often in the sequence's passes.
    #[error(
        "the driver refused memory in {refusals} passes of the request; end other users of the device's memory, or \
         lower the budget"
    )]
    DriverRefuses {
        /// Number of the sequence's passes that failed.
        refusals: u32,
    },
}

/// Why a new sequence was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The queue of waiting sequences is full.
    #[error("{waiting} requests wait, and {waiting_max} may; retry when some have ended")]
    QueueFull {
        /// Number of waiting sequences.
        waiting: usize,
        /// Maximum number of waiting sequences.
        waiting_max: usize,
    },
    /// The client has as many waiting sequences as one client may have beside others.
    #[error(
        "{of_client} requests of this client wait, and the last {free} places are left to others; \
         retry when some have ended"
    )]
    LeftToOthers {
        /// Number of the client's waiting sequences.
        of_client: usize,
        /// Number of free places in the queue.
        free: usize,
    },
}
