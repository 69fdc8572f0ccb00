//! Attention (`hip/attention_decode.hip`, `hip/attention_prefill.hip`).

mod alibi;

pub use alibi::decode_shape_of;

use super::kv::{HEAD_DIM_MAX, Kv, KvPlace, Qkv, Rope, RopePlace, check_type};
use super::matmat::PartsRoom;
pub use super::scores::Scores;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch, Vendor};
use rocmforge_ops::{KvLayout, KvType};

const DECODE_THREADS: u32 = 256;
/// Positions of a step; the context is split at multiples of it.
const DECODE_STEP: u32 = 64;
const MANY_THREADS: u32 = 128;
const SEVERAL_THREADS: u32 = 256;
const PREFILL_THREADS: u32 = 128;

/// Maximum number of rows of a tile of [`prefill`].
pub const PREFILL_TILE_ROWS: u32 = 128;

/// Maximum number of parts that the positions of a prompt's rows are shared by.
const PREFILL_PARTS_MAX: u32 = 64;

/// Maximum number of parts that a context is split into.
pub const SPLIT_MAX: u32 = 64;

arg_struct! {
    /// Arguments of `attention_decode_<dim>_<group>`.
    AttentionDecodeArgs: 208 {
        q: u64,
        k: u64,
        v: u64,
        out: u64,
        partials: u64,
        counters: u64,
        kv: KvPlace,
        rope: RopePlace,
        sinks: u64,
        places: u64,
        scale: f32,
        softcap: f32,
        window: u32,
        n_head: u32,
        heads: u32,
        n_split: u32,
        append: u32,
        ahead: u32,
    }
}

arg_struct! {
    /// Arguments of `attention_prefill_<dim>`.
    AttentionPrefillArgs: 144 {
        q: u64,
        out: u64,
        tiles: u64,
        kv: KvPlace,
        sinks: u64,
        places: u64,
        scale: f32,
        softcap: f32,
        window: u32,
        n_head: u32,
        partials: u64,
        counters: u64,
        blocks: u32,
        part_threads: u32,
        ahead: u32,
        reserved: u32,
    }
}

/// Names of a unit's kernels, by KV type.
#[derive(Clone, Copy)]
struct Kernels {
    f16: &'static str,
    /// Of sizes that are no whole number of blocks there is none, and nobody asks for one.
    q8_0: &'static str,
    f32: Option<&'static str>,
}

/// Names of the kernels of a unit of f16 and of the ones beside it.
macro_rules! kernels {
    ($unit:literal) => {
        Kernels {
            f16: concat!($unit, ".", $unit),
            q8_0: concat!($unit, "_q8.", $unit, "_q8"),
            f32: None,
        }
    };
    ($unit:literal, f32) => {
        Kernels {
            f32: Some(concat!($unit, "_f32.", $unit, "_f32")),
            ..kernels!($unit)
        }
    };
}

impl Kernels {
    const fn of_type(self, ty: KvType) -> Option<&'static str> {
        match ty {
            KvType::F32 => self.f32,
            KvType::F16 => Some(self.f16),
            KvType::Q8_0 => Some(self.q8_0),
        }
    }
}

/// Sizes of key and value, most query heads of a block, kernels; of those that fit, the last is
/// taken. In f32 there is one for the heads of a model that has them so by default; others go by
/// [`decode_any`], which costs no further units to compile.
const DECODE: [(usize, usize, u32, Kernels); 10] = [
    (64, 64, 8, kernels!("attention_decode_64_8")),
    (64, 64, 4, kernels!("attention_decode_64_4")),
    (64, 64, 1, kernels!("attention_decode_64_1")),
    (80, 80, 4, kernels!("attention_decode_80_4")),
    (96, 96, 4, kernels!("attention_decode_96_4")),
    (128, 128, 8, kernels!("attention_decode_128_8")),
    (128, 128, 4, kernels!("attention_decode_128_4")),
    (128, 128, 1, kernels!("attention_decode_128_1")),
    (256, 256, 4, kernels!("attention_decode_256_4", f32)),
    (576, 512, 4, kernels!("attention_decode_576_512")),
];

/// Kernels of f16 in which a block has up to [`WARP_HEADS`] query heads and each of its warps goes
/// through positions by matrix instructions, on NVIDIA (`hip/attention_many.h`).
struct ByWarps {
    head_dim: usize,
    /// Name of the kernel for many rows, each of which attends to its whole context in one block.
    many: &'static str,
    /// Name of the kernel for fewer rows, whose contexts are split into parts.
    several: &'static str,
}

const BY_WARPS: [ByWarps; 2] = [
    ByWarps {
        head_dim: 64,
        many: "attention_decode_64_8.attention_many_64",
        several: "attention_decode_64_8.attention_several_64",
    },
    ByWarps {
        head_dim: 128,
        many: "attention_decode_128_8.attention_many_128",
        several: "attention_decode_128_8.attention_several_128",
    },
];
const WARP_HEADS: u32 = 8;

/// From how many rows on they are [`ByWarps::several`]. 8 rows of Qwen3-30B-A3B in short
/// contexts on an H200: 17.2 us by the kernel of single rows, 9.3 us by that of many with 4
/// warps a block, 6.3 us with 8.
const SEVERAL_ROWS: u32 = 2;

/// Positions of a part of [`ByWarps::several`], at least.
pub(crate) const SEVERAL_POSITIONS: u32 = 512;

/// Maximum number of query heads of a block of [`decode_any`].
const DECODE_ANY_HEADS: u32 = 4;

/// Of any other sizes: multiples of 8 up to [`HEAD_DIM_MAX`].
const fn decode_any(ty: KvType) -> &'static str {
    match ty {
        KvType::F32 => "attention_decode_any_f32.attention_decode_any_f32",
        KvType::F16 => "attention_decode_any.attention_decode_any",
        KvType::Q8_0 => "attention_decode_any_q8.attention_decode_any_q8",
    }
}

/// Sizes of heads, and kernels that take many rows at a time. They round what they multiply to
/// f16, so there is none of f32. Heads of 72 are those of most vision towers.
const PREFILL: [(usize, Kernels); 6] = [
    (64, kernels!("attention_prefill_64")),
    (72, kernels!("attention_prefill_72")),
    (80, kernels!("attention_prefill_80")),
    (96, kernels!("attention_prefill_96")),
    (128, kernels!("attention_prefill_128")),
    (256, kernels!("attention_prefill_256")),
];

/// The kernels of decode and the query heads of a block of each, a divisor of those of a key/value
/// head: of the most heads first.
fn decode_kernels(n_head: u32, kv: &KvLayout) -> Result<Vec<(&'static str, u32)>, Error> {
    let (dim_k, dim_v) = (kv.head_dim_k, kv.head_dim_v);
    let n_head_kv = kv.n_head_kv as u32;
    let sizes = [dim_k, dim_v]
        .into_iter()
        .all(|dim| dim > 0 && dim.is_multiple_of(8) && dim <= HEAD_DIM_MAX as usize);
    if !sizes || n_head_kv == 0 || n_head == 0 || !n_head.is_multiple_of(n_head_kv) {
        return Err(Error::NoKernel {
            what: format!(
                "attention with keys of {dim_k}, values of {dim_v} and {n_head} query heads over {n_head_kv} key/value heads"
            ),
            built: "heads of multiples of 8 up to 576, a whole number of query heads a key/value head",
        });
    }
    check_type(kv)?;
    let heads = |most| heads_of_block(n_head, n_head_kv, most);
    let of_size = DECODE
        .iter()
        .filter(|(k, v, ..)| (*k, *v) == (dim_k, dim_v));
    let mut found: Vec<_> = of_size
        .filter_map(|(_, _, most, kernels)| Some((kernels.of_type(kv.ty)?, heads(*most))))
        .collect();
    // As many heads a block as can be first; of those with as many the smallest
    // kernel that has room for them.
    found.reverse();
    found.sort_by_key(|(_, heads)| std::cmp::Reverse(*heads));
    found.dedup_by_key(|(_, heads)| *heads);
    if found.is_empty() {
        found.push((decode_any(kv.ty), heads(DECODE_ANY_HEADS)));
    }
    Ok(found)
}

/// Query heads of a block, a divisor of those of a key/value head, of `most` at most.
fn heads_of_block(n_head: u32, n_head_kv: u32, most: u32) -> u32 {
    let group = n_head / n_head_kv;
    let fits = |heads: &u32| group.is_multiple_of(*heads);
    (1..=most.min(group)).rev().find(fits).unwrap_or(1)
}

/// How the work of several rows and of many is shared, where there is a kernel for them.
fn shape_by_warps(
    target: &GpuTarget,
    rows: u32,
    n_head: u32,
    kv: &KvLayout,
    positions_max: u32,
) -> Option<DecodeShape> {
    let (dim_k, dim_v) = (kv.head_dim_k, kv.head_dim_v);
    let found = BY_WARPS
        .iter()
        .find(|by_warps| (dim_k, dim_v) == (by_warps.head_dim, by_warps.head_dim))
        .filter(|_| target.has_mma() && kv.ty == KvType::F16)?;
    let heads = heads_of_block(n_head, kv.n_head_kv as u32, WARP_HEADS);
    let blocks = n_head / heads;
    let many = DecodeShape {
        kernel: found.many,
        threads: MANY_THREADS,
        heads,
        blocks,
        n_split: 1,
    };
    if rows * blocks >= target.compute_units {
        return Some(many);
    }
    let parts_max = positions_max
        .div_ceil(SEVERAL_POSITIONS)
        .clamp(1, SPLIT_MAX);
    (rows >= SEVERAL_ROWS).then_some(DecodeShape {
        kernel: found.several,
        threads: SEVERAL_THREADS,
        n_split: (target.compute_units / (rows * blocks).max(1)).clamp(1, parts_max),
        ..many
    })
}

/// Whether there are kernels for heads of these numbers and sizes.
///
/// # Errors
/// [`Error::NoKernel`] that says which there are.
pub fn supports(n_head: u32, kv: &KvLayout) -> Result<(), Error> {
    decode_kernels(n_head, kv).map(|_| ())
}

/// How the work of decode is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeShape {
    kernel: &'static str,
    threads: u32,
    /// Query heads of a block.
    heads: u32,
    /// Blocks of a row and a part: counters and parts are to be as many a row.
    pub blocks: u32,
    /// Parts of a context.
    pub n_split: u32,
}

/// How `rows` rows with contexts up to `positions_max` share the device.
///
/// Several rows have kernels of their own on NVIDIA; where they fill the device,
/// none is split ([`ByWarps`]).
///
/// A block of many heads reads keys and values once for all of them. In short contexts of few rows
/// that saves nothing, and what a block does one head after another is what takes the time: there
/// blocks have as few heads as still run all at once.
///
/// # Errors
/// As [`supports`].
pub fn decode_shape(
    target: &GpuTarget,
    rows: u32,
    n_head: u32,
    kv: &KvLayout,
    positions_max: u32,
) -> Result<DecodeShape, Error> {
    let kernels = decode_kernels(n_head, kv)?;
    if let Some(shape) = shape_by_warps(target, rows, n_head, kv, positions_max) {
        return Ok(shape);
    }
    let steps = positions_max.div_ceil(DECODE_STEP).clamp(1, SPLIT_MAX);
    let at_once = match target.vendor {
        Vendor::Nvidia => target.compute_units,
        Vendor::Amd => 2 * target.compute_units,
    };
    let run_at_once = |heads: u32| {
        let blocks = u64::from(rows.max(1)) * u64::from(n_head / heads) * u64::from(steps);
        blocks <= u64::from(at_once)
    };
    let few = kernels.iter().rev().find(|(_, heads)| run_at_once(*heads));
    let &(kernel, heads) = few.unwrap_or(&kernels[0]);
    let blocks = n_head / heads;
    Ok(DecodeShape {
        kernel,
        threads: DECODE_THREADS,
        heads,
        blocks,
        n_split: n_split(target, rows, blocks, positions_max),
    })
}

/// What split attention works in; both are read and written by the kernel only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partials {
    /// [`partials_bytes`] bytes.
    pub partials: Address,
    /// u32 `[rows]`[[`DecodeShape::blocks`]], zero before the first launch;
    /// every launch leaves them zero.
    pub counters: Address,
}

/// Parts to split the contexts of `rows` rows, of `blocks` blocks each, into: enough blocks to fill
/// the device, none shorter than a step for contexts up to `positions_max`. One block a
/// multiprocessor is enough on NVIDIA, where fewer parts to combine count for more (132 of them, 8
/// heads, 4096 positions: 15.8 us with 16 parts, 19.0 with 33).
#[must_use]
pub fn n_split(target: &GpuTarget, rows: u32, blocks: u32, positions_max: u32) -> u32 {
    let groups = (rows * blocks).max(1);
    let blocks = match target.vendor {
        Vendor::Nvidia => target.compute_units / groups,
        Vendor::Amd => (2 * target.compute_units).div_ceil(groups),
    };
    blocks.clamp(1, positions_max.div_ceil(DECODE_STEP).clamp(1, SPLIT_MAX))
}

/// Bytes of [`Partials::partials`].
#[must_use]
pub const fn partials_bytes(rows: u64, n_head: u64, n_split: u64, head_dim_v: u64) -> u64 {
    rows * n_head * n_split * (head_dim_v + 2) * 4
}

/// Decode: every row attends to its sequence's positions up to its own, and where the mask says so
/// to later ones of the pass.
///
/// With `append`, q, k and v are as the products left them: heads are normed and rotated, and k and
/// v appended to the pages, in the same launch; then no two rows may be of one sequence. Without, q
/// has been rotated and the pages are complete. `out` is f32 `[rows][n_head][head_dim_v]`.
///
/// # Errors
/// As [`supports`].
pub fn decode(
    qkv: Qkv,
    out: Address,
    kv: &Kv<'_>,
    append: Option<&Rope>,
    scores: &Scores,
    shape: DecodeShape,
    partials: Partials,
) -> Result<Launch, Error> {
    let place = kv.place()?;
    let DecodeShape {
        kernel,
        threads,
        heads,
        n_split,
        ..
    } = shape;
    let args = AttentionDecodeArgs {
        q: qkv.q,
        k: qkv.k,
        v: qkv.v,
        out,
        partials: partials.partials,
        counters: partials.counters,
        kv: place,
        rope: append.map_or_else(RopePlace::default, Rope::place),
        sinks: scores.sinks.unwrap_or(0),
        places: scores.places,
        scale: scores.scale,
        softcap: scores.softcap_or_alibi(),
        window: scores.window(),
        n_head: qkv.n_head,
        heads,
        n_split: n_split.clamp(1, SPLIT_MAX),
        append: u32::from(append.is_some()),
        ahead: match append {
            // No row is there but the sequence's last.
            Some(_) => 0,
            None => scores.ahead(),
        },
    };
    Ok(Launch {
        kernel,
        grid: [qkv.n_head / heads, args.n_split, qkv.rows],
        block: [threads, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Entries (row, query head) of a block of [`prefill`], and its dynamic shared memory in bytes:
/// `M_BLOCK` of the form of the kernel that the target gets.
fn prefill_block(target: &GpuTarget, head_dim: u32, ty: KvType) -> (u32, u32) {
    if !target.has_mma() {
        return (64, 0);
    }
    let (entries, keys) = if head_dim > 128 { (64, 32) } else { (128, 64) };
    // In whole blocks of 16 elements, as `WIDE` of the kernel.
    let head_dim = head_dim.next_multiple_of(16);
    // Rows are padded by 16 bytes.
    let row = (head_dim + 8) * 2;
    let bytes = match ty {
        KvType::F32 => unreachable!("tiles of rows have no kernel of f32"),
        // Queries, and three places for rows of K or V.
        KvType::F16 => (entries + 3 * keys) * row,
        // Queries, K and V, and both as they come: codes, and for 16 of them 4
        // bytes in which their scale is.
        KvType::Q8_0 => (entries + 2 * keys) * row + 2 * keys * (head_dim + head_dim / 16 * 4),
    };
    (entries, bytes)
}

/// What the positions of few rows may be shared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPositions {
    /// Where the parts leave what they found.
    pub room: PartsRoom,
    /// Positions of the longest sequence, those of the rows included.
    pub positions: u32,
}

/// Parts that the positions of so many blocks are shared by, so that each multiprocessor has two
/// blocks. A part leaves what `part_threads` threads of a block have.
fn prefill_parts(
    target: &GpuTarget,
    blocks: u32,
    part_threads: u32,
    head_dim: u32,
    shared: SharedPositions,
) -> u32 {
    if !target.has_mma() {
        return 1;
    }
    let (row_blocks, keys) = if head_dim > 128 { (1, 32) } else { (2, 64) };
    let each = head_dim.next_multiple_of(16) / 8 + 1;
    let bytes = u64::from(blocks * row_blocks * each * part_threads * 16);
    let parts = (2 * target.compute_units / blocks.max(1))
        .min((shared.room.bytes / bytes.max(1)) as u32)
        // A part is a few steps at least.
        .min(shared.positions / (4 * keys))
        .clamp(1, PREFILL_PARTS_MAX);
    // A counter for each run of parts, and one for the runs.
    let runs = u64::from(parts.div_ceil(parts.isqrt()));
    match u64::from(blocks) * (runs + 1) <= shared.room.n_counters {
        true => parts,
        false => 1,
    }
}

/// Prefill: tiles of up to [`PREFILL_TILE_ROWS`] consecutive rows of one sequence, `tiles` u32
/// `[n_tiles][2]`: first row, rows, of which the longest has `tile_rows`. q has
/// been rotated and the pages are complete, the rows' own positions included. `out` is f32
/// `[rows][n_head][head_dim_v]`. Head sizes that no tile is built for, and pages of f32, go row by
/// row through the kernel of [`decode`], which is slower and as right.
///
/// # Errors
/// As [`supports`].
#[expect(
    clippy::too_many_arguments,
    reason = "each is one field of the launch's struct"
)]
pub fn prefill(
    target: &GpuTarget,
    q: Address,
    n_head: u32,
    rows: u32,
    out: Address,
    kv: &Kv<'_>,
    scores: &Scores,
    tiles: Address,
    (n_tiles, tile_rows): (u32, u32),
    shared: SharedPositions,
) -> Result<Launch, Error> {
    let dim = kv.layout.head_dim_k;
    supports(n_head, kv.layout)?;
    let tiled = PREFILL
        .iter()
        .find(|(d, _)| *d == dim && dim == kv.layout.head_dim_v)
        // Without matrix instructions NVIDIA's blocks have too little static shared
        // memory for the widest heads.
        .filter(|(d, _)| *d <= 128 || target.vendor == Vendor::Amd || target.has_mma())
        .and_then(|(_, kernels)| kernels.of_type(kv.layout.ty));
    let tiled = match scores.alibi > 0.0 {
        true => alibi::prefill_kernel(kv.layout),
        false => tiled,
    };
    let Some(kernel) = tiled else {
        let qkv = Qkv {
            q,
            k: 0,
            v: 0,
            n_head,
            rows,
        };
        let whole = Partials {
            partials: 0,
            counters: 0,
        };
        let shape = DecodeShape {
            n_split: 1,
            ..decode_shape_of(scores, target, rows, n_head, kv.layout, u32::MAX)?
        };
        return decode(qkv, out, kv, None, scores, shape, whole);
    };
    let place = kv.place()?;
    let n_head_kv = place.n_head_kv.max(1);
    let (m_block, shared_bytes) = prefill_block(target, dim as u32, kv.layout.ty);
    let entries = tile_rows.min(PREFILL_TILE_ROWS) * (n_head / n_head_kv);
    let blocks = entries.div_ceil(m_block);
    // Warps have 16 entries each of tiles of up to 64, a quarter of a block's of others. A shorter
    // tile beside the longest one may have more warps with entries.
    let warps = match entries {
        ..=64 => entries.div_ceil(16),
        _ if n_tiles > 1 => PREFILL_THREADS / 32,
        _ => entries
            .min(m_block)
            .div_ceil(m_block / (PREFILL_THREADS / 32)),
    };
    let part_threads = 32 * warps.max(1);
    let args = AttentionPrefillArgs {
        q,
        out,
        tiles,
        kv: place,
        sinks: scores.sinks.unwrap_or(0),
        places: scores.places,
        scale: scores.scale,
        softcap: scores.softcap_or_alibi(),
        window: scores.window(),
        n_head,
        partials: shared.room.partials,
        counters: shared.room.counters,
        blocks,
        part_threads,
        ahead: scores.ahead(),
        reserved: 0,
    };
    let all = n_head_kv * blocks * n_tiles;
    Ok(Launch {
        kernel,
        grid: [
            n_head_kv * blocks,
            n_tiles,
            prefill_parts(target, all, part_threads, dim as u32, shared),
        ],
        block: [PREFILL_THREADS, 1, 1],
        shared_bytes,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Cuts spans (first row, rows) into tiles for [`prefill`], the longest context of each span first:
/// blocks that take longest should not begin last.
#[must_use]
pub fn prefill_tiles(spans: impl IntoIterator<Item = (u32, u32)>) -> Vec<[u32; 2]> {
    let mut tiles = Vec::new();
    for (first, rows) in spans {
        tiles.extend((0..rows.div_ceil(PREFILL_TILE_ROWS)).rev().map(|i| {
            let at = i * PREFILL_TILE_ROWS;
            [first + at, (rows - at).min(PREFILL_TILE_ROWS)]
        }));
    }
    tiles
}
