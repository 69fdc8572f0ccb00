//! Command R and R+, Command R7B and A: attention and feed-forward side by side behind one layer
//! norm, scaled logits. The later ones have a window in three of four layers; those that see all
//! positions have no rotation.
//!
//! Source: Cohere 2024 and 2025, "Command A" (arXiv 2504.00698); the published code
//! (CohereForCausalLM, Cohere2ForCausalLM).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use super::gemma2::window_pattern;
use crate::build::{AttentionSpec, NormKind, PlanBuilder, Presence, QkNorms, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::N_CTX_MAX;

/// Builds the plan of Command R.
pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let all = vec![false; h.n_layer as usize];
    layers(b, h, None, &all)
}

/// Builds the plan of Command R7B and A.
pub(super) fn build_windowed(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let window = b.keys.count("attention.sliding_window", N_CTX_MAX)?;
    let windowed = window_pattern(b.keys, h.n_layer, 4)?;
    layers(b, h, Some(window), &windowed)
}

fn layers(
    b: &mut PlanBuilder<'_>,
    h: &Hparams,
    window: Option<u32>,
    windowed: &[bool],
) -> Result<(), Error> {
    let bias = Presence::Optional;
    b.norms_are(NormKind::Layer { bias });
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let scale = b.keys.positive_or("logit_scale", 1.0)?;
    for i in 0..h.n_layer {
        let local = windowed[i as usize];
        let rope = (window.is_none() || local).then_some(RopeUse { table, first: 0 });
        b.cut(blk(i, "attn"), &[]);
        let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
        let attention = AttentionSpec {
            qk_norms: QkNorms::LayerNorms(Presence::Optional),
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            window: window.filter(|_| local),
            ..AttentionSpec::new(h.heads_of(i), rope)
        };
        let (p, _) = b.attention(i, n, &attention)?;
        b.residual(x, p, None, 1.0)?;
        // The feed-forward reads what attention has read.
        b.cut(blk(i, "ffn_up"), &[n]);
        let n_ff = h.n_ff(b.keys, i)?;
        let p = b.gated_ffn(i, n, n_ff, Act::Silu, Presence::Absent, &[])?;
        b.residual(x, p, None, 1.0)?;
    }
    b.head(x, Presence::Absent, Some(scale), None)
}
