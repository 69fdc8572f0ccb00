//! MiniMax M2: RMSNorms over all of a row's queries and keys, partial rotation, a router of
//! logistic functions with a selection bias.
//!
//! Source: MiniMax 2025, the authors' published code (MiniMaxM2ForCausalLM).

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let spec = MoeSpec {
        selection_bias: Presence::Optional,
        ..moe::read(b.keys, h.n_embd, RouterGate::Sigmoid, true)?
    };
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qk_norms: QkNorms::Rows,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::Moe(Moe {
            spec: moe::n_ff_or(spec, u64::from(h.n_ff_of[i as usize])),
            shared: None,
        });
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
