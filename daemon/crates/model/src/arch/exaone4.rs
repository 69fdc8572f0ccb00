//! EXAONE 4: norms after attention and feed-forward alone, norms of heads; where the file has
//! windows (32B), every fourth layer sees all positions and has no rotation.
//!
//! Source: LG AI Research 2025, "EXAONE 4.0" (arXiv 2507.11407); the published
//! code (Exaone4ForCausalLM).

use rocmforge_ops::{RopeOrder, RopeUse};

use super::gemma2::window_pattern;
use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    rope.factors = b.rope_factors("rope_freqs.weight", rope.n_rot)?;
    let table = b.rope_table(rope);
    let window = b.keys.window()?;
    let windowed = window_pattern(b.keys, h.n_layer, 4)?;
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let local = windowed[i as usize];
        let rope = (window.is_none() || local).then_some(RopeUse { table, first: 0 });
        let attention = AttentionSpec {
            qk_norms: QkNorms::Heads(Presence::Required),
            window: window.filter(|_| local),
            ..AttentionSpec::new(h.heads_of(i), rope)
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        let norms = Norms::POST;
        let spec = Layer {
            norms,
            ..Layer::new(attention, feed_forward)
        };
        layer(b, i, x, &spec)?;
    }
    b.head(x, Presence::Absent, None, None)
}
