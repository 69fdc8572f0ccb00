//! Causal grouped-query attention over paged keys and values:
//! `out[r][h] = sum_p softmax_p(scale * q[r][h] . k[p][h / group]) * v[p][h / group]`
//! over the positions `p` up to that of row `r`, and with a sliding window only the last `window` of them.
//!
//! A work item is one key/value head times a tile of query rows: all query heads of the group and all rows of
//! the tile use a page's K and V while they are in cache. The softmax is the online one (Milakov and
//! Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135), one step a page.
//!
//! *Invariant:* what a row gets is computed by the same operations in the same order whatever the number of
//! rows in its span, the tile it falls into and the thread it runs on: bit for bit the same result.
//! Slots of a page beyond the last position are read but never reach a result.

use std::num::NonZeroUsize;

use half::f16;

use super::{KV_PAGE_TOKENS, KvLayout, Simd};
use crate::host::Pool;

/// What all spans of a call have in common.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// The layout of the pages.
    pub kv: KvLayout,
    /// Query heads, a multiple of `kv.n_head_kv`; head `h` uses key/value head `h / (n_head / n_head_kv)`.
    pub n_head: usize,
    /// Multiplies the scores: `1 / sqrt(head_dim)` unless the model says otherwise.
    pub scale: f32,
    /// Attend to this many positions, the row's own included; None: to all.
    pub window: Option<NonZeroUsize>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpan<'a> {
    /// Rows, at positions `pos0..pos0 + n_rows`.
    pub n_rows: usize,
    /// The position of the first row.
    pub pos0: usize,
    /// This layer of the sequence's pages ([`KvLayout::layer`]), from position 0, the span's own included.
    /// Pages that lie wholly before every row's window may be empty slices.
    pub pages: &'a [&'a [f16]],
}

/// Attends for all `spans`, in order: `q` is `[rows of all spans][n_head][head_dim_k]`, `out` is
/// `[rows of all spans][n_head][head_dim_v]`.
///
/// # Panics
/// When shapes do not fit each other or a page is missing.
pub fn attention(
    pool: &Pool,
    _simd: Simd,
    shape: &AttentionShape,
    spans: &[AttentionSpan<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    let (n_head, dk, dv) = (shape.n_head, shape.kv.head_dim_k, shape.kv.head_dim_v);
    check(shape, spans, q, out);
    let mut rows = Vec::new();
    for span in spans {
        rows.extend((0..span.n_rows).map(|row| (span, span.pos0 + row)));
    }
    pool.run_rows(out, n_head * dv, 1, |range, out| {
        for (row, out) in range.zip(out.chunks_exact_mut(n_head * dv)) {
            let (span, pos) = rows[row];
            for (head, out) in out.chunks_exact_mut(dv).enumerate() {
                scalar_row(
                    shape,
                    span,
                    pos,
                    head,
                    &q[(row * n_head + head) * dk..][..dk],
                    out,
                );
            }
        }
    });
}

fn check(shape: &AttentionShape, spans: &[AttentionSpan<'_>], q: &[f32], out: &[f32]) {
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
        let end = (span.pos0 + span.n_rows).div_ceil(KV_PAGE_TOKENS);
        assert!(
            end <= span.pages.len(),
            "attention: {} pages, {end} needed",
            span.pages.len()
        );
        for (index, page) in span.pages.iter().enumerate().take(end).skip(first) {
            assert_eq!(
                page.len(),
                kv.layer_elements(),
                "attention: page {index} is not a layer of a page"
            );
        }
    }
}

/// The first position that a row at `pos` attends to.
fn first_position(shape: &AttentionShape, pos: usize) -> usize {
    shape
        .window
        .map_or(0, |window| (pos + 1).saturating_sub(window.get()))
}

fn scalar_row(
    shape: &AttentionShape,
    span: &AttentionSpan<'_>,
    pos: usize,
    head: usize,
    q: &[f32],
    out: &mut [f32],
) {
    let kv = &shape.kv;
    let head_kv = head / (shape.n_head / kv.n_head_kv);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0f32);
    out.fill(0.0);
    let first = first_position(shape, pos);
    for page in first / KV_PAGE_TOKENS..=pos / KV_PAGE_TOKENS {
        let start = page * KV_PAGE_TOKENS;
        let slots = first.max(start) - start..(pos + 1).min(start + KV_PAGE_TOKENS) - start;
        let keys = &span.pages[page][kv.k_offset(head_kv)..];
        let values = &span.pages[page][kv.v_offset(head_kv)..];
        let mut scores = [0f32; KV_PAGE_TOKENS];
        for slot in slots.clone() {
            let key = &keys[slot * kv.head_dim_k..][..kv.head_dim_k];
            scores[slot] = q
                .iter()
                .zip(key)
                .map(|(q, k)| q * shape.scale * k.to_f32())
                .sum();
        }
        let new_max = scores[slots.clone()].iter().copied().fold(max, f32::max);
        let keep = (max - new_max).exp();
        max = new_max;
        sum *= keep;
        out.iter_mut().for_each(|out| *out *= keep);
        for slot in slots {
            let weight = (scores[slot] - max).exp();
            sum += weight;
            let value = &values[slot * kv.head_dim_v..][..kv.head_dim_v];
            for (out, v) in out.iter_mut().zip(value) {
                *out += weight * v.to_f32();
            }
        }
    }
    out.iter_mut().for_each(|out| *out /= sum);
}
