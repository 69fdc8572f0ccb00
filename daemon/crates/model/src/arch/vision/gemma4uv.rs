//! `gemma4uv`: how Gemma 4 12B reads images, without a tower: a patch is a token (`T` of them;
//! shapes are `[rows][width]`):
//!
//! ```text
//! X = layer_norm(layer_norm(patches) * W + bias)     [T][n_embd]       v.patch_embd
//! X = layer_norm(X + positions)                      [T][n_embd]
//! rows = rms_norm(X) * W / sqrt(n_out)               [T][n_out]        mm.input_projection
//! ```
//!
//! Positions are the sum of one of the column and one of the row. The file says the side of a
//! patch as other sizes have it, of which a patch here has `projector.scale_factor` a side. Rows
//! are divided as those of `gemma4v` are.
//!
//! Source: the authors' published code (Gemma4UnifiedForConditionalGeneration), 2026.

use rocmforge_ops::{InputRows, Op, TensorDesc};

use super::{CHANNELS, Kind, SIDE_MAX, gemma4v};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::{Keys, WIDTH_MAX};
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "gemma4uv",
    readers: &["gemma4"],
    read,
    build,
};

/// Epsilon of the norms of patches.
const PATCH_EPS: f32 = 1e-5;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    const PATCH: &str = "patch_size";
    const LAYERS: &str = "block_count";
    let width = keys.count("embedding_length", WIDTH_MAX)?;
    let layers = keys.maybe(LAYERS, u32::MAX)?;
    if layers != 0 {
        return Err(keys.bad(LAYERS, layers, "must be 0, as this projector has no layers"));
    }
    let (part, parts) = (
        keys.count(PATCH, SIDE_MAX)?,
        keys.count_or("projector.scale_factor", SIDE_MAX, gemma4v::MERGE)?,
    );
    let patch = part * parts;
    if patch > SIDE_MAX {
        let message =
            format!("must be at most {SIDE_MAX} where a token has {parts} of them a side");
        return Err(keys.bad(PATCH, part, message));
    }
    let grid = LearnedGrid::Axes {
        n: gemma4v::places(keys, width, 1)?,
    };
    let tokens = gemma4v::TOKENS.min((grid.rows() / 2) as u32);
    let (mean, std) = super::colours(keys)?;
    let tower = Tower {
        projector: KIND.name,
        patch,
        merge: 1,
        width,
        n_out: keys.count("projection_dim", WIDTH_MAX)?,
        deepstack: Vec::new(),
        grid: Some(grid),
        mean,
        std,
        sizes: ImageSizes::Largest {
            tokens: tokens.min(N_PATCH_MAX),
        },
        filter: Filter::Bicubic,
        both_ways: true,
        row_gap: 0,
        parts: Parts::Whole,
    };
    let eps = keys.norm_eps()?;
    Ok((tower, Hparams::of_tower("clip", width, 0, 1, 0, eps)))
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, _: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let (width, side) = (b.n_embd, u64::from(tower.patch));
    let values = CHANNELS * side * side;
    let (x, p) = (b.stream("x"), b.buf("p", width));
    let table = super::positions_table(b, tower)?;
    let positions = b.given("positions", width, InputRows::GridPositions);
    let patches = b.given("patches", values, InputRows::Patches);
    b.cut("v.patch_embd".to_owned(), &[]);
    let n = b.norm_by(patches, "v.patch_norm.1.weight", "normed", PATCH_EPS)?;
    b.product("v.patch_embd", n, bias, p)?;
    b.norm_by(p, "v.patch_norm.2.weight", "x", PATCH_EPS)?;
    b.residual(x, positions, None, 1.0)?;
    let n = b.norm_by(x, "v.patch_norm.3.weight", "n", PATCH_EPS)?;
    b.rms_norm(n, None, tower.width, n);
    b.cut("mm.input_projection".to_owned(), &[n]);
    let n_out = u64::from(tower.n_out);
    let y = b.buf_rows("y", n_out, super::block(tower));
    b.product("mm.input_projection", n, Presence::Absent, y)?;
    let factor = 1.0 / (tower.n_out as f32).sqrt();
    b.op(Op::Scale { x: y, factor });
    super::end(b, tower, &[y]);
    // Files have what hears in them, too.
    b.leave_alone(|name| name.starts_with("a.") || name.starts_with("mm.a."));
    Ok(table)
}
