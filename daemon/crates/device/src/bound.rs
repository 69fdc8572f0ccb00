//! What a device is given to work with: steps with their weights, a model's plan, scratch.

use std::sync::Arc;

use rocmforge_gguf::MappedFile;

use crate::SegmentLayout;
use crate::ops::{Buf, ExpertFfn, Op, Plan, ScratchLayout, Step};

/// A segment's weights as the operations of one step find them.
#[derive(Debug, Clone, Copy)]
pub struct SegmentBinding<'a> {
    /// The layout.
    pub layout: &'a SegmentLayout,
    /// Offset of the slab in the arena, in bytes.
    pub slab: u64,
}

/// An expert's weights: some of the tensors of a bound segment.
#[derive(Debug, Clone, Copy)]
pub struct BoundExpert<'a> {
    /// The expert's number.
    pub expert: u32,
    /// The segment of the expert.
    pub weights: SegmentBinding<'a>,
    /// Index of the expert's first tensor in the segment.
    pub first_tensor: usize,
}

/// A step of a plan with its weights.
#[derive(Debug, Clone)]
pub enum BoundStep<'a> {
    /// Operations.
    Run {
        /// In order.
        ops: &'a [Op],
        /// Buffers whose content later steps read.
        live_out: &'a [Buf],
        /// The segment; none for operations without weights.
        weights: Option<SegmentBinding<'a>>,
    },
    /// The feed-forwards of a layer's experts.
    Experts {
        /// What each computes.
        ffn: &'a ExpertFfn,
        /// The resident experts. Rows that are routed to others are left as they are.
        experts: Vec<BoundExpert<'a>>,
    },
}

impl<'a> BoundStep<'a> {
    /// A step with the weights that `bound` gives for each of its segments; of a layer's experts,
    /// all.
    pub fn of(step: &'a Step, bound: impl Fn(u32) -> SegmentBinding<'a>) -> Self {
        match step {
            Step::Run {
                segment,
                ops,
                live_out,
            } => Self::Run {
                ops,
                live_out,
                weights: segment.map(bound),
            },
            Step::Experts {
                first_segment,
                n_expert,
                per_segment,
                ffn,
            } => Self::Experts {
                ffn,
                experts: (0..*n_expert)
                    .map(|expert| BoundExpert {
                        expert,
                        weights: bound(first_segment + expert / per_segment),
                        first_tensor: (expert % per_segment * ffn.n_tensors) as usize,
                    })
                    .collect(),
            },
        }
    }
}

/// A model as a device may get ready for it.
#[derive(Debug, Clone, Copy)]
pub struct ModelPlanView<'a> {
    /// The model's file.
    pub file: &'a Arc<MappedFile>,
    /// The model's plan.
    pub plan: &'a Plan,
    /// Layouts of the model's segments.
    pub layouts: &'a [Arc<SegmentLayout>],
}

/// Scratch as the operations of one pass find it.
#[derive(Debug, Clone, Copy)]
pub struct Scratch<'a> {
    /// Where each buffer lies.
    pub layout: &'a ScratchLayout,
    /// Offset of the scratch block in the arena, in bytes.
    pub base: u64,
}
