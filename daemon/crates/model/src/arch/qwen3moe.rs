//! Qwen 3 mixtures: Qwen 3's attention; the chosen experts' weights sum to one.
//!
//! Source: Yang et al. 2025, "Qwen3 Technical Report".

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    b.deepstack_inputs();
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let spec = moe::read(b.keys, h.n_embd, RouterGate::Softmax, true)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qk_norms: QkNorms::Heads(Presence::Required),
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let n_ff = u64::from(h.n_ff_of[i as usize] / spec.router.n_used);
        let feed_forward = FeedForward::Moe(Moe {
            spec: moe::n_ff_or(spec, n_ff),
            shared: None,
        });
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
        b.deepstack(i, x);
    }
    b.head(x, Presence::Absent, None, None)
}
