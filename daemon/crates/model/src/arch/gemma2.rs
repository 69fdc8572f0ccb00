//! Gemma 2: scores and logits with soft caps, a window in every other layer, norms before and
//! after, GELU, a scaled embedding.
//!
//! Source: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size".

use rocmforge_ops::{Act, Op, RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, scale_of};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{Keys, N_CTX_MAX, N_LAYER_MAX};

/// For each layer whether it has a window: by the file's pattern, else all but every `period`-th.
pub(super) fn window_pattern(
    keys: Keys<'_>,
    n_layer: u32,
    period: u32,
) -> Result<Vec<bool>, Error> {
    const KEY: &str = "attention.sliding_window_pattern";
    let by_period = |period: u32| (0..n_layer).map(|i| (i + 1) % period != 0).collect();
    match keys.gguf.value(&keys.name(KEY)) {
        None => Ok(by_period(period)),
        Some(rocmforge_gguf::Value::Array(_)) => {
            let pattern = keys.per_layer(KEY, n_layer, 1)?.unwrap_or_default();
            Ok(pattern.into_iter().map(|w| w != 0).collect())
        }
        Some(_) => Ok(by_period(keys.count(KEY, N_LAYER_MAX)?)),
    }
}

/// The factor on attention scores: by the head size, but in the 27B models by `n_embd / n_head`
/// (Gemma 2 and 3).
pub(super) fn attention_scale(h: &Hparams, layers_of_27b: u32) -> f32 {
    if h.n_layer == layers_of_27b {
        scale_of(h.n_embd / h.heads.n_head)
    } else {
        scale_of(h.heads.head_dim)
    }
}

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let window = b
        .keys
        .count_or("attention.sliding_window", N_CTX_MAX, 4096)?;
    let windowed = window_pattern(b.keys, h.n_layer, 2)?;
    let softcap = b.keys.not_negative_or("attn_logit_softcapping", 50.0)?;
    let final_softcap = b.keys.not_negative_or("final_logit_softcapping", 30.0)?;
    b.cut("embedding".to_owned(), &[]);
    let factor = (h.n_embd as f32).sqrt();
    b.op(Op::Scale { x, factor });
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            window: windowed[i as usize].then_some(window),
            scale: attention_scale(h, 46),
            softcap,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
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
