//! The shared vocabulary: what a plan can say and what a device understands.
//!
//! A model's plan ([`plan::Plan`]) is a list of steps over segments of weights; a step is a list of
//! operations ([`op::Op`]) over activation buffers ([`buf::BufSpec`]). Whatever two crates have to
//! call by the same name is here once: tensor types, the layout of a KV page, rotation parameters.
//!
//! *Invariant:* this crate depends on nothing, holds no data of a model and does no I/O
//! (its Cargo.toml has no dependency; `forbid(unsafe_code)`).

#![forbid(unsafe_code)]

mod alibi;
pub mod buf;
mod experts;
pub mod kv;
pub mod op;
pub mod plan;
pub mod rope;
pub mod tensor;
mod tensor_type;
mod weight_type;

pub use alibi::alibi_slope;
pub use buf::{Buf, BufSpec, Conflicts, RowCounts, Rows, ScratchLayout};
pub use experts::{ExpertFfn, Router, RouterGate};
pub use kv::{KV_BLOCK, KV_PAGE_TOKENS, KvGroup, KvLayer, KvLayout, KvType, positions_of_parts};
pub use op::{
    ADAPTED_INPUTS_MAX, Act, Adapted, ColumnPart, HeadShape, MEAN_OF_SPAN, Mask, Op, Product,
    RopeUse,
};
pub use plan::{Input, InputRows, Plan, Segment, SegmentKind, Step};
pub use rope::{LongFactors, RopeAxes, RopeOrder, RopeScaling, RopeSpec};
pub use tensor::{Role, TensorDesc, TensorIndex};
pub use tensor_type::TensorType;
pub use weight_type::WeightType;

/// Alignment in bytes of every slab and of every tensor and buffer inside one: a cache line, and
/// what the widest vector load of the host and the copy engines of GPUs like.
pub const ALIGNMENT: u64 = 256;
