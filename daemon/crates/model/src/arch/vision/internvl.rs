//! `internvl`: InternVL's tower (InternViT) on the `T` patches of an image or of one of its tiles,
//! and a row of the class behind them (shapes are `[rows][width]`; `m` is the number of a block's
//! patches):
//!
//! ```text
//! X = patches * W + bias + positions; X[T] = class + its position
//!                                                    [T + m][n_embd]     v.patch_embd
//! X += ls1 * attention(norm(X))                      [T + m][n_embd]     v.blk.{i}.attn
//! X += ls2 * feed_forward(norm(X))                   [T + m][n_embd]     v.blk.{i}.ffn
//! rows = W2 gelu(W1 layer_norm(blocks of X))         [T / m][n_out]      mm.1
//! ```
//!
//! All attend to the class as to a patch, and nothing else is made of it. Rows become one by
//! blocks, so that its block is filled up with rows which nothing attends to. The smaller tower
//! (300M) norms by mean and variance; the larger one (6B) by the mean of squares, which the file
//! says by norms without a bias, and norms all of a row's queries and keys.
//!
//! An image is a square of one side; one of another shape is cut into tiles, which come before it.
//!
//! Sources: Chen et al. 2023, "InternVL" (arXiv 2312.14238); Chen et al. 2024, "How Far Are We to
//! GPT-4V?" (arXiv 2404.16821), and the authors' published code.

use rocmforge_ops::{Act, Buf, InputRows, Op, TensorDesc};

use super::{Attention, Common, Kind, Qkv, SIDE_MAX};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tiles, Tower};

pub(super) const KIND: Kind = Kind {
    name: "internvl",
    readers: &["qwen2", "qwen3", "qwen3moe", "llama", "gpt-oss"],
    read,
    build,
};

/// Default side of a block in patches.
const MERGE: u32 = 2;
/// Default minimum and maximum number of tiles of an image, those of the authors' processor.
const TILES: [u32; 2] = [1, 12];
/// Maximum number of tiles that a file may ask for.
const TILES_MAX: u32 = 64;
/// Epsilon of the projection's norm.
const PROJECTION_EPS: f32 = 1e-5;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 1)?;
    let merge = keys.count_or("projector.scale_factor", SIDE_MAX, MERGE)?;
    let grid = super::grid_side_behind(keys.gguf, common.n_embd, 1)?;
    let side = side(keys, common.patch, [grid, merge])?;
    let tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Class { side: grid }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::SquareTiles(tiles(keys, side)?),
        filter: Filter::Bicubic,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Class,
    };
    Ok((tower, common.hparams()))
}

/// Side of an image in pixels: that of the grid of positions, in whole blocks.
fn side(keys: Keys<'_>, patch: u32, [grid, merge]: [u32; 2]) -> Result<u32, Error> {
    const SIZE: &str = "image_size";
    let side = keys.count(SIZE, u32::MAX)?;
    // The class and what fills up its block are rows, too.
    let rows = u64::from(grid).pow(2) + u64::from(merge).pow(2);
    if side != grid.saturating_mul(patch) || rows > u64::from(N_PATCH_MAX) {
        let message = format!(
            "must be that of {grid} by {grid} patches of {patch} pixels, as positions are, of which there may be \
             fewer than {N_PATCH_MAX}"
        );
        return Err(keys.bad(SIZE, side, message));
    }
    if grid % merge != 0 {
        let message = format!("must divide the {grid} patches of a side");
        return Err(keys.bad("projector.scale_factor", merge, message));
    }
    Ok(side)
}

fn tiles(keys: Keys<'_>, side: u32) -> Result<Tiles, Error> {
    const LEAST: &str = "preproc_min_tiles";
    const MOST: &str = "preproc_max_tiles";
    let least = keys.count_or(LEAST, TILES_MAX, TILES[0])?;
    let most = keys.count_or(MOST, TILES_MAX, TILES[1])?;
    if most < least {
        return Err(keys.bad(MOST, most, format!("must be no less than {LEAST}, {least}")));
    }
    Ok(Tiles { side, least, most })
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let bias = Presence::Required;
    let layer_norm = NormKind::Layer { bias };
    let norms = match b.has("v.blk.0.ln1.bias") {
        true => layer_norm,
        false => NormKind::Rms,
    };
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    super::patch_products(b, tower, &[("v.patch_embd.weight", x)], bias)?;
    b.residual(x, positions, None, 1.0)?;
    for i in 0..h.n_layer {
        b.norms_are(norms);
        layer(b, h, i, x)?;
    }
    b.cut("mm.1".to_owned(), &[]);
    b.norms_are(layer_norm);
    let m = super::merged(b, tower, x);
    let n = b.norm_by(m, "mm.model.mlp.0.weight", "mn", PROJECTION_EPS)?;
    projection(b, tower, n)?;
    Ok(table)
}

fn layer(b: &mut PlanBuilder<'_>, h: &Hparams, i: u32, x: Buf) -> Result<(), Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    let attention = Attention {
        heads: h.heads,
        qkv: Qkv::Apart,
        bias: Presence::Optional,
        rope: None,
        parts: true,
    };
    b.cut(name("attn"), &[]);
    let n = b.norm(x, &name("ln1.weight"), "n")?;
    let [mut q, mut k, v] = attention.inputs(b, i, n)?;
    for (rows, part, out) in [(&mut q, "attn_q_norm", "qn"), (&mut k, "attn_k_norm", "kn")] {
        let norm = name(&format!("{part}.weight"));
        if b.has(&norm) {
            *rows = normed(b, *rows, &norm, out)?;
        }
    }
    let p = attention.attended(b, i, [q, k, v])?;
    add(b, x, p, &name("ls1.weight"))?;
    b.cut(name("ffn"), &[]);
    let n = b.norm(x, &name("ln2.weight"), "n")?;
    let names = [name("ffn_up"), name("ffn_down")];
    let [up, down] = [&*names[0], &*names[1]];
    let p = super::fed_forward(b, [up, down], u64::from(h.n_ff), Act::GeluErf, n)?;
    add(b, x, p, &name("ls2.weight"))
}

/// Emits an RMSNorm over all elements of each row, whatever other norms are.
fn normed(b: &mut PlanBuilder<'_>, x: Buf, name: &str, out: &'static str) -> Result<Buf, Error> {
    let (width, weight) = (b.width(x), b.vector(name, b.n_embd)?);
    let out = b.buf(out, width);
    b.rms_norm(x, Some(weight), width as u32, out);
    Ok(out)
}

/// Emits `x += scale * p`, with a factor for each element.
fn add(b: &mut PlanBuilder<'_>, x: Buf, p: Buf, scale: &str) -> Result<(), Error> {
    let weight = b.vector(scale, b.n_embd)?;
    b.op(Op::AddWeighted { x, y: p, weight });
    Ok(())
}

fn projection(b: &mut PlanBuilder<'_>, tower: &Tower, n: Buf) -> Result<(), Error> {
    const FIRST: &str = "mm.model.mlp.1";
    const SECOND: &str = "mm.model.mlp.3";
    let (bias, rows) = (Presence::Required, super::block(tower));
    let n_out = u64::from(tower.n_out);
    let inner = super::rows_of(b, &format!("{FIRST}.weight"))?;
    let hidden = b.buf_rows("mh", inner, rows);
    b.product(FIRST, n, bias, hidden)?;
    b.op(Op::Activate {
        x: hidden,
        act: Act::GeluErf,
    });
    let y = b.buf_rows("y", n_out, rows);
    b.product(SECOND, hidden, bias, y)?;
    super::end(b, tower, &[y]);
    Ok(())
}
