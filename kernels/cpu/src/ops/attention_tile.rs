//! The inner part of [`attention`](super::attention()): one key/value head, the queries of its
//! group in a tile of rows, page by page.
//!
//! K of a page lies as `[head_dim_k][32]`, V as `[32][head_dim_v]`. Scores of several queries at a
//! time are outer-product sums with a register a (query, 16 slots), and the weighted sums of V
//! likewise. Few queries widen both to f32 in registers, as often as they read them; for more a
//! page is widened once, into the tile's scratch.
//!
//! *Invariant:* each element of a score or of a result is one chain of fused multiply-adds in the
//! order of the dimension or of the position. Blocking groups chains and never splits one, so
//! neither the tile nor the block that a row falls into shows in its result (test
//! `a_row_is_the_same_bits_in_any_span_and_on_any_pool`).
//!
//! *Invariant:* a slot outside the range that a row attends to contributes to nothing of that row,
//! not even as zero times its value: it may hold NaN (test
//! `nan_reaches_the_rows_that_attend_to_it_and_no_others`).

use std::ops::Range;

use super::Simd;
use super::attention::{AttentionShape, first_position};
use super::attention_page::{
    accumulate, largest_score, readable, rescale, score, weigh, widen_keys, widen_scales,
    widen_values,
};
use super::kv::Stored;
use super::lanes::{Lanes, simd_fn};
use super::scale::{soft_cap_lanes, soft_cap_scalar};
use rocmforge_ops::KV_PAGE_TOKENS;

/// Slots of a page, the stride of transposed keys and of scores.
pub(super) const SLOTS: usize = KV_PAGE_TOKENS;

/// The widest vector, to which rows of scratch are padded.
pub(super) const PAD: usize = 16;

/// Up to so many queries of a tile widen keys and values in registers: they read them twice with
/// AVX-512 and four times with AVX2, which takes less than to store and load what was widened.
const DIRECT_QUERIES: usize = 16;

/// One work item of attention: query rows of one key/value head.
pub(super) struct Tile<'a> {
    pub(super) shape: &'a AttentionShape<'a>,
    /// This layer of the sequence's pages, from position 0.
    pub(super) pages: &'a [&'a [u8]],
    pub(super) head_kv: usize,
    /// The first query head; it and the others of the tile use `head_kv`.
    pub(super) first_head: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// By how much each one's scores fall a position; none where they do not.
    pub(super) slopes: &'a [f32],
    /// The position of the tile's first row.
    pub(super) pos0: usize,
    pub(super) n_rows: usize,
    /// Behind the last position of the sequence that the pages have.
    pub(super) end: usize,
    /// Positions behind its own that a row attends to at most.
    pub(super) ahead: usize,
    /// `[n_rows][n_head][head_dim_k]`
    pub(super) q: &'a [f32],
}

/// What a tile works in. Query `i` is row `i / heads`, head `i % heads` of the tile.
#[derive(Default)]
pub(super) struct TileBuffers {
    /// Scaled queries, `[queries][head_dim_k]`.
    pub(super) q: Aligned,
    /// Keys of a page, `[head_dim_k][SLOTS]`.
    pub(super) keys: Aligned,
    /// Values of a page, `[SLOTS][padded head_dim_v]`.
    pub(super) values: Aligned,
    /// Scales of a page's keys, then of its values: `[SLOTS][head_dim / 32]`.
    pub(super) scales: Aligned,
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
    /// At least `n` elements; what they hold is left over from before, or NaN: nobody may count on
    /// it.
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
    pub(super) fn attend(&self, simd: Simd, scratch: &mut TileBuffers) {
        let (dk, dv) = (self.shape.kv.head_dim_k, self.padded_v());
        let queries = self.n_rows * self.heads;
        scratch.q.reserve(queries * dk);
        scratch.keys.reserve(dk * SLOTS);
        scratch.values.reserve(SLOTS * dv);
        scratch.scales.reserve(dk.max(dv));
        scratch.scores.reserve(queries * SLOTS);
        scratch.out.reserve(queries * dv);
        scratch.sums.reserve(queries * PAD);
        scratch.max.reserve(queries);
        scratch.new_max.reserve(queries);
        scratch.keep.reserve(queries);

        let width = self.heads * dk;
        for r in 0..self.n_rows {
            let q = &self.q[(r * self.shape.n_head + self.first_head) * dk..][..width];
            let scaled = &mut scratch.q.all_mut()[r * width..][..width];
            scaled
                .iter_mut()
                .zip(q)
                .for_each(|(scaled, q)| *scaled = q * self.shape.scale);
        }
        scratch.out.all_mut()[..queries * dv].fill(0.0);
        scratch.sums.all_mut()[..queries * PAD].fill(0.0);
        scratch.max.all_mut()[..queries].fill(f32::NEG_INFINITY);
        if let Some(sinks) = self.sinks() {
            // As if a page before the first had one slot with this score and nothing for a value.
            for i in 0..queries {
                scratch.max.all_mut()[i] = sinks[i % self.heads];
                scratch.sums.all_mut()[i * PAD] = 1.0;
            }
        }
        attend_pages(simd, self, scratch);
    }

    /// What [`Tile::attend`] left for row `r` of the tile, `[heads][head_dim_v]`.
    pub(super) fn result(&self, scratch: &TileBuffers, r: usize, out: &mut [f32]) {
        let (heads, dv) = (self.heads, self.shape.kv.head_dim_v);
        for (g, out) in out.chunks_exact_mut(dv).enumerate() {
            out.copy_from_slice(&scratch.out.all()[(r * heads + g) * self.padded_v()..][..dv]);
        }
    }

    /// The sinks of the tile's heads.
    fn sinks(&self) -> Option<&[f32]> {
        let sinks = self.shape.sinks?;
        Some(&sinks[self.first_head..][..self.heads])
    }

    #[inline(always)]
    fn padded_v(&self) -> usize {
        self.shape.kv.head_dim_v.next_multiple_of(PAD)
    }

    /// The pages that some row attends to.
    #[inline(always)]
    fn page_range(&self) -> std::ops::RangeInclusive<usize> {
        let last = self.behind(self.pos0 + self.n_rows - 1) - 1;
        first_position(self.shape, self.pos0) / SLOTS..=last / SLOTS
    }

    /// Behind the last position that the row at `pos` attends to.
    #[inline(always)]
    fn behind(&self, pos: usize) -> usize {
        pos.saturating_add(self.ahead).min(self.end - 1) + 1
    }

    /// The slots `from..to` of `page` that row `r` attends to; empty where `from >= to`.
    #[inline(always)]
    fn slots(&self, r: usize, page: usize) -> (usize, usize) {
        let (pos, start) = (self.pos0 + r, page * SLOTS);
        let from = first_position(self.shape, pos)
            .saturating_sub(start)
            .min(SLOTS);
        (from, self.behind(pos).saturating_sub(start).min(SLOTS))
    }

    /// Has the scores of rows, `[rows][heads][SLOTS]`, fall with the distance of `page`'s keys.
    #[inline(always)]
    fn let_fall(&self, rows: Range<usize>, page: usize, scores: &mut [f32]) {
        if self.slopes.is_empty() {
            return;
        }
        for (r, scores) in rows.zip(scores.chunks_exact_mut(self.heads * SLOTS)) {
            for (slope, scores) in self.slopes.iter().zip(scores.chunks_exact_mut(SLOTS)) {
                self.let_fall_by(*slope, r, page, scores);
            }
        }
    }

    /// Lets the scores of one row and head fall by its slope.
    #[inline(always)]
    fn let_fall_by(&self, slope: f32, r: usize, page: usize, scores: &mut [f32]) {
        // Positions are whole numbers below 2^24.
        let apart = (page * SLOTS) as f32 - (self.pos0 + r) as f32;
        for (slot, score) in scores.iter_mut().enumerate() {
            *score -= slope * (apart + slot as f32).abs();
        }
    }

    /// Bytes of the keys and of the values of the head in `page`.
    #[inline(always)]
    fn head_bytes(&self, page: usize) -> (&[u8], &[u8]) {
        let kv = &self.shape.kv;
        let layer = self.pages[page];
        (
            &layer[kv.k_offset_bytes(self.head_kv)..][..kv.keys_bytes()],
            &layer[kv.v_offset_bytes(self.head_kv)..][..kv.values_bytes()],
        )
    }

    /// Keys and values of the head in `page`.
    #[inline(always)]
    fn keys_values(&self, page: usize) -> (Stored<'_>, Stored<'_>) {
        let ty = self.shape.kv.ty;
        let (keys, values) = self.head_bytes(page);
        (Stored::new(ty, keys), Stored::new(ty, values))
    }
}

simd_fn! {
    fn attend_pages(tile: &Tile<'_>, scratch: &mut TileBuffers);
    simd attend_lanes;
    scalar attend_scalar;
}

#[inline(always)]
fn attend_lanes<S: Lanes>(s: S, tile: &Tile<'_>, scratch: &mut TileBuffers) {
    let heads = tile.heads;
    let (dk, dv) = (tile.shape.kv.head_dim_k, tile.padded_v());
    for page in tile.page_range() {
        // The rows that see something of the page: consecutive ones, since both ends of what a row
        // sees only grow with the row.
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
        // Decoding is bound by memory, and the pages lie anywhere: no hardware looks ahead across
        // them.
        if page < *tile.page_range().end() {
            let (keys, values) = tile.head_bytes(page + 1);
            s.prefetch(keys);
            s.prefetch(values);
        }
        let (first_query, end_query) = (first * heads, end * heads);
        let n = end_query - first_query;
        let scores = &mut scratch.scores.all_mut()[first_query * SLOTS..end_query * SLOTS];
        let q = (&scratch.q.all()[first_query * dk..], n, dk);
        let direct = matches!(keys, Stored::F32(_)) || n <= DIRECT_QUERIES;
        let keys = match direct {
            true => keys,
            false => {
                widen_keys(s, keys, dk, scratch.keys.all_mut());
                Stored::F32(scratch.keys.all())
            }
        };
        score(s, q, keys, (from, to), scores);
        if tile.shape.softcap > 0.0 {
            soft_cap_lanes(s, scores, tile.shape.softcap);
        }
        tile.let_fall(first..end, page, scores);

        weigh_rows(s, tile, page, first..end, scratch);

        let range = first_query..end_query;
        let direct = matches!(values, Stored::F32(_)) || n <= DIRECT_QUERIES;
        let direct = direct && readable(tile.shape.kv.head_dim_v);
        match direct {
            true => widen_scales(s, values, scratch.scales.all_mut()),
            false => {
                let dims = (tile.shape.kv.head_dim_v, dv);
                let (scales, out) = (scratch.scales.all_mut(), scratch.values.all_mut());
                widen_values(s, values, dims, (from, to), scales, out);
            }
        }
        let values = direct.then_some(values);
        if whole {
            accumulate(s, scratch, values, range, dv, (0, SLOTS));
        } else {
            for r in first..end {
                let slots = tile.slots(r, page);
                accumulate(s, scratch, values, r * heads..(r + 1) * heads, dv, slots);
            }
        }
    }
    for i in 0..tile.n_rows * heads {
        let sum = s.sum(s.load(&scratch.sums.all()[i * PAD..]));
        for out in scratch.out.all_mut()[i * dv..][..dv].chunks_exact_mut(S::N) {
            s.store(out, s.div(s.load(out), s.splat(sum)));
        }
    }
}

/// Makes weights of the scores that rows have in a page: behind their new maximum, with what was
/// summed before brought to it.
#[inline(always)]
fn weigh_rows<S: Lanes>(
    s: S,
    tile: &Tile<'_>,
    page: usize,
    rows: Range<usize>,
    scratch: &mut TileBuffers,
) {
    let heads = tile.heads;
    for r in rows.clone() {
        let (from, to) = tile.slots(r, page);
        for i in r * heads..(r + 1) * heads {
            let most = largest_score(s, &scratch.scores.all()[i * SLOTS..][..SLOTS], from, to);
            let max = scratch.max.all()[i];
            scratch.new_max.all_mut()[i] = if most > max { most } else { max };
        }
    }
    let range = rows.start * heads..rows.end * heads;
    rescale(
        s,
        &mut scratch.max.all_mut()[range.clone()],
        &scratch.new_max.all()[range.clone()],
        &mut scratch.keep.all_mut()[range.clone()],
    );
    for r in rows {
        let (from, to) = tile.slots(r, page);
        for i in r * heads..(r + 1) * heads {
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
}

fn attend_scalar(tile: &Tile<'_>, scratch: &mut TileBuffers) {
    let heads = tile.heads;
    let (dk, dv, padded) = (
        tile.shape.kv.head_dim_k,
        tile.shape.kv.head_dim_v,
        tile.padded_v(),
    );
    for i in 0..tile.n_rows * heads {
        let q = &scratch.q.all()[i * dk..][..dk];
        let out = &mut scratch.out.all_mut()[i * padded..][..dv];
        let (mut max, mut sum) = match tile.sinks() {
            Some(sinks) => (sinks[i % heads], 1f32),
            None => (f32::NEG_INFINITY, 0f32),
        };
        for page in tile.page_range() {
            let (from, to) = tile.slots(i / heads, page);
            if from >= to {
                continue;
            }
            let (keys, values) = tile.keys_values(page);
            let mut scores = [0f32; SLOTS];
            for (slot, score) in scores.iter_mut().enumerate().take(to).skip(from) {
                let key = &mut scratch.keys.all_mut()[..dk];
                keys.read_key(slot, key);
                *score = q.iter().zip(&*key).map(|(q, k)| q * k).sum();
            }
            if tile.shape.softcap > 0.0 {
                soft_cap_scalar(&mut scores[from..to], tile.shape.softcap);
            }
            if let Some(slope) = tile.slopes.get(i % heads) {
                tile.let_fall_by(*slope, i / heads, page, &mut scores);
            }
            let new_max = scores[from..to].iter().copied().fold(max, f32::max);
            let keep = (max - new_max).exp();
            max = new_max;
            sum *= keep;
            out.iter_mut().for_each(|out| *out *= keep);
            for (slot, score) in scores.iter().enumerate().take(to).skip(from) {
                let weight = (score - max).exp();
                sum += weight;
                let value = &mut scratch.values.all_mut()[..dv];
                values.read_value(slot, value);
                for (out, v) in out.iter_mut().zip(&*value) {
                    *out += weight * v;
                }
            }
        }
        out.iter_mut().for_each(|out| *out /= sum);
    }
}
