//! DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Mistral Small 4: multi-head latent attention
//! with keys and values absorbed, so that what is cached a position is one latent vector and one
//! rotated key; a mixture with groups, selection bias and shared experts.
//!
//! Sources: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434) and "DeepSeek-V3 Technical
//! Report" (arXiv 2412.19437).

use rocmforge_ops::{
    Buf, ColumnPart, HeadShape, Op, Role, RopeOrder, RopeScaling, RopeUse, RouterGate,
};

use super::glm4::leave_predictors;
use super::layer::{FeedForward, Layer, feed_forward};
use super::moe::{self, Moe, Shared};
use crate::build::{AttentionSpec, MoeSpec, PlanBuilder, Presence, blk, scale_of};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{HEAD_DIM_MAX, N_CTX_MAX, N_EXPERT_MAX, N_LAYER_MAX, WIDTH_MAX};

/// The shape of the latent attention.
#[derive(Debug, Clone, Copy)]
struct Mla {
    n_head: u32,
    q_lora: u64,
    /// Elements of the latent vector.
    kv_lora: u32,
    /// Elements of a head that are not rotated.
    nope: u32,
    /// Number of elements of a head that are rotated.
    rot: u32,
    v_dim: u32,
    rope: RopeUse,
    scale: f32,
    /// Strength and span of the temperature by position (Mistral).
    temperature: Option<(f32, u32)>,
}

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mla = Mla::read(b, h)?;
    let keys = b.keys;
    let dense = keys.maybe("leading_dense_block_count", N_LAYER_MAX)?;
    let n_expert = keys.maybe("expert_count", N_EXPERT_MAX)?;
    let n_shared = keys.maybe("expert_shared_count", N_EXPERT_MAX)?;
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        b.cut(blk(i, "attn"), &[]);
        let n = b.norm(x, &blk(i, "attn_norm.weight"), "n")?;
        let p = mla.emit(b, i, n)?;
        b.residual(x, p, None, 1.0)?;
        let ffn = if n_expert == 0 || i < dense {
            FeedForward::swiglu(h.n_ff(keys, i)?)
        } else {
            let spec = MoeSpec {
                selection_bias: Presence::Optional,
                ..moe::read(keys, h.n_embd, RouterGate::Softmax, false)?
            };
            FeedForward::Moe(Moe {
                spec,
                shared: (n_shared > 0).then(|| Shared {
                    n_ff: spec.n_ff * u64::from(n_shared),
                    gated: false,
                }),
            })
        };
        let unused = AttentionSpec::new(h.heads_of(i), None);
        feed_forward(b, i, x, &Layer::new(unused, ffn))?;
    }
    b.head(x, Presence::Absent, None, None)
}

impl Mla {
    /// Reads the dimensions of the latent attention, and adds its RoPE table.
    fn read(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<Self, Error> {
        let keys = b.keys;
        let head_dim = keys.count_or("attention.key_length_mla", HEAD_DIM_MAX, h.heads.head_dim)?;
        let mut rope = keys.rope(RopeOrder::Norm, head_dim)?;
        let rot = rope.n_rot;
        let mut scale = scale_of(head_dim);
        if let RopeScaling::Yarn {
            factor,
            attn_factor,
            ..
        } = rope.scaling
        {
            // The magnitude is in the scores' factor, squared, and not in the rotations.
            let log_mul = f64::from(keys.f32_or("rope.scaling.yarn_log_multiplier", 0.0)?) / 0.1;
            let magnitude = attn_factor * (1.0 + 0.1 * log_mul * factor.ln());
            scale *= (magnitude * magnitude) as f32;
            rope.magnitude = 1.0 / (1.0 + 0.1 * factor.ln());
        }
        let orig_ctx = match rope.scaling {
            RopeScaling::Yarn { orig_ctx, .. } => orig_ctx,
            _ => h.n_ctx_train,
        };
        let beta = keys.not_negative_or("attention.temperature_scale", 0.0)?;
        let span = keys.count_or("attention.temperature_length", N_CTX_MAX, orig_ctx)?;
        let table = b.rope_table(rope);
        let mla = Self {
            n_head: h.heads.n_head,
            q_lora: u64::from(keys.maybe("attention.q_lora_rank", WIDTH_MAX)?),
            kv_lora: keys.count("attention.kv_lora_rank", HEAD_DIM_MAX)?,
            nope: head_dim - rot,
            rot,
            v_dim: keys.count_or(
                "attention.value_length_mla",
                HEAD_DIM_MAX,
                h.heads.head_dim_v,
            )?,
            rope: RopeUse { table, first: 0 },
            scale,
            temperature: (beta != 0.0).then_some((beta, span)),
        };
        if mla.nope == 0 {
            return Err(keys.bad(
                "rope.dimension_count",
                rot,
                format!("must be less than the head's {head_dim}"),
            ));
        }
        Ok(mla)
    }

    /// With queries `q = [nope | rot]` a head, the latent vector `c` and the
    /// rotated key `k_r` of a position:
    ///
    /// ```text
    /// score = (Wk_b q_nope) . c + rope(q_rot) . rope(k_r);   out = Wv_b (sum of weights * c)
    /// ```
    ///
    /// so that one key head `[c | k_r]` and one value head `c` serve all query heads.
    fn emit(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<Buf, Error> {
        let n_embd = b.n_embd;
        let n_head = u64::from(self.n_head);
        let (kv_lora, rot) = (u64::from(self.kv_lora), u64::from(self.rot));
        let name = |part: &str| blk(i, part);
        let [q, kv] = self.project(b, i, n)?;
        // Keys: the normed latent vector and the key to be rotated; values: the normed latent
        // vector.
        let c = b.buf("mla c", kv_lora);
        b.columns(1, vec![ColumnPart::new(kv, 0, 0, self.kv_lora)], c);
        let v = b.norm(c, &name("attn_kv_a_norm.weight"), "v")?;
        let k = b.buf("k", kv_lora + rot);
        b.columns(
            1,
            vec![
                ColumnPart::new(v, 0, 0, self.kv_lora),
                ColumnPart::new(kv, self.kv_lora, 0, self.rot),
            ],
            k,
        );
        let query = self.absorb_query(b, i, q)?;
        let heads = HeadShape {
            n_head: self.n_head,
            n_head_kv: 1,
            head_dim: self.kv_lora + self.rot,
            head_dim_v: self.kv_lora,
        };
        let layer = b.kv_layer(&heads, None);
        let rope = RopeUse {
            first: self.kv_lora,
            ..self.rope
        };
        b.op(Op::RopeKv {
            q: query,
            k,
            v,
            heads,
            q_norm: None,
            k_norm: None,
            rope: Some(rope),
            layer,
        });
        let attended = b.buf("mla attended", n_head * kv_lora);
        let spec = AttentionSpec {
            scale: self.scale,
            temperature: self.temperature,
            ..AttentionSpec::new(heads, Some(rope))
        };
        b.attend(i, query, attended, &spec, layer)?;
        let a = b.buf("a", n_head * u64::from(self.v_dim));
        let matrix = b.tensor(
            &name("attn_v_b.weight"),
            &[kv_lora, u64::from(self.v_dim), n_head],
        )?;
        let weight = b.place(&matrix, Role::Matrix);
        b.op(Op::MatMulHeads {
            x: attended,
            n_head: self.n_head,
            weight,
            out: a,
        });
        let p = b.buf("p", n_embd);
        b.product(&name("attn_output"), a, Presence::Absent, p)
    }

    /// Emits the queries, and the latent vector followed by the key to be rotated.
    fn project(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<[Buf; 2], Error> {
        let n_embd = b.n_embd;
        let queries = u64::from(self.n_head) * u64::from(self.nope + self.rot);
        let keys = u64::from(self.kv_lora) + u64::from(self.rot);
        let name = |part: &str| blk(i, part);
        let none = Presence::Absent;
        let q = b.buf("mla q", queries);
        let kv = b.buf("mla kv", keys);
        let latent = b.linear(&name("attn_kv_a_mqa"), n_embd, keys, none, kv)?;
        if self.q_lora > 0 {
            let low = b.buf("mla q low", self.q_lora);
            let down = b.linear(&name("attn_q_a"), n_embd, self.q_lora, none, low)?;
            b.mat_mul(n, vec![down, latent]);
            let normed = b.norm(low, &name("attn_q_a_norm.weight"), "mla q normed")?;
            b.product(&name("attn_q_b"), normed, none, q)?;
        } else {
            let product = b.linear(&name("attn_q"), n_embd, queries, none, q)?;
            b.mat_mul(n, vec![product, latent]);
        }
        Ok([q, kv])
    }

    /// Emits the absorbed queries, followed by the elements to be rotated.
    fn absorb_query(&self, b: &mut PlanBuilder<'_>, i: u32, q: Buf) -> Result<Buf, Error> {
        let (n_head, dim) = (u64::from(self.n_head), self.nope + self.rot);
        let kv_lora = u64::from(self.kv_lora);
        let nope = b.buf("mla q nope", n_head * u64::from(self.nope));
        b.columns(
            self.n_head,
            vec![ColumnPart::new(q, 0, dim, self.nope)],
            nope,
        );
        let absorbed = b.buf("mla q absorbed", n_head * kv_lora);
        let matrix = b.tensor(
            &blk(i, "attn_k_b.weight"),
            &[u64::from(self.nope), kv_lora, n_head],
        )?;
        let weight = b.place(&matrix, Role::Matrix);
        b.op(Op::MatMulHeads {
            x: nope,
            n_head: self.n_head,
            weight,
            out: absorbed,
        });
        let query = b.buf("q", n_head * (kv_lora + u64::from(self.rot)));
        b.columns(
            self.n_head,
            vec![
                ColumnPart::new(absorbed, 0, self.kv_lora, self.kv_lora),
                ColumnPart::new(q, self.nope, dim, self.rot),
            ],
            query,
        );
        Ok(query)
    }
}
