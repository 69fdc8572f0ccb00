//! LFM 2 and 2.5, dense and mixtures: gated short convolutions, and a few layers
//! that attend with head norms.
//!
//! Source: Liquid AI 2025, "LFM2 Technical Report" (arXiv 2511.23404).

use rocmforge_ops::{Act, Buf, Op, RopeOrder, RopeUse, RouterGate};

use super::layer::{FeedForward, Layer, attention, feed_forward};
use super::mamba2::CONV_KERNEL_MAX;
use super::moe::{self, Moe};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{N_EXPERT_MAX, N_LAYER_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let rope = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    let table = b.rope_table(rope);
    let kernel = keys.count("shortconv.l_cache", CONV_KERNEL_MAX)?;
    if kernel < 2 {
        return Err(keys.bad("shortconv.l_cache", kernel, "must be at least 2"));
    }
    let window = keys.window()?;
    let n_expert = keys.maybe("expert_count", N_EXPERT_MAX)?;
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    for i in 0..h.n_layer {
        let ffn = if n_expert > 0 && i >= dense {
            let spec = MoeSpec {
                selection_bias: Presence::Optional,
                ..moe::read(keys, h.n_embd, RouterGate::Sigmoid, true)?
            };
            FeedForward::Moe(Moe { spec, shared: None })
        } else {
            FeedForward::swiglu(h.n_ff(keys, i)?)
        };
        let spec = Layer::new(
            AttentionSpec {
                qk_norms: QkNorms::Heads(Presence::Required),
                window,
                ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
            },
            ffn,
        );
        if h.n_head_kv_of[i as usize] > 0 {
            attention(b, i, x, &spec)?;
        } else {
            short_conv(b, i, x, kernel)?;
        }
        feed_forward(b, i, x, &spec)?;
    }
    b.head_norm_name("token_embd_norm.weight");
    b.head(x, Presence::Absent, None, None)
}

/// `B, C, u = Win n; X += Wout (C * conv(B * u))`.
fn short_conv(b: &mut PlanBuilder<'_>, i: u32, x: Buf, kernel: u32) -> Result<(), Error> {
    let n_embd = b.n_embd;
    b.cut(blk(i, "conv"), &[]);
    let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
    let all = b.tensor(&blk(i, "shortconv.in_proj.weight"), &[n_embd, 3 * n_embd])?;
    let (gate, out_gate, u) = (
        b.buf("conv b", n_embd),
        b.buf("conv c", n_embd),
        b.buf("conv u", n_embd),
    );
    let products = vec![
        b.rows_of(&all, 0, n_embd, gate)?,
        b.rows_of(&all, n_embd, n_embd, out_gate)?,
        b.rows_of(&all, 2 * n_embd, n_embd, u)?,
    ];
    b.mat_mul(n, products);
    let act = Act::Identity;
    b.op(Op::Gate { gate, up: u, act });
    let conv = (kernel, Presence::Absent, act);
    let mixed = b.conv(&blk(i, "shortconv.conv"), gate, conv, "conv mixed")?;
    b.op(Op::Gate {
        gate: out_gate,
        up: mixed,
        act,
    });
    let p = b.buf("p", n_embd);
    b.product(&blk(i, "shortconv.out_proj"), out_gate, Presence::Absent, p)?;
    b.residual(x, p, None, 1.0)
}
