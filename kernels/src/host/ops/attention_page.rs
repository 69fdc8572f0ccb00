//! What [`attention_tile`](super::attention_tile) does with one page, in registers: widening K and V, scores, the
//! weights of the online softmax, and the weighted sums of V.
//!
//! Scores and sums are outer products: a register holds one query and N slots, or one query and N columns of
//! V, and M queries share each load. M and the number of registers a query are what the instruction set
//! has room for; the chain of additions of an element is the same for all of them.

use half::f16;
use rocmforge_ops::KV_BLOCK;

use super::attention_tile::{PAD, SLOTS, Scratch};
use super::exp::exp;
use super::kv::Stored;
use super::lanes::Lanes;

/// `out[c][slot] = keys[slot][c]` in f32, for the blocks of slots that touch `from..to`. `scales` is room for `dk` elements.
#[inline(always)]
pub(super) fn transpose_keys<S: Lanes>(
    s: S,
    keys: Stored<'_>,
    dk: usize,
    (from, to): (usize, usize),
    scales: &mut [f32],
    out: &mut [f32],
) {
    match keys {
        Stored::F32(keys) => transpose_elements(s, keys, dk, from, to, out),
        Stored::F16(keys) => transpose_elements(s, keys, dk, from, to, out),
        Stored::Q8_0 {
            codes,
            scales: halves,
        } => {
            widen(s, halves, scales);
            transpose_codes(s, codes, scales, dk, from, to, out);
        }
    }
}

/// An element of keys that has no scale beside it.
trait Element: Copy {
    fn widened(self) -> f32;
    /// As [`Lanes::transpose_f32`].
    ///
    /// # Safety
    /// As there.
    unsafe fn transpose<S: Lanes>(
        s: S,
        from: *const Self,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    );
}

impl Element for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn transpose<S: Lanes>(
        s: S,
        from: *const f32,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { s.transpose_f32(from, from_stride, to, to_stride) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn transpose<S: Lanes>(
        s: S,
        from: *const f16,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { s.transpose_f16(from, from_stride, to, to_stride) }
    }
}

#[inline(always)]
fn transpose_elements<S: Lanes, E: Element>(
    s: S,
    keys: &[E],
    dk: usize,
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    assert!(to <= SLOTS && keys.len() >= SLOTS * dk && out.len() >= dk * SLOTS);
    for slot in (from / S::N * S::N..to).step_by(S::N) {
        if dk < S::N {
            for (r, key) in keys.chunks_exact(dk).enumerate().skip(slot).take(S::N) {
                key.iter()
                    .enumerate()
                    .for_each(|(c, k)| out[c * SLOTS + r] = k.widened());
            }
            continue;
        }
        for c in (0..dk).step_by(S::N) {
            // The last block may overlap the one before it and writes the same again.
            let c = c.min(dk - S::N);
            // SAFETY: reads N elements from column c <= dk - N of N rows from slot <= SLOTS - N on, inside
            // SLOTS * dk; writes N elements from column slot of N rows from c on, inside dk * SLOTS.
            unsafe {
                E::transpose(
                    s,
                    keys.as_ptr().add(slot * dk + c),
                    dk,
                    out.as_mut_ptr().add(c * SLOTS + slot),
                    SLOTS,
                );
            }
        }
    }
}

#[inline(always)]
fn transpose_codes<S: Lanes>(
    s: S,
    codes: &[i8],
    scales: &[f32],
    dk: usize,
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    let blocks = dk / KV_BLOCK;
    assert!(to <= SLOTS && dk.is_multiple_of(KV_BLOCK) && out.len() >= dk * SLOTS);
    assert!(codes.len() >= SLOTS * dk && scales.len() >= SLOTS * blocks);
    for slot in (from / S::N * S::N..to).step_by(S::N) {
        for c in (0..dk).step_by(S::N) {
            // SAFETY: N divides a block, so the columns from c on are of one, and c <= dk - N. Reads N codes of N rows from
            // slot <= SLOTS - N on, inside SLOTS * dk, and their scales, inside SLOTS * blocks; writes N elements from
            // column slot of N rows from c on, inside dk * SLOTS.
            unsafe {
                s.transpose_i8(
                    (codes.as_ptr().add(slot * dk + c), dk),
                    (scales.as_ptr().add(slot * blocks + c / KV_BLOCK), blocks),
                    out.as_mut_ptr().add(c * SLOTS + slot),
                    SLOTS,
                );
            }
        }
    }
}

/// `to[i] = from[i]`; whole vectors.
#[inline(always)]
fn widen<S: Lanes>(s: S, from: &[f16], to: &mut [f32]) {
    assert!(from.len().is_multiple_of(S::N) && to.len() >= from.len());
    for (to, from) in to.chunks_exact_mut(S::N).zip(from.chunks_exact(S::N)) {
        s.store(to, s.load_f16(from));
    }
}

/// `out[slot][c] = values[slot][c]` in f32 for the slots `from..to`; zero in the padding. `scales` is room for `dv` elements.
#[inline(always)]
pub(super) fn widen_values<S: Lanes>(
    s: S,
    values: Stored<'_>,
    (dv, padded): (usize, usize),
    (from, to): (usize, usize),
    scales: &mut [f32],
    out: &mut [f32],
) {
    let values = match values {
        Stored::F32(values) => {
            for slot in from..to {
                let (value, padding) = out[slot * padded..][..padded].split_at_mut(dv);
                value.copy_from_slice(&values[slot * dv..][..dv]);
                padding.fill(0.0);
            }
            return;
        }
        Stored::F16(values) => values,
        Stored::Q8_0 {
            codes,
            scales: halves,
        } => {
            widen(s, halves, scales);
            for slot in from..to {
                let blocks = codes[slot * dv..][..dv].chunks_exact(KV_BLOCK);
                let out = out[slot * padded..][..dv].chunks_exact_mut(KV_BLOCK);
                let scales = &scales[slot * (dv / KV_BLOCK)..];
                for ((out, block), &scale) in out.zip(blocks).zip(scales) {
                    let scale = s.splat(scale);
                    let pieces = out.chunks_exact_mut(S::N).zip(block.chunks_exact(S::N));
                    for (out, codes) in pieces {
                        s.store(out, s.mul(s.load_i8(codes), scale));
                    }
                }
            }
            return;
        }
    };
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
pub(super) fn score<S: Lanes>(
    s: S,
    q: &[f32],
    n: usize,
    dk: usize,
    keys: &[f32],
    scores: &mut [f32],
) {
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
pub(super) fn largest_score<S: Lanes>(s: S, scores: &[f32], from: usize, to: usize) -> f32 {
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
pub(super) fn rescale<S: Lanes>(s: S, max: &mut [f32], new_max: &[f32], keep: &mut [f32]) {
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
pub(super) fn weigh<S: Lanes>(
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
pub(super) fn accumulate<S: Lanes>(
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
