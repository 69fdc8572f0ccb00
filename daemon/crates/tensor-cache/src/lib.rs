//! Decides which weight segments are resident, and where in the device's arena they lie.
//!
//! Pure: no clock, thread, file or device. [`Cache`] is a value with methods; the engine thread
//! owns it, asks it, and carries out the [`Action`]s that it appends, in the order in which they
//! were appended. What a segment holds is not known here: a segment is a size, an index in the
//! order of a pass, and a state.
//!
//! ```text
//!             acquire, prefetch                uploaded
//!   Absent ----------------------> InFlight ------------> Resident
//!     ^                               |                       |
//!     |          upload_failed        |                       |
//!     +-------------------------------+                       |
//!     +--------------------------------------------------------+
//!                       evicted (idle; pinned only if its content is bad)
//! ```
//!
//! *Invariants*, asserted here or held by the simulation in `tests/`:
//! - resident + in flight + blocks <= budget at every step; after the budget shrank below what
//!   cannot be evicted now, the sum only falls until it is reached.
//! - No two slabs overlap; each lies inside the arena, but for those that a shrink left beyond it.
//! - A segment in use or in flight is never a victim, a pinned one only if its content is bad; one
//!   in use or in flight is never moved.
//! - At most one upload of a segment is under way.
//! - Segments of the same content that were said to be so have one slab (`sharing.rs`).
//! - An operation that fails has changed nothing and has emitted nothing.
//!
//! Cost: a hit looks its model up among those registered, O(log models), and moves an expert in its
//! model's score order, O(log experts); all else of it is O(1). A miss looks at every ordered
//! segment (not at the experts) of every model of which something is resident, and at experts from
//! the coldest up, as many as it must skip or evict. Only where no hole fits are the extents of the
//! arena scanned. Measured by `benches/hit_ratio.rs`, nanoseconds a use on one core: 20 for hits;
//! with half of the bytes resident 820 of a dense model of 97 segments, 11,300 over 32 dense models
//! of 109, 530 over a mixture of 48 layers of 128 experts.

#![forbid(unsafe_code)]

mod arena;
mod blocks;
mod bring;
mod cache;
mod error;
mod evict;
mod experts;
mod forecast;
mod keep;
mod pins;
mod recycle;
mod room;
mod segment;
mod sharing;
mod state;
mod stats;
mod status;
mod stream_order;
mod victims;

pub use cache::{Cache, CacheConfig};
pub use error::Error;
pub use segment::{
    Acquired, Action, BlockId, BlockKind, Cleared, EvictionCause, KeptBecause, ModelId, PassHint,
    Policy, SegmentId, SegmentKind, SegmentSpec, SegmentState, SegmentStatus, SetBudget, Slab,
};
pub use stats::{Counters, Evictions, ModelStats, Stats, Usage};
pub use status::Upcoming;

/// Maximum number of registered models.
pub const MODELS_MAX: usize = 4096;
/// Maximum number of segments of one model (a MoE model of 128 layers of 512 experts with its dense
/// part fits).
pub const SEGMENTS_MAX: usize = 1 << 17;
/// Maximum number of reserved blocks.
pub const BLOCKS_MAX: usize = 1 << 20;
/// The largest budget, and so the largest segment, in bytes: sums of a few of them cannot overflow.
pub const BYTES_MAX: u64 = 1 << 56;
