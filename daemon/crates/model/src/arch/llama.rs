//! Llama 2 and 3, Mistral, Mixtral, and what shares their form: rotation of adjacent pairs, and
//! experts where the file has them.
//!
//! Sources: Touvron et al. 2023, "LLaMA" and "Llama 2"; Grattafiori et al. 2024, "The Llama 3 Herd
//! of Models"; Jiang et al. 2024, "Mixtral of Experts".

use rocmforge_ops::{Act, RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    if rope.factors.is_none() {
        b.long_factors(&mut rope, h.n_ctx_train)?;
    }
    let table = b.rope_table(rope);
    let n_expert = b.keys.maybe("expert_count", crate::keys::N_EXPERT_MAX)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let n_ff = h.n_ff(b.keys, i)?;
        let feed_forward = if n_expert > 0 {
            let spec = moe::read(b.keys, h.n_embd, RouterGate::Softmax, true)?;
            FeedForward::Moe(Moe {
                spec: moe::n_ff_or(spec, n_ff),
                shared: None,
            })
        } else {
            FeedForward::Gated {
                n_ff,
                act: Act::Silu,
                bias: Presence::Optional,
            }
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
