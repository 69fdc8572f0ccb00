//! Mistral Small 3, Ministral 3, Devstral 2: Llama's form with YaRN and an attention temperature
//! that grows with the position.
//!
//! Source: the authors' published code (Ministral3ForCausalLM), 2025.

use rocmforge_ops::{RopeOrder, RopeScaling, RopeUse};

use super::layer::{FeedForward, Layer, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mut rope = keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let beta = keys.not_negative_or("attention.temperature_scale", 0.0)?;
    let mut temperature = None;
    if let RopeScaling::Yarn {
        factor, orig_ctx, ..
    } = rope.scaling
    {
        // YaRN's magnitude over that of all dimensions.
        let log_mul = f64::from(keys.f32_or("rope.scaling.yarn_log_multiplier", 0.0)?);
        rope.magnitude = 1.0 / (1.0 + 0.1 * log_mul * factor.ln());
        temperature = (beta != 0.0).then_some((beta, orig_ctx));
    } else if beta != 0.0 {
        let message = "needs YaRN's original context length";
        return Err(keys.bad("attention.temperature_scale", beta, message));
    }
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            temperature,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(keys, i)?);
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
