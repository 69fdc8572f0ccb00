//! Vision towers: encoders of an image's patches, whose output rows language models take in the
//! place of embeddings of tokens. A file a tower, and here what they have in common.
//!
//! A tower's plan begins with an image's patches and ends with its rows. Patches come in the order
//! of blocks ([`Tower::places`]), so that those that become one row stand together; the towers'
//! attention knows no order, and positions are those of the places.

mod gemma3;
mod gemma4uv;
mod gemma4v;
mod glm4v;
mod internvl;
mod kimik25;
mod lfm2;
mod muse_glimmer;
mod pixtral;
mod qwen2vl;
mod qwen3vl;
mod siglip;

use rocmforge_gguf::Gguf;
use rocmforge_ops::{
    Act, Buf, ColumnPart, HeadShape, InputRows, Mask, Op, Product, Role, RopeAxes, RopeOrder,
    RopeScaling, RopeSpec, RopeUse, Rows, TensorDesc,
};

use crate::build::{PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::{Keys, N_HEAD_MAX, N_LAYER_MAX, WIDTH_MAX};
use crate::tower::{ClassRow, LearnedGrid, Parts, Tower};

/// A kind of projector: how it is read and built.
pub(crate) struct Kind {
    /// Value of `clip.projector_type`.
    name: &'static str,
    /// Architectures of text models that take the tower's rows.
    pub(crate) readers: &'static [&'static str],
    /// Reads the tower's description and hyperparameters from the keys.
    pub(crate) read: fn(Keys<'_>) -> Result<(Tower, Hparams), Error>,
    /// Emits the tower's operations. Returns the table of learned positions, if it has one.
    pub(crate) build:
        fn(&mut PlanBuilder<'_>, &Tower, &Hparams) -> Result<Option<TensorDesc>, Error>,
}

/// The supported kinds of projectors.
const KINDS: [&Kind; 11] = [
    &qwen2vl::KIND,
    &qwen3vl::KIND,
    &gemma3::KIND,
    &gemma4v::KIND,
    &gemma4uv::KIND,
    &glm4v::KIND,
    &internvl::KIND,
    &kimik25::KIND,
    &lfm2::KIND,
    &muse_glimmer::KIND,
    &pixtral::KIND,
];

/// Number of colour channels of a patch.
const CHANNELS: u64 = 3;
/// Maximum side of a patch in pixels, or of a block in patches.
const SIDE_MAX: u32 = 256;
/// Tensor with the bias of the patch product.
const PATCH_BIAS: &str = "v.patch_embd.bias";
/// Tensor with the learned positions.
const POSITIONS: &str = "v.position_embd.weight";

/// The kind of a projector file.
pub(crate) fn kind(gguf: &Gguf) -> Result<&'static Kind, Error> {
    let says = |key| gguf.str(key).ok().flatten();
    let name = says("clip.projector_type").or_else(|| says("clip.vision.projector_type"));
    let name = name.ok_or_else(|| Error::MissingKey("clip.projector_type".to_owned()))?;
    named(name).ok_or_else(|| {
        Error::Unsupported(format!(
            "projector '{}' is not supported; supported: {}",
            name.chars().take(64).collect::<String>(),
            KINDS.map(|kind| kind.name).join(", ")
        ))
    })
}

/// The kind with this name, if it is supported.
pub(crate) fn named(name: &str) -> Option<&'static Kind> {
    KINDS.into_iter().find(|kind| kind.name == name)
}

/// Architectures of text models that take the rows of some tower.
pub(crate) fn readers() -> impl Iterator<Item = &'static str> {
    KINDS.into_iter().flat_map(|kind| kind.readers).copied()
}

/// Parameters that all towers have in the same keys.
struct Common {
    n_embd: u32,
    n_layer: u32,
    n_head: u32,
    n_ff: u32,
    patch: u32,
    n_out: u32,
    mean: [f32; 3],
    std: [f32; 3],
    norm_eps: f32,
}

impl Common {
    /// Reads the common parameters; a head's size is a multiple of `of_head`.
    fn read(keys: Keys<'_>, of_head: u32) -> Result<Self, Error> {
        let n_embd = keys.count("embedding_length", WIDTH_MAX)?;
        let n_head = keys.count("attention.head_count", N_HEAD_MAX)?;
        if n_embd % n_head != 0 || (n_embd / n_head) % of_head != 0 {
            let message =
                format!("must divide the width {n_embd} into heads of a multiple of {of_head}");
            return Err(keys.bad("attention.head_count", n_head, message));
        }
        let (mean, std) = colours(keys)?;
        Ok(Self {
            n_embd,
            n_layer: keys.count("block_count", N_LAYER_MAX)?,
            n_head,
            n_ff: keys.count("feed_forward_length", WIDTH_MAX)?,
            patch: keys.count("patch_size", SIDE_MAX)?,
            n_out: keys.count("projection_dim", WIDTH_MAX)?,
            mean,
            std,
            norm_eps: keys.norm_eps()?,
        })
    }

    fn hparams(&self) -> Hparams {
        Hparams::of_tower(
            "clip",
            self.n_embd,
            self.n_layer,
            self.n_head,
            self.n_ff,
            self.norm_eps,
        )
    }
}

/// Mean and divisor of the colour channels.
fn colours(keys: Keys<'_>) -> Result<([f32; 3], [f32; 3]), Error> {
    let numbers = |key: &str| -> Result<[f32; 3], Error> {
        let found = keys
            .gguf
            .f32s(&keys.name(key))?
            .ok_or_else(|| keys.missing(key))?;
        match found[..] {
            [r, g, b] if found.iter().all(|v| v.is_finite()) => Ok([r, g, b]),
            _ => Err(keys.bad(key, format!("{found:?}"), "must be three finite numbers")),
        }
    };
    let (mean, std) = (numbers("image_mean")?, numbers("image_std")?);
    let normed = |colour: f32| (0..3).map(move |i| (colour - mean[i]) / std[i]);
    if !normed(0.0).chain(normed(1.0)).all(f32::is_finite) {
        let message = "must be three numbers by which colours can be divided";
        return Err(keys.bad("image_std", format!("{std:?}"), message));
    }
    Ok((mean, std))
}

/// RoPE over rows and columns, each for half of a head, of half-split pairs.
fn plane_rope(h: &Hparams, freq_base: f64) -> RopeSpec {
    RopeSpec {
        order: RopeOrder::Neox,
        n_rot: h.heads.head_dim,
        freq_base,
        scaling: RopeScaling::None,
        factors: None,
        long: None,
        magnitude: 1.0,
        axes: RopeAxes::Plane {
            columns_first: false,
            in_turn: false,
        },
    }
}

/// The side of the square grid of learned positions.
fn grid_side(gguf: &Gguf, n_embd: u32) -> Result<u32, Error> {
    grid_side_behind(gguf, n_embd, 0)
}

/// As [`grid_side`], for a grid behind `others` other positions.
fn grid_side_behind(gguf: &Gguf, n_embd: u32, others: u64) -> Result<u32, Error> {
    let tensor = gguf
        .tensor(POSITIONS)
        .ok_or_else(|| Error::MissingTensor(POSITIONS.to_owned()))?;
    let n = tensor.dims[1].saturating_sub(others);
    let side = n.isqrt();
    if side == 0 || side * side != n || n > u64::from(N_PATCH_MAX) {
        return Err(Error::WrongShape {
            name: POSITIONS.to_owned(),
            found: tensor.shape().to_vec(),
            expected: vec![u64::from(n_embd), side * side + others],
            arch: "a square grid of positions",
        });
    }
    Ok(side as u32)
}

/// The class row, if the tower has one.
pub(crate) fn class_row(b: &mut PlanBuilder<'_>, tower: &Tower) -> Result<Option<ClassRow>, Error> {
    if tower.parts != Parts::Class {
        return Ok(None);
    }
    let mut vector = |name: &str| -> Result<TensorDesc, Error> {
        let found = b.tensor(name, &[b.n_embd])?;
        Ok(found.with_role(Role::Vector))
    };
    Ok(Some(ClassRow {
        embedding: vector("v.class_embd")?,
        bias: vector(PATCH_BIAS)?,
    }))
}

/// Whether learned positions are stored separately for rows and columns.
fn is_plane(gguf: &Gguf) -> bool {
    gguf.tensor(POSITIONS).is_some_and(|t| t.dims[2] > 1)
}

/// The table of a tower's learned positions, if it has one.
fn positions_table(b: &mut PlanBuilder<'_>, tower: &Tower) -> Result<Option<TensorDesc>, Error> {
    let Some(grid) = &tower.grid else {
        return Ok(None);
    };
    let table = match *grid {
        LearnedGrid::Axes { n } => b
            .tensor(POSITIONS, &[b.n_embd, u64::from(n), 2])?
            .as_matrix(grid.rows()),
        // Kimi's file says rows and columns.
        LearnedGrid::Cubic { side } if is_plane(b.keys.gguf) => {
            let side = u64::from(side);
            b.tensor(POSITIONS, &[b.n_embd, side, side])?
                .as_matrix(grid.rows())
        }
        LearnedGrid::Square { .. }
        | LearnedGrid::Resized { .. }
        | LearnedGrid::Cubic { .. }
        | LearnedGrid::Crossed { .. }
        | LearnedGrid::Class { .. } => b.tensor(POSITIONS, &[b.n_embd, grid.rows()])?,
    };
    Ok(Some(table.with_role(Role::Matrix)))
}

/// Number of rows of a matrix of the file, checked against a maximum.
fn rows_of(b: &PlanBuilder<'_>, name: &str) -> Result<u64, Error> {
    let found = b.rows_in_file(name).unwrap_or(0);
    match (1..=u64::from(WIDTH_MAX)).contains(&found) {
        true => Ok(found),
        false => Err(Error::MissingTensor(name.to_owned())),
    }
}

/// Maximum number of parts of [`Op::Columns`], and so of rows of a block that are interleaved by
/// elements.
const BLOCK_MAX: u32 = 4;

/// Side of a block in patches, for blocks whose rows are interleaved by elements.
fn merge_by_element(keys: Keys<'_>, default: u32) -> Result<u32, Error> {
    const MERGE: &str = "spatial_merge_size";
    let merge = keys.count_or(MERGE, SIDE_MAX, default)?;
    if merge * merge > BLOCK_MAX {
        let message = format!("must not give blocks of more than {BLOCK_MAX} patches");
        return Err(keys.bad(MERGE, merge, message));
    }
    Ok(merge)
}

/// Emits the rows of each block as one, interleaved: for each element the values of all patches.
fn by_element(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Buf {
    let (m, width) = (merged(b, tower, x), tower.width);
    let n = tower.merge * tower.merge;
    let out = b.buf_rows("me", u64::from(n * width), block(tower));
    b.columns(
        width,
        (0..n)
            .map(|patch| ColumnPart::new(m, patch * width, 1, 1))
            .collect(),
        out,
    );
    out
}

/// The row kind for one row per block.
fn block(tower: &Tower) -> Rows {
    Rows::Merged(tower.merge * tower.merge)
}

/// Emits products of the patches with each of these matrices; the first one gets a bias if the
/// tower has one.
fn patch_products(
    b: &mut PlanBuilder<'_>,
    tower: &Tower,
    matrices: &[(&str, Buf)],
    bias: Presence,
) -> Result<(), Error> {
    let side = u64::from(tower.patch);
    let patches = b.given("patches", CHANNELS * side * side, InputRows::Patches);
    b.cut("v.patch_embd".to_owned(), &[]);
    let dims = [side, side, CHANNELS, b.n_embd];
    let bias = b.vector_if(PATCH_BIAS, b.n_embd, bias)?;
    let mut products = Vec::new();
    for (i, &(name, out)) in matrices.iter().enumerate() {
        let kernel = b.tensor(name, &dims)?.as_matrix(b.n_embd);
        let weight = b.place(&kernel, Role::Matrix);
        let bias = bias.filter(|_| i == 0);
        products.push(Product { weight, bias, out });
    }
    b.mat_mul(patches, products);
    Ok(())
}

/// How queries, keys and values are stored in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Qkv {
    /// As rows of one matrix.
    Fused,
    /// As one matrix each.
    Apart,
}

/// Attention of a tower's layer, over all patches or within parts.
#[derive(Clone, Copy)]
struct Attention {
    heads: HeadShape,
    qkv: Qkv,
    bias: Presence,
    rope: Option<u8>,
    /// Whether patches only attend within their part.
    parts: bool,
}

impl Attention {
    /// Emits the attention of layer `i` on the normed rows `n`, added to `x`.
    fn emit(&self, b: &mut PlanBuilder<'_>, i: u32, (n, x): (Buf, Buf)) -> Result<(), Error> {
        let inputs = self.inputs(b, i, n)?;
        let p = self.attended(b, i, inputs)?;
        b.residual(x, p, None, 1.0)
    }

    /// Emits queries, keys and values of layer `i` for the normed rows `n`.
    fn inputs(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<[Buf; 3], Error> {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        let width = b.n_embd;
        let bufs = ["q", "k", "v"].map(|name| b.buf(name, width));
        let products = match self.qkv {
            Qkv::Fused => self.fused(b, &name("attn_qkv"), bufs)?,
            Qkv::Apart => {
                let mut products = Vec::new();
                for (part, out) in ["attn_q", "attn_k", "attn_v"].into_iter().zip(bufs) {
                    products.push(b.linear(&name(part), width, width, self.bias, out)?);
                }
                products
            }
        };
        b.mat_mul(n, products);
        Ok(bufs)
    }

    /// Emits the attention of layer `i` over these queries, keys and values.
    fn attended(&self, b: &mut PlanBuilder<'_>, i: u32, [q, k, v]: [Buf; 3]) -> Result<Buf, Error> {
        let (width, heads) = (b.n_embd, self.heads);
        let layer = match self.parts {
            true => b.kv_layer_of_parts(&heads),
            false => b.kv_layer(&heads, None),
        };
        b.op(Op::RopeKv {
            q,
            k,
            v,
            heads,
            q_norm: None,
            k_norm: None,
            rope: self.rope.map(|table| RopeUse { table, first: 0 }),
            layer,
        });
        let a = b.buf("a", width);
        b.op(Op::Attention {
            q,
            out: a,
            heads,
            layer,
            scale: crate::build::scale_of(heads.head_dim),
            mask: Mask::Whole,
            softcap: 0.0,
            sinks: None,
            alibi: 0.0,
        });
        let p = b.buf("p", width);
        let name = format!("v.blk.{i}.attn_out");
        b.product(&name, a, self.bias, p)
    }

    fn fused(
        &self,
        b: &mut PlanBuilder<'_>,
        name: &str,
        outs: [Buf; 3],
    ) -> Result<Vec<Product>, Error> {
        let width = b.n_embd;
        let matrix = b.tensor(&format!("{name}.weight"), &[width, 3 * width])?;
        let bias = match self.bias {
            Presence::Absent => None,
            _ => Some(b.tensor(&format!("{name}.bias"), &[3 * width])?),
        };
        let mut products = Vec::new();
        for (part, out) in outs.into_iter().enumerate() {
            let first = part as u64 * width;
            let mut product = b.rows_of(&matrix, first, width, out)?;
            let of_part = bias.as_ref().map(|bias| bias.columns(first, width));
            product.bias = of_part.map(|bias| b.place(&bias, Role::Vector));
            products.push(product);
        }
        Ok(products)
    }
}

/// Emits `x += W2 act(W1 n)`, with the names of both matrices in the file.
fn feed_forward(
    b: &mut PlanBuilder<'_>,
    names: [&str; 2],
    n_ff: u64,
    act: Act,
    (n, x): (Buf, Buf),
) -> Result<(), Error> {
    let p = fed_forward(b, names, n_ff, act, n)?;
    b.residual(x, p, None, 1.0)
}

/// Emits `W2 act(W1 n)`, and returns its buffer.
fn fed_forward(
    b: &mut PlanBuilder<'_>,
    [up, down]: [&str; 2],
    n_ff: u64,
    act: Act,
    n: Buf,
) -> Result<Buf, Error> {
    let (u, p) = (b.buf("up", n_ff), b.buf("p", b.n_embd));
    b.product(up, n, Presence::Required, u)?;
    b.op(Op::Activate { x: u, act });
    b.product(down, u, Presence::Required, p)
}

/// Emits `x += W2 (act(Wg n) * Wu n)`.
fn gated(
    b: &mut PlanBuilder<'_>,
    i: u32,
    n_ff: u64,
    (act, bias): (Act, Presence),
    (n, x): (Buf, Buf),
) -> Result<(), Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    let (gate, up) = (b.buf("gate", n_ff), b.buf("up", n_ff));
    let (p, width) = (b.buf("p", b.n_embd), b.n_embd);
    let products = vec![
        b.linear(&name("ffn_gate"), width, n_ff, bias, gate)?,
        b.linear(&name("ffn_up"), width, n_ff, bias, up)?,
    ];
    b.mat_mul(n, products);
    b.op(Op::Gate { gate, up, act });
    b.product(&name("ffn_down"), gate, bias, p)?;
    b.residual(x, p, None, 1.0)
}

/// Emits the rows of each block concatenated to one.
fn merged(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Buf {
    let n = u64::from(tower.merge * tower.merge);
    let out = b.buf_rows("m", n * b.n_embd, block(tower));
    b.op(Op::MergeRows { x, out });
    out
}

/// Emits the mean of each block's rows.
fn block_means(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Buf {
    let (m, n) = (merged(b, tower, x), tower.merge * tower.merge);
    let width = tower.width;
    let [mean, row] = ["mean", "row"].map(|name| b.buf_rows(name, u64::from(width), block(tower)));
    for i in 0..n {
        let out = if i == 0 { mean } else { row };
        b.columns(1, vec![ColumnPart::new(m, i * width, 0, width)], out);
        if i > 0 {
            b.add(mean, row);
        }
    }
    b.op(Op::Scale {
        x: mean,
        factor: 1.0 / n as f32,
    });
    mean
}

/// Emits the outputs side by side, and the head that gathers the rows.
fn end(b: &mut PlanBuilder<'_>, tower: &Tower, outs: &[Buf]) {
    let parts: Vec<ColumnPart> = outs
        .iter()
        .map(|&x| ColumnPart::new(x, 0, 0, tower.n_out))
        .collect();
    let width = u64::from(tower.row_width());
    let rows = b.buf_rows("rows", width, block(tower));
    b.columns(1, parts, rows);
    b.gathered_end(rows);
}
