//! Muse Glimmer: norms before and after, the later ones with an eps of their own; a
//! normed embedding; an output gate; windows in three of four layers, which alone rotate;
//! scaled and bounded logits.
//!
//! Source: Meta 2026, the published code (MuseGlimmerForCausalLM).

use rocmforge_ops::{Act, RopeOrder, RopeUse};

use super::gemma2::window_pattern;
use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, OutputGate, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::N_CTX_MAX;

/// Epsilon of the norms after attention and feed-forward.
const POST_EPS: f32 = 1e-8;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let rope = keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let window = keys.count("attention.sliding_window", N_CTX_MAX)?;
    let windowed = window_pattern(keys, h.n_layer, 4)?;
    let scale = keys.positive_or("logit_scale", 1.0)?;
    let softcap = keys.not_negative_or("final_logit_softcapping", 0.0)?;
    b.cut("embedding".to_owned(), &[]);
    b.rms_norm(x, None, h.n_embd, x);
    for i in 0..h.n_layer {
        let local = windowed[i as usize];
        let rope = RopeUse { table, first: 0 };
        let attention = AttentionSpec {
            qk_norms: QkNorms::Heads(Presence::Required),
            output_gate: OutputGate::Matrix(Act::Sigmoid),
            window: local.then_some(window),
            ..AttentionSpec::new(h.heads_of(i), local.then_some(rope))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(keys, i)?);
        let spec = Layer {
            norms: Norms::SANDWICH,
            post_eps: Some(POST_EPS),
            ..Layer::new(attention, feed_forward)
        };
        layer(b, i, x, &spec)?;
    }
    b.head(x, Presence::Absent, Some(scale), Some(softcap))
}
