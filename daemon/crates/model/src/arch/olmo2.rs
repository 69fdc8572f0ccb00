//! OLMo 2 and 3: norms after attention and feed-forward alone, RMSNorms over all of a row's queries
//! and keys; OLMo 3 has a window in three of four layers, whose rotations are not stretched.
//!
//! Source: OLMo Team 2025, "2 OLMo 2 Furious"; the authors' published code (Olmo3ForCausalLM).

use rocmforge_ops::{RopeOrder, RopeScaling, RopeSpec, RopeUse};

use super::gemma2::window_pattern;
use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let plain = RopeSpec {
        scaling: RopeScaling::None,
        ..rope.clone()
    };
    let tables = [b.rope_table(rope), b.rope_table(plain)];
    let window = b.keys.window()?;
    let windowed = window_pattern(b.keys, h.n_layer, 4)?;
    for i in 0..h.n_layer {
        let local = window.is_some() && windowed[i as usize];
        let rope = RopeUse {
            table: tables[usize::from(local)],
            first: 0,
        };
        let attention = AttentionSpec {
            qk_norms: QkNorms::Rows,
            window: window.filter(|_| local),
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        let norms = Norms::POST;
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
