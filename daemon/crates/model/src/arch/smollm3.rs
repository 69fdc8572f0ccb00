//! SmolLM 3: Llama's form; every fourth layer has no rotation.
//!
//! Source: Bakouch et al. 2025, "SmolLM3"; Yang et al. 2025, "Rope to Nope and Back Again".

use rocmforge_ops::{RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let rope = ((i + 1) % 4 != 0).then_some(RopeUse { table, first: 0 });
        let attention = AttentionSpec::new(h.heads_of(i), rope);
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
