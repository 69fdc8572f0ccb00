//! Attention (`hip/attention_decode.hip`, `hip/attention_prefill.hip`).

use super::kv::{Kv, KvPlace, Qkv, Rope, RopePlace};
use crate::gpu::launch::{ArgBytes, arg_struct};
use crate::gpu::{Address, Error, GpuTarget, Launch, Vendor};

const DECODE_THREADS: u32 = 256;
/// Positions of a step; the context is split at multiples of it.
const DECODE_STEP: u32 = 64;
const PREFILL_THREADS: u32 = 128;

/// Most rows of a tile of [`prefill`].
pub const PREFILL_TILE_ROWS: u32 = 128;

/// Most parts that a context is split into.
pub const SPLIT_MAX: u32 = 64;

arg_struct! {
    /// Of `attention_decode_<dim>_<group>`.
    AttentionDecodeArgs: 168 {
        q: u64,
        k: u64,
        v: u64,
        out: u64,
        partials: u64,
        counters: u64,
        kv: KvPlace,
        rope: RopePlace,
        scale: f32,
        n_head: u32,
        n_split: u32,
        append: u32,
    }
}

arg_struct! {
    /// Of `attention_prefill_<dim>`.
    AttentionPrefillArgs: 88 {
        q: u64,
        out: u64,
        tiles: u64,
        kv: KvPlace,
        scale: f32,
        n_head: u32,
    }
}

/// Head size, most query heads a key/value head, kernel.
const DECODE: [(usize, u32, &str); 8] = [
    (64, 1, "attention_decode_64_1.attention_decode_64_1"),
    (64, 4, "attention_decode_64_4.attention_decode_64_4"),
    (64, 8, "attention_decode_64_8.attention_decode_64_8"),
    (80, 4, "attention_decode_80_4.attention_decode_80_4"),
    (96, 4, "attention_decode_96_4.attention_decode_96_4"),
    (128, 1, "attention_decode_128_1.attention_decode_128_1"),
    (128, 4, "attention_decode_128_4.attention_decode_128_4"),
    (128, 8, "attention_decode_128_8.attention_decode_128_8"),
];

const PREFILL: [(usize, &str); 4] = [
    (64, "attention_prefill_64.attention_prefill_64"),
    (80, "attention_prefill_80.attention_prefill_80"),
    (96, "attention_prefill_96.attention_prefill_96"),
    (128, "attention_prefill_128.attention_prefill_128"),
];

/// What split attention works in; both are read and written by the kernel only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partials {
    /// [`partials_bytes`] bytes.
    pub partials: Address,
    /// u32 `[rows][n_head_kv]`, zero before the first launch; every launch leaves them zero.
    pub counters: Address,
}

/// Parts to split the contexts of `rows` rows into: enough blocks to fill the device, none shorter than a step for contexts up to
/// `positions_max`. One block a multiprocessor is enough on NVIDIA, where fewer parts to combine count for more (132 of them, 8
/// heads, 4096 positions: 15.8 us with 16 parts, 19.0 with 33).
#[must_use]
pub fn n_split(target: &GpuTarget, rows: u32, n_head_kv: u32, positions_max: u32) -> u32 {
    let groups = (rows * n_head_kv).max(1);
    let blocks = match target.vendor {
        Vendor::Nvidia => target.compute_units / groups,
        Vendor::Amd => (2 * target.compute_units).div_ceil(groups),
    };
    blocks.clamp(1, positions_max.div_ceil(DECODE_STEP).clamp(1, SPLIT_MAX))
}

/// Bytes of [`Partials::partials`].
#[must_use]
pub const fn partials_bytes(rows: u64, n_head: u64, n_split: u64, head_dim: u64) -> u64 {
    rows * n_head * n_split * (head_dim + 2) * 4
}

/// Decode: every row attends to its sequence's positions up to its own.
///
/// With `append`, q, k and v are as the products left them: heads are normed and rotated, and k and v appended to the pages, in
/// the same launch; then no two rows may be of one sequence. Without, q has been rotated and the pages are complete.
/// `out` is f32 `[rows][n_head][head_dim]`.
///
/// # Errors
/// [`Error::NoKernel`] for a head size or group that is not built.
pub fn decode(
    qkv: Qkv,
    out: Address,
    kv: &Kv<'_>,
    append: Option<&Rope>,
    scale: f32,
    n_split: u32,
    partials: Partials,
) -> Result<Launch, Error> {
    let place = kv.place()?;
    let group = qkv.n_head / place.n_head_kv.max(1);
    let dim = kv.layout.head_dim_k;
    let kernel = DECODE
        .iter()
        .find(|(d, g, _)| *d == dim && dim == kv.layout.head_dim_v && group <= *g)
        .map(|(.., kernel)| *kernel)
        .ok_or_else(|| Error::NoKernel {
            what: format!(
                "attention with keys of {dim}, values of {} and {group} query heads a key/value head",
                kv.layout.head_dim_v
            ),
            built: "heads of 64, 80, 96 and 128, up to 8 query heads a key/value head",
        })?;
    let args = AttentionDecodeArgs {
        q: qkv.q,
        k: qkv.k,
        v: qkv.v,
        out,
        partials: partials.partials,
        counters: partials.counters,
        kv: place,
        rope: append.map_or_else(RopePlace::default, Rope::place),
        scale,
        n_head: qkv.n_head,
        n_split: n_split.clamp(1, SPLIT_MAX),
        append: u32::from(append.is_some()),
    };
    Ok(Launch {
        kernel,
        grid: [place.n_head_kv, args.n_split, qkv.rows],
        block: [DECODE_THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Entries (row, query head) of a block of [`prefill`], and its dynamic shared memory in bytes: `M_BLOCK` of the form of the kernel
/// that the target gets.
fn prefill_block(target: &GpuTarget, head_dim: u32) -> (u32, u32) {
    if target.has_mma() {
        // Queries, and three places for 64 rows of K or V; rows are padded by 16 bytes.
        return (128, (128 + 3 * 64) * (head_dim + 8) * 2);
    }
    (64, 0)
}

/// Prefill: tiles of up to [`PREFILL_TILE_ROWS`] consecutive rows of one sequence, `tiles` u32 `[n_tiles][2]`: first row, rows. q has
/// been rotated and the pages are complete, the rows' own positions included. `out` is f32 `[rows][n_head][head_dim]`.
///
/// # Errors
/// [`Error::NoKernel`] for a head size that is not built.
#[expect(
    clippy::too_many_arguments,
    reason = "each is one field of the launch's struct"
)]
pub fn prefill(
    target: &GpuTarget,
    q: Address,
    n_head: u32,
    out: Address,
    kv: &Kv<'_>,
    scale: f32,
    tiles: Address,
    n_tiles: u32,
) -> Result<Launch, Error> {
    let dim = kv.layout.head_dim_k;
    let kernel = PREFILL
        .iter()
        .find(|(d, _)| *d == dim && dim == kv.layout.head_dim_v)
        .map(|(_, kernel)| *kernel)
        .ok_or_else(|| Error::NoKernel {
            what: format!(
                "attention with keys of {dim} and values of {}",
                kv.layout.head_dim_v
            ),
            built: "heads of 64, 80, 96 and 128",
        })?;
    let args = AttentionPrefillArgs {
        q,
        out,
        tiles,
        kv: kv.place()?,
        scale,
        n_head,
    };
    let n_head_kv = args.kv.n_head_kv;
    let (m_block, shared_bytes) = prefill_block(target, dim as u32);
    let parts = (PREFILL_TILE_ROWS * (n_head / n_head_kv.max(1))).div_ceil(m_block);
    Ok(Launch {
        kernel,
        grid: [n_head_kv * parts, n_tiles, 1],
        block: [PREFILL_THREADS, 1, 1],
        shared_bytes,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Cuts spans (first row, rows) into tiles for [`prefill`], the longest context of each span first: blocks that take longest should
/// not begin last.
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
