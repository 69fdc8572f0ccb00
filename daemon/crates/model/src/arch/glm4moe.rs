//! GLM 4.5 to 4.7: partial rotation, head norms where the file has them, a router of logistic
//! functions with a selection bias, a shared expert, leading dense layers.
//!
//! Source: GLM-4.5 Team 2025, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models".

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, Norms, layer};
use super::moe::{self, Moe, Shared};
use super::nextn;
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, N_LAYER_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    build_with(b, h, Norms::POST_ATTENTION)
}

/// Builds the plan, with the given names of norms.
pub(super) fn build_with(b: &mut PlanBuilder<'_>, h: &Hparams, norms: Norms) -> Result<(), Error> {
    let x = b.embedding()?;
    let layers = Layers::read(b, h, norms)?;
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        layer(b, i, x, &layers.layer(b, h, i)?)?;
    }
    b.head(x, Presence::Absent, None, None)
}

/// Emits the MTP head (the first MTP block).
pub(super) fn predict(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let block = h.n_layer;
    let layers = Layers::read(b, h, Norms::POST_ATTENTION)?;
    let x = nextn::begin(b, block)?;
    layer(b, block, x, &layers.layer(b, h, block)?)?;
    nextn::end(b, block, x)
}

/// Properties that all layers share.
struct Layers {
    /// Index of the RoPE table.
    table: u8,
    /// Number of leading dense layers.
    dense: u32,
    moe: Moe,
    norms: Norms,
}

impl Layers {
    fn read(b: &mut PlanBuilder<'_>, h: &Hparams, norms: Norms) -> Result<Self, Error> {
        let keys = b.keys;
        let rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
        let n_shared = keys.maybe("expert_shared_count", N_EXPERT_MAX)?;
        let spec = MoeSpec {
            selection_bias: Presence::Optional,
            ..moe::read(keys, h.n_embd, RouterGate::Sigmoid, true)?
        };
        Ok(Self {
            table: b.rope_table(rope),
            dense: keys.maybe("leading_dense_block_count", N_LAYER_MAX)?,
            moe: Moe {
                spec,
                shared: (n_shared > 0).then(|| Shared {
                    n_ff: spec.n_ff * u64::from(n_shared),
                    gated: false,
                }),
            },
            norms,
        })
    }

    fn layer(&self, b: &PlanBuilder<'_>, h: &Hparams, i: u32) -> Result<Layer, Error> {
        let rope = RopeUse {
            table: self.table,
            first: 0,
        };
        // A block behind the layers is as the last of them.
        let heads = h.heads_of(i.min(h.n_layer - 1));
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            qk_norms: QkNorms::Heads(Presence::Optional),
            ..AttentionSpec::new(heads, Some(rope))
        };
        let feed_forward = if i < self.dense.min(h.n_layer) {
            FeedForward::swiglu(h.n_ff(b.keys, i)?)
        } else {
            FeedForward::Moe(self.moe)
        };
        Ok(Layer {
            norms: self.norms,
            ..Layer::new(attention, feed_forward)
        })
    }
}
