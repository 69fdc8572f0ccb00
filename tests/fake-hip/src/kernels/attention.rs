//! Attention (`attention_decode.hip`, `attention_prefill.hip`): the host device's, over pages read from the table.

use std::num::NonZeroUsize;
use std::sync::OnceLock;

use half::f16;
use rocmforge_kernels::gpu::ops::attention::{AttentionDecodeArgs, AttentionPrefillArgs};
use rocmforge_kernels::gpu::ops::kv::KvPlace;
use rocmforge_kernels::host::Pool;
use rocmforge_kernels::host::ops::{self, AttentionShape, AttentionSpan, Simd};

use super::heads::{append, layout, pages, rotated, row_of};
use super::{Launch, agrees, args, covers, floats, store, words};
use crate::memory::{Fault, Memory};

/// Positions of a step of decode; a context is split at multiples of it.
const STEP: u32 = 64;

/// The caller alone.
fn pool() -> Result<&'static Pool, Fault> {
    static POOL: OnceLock<Option<Pool>> = OnceLock::new();
    let made = POOL.get_or_init(|| Pool::new(NonZeroUsize::MIN).ok());
    made.as_ref().ok_or_else(|| Fault("no pool".to_owned()))
}

/// What rows at positions from `first` on, queries `[n_rows][n_head][dim]`, attend to.
fn attend(
    memory: &mut Memory,
    kv: &KvPlace,
    sequence: u32,
    first: u32,
    q: &[f32],
    n_head: u32,
    scale: f32,
) -> Result<Vec<f32>, Fault> {
    let shape = AttentionShape {
        kv: layout(kv),
        n_head: n_head as usize,
        scale,
        window: None,
    };
    if shape.kv.n_head_kv == 0 || !shape.n_head.is_multiple_of(shape.kv.n_head_kv) {
        return Err(Fault(format!(
            "{n_head} query heads over {} key/value heads",
            shape.kv.n_head_kv
        )));
    }
    let n_rows = q.len() / (shape.n_head * shape.kv.head_dim_k);
    let read = pages(memory, kv, sequence, u64::from(first) + n_rows as u64)?;
    let read: Vec<&[f16]> = read.iter().map(Vec::as_slice).collect();
    let spans = [AttentionSpan {
        n_rows,
        pos0: first as usize,
        pages: &read,
    }];
    let mut out = vec![0.0; n_rows * shape.n_head * shape.kv.head_dim_v];
    ops::attention(pool()?, Simd::detect(), &shape, &spans, q, &mut out);
    Ok(out)
}

/// A row a sequence, split over the context; with `append` the row is rotated and written to its page before.
pub(super) fn decode(
    memory: &mut Memory,
    launch: &Launch,
    dim: u32,
    group: u32,
) -> Result<(), Fault> {
    let a = args(launch, AttentionDecodeArgs::from_bytes)?;
    agrees("the size of a key and of the kernel", a.kv.dim_k, dim)?;
    agrees("the size of a value and of the kernel", a.kv.dim_v, dim)?;
    agrees(
        "key/value heads of the grid",
        launch.grid[0],
        a.kv.n_head_kv,
    )?;
    agrees(
        "parts of the grid and by the arguments",
        launch.grid[1],
        a.n_split,
    )?;
    let of_head = a.n_head / a.kv.n_head_kv.max(1);
    covers("the kernel's group", u64::from(group), u64::from(of_head))?;
    let width = u64::from(a.n_head) * u64::from(dim);
    let mut seen = Vec::new();
    for row in 0..launch.grid[2] {
        let (position, sequence) = row_of(memory, &a.kv, row)?;
        let mut q = floats(
            memory,
            a.q + u64::from(row) * width * 4,
            width as usize,
            "queries",
        )?;
        if a.append != 0 {
            if seen.contains(&sequence) {
                return Err(Fault(format!("two rows of sequence {sequence} append")));
            }
            seen.push(sequence);
            let entry = if a.rope.by_position != 0 {
                position
            } else {
                row
            };
            let mut turned = Vec::with_capacity(q.len());
            for head in q.chunks_exact(dim as usize) {
                let head = rotated(memory, head.to_vec(), a.rope.q_norm, &a.rope, entry)?;
                turned.extend(head);
            }
            q = turned;
            append(memory, a.k, a.v, &a.kv, &a.rope, row)?;
        }
        split(memory, &a, row, position)?;
        let out = attend(memory, &a.kv, sequence, position, &q, a.n_head, a.scale)?;
        store(memory, a.out + u64::from(row) * width * 4, &out)?;
    }
    Ok(())
}

/// What a split context takes: counters that are zero, and partial results, which nobody else may find anything in.
fn split(
    memory: &mut Memory,
    a: &AttentionDecodeArgs,
    row: u32,
    position: u32,
) -> Result<(), Fault> {
    let steps = position / STEP + 1;
    let steps_part = steps.div_ceil(a.n_split.max(1));
    if steps.div_ceil(steps_part) == 1 {
        return Ok(());
    }
    let heads = u64::from(a.kv.n_head_kv);
    let at = a.counters + u64::from(row) * heads * 4;
    let counters = words(memory, at, heads as usize, "counters of split attention")?;
    if counters.iter().any(|&c| c != 0) {
        return Err(Fault(format!("counters of row {row} are {counters:?}")));
    }
    let bytes = u64::from(a.n_head) * u64::from(a.n_split) * u64::from(a.kv.dim_v + 2) * 4;
    memory.spoil(a.partials + u64::from(row) * bytes, bytes as usize)
}

/// A tile of rows of one sequence a block column; queries are rotated and the pages complete.
pub(super) fn prefill(memory: &mut Memory, launch: &Launch, dim: u32) -> Result<(), Fault> {
    let a = args(launch, AttentionPrefillArgs::from_bytes)?;
    agrees("the size of a key and of the kernel", a.kv.dim_k, dim)?;
    agrees("the size of a value and of the kernel", a.kv.dim_v, dim)?;
    let width = u64::from(a.n_head) * u64::from(dim);
    let tiles = words(memory, a.tiles, 2 * launch.grid[1] as usize, "tiles")?;
    for tile in tiles.chunks_exact(2) {
        let (first_row, n_rows) = (tile[0], tile[1]);
        if n_rows == 0 {
            continue;
        }
        let (first, sequence) = row_of(memory, &a.kv, first_row)?;
        let last = row_of(memory, &a.kv, first_row + n_rows - 1)?;
        if last != (first + n_rows - 1, sequence) {
            return Err(Fault(format!(
                "rows {first_row}..+{n_rows} of a tile are not consecutive: {last:?}"
            )));
        }
        let at = u64::from(first_row) * width * 4;
        let n = n_rows as usize * width as usize;
        let q = floats(memory, a.q + at, n, "queries")?;
        let out = attend(memory, &a.kv, sequence, first, &q, a.n_head, a.scale)?;
        store(memory, a.out + at, &out)?;
    }
    Ok(())
}
