//! Gemma: GELU, and an embedding scaled by the root of its width.
//!
//! Source: Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and
//! Technology" (arXiv 2403.08295).

use rocmforge_ops::{Act, Op, RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    b.cut("embedding".to_owned(), &[]);
    let factor = (h.n_embd as f32).sqrt();
    b.op(Op::Scale { x, factor });
    for i in 0..h.n_layer {
        let rope = RopeUse { table, first: 0 };
        let attention = AttentionSpec::new(h.heads_of(i), Some(rope));
        let feed_forward = FeedForward::Gated {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::GeluTanh,
            bias: Presence::Absent,
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
