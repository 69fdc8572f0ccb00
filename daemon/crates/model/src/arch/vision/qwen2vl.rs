//! `qwen2.5vl_merger`: Qwen2.5-VL's tower, on the `T` patches of an image (shapes are
//! `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W0 + patches * W1                    [T][n_embd]       v.patch_embd
//! X += attention(rms_norm(X))                        [T][n_embd]       v.blk.{i}.attn
//! X += W2 (silu(Wg n) * Wu n), n = rms_norm(X)       [T][n_embd]       v.blk.{i}.ffn
//! rows = W2 gelu(W1 blocks of rms_norm(X))           [T / m][n_out]    mm.0, mm.2
//! ```
//!
//! The two matrices of patches are for the frames of a video, which of an image are the same.
//! Queries and keys rotate by rows and columns. In all layers but each `n_wa_pattern`-th a patch
//! attends to those of its window alone. Patches come window by window, and what is made of their
//! blocks is put back in the image's order.
//!
//! Sources: Bai et al. 2025, "Qwen2.5-VL Technical Report" (arXiv 2502.13923), and the authors'
//! published code.

use rocmforge_ops::{Act, TensorDesc};

use super::{Attention, Common, Kind, Qkv, SIDE_MAX, qwen3vl};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::{Keys, N_LAYER_MAX};
use crate::tower::{Filter, ImageSizes, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "qwen2.5vl_merger",
    readers: &["qwen2vl"],
    read,
    build,
};

/// Default minimum and maximum number of tokens of an image: the minimum of the authors' processor,
/// and a quarter of its maximum.
const TOKENS: [u64; 2] = [4, 4096];
/// Key of the period of layers, the last of which attends to the whole image.
const PATTERN: &str = "n_wa_pattern";
/// Default side of a window in pixels, which all published sizes have.
const WINDOW: u32 = 112;
/// Maximum side of a window in pixels.
const WINDOW_MAX: u32 = 1 << 16;
/// Base of the 2D RoPE over rows and columns.
const FREQ_BASE: f64 = 10_000.0;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 4)?;
    let merge = keys.count_or("spatial_merge_size", SIDE_MAX, 2)?;
    keys.count(PATTERN, N_LAYER_MAX)?;
    let window = keys.count_or("window_size", WINDOW_MAX, WINDOW)?;
    let mut tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: None,
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Square(0),
        filter: Filter::Bicubic,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Windows {
            side: window / merge / common.patch,
        },
    };
    if tower.parts == (Parts::Windows { side: 0 }) {
        let message = format!("must be at least {}, a token's", merge * common.patch);
        return Err(keys.bad("window_size", window, message));
    }
    tower.sizes = qwen3vl::pixels(keys, &tower, TOKENS, false)?;
    Ok((tower, common.hparams()))
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Rms);
    let (x, frame) = (b.stream("x"), b.buf("frame", b.n_embd));
    let matrices = [("v.patch_embd.weight", x), ("v.patch_embd.weight.1", frame)];
    super::patch_products(b, tower, &matrices, Presence::Absent)?;
    b.residual(x, frame, None, 1.0)?;
    let rope = b.rope_table(super::plane_rope(h, FREQ_BASE));
    let attention = Attention {
        heads: h.heads,
        qkv: Qkv::Apart,
        bias,
        rope: Some(rope),
        parts: false,
    };
    let pattern = b.keys.count(PATTERN, N_LAYER_MAX)?;
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        let parts = (i + 1) % pattern != 0;
        Attention { parts, ..attention }.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        super::gated(b, i, u64::from(h.n_ff), (Act::Silu, bias), (n, x))?;
    }
    b.cut("mm.0".to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    let m = super::merged(b, tower, n);
    let y = b.buf_rows("y", u64::from(tower.n_out), super::block(tower));
    qwen3vl::mlp(b, m, &["mm.0".to_owned(), "mm.2".to_owned()], y, true)?;
    super::end(b, tower, &[y]);
    Ok(None)
}
