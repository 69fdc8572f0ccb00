//! Nemotron-H and Nemotron 3: each layer is a Mamba-2 layer, attention without rotation, or a
//! feed-forward (dense, or a mixture with a shared expert) with squared ReLU and no gate.
//!
//! Source: NVIDIA 2025, "Nemotron-H" (arXiv 2504.03624) and "Nemotron 3"; the published
//! code (NemotronHForCausalLM).

use rocmforge_ops::{Act, RouterGate};

use super::glm4::leave_predictors;
use super::mamba2::Mamba2;
use super::moe;
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::WIDTH_MAX;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let mamba = Mamba2::read(keys)?;
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let attends = h.n_head_kv_of[i as usize] > 0;
        let n_ff = u64::from(h.n_ff_of[i as usize]);
        let part = match (attends, n_ff) {
            (true, _) => "attn",
            (false, 0) => "ssm",
            _ => "ffn",
        };
        b.cut(blk(i, part), &[]);
        let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
        let p = match part {
            "attn" => {
                let spec = AttentionSpec {
                    qkv_bias: Presence::Optional,
                    output_bias: Presence::Optional,
                    ..AttentionSpec::new(h.heads_of(i), None)
                };
                b.attention(i, n, &spec)?.0
            }
            "ssm" => mamba.emit(b, i, n, Presence::Required)?,
            _ if b.has(&blk(i, "ffn_gate_inp.weight")) => experts(b, h, i, n, n_ff)?,
            _ => b.plain_ffn(i, n, n_ff, Act::ReluSquared, Presence::Optional, ("", "p"))?,
        };
        b.residual(x, p, None, 1.0)?;
    }
    b.head(x, Presence::Absent, None, None)
}

/// The MoE, in a narrower space where the file has products into and out of it.
fn experts(
    b: &mut PlanBuilder<'_>,
    h: &Hparams,
    i: u32,
    n: rocmforge_ops::Buf,
    n_ff: u64,
) -> Result<rocmforge_ops::Buf, Error> {
    let keys = b.keys;
    let latent = u64::from(keys.maybe("moe_latent_size", WIDTH_MAX)?);
    let mut spec = MoeSpec {
        act: Act::ReluSquared,
        gated: false,
        selection_bias: Presence::Optional,
        ..moe::n_ff_or(moe::read(keys, h.n_embd, RouterGate::Sigmoid, true)?, n_ff)
    };
    let shared = keys.maybe("expert_shared_feed_forward_length", WIDTH_MAX)?;
    let mut carried = Vec::new();
    if shared > 0 {
        let s = b.plain_ffn(
            i,
            n,
            u64::from(shared),
            spec.act,
            Presence::Absent,
            ("_shexp", "shared"),
        )?;
        carried.push(s);
    }
    let logits = b.router_logits(i, n, &spec)?;
    let mut x = n;
    if latent > 0 {
        x = b.buf("latent", latent);
        b.product(&blk(i, "ffn_latent_down"), n, Presence::Absent, x)?;
        spec.width = latent;
    }
    let mut out = b.experts(i, x, logits, &spec, &carried)?;
    if latent > 0 {
        let p = b.buf("p", b.n_embd);
        b.product(&blk(i, "ffn_latent_up"), out, Presence::Absent, p)?;
        out = p;
    }
    if let Some(&y) = carried.first() {
        b.add(out, y);
    }
    Ok(out)
}
