//! Seed-OSS: Qwen 2's form, with heads of a size of their own.
//!
//! Source: ByteDance Seed Team 2025, the published code (SeedOssForCausalLM).

use rocmforge_ops::{RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        let norms = Norms::POST_ATTENTION;
        let spec = Layer {
            norms,
            ..Layer::new(attention, feed_forward)
        };
        layer(b, i, x, &spec)?;
    }
    b.head(x, Presence::Absent, None, None)
}
