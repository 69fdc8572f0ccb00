//! AFM 4.5B: Llama's attention, and a feed-forward of one matrix up with squared ReLU.
//!
//! Source: Arcee AI 2025, the published code (ArceeForCausalLM).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use crate::build::{AttentionSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        b.cut(blk(i, "attn"), &[]);
        let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
        let rope = RopeUse { table, first: 0 };
        let attention = AttentionSpec::new(h.heads_of(i), Some(rope));
        let (p, _) = b.attention(i, n, &attention)?;
        b.residual(x, p, None, 1.0)?;
        b.cut(blk(i, "ffn"), &[]);
        let n = b.norm(x, &blk(i, "ffn_norm.weight"), "n")?;
        let (n_ff, bias) = (h.n_ff(b.keys, i)?, Presence::Absent);
        let p = b.plain_ffn(i, n, n_ff, Act::ReluSquared, bias, ("", "p"))?;
        b.residual(x, p, None, 1.0)?;
    }
    b.head(x, Presence::Absent, None, None)
}
