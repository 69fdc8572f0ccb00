//! What [`attention_tile`](super::attention_tile) does with one page, in registers: widening K and
//! V, scores, the weights of the online softmax, and the weighted sums of V.
//!
//! Scores and sums are outer products: a register holds one query and N slots, or one query and N
//! columns of V, and M queries share each load. M and the number of registers a query are what the
//! instruction set has room for; the chain of additions of an element is the same for all of them.

use half::f16;
use rocmforge_ops::KV_BLOCK;

use super::attention_tile::{PAD, SLOTS, TileBuffers};
use super::exp::exp;
use super::kv::Stored;
use super::lanes::Lanes;

/// Keys of one head in a page as [`score`] reads them: `[head_dim][SLOTS]`, widened in registers.
trait Keys<S: Lanes>: Copy {
    /// What [`KV_BLOCK`] elements of a key are multiplied by, for 2 N slots.
    type Scales: Copy;
    /// Scales of the block that begins at element `c`, a multiple of [`KV_BLOCK`], for the slots
    /// from `slot` on.
    ///
    /// # Safety
    /// The keys are valid for reads, `c < head_dim` and `slot + 2 N <= SLOTS`.
    unsafe fn scales(self, s: S, c: usize, slot: usize) -> Self::Scales;
    /// Element `c` of the 2 N keys from `slot` on, `scales` being those of its block.
    ///
    /// # Safety
    /// As [`Keys::scales`].
    unsafe fn load(self, s: S, c: usize, slot: usize, scales: Self::Scales) -> [S::V; 2];
}

impl<S: Lanes> Keys<S> for *const f32 {
    type Scales = ();

    #[inline(always)]
    unsafe fn scales(self, _: S, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn load(self, s: S, c: usize, slot: usize, (): ()) -> [S::V; 2] {
        // SAFETY: the caller's: row c has SLOTS readable elements, 2 N of them from slot on.
        unsafe {
            let row = self.add(c * SLOTS + slot);
            [s.load_ptr(row), s.load_ptr(row.add(S::N))]
        }
    }
}

impl<S: Lanes> Keys<S> for *const f16 {
    type Scales = ();

    #[inline(always)]
    unsafe fn scales(self, _: S, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn load(self, s: S, c: usize, slot: usize, (): ()) -> [S::V; 2] {
        // SAFETY: the caller's: row c has SLOTS readable elements, 2 N of them from slot on.
        unsafe {
            let row = self.add(c * SLOTS + slot);
            [s.load_f16_ptr(row), s.load_f16_ptr(row.add(S::N))]
        }
    }
}

/// Keys of [`KvType::Q8_0`](rocmforge_ops::KvType::Q8_0).
#[derive(Clone, Copy)]
struct KeyCodes {
    /// `[head_dim][SLOTS]`
    codes: *const i8,
    /// `[head_dim / 32][SLOTS]`
    scales: *const f16,
}

impl<S: Lanes> Keys<S> for KeyCodes {
    type Scales = [S::V; 2];

    #[inline(always)]
    unsafe fn scales(self, s: S, c: usize, slot: usize) -> [S::V; 2] {
        // SAFETY: the caller's: the row of the block has SLOTS readable scales,
        // 2 N of them from slot on.
        unsafe {
            let row = self.scales.add(c / KV_BLOCK * SLOTS + slot);
            [s.load_f16_ptr(row), s.load_f16_ptr(row.add(S::N))]
        }
    }

    #[inline(always)]
    unsafe fn load(self, s: S, c: usize, slot: usize, scales: [S::V; 2]) -> [S::V; 2] {
        // SAFETY: the caller's: row c has SLOTS readable codes, 2 N of them from slot on.
        let [low, high] = unsafe {
            let row = self.codes.add(c * SLOTS + slot);
            [s.load_i8_ptr(row), s.load_i8_ptr(row.add(S::N))]
        };
        [s.mul(low, scales[0]), s.mul(high, scales[1])]
    }
}

/// `out[c][slot] = keys[c][slot]` in f32.
#[inline(always)]
pub(super) fn widen_keys<S: Lanes>(s: S, keys: Stored<'_>, dk: usize, out: &mut [f32]) {
    let out = &mut out[..dk * SLOTS];
    match keys {
        Stored::F32(keys) => out.copy_from_slice(keys),
        Stored::F16(keys) => widen(s, keys, out),
        Stored::Q8_0 { codes, scales } => {
            let blocks = out.chunks_exact_mut(KV_BLOCK * SLOTS);
            let blocks = blocks.zip(codes.chunks_exact(KV_BLOCK * SLOTS));
            for ((out, codes), scales) in blocks.zip(scales.chunks_exact(SLOTS)) {
                for slot in (0..SLOTS).step_by(S::N) {
                    let scale = s.load_f16(&scales[slot..]);
                    let rows = out.chunks_exact_mut(SLOTS).zip(codes.chunks_exact(SLOTS));
                    for (out, codes) in rows {
                        s.store(&mut out[slot..], s.mul(s.load_i8(&codes[slot..]), scale));
                    }
                }
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

/// `out[slot][c] = values[slot][c]` in f32 for the slots `from..to`; zero in the padding. `scales`
/// is room for `dv` elements.
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

/// `scores[i][slot] = sum_c q[i][c] * keys[c][slot]` for `n` queries, `q` being `[n][dk]`, for the
/// 2 N slots at a time that touch `from..to`; the others keep what they hold.
#[inline(always)]
pub(super) fn score<S: Lanes>(
    s: S,
    (q, n, dk): (&[f32], usize, usize),
    keys: Stored<'_>,
    slots: (usize, usize),
    scores: &mut [f32],
) {
    assert!(q.len() >= n * dk && slots.1 <= SLOTS && scores.len() >= n * SLOTS);
    let (q, scores) = (q.as_ptr(), scores.as_mut_ptr());
    // SAFETY: q and the scores by the assertion above, the keys by that of their branch.
    unsafe {
        match keys {
            Stored::F32(keys) => {
                assert!(keys.len() >= dk * SLOTS);
                score_queries(s, (q, n, dk), keys.as_ptr(), slots, scores);
            }
            Stored::F16(keys) => {
                assert!(keys.len() >= dk * SLOTS);
                score_queries(s, (q, n, dk), keys.as_ptr(), slots, scores);
            }
            Stored::Q8_0 { codes, scales } => {
                assert!(dk.is_multiple_of(KV_BLOCK) && codes.len() >= dk * SLOTS);
                assert!(scales.len() >= dk / KV_BLOCK * SLOTS);
                let keys = KeyCodes {
                    codes: codes.as_ptr(),
                    scales: scales.as_ptr(),
                };
                score_queries(s, (q, n, dk), keys, slots, scores);
            }
        }
    }
}

/// [`score`] for one kind of keys.
///
/// # Safety
/// `q` is valid for reads of `[n][dk]`, the keys of `[dk][SLOTS]`, `scores` for writes of
/// `[n][SLOTS]` elements, and `slots.1 <= SLOTS`.
#[inline(always)]
unsafe fn score_queries<S: Lanes, K: Keys<S>>(
    s: S,
    (q, n, dk): (*const f32, usize, usize),
    keys: K,
    slots: (usize, usize),
    scores: *mut f32,
) {
    let mut i = 0;
    while i < n {
        // SAFETY: the caller's, for the queries i..i + M that the branch has made sure of.
        unsafe {
            let (q, scores) = (q.add(i * dk), scores.add(i * SLOTS));
            i += match n - i {
                8.. if S::N == 16 => score_block::<S, K, 8>(s, (q, dk), keys, slots, scores),
                4.. => score_block::<S, K, 4>(s, (q, dk), keys, slots, scores),
                2.. => score_block::<S, K, 2>(s, (q, dk), keys, slots, scores),
                _ => score_block::<S, K, 1>(s, (q, dk), keys, slots, scores),
            };
        }
    }
}

/// [`score`] for M queries; returns M.
///
/// # Safety
/// As [`score_queries`] for `n` being M.
#[inline(always)]
unsafe fn score_block<S: Lanes, K: Keys<S>, const M: usize>(
    s: S,
    (q, dk): (*const f32, usize),
    keys: K,
    (from, to): (usize, usize),
    scores: *mut f32,
) -> usize {
    for slot in (from / (2 * S::N) * (2 * S::N)..to).step_by(2 * S::N) {
        let mut sums = [[s.splat(0.0); 2]; M];
        for block in (0..dk).step_by(KV_BLOCK) {
            // SAFETY: block < dk, and slot is a multiple of 2 N below SLOTS, as 2 N divides
            // SLOTS: slot + 2 N <= SLOTS.
            let scales = unsafe { keys.scales(s, block, slot) };
            for c in block..dk.min(block + KV_BLOCK) {
                // SAFETY: c < dk, and slot + 2 N <= SLOTS as above.
                let keys = unsafe { keys.load(s, c, slot, scales) };
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: i < M and c < dk.
                    let q = s.splat(unsafe { *q.add(i * dk + c) });
                    sums[0] = s.fma(q, keys[0], sums[0]);
                    sums[1] = s.fma(q, keys[1], sums[1]);
                }
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

/// Turns the scores `from..to` of one query into weights and the rest into
/// zeros, and adds them to `sums`.
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

/// Values of one head in a page as [`accumulate`] reads them: `[SLOTS][dv]`, widened in registers.
trait Values<S: Lanes>: Copy {
    /// N elements of the value of `slot` from element `column` on, a multiple of N.
    ///
    /// # Safety
    /// The values are valid for reads, `slot < SLOTS` and `column + N <= dv`.
    unsafe fn load(self, s: S, dv: usize, slot: usize, column: usize) -> S::V;
}

impl<S: Lanes> Values<S> for *const f32 {
    #[inline(always)]
    unsafe fn load(self, s: S, dv: usize, slot: usize, column: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { s.load_ptr(self.add(slot * dv + column)) }
    }
}

impl<S: Lanes> Values<S> for *const f16 {
    #[inline(always)]
    unsafe fn load(self, s: S, dv: usize, slot: usize, column: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { s.load_f16_ptr(self.add(slot * dv + column)) }
    }
}

/// Values of [`KvType::Q8_0`](rocmforge_ops::KvType::Q8_0), the scales widened.
#[derive(Clone, Copy)]
struct ValueCodes {
    /// `[SLOTS][dv]`
    codes: *const i8,
    /// `[SLOTS][dv / 32]`
    scales: *const f32,
}

impl<S: Lanes> Values<S> for ValueCodes {
    #[inline(always)]
    unsafe fn load(self, s: S, dv: usize, slot: usize, column: usize) -> S::V {
        // SAFETY: the caller's; N divides a block, so the N elements share the scale.
        unsafe {
            let scale = *self.scales.add(slot * (dv / KV_BLOCK) + column / KV_BLOCK);
            let codes = s.load_i8_ptr(self.codes.add(slot * dv + column));
            s.mul(codes, s.splat(scale))
        }
    }
}

/// Whether [`accumulate`] can read values as they are stored: vectors have no padding.
#[inline(always)]
pub(super) fn readable(dv: usize) -> bool {
    dv.is_multiple_of(PAD)
}

/// The scales of values in f32, where they have some: what [`accumulate`] needs to read
/// `values` as they are stored.
#[inline(always)]
pub(super) fn widen_scales<S: Lanes>(s: S, values: Stored<'_>, scales: &mut [f32]) {
    if let Stored::Q8_0 { scales: halves, .. } = values {
        widen(s, halves, scales);
    }
}

/// `out[i] = out[i] * keep[i] + sum_slot weights[i][slot] * values[slot]` over the slots
/// `from..to`, for the queries `range`. The values are `values` with the scales of [`widen_scales`]
/// where they are [`readable`], or without them those of the scratch. `dv` is padded.
#[inline(always)]
pub(super) fn accumulate<S: Lanes>(
    s: S,
    scratch: &mut TileBuffers,
    values: Option<Stored<'_>>,
    range: std::ops::Range<usize>,
    dv: usize,
    slots: (usize, usize),
) {
    let n = range.len();
    let weights = &scratch.scores.all()[range.start * SLOTS..range.end * SLOTS];
    let keep = &scratch.keep.all()[range.clone()];
    let out = &mut scratch.out.all_mut()[range.start * dv..range.end * dv];
    assert!(slots.1 <= SLOTS && dv.is_multiple_of(PAD));
    let block = Block {
        weights: weights.as_ptr(),
        keep: keep.as_ptr(),
        out: out.as_mut_ptr(),
        dv,
        slots,
    };
    // SAFETY: the slices above hold n queries; dv is a multiple of PAD, and the slots are below
    // SLOTS; the values by the assertion of their branch.
    unsafe {
        match values {
            None => {
                let values = scratch.values.all();
                assert!(values.len() >= SLOTS * dv);
                block.accumulate_queries(s, n, values.as_ptr());
            }
            Some(Stored::F32(values)) => {
                assert!(values.len() >= SLOTS * dv);
                block.accumulate_queries(s, n, values.as_ptr());
            }
            Some(Stored::F16(values)) => {
                assert!(values.len() >= SLOTS * dv);
                block.accumulate_queries(s, n, values.as_ptr());
            }
            Some(Stored::Q8_0 { codes, .. }) => {
                let scales = scratch.scales.all();
                assert!(dv.is_multiple_of(KV_BLOCK) && codes.len() >= SLOTS * dv);
                assert!(scales.len() >= SLOTS * (dv / KV_BLOCK));
                let values = ValueCodes {
                    codes: codes.as_ptr(),
                    scales: scales.as_ptr(),
                };
                block.accumulate_queries(s, n, values);
            }
        }
    }
}

/// The operands of [`accumulate`] from one query on, without the values.
#[derive(Clone, Copy)]
struct Block {
    /// `[M][SLOTS]`
    weights: *const f32,
    /// `[M]`
    keep: *const f32,
    /// `[M][dv]`
    out: *mut f32,
    dv: usize,
    /// From the first to behind the last.
    slots: (usize, usize),
}

impl Block {
    /// For `n` queries.
    ///
    /// # Safety
    /// The pointers are valid for the shapes above with M being `n`, `out` for writes, and the
    /// values for their shape; `dv` is a multiple of PAD and `slots.1 <= SLOTS`.
    #[inline(always)]
    unsafe fn accumulate_queries<S: Lanes, V: Values<S>>(self, s: S, n: usize, values: V) {
        let mut i = 0;
        while i < n {
            // SAFETY: the caller's, for the queries i..i + M that the branch has made sure of.
            unsafe {
                let block = Block {
                    weights: self.weights.add(i * SLOTS),
                    keep: self.keep.add(i),
                    out: self.out.add(i * self.dv),
                    ..self
                };
                i += match n - i {
                    4.. => block.accumulate::<S, V, 4>(s, values),
                    2.. => block.accumulate::<S, V, 2>(s, values),
                    _ => block.accumulate::<S, V, 1>(s, values),
                };
            }
        }
    }

    /// For M queries; returns M.
    ///
    /// # Safety
    /// As [`Block::accumulate_queries`] for `n` being M.
    #[inline(always)]
    unsafe fn accumulate<S: Lanes, V: Values<S>, const M: usize>(self, s: S, values: V) -> usize {
        let mut column = 0;
        while column < self.dv {
            // SAFETY: the caller's; the branches keep column + W * N <= dv, and column
            // is a sum of multiples of N.
            unsafe {
                column += match self.dv - column {
                    64.. if S::N == 16 => self.columns::<S, V, M, 4>(s, values, column),
                    32.. if S::N == 16 => self.columns::<S, V, M, 2>(s, values, column),
                    _ if S::N == 16 => self.columns::<S, V, M, 1>(s, values, column),
                    _ => self.columns::<S, V, M, 2>(s, values, column),
                };
            }
        }
        M
    }

    /// The W * N columns from `column` on; returns W * N.
    ///
    /// # Safety
    /// As [`Block::accumulate`], `column` is a multiple of N, and `column + W * N <= dv`.
    #[inline(always)]
    unsafe fn columns<S: Lanes, V: Values<S>, const M: usize, const W: usize>(
        self,
        s: S,
        stored: V,
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
        for slot in self.slots.0..self.slots.1 {
            let mut values = [s.splat(0.0); W];
            for (w, value) in values.iter_mut().enumerate() {
                // SAFETY: slot < SLOTS, column + (w + 1) * N <= dv, and both
                // terms are multiples of N.
                *value = unsafe { stored.load(s, self.dv, slot, column + w * S::N) };
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
