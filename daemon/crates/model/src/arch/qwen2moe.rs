//! Qwen 1.5 and 2 mixtures: Qwen 2's attention; experts weighed by their softmax as it is; a
//! shared expert with a gate.
//!
//! Source: Yang et al. 2024, "Qwen2 Technical Report".

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::WIDTH_MAX;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let spec = moe::read(b.keys, h.n_embd, RouterGate::Softmax, false)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let n_ff = h.n_ff_of[i as usize];
        let shared = b
            .keys
            .count_or("expert_shared_feed_forward_length", WIDTH_MAX, n_ff)?;
        let feed_forward = FeedForward::Moe(Moe {
            spec: moe::n_ff_or(spec, u64::from(n_ff / spec.router.n_used)),
            shared: Some(Shared {
                n_ff: u64::from(shared),
                gated: true,
            }),
        });
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
