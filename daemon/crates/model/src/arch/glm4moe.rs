//! GLM 4.5 to 4.7: partial rotation, head norms where the file has them, a router of logistic functions with a selection bias,
//! a shared expert, leading dense layers.
//!
//! Source: GLM-4.5 Team 2025, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models".

use rocmforge_ops::{Act, RopeOrder, RopeUse, RouterGate};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, Norms, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, N_LAYER_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    let n_shared = keys.maybe("expert_shared_count", N_EXPERT_MAX)?;
    let spec = MoeSpec {
        selection_bias: Presence::Optional,
        ..moe::read(keys, h.n_embd, RouterGate::Sigmoid, true)?
    };
    leave_predictors(b, h);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            head_norms: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = if i < dense {
            FeedForward::Gated {
                n_ff: h.n_ff(keys, i)?,
                act: Act::Silu,
                bias: Presence::Absent,
            }
        } else {
            FeedForward::Moe(Moe {
                spec,
                shared: (n_shared > 0).then(|| Shared {
                    n_ff: spec.n_ff * u64::from(n_shared),
                    gated: false,
                }),
            })
        };
        let norms = Norms::POST_ATTENTION;
        layer(
            b,
            i,
            x,
            &Layer {
                norms,
                ..Layer::new(attention, feed_forward)
            },
        )?;
    }
    b.head(x, Presence::Absent, None, None)
}
