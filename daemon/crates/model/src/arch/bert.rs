//! BERT and its kin, encoders: every row attends to all rows of its text; layer norms behind each
//! sum with the residual stream.
//!
//! ```text
//! X = layer_norm(token embedding + first token type + position)
//! X = layer_norm(X + attention(X) * Wo)
//! X = layer_norm(X + feed_forward(X))
//! ```
//!
//! | architecture | positions | feed-forward |
//! |---|---|---|
//! | `bert` (XLM-RoBERTa too) | learned | one matrix up, GELU |
//! | `nomic-bert` | rotary | gated, SiLU |
//! | `nomic-bert-moe` | rotary | one matrix up, GELU; every second layer a mixture |
//! | `jina-bert-v2` | none: scores fall with distance (ALiBi) | gated, GELU |
//! | `jina-bert-v3` | rotary | one matrix up, GELU |
//!
//! Layers of `jina-bert-v2` for program texts have layer norms over queries and over keys, a second
//! norm behind attention, and the gate behind what is gated where one matrix has both.
//!
//! Sources: Devlin et al. 2019 (arXiv 1810.04805); Conneau et al. 2020 (arXiv 1911.02116); Nussbaum
//! et al. 2024 (arXiv 2402.01613) and 2025 (arXiv 2502.07972); Günther et al. 2023 (arXiv
//! 2310.19923); Sturua et al. 2024 (arXiv 2409.10173).

use rocmforge_ops::{Act, Buf, Op, Role, RopeOrder, RopeUse, RouterGate};

use super::moe::{self, Moe};
use crate::build::{
    AttentionSpec, ClassAct, MoeSpec, NormKind, PlanBuilder, Presence, QkNorms, blk,
};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::N_LAYER_MAX;

/// Maximum bias from which ALiBi's slopes of `jina-bert-v2` follow; files do not have it.
const ALIBI: f32 = 8.0;

/// Tensor that only layers of models for program text have.
const SECOND_NORM: &str = "attn_norm_2.weight";

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = embedding(b, h)?;
    let rope = match h.arch {
        "bert" | "jina-bert-v2" => None,
        _ => {
            let rope = b.keys.rope(RopeOrder::Neox, h.heads.head_dim)?;
            let table = b.rope_table(rope);
            Some(RopeUse { table, first: 0 })
        }
    };
    let mixtures = mixtures(b, h)?;
    for i in 0..h.n_layer {
        attend(b, h, i, x, rope)?;
        let n_ff = h.n_ff(b.keys, i)?;
        let p = match h.arch {
            "nomic-bert" => {
                b.cut(blk(i, "ffn_up"), &[]);
                b.gated_ffn(i, x, n_ff, Act::Silu, Presence::Optional, &[])?
            }
            "jina-bert-v2" => {
                b.cut(blk(i, "ffn_up"), &[]);
                b.up_lies_first = b.has(&blk(i, SECOND_NORM));
                b.gated_ffn(i, x, n_ff, Act::GeluErf, Presence::Optional, &[])?
            }
            _ if mixtures.is_some_and(|(every, _)| i % every == 1) => {
                b.cut(blk(i, "router"), &[]);
                let (_, spec) = mixtures.expect("a layer of experts");
                let spec = moe::n_ff_or(spec, n_ff);
                Moe { spec, shared: None }.emit(b, i, x)?
            }
            _ => {
                b.cut(blk(i, "ffn"), &[]);
                b.plain_ffn(i, x, n_ff, Act::GeluErf, Presence::Optional, ("", "p"))?
            }
        };
        add_and_norm(b, x, p, &blk(i, "layer_output_norm.weight"))?;
    }
    b.encoder_head(x, ClassAct::Tanh)
}

/// `x = layer_norm(x + attention(x) * Wo)`; if the file has a second norm, then `x = layer_norm(x
/// before + x)`.
fn attend(
    b: &mut PlanBuilder<'_>,
    h: &Hparams,
    i: u32,
    x: Buf,
    rope: Option<RopeUse>,
) -> Result<(), Error> {
    let is_jina_v2 = h.arch == "jina-bert-v2";
    let mut attention = AttentionSpec {
        qkv_bias: Presence::Optional,
        output_bias: Presence::Optional,
        ..AttentionSpec::new(h.heads_of(i), rope)
    };
    if is_jina_v2 {
        attention.alibi = ALIBI;
        attention.qk_norms = QkNorms::LayerNormRows;
    }
    b.cut(blk(i, "attn"), &[]);
    let (p, _) = b.attention(i, x, &attention)?;
    let norm = blk(i, "attn_output_norm.weight");
    let second = blk(i, SECOND_NORM);
    if !(is_jina_v2 && b.has(&second)) {
        return add_and_norm(b, x, p, &norm);
    }
    // The sum with what came in is normed, and once more added to that.
    b.residual(p, x, None, 1.0)?;
    let p = b.norm(p, &norm, "p")?;
    add_and_norm(b, x, p, &second)
}

/// The period of MoE layers and their routing; `None` for dense models.
fn mixtures(b: &PlanBuilder<'_>, h: &Hparams) -> Result<Option<(u32, MoeSpec)>, Error> {
    let every = b.keys.maybe("moe_every_n_layers", N_LAYER_MAX)?;
    if every < 2 {
        return Ok(None);
    }
    let spec = moe::read(b.keys, h.n_embd, RouterGate::Softmax, false)?;
    let spec = MoeSpec {
        act: Act::GeluErf,
        gated: false,
        ..spec
    };
    Ok(Some((every, spec)))
}

/// The input of the first layer: token embedding + token type + learned position if there are any,
/// normed.
fn embedding(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<Buf, Error> {
    let x = b.embedding()?;
    b.cut("embedding".to_owned(), &[]);
    if let Some(types) = b.rows_in_file("token_types.weight") {
        let types = b.tensor("token_types.weight", &[b.n_embd, types])?;
        let table = b.place(&types.slice(0, 1), Role::Vector);
        b.op(Op::AddTable {
            x,
            table,
            by_position: false,
        });
    }
    if h.arch == "bert" {
        let table = b.table("position_embd.weight", u64::from(h.n_ctx_train))?;
        b.op(Op::AddTable {
            x,
            table,
            by_position: true,
        });
    }
    b.norm(x, "token_embd_norm.weight", "x")?;
    Ok(x)
}

/// `x = layer_norm(x + p)`.
fn add_and_norm(b: &mut PlanBuilder<'_>, x: Buf, p: Buf, norm: &str) -> Result<(), Error> {
    b.residual(x, p, None, 1.0)?;
    b.norm(x, norm, "x").map(drop)
}
