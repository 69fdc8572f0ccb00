//! Ling and Ring: Llama's attention and a mixture with shared experts; from 2.0 on norms of heads,
//! a router of logistic functions with a selection bias and groups, leading dense layers.
//!
//! Sources: Ling Team 2025, "Every FLOP Counts" (arXiv 2503.05139) and "Every Activation
//! Boosted" (arXiv 2510.22115).

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, N_LAYER_MAX, WIDTH_MAX};

/// Builds the plan of Ling and Ring 1.
pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let norms = QkNorms::Heads(Presence::Absent);
    layers(b, h, RopeOrder::Norm, norms, RouterGate::Softmax)
}

/// Builds the plan of Ling and Ring 2.
pub(super) fn build_2(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let norms = QkNorms::Heads(Presence::Required);
    layers(b, h, RopeOrder::Neox, norms, RouterGate::Sigmoid)
}

fn layers(
    b: &mut PlanBuilder<'_>,
    h: &Hparams,
    order: RopeOrder,
    qk_norms: QkNorms,
    gate: RouterGate,
) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mut rope = keys.rope(order, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let rope = RopeUse {
        table: b.rope_table(rope),
        first: 0,
    };
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    let spec = MoeSpec {
        selection_bias: Presence::Optional,
        ..moe::read(keys, h.n_embd, gate, false)?
    };
    let n_shared = u64::from(keys.maybe("expert_shared_count", N_EXPERT_MAX)?);
    let shared = match keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)? {
        0 => spec.n_ff,
        n => u64::from(n),
    };
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qk_norms,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let feed_forward = if i < dense {
            FeedForward::swiglu(h.n_ff(keys, i)?)
        } else {
            FeedForward::Moe(Moe {
                spec,
                shared: (n_shared > 0).then(|| Shared {
                    n_ff: shared * n_shared,
                    gated: false,
                }),
            })
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
