//! The inner part of [`attention`](super::attention()): one key/value head, the queries of its group in a tile
//! of rows, page by page.
//!
//! For each page, K is transposed to `[head_dim_k][32]` and V widened to `[32][head_dim_v]`, both f32; then
//! scores of several queries at a time are outer-product sums with a register a (query, 16 slots), and the
//! weighted sums of V likewise. Widening is shared by all queries of the tile.
//!
//! *Invariant:* each element of a score or of a result is one chain of fused multiply-adds in the order of the
//! dimension or of the position. Blocking groups chains and never splits one, so neither the tile nor the
//! block that a row falls into shows in its result.
//!
//! *Invariant:* a slot outside the range that a row attends to contributes to nothing of that row, not even as
//! zero times its value: it may hold NaN.

use half::f16;

use super::attention::{AttentionShape, first_position};
use super::attention_page::{
    accumulate, largest_score, rescale, score, transpose_keys, weigh, widen_values,
};
use super::lanes::{Lanes, simd_fn};
use super::{KV_PAGE_TOKENS, Simd};

/// Slots of a page, the stride of transposed keys and of scores.
pub(super) const SLOTS: usize = KV_PAGE_TOKENS;

/// The widest vector, to which rows of scratch are padded.
pub(super) const PAD: usize = 16;

/// One work item.
pub(super) struct Tile<'a> {
    pub(super) shape: &'a AttentionShape,
    /// This layer of the sequence's pages, from position 0.
    pub(super) pages: &'a [&'a [f16]],
    pub(super) head_kv: usize,
    /// The position of the tile's first row.
    pub(super) pos0: usize,
    pub(super) n_rows: usize,
    /// `[n_rows][n_head][head_dim_k]`
    pub(super) q: &'a [f32],
}

/// What a tile works in. Query `i` is row `i / group`, head `i % group` of the group.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[queries][head_dim_k]`.
    pub(super) q: Aligned,
    /// Keys of a page, `[head_dim_k][SLOTS]`.
    pub(super) keys: Aligned,
    /// Values of a page, `[SLOTS][padded head_dim_v]`.
    pub(super) values: Aligned,
    /// Scores, then weights, `[queries][SLOTS]`.
    pub(super) scores: Aligned,
    /// Weighted sums, at the end divided by the sums of weights, `[queries][padded head_dim_v]`.
    pub(super) out: Aligned,
    /// Sums of weights, a vector a query, `[queries][PAD]`.
    pub(super) sums: Aligned,
    /// The largest score so far, `[queries]`.
    pub(super) max: Aligned,
    /// The largest score with this page, `[queries]`.
    pub(super) new_max: Aligned,
    /// What the sums so far are multiplied by, `[queries]`.
    pub(super) keep: Aligned,
}

/// f32 from a 64-byte boundary on.
#[derive(Default)]
pub(super) struct Aligned(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; PAD]);

impl Aligned {
    /// At least `n` elements; what they hold is left over from before, or NaN: nobody may count on it.
    fn reserve(&mut self, n: usize) {
        let lines = n.div_ceil(PAD);
        if self.0.len() < lines {
            self.0.resize(lines, Line([f32::NAN; PAD]));
        }
    }

    pub(super) fn all(&self) -> &[f32] {
        // SAFETY: a Line is PAD f32 without padding, and the lines are contiguous.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAD) }
    }

    pub(super) fn all_mut(&mut self) -> &mut [f32] {
        // SAFETY: a Line is PAD f32 without padding, the lines are contiguous and mutably borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAD) }
    }
}

impl Tile<'_> {
    /// Leaves the tile's result in `scratch`, see [`Tile::result`].
    pub(super) fn attend(&self, simd: Simd, scratch: &mut Scratch) {
        let (dk, dv) = (self.shape.kv.head_dim_k, self.padded_v());
        let queries = self.n_rows * self.group();
        scratch.q.reserve(queries * dk);
        scratch.keys.reserve(dk * SLOTS);
        scratch.values.reserve(SLOTS * dv);
        scratch.scores.reserve(queries * SLOTS);
        scratch.out.reserve(queries * dv);
        scratch.sums.reserve(queries * PAD);
        scratch.max.reserve(queries);
        scratch.new_max.reserve(queries);
        scratch.keep.reserve(queries);

        let width = self.group() * dk;
        for r in 0..self.n_rows {
            let q = &self.q[r * self.shape.n_head * dk + self.head_kv * width..][..width];
            let scaled = &mut scratch.q.all_mut()[r * width..][..width];
            scaled
                .iter_mut()
                .zip(q)
                .for_each(|(scaled, q)| *scaled = q * self.shape.scale);
        }
        scratch.out.all_mut()[..queries * dv].fill(0.0);
        scratch.sums.all_mut()[..queries * PAD].fill(0.0);
        scratch.max.all_mut()[..queries].fill(f32::NEG_INFINITY);
        attend_pages(simd, self, scratch);
    }

    /// What [`Tile::attend`] left for row `r` of the tile, `[group][head_dim_v]`.
    pub(super) fn result(&self, scratch: &Scratch, r: usize, out: &mut [f32]) {
        let (group, dv) = (self.group(), self.shape.kv.head_dim_v);
        for (g, out) in out.chunks_exact_mut(dv).enumerate() {
            out.copy_from_slice(&scratch.out.all()[(r * group + g) * self.padded_v()..][..dv]);
        }
    }

    #[inline(always)]
    fn group(&self) -> usize {
        self.shape.n_head / self.shape.kv.n_head_kv
    }

    #[inline(always)]
    fn padded_v(&self) -> usize {
        self.shape.kv.head_dim_v.next_multiple_of(PAD)
    }

    /// The pages that some row attends to.
    #[inline(always)]
    fn page_range(&self) -> std::ops::RangeInclusive<usize> {
        first_position(self.shape, self.pos0) / SLOTS..=(self.pos0 + self.n_rows - 1) / SLOTS
    }

    /// The slots `from..to` of `page` that row `r` attends to; empty where `from >= to`.
    #[inline(always)]
    fn slots(&self, r: usize, page: usize) -> (usize, usize) {
        let (pos, start) = (self.pos0 + r, page * SLOTS);
        let from = first_position(self.shape, pos)
            .saturating_sub(start)
            .min(SLOTS);
        (from, (pos + 1).saturating_sub(start).min(SLOTS))
    }

    /// Keys `[SLOTS][head_dim_k]` and values `[SLOTS][head_dim_v]` of the head in `page`.
    #[inline(always)]
    fn keys_values(&self, page: usize) -> (&[f16], &[f16]) {
        let kv = &self.shape.kv;
        let layer = self.pages[page];
        let keys = &layer[kv.k_offset(self.head_kv)..][..SLOTS * kv.head_dim_k];
        (
            keys,
            &layer[kv.v_offset(self.head_kv)..][..SLOTS * kv.head_dim_v],
        )
    }
}

simd_fn! {
    fn attend_pages(tile: &Tile<'_>, scratch: &mut Scratch);
    simd attend_lanes;
    scalar attend_scalar;
}

#[inline(always)]
fn attend_lanes<S: Lanes>(s: S, tile: &Tile<'_>, scratch: &mut Scratch) {
    let group = tile.group();
    let (dk, dv) = (tile.shape.kv.head_dim_k, tile.padded_v());
    for page in tile.page_range() {
        // The rows that see something of the page: consecutive ones, since both ends of what a row sees only
        // grow with the row.
        let sees = |r: &usize| {
            let (from, to) = tile.slots(*r, page);
            from < to
        };
        let Some(first) = (0..tile.n_rows).find(sees) else {
            continue;
        };
        let end = first + (first..tile.n_rows).take_while(sees).count();
        let (from, to) = (tile.slots(first, page).0, tile.slots(end - 1, page).1);
        let whole =
            tile.slots(first, page) == (0, SLOTS) && tile.slots(end - 1, page) == (0, SLOTS);

        let (keys, values) = tile.keys_values(page);
        // Decoding is bound by memory, and the pages lie anywhere: no hardware looks ahead across them.
        if page < *tile.page_range().end() {
            let (keys, values) = tile.keys_values(page + 1);
            s.prefetch(keys);
            s.prefetch(values);
        }
        transpose_keys(s, keys, dk, from, to, scratch.keys.all_mut());
        widen_values(
            s,
            values,
            tile.shape.kv.head_dim_v,
            dv,
            from,
            to,
            scratch.values.all_mut(),
        );

        let (first_query, end_query) = (first * group, end * group);
        let n = end_query - first_query;
        let scores = &mut scratch.scores.all_mut()[first_query * SLOTS..end_query * SLOTS];
        score(
            s,
            &scratch.q.all()[first_query * dk..],
            n,
            dk,
            scratch.keys.all(),
            scores,
        );

        for r in first..end {
            let (from, to) = tile.slots(r, page);
            for i in r * group..(r + 1) * group {
                let most = largest_score(s, &scratch.scores.all()[i * SLOTS..][..SLOTS], from, to);
                let max = scratch.max.all()[i];
                scratch.new_max.all_mut()[i] = if most > max { most } else { max };
            }
        }
        let range = first_query..end_query;
        rescale(
            s,
            &mut scratch.max.all_mut()[range.clone()],
            &scratch.new_max.all()[range.clone()],
            &mut scratch.keep.all_mut()[range.clone()],
        );
        for r in first..end {
            let (from, to) = tile.slots(r, page);
            for i in r * group..(r + 1) * group {
                weigh(
                    s,
                    &mut scratch.scores.all_mut()[i * SLOTS..][..SLOTS],
                    (from, to),
                    scratch.max.all()[i],
                    scratch.keep.all()[i],
                    &mut scratch.sums.all_mut()[i * PAD..][..PAD],
                );
            }
        }

        if whole {
            accumulate(s, scratch, range, dv, 0, SLOTS);
        } else {
            for r in first..end {
                let (from, to) = tile.slots(r, page);
                accumulate(s, scratch, r * group..(r + 1) * group, dv, from, to);
            }
        }
    }
    for i in 0..tile.n_rows * group {
        let sum = s.sum(s.load(&scratch.sums.all()[i * PAD..]));
        for out in scratch.out.all_mut()[i * dv..][..dv].chunks_exact_mut(S::N) {
            s.store(out, s.div(s.load(out), s.splat(sum)));
        }
    }
}

fn attend_scalar(tile: &Tile<'_>, scratch: &mut Scratch) {
    let group = tile.group();
    let (dk, dv, padded) = (
        tile.shape.kv.head_dim_k,
        tile.shape.kv.head_dim_v,
        tile.padded_v(),
    );
    for i in 0..tile.n_rows * group {
        let q = &scratch.q.all()[i * dk..][..dk];
        let out = &mut scratch.out.all_mut()[i * padded..][..dv];
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0f32);
        for page in tile.page_range() {
            let (from, to) = tile.slots(i / group, page);
            if from >= to {
                continue;
            }
            let (keys, values) = tile.keys_values(page);
            let mut scores = [0f32; SLOTS];
            for slot in from..to {
                let key = &keys[slot * dk..][..dk];
                scores[slot] = q.iter().zip(key).map(|(q, k)| q * k.to_f32()).sum();
            }
            let new_max = scores[from..to].iter().copied().fold(max, f32::max);
            let keep = (max - new_max).exp();
            max = new_max;
            sum *= keep;
            out.iter_mut().for_each(|out| *out *= keep);
            for slot in from..to {
                let weight = (scores[slot] - max).exp();
                sum += weight;
                for (out, v) in out.iter_mut().zip(&values[slot * dv..][..dv]) {
                    *out += weight * v.to_f32();
                }
            }
        }
        out.iter_mut().for_each(|out| *out /= sum);
    }
}
