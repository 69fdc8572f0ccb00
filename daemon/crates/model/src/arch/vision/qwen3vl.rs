//! `qwen3vl_merger`: Qwen3-VL's and Qwen 3.5's tower, on the `T` patches of an image (shapes are
//! `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W0 + patches * W1 + positions        [T][n_embd]       v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]       v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]       v.blk.{i}.ffn
//! D = mlp(layer_norm(blocks of X))                   [T / m][n_out]    v.deepstack.{i}
//! Y = mlp(blocks of layer_norm(X))                   [T / m][n_out]    mm.0, mm.2
//! rows = Y, D of each layer that has one             [T / m][n_out * (1 + deepstack)]
//! ```
//!
//! The two matrices of patches are for the frames of a video, which of an image are the same.
//! Positions are those of a learned grid, interpolated to the image's; queries and keys rotate by
//! rows and columns.
//!
//! Sources: Bai et al. 2025, "Qwen3-VL Technical Report" (arXiv 2511.21631), and the authors'
//! published code.

use rocmforge_ops::{Act, Buf, InputRows, Op, TensorDesc};

use super::{Attention, Common, Kind, Qkv, SIDE_MAX};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{DEEPSTACK, DEEPSTACK_MAX, Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "qwen3vl_merger",
    readers: &["qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"],
    read,
    build,
};

/// Default minimum and maximum number of tokens of an image.
const TOKENS: [u64; 2] = [8, 4096];
/// Base of the 2D RoPE over rows and columns.
const FREQ_BASE: f64 = 10_000.0;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 4)?;
    let merge = keys.count_or("spatial_merge_size", SIDE_MAX, 2)?;
    let kept = keys.per_layer("is_deepstack_layers", common.n_layer, 1)?;
    let deepstack: Vec<u32> = (0..common.n_layer)
        .zip(kept.unwrap_or_default())
        .filter_map(|(layer, kept)| (kept == 1).then_some(layer))
        .collect();
    if deepstack.len() > DEEPSTACK_MAX {
        return Err(Error::Unsupported(format!(
            "{} says that {} layers give rows to the text model's layers; at most {DEEPSTACK_MAX} are supported",
            keys.name("is_deepstack_layers"),
            deepstack.len(),
        )));
    }
    let mut tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack,
        grid: Some(LearnedGrid::Square {
            side: super::grid_side(keys.gguf, common.n_embd)?,
        }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Square(0),
        filter: Filter::Bicubic,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Whole,
    };
    tower.sizes = pixels(keys, &tower, TOKENS, false)?;
    Ok((tower, common.hparams()))
}

/// Minimum and maximum number of pixels of an image: by the file's keys, else for `usual` tokens;
/// `enlarges` says whether an image narrower than a token is enlarged.
pub(super) fn pixels(
    keys: Keys<'_>,
    tower: &Tower,
    usual: [u64; 2],
    enlarges: bool,
) -> Result<ImageSizes, Error> {
    const MIN: &str = "image_min_pixels";
    const MAX: &str = "image_max_pixels";
    let (block, patch) = (tower.block_pixels(), u64::from(tower.patch).pow(2));
    let most = (u64::from(N_PATCH_MAX) * patch).max(block);
    let of_key = |key: &str, tokens: u64| -> Result<u64, Error> {
        let found = keys.optional_u32(key)?.map(u64::from);
        Ok(found.unwrap_or(tokens * block))
    };
    let max = of_key(MAX, usual[1])?.min(most);
    if max < block {
        return Err(keys.bad(MAX, max, format!("must be at least {block}, a token's")));
    }
    let min = of_key(MIN, usual[0].min(max / block))?;
    if min > max {
        return Err(keys.bad(MIN, min, format!("must be at most {max}")));
    }
    Ok(ImageSizes::Between {
        min_pixels: min,
        max_pixels: max,
        enlarges,
    })
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    patches(b, tower, x)?;
    let rope = b.rope_table(super::plane_rope(h, FREQ_BASE));
    let attention = Attention {
        heads: h.heads,
        qkv: Qkv::Fused,
        bias,
        rope: Some(rope),
        parts: false,
    };
    let mut outs = Vec::new();
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        attention.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        let names = [name("ffn_up"), name("ffn_down")];
        let names = [&*names[0], &*names[1]];
        super::feed_forward(b, names, u64::from(h.n_ff), Act::GeluTanh, (n, x))?;
        if tower.deepstack.contains(&i) {
            let name = format!("v.deepstack.{i}");
            b.cut(name.clone(), &[]);
            let m = super::merged(b, tower, x);
            let n = b.norm(m, &format!("{name}.norm.weight"), "mn")?;
            let (width, rows) = (u64::from(tower.n_out), super::block(tower));
            let out = b.stream_rows(DEEPSTACK[outs.len()], width, rows);
            let names = [format!("{name}.fc1"), format!("{name}.fc2")];
            mlp(b, n, &names, out, false)?;
            outs.push(out);
        }
    }
    b.cut("mm.0".to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    let m = super::merged(b, tower, n);
    let y = b.buf_rows("y", u64::from(tower.n_out), super::block(tower));
    mlp(b, m, &["mm.0".to_owned(), "mm.2".to_owned()], y, true)?;
    outs.insert(0, y);
    super::end(b, tower, &outs);
    Ok(table)
}

/// Emits the patches' product with both frames' matrices, plus positions.
fn patches(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<(), Error> {
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    let frame = b.buf("frame", b.n_embd);
    let matrices = [("v.patch_embd.weight", x), ("v.patch_embd.weight.1", frame)];
    super::patch_products(b, tower, &matrices, Presence::Required)?;
    for y in [frame, positions] {
        b.residual(x, y, None, 1.0)?;
    }
    Ok(())
}

/// Emits `out = W2 gelu(W1 x)`, in one segment or in two.
pub(super) fn mlp(
    b: &mut PlanBuilder<'_>,
    x: Buf,
    [first, second]: &[String; 2],
    out: Buf,
    in_two: bool,
) -> Result<(), Error> {
    let (width, rows) = (b.width(x), b.rows_kind(x));
    let h = b.buf_rows("mh", width, rows);
    b.product(first, x, Presence::Required, h)?;
    b.op(Op::Activate {
        x: h,
        act: Act::GeluErf,
    });
    if in_two {
        b.cut(second.clone(), &[h]);
    }
    b.product(second, h, Presence::Required, out)?;
    Ok(())
}
