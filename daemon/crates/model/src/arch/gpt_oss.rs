//! gpt-oss: sinks in the softmax, a window in every other layer, biases everywhere, softmax over
//! the chosen experts, a clamped SwiGLU.
//!
//! Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" and the published reference code.

use rocmforge_ops::{Act, RopeOrder, RopeScaling, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, Norms, layer};
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::N_CTX_MAX;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    if let RopeScaling::Yarn { rounded, .. } = &mut rope.scaling {
        *rounded = false;
    }
    let table = b.rope_table(rope);
    let window = b.keys.count("attention.sliding_window", N_CTX_MAX)?;
    let windowed = super::gemma2::window_pattern(b.keys, h.n_layer, 2)?;
    let spec = MoeSpec {
        act: Act::SwigluClamped {
            alpha: 1.702,
            limit: 7.0,
        },
        bias: Presence::Optional,
        ..moe::read(b.keys, h.n_embd, RouterGate::SoftmaxOfChosen, false)?
    };
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            sinks: true,
            window: windowed[i as usize].then_some(window),
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::Moe(Moe {
            spec: moe::n_ff_or(spec, u64::from(h.n_ff_of[i as usize])),
            shared: None,
        });
        let norms = Norms::POST_ATTENTION;
        layer(
            b,
            i,
            x,
            &Layer {
                norms,
                ..Layer::new(attention, feed_forward)
            },
        )?;
    }
    b.head(x, Presence::Absent, None, None)
}
