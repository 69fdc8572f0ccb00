//! `glm4v`: the tower of GLM-4.1V, 4.5V and 4.6V, on the `T` patches of an image (shapes are
//! `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = patches * W0 + patches * W1 + bias             [T][n_embd]       v.patch_embd
//! X = rms_norm(X) + positions                        [T][n_embd]
//! X += attention(rms_norm(X))                        [T][n_embd]       v.blk.{i}.attn
//! X += W2 (silu(Wg n) * Wu n), n = rms_norm(X)       [T][n_embd]       v.blk.{i}.ffn
//! B = blocks of rms_norm(X) * W + bias               [T / m][n_out]    mm.patch_merger
//! N = gelu(layer_norm(B * W))                        [T / m][n_out]    mm.model.fc
//! rows = Wd (silu(Wg N) * Wu N)                      [T / m][n_out]    mm.gate, mm.up, mm.down
//! ```
//!
//! The two matrices of patches are for the frames of a video, which of an image are the same.
//! Positions are those of a learned grid, resized to the image's by cubic weights; queries and keys
//! rotate by rows and columns. Columns of the first matrix on blocks are, for each element, those
//! of the block's patches.
//!
//! Sources: GLM-V Team 2025, "GLM-4.1V-Thinking" (arXiv 2507.01006), and the authors' published
//! code.

use rocmforge_ops::{Act, Buf, InputRows, Op, Product, Role, TensorDesc};

use super::{Attention, Common, Kind, Qkv, qwen3vl};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::Hparams;
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "glm4v",
    readers: &["glm4", "glm4moe"],
    read,
    build,
};

/// Default side of a block in patches.
const MERGE: u32 = 2;
/// Default minimum and maximum number of tokens of an image: the minimum of the authors' processor,
/// and two thirds of its maximum.
const TOKENS: [u64; 2] = [8, 4096];
/// Base of the 2D RoPE over rows and columns.
const FREQ_BASE: f64 = 10_000.0;
/// Epsilon of the norm of blocks.
const BLOCK_EPS: f32 = 1e-5;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 4)?;
    let mut tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge: super::merge_by_element(keys, MERGE)?,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(LearnedGrid::Cubic {
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
    tower.sizes = qwen3vl::pixels(keys, &tower, TOKENS, true)?;
    Ok((tower, common.hparams()))
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let none = Presence::Absent;
    b.norms_are(NormKind::Rms);
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    patches(b, tower, x)?;
    let rope = b.rope_table(super::plane_rope(h, FREQ_BASE));
    let attention = Attention {
        heads: h.heads,
        qkv: Qkv::Fused,
        bias: none,
        rope: Some(rope),
        parts: false,
    };
    // The file's `feed_forward_length` is that of the rows' gates.
    let n_ff = super::rows_of(b, "v.blk.0.ffn_up.weight")?;
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        attention.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        super::gated(b, i, n_ff, (Act::Silu, none), (n, x))?;
    }
    let blocks = blocks(b, tower, x)?;
    let rows = rows(b, tower, blocks)?;
    super::end(b, tower, &[rows]);
    Ok(table)
}

/// Emits the patches' product with both frames' matrices, normed, plus positions.
fn patches(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<(), Error> {
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    let [p, frame] = ["p", "frame"].map(|name| b.buf(name, b.n_embd));
    let matrices = [("v.patch_embd.weight", p), ("v.patch_embd.weight.1", frame)];
    super::patch_products(b, tower, &matrices, Presence::Required)?;
    b.residual(p, frame, None, 1.0)?;
    b.norm(p, "v.norm_embd.weight", "x")?;
    b.residual(x, positions, None, 1.0)
}

/// Emits one row for each block.
fn blocks(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<Buf, Error> {
    const NAME: &str = "mm.patch_merger";
    b.cut(NAME.to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    let by_element = super::by_element(b, tower, n);
    let (merge, n_out) = (u64::from(tower.merge), u64::from(tower.n_out));
    let out = b.buf_rows("b", n_out, super::block(tower));
    let kernel = b.tensor(&format!("{NAME}.weight"), &[merge, merge, b.n_embd, n_out])?;
    let weight = b.place(&kernel.as_matrix(n_out), Role::Matrix);
    let bias = b.vector_if(&format!("{NAME}.bias"), n_out, Presence::Optional)?;
    b.mat_mul(by_element, vec![Product { weight, bias, out }]);
    b.cut("mm.model.fc".to_owned(), &[out]);
    Ok(out)
}

/// Emits the tower's output rows from the blocks' rows.
fn rows(b: &mut PlanBuilder<'_>, tower: &Tower, blocks: Buf) -> Result<Buf, Error> {
    let none = Presence::Absent;
    let (width, kind) = (u64::from(tower.n_out), super::block(tower));
    let inner = super::rows_of(b, "mm.up.weight")?;
    let f = b.buf_rows("f", width, kind);
    b.product("mm.model.fc", blocks, none, f)?;
    b.norms_are(NormKind::Layer {
        bias: Presence::Required,
    });
    let x = b.norm_by(f, "mm.post_norm.weight", "fn", BLOCK_EPS)?;
    b.op(Op::Activate {
        x,
        act: Act::GeluErf,
    });
    b.cut("mm.gate".to_owned(), &[x]);
    let [gate, up] = ["mgate", "mup"].map(|name| b.buf_rows(name, inner, kind));
    b.product("mm.gate", x, none, gate)?;
    b.cut("mm.up".to_owned(), &[x, gate]);
    b.product("mm.up", x, none, up)?;
    b.op(Op::Gate {
        gate,
        up,
        act: Act::Silu,
    });
    b.cut("mm.down".to_owned(), &[gate]);
    let y = b.buf_rows("y", width, kind);
    b.product("mm.down", gate, none, y)
}
