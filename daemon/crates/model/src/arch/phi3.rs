//! Phi 3 and 4: one matrix for queries, keys and values and one for gate and up; frequencies with
//! factors for long contexts.
//!
//! Source: Abdin et al. 2024, "Phi-3 Technical Report"; Ding et al. 2024, "LongRoPE".

use rocmforge_ops::{RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mut rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    b.long_factors(&mut rope, h.n_ctx_train)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }));
        let feed_forward = FeedForward::swiglu(h.n_ff(keys, i)?);
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Optional, None, None)
}
