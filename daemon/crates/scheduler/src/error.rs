//! Why a sequence cannot run, in numbers.

use crate::sequence::ModelId;

/// What running sequences need of the budget at the least, by parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// KV pages and states of all promised positions.
    pub kv_bytes: u64,
    /// The scratch of a pass.
    pub scratch_bytes: u64,
    /// The largest segment that must be resident.
    pub segment_bytes: u64,
    /// What no sequence can have: pinned weights, the device's own block.
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

/// Why a sequence cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The sequence does not fit even alone.
    #[error(
        "the request needs {} bytes and the budget is {budget_bytes}: {} for the KV of {positions} tokens, {} for scratch, \
         {} for the largest segment, {} held by pins and the device; ask for fewer tokens, unpin, or raise the budget",
        demand.total(), demand.kv_bytes, demand.scratch_bytes, demand.segment_bytes, demand.held_bytes
    )]
    NeverFits {
        /// The model.
        model: ModelId,
        /// Positions that the sequence must be promised.
        positions: u32,
        /// Memory that the sequence needs alone.
        demand: Demand,
        /// Bytes of the budget.
        budget_bytes: u64,
    },
    /// The sequence has begun, and even alone it cannot go on: the budget shrank, pins took it, or
    /// it has no end of its own and came to the budget's.
    #[error(
        "no room for the KV of position {position}: the request needs {} bytes of a budget of {budget_bytes}; \
         ask for fewer tokens, unpin, or raise the budget",
        demand.total()
    )]
    NoRoom {
        /// The model.
        model: ModelId,
        /// The first position that has no room.
        position: u32,
        /// Memory that the sequence needs alone.
        demand: Demand,
        /// Bytes of the budget.
        budget_bytes: u64,
    },
    /// The driver refused memory too often in its passes.
    #[error(
        "the driver refused memory in {refusals} passes of the request; end other users of the device's memory, or \
         lower the budget"
    )]
    DriverRefuses {
        /// Passes that failed.
        refusals: u32,
    },
}

/// Why a new sequence was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The queue is full.
    #[error("{waiting} requests wait, and {waiting_max} may; retry when some have ended")]
    QueueFull {
        /// Sequences that wait.
        waiting: usize,
        /// Sequences that may wait.
        waiting_max: usize,
    },
    /// The client has as many waiting sequences as one may have beside others.
    #[error(
        "{of_client} requests of this client wait, and the last {free} places are left to others; \
         retry when some have ended"
    )]
    LeftToOthers {
        /// Sequences of the client that wait.
        of_client: usize,
        /// Places that are free.
        free: usize,
    },
}
