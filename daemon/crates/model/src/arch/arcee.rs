//! AFM 4.5B: Llama's attention, and a feed-forward of one matrix up with squared ReLU.
//!
//! Source: Arcee AI 2025, the published code (ArceeForCausalLM).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let rope = RopeUse { table, first: 0 };
        let attention = AttentionSpec::new(h.heads_of(i), Some(rope));
        let feed_forward = FeedForward::Plain {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::ReluSquared,
            bias: Presence::Absent,
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
