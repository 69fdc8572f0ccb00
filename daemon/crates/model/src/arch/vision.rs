//! Vision towers: encoders of an image's patches, whose output rows language models take in the
//! place of embeddings of tokens.
//!
//! `qwen3vl_merger`, on the `T` patches of an image in the order of its blocks (shapes are
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

use rocmforge_gguf::Gguf;
use rocmforge_ops::{
    Act, Buf, ColumnPart, HeadShape, InputRows, Mask, Op, Role, RopeAxes, RopeOrder, RopeScaling,
    RopeSpec, RopeUse, Rows,
};

use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::{Keys, N_HEAD_MAX, N_LAYER_MAX, WIDTH_MAX};
use crate::tower::{DEEPSTACK, DEEPSTACK_MAX, LearnedGrid, Tower};

/// Projectors that work.
const SUPPORTED: [&str; 1] = ["qwen3vl_merger"];
/// Text models that take the rows of `qwen3vl_merger`.
pub(crate) const READERS: [&str; 4] = ["qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"];
/// Colours of a patch.
const CHANNELS: u64 = 3;
/// Most elements of a side of a patch or of a block.
const SIDE_MAX: u32 = 256;
/// Fewest and most tokens of an image where the file does not say how many pixels it may have.
const TOKENS: [u64; 2] = [8, 4096];
/// Base of the rotations by rows and columns.
const FREQ_BASE: f64 = 10_000.0;

/// What the keys of a projector file say of its tower, and the tower's hyperparameters.
pub(crate) fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    let gguf = keys.gguf;
    check_kind(gguf)?;
    let n_embd = keys.count("embedding_length", WIDTH_MAX)?;
    let n_layer = keys.count("block_count", N_LAYER_MAX)?;
    let n_head = keys.count("attention.head_count", N_HEAD_MAX)?;
    if n_embd % n_head != 0 || (n_embd / n_head) % 4 != 0 {
        let message = format!("must divide the width {n_embd} into heads of a multiple of 4");
        return Err(keys.bad("attention.head_count", n_head, message));
    }
    let merge = keys.count_or("spatial_merge_size", SIDE_MAX, 2)?;
    let kept = keys.per_layer("is_deepstack_layers", n_layer, 1)?;
    let deepstack: Vec<u32> = (0..n_layer)
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
    let numbers = |key: &str| -> Result<[f32; 3], Error> {
        let found = gguf
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
    let n_ff = keys.count("feed_forward_length", WIDTH_MAX)?;
    let mut tower = Tower {
        projector: SUPPORTED[0],
        patch: keys.count("patch_size", SIDE_MAX)?,
        merge,
        width: n_embd,
        n_out: keys.count("projection_dim", WIDTH_MAX)?,
        deepstack,
        grid: learned_grid(gguf, n_embd)?,
        mean,
        std,
        min_pixels: 0,
        max_pixels: 0,
    };
    (tower.min_pixels, tower.max_pixels) = pixels(keys, &tower)?;
    let hparams = Hparams::of_tower("clip", n_embd, n_layer, n_head, n_ff, keys.norm_eps()?);
    Ok((tower, hparams))
}

/// Fewest and most pixels of an image: those of the keys, or of [`TOKENS`].
fn pixels(keys: Keys<'_>, tower: &Tower) -> Result<(u64, u64), Error> {
    const MIN: &str = "image_min_pixels";
    const MAX: &str = "image_max_pixels";
    let block = tower.block_pixels();
    let patch = u64::from(tower.patch) * u64::from(tower.patch);
    let most = (u64::from(N_PATCH_MAX) * patch).max(block);
    let of_key = |key: &str, tokens: u64| -> Result<u64, Error> {
        let found = keys.optional_u32(key)?.map(u64::from);
        Ok(found.unwrap_or(tokens * block))
    };
    let max = of_key(MAX, TOKENS[1])?.min(most);
    if max < block {
        return Err(keys.bad(MAX, max, format!("must be at least {block}, a token's")));
    }
    let min = of_key(MIN, TOKENS[0].min(max / block))?;
    if min > max {
        return Err(keys.bad(MIN, min, format!("must be at most {max}")));
    }
    Ok((min, max))
}

/// Refuses projector files of other kinds.
fn check_kind(gguf: &Gguf) -> Result<(), Error> {
    let says = |key| gguf.str(key).ok().flatten();
    let kind = says("clip.projector_type").or_else(|| says("clip.vision.projector_type"));
    let kind = kind.ok_or_else(|| Error::MissingKey("clip.projector_type".to_owned()))?;
    if SUPPORTED.contains(&kind) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "projector '{}' is not supported; supported: {}",
        kind.chars().take(64).collect::<String>(),
        SUPPORTED.join(", ")
    )))
}

/// The grid of learned positions.
fn learned_grid(gguf: &Gguf, n_embd: u32) -> Result<LearnedGrid, Error> {
    const NAME: &str = "v.position_embd.weight";
    let tensor = gguf
        .tensor(NAME)
        .ok_or_else(|| Error::MissingTensor(NAME.to_owned()))?;
    let side = tensor.dims[1].isqrt();
    if side == 0 || side * side != tensor.dims[1] || side > u64::from(WIDTH_MAX) {
        return Err(Error::WrongShape {
            name: NAME.to_owned(),
            found: tensor.shape().to_vec(),
            expected: vec![u64::from(n_embd), side * side],
            arch: "a square grid of positions",
        });
    }
    Ok(LearnedGrid { side: side as u32 })
}

/// Emits a tower's operations, and completes what is known of its grid.
pub(crate) fn build(
    b: &mut PlanBuilder<'_>,
    tower: &Tower,
    h: &Hparams,
) -> Result<rocmforge_ops::TensorDesc, Error> {
    let bias = Presence::Required;
    b.norms_are(NormKind::Layer { bias });
    let x = b.stream("x");
    let grid = u64::from(tower.grid.side) * u64::from(tower.grid.side);
    let table = b.tensor("v.position_embd.weight", &[b.n_embd, grid])?;
    patches(b, tower, x)?;
    let rope = b.rope_table(RopeSpec {
        order: RopeOrder::Neox,
        n_rot: h.heads.head_dim,
        freq_base: FREQ_BASE,
        scaling: RopeScaling::None,
        factors: None,
        long: None,
        magnitude: 1.0,
        axes: RopeAxes::Plane,
    });
    let mut outs = Vec::new();
    for i in 0..h.n_layer {
        attention(b, i, x, h.heads, rope)?;
        feed_forward(b, i, x, u64::from(h.n_ff))?;
        if tower.deepstack.contains(&i) {
            let name = format!("v.deepstack.{i}");
            b.cut(name.clone(), &[]);
            let m = merged(b, tower, x);
            let n = b.norm(m, &format!("{name}.norm.weight"), "mn")?;
            let out = b.stream_rows(DEEPSTACK[outs.len()], u64::from(tower.n_out), block(tower));
            let names = [format!("{name}.fc1"), format!("{name}.fc2")];
            mlp(b, n, &names, out, false)?;
            outs.push(out);
        }
    }
    b.cut("mm.0".to_owned(), &[]);
    let n = b.norm(x, "v.post_ln.weight", "n")?;
    let m = merged(b, tower, n);
    let y = b.buf_rows("y", u64::from(tower.n_out), block(tower));
    mlp(b, m, &["mm.0".to_owned(), "mm.2".to_owned()], y, true)?;
    outs.insert(0, y);
    end(b, tower, &outs);
    Ok(table.with_role(Role::Matrix))
}

fn block(tower: &Tower) -> Rows {
    Rows::Merged(tower.merge * tower.merge)
}

/// The patches' product with both frames' matrices, and their positions.
fn patches(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<(), Error> {
    const NAME: &str = "v.patch_embd.weight";
    let side = u64::from(tower.patch);
    let patches = b.given("patches", CHANNELS * side * side, InputRows::Patches);
    let positions = b.given("positions", b.n_embd, InputRows::GridPositions);
    b.cut("v.patch_embd".to_owned(), &[]);
    let dims = [side, side, CHANNELS, b.n_embd];
    let frames = [
        (NAME.to_owned(), x),
        (format!("{NAME}.1"), b.buf("frame", b.n_embd)),
    ];
    let bias = Some(b.vector("v.patch_embd.bias", b.n_embd)?);
    let mut products = Vec::new();
    for (i, (name, out)) in frames.iter().enumerate() {
        let kernel = b.tensor(name, &dims)?.as_matrix(b.n_embd);
        let weight = b.place(&kernel, Role::Matrix);
        let bias = bias.filter(|_| i == 0);
        products.push(rocmforge_ops::Product {
            weight,
            bias,
            out: *out,
        });
    }
    b.mat_mul(patches, products);
    for y in [frames[1].1, positions] {
        b.residual(x, y, None, 1.0)?;
    }
    Ok(())
}

/// Attention of all patches over all.
fn attention(
    b: &mut PlanBuilder<'_>,
    i: u32,
    x: Buf,
    heads: HeadShape,
    table: u8,
) -> Result<(), Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    b.cut(name("attn"), &[]);
    let n = b.norm(x, &name("ln1.weight"), "n")?;
    let width = b.n_embd;
    let [q, k, v] = ["q", "k", "v"].map(|name| b.buf(name, width));
    let matrix = b.tensor(&name("attn_qkv.weight"), &[width, 3 * width])?;
    let bias = b.tensor(&name("attn_qkv.bias"), &[3 * width])?;
    let mut products = Vec::new();
    for (part, out) in [q, k, v].into_iter().enumerate() {
        let first = part as u64 * width;
        let mut product = b.rows_of(&matrix, first, width, out)?;
        product.bias = Some(b.place(&bias.columns(first, width), Role::Vector));
        products.push(product);
    }
    b.mat_mul(n, products);
    let layer = b.kv_layer(&heads, None);
    b.op(Op::RopeKv {
        q,
        k,
        v,
        heads,
        q_norm: None,
        k_norm: None,
        rope: Some(RopeUse { table, first: 0 }),
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
    });
    let p = b.buf("p", width);
    let product = b.linear(&name("attn_out"), width, width, Presence::Required, p)?;
    b.mat_mul(a, vec![product]);
    b.residual(x, p, None, 1.0)
}

fn feed_forward(b: &mut PlanBuilder<'_>, i: u32, x: Buf, n_ff: u64) -> Result<(), Error> {
    let name = |part: &str| format!("v.blk.{i}.{part}");
    b.cut(name("ffn"), &[]);
    let n = b.norm(x, &name("ln2.weight"), "n")?;
    let (u, p, width) = (b.buf("up", n_ff), b.buf("p", b.n_embd), b.n_embd);
    let up = b.linear(&name("ffn_up"), width, n_ff, Presence::Required, u)?;
    b.mat_mul(n, vec![up]);
    b.op(Op::Activate {
        x: u,
        act: Act::GeluTanh,
    });
    let down = b.linear(&name("ffn_down"), n_ff, width, Presence::Required, p)?;
    b.mat_mul(u, vec![down]);
    b.residual(x, p, None, 1.0)
}

/// The rows of each block as one.
fn merged(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Buf {
    let n = u64::from(tower.merge * tower.merge);
    let out = b.buf_rows("m", n * b.n_embd, block(tower));
    b.op(Op::MergeRows { x, out });
    out
}

/// `out = W2 gelu(W1 x)`, in one segment or in two.
fn mlp(
    b: &mut PlanBuilder<'_>,
    x: Buf,
    [first, second]: &[String; 2],
    out: Buf,
    in_two: bool,
) -> Result<(), Error> {
    let (width, rows) = (b.width(x), b.rows_kind(x));
    let h = b.buf_rows("mh", width, rows);
    let product = b.linear(first, width, width, Presence::Required, h)?;
    b.mat_mul(x, vec![product]);
    b.op(Op::Activate {
        x: h,
        act: Act::GeluErf,
    });
    if in_two {
        b.cut(second.clone(), &[h]);
    }
    let product = b.linear(second, width, b.width(out), Presence::Required, out)?;
    b.mat_mul(h, vec![product]);
    Ok(())
}

/// The rows of all outputs side by side, and the head that gathers them.
fn end(b: &mut PlanBuilder<'_>, tower: &Tower, outs: &[Buf]) {
    let parts: Vec<ColumnPart> = outs
        .iter()
        .map(|&x| ColumnPart {
            x,
            first: 0,
            stride: 0,
            width: tower.n_out,
        })
        .collect();
    let width = u64::from(tower.row_width());
    let rows = b.buf_rows("rows", width, block(tower));
    b.op(Op::Columns {
        n_group: 1,
        parts,
        out: rows,
    });
    b.gathered_end(rows);
}
