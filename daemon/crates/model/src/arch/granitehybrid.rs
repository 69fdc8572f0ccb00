//! Granite 4 hybrids: Mamba-2 layers and a few that attend, each with a mixture and a shared
//! expert or a dense feed-forward.
//!
//! Source: IBM 2025, Granite 4.0; the authors' published code (GraniteMoeHybridForCausalLM).

use super::granite::{self, factors, rope};
use super::layer::{Layer, attention, feed_forward};
use super::mamba2::Mamba2;
use crate::build::{AttentionSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = rope(b, h)?;
    let factors = factors(b, h, x)?;
    let keys = b.keys;
    let mamba = Mamba2::read(keys)?;
    for i in 0..h.n_layer {
        let ffn = granite::feed_forward(keys, h, i, Presence::Absent)?;
        let spec = Layer {
            residual_scale: factors.residual,
            ..Layer::new(
                AttentionSpec {
                    scale: factors.scores,
                    qkv_bias: Presence::Optional,
                    output_bias: Presence::Optional,
                    ..AttentionSpec::new(h.heads_of(i), rope)
                },
                ffn,
            )
        };
        if h.n_head_kv_of[i as usize] > 0 {
            attention(b, i, x, &spec)?;
        } else {
            b.cut(blk(i, "ssm"), &[]);
            let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
            let p = mamba.emit(b, i, n, Presence::Optional)?;
            b.residual(x, p, None, factors.residual)?;
        }
        feed_forward(b, i, x, &spec)?;
    }
    b.head(x, Presence::Absent, Some(factors.logits), None)
}
