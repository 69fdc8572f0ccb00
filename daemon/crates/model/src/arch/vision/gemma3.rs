//! `gemma3`: Gemma 3's SigLIP tower, on the `T` patches of a square image (shapes are
//! `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W + bias + positions                 [T][n_embd]       v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]       v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]       v.blk.{i}.ffn
//! P = mean of each block of layer_norm(X)            [T / m][n_embd]   v.post_ln
//! rows = rms_norm(P) * W / sqrt(n_out)               [T / m][n_out]    mm.input_projection
//! ```
//!
//! The text model multiplies all that its layers begin with by `sqrt(n_out)`, which the authors
//! multiply embeddings of tokens by alone: so rows of images are divided by it. The projection's
//! matrix is in the file as the authors have it, with the inputs' rows. In the text model the
//! tokens of an image attend to each other both ways.
//!
//! Sources: Gemma Team 2025, "Gemma 3 Technical Report" (arXiv 2503.19786); Zhai et al. 2023,
//! "Sigmoid Loss for Language Image Pre-Training" (arXiv 2303.15343); the authors' published code.

use rocmforge_ops::{Op, TensorDesc};

use super::{Common, Kind, SIDE_MAX, siglip};
use crate::build::{NormKind, PlanBuilder};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "gemma3",
    readers: &["gemma3"],
    read,
    build,
};

/// Default side of a block in patches, which all published sizes have.
const MERGE: u32 = 4;
const PROJECTION: &str = "mm.input_projection.weight";

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    const SIZE: &str = "image_size";
    let common = Common::read(keys, 1)?;
    let merge = keys.count_or("projector.scale_factor", SIDE_MAX, MERGE)?;
    let grid = super::grid_side(keys.gguf, common.n_embd)?;
    let side = keys.count(SIZE, u32::MAX)?;
    let patches = u64::from(grid) * u64::from(grid);
    if side != grid.saturating_mul(common.patch) || patches > u64::from(N_PATCH_MAX) {
        let message = format!(
            "must be that of {0} by {0} patches of {1} pixels, as positions are, of which there may be {N_PATCH_MAX}",
            grid, common.patch
        );
        return Err(keys.bad(SIZE, side, message));
    }
    if grid % merge != 0 {
        let message = format!("must divide the {grid} patches of a side");
        return Err(keys.bad("projector.scale_factor", merge, message));
    }
    let tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Square { side: grid }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Square(side),
        filter: Filter::Bilinear,
        both_ways: true,
        row_gap: 0,
        parts: Parts::Whole,
    };
    Ok((tower, common.hparams()))
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let (n, table) = siglip::layers(b, tower, h, "mm.input_projection")?;
    let mean = super::block_means(b, tower, n);
    b.norms_are(NormKind::Rms);
    let n = b.norm(mean, "mm.soft_emb_norm.weight", "mn")?;
    let y = b.buf_rows("y", u64::from(tower.n_out), super::block(tower));
    let (inputs, outputs) = (b.n_embd, u64::from(tower.n_out));
    b.tensor(PROJECTION, &[outputs, inputs])?;
    let weight = b.vector(PROJECTION, inputs * outputs)?;
    b.op(Op::MatMulTransposed {
        x: n,
        weight,
        out: y,
    });
    let factor = 1.0 / (tower.n_out as f32).sqrt();
    b.op(Op::Scale { x: y, factor });
    super::end(b, tower, &[y]);
    Ok(table)
}
