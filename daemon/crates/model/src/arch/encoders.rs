//! Encoders that norm before attention and feed-forward, with rotary positions and a norm behind
//! the last layer.
//!
//! | architecture | norms | feed-forward |
//! |---|---|---|
//! | `modern-bert` | layer norms, of the embedding too | gated, GELU |
//! | `eurobert` | RMSNorms | gated, SiLU |
//! | `neo-bert` | RMSNorms | gated, SiLU |
//!
//! The first layer of `modern-bert` has no norm before attention, and two of three layers have a
//! window and a base of rotation of their own. In `neo-bert` pairs of neighbours rotate.
//!
//! Sources: Warner et al. 2024 (arXiv 2412.13663); Boizard et al. 2025 (arXiv 2503.05500); Le
//! Breton et al. 2025 (arXiv 2502.19587).

use rocmforge_ops::{Act, RopeOrder, RopeSpec, RopeUse};

use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, ClassAct, NormKind, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::N_LAYER_MAX;

/// Period of layers of ModernBERT, the first of which has no window.
const MODERN_BERT_PERIOD: u32 = 3;

pub(super) fn build_modern_bert(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let bias = Presence::Optional;
    b.norms_are(NormKind::Layer { bias });
    let x = b.embedding()?;
    b.cut("embedding".to_owned(), &[]);
    b.norm(x, "token_embd_norm.weight", "x")?;
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let local = RopeSpec {
        freq_base: f64::from(b.keys.positive_or("rope.freq_base_swa", 10_000.0)?),
        ..rope.clone()
    };
    let tables = [b.rope_table(rope), b.rope_table(local)];
    let window = b.keys.window()?;
    let period = b.keys.count_but_0_or(
        "attention.sliding_window_pattern",
        N_LAYER_MAX,
        MODERN_BERT_PERIOD,
    )?;
    for i in 0..h.n_layer {
        let is_local = window.is_some() && !i.is_multiple_of(period);
        let table = tables[usize::from(is_local)];
        let attention = AttentionSpec {
            window: window.filter(|_| is_local),
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let attn = Norms::PRE.attn.filter(|name| b.has(&blk(i, name)));
        let norms = Norms { attn, ..Norms::PRE };
        let feed_forward = FeedForward::Gated {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::GeluErf,
            bias: Presence::Optional,
        };
        let spec = Layer::new(attention, feed_forward);
        layer(b, i, x, &Layer { norms, ..spec })?;
    }
    b.encoder_end(x, ClassAct::GeluErf)
}

pub(super) fn build_eurobert(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    build(b, h, RopeOrder::Neox)
}

pub(super) fn build_neo_bert(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    b.head_norm_name("enc.output_norm.weight");
    build(b, h, RopeOrder::Norm)
}

fn build(b: &mut PlanBuilder<'_>, h: &Hparams, order: RopeOrder) -> Result<(), Error> {
    let x = b.embedding()?;
    let rope = b.keys.rope(order, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            output_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::Gated {
            n_ff: h.n_ff(b.keys, i)?,
            act: Act::Silu,
            bias: Presence::Optional,
        };
        layer(b, i, x, &Layer::new(attention, feed_forward))?;
    }
    b.encoder_end(x, ClassAct::Tanh)
}
