//! OLMoE: RMSNorms over all of a row's queries and keys, and a mixture whose
//! softmax is not normed again.
//!
//! Source: Muennighoff et al. 2024, "OLMoE: Open Mixture-of-Experts Language
//! Models" (arXiv 2409.02060).

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let spec = moe::read(b.keys, h.n_embd, RouterGate::Softmax, false)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qk_norms: QkNorms::Rows,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::Moe(Moe {
            spec: moe::n_ff_or(spec, h.n_ff(b.keys, i)?),
            shared: None,
        });
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}
