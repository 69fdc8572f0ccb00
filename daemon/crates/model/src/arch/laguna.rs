//! Laguna: norms of heads, an output gate by softplus for each head or each element, a router of
//! logistic functions with a selection bias and a shared expert. Where the file has windows (XS),
//! three of four layers have one, with rotations and a number of heads of their own.
//!
//! Source: poolside 2026, the published code (LagunaForCausalLM).

use rocmforge_ops::{Act, RopeOrder, RopeScaling, RopeSpec, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, OutputGate, PlanBuilder, Presence, QkNorms};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{Keys, N_LAYER_MAX, WIDTH_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mut rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    if let RopeScaling::Yarn { factor, .. } = rope.scaling {
        // What the file tells is all of the magnitude, in place of YaRN's own.
        let own = 1.0 + 0.1 * factor.ln();
        let told = keys.positive_or("rope.scaling.yarn_attn_factor", own as f32)?;
        rope.magnitude = f64::from(told) / own;
    }
    let local = local_rope(keys, &rope, h.heads.head_dim)?;
    let tables = [b.rope_table(rope), b.rope_table(local)];
    let window = keys.window()?;
    let windowed = windowed_layers(keys, h.n_layer)?;
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    let spec = MoeSpec {
        selection_bias: Presence::Optional,
        ..moe::read(keys, h.n_embd, RouterGate::Sigmoid, true)?
    };
    let shared = match keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)? {
        0 => spec.n_ff,
        n => u64::from(n),
    };
    for i in 0..h.n_layer {
        let local = window.is_some() && windowed[i as usize];
        let rope = RopeUse {
            table: tables[usize::from(local)],
            first: 0,
        };
        let attention = AttentionSpec {
            qk_norms: QkNorms::Heads(Presence::Required),
            output_gate: OutputGate::Matrix(Act::Softplus),
            window: window.filter(|_| local),
            ..AttentionSpec::new(h.heads_of(i), Some(rope))
        };
        let feed_forward = if i < dense {
            FeedForward::swiglu(h.n_ff(keys, i)?)
        } else {
            let gated = false;
            FeedForward::Moe(Moe {
                spec,
                shared: Some(Shared {
                    n_ff: shared,
                    gated,
                }),
            })
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.head(x, Presence::Absent, None, None)
}

/// RoPE parameters of layers with a window, without context scaling.
fn local_rope(keys: Keys<'_>, rope: &RopeSpec, head_dim: u32) -> Result<RopeSpec, Error> {
    let base = keys.positive_or("rope.freq_base_swa", rope.freq_base as f32)?;
    Ok(RopeSpec {
        n_rot: keys.n_rot("rope.dimension_count_swa", head_dim, rope.n_rot)?,
        freq_base: f64::from(base),
        scaling: RopeScaling::None,
        magnitude: 1.0,
        ..rope.clone()
    })
}

/// For each layer whether it has a window: by the file's pattern, else all but the first of each
/// four.
fn windowed_layers(keys: Keys<'_>, n_layer: u32) -> Result<Vec<bool>, Error> {
    const KEY: &str = "attention.sliding_window_pattern";
    let period = match keys.gguf.value(&keys.name(KEY)) {
        Some(rocmforge_gguf::Value::Array(_)) => {
            return super::gemma2::window_pattern(keys, n_layer, 4);
        }
        Some(_) => keys.count(KEY, N_LAYER_MAX)?,
        None => 4,
    };
    Ok((0..n_layer).map(|i| i % period != 0).collect())
}
