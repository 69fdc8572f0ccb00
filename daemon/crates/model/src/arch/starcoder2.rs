//! StarCoder 2: layer norms and biases everywhere, a feed-forward of one matrix up with GELU.
//!
//! Source: Lozhkov et al. 2024, "StarCoder 2 and The Stack v2" (arXiv 2402.19173).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use crate::build::{AttentionSpec, NormKind, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        b.cut(blk(i, "attn"), &[]);
        let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let (p, _) = b.attention(i, n, &attention)?;
        b.residual(x, p, None, 1.0)?;
        b.cut(blk(i, "ffn"), &[]);
        let n = b.norm(x, &blk(i, "ffn_norm.weight"), "n")?;
        let n_ff = h.n_ff(b.keys, i)?;
        let p = b.plain_ffn(i, n, n_ff, Act::GeluTanh, Presence::Optional, ("", "p"))?;
        b.residual(x, p, None, 1.0)?;
    }
    b.head(x, Presence::Absent, None, None)
}
