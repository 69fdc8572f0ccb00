//! Qwen 3.5, 3.6 and 3.8, dense and mixtures: three layers of gated delta net to one that
//! attends, with an output gate.
//!
//! Sources: the authors' published code (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM), 2026; Yang et
//! al. 2024, "Gated Delta Networks" (arXiv 2412.06464). The file has value heads in the order in
//! which they share key heads in turn. For text the three position components of the interleaved
//! M-RoPE are equal, and so it is the usual rotation of half-split pairs.

use rocmforge_ops::{RopeOrder, RopeUse, RouterGate};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, Norms, attention, feed_forward, layer};
use super::moe::{self, Moe, Shared};
use super::nextn;
use super::qwen3next::DeltaNet;
use crate::build::{AttentionSpec, OutputGate, PlanBuilder, Presence, QkNorms, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, WIDTH_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    layers(b, h, true)
}

/// Emits the MTP head (the first MTP block), whose layer has attention.
pub(super) fn predict(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let block = h.n_layer;
    let table = rotation(b, h)?;
    let x = nextn::begin(b, block)?;
    // What a file tells of each layer it may tell of the last one alone.
    let spec = attending(b, h, h.n_layer - 1, table)?;
    layer(b, block, x, &spec)?;
    nextn::end(b, block, x)
}

/// Emits the layers of Qwen 3.5 and Qwen3-Next, which differ in the order of value heads.
pub(super) fn layers(b: &mut PlanBuilder<'_>, h: &Hparams, interleaved: bool) -> Result<(), Error> {
    let x = b.embedding()?;
    let table = rotation(b, h)?;
    let net = DeltaNet::read(b.keys, interleaved)?;
    let recurrent = super::qwen3next::recurrent_layers(b.keys, h.n_layer)?;
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let spec = attending(b, h, i, table)?;
        if recurrent[i as usize] {
            b.cut(blk(i, "delta"), &[]);
            let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
            let p = net.emit(b, i, n)?;
            b.residual(x, p, None, 1.0)?;
        } else {
            attention(b, i, x, &spec)?;
        }
        feed_forward(b, i, x, &spec)?;
    }
    b.head(x, Presence::Absent, None, None)
}

/// Adds the RoPE table, and returns its index.
fn rotation(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<u8, Error> {
    let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    Ok(b.rope_table(rope))
}

/// The parameters of layer `i` as one with attention.
fn attending(b: &PlanBuilder<'_>, h: &Hparams, i: u32, table: u8) -> Result<Layer, Error> {
    let keys = b.keys;
    let ffn = if keys.maybe("expert_count", N_EXPERT_MAX)? > 0 {
        let spec = moe::read(keys, h.n_embd, RouterGate::Softmax, true)?;
        let spec = moe::n_ff_or(spec, u64::from(h.n_ff_of[i as usize] / spec.router.n_used));
        let shared = keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)?;
        FeedForward::Moe(Moe {
            spec,
            shared: (shared > 0).then(|| Shared {
                n_ff: u64::from(shared),
                gated: true,
            }),
        })
    } else {
        FeedForward::swiglu(h.n_ff(keys, i)?)
    };
    let rope = RopeUse { table, first: 0 };
    Ok(Layer {
        norms: Norms::POST_ATTENTION,
        ..Layer::new(
            AttentionSpec {
                qk_norms: QkNorms::Heads(Presence::Required),
                output_gate: OutputGate::WithQueries,
                ..AttentionSpec::new(h.heads_of(i), Some(rope))
            },
            ffn,
        )
    })
}
