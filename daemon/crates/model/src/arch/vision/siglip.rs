//! SigLIP's layers, which towers of Gemma 3, LFM 2 and Kimi begin with, on the `T` patches of an
//! image:
//!
//! ```text
//! X = patches * W + bias + positions                 [T][n_embd]       v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]       v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]       v.blk.{i}.ffn
//! N = layer_norm(X)                                  [T][n_embd]       v.post_ln
//! ```
//!
//! Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training" (arXiv 2303.15343).

use rocmforge_ops::{Act, Buf, InputRows, TensorDesc};

use super::{Attention, Qkv};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::tower::Tower;

/// Emits the layers, and begins the segment of the projection with the final norm. Returns the
/// normed rows, and the table of learned positions, if the tower has one.
pub(super) fn layers(
    b: &mut PlanBuilder<'_>,
    tower: &Tower,
    h: &Hparams,
    projection: &str,
) -> Result<(Buf, Option<TensorDesc>), Error> {
    layers_of(b, tower, h, projection, (Qkv::Apart, None))
}

/// As [`layers`], with a given storage of queries, keys and values, and optional RoPE.
pub(super) fn layers_of(
    b: &mut PlanBuilder<'_>,
    tower: &Tower,
    h: &Hparams,
    projection: &str,
    (qkv, rope): (Qkv, Option<u8>),
) -> Result<(Buf, Option<TensorDesc>), Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    super::patch_products(b, tower, &[("v.patch_embd.weight", x)], bias)?;
    b.residual(x, positions, None, 1.0)?;
    let attention = Attention {
        heads: h.heads,
        qkv,
        bias,
        rope,
        parts: false,
    };
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        attention.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        let (up, down) = (name("ffn_up"), name("ffn_down"));
        let n_ff = u64::from(h.n_ff);
        // The first converters gave each the other's name.
        let swapped = b.rows_in_file(&format!("{down}.weight")) == Some(n_ff) && n_ff != b.n_embd;
        let names = match swapped {
            true => [&*down, &*up],
            false => [&*up, &*down],
        };
        super::feed_forward(b, names, n_ff, Act::GeluTanh, (n, x))?;
    }
    b.cut(projection.to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    Ok((n, table))
}
