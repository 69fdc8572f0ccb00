//! `lfm2`: LFM2-VL's tower, SigLIP 2 on the `T` patches of an image or of one of its tiles (shapes
//! are `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W + bias + positions                 [T][n_embd]       v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]       v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]       v.blk.{i}.ffn
//! B = blocks of layer_norm(X), normed where the file has a norm
//!                                                    [T / m][m n_embd] mm.1
//! rows = W2 gelu(W1 B)                               [T / m][n_out]
//! ```
//!
//! Positions are those of a learned grid, resized to the image's. An image that is much larger than
//! its most tokens allow is cut into tiles, which come before it.
//!
//! Sources: Tschannen et al. 2025, "SigLIP 2" (arXiv 2502.14786); Liquid AI 2025, "LFM2 Technical
//! Report" (arXiv 2511.23404), and the authors' published code.

use rocmforge_ops::{Act, Op, TensorDesc};

use super::{Common, Kind, SIDE_MAX, siglip};
use crate::build::{PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::{Keys, WIDTH_MAX};
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tiles, Tower};

pub(super) const KIND: Kind = Kind {
    name: "lfm2",
    readers: &["lfm2", "lfm2moe"],
    read,
    build,
};

/// Default side of a block in patches.
const MERGE: u32 = 2;
/// Minimum and maximum number of tokens of an image that is not cut, those of the authors'
/// processor.
const TOKENS: [u64; 2] = [64, 256];
/// Tiles of a larger image, those of the authors' processor.
const TILES: Tiles = Tiles {
    side: 512,
    least: 2,
    most: 10,
};
/// Epsilon of the projection's norm.
const PROJECTION_EPS: f32 = 1e-5;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 1)?;
    let merge = keys.count_or("projector.scale_factor", SIDE_MAX, MERGE)?;
    let mut tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Resized {
            side: super::grid_side(keys.gguf, common.n_embd)?,
        }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Square(0),
        filter: Filter::Bilinear,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Whole,
    };
    let token = tower.block_pixels();
    if !TILES.side.is_multiple_of(tower.patch * merge)
        || TOKENS[1] * u64::from(merge * merge) > N_PATCH_MAX.into()
        || (TILES.side / tower.patch).pow(2) > N_PATCH_MAX
    {
        let message = format!(
            "must be a side of patches of which {merge} divide the {} pixels of a tile, with at most \
             {N_PATCH_MAX} patches",
            TILES.side
        );
        return Err(keys.bad("patch_size", tower.patch, message));
    }
    tower.sizes = ImageSizes::Tiled {
        min_pixels: TOKENS[0] * token,
        max_pixels: TOKENS[1] * token,
        tiles: TILES,
    };
    Ok((tower, common.hparams()))
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let (n, table) = siglip::layers(b, tower, h, "mm.1")?;
    let mut blocks = super::merged(b, tower, n);
    const NORM: &str = "mm.input_norm.weight";
    if b.has(NORM) {
        blocks = b.norm_by(blocks, NORM, "mn", PROJECTION_EPS)?;
    }
    let rows = super::block(tower);
    let inner = b.rows_in_file("mm.1.weight").unwrap_or(0);
    if !(1..=u64::from(WIDTH_MAX)).contains(&inner) {
        return Err(Error::MissingTensor("mm.1.weight".to_owned()));
    }
    let hidden = b.buf_rows("mh", inner, rows);
    let optional = Presence::Optional;
    b.product("mm.1", blocks, optional, hidden)?;
    b.op(Op::Activate {
        x: hidden,
        act: Act::GeluErf,
    });
    let y = b.buf_rows("y", u64::from(tower.n_out), rows);
    b.product("mm.2", hidden, optional, y)?;
    super::end(b, tower, &[y]);
    Ok(table)
}
