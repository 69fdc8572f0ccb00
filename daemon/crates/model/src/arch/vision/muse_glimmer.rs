//! `muse-glimmer`: the tower of Muse Glimmer, on the `T` patches of an image (shapes are
//! `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = layer_norm(patches * W + positions)            [T][n_embd]         v.patch_embd
//! X += attention(layer_norm(X))                      [T][n_embd]         v.blk.{i}.attn
//! X += feed_forward(layer_norm(X))                   [T][n_embd]         v.blk.{i}.ffn
//! B = blocks of layer_norm(X), by elements           [T / m][m n_embd]   mm.0
//! rows = W2 gelu(W1 gelu(W0 B))                      [T / m][n_out]      mm.0, mm.1, mm.2
//! ```
//!
//! In three of four layers, but not in the last one, a patch attends to those of its window alone,
//! which is as large as the grid of positions. Queries and keys rotate by columns and rows. The
//! text model norms the rows as it does its embeddings.
//!
//! Source: Meta 2026, the published code (MuseGlimmerForConditionalGeneration).

use rocmforge_ops::{Act, Buf, InputRows, Op, RopeAxes, RopeOrder, RopeSpec, TensorDesc};

use super::{Attention, Common, Kind, Qkv};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "muse-glimmer",
    readers: &["muse-glimmer"],
    read,
    build,
};

/// Default side of a block in patches.
const MERGE: u32 = 2;
/// Default maximum number of tokens of an image, that of the authors' processor.
const TOKENS: u32 = 4096;
/// Period of layers, the last of which attends to the whole image.
const PATTERN: u32 = 4;
/// Base of the 2D RoPE over columns and rows.
const FREQ_BASE: f64 = 10_000.0;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 4)?;
    let merge = super::merge_by_element(keys, MERGE)?;
    let side = super::grid_side(keys.gguf, common.n_embd)?;
    if side % merge != 0 {
        let message = format!("must divide the {side} positions of a side, which are a window's");
        return Err(keys.bad("spatial_merge_size", merge, message));
    }
    let mut tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Crossed { side }),
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Square(0),
        filter: Filter::Lanczos,
        both_ways: false,
        row_gap: 0,
        parts: Parts::Windows { side: side / merge },
    };
    tower.sizes = ImageSizes::Nearest {
        tokens: tokens(keys, &tower)?,
    };
    Ok((tower, common.hparams()))
}

/// Maximum number of tokens of an image.
fn tokens(keys: Keys<'_>, tower: &Tower) -> Result<u32, Error> {
    const MAX: &str = "image_max_pixels";
    let most = N_PATCH_MAX / (tower.merge * tower.merge);
    let Some(pixels) = keys.optional_u32(MAX)? else {
        return Ok(TOKENS.min(most));
    };
    match u64::from(pixels) / tower.block_pixels() {
        0 => {
            let message = format!("must be at least {}, a token's", tower.block_pixels());
            Err(keys.bad(MAX, pixels, message))
        }
        tokens => Ok(u32::try_from(tokens).map_or(most, |tokens| tokens.min(most))),
    }
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    let p = b.buf("p", b.n_embd);
    super::patch_products(b, tower, &[("v.patch_embd.weight", p)], Presence::Absent)?;
    b.residual(p, positions, None, 1.0)?;
    b.norm(p, "v.pre_ln.weight", "x")?;
    let rope = b.rope_table(RopeSpec {
        order: RopeOrder::Norm,
        axes: RopeAxes::Plane {
            in_turn: false,
            columns_first: true,
        },
        ..super::plane_rope(h, FREQ_BASE)
    });
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        let attention = Attention {
            heads: h.heads,
            qkv: Qkv::Apart,
            bias,
            rope: Some(rope),
            parts: (i + 1) % PATTERN != 0 && i + 1 != h.n_layer,
        };
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        attention.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        let names = [name("ffn_up"), name("ffn_down")];
        let n_ff = u64::from(h.n_ff);
        super::feed_forward(
            b,
            names.each_ref().map(|name| &**name),
            n_ff,
            Act::GeluErf,
            (n, x),
        )?;
    }
    b.cut("mm.0".to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    let blocks = super::by_element(b, tower, n);
    let y = projection(b, tower, blocks)?;
    super::end(b, tower, &[y]);
    Ok(table)
}

/// Emits the tower's output rows from the blocks' rows, with a segment for each matrix.
fn projection(b: &mut PlanBuilder<'_>, tower: &Tower, blocks: Buf) -> Result<Buf, Error> {
    let rows = super::block(tower);
    let mut x = blocks;
    for (name, out) in [("mm.0", "m0"), ("mm.1", "m1")] {
        let width = super::rows_of(b, &format!("{name}.weight"))?;
        let out = b.buf_rows(out, width, rows);
        b.product(name, x, Presence::Absent, out)?;
        b.op(Op::Activate {
            x: out,
            act: Act::GeluErf,
        });
        let next = if name == "mm.0" { "mm.1" } else { "mm.2" };
        b.cut(next.to_owned(), &[out]);
        x = out;
    }
    let y = b.buf_rows("y", u64::from(tower.n_out), rows);
    b.product("mm.2", x, Presence::Absent, y)
}
