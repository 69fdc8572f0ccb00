//! Grouped-query attention over paged keys and values:
//! `out[r][h] = sum_p softmax_p(scale * q[r][h] . k[p][h / group]) * v[p][h / group]` over the
//! positions `p` up to that of row `r`, and with a sliding window only the last `window` of them;
//! where rows attend ahead (encoders), some or all positions behind it too.
//! Scores may be bounded or fall with the distance of the key, and a head may have a sink: one more
//! score, whose value is nothing.
//!
//! A work item is one key/value head times a tile of query rows: the query heads of the group (some
//! of them, where they are many) and all rows of the tile use a page's K and V while they are in
//! cache. The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
//! arXiv 2205.14135), one step a page.
//!
//! *Invariant:* what a row gets is computed by the same operations in the same order whatever the
//! number of rows in its span, the tile it falls into and the thread it runs on: bit for bit the
//! same result (test `a_row_is_the_same_bits_in_any_span_and_on_any_pool`). Slots of a page beyond
//! the last position are read but never reach a result
//! (`nan_reaches_the_rows_that_attend_to_it_and_no_others`).

use std::cell::RefCell;
use std::num::NonZeroUsize;

use rocmforge_ops::{KV_PAGE_TOKENS, KvLayout, alibi_slope};

use super::Simd;
use super::attention_tile::{Tile, TileBuffers};
use crate::{Pool, SyncPtr};

/// Queries (rows times heads of a group) of one tile: enough that widening a page's K and V to f32
/// is a small part of the work, few enough that the tile stays in the second-level cache.
const TILE_QUERIES: usize = 64;

/// Maximum number of query heads of one tile: enough that widening a page is a small part of the
/// work, few enough that one row of a model with a single key/value head keeps several threads
/// busy.
const TILE_HEADS: usize = 32;

thread_local! {
    /// What a tile works in; a few hundred KiB at most, kept from call to call.
    static SCRATCH: RefCell<TileBuffers> = RefCell::default();
}

/// What all spans of a call have in common.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    /// The layout of the pages.
    pub kv: KvLayout,
    /// Query heads, a multiple of `kv.n_head_kv`; head `h` uses key/value head
    /// `h / (n_head / n_head_kv)`.
    pub n_head: usize,
    /// Multiplies the scores: `1 / sqrt(head_dim)` unless the model says otherwise.
    pub scale: f32,
    /// Attend to this many positions up to the row's own, that included; None: to all.
    pub window: Option<NonZeroUsize>,
    /// Attend to so many positions behind the row's own at most, as far as the sequence has them; 0
    /// is causal.
    pub ahead: usize,
    /// Scaled scores become `softcap * tanh(score / softcap)`; 0 for none.
    pub softcap: f32,
    /// One more score a query head that takes part in the softmax and has no value, `[n_head]`.
    pub sinks: Option<&'a [f32]>,
    /// Scores fall by [`alibi_slope`] of this for each position between query and key; 0 for none.
    pub alibi: f32,
}

impl AttentionShape<'_> {
    /// By how much each head's scores fall, `[n_head]`; nothing where they do not.
    fn slopes(&self) -> Vec<f32> {
        let n_head = match self.alibi > 0.0 {
            true => self.n_head as u32,
            false => 0,
        };
        let slope = |head| alibi_slope(self.alibi, n_head, head);
        (0..n_head).map(slope).collect()
    }
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpan<'a> {
    /// Rows, at positions `pos0..pos0 + n_rows`.
    pub n_rows: usize,
    /// The position of the first row.
    pub pos0: usize,
    /// This layer of the sequence's pages, from position 0, the span's own included:
    /// [`KvLayout::layer_bytes`] each, aligned to 4 bytes for f32, else to 2. Pages that lie wholly
    /// before every row's window may be empty slices.
    pub pages: &'a [&'a [u8]],
    /// Positions behind the span's of which the pages have keys and values too: rows that attend
    /// ahead end there.
    pub later: usize,
    /// Each row attends to all positions behind its own, as far as the pages have them, whatever
    /// [`AttentionShape::ahead`] says.
    pub whole: bool,
}

impl AttentionSpan<'_> {
    /// Positions behind its own that a row attends to at most.
    fn ahead(&self, shape: &AttentionShape<'_>) -> usize {
        if self.whole { usize::MAX } else { shape.ahead }
    }
}

/// Attends for all `spans`, in order: `q` is `[rows of all spans][n_head][head_dim_k]`, `out` is
/// `[rows of all spans][n_head][head_dim_v]`.
///
/// # Panics
/// When shapes do not fit each other or a page is missing.
pub fn attention(
    pool: &Pool,
    simd: Simd,
    shape: &AttentionShape<'_>,
    spans: &[AttentionSpan<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    check(shape, spans, q, out);
    let kv = &shape.kv;
    let group = shape.n_head / kv.n_head_kv;
    let (q_row, out_row) = (shape.n_head * kv.head_dim_k, shape.n_head * kv.head_dim_v);
    let heads = (1..=group.min(TILE_HEADS))
        .rev()
        .find(|n| group.is_multiple_of(*n))
        .unwrap_or(1);
    let tile_rows = (TILE_QUERIES / heads).clamp(1, KV_PAGE_TOKENS);
    // Runs of query heads that share a key/value head.
    let n_runs = shape.n_head / heads;

    // Where each span's rows and work items begin.
    let mut starts = Vec::with_capacity(spans.len());
    let (mut n_rows, mut n_items) = (0, 0);
    for span in spans {
        starts.push((n_rows, n_items));
        n_rows += span.n_rows;
        n_items += span.n_rows.div_ceil(tile_rows) * n_runs;
    }

    let slopes = shape.slopes();
    let out = SyncPtr(out.as_mut_ptr());
    pool.run(n_items, 1, |items| {
        SCRATCH.with_borrow_mut(|scratch| {
            for item in items {
                let index = starts.partition_point(|&(_, first_item)| first_item <= item) - 1;
                let (span, (first_row, first_item)) = (&spans[index], starts[index]);
                let first_head = (item - first_item) % n_runs * heads;
                // The last tile first: it attends to the most positions.
                let tile = span.n_rows.div_ceil(tile_rows) - 1 - (item - first_item) / n_runs;
                let rows = tile * tile_rows..span.n_rows.min((tile + 1) * tile_rows);
                let tile = Tile {
                    shape,
                    pages: span.pages,
                    head_kv: first_head / group,
                    first_head,
                    heads,
                    slopes: slopes.get(first_head..first_head + heads).unwrap_or(&[]),
                    pos0: span.pos0 + rows.start,
                    end: span.pos0 + span.n_rows + span.later,
                    ahead: span.ahead(shape),
                    n_rows: rows.len(),
                    q: &q[(first_row + rows.start) * q_row..(first_row + rows.end) * q_row],
                };
                tile.attend(simd, scratch);
                for (r, row) in rows.enumerate() {
                    let start = (first_row + row) * out_row + first_head * kv.head_dim_v;
                    // SAFETY: row is one of the rows of out and the heads are some of its heads, so
                    // the piece lies inside out, which stays borrowed until run returns; each item
                    // has its own pair of tile and heads, so no two pieces overlap.
                    let out = unsafe {
                        std::slice::from_raw_parts_mut(out.get().add(start), heads * kv.head_dim_v)
                    };
                    tile.result(scratch, r, out);
                }
            }
        });
    });
}

fn check(shape: &AttentionShape<'_>, spans: &[AttentionSpan<'_>], q: &[f32], out: &[f32]) {
    let kv = &shape.kv;
    assert!(
        kv.n_head_kv > 0 && shape.n_head > 0 && shape.n_head.is_multiple_of(kv.n_head_kv),
        "attention: {} query heads over {} key/value heads",
        shape.n_head,
        kv.n_head_kv
    );
    assert!(
        kv.head_dim_k > 0 && kv.head_dim_v > 0,
        "attention: empty heads"
    );
    assert!(kv.fits(kv.ty), "attention: heads of no whole blocks");
    assert!(
        shape.sinks.is_none_or(|sinks| sinks.len() == shape.n_head),
        "attention: not one sink a head"
    );
    let rows: usize = spans.iter().map(|span| span.n_rows).sum();
    assert_eq!(
        q.len(),
        rows * shape.n_head * kv.head_dim_k,
        "attention: q has another shape"
    );
    assert_eq!(
        out.len(),
        rows * shape.n_head * kv.head_dim_v,
        "attention: out has another shape"
    );
    for span in spans {
        let first = first_position(shape, span.pos0) / KV_PAGE_TOKENS;
        let later = span.later.min(span.ahead(shape));
        let end = (span.pos0 + span.n_rows + later).div_ceil(KV_PAGE_TOKENS);
        assert!(
            end <= span.pages.len(),
            "attention: {} pages, {end} needed",
            span.pages.len()
        );
        for (index, page) in span.pages.iter().enumerate().take(end).skip(first) {
            assert_eq!(
                page.len(),
                kv.layer_bytes(),
                "attention: page {index} is not a layer of a page"
            );
        }
    }
}

/// The first position that a row at `pos` attends to.
pub(super) fn first_position(shape: &AttentionShape<'_>, pos: usize) -> usize {
    shape
        .window
        .map_or(0, |window| (pos + 1).saturating_sub(window.get()))
}
