//! Heads of queries and keys, normed and rotated, and the pages that keys and values go to (`kv.h`,
//! `rope_kv.hip`, `rope_heads.hip`).

use rocmforge_kernels_cpu::ops::{self, Simd};
use rocmforge_kernels_gpu::ops::kv::{KvPlace, RopeHeadsArgs, RopeKvArgs, RopePlace};
use rocmforge_ops::{KV_BLOCK, KV_PAGE_TOKENS, KvLayout, KvType};

use super::{Launch, agrees, args, covers, floats, store, store_halves, words};
use crate::memory::{Fault, Memory};

/// Heads of a block: a wave each, of four.
const HEADS_BLOCK: u64 = 4;

pub(super) const PAGE: u64 = KV_PAGE_TOKENS as u64;

/// One layer of a page as a kernel of `ty` has it.
pub(super) fn layout(kv: &KvPlace, ty: KvType) -> Result<KvLayout, Fault> {
    let layout = KvLayout {
        n_layer: 1,
        n_head_kv: kv.n_head_kv as usize,
        head_dim_k: kv.dim_k as usize,
        head_dim_v: kv.dim_v as usize,
        ty,
    };
    match layout.fits(ty) {
        true => Ok(layout),
        false => Err(Fault(format!("{layout:?}: no whole blocks"))),
    }
}

/// Position and sequence of a row.
pub(super) fn row_of(memory: &mut Memory, kv: &KvPlace, row: u32) -> Result<(u32, u32), Fault> {
    let of = u64::from(row) * 4;
    let position = words(memory, kv.positions + of, 1, "positions")?[0];
    let sequence = match kv.sequences {
        0 => row,
        at => words(memory, at + of, 1, "sequences")?[0],
    };
    Ok((position, sequence))
}

/// Address of the layer in a sequence's page.
pub(super) fn page_of(
    memory: &mut Memory,
    kv: &KvPlace,
    sequence: u32,
    page: u64,
) -> Result<u64, Fault> {
    covers("the page table", u64::from(kv.table_stride), page + 1)?;
    let entry = u64::from(sequence) * u64::from(kv.table_stride) + page;
    let bytes = memory.read(kv.table + entry * 8, 8, "the page table")?;
    let (offsets, _) = bytes.as_chunks::<8>();
    Ok(kv.kv_base + u64::from_le_bytes(offsets[0]) + kv.layer_offset)
}

/// A head normed, where there is a weight, and rotated by the row's entry of the table.
pub(super) fn rotated(
    memory: &mut Memory,
    mut head: Vec<f32>,
    norm: u64,
    rope: &RopePlace,
    entry: u32,
) -> Result<Vec<f32>, Fault> {
    if norm != 0 {
        let weight = floats(memory, norm, head.len(), "a head's norm")?;
        ops::rms_norm_in_place(Simd::detect(), &mut head, &weight, rope.eps);
    }
    let (n, first) = (rope.n_rot as usize, rope.first as usize);
    covers("a head", head.len() as u64, (first + n) as u64)?;
    if n == 0 {
        return Ok(head);
    }
    let at = u64::from(entry) * n as u64 * 4;
    let cos = floats(memory, rope.cos + at, n, "rotations")?;
    let sin = floats(memory, rope.sin + at, n, "rotations")?;
    let mut out = head.clone();
    for i in 0..n {
        let partner = match (rope.neox, i < n / 2) {
            (0, _) => i ^ 1,
            (_, true) => i + n / 2,
            (_, false) => i - n / 2,
        };
        out[first + i] = head[first + i] * cos[i] + head[first + partner] * sin[i];
    }
    Ok(out)
}

/// Writes a row's keys, rotated, and values to their slots.
pub(super) fn append(
    memory: &mut Memory,
    (k, v): (u64, u64),
    kv: &KvPlace,
    ty: KvType,
    rope: &RopePlace,
    row: u32,
) -> Result<(), Fault> {
    let (position, sequence) = row_of(memory, kv, row)?;
    let page = page_of(memory, kv, sequence, u64::from(position) / PAGE)?;
    let slot = u64::from(position) % PAGE;
    let entry = if rope.by_position != 0 { position } else { row };
    let (layout, n) = (layout(kv, ty)?, u64::from(kv.n_head_kv));
    for head in 0..n {
        let (dim_k, dim_v) = (u64::from(kv.dim_k), u64::from(kv.dim_v));
        let of_row = u64::from(row) * n + head;
        let key = floats(memory, k + of_row * dim_k * 4, dim_k as usize, "keys")?;
        let key = rotated(memory, key, rope.k_norm, rope, entry)?;
        let value = floats(memory, v + of_row * dim_v * 4, dim_v as usize, "values")?;
        let to_k = page + layout.k_offset_bytes(head as usize) as u64;
        let to_v = page + layout.v_offset_bytes(head as usize) as u64;
        store_slot(memory, to_k, ty, slot, &key)?;
        store_slot(memory, to_v, ty, slot, &value)?;
    }
    Ok(())
}

/// Writes a slot of a head that begins at `head`, as the host does.
fn store_slot(
    memory: &mut Memory,
    head: u64,
    ty: KvType,
    slot: u64,
    row: &[f32],
) -> Result<(), Fault> {
    let dim = row.len() as u64;
    match ty {
        KvType::F32 => return store(memory, head + slot * dim * 4, row),
        KvType::F16 => return store_halves(memory, head + slot * dim * 2, row),
        KvType::Q8_0 => {}
    }
    // One head, a key of nothing and a value: what is written to the slot of such a layer. Values
    // have the same order on the host as keys and values have here.
    let alone = KvLayout {
        n_layer: 1,
        n_head_kv: 1,
        head_dim_k: 0,
        head_dim_v: row.len(),
        ty,
    };
    let mut bytes = vec![0u8; alone.layer_bytes()];
    let slots = slot as usize..slot as usize + 1;
    ops::kv_append(Simd::detect(), &alone, &mut bytes, slots, &[], row);
    for (at, len) in pieces(ty, slot, dim) {
        let piece = &bytes[at as usize..][..len as usize];
        memory.write(head + at, piece)?;
    }
    Ok(())
}

/// Where, in a head of a page, the bytes of slots up to `slot` and of it alone are:
/// codes and scales, or floats.
fn pieces(ty: KvType, slot: u64, dim: u64) -> Vec<(u64, u64)> {
    let blocks = dim / KV_BLOCK as u64;
    match ty {
        KvType::F32 => vec![(slot * dim * 4, dim * 4)],
        KvType::F16 => vec![(slot * dim * 2, dim * 2)],
        KvType::Q8_0 => vec![
            (slot * dim, dim),
            (PAGE * dim + slot * blocks * 2, blocks * 2),
        ],
    }
}

/// Bytes of an element of the `i`-th of a slot's [`pieces`].
fn element_bytes(ty: KvType, i: usize) -> usize {
    match (ty, i) {
        (KvType::F32, _) => 4,
        (KvType::Q8_0, 0) => 1,
        (KvType::F16 | KvType::Q8_0, _) => 2,
    }
}

/// `to[element][slot] = from[slot][element]`, slots of `width` bytes, elements of `size`;
/// `to` has all slots of a page.
fn transpose(from: &[u8], width: usize, size: usize, to: &mut [u8]) {
    for (slot, from) in from.chunks_exact(width).enumerate() {
        let rows = to.chunks_exact_mut(PAGE as usize * size);
        for (to, element) in rows.zip(from.chunks_exact(size)) {
            to[slot * size..][..size].copy_from_slice(element);
        }
    }
}

/// The layer of a sequence's pages for its first `n` positions, in the host's order, whose keys are
/// transposed; slots past them are zeros, and pages before that of position `start` have none.
pub(super) fn pages(
    memory: &mut Memory,
    kv: &KvPlace,
    ty: KvType,
    sequence: u32,
    (start, n): (u32, u64),
) -> Result<Vec<Vec<u8>>, Fault> {
    let layout = layout(kv, ty)?;
    let mut pages = Vec::new();
    for page in 0..n.div_ceil(PAGE) {
        if page < u64::from(start) / PAGE {
            pages.push(vec![0; layout.layer_bytes()]);
            continue;
        }
        let at = page_of(memory, kv, sequence, page)?;
        let slots = (n - page * PAGE).min(PAGE);
        let mut layer = vec![0; layout.layer_bytes()];
        for head in 0..layout.n_head_kv {
            let parts = [
                (layout.k_offset_bytes(head), layout.head_dim_k, true),
                (layout.v_offset_bytes(head), layout.head_dim_v, false),
            ];
            for (first, dim, keys) in parts {
                // The pieces of the first slot begin those of all.
                for (i, (from, len)) in pieces(ty, 0, dim as u64).into_iter().enumerate() {
                    let (from, width) = (first as u64 + from, len as usize);
                    let bytes = memory.read(at + from, slots as usize * width, "a KV page")?;
                    let to = &mut layer[from as usize..][..PAGE as usize * width];
                    match keys {
                        true => transpose(&bytes, width, element_bytes(ty, i), to),
                        false => to[..bytes.len()].copy_from_slice(&bytes),
                    }
                }
            }
        }
        pages.push(layer);
    }
    Ok(pages)
}

/// A block row a row: queries rotated to another place, keys and values to the pages.
pub(super) fn rope_kv(
    memory: &mut Memory,
    launch: &Launch,
    dim: Option<u32>,
    ty: KvType,
) -> Result<(), Fault> {
    let a = args(launch, RopeKvArgs::from_bytes)?;
    match dim {
        Some(dim) => agrees("the size of a key and of the kernel", a.kv.dim_k, dim)?,
        None => covers("a head", 576, u64::from(a.kv.dim_k))?,
    }
    let dim = a.kv.dim_k;
    let heads = u64::from(a.n_head) + 2 * u64::from(a.kv.n_head_kv);
    covers("the grid", u64::from(launch.grid[0]) * HEADS_BLOCK, heads)?;
    for row in 0..launch.grid[1] {
        let (position, _) = row_of(memory, &a.kv, row)?;
        let entry = if a.rope.by_position != 0 {
            position
        } else {
            row
        };
        for head in 0..u64::from(a.n_head) {
            let at = (u64::from(row) * u64::from(a.n_head) + head) * u64::from(dim);
            let q = floats(memory, a.q + at * 4, dim as usize, "queries")?;
            let q = rotated(memory, q, a.rope.q_norm, &a.rope, entry)?;
            if a.q_half != 0 {
                store_halves(memory, a.q_out + at * 2, &q)?;
            } else {
                store(memory, a.q_out + at * 4, &q)?;
            }
        }
        append(memory, (a.k, a.v), &a.kv, ty, &a.rope, row)?;
    }
    Ok(())
}

/// A block row a row: heads of one buffer in place.
pub(super) fn rope_heads(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, RopeHeadsArgs::from_bytes)?;
    covers("a head", 576, u64::from(a.dim))?;
    let heads = u64::from(a.n_head);
    covers("the grid", u64::from(launch.grid[0]) * HEADS_BLOCK, heads)?;
    for row in 0..launch.grid[1] {
        let entry = match a.rope.by_position {
            0 => row,
            _ => words(memory, a.positions + u64::from(row) * 4, 1, "positions")?[0],
        };
        for head in 0..heads {
            let at = a.x + (u64::from(row) * heads + head) * u64::from(a.dim) * 4;
            let x = floats(memory, at, a.dim as usize, "heads")?;
            let x = rotated(memory, x, a.rope.q_norm, &a.rope, entry)?;
            store(memory, at, &x)?;
        }
    }
    Ok(())
}
