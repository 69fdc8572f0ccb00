//! Gemma 3: five layers with a window to one without, with a rotation base of their own; head
//! norms; else as Gemma 2 without soft caps.
//!
//! Source: Gemma Team 2025, "Gemma 3 Technical Report".

use rocmforge_ops::{Act, Op, RopeOrder, RopeScaling, RopeSpec, RopeUse};

use super::gemma2::{attention_scale, window_pattern};
use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let local = RopeSpec {
        freq_base: f64::from(b.keys.positive_or("rope.freq_base_swa", 10_000.0)?),
        scaling: RopeScaling::None,
        ..rope.clone()
    };
    let tables = [b.rope_table(rope), b.rope_table(local)];
    let window = b.keys.window()?;
    let windowed = window_pattern(b.keys, h.n_layer, 6)?;
    let final_softcap = b.keys.not_negative_or("final_logit_softcapping", 0.0)?;
    b.cut("embedding".to_owned(), &[]);
    let factor = (h.n_embd as f32).sqrt();
    b.op(Op::Scale { x, factor });
    for i in 0..h.n_layer {
        let local = window.is_some() && windowed[i as usize];
        let rope = RopeUse {
            table: tables[usize::from(local)],
            first: 0,
        };
        let attention = AttentionSpec {
            window: window.filter(|_| local),
            scale: attention_scale(h, 62),
            qk_norms: QkNorms::Heads(Presence::Required),
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let feed_forward = FeedForward::Gated {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::GeluTanh,
            bias: Presence::Absent,
        };
        let norms = Norms::SANDWICH;
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
    b.head(x, Presence::Absent, None, Some(final_softcap))
}
