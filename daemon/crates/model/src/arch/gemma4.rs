//! Gemma 4: windowed and full layers with head sizes of their own, the last layers on keys
//! and values of earlier ones, an embedding for each layer (E2B, E4B), a mixture beside the
//! dense feed-forward (26B-A4B).
//!
//! Source: the authors' published code (Gemma4ForCausalLM) and model card, 2026.

use rocmforge_ops::{
    Act, Buf, ColumnPart, HeadShape, InputRows, KvLayer, Op, RopeOrder, RopeSpec, RopeUse,
    RouterGate,
};

use super::gemma2::window_pattern;
use super::layer::{FeedForward, Layer, Norms, attention, feed_forward};
use super::moe;
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, QkNorms, blk};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{HEAD_DIM_MAX, N_CTX_MAX, N_EXPERT_MAX, N_LAYER_MAX, WIDTH_MAX};

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let keys = b.keys;
    let kinds = Kinds::read(b, h)?;
    let shared = keys.maybe("attention.shared_kv_layers", N_LAYER_MAX)?;
    let own = h.n_layer.checked_sub(shared).filter(|&n| n > 0);
    let own = own.ok_or_else(|| {
        let message = format!("must be less than the {} layers", h.n_layer);
        keys.bad("attention.shared_kv_layers", shared, message)
    })?;
    let n_expert = keys.maybe("expert_count", N_EXPERT_MAX)?;
    let per_layer = u64::from(keys.maybe("embedding_length_per_layer_input", WIDTH_MAX)?);
    let final_softcap = keys.not_negative_or("final_logit_softcapping", 0.0)?;
    let layers = match per_layer {
        0 => {
            b.cut("embedding".to_owned(), &[]);
            let factor = (h.n_embd as f32).sqrt();
            b.op(Op::Scale { x, factor });
            None
        }
        width => Some((layer_inputs(b, h, x, width)?, width)),
    };
    // The last layer of each kind that has keys and values of its own.
    let mut last: [Option<KvLayer>; 2] = [None; 2];
    for i in 0..h.n_layer {
        let kind = usize::from(kinds.windowed[i as usize]);
        let shared_kv = if i < own {
            None
        } else {
            Some(last[kind].ok_or_else(|| {
                let message =
                    "no layer of the kind of those that share their KV cache has one of its own";
                keys.bad("attention.shared_kv_layers", shared, message)
            })?)
        };
        let attention_spec = AttentionSpec {
            shared_kv,
            ..kinds.attention(h, i)
        };
        let spec = layer_of(attention_spec, h.n_ff(keys, i)?);
        if shared_kv.is_some() {
            // Files keep the matrices that the shared layers do not use.
            let unused =
                ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"].map(|n| blk(i, n));
            b.leave_alone(|name| unused.iter().any(|u| u == name));
        }
        let kv = attention(b, i, x, &spec)?;
        if i < own {
            last[kind] = Some(kv);
        }
        if n_expert > 0 && b.has(&blk(i, "ffn_gate_inp.weight")) {
            let n_ff = h.n_ff(keys, i)?;
            dense_and_experts(b, h, i, x, n_ff)?;
        } else {
            feed_forward(b, i, x, &spec)?;
        }
        if let Some((inputs, width)) = layers {
            layer_input(b, i, x, inputs, width)?;
        }
        let scale = blk(i, "layer_output_scale.weight");
        if b.has(&scale) {
            let weight = b.vector(&scale, 1)?;
            b.op(Op::ScaleBy { x, weight });
        }
    }
    b.head(x, Presence::Absent, None, Some(final_softcap))
}

/// The two kinds of layers: with full attention and with a window.
struct Kinds {
    window: u32,
    /// For each layer, whether it has a window.
    windowed: Vec<bool>,
    /// Key and value head sizes of layers with a window.
    local_dims: (u32, u32),
    tables: [u8; 2],
}

impl Kinds {
    fn read(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<Self, Error> {
        let keys = b.keys;
        let window = keys.count("attention.sliding_window", N_CTX_MAX)?;
        let windowed = window_pattern(keys, h.n_layer, 6)?;
        let dim = keys.count_or("attention.key_length_swa", HEAD_DIM_MAX, h.heads.head_dim)?;
        let dim_v = keys.count_or("attention.value_length_swa", HEAD_DIM_MAX, dim)?;
        Ok(Self {
            window,
            windowed,
            local_dims: (dim, dim_v),
            tables: rope_tables(b, h, dim)?,
        })
    }

    /// The attention of layer `i` with its own K and V.
    fn attention(&self, h: &Hparams, i: u32) -> AttentionSpec {
        let is_local = self.windowed[i as usize];
        let (head_dim, head_dim_v) = match is_local {
            true => self.local_dims,
            false => (h.heads.head_dim, h.heads.head_dim_v),
        };
        let heads = HeadShape {
            head_dim,
            head_dim_v,
            ..h.heads_of(i)
        };
        let rope = RopeUse {
            table: self.tables[usize::from(is_local)],
            first: 0,
        };
        AttentionSpec {
            window: is_local.then_some(self.window),
            scale: 1.0,
            qk_norms: QkNorms::Heads(Presence::Required),
            value_norm: true,
            keys_as_values: true,
            // Only layers with a window see an image whole.
            causal_in_images: !is_local,
            ..AttentionSpec::new(heads, Some(rope))
        }
    }
}

/// Adds the RoPE tables of full layers and of layers with a window.
fn rope_tables(b: &mut PlanBuilder<'_>, h: &Hparams, local_dim: u32) -> Result<[u8; 2], Error> {
    let keys = b.keys;
    let mut full = keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
    full.factors = b.rope_factors("rope_freqs.weight", full.n_rot)?;
    let local = RopeSpec {
        n_rot: keys.n_rot("rope.dimension_count_swa", local_dim, local_dim)?,
        freq_base: f64::from(keys.positive_or("rope.freq_base_swa", 10_000.0)?),
        factors: None,
        ..full.clone()
    };
    Ok([b.rope_table(full), b.rope_table(local)])
}

fn layer_of(attention: AttentionSpec, n_ff: u64) -> Layer {
    let dense = FeedForward::Gated {
        n_ff,
        act: Act::GeluTanh,
        bias: Presence::Absent,
    };
    Layer {
        norms: Norms::SANDWICH,
        ..Layer::new(attention, dense)
    }
}

/// The inputs of all layers, `[tokens][n_layer * width]`: a projection of the embedding, normed by
/// layers, and rows of a table.
fn layer_inputs(b: &mut PlanBuilder<'_>, h: &Hparams, x: Buf, width: u64) -> Result<Buf, Error> {
    let all = width * u64::from(h.n_layer);
    let rows = b.input(
        "layer rows",
        "per_layer_token_embd.weight",
        all,
        InputRows::TextTokens,
    )?;
    b.cut("embedding".to_owned(), &[]);
    let scale = |b: &mut PlanBuilder<'_>, x, factor| b.op(Op::Scale { x, factor });
    scale(b, x, (h.n_embd as f32).sqrt());
    scale(b, rows, (width as f32).sqrt());
    let projected = b.buf("layer projections", all);
    b.product("per_layer_model_proj", x, Presence::Absent, projected)?;
    scale(b, projected, 1.0 / (h.n_embd as f32).sqrt());
    let weight = Some(b.vector("per_layer_proj_norm.weight", width)?);
    b.rms_norm(projected, weight, width as u32, projected);
    b.add(rows, projected);
    scale(b, rows, std::f32::consts::FRAC_1_SQRT_2);
    Ok(rows)
}

/// `x += rms_norm(Wproj (gelu(Wgate x) * input of the layer))`.
fn layer_input(
    b: &mut PlanBuilder<'_>,
    i: u32,
    x: Buf,
    inputs: Buf,
    width: u64,
) -> Result<(), Error> {
    b.cut(blk(i, "layer_input"), &[]);
    let gate = b.buf("layer gate", width);
    b.product(&blk(i, "inp_gate"), x, Presence::Absent, gate)?;
    let up = b.buf("layer input", width);
    let part = ColumnPart::new(inputs, i * width as u32, 0, width as u32);
    b.columns(1, vec![part], up);
    b.op(Op::Gate {
        gate,
        up,
        act: Act::GeluTanh,
    });
    let p = b.buf("p", b.n_embd);
    b.product(&blk(i, "proj"), gate, Presence::Absent, p)?;
    b.residual(x, p, Some(&blk(i, "post_norm.weight")), 1.0)
}

/// The dense feed-forward and the MoE beside it, each normed after, their sum normed once more.
fn dense_and_experts(
    b: &mut PlanBuilder<'_>,
    h: &Hparams,
    i: u32,
    x: Buf,
    n_ff: u64,
) -> Result<(), Error> {
    b.cut(blk(i, "ffn_up"), &[]);
    let n = b.norm(x, &blk(i, "ffn_norm.weight"), "n")?;
    let p = b.gated_ffn(i, n, n_ff, Act::GeluTanh, Presence::Absent, &[])?;
    let dense = b.norm(p, &blk(i, "post_ffw_norm_1.weight"), "dense")?;
    b.cut(blk(i, "router"), &[dense]);
    let spec = MoeSpec {
        act: Act::GeluTanh,
        ..moe::read(b.keys, h.n_embd, RouterGate::Softmax, true)?
    };
    // The router sees the rows normed without a weight, scaled, times a vector of its own.
    let r = b.buf("router input", b.n_embd);
    let weight = Some(b.vector(&blk(i, "ffn_gate_inp.scale"), b.n_embd)?);
    b.rms_norm(x, weight, h.n_embd, r);
    let factor = 1.0 / (h.n_embd as f32).sqrt();
    b.op(Op::Scale { x: r, factor });
    let logits = b.router_logits(i, r, &spec)?;
    let n = b.norm(x, &blk(i, "pre_ffw_norm_2.weight"), "n")?;
    let m = b.experts(i, n, logits, &spec, &[dense])?;
    let routed = b.norm(m, &blk(i, "post_ffw_norm_2.weight"), "routed")?;
    b.add(dense, routed);
    b.residual(x, dense, Some(&blk(i, "post_ffw_norm.weight")), 1.0)
}
