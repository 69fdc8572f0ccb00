//! Hunyuan, dense and mixtures: queries and keys are normed behind rotation; a shared expert
//! beside experts of softmax.
//!
//! Source: Tencent Hunyuan Team 2025, the published code (HunYuanDenseV1ForCausalLM,
//! HunYuanMoEV1ForCausalLM).

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, WIDTH_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mut rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let rope = RopeUse {
        table: b.rope_table(rope),
        first: 0,
    };
    let n_expert = keys.maybe("expert_count", N_EXPERT_MAX)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qk_norms: QkNorms::HeadsRotated,
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let n_ff = h.n_ff(keys, i)?;
        let feed_forward = if n_expert > 0 {
            let shared = keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)?;
            let spec = moe::read(keys, h.n_embd, RouterGate::Softmax, true)?;
            FeedForward::Moe(Moe {
                // Experts are as wide as the file's layers, whatever it says of experts beside.
                spec: MoeSpec { n_ff, ..spec },
                shared: Some(Shared {
                    n_ff: if shared > 0 { u64::from(shared) } else { n_ff },
                    gated: false,
                }),
            })
        } else {
            FeedForward::swiglu(n_ff)
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
