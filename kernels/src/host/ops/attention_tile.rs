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
use super::exp::exp;
use super::lanes::{Lanes, simd_fn};
use super::{KV_PAGE_TOKENS, Simd};

/// Slots of a page, the stride of transposed keys and of scores.
const SLOTS: usize = KV_PAGE_TOKENS;

/// The widest vector, to which rows of scratch are padded.
const PAD: usize = 16;

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
    q: Aligned,
    /// Keys of a page, `[head_dim_k][SLOTS]`.
    keys: Aligned,
    /// Values of a page, `[SLOTS][padded head_dim_v]`.
    values: Aligned,
    /// Scores, then weights, `[queries][SLOTS]`.
    scores: Aligned,
    /// Weighted sums, at the end divided by the sums of weights, `[queries][padded head_dim_v]`.
    out: Aligned,
    /// Sums of weights, a vector a query, `[queries][PAD]`.
    sums: Aligned,
    /// The largest score so far, `[queries]`.
    max: Aligned,
    /// The largest score with this page, `[queries]`.
    new_max: Aligned,
    /// What the sums so far are multiplied by, `[queries]`.
    keep: Aligned,
}

/// f32 from a 64-byte boundary on.
#[derive(Default)]
struct Aligned(Vec<Line>);

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

    fn all(&self) -> &[f32] {
        // SAFETY: a Line is PAD f32 without padding, and the lines are contiguous.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAD) }
    }

    fn all_mut(&mut self) -> &mut [f32] {
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

/// `out[c][slot] = keys[slot][c]` in f32, for the blocks of slots that touch `from..to`.
#[inline(always)]
fn transpose_keys<S: Lanes>(
    s: S,
    keys: &[f16],
    dk: usize,
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    assert!(keys.len() >= SLOTS * dk && out.len() >= dk * SLOTS);
    for slot in (from / S::N * S::N..to).step_by(S::N) {
        if dk < S::N {
            for (r, key) in keys.chunks_exact(dk).enumerate().skip(slot).take(S::N) {
                key.iter()
                    .enumerate()
                    .for_each(|(c, k)| out[c * SLOTS + r] = k.to_f32());
            }
            continue;
        }
        for c in (0..dk).step_by(S::N) {
            // The last block may overlap the one before it and writes the same again.
            let c = c.min(dk - S::N);
            // SAFETY: reads N elements from column c <= dk - N of N rows from slot <= SLOTS - N on, inside
            // SLOTS * dk; writes N elements from column slot of N rows from c on, inside dk * SLOTS.
            unsafe {
                s.transpose_f16(
                    keys.as_ptr().add(slot * dk + c),
                    dk,
                    out.as_mut_ptr().add(c * SLOTS + slot),
                    SLOTS,
                );
            }
        }
    }
}

/// `out[slot][c] = values[slot][c]` in f32 for the slots `from..to`; zero in the padding.
#[inline(always)]
fn widen_values<S: Lanes>(
    s: S,
    values: &[f16],
    dv: usize,
    padded: usize,
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    for slot in from..to {
        let value = &values[slot * dv..][..dv];
        let out = &mut out[slot * padded..][..padded];
        let whole = dv / S::N * S::N;
        for (out, value) in out.chunks_exact_mut(S::N).zip(value.chunks_exact(S::N)) {
            s.store(out, s.load_f16(value));
        }
        if whole < padded {
            let mut rest = [f16::ZERO; PAD];
            rest[..dv - whole].copy_from_slice(&value[whole..]);
            for (out, rest) in out[whole..]
                .chunks_exact_mut(S::N)
                .zip(rest.chunks_exact(S::N))
            {
                s.store(out, s.load_f16(rest));
            }
        }
    }
}

/// `scores[i][slot] = sum_c q[i][c] * keys[c][slot]` for `n` queries.
#[inline(always)]
fn score<S: Lanes>(s: S, q: &[f32], n: usize, dk: usize, keys: &[f32], scores: &mut [f32]) {
    assert!(q.len() >= n * dk && keys.len() >= dk * SLOTS && scores.len() >= n * SLOTS);
    let (q, keys, scores) = (q.as_ptr(), keys.as_ptr(), scores.as_mut_ptr());
    let mut i = 0;
    while i < n {
        // SAFETY: by the assertion, for the queries i..i + M that the branch has made sure of.
        unsafe {
            let (q, scores) = (q.add(i * dk), scores.add(i * SLOTS));
            i += match n - i {
                8.. if S::N == 16 => score_block::<S, 8>(s, q, dk, keys, scores),
                4.. => score_block::<S, 4>(s, q, dk, keys, scores),
                2.. => score_block::<S, 2>(s, q, dk, keys, scores),
                _ => score_block::<S, 1>(s, q, dk, keys, scores),
            };
        }
    }
}

/// [`score`] for M queries; returns M.
///
/// # Safety
/// `q` is valid for reads of M * dk, `keys` of dk * SLOTS, `scores` for writes of M * SLOTS elements.
#[inline(always)]
unsafe fn score_block<S: Lanes, const M: usize>(
    s: S,
    q: *const f32,
    dk: usize,
    keys: *const f32,
    scores: *mut f32,
) -> usize {
    for slot in (0..SLOTS).step_by(2 * S::N) {
        let mut sums = [[s.splat(0.0); 2]; M];
        for c in 0..dk {
            // SAFETY: c < dk and slot + 2 N <= SLOTS, so these are inside dk * SLOTS.
            let keys = unsafe {
                let row = keys.add(c * SLOTS + slot);
                [s.load_ptr(row), s.load_ptr(row.add(S::N))]
            };
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: i < M and c < dk.
                let q = s.splat(unsafe { *q.add(i * dk + c) });
                sums[0] = s.fma(q, keys[0], sums[0]);
                sums[1] = s.fma(q, keys[1], sums[1]);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            // SAFETY: i < M and slot + 2 N <= SLOTS, so these are inside M * SLOTS.
            unsafe {
                let row = scores.add(i * SLOTS + slot);
                s.store_ptr(row, sums[0]);
                s.store_ptr(row.add(S::N), sums[1]);
            }
        }
    }
    M
}

/// The largest of the scores `from..to` of one query, NaN left out.
#[inline(always)]
fn largest_score<S: Lanes>(s: S, scores: &[f32], from: usize, to: usize) -> f32 {
    let least = s.splat(f32::NEG_INFINITY);
    let mut most = least;
    for (index, scores) in scores.chunks_exact(S::N).enumerate() {
        let inside = s.keep_between(
            s.load(scores),
            least,
            (index * S::N) as i32,
            from as i32,
            to as i32,
        );
        most = s.max(inside, most);
    }
    s.largest(most)
}

/// `keep = exp(max - new_max)`, then `max = new_max`.
#[inline(always)]
fn rescale<S: Lanes>(s: S, max: &mut [f32], new_max: &[f32], keep: &mut [f32]) {
    let rows = max
        .chunks_mut(S::N)
        .zip(new_max.chunks(S::N))
        .zip(keep.chunks_mut(S::N));
    for ((max, new_max), keep) in rows {
        let difference = s.sub(s.load_part(max, 0.0), s.load_part(new_max, 0.0));
        s.store_part(keep, exp(s, difference));
        max.copy_from_slice(new_max);
    }
}

/// Turns the scores `from..to` of one query into weights and the rest into zeros, and adds them to `sums`.
#[inline(always)]
fn weigh<S: Lanes>(
    s: S,
    scores: &mut [f32],
    (from, to): (usize, usize),
    max: f32,
    keep: f32,
    sums: &mut [f32],
) {
    let mut sum = s.mul(s.load(sums), s.splat(keep));
    for (index, scores) in scores.chunks_exact_mut(S::N).enumerate() {
        let weights = exp(s, s.sub(s.load(scores), s.splat(max)));
        let weights = s.keep_between(
            weights,
            s.splat(0.0),
            (index * S::N) as i32,
            from as i32,
            to as i32,
        );
        s.store(scores, weights);
        sum = s.add(sum, weights);
    }
    s.store(sums, sum);
}

/// `out[i] = out[i] * keep[i] + sum_slot weights[i][slot] * values[slot]` over the slots `from..to`, for the
/// queries `range`.
#[inline(always)]
fn accumulate<S: Lanes>(
    s: S,
    scratch: &mut Scratch,
    range: std::ops::Range<usize>,
    dv: usize,
    from: usize,
    to: usize,
) {
    let n = range.len();
    let weights = &scratch.scores.all()[range.start * SLOTS..range.end * SLOTS];
    let keep = &scratch.keep.all()[range.clone()];
    let values = &scratch.values.all()[..SLOTS * dv];
    let out = &mut scratch.out.all_mut()[range.start * dv..range.end * dv];
    assert!(to <= SLOTS && dv.is_multiple_of(PAD));
    let mut i = 0;
    while i < n {
        // SAFETY: the slices above hold n queries, of which the branch has made sure of M from i on; dv is a
        // multiple of PAD, and the slots are below SLOTS.
        unsafe {
            let block = Block {
                weights: weights.as_ptr().add(i * SLOTS),
                keep: keep.as_ptr().add(i),
                values: values.as_ptr(),
                out: out.as_mut_ptr().add(i * dv),
                dv,
                from,
                to,
            };
            i += match n - i {
                4.. => block.accumulate::<S, 4>(s),
                2.. => block.accumulate::<S, 2>(s),
                _ => block.accumulate::<S, 1>(s),
            };
        }
    }
}

/// The operands of [`accumulate`] from one query on.
#[derive(Clone, Copy)]
struct Block {
    /// `[M][SLOTS]`
    weights: *const f32,
    /// `[M]`
    keep: *const f32,
    /// `[SLOTS][dv]`
    values: *const f32,
    /// `[M][dv]`
    out: *mut f32,
    dv: usize,
    from: usize,
    to: usize,
}

impl Block {
    /// For M queries; returns M.
    ///
    /// # Safety
    /// The pointers are valid for the shapes above, `out` for writes; `dv` is a multiple of PAD and
    /// `to <= SLOTS`.
    #[inline(always)]
    unsafe fn accumulate<S: Lanes, const M: usize>(self, s: S) -> usize {
        let mut column = 0;
        while column < self.dv {
            // SAFETY: the caller's; the branches keep column + W * N <= dv.
            unsafe {
                column += match self.dv - column {
                    64.. if S::N == 16 => self.columns::<S, M, 4>(s, column),
                    32.. if S::N == 16 => self.columns::<S, M, 2>(s, column),
                    _ if S::N == 16 => self.columns::<S, M, 1>(s, column),
                    _ => self.columns::<S, M, 2>(s, column),
                };
            }
        }
        M
    }

    /// The W * N columns from `column` on; returns W * N.
    ///
    /// # Safety
    /// As [`Block::accumulate`], and `column + W * N <= dv`.
    #[inline(always)]
    unsafe fn columns<S: Lanes, const M: usize, const W: usize>(
        self,
        s: S,
        column: usize,
    ) -> usize {
        let mut sums = [[s.splat(0.0); W]; M];
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: i < M.
            let keep = s.splat(unsafe { *self.keep.add(i) });
            for (w, sum) in sums.iter_mut().enumerate() {
                // SAFETY: i < M and column + (w + 1) * N <= dv.
                let out = unsafe { s.load_ptr(self.out.add(i * self.dv + column + w * S::N)) };
                *sum = s.mul(out, keep);
            }
        }
        for slot in self.from..self.to {
            let mut values = [s.splat(0.0); W];
            for (w, value) in values.iter_mut().enumerate() {
                // SAFETY: slot < SLOTS and column + (w + 1) * N <= dv.
                *value = unsafe { s.load_ptr(self.values.add(slot * self.dv + column + w * S::N)) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: i < M and slot < SLOTS.
                let weight = s.splat(unsafe { *self.weights.add(i * SLOTS + slot) });
                for (sum, value) in sums.iter_mut().zip(&values) {
                    *sum = s.fma(weight, *value, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (w, sum) in sums.iter().enumerate() {
                // SAFETY: i < M and column + (w + 1) * N <= dv.
                unsafe { s.store_ptr(self.out.add(i * self.dv + column + w * S::N), *sum) };
            }
        }
        W * S::N
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
