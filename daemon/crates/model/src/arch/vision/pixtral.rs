//! `pixtral`: the tower of Pixtral, Mistral Small 3 and Ministral 3, on the `T` patches of an image
//! (shapes are `[rows][width]`; `m` is the number of a block's patches):
//!
//! ```text
//! X = rms_norm(patches * W)                          [T][n_embd]       v.patch_embd
//! X += attention(rms_norm(X))                        [T][n_embd]       v.blk.{i}.attn
//! X += W2 (act(Wg n) * Wu n), n = rms_norm(X)        [T][n_embd]       v.blk.{i}.ffn
//! M = rms_norm(X)                                    [T][n_embd]       mm.patch_merger
//! B = (blocks of M) * W, where blocks are merged     [T / m][n_embd]
//! rows = W2 gelu(W1 B)                               [T / m][n_out]    mm.1
//! ```
//!
//! Queries and keys rotate by rows and columns. Columns of the merger's matrix are, for each
//! element, those of the block's patches. The text model has a token of its own behind each row of
//! an image but the last, whose embedding the file repeats.
//!
//! Sources: Agrawal et al. 2024, "Pixtral 12B" (arXiv 2410.07073), and the authors' published code.

use rocmforge_ops::{Act, Buf, Op, RopeAxes, RopeOrder, RopeSpec, TensorDesc};

use super::{Attention, Common, Kind, Qkv};
use crate::build::{NormKind, PlanBuilder, Presence};
use crate::error::Error;
use crate::hparams::{Hparams, N_PATCH_MAX};
use crate::keys::Keys;
use crate::tower::{Filter, ImageSizes, Parts, Tower};

pub(super) const KIND: Kind = Kind {
    name: "pixtral",
    // Files of Mistral Small 3 and of Pixtral call their text models llama.
    readers: &["llama", "mistral3"],
    read,
    build,
};

/// Base of the 2D RoPE over rows and columns.
const FREQ_BASE: f64 = 10_000.0;
/// Matrix that merges a block's patches to one row.
const MERGER: &str = "mm.patch_merger.weight";
/// Embedding of the token after each row of an image.
const ROW_END: &str = "v.token_embd.img_break";

fn read(keys: Keys<'_>) -> Result<(Tower, Hparams), Error> {
    const SIZE: &str = "image_size";
    let common = Common::read(keys, 4)?;
    let merge = super::merge_by_element(keys, 1)?;
    let longest = keys.count(SIZE, u32::MAX)?;
    let token = common.patch * merge;
    let side = u64::from(longest.div_ceil(token)) * u64::from(merge);
    if longest < token || side.saturating_mul(side) > u64::from(N_PATCH_MAX) {
        let message = format!(
            "must be at least {token}, a token's, and give no more than {N_PATCH_MAX} patches of {}",
            common.patch
        );
        return Err(keys.bad(SIZE, longest, message));
    }
    let tower = Tower {
        projector: KIND.name,
        patch: common.patch,
        merge,
        width: common.n_embd,
        n_out: common.n_out,
        deepstack: Vec::new(),
        grid: None,
        mean: common.mean,
        std: common.std,
        sizes: ImageSizes::Within { longest },
        filter: Filter::Bicubic,
        both_ways: false,
        row_gap: 1,
        parts: Parts::Whole,
    };
    Ok((tower, common.hparams()))
}

/// The activation of the feed-forwards.
fn act(b: &PlanBuilder<'_>) -> Result<Act, Error> {
    let keys = b.keys;
    let says = |key: &str| keys.gguf.bool(key).map(|flag| flag == Some(true));
    match (says("clip.use_silu")?, says("clip.use_gelu")?) {
        (true, _) => Ok(Act::Silu),
        (false, true) => Ok(Act::GeluErf),
        (false, false) => Err(Error::MissingKey("clip.use_silu".to_owned())),
    }
}

fn build(b: &mut PlanBuilder<'_>, tower: &Tower, h: &Hparams) -> Result<Option<TensorDesc>, Error> {
    let none = Presence::Absent;
    b.norms_are(NormKind::Rms);
    let act = act(b)?;
    let (x, p) = (b.stream("x"), b.buf("p", b.n_embd));
    super::patch_products(b, tower, &[("v.patch_embd.weight", p)], none)?;
    b.norm(p, "v.pre_ln.weight", "x")?;
    let rope = b.rope_table(RopeSpec {
        order: RopeOrder::Norm,
        axes: RopeAxes::Plane {
            columns_first: false,
            in_turn: true,
        },
        ..super::plane_rope(h, FREQ_BASE)
    });
    let attention = Attention {
        heads: h.heads,
        qkv: Qkv::Apart,
        bias: none,
        rope: Some(rope),
        parts: false,
    };
    for i in 0..h.n_layer {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        b.cut(name("attn"), &[]);
        let n = b.norm(x, &name("ln1.weight"), "n")?;
        attention.emit(b, i, (n, x))?;
        b.cut(name("ffn"), &[]);
        let n = b.norm(x, &name("ln2.weight"), "n")?;
        super::gated(b, i, u64::from(h.n_ff), (act, none), (n, x))?;
    }
    let rows = super::block(tower);
    let blocks = match b.has(MERGER) {
        true => merged(b, tower, x)?,
        false => {
            b.cut("mm.1".to_owned(), &[]);
            x
        }
    };
    let n_out = u64::from(tower.n_out);
    let hidden = b.buf_rows("mh", n_out, rows);
    let y = b.buf_rows("y", n_out, rows);
    let optional = Presence::Optional;
    b.product("mm.1", blocks, optional, hidden)?;
    b.op(Op::Activate {
        x: hidden,
        act: Act::GeluErf,
    });
    b.product("mm.2", hidden, optional, y)?;
    super::end(b, tower, &[y]);
    b.leave_alone(|name| name == ROW_END);
    Ok(None)
}

/// Emits one row for each block.
fn merged(b: &mut PlanBuilder<'_>, tower: &Tower, x: Buf) -> Result<Buf, Error> {
    b.cut("mm.patch_merger".to_owned(), &[]);
    let n = b.norm(x, "mm.input_norm.weight", "n")?;
    let by_element = super::by_element(b, tower, n);
    let rows = super::block(tower);
    let out = b.buf_rows("b", u64::from(tower.width), rows);
    let merger = MERGER.strip_suffix(".weight").unwrap_or(MERGER);
    b.product(merger, by_element, Presence::Absent, out)?;
    b.cut("mm.1".to_owned(), &[out]);
    Ok(out)
}
