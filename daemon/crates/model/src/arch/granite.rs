//! Granite 3 and 4, dense and mixtures without Mamba: Llama's form with factors on the embedding,
//! the residual sums, the scores and the logits.
//!
//! Source: Granite Team, IBM 2024, "Granite 3.0 Language Models".

use rocmforge_ops::{Act, Buf, Op, RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, layer};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, PlanBuilder, Presence, scale_of};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{Keys, N_EXPERT_MAX, WIDTH_MAX};

/// Granite's factors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    pub(super) residual: f32,
    pub(super) scores: f32,
    pub(super) logits: f32,
}

/// Reads the factors, and multiplies the embedding.
pub(super) fn factors(b: &mut PlanBuilder<'_>, h: &Hparams, x: Buf) -> Result<Factors, Error> {
    let keys: Keys<'_> = b.keys;
    let or = |value: f32, default: f32| if value == 0.0 { default } else { value };
    let embedding = or(keys.not_negative_or("embedding_scale", 1.0)?, 1.0);
    b.cut("embedding".to_owned(), &[]);
    if embedding != 1.0 {
        b.op(Op::Scale {
            x,
            factor: embedding,
        });
    }
    Ok(Factors {
        residual: or(keys.not_negative_or("residual_scale", 1.0)?, 1.0),
        scores: or(
            keys.not_negative_or("attention.scale", 0.0)?,
            scale_of(h.heads.head_dim),
        ),
        logits: 1.0 / or(keys.not_negative_or("logit_scale", 1.0)?, 1.0),
    })
}

/// The RoPE parameters; `None` for models without positions.
pub(super) fn rope(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<Option<RopeUse>, Error> {
    if !b.keys.flag("rope.scaling.finetuned", true)? {
        return Ok(None);
    }
    let spec = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    let table = b.rope_table(spec);
    Ok(Some(RopeUse { table, first: 0 }))
}

/// A layer's feed-forward: a MoE if the file has experts, with a shared expert if the file gives
/// its width.
pub(super) fn feed_forward(
    keys: Keys<'_>,
    h: &Hparams,
    i: u32,
    bias: Presence,
) -> Result<FeedForward, Error> {
    let n_ff = h.n_ff(keys, i)?;
    if keys.maybe("expert_count", N_EXPERT_MAX)? == 0 {
        let act = Act::Silu;
        return Ok(FeedForward::Gated { n_ff, act, bias });
    }
    let shared = keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)?;
    let spec = moe::read(keys, h.n_embd, RouterGate::Softmax, true)?;
    Ok(FeedForward::Moe(Moe {
        spec: moe::n_ff_or(spec, n_ff),
        shared: (shared > 0).then(|| Shared {
            n_ff: u64::from(shared),
            gated: false,
        }),
    }))
}

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = rope(b, h)?;
    let factors = factors(b, h, x)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            scale: factors.scores,
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), rope)
        };
        let feed_forward = feed_forward(b.keys, h, i, Presence::Optional)?;
        let residual_scale = factors.residual;
        layer(
            b,
            i,
            x,
            &Layer {
                residual_scale,
                ..Layer::new(attention, feed_forward)
            },
        )?;
    }
    b.head(x, Presence::Absent, Some(factors.logits), None)
}
