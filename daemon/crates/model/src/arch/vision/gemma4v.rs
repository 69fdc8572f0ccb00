//! `gemma4v`: Gemma 4's tower, on the `T` patches of an image (shapes are `[rows][width]`; `m` is
//! the number of a block's patches):
//!
//! ```text
//! X = patches * W + positions                        [T][n_embd]       v.patch_embd
//! X += rms_norm(attention(rms_norm(X)))              [T][n_embd]       v.blk.{i}.attn
//! X += rms_norm(Wd (gelu(Wg n) * Wu n))              [T][n_embd]       v.blk.{i}.ffn
//! P = sqrt(n_embd) * mean of each block of X         [T / m][n_embd]   mm.input_projection
//! P = (P - bias) * scale, where the file has them    [T / m][n_embd]
//! rows = rms_norm(P) * W / sqrt(n_out)               [T / m][n_out]
//! ```
//!
//! Positions are the sum of one of the column and one of the row. Queries, keys and values are
//! normed by heads, values without a weight, and scores are not scaled. Of a head the first half
//! rotates by columns and the second by rows, each half as a head of its own. [`Op::RopeKv`] has
//! halves of a head rotate together, so elements of queries and keys are put in the order
//! (rows, columns, rows, columns) by quarters; scores are the same.
//!
//! Files of E2B and E4B have bounds of what goes into each product of a layer and comes out of it.
//! The text model multiplies all that its layers begin with by `sqrt(n_out)`, which the authors
//! multiply embeddings of tokens by alone: so rows of images are divided by it.
//!
//! Source: the authors' published code (Gemma4ForConditionalGeneration), 2026.

use rocmforge_ops::{Act, Buf, ColumnPart, InputRows, Mask, Op, RopeUse, TensorDesc, TensorIndex};

use super::{Common, Kind, POSITIONS, SIDE_MAX};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, LearnedGrid, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "gemma4v",
    readers: &["gemma4"],
    read,
    build,
};

/// Default side of a block in patches, which all published sizes have.
pub(super) const MERGE: u32 = 3;
/// Maximum number of tokens of an image: the default of the authors' processor.
pub(super) const TOKENS: u32 = 280;
/// Base of the 2D RoPE over rows and columns.
const FREQ_BASE: f64 = 100.0;

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let common = Common::read(keys, 4)?;
    let merge = keys.count_or("projector.scale_factor", SIDE_MAX, MERGE)?;
    let grid = LearnedGrid::Axes {
        n: places(keys, common.n_embd, merge)?,
    };
    let n = (grid.rows() / 2) as u32;
    let tokens = TOKENS.min(n / merge).min(N_PATCH_MAX / (merge * merge));
    // The authors take colours of 0 to 1 and have the tower take 2 x - 1 of them.
    let norms = common.mean.iter().zip(common.std);
    let shifted: Vec<f32> = norms.map(|(mean, std)| mean + std / 2.0).collect();
    let tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: Some(grid),
        mean: [shifted[0], shifted[1], shifted[2]],
        std: common.std.map(|std| std / 2.0),
        sizes: ImageSizes::Largest {
            tokens: tokens.max(1),
        },
        filter: Filter::Bicubic,
        both_ways: true,
        row_gap: 0,
        parts: Parts::Whole,
    };
    Ok((tower, common.hparams()))
}

/// Number of columns, and of rows, for which the file has positions.
pub(super) fn places(keys: Keys<'_>, n_embd: u32, merge: u32) -> Result<u32, Error> {
    let tensor = keys
        .gguf
        .tensor(POSITIONS)
        .ok_or_else(|| Error::MissingTensor(POSITIONS.to_owned()))?;
    let n = tensor.dims[1];
    if tensor.dims[2] != 2 || n < u64::from(merge) || n > u64::from(N_PLACE_MAX) {
        return Err(Error::WrongShape {
            name: POSITIONS.to_owned(),
            found: tensor.shape().to_vec(),
            expected: vec![
                u64::from(n_embd),
                n.clamp(u64::from(merge), N_PLACE_MAX.into()),
                2,
            ],
            arch: "a table of columns and one of rows",
        });
    }
    Ok(n as u32)
}

/// Maximum number of columns or rows that have positions.
const N_PLACE_MAX: u32 = 1 << 16;

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    b.norms_are(NormKind::Rms);
    let x = b.stream("x");
    let table = super::positions_table(b, tower)?;
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    let patches = [("v.patch_embd.weight", x)];
    super::patch_products(b, tower, &patches, Presence::Absent)?;
    b.residual(x, positions, None, 1.0)?;
    let table_of_rotations = b.rope_table(super::plane_rope(h, FREQ_BASE));
    let rope = RopeUse {
        table: table_of_rotations,
        first: 0,
    };
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        let p = attention(b, i, n, h, rope)?;
        b.residual(x, p, Some(&name("attn_post_norm.weight")), 1.0)?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        let p = feed_forward(b, i, n, u64::from(h.n_ff))?;
        b.residual(x, p, Some(&name("ffn_post_norm.weight")), 1.0)?;
    }
    b.cut("mm.input_projection".to_owned(), &[]);
    let mean = super::block_means(b, tower, x);
    let factor = (tower.width as f32).sqrt();
    b.op(Op::Scale { x: mean, factor });
    standardized(b, tower, mean)?;
    b.rms_norm(mean, None, tower.width, mean);
    let y = b.buf_rows("y", u64::from(tower.n_out), super::block(tower));
    b.product("mm.input_projection", mean, Presence::Absent, y)?;
    let factor = 1.0 / (tower.n_out as f32).sqrt();
    b.op(Op::Scale { x: y, factor });
    super::end(b, tower, &[y]);
    // Files have the tower that hears in them, too.
    b.leave_alone(|name| name.starts_with("a.") || name.starts_with("mm.a."));
    Ok(table)
}

/// Emits attention of all patches to all, for the normed rows `n`. Returns the buffer of the output
/// product.
fn attention(
    b: &mut PlanBuilder<'_>,
    i: u32,
    n: Buf,
    h: &Hparams,
    rope: RopeUse,
) -> Result<Buf, Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    let (width, heads) = (b.n_embd, h.heads);
    let group = heads.head_dim;
    let [q, k, v] = ["q", "k", "v"].map(|name| b.buf(name, width));
    let products = [("attn_q", q), ("attn_k", k), ("attn_v", v)];
    products_of(b, n, &products.map(|(part, out)| (name(part), out)))?;
    for (x, part) in [
        (q, Some("attn_q_norm.weight")),
        (k, Some("attn_k_norm.weight")),
        (v, None),
    ] {
        let weight = part
            .map(|part| b.vector(&name(part), u64::from(group)))
            .transpose()?;
        b.rms_norm(x, weight, group, x);
    }
    let ordered = [(q, "q by axes"), (k, "k by axes")].map(|(x, name)| by_axes(b, x, name, h));
    let [q, k] = ordered;
    let layer = b.kv_layer(&heads, None);
    b.op(Op::RopeKv {
        q,
        k,
        v,
        heads,
        q_norm: None,
        k_norm: None,
        rope: Some(rope),
        layer,
    });
    let a = b.buf("a", width);
    b.op(Op::Attention {
        q,
        out: a,
        heads,
        layer,
        scale: 1.0,
        mask: Mask::Whole,
        softcap: 0.0,
        sinks: None,
        alibi: 0.0,
    });
    let p = b.buf("p", width);
    products_of(b, a, &[(name("attn_out"), p)])?;
    Ok(p)
}

/// Emits the quarters of each head in the order third, first, fourth, second.
fn by_axes(b: &mut PlanBuilder<'_>, x: Buf, name: &'static str, h: &Hparams) -> Buf {
    let (out, dim) = (b.buf(name, b.n_embd), h.heads.head_dim);
    let quarter = |first| ColumnPart::new(x, first * (dim / 4), dim, dim / 4);
    b.columns(h.heads.n_head, [2, 0, 3, 1].map(quarter).to_vec(), out);
    out
}

fn feed_forward(b: &mut PlanBuilder<'_>, i: u32, n: Buf, n_ff: u64) -> Result<Buf, Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    let (gate, up) = (b.buf("gate", n_ff), b.buf("up", n_ff));
    products_of(b, n, &[(name("ffn_gate"), gate), (name("ffn_up"), up)])?;
    b.op(Op::Gate {
        gate,
        up,
        act: Act::GeluTanh,
    });
    let p = b.buf("p", b.n_embd);
    products_of(b, gate, &[(name("ffn_down"), p)])?;
    Ok(p)
}

/// Emits products of `x` with matrices of the file, clamped to the file's bounds for each.
fn products_of(b: &mut PlanBuilder<'_>, x: Buf, outs: &[(String, Buf)]) -> Result<(), Error> {
    let mut together = Vec::new();
    for (name, out) in outs {
        let (cols, rows) = (b.width(x), b.width(*out));
        let product = b.linear(name, cols, rows, Presence::Absent, *out)?;
        match bounds(b, name, "input")? {
            None => together.push(product),
            Some([low, high]) => {
                let out = b.buf("clamped", cols);
                b.op(Op::Clamp { x, low, high, out });
                b.mat_mul(out, vec![product]);
            }
        }
    }
    if !together.is_empty() {
        b.mat_mul(x, together);
    }
    for (name, out) in outs {
        if let Some([low, high]) = bounds(b, name, "output")? {
            let (x, out) = (*out, *out);
            b.op(Op::Clamp { x, low, high, out });
        }
    }
    Ok(())
}

/// The lower and upper bound of a product's inputs or outputs; `None` if the file has neither.
fn bounds(
    b: &mut PlanBuilder<'_>,
    name: &str,
    side: &str,
) -> Result<Option<[TensorIndex; 2]>, Error> {
    let of = |end: &str| format!("{name}.{side}_{end}");
    let Some(low) = b.vector_if(&of("min"), 1, Presence::Optional)? else {
        let high = of("max");
        return match b.has(&high) {
            true => Err(Error::MissingTensor(of("min"))),
            false => Ok(None),
        };
    };
    Ok(Some([low, b.vector(&of("max"), 1)?]))
}

/// Emits `x = (x - bias) * scale`, if the file has both.
fn standardized(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<(), Error> {
    let width = b.n_embd;
    let Some(bias) = b.vector_if("v.std_bias", width, Presence::Optional)? else {
        return Ok(());
    };
    let scale = b.vector("v.std_scale", width)?;
    let add = |b: &mut PlanBuilder<'_>, x, table| {
        b.op(Op::AddTable {
            x,
            table,
            by_position: false,
        });
    };
    b.op(Op::Scale { x, factor: -1.0 });
    add(b, x, bias);
    b.op(Op::Scale { x, factor: -1.0 });
    // No operation takes a vector's elements as factors: rows of them are one.
    let factors = b.buf_rows("factors", width, super::block(tower));
    b.columns(1, vec![ColumnPart::new(x, 0, 0, tower.width)], factors);
    b.op(Op::Scale {
        x: factors,
        factor: 0.0,
    });
    add(b, factors, scale);
    b.op(Op::Gate {
        gate: x,
        up: factors,
        act: Act::Identity,
    });
    Ok(())
}
