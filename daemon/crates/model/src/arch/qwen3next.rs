//! Qwen3-Next and Qwen3-Coder-Next: three layers of gated delta net to one that
//! attends, each with a mixture.
//!
//! Sources: the authors' published code (Qwen3NextForCausalLM), 2025; Yang et al. 2024, "Gated
//! Delta Networks" (arXiv 2412.06464).

use rocmforge_ops::{Act, Buf, ColumnPart, Op};

use super::mamba2::CONV_KERNEL_MAX;
use crate::build::{PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{HEAD_DIM_MAX, Keys, N_HEAD_MAX, N_LAYER_MAX, WIDTH_MAX};

/// Epsilon of the L2 norm of queries and keys.
const L2_EPS: f32 = 1e-6;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    super::qwen35::layers(b, h, false)
}

/// For each layer, whether it is recurrent: as the file's list says, else all but every
/// `full_attention_interval`-th.
pub(super) fn recurrent_layers(keys: Keys<'_>, n_layer: u32) -> Result<Vec<bool>, Error> {
    if let Some(list) = keys.per_layer("attention.recurrent_layers", n_layer, 1)? {
        return Ok(list.into_iter().map(|r| r != 0).collect());
    }
    let interval = keys.count_or("full_attention_interval", N_LAYER_MAX, 4)?;
    Ok((0..n_layer).map(|i| (i + 1) % interval != 0).collect())
}

/// The shape of a gated delta net layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaNet {
    kernel: u32,
    dim_k: u32,
    dim_v: u32,
    n_head_k: u32,
    n_head_v: u32,
    interleaved: bool,
}

impl DeltaNet {
    pub(super) fn read(keys: Keys<'_>, interleaved: bool) -> Result<Self, Error> {
        let n_head_v = keys.count("ssm.time_step_rank", N_HEAD_MAX)?;
        let n_head_k = keys.count("ssm.group_count", N_HEAD_MAX)?;
        let inner = keys.count("ssm.inner_size", WIDTH_MAX)?;
        let kernel = keys.count("ssm.conv_kernel", CONV_KERNEL_MAX)?;
        if kernel < 2 {
            return Err(keys.bad("ssm.conv_kernel", kernel, "must be at least 2"));
        }
        if !n_head_v.is_multiple_of(n_head_k) {
            let message = format!("must divide the {n_head_v} value heads");
            return Err(keys.bad("ssm.group_count", n_head_k, message));
        }
        if !inner.is_multiple_of(n_head_v) || inner / n_head_v > HEAD_DIM_MAX {
            let message = format!("must be {n_head_v} heads of at most {HEAD_DIM_MAX}");
            return Err(keys.bad("ssm.inner_size", inner, message));
        }
        Ok(Self {
            kernel,
            dim_k: keys.count("ssm.state_size", HEAD_DIM_MAX)?,
            dim_v: inner / n_head_v,
            n_head_k,
            n_head_v,
            interleaved,
        })
    }

    /// Emits the layer on normed rows `n`. Returns the buffer of the output product.
    pub(super) fn emit(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<Buf, Error> {
        let heads = u64::from(self.n_head_v);
        let values = heads * u64::from(self.dim_v);
        let name = |part: &str| blk(i, part);
        let [qkv, z, alpha, beta] = self.project(b, i, n)?;
        let conv = (self.kernel, Presence::Absent, Act::Silu);
        let mixed = b.conv(&name("ssm_conv1d"), qkv, conv, "delta mixed")?;
        let o = b.buf("delta out", values);
        let a = b.vector(&name("ssm_a"), heads)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), heads)?;
        let state = b.state(heads * u64::from(self.dim_k) * u64::from(self.dim_v));
        b.op(Op::DeltaNet {
            qkv: mixed,
            alpha,
            beta,
            a,
            dt_bias,
            n_head_k: self.n_head_k,
            n_head_v: self.n_head_v,
            dim_k: self.dim_k,
            dim_v: self.dim_v,
            interleaved: self.interleaved,
            eps: L2_EPS,
            state,
            out: o,
        });
        let weight = Some(b.vector(&name("ssm_norm.weight"), u64::from(self.dim_v))?);
        b.rms_norm(o, weight, self.dim_v, o);
        b.op(Op::Gate {
            gate: z,
            up: o,
            act: Act::Silu,
        });
        let p = b.buf("p", b.n_embd);
        b.product(&name("ssm_out"), z, Presence::Absent, p)
    }

    /// Emits the products: queries, keys and values in one buffer; the output gate; decay and
    /// strength for each head.
    fn project(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<[Buf; 4], Error> {
        let n_embd = b.n_embd;
        let heads = u64::from(self.n_head_v);
        let values = heads * u64::from(self.dim_v);
        let channels = 2 * u64::from(self.n_head_k) * u64::from(self.dim_k) + values;
        let name = |part: &str| blk(i, part);
        let (qkv, z) = (b.buf("delta qkv", channels), b.buf("z", values));
        let (alpha, beta) = (b.buf("alpha", heads), b.buf("beta", heads));
        let none = Presence::Absent;
        let mut products = vec![
            b.linear(&name("attn_qkv"), n_embd, channels, none, qkv)?,
            b.linear(&name("attn_gate"), n_embd, values, none, z)?,
        ];
        if b.has(&name("ssm_ba.weight")) {
            let both = b.buf("beta alpha", 2 * heads);
            products.push(b.linear(&name("ssm_ba"), n_embd, 2 * heads, none, both)?);
            b.mat_mul(n, products);
            // For each key head the betas of its value heads, then their alphas.
            let r = self.n_head_v / self.n_head_k;
            for (first, out) in [(0, beta), (r, alpha)] {
                let part = ColumnPart::new(both, first, 2 * r, r);
                b.columns(self.n_head_k, vec![part], out);
            }
        } else {
            products.push(b.linear(&name("ssm_alpha"), n_embd, heads, none, alpha)?);
            products.push(b.linear(&name("ssm_beta"), n_embd, heads, none, beta)?);
            b.mat_mul(n, products);
        }
        Ok([qkv, z, alpha, beta])
    }
}
