//! Qwen 3: an RMSNorm over each query and key head; rotation of half-split pairs.
//!
//! Source: Yang et al. 2025, "Qwen3 Technical Report".

use rocmforge_ops::{RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    b.deepstack_inputs();
    let mut rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Absent,
            output_bias: Presence::Optional,
            qk_norms: QkNorms::Heads(Presence::Required),
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
        b.deepstack(i, x);
    }
    b.head(x, Presence::Optional, None, None)
}
