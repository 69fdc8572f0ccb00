//! StarCoder 2: layer norms and biases everywhere, a feed-forward of one matrix up with GELU.
//!
//! Source: Lozhkov et al. 2024, "StarCoder 2 and The Stack v2" (arXiv 2402.19173).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::Plain {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::GeluTanh,
            bias: Presence::Optional,
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
