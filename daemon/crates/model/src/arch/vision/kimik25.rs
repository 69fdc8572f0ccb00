//! `kimik25`: the tower of Kimi K2.5, on the `T` patches of an image (shapes are `[rows][width]`;
//! `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W + bias + positions                 [T][n_embd]       v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]       v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]       v.blk.{i}.ffn
//! N = layer_norm(layer_norm(X))                      [T][n_embd]       mm.1
//! rows = W2 gelu(W1 blocks of N)                     [T / m][n_out]    mm.1, mm.2
//! ```
//!
//! Positions are those of a learned grid, resized to the image's by cubic weights. Queries and keys
//! rotate by columns and rows. Images are not stretched to whole blocks but filled up with black.
//!
//! Source: the authors' published code (Kimi_K25ForConditionalGeneration), 2026.

use rocmforge_ops::{RopeAxes, RopeOrder, RopeSpec, TensorDesc};

use super::{Common, Kind, POSITIONS, Qkv, qwen3vl, siglip};
use crate::build::PlanBuilder;
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "kimik25",
    readers: &["deepseek2"],
    read,
    build,
};

/// Default side of a block in patches.
const MERGE: u32 = 2;
/// Maximum side of a block in patches, so that filling up to whole blocks stays within
/// [`N_PATCH_MAX`](crate::N_PATCH_MAX).
const MERGE_MAX: u32 = 64;
/// Default maximum number of patches of an image, before it is filled up.
const PATCHES: u32 = 1 << 14;
/// Maximum number of patches of a side, that of the authors' processor.
const PATCHES_A_SIDE: u32 = 512;
/// Base of the 2D RoPE over columns and rows.
const FREQ_BASE: f64 = 10_000.0;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    const MAX: &str = "image_max_pixels";
    let common = Common::read(keys, 4)?;
    let merge = keys.count_or("projector.scale_factor", MERGE_MAX, MERGE)?;
    let pixels = keys.optional_u32(MAX)?;
    let patches = pixels.map_or(PATCHES, |pixels| pixels / common.patch.pow(2));
    if patches == 0 {
        let message = format!("must be at least {}, a patch's", common.patch.pow(2));
        return Err(keys.bad(MAX, pixels.unwrap_or(0), message));
    }
    let tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Cubic {
            side: side(keys, common.n_embd)?,
        }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Padded {
            patches: patches.min(PATCHES),
            side: PATCHES_A_SIDE,
        },
        filter: Filter::Bicubic,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Whole,
    };
    Ok((tower, common.hparams()))
}

/// The side of the square grid of positions.
fn side(keys: Keys<'_>, n_embd: u32) -> Result<u32, Error> {
    let tensor = keys.gguf.tensor(POSITIONS);
    let tensor = tensor.ok_or_else(|| Error::MissingTensor(POSITIONS.to_owned()))?;
    let side = tensor.dims[1];
    let most = u64::from(N_PATCH_MAX.isqrt());
    match side == tensor.dims[2] && (1..=most).contains(&side) {
        true => Ok(side as u32),
        false => Err(Error::WrongShape {
            name: POSITIONS.to_owned(),
            found: tensor.shape().to_vec(),
            expected: vec![u64::from(n_embd), side, side],
            arch: "a square grid of positions",
        }),
    }
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let rope = b.rope_table(RopeSpec {
        order: RopeOrder::Norm,
        axes: RopeAxes::Plane {
            in_turn: false,
            columns_first: true,
        },
        ..super::plane_rope(h, FREQ_BASE)
    });
    let (n, table) = siglip::layers_of(b, tower, h, "mm.1", (Qkv::Fused, Some(rope)))?;
    let n = b.norm(n, "mm.input_norm.weight", "mn")?;
    let m = super::merged(b, tower, n);
    let y = b.buf_rows("y", u64::from(tower.n_out), super::block(tower));
    qwen3vl::mlp(b, m, &["mm.1".to_owned(), "mm.2".to_owned()], y, true)?;
    super::end(b, tower, &[y]);
    Ok(table)
}
