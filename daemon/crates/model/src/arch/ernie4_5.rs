//! ERNIE 4.5: Llama's form; the mixtures have leading dense layers, a bias that chooses among
//! softmax probabilities, and shared experts.
//!
//! Source: Baidu ERNIE Team 2025, "ERNIE 4.5 Technical Report"; the published code
//! (Ernie4_5_MoeForCausalLM).

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, N_LAYER_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let rope = keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let rope = RopeUse {
        table: b.rope_table(rope),
        first: 0,
    };
    let mixture = if keys.maybe("expert_count", N_EXPERT_MAX)? > 0 {
        let spec = moe::read(keys, h.n_embd, RouterGate::Softmax, true)?;
        Some(MoeSpec {
            selection_bias: Presence::Optional,
            ..spec
        })
    } else {
        None
    };
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    let step = keys.count_or("interleave_moe_layer_step", N_LAYER_MAX, 1)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let n_ff = h.n_ff(keys, i)?;
        let feed_forward = match mixture {
            Some(spec) if i >= dense && (i + 1) % step == 0 => {
                // The width that files tell is not that of their tensors in all of them.
                let shared = b.rows_in_file(&blk(i, "ffn_up_shexp.weight"));
                FeedForward::Moe(Moe {
                    spec: moe::n_ff_or(spec, n_ff),
                    shared: shared.map(|n_ff| Shared { n_ff, gated: false }),
                })
            }
            _ => FeedForward::swiglu(n_ff),
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
