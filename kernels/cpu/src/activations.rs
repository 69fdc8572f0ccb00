//! The right-hand side of a product: T rows of K activations, quantized to 8 bits or kept in f32.
//!
//! A block of 32 activations becomes `d * q` with `d = max |x| / 127` in f32 and `q` from -127 to
//! 127, rounded to nearest, ties to even. Sums of `q` over the block and its halves come with it: a
//! weight is `scale * (code - offset)` or `scale * code + min`, so a product needs `offset` or
//! `min` only times such a sum. The scale is per 32 activations for every weight type, K-quants
//! included (their own definition has one per 256): it costs one multiply-add per 16 rows and
//! block, and a large activation spoils only its 31 neighbours.
//!
//! A block with an activation that is NaN or infinite gets `d = NaN`, so that every output
//! that depends on it is NaN.

use std::ops::Range;

use super::matmul::dispatch::{WithIsa, with_isa};
use super::simd::{Job, Simd};
use super::{Isa, WeightType};

/// Activations in a block.
pub(crate) const BLOCK: usize = 32;

/// 32 activations, ready for the dot product.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub(crate) struct XBlock {
    /// `q`, four signed bytes to a word, little-endian.
    pub(crate) q: [i32; 8],
    /// The scale.
    pub(crate) d: f32,
    /// Minus the sum of `q`.
    pub(crate) neg_sum: i32,
    /// Minus the sums of the first and the last 16.
    pub(crate) neg_half_sums: [i32; 2],
}

/// What a product needs its activations as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationForm {
    /// 8 bits a value: for quantized weights.
    Quantized,
    /// f32: for F32, F16 and BF16 weights.
    Float,
    /// Both forms, if the activations are multiplied with weights of both kinds.
    Both,
}

impl ActivationForm {
    /// What products with weights of type `ty` need.
    pub const fn of(ty: WeightType) -> ActivationForm {
        if ty.is_quantized() {
            ActivationForm::Quantized
        } else {
            ActivationForm::Float
        }
    }

    const fn quantized(self) -> bool {
        matches!(self, ActivationForm::Quantized | ActivationForm::Both)
    }

    const fn float(self) -> bool {
        matches!(self, ActivationForm::Float | ActivationForm::Both)
    }
}

/// `tokens` rows of `cols` activations. Keeps its memory between uses.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    /// `[tokens][stride]`, the last column unused: an odd stride spreads the tokens
    /// over the sets of a cache.
    blocks: Vec<XBlock>,
    stride: usize,
    /// `[tokens][cols]`.
    floats: Vec<f32>,
}

impl Activations {
    /// Without memory yet.
    pub fn new() -> Activations {
        Activations::default()
    }

    /// Sets everything from `x`, `[tokens][cols]`, on the caller's thread.
    ///
    /// # Panics
    /// If `x` is not `tokens * cols` long, or `cols` not a multiple of 32 and the form quantized.
    pub fn fill(&mut self, isa: Isa, form: ActivationForm, x: &[f32], tokens: usize, cols: usize) {
        self.resize(form, tokens, cols);
        for mut part in self.parts(tokens.max(1)) {
            part.fill(isa, x);
        }
    }

    /// Makes room for a shape. The values are unspecified until every part was filled.
    ///
    /// # Panics
    /// If `cols` is zero, or not a multiple of 32 and the form quantized.
    pub fn resize(&mut self, form: ActivationForm, tokens: usize, cols: usize) {
        assert!(cols > 0, "activations need at least one column");
        (self.tokens, self.cols) = (tokens, cols);
        self.stride = 0;
        if form.quantized() {
            assert!(
                cols.is_multiple_of(BLOCK),
                "{cols} columns are not a multiple of {BLOCK}"
            );
            self.stride = (cols / BLOCK) | 1;
        }
        self.blocks.resize(tokens * self.stride, XBlock::default());
        self.floats
            .resize(if form.float() { tokens * cols } else { 0 }, 0.0);
    }

    /// The rows in runs of `tokens_each`, so that several threads can fill them.
    ///
    /// # Panics
    /// If `tokens_each` is zero.
    pub fn parts(&mut self, tokens_each: usize) -> impl Iterator<Item = ActivationsPart<'_>> {
        assert!(tokens_each > 0, "a part needs at least one token");
        let (cols, stride, tokens) = (self.cols, self.stride, self.tokens);
        let mut blocks = self.blocks.as_mut_slice();
        let mut floats = self.floats.as_mut_slice();
        (0..tokens).step_by(tokens_each).map(move |first| {
            let n = tokens_each.min(tokens - first);
            let part_blocks = blocks.split_off_mut(..n * stride).unwrap_or_default();
            let n_floats = if floats.is_empty() { 0 } else { n * cols };
            let part_floats = floats.split_off_mut(..n_floats).unwrap_or_default();
            ActivationsPart {
                first,
                tokens: n,
                cols,
                stride,
                blocks: part_blocks,
                floats: part_floats,
            }
        })
    }

    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Activations in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether weights of type `ty` can be multiplied with these.
    pub fn suits(&self, ty: WeightType) -> bool {
        if ty.is_quantized() {
            self.stride > 0
        } else {
            self.floats.len() == self.tokens * self.cols
        }
    }

    /// The blocks of one token.
    #[inline(always)]
    pub(crate) fn blocks(&self, token: usize) -> &[XBlock] {
        &self.blocks[token * self.stride..][..self.cols / BLOCK]
    }

    /// One token's values.
    #[inline(always)]
    pub(crate) fn floats(&self, token: usize) -> &[f32] {
        &self.floats[token * self.cols..][..self.cols]
    }
}

/// Some consecutive rows of [`Activations`], to be multiplied with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActivationRows<'a> {
    all: &'a Activations,
    first: usize,
    tokens: usize,
}

impl<'a> ActivationRows<'a> {
    /// # Panics
    /// If the range is not one of rows of `all`.
    pub(crate) fn new(all: &'a Activations, tokens: Range<usize>) -> ActivationRows<'a> {
        assert!(
            tokens.start <= tokens.end && tokens.end <= all.tokens,
            "tokens {tokens:?} of {}",
            all.tokens
        );
        ActivationRows {
            all,
            first: tokens.start,
            tokens: tokens.len(),
        }
    }

    /// Rows.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The blocks of one token, counted from the first row.
    #[inline(always)]
    pub(crate) fn blocks(&self, token: usize) -> &'a [XBlock] {
        self.all.blocks(self.first + token)
    }

    /// One token's values.
    #[inline(always)]
    pub(crate) fn floats(&self, token: usize) -> &'a [f32] {
        self.all.floats(self.first + token)
    }
}

/// Some consecutive rows of [`Activations`], to be filled by one thread.
#[derive(Debug)]
pub struct ActivationsPart<'a> {
    first: usize,
    tokens: usize,
    cols: usize,
    stride: usize,
    blocks: &'a mut [XBlock],
    floats: &'a mut [f32],
}

impl ActivationsPart<'_> {
    /// The first token of the part.
    pub fn first_token(&self) -> usize {
        self.first
    }

    /// Tokens in the part.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Sets the part's rows from `x`, which holds all tokens: `[tokens][cols]`.
    ///
    /// # Panics
    /// If `x` ends before the part does.
    pub fn fill(&mut self, isa: Isa, x: &[f32]) {
        let cols = self.cols;
        self.fill_from(isa, |token| &x[token * cols..][..cols]);
    }

    /// Sets the part's rows from anywhere: `row` yields a token's activations. So rows are gathered
    /// by a list, or a head's columns taken out of wider rows, without a copy in between.
    ///
    /// # Panics
    /// If `row` yields another number of activations than a row has.
    pub fn fill_from<'x>(&mut self, isa: Isa, row: impl Fn(usize) -> &'x [f32]) {
        for t in 0..self.tokens {
            let x = row(self.first + t);
            assert_eq!(x.len(), self.cols, "a row of another length");
            if !self.floats.is_empty() {
                self.floats[t * self.cols..][..self.cols].copy_from_slice(x);
            }
            if self.stride > 0 {
                let blocks = &mut self.blocks[t * self.stride..][..self.stride];
                with_isa(isa, Quantize { x, blocks });
            }
        }
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    blocks: &'a mut [XBlock],
}

impl WithIsa for Quantize<'_> {
    fn run<S: Simd>(self, s: S) {
        s.vectorize(self);
    }
}

impl Job for Quantize<'_> {
    type Output = ();

    // Plain Rust: every operation in it is exact or rounded as IEEE says, so the compiler's vectors
    // give the same bits with every instruction set.
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let (x, _) = self.x.as_chunks::<BLOCK>();
        for (x, block) in x.iter().zip(self.blocks) {
            *block = quantize(x);
        }
    }
}

#[inline(always)]
fn quantize(x: &[f32; BLOCK]) -> XBlock {
    // As integers the magnitudes order NaN above infinity above every finite value.
    let mut max_bits = 0i32;
    for v in x {
        max_bits = max_bits.max((v.to_bits() & 0x7fff_ffff).cast_signed());
    }
    let max = f32::from_bits(max_bits.cast_unsigned());
    if !max.is_finite() {
        return XBlock {
            d: f32::NAN,
            ..XBlock::default()
        };
    }
    let inverse = 127.0 / max;
    if !inverse.is_finite() {
        return XBlock::default();
    }
    // Adding 1.5 * 2^23 leaves the value, rounded to nearest even, in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let mut q = [0i32; BLOCK];
    for (q, v) in q.iter_mut().zip(x) {
        *q = (v * inverse + ROUND).to_bits().cast_signed() - ROUND.to_bits().cast_signed();
    }
    let (mut low, mut high) = (0, 0);
    for k in 0..16 {
        low -= q[k];
        high -= q[16 + k];
    }
    let mut words = [0i32; 8];
    for (word, q) in words.iter_mut().zip(q.as_chunks::<4>().0) {
        *word = (q[0] & 255) | ((q[1] & 255) << 8) | ((q[2] & 255) << 16) | (q[3] << 24);
    }
    XBlock {
        q: words,
        d: max / 127.0,
        neg_sum: low + high,
        neg_half_sums: [low, high],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantizes_by_the_largest_magnitude() {
        let x: [f32; BLOCK] = std::array::from_fn(|k| k as f32 - 16.0);
        let block = quantize(&x);
        assert_eq!(block.d, 16.0 / 127.0);
        let q: Vec<i8> = block
            .q
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .map(u8::cast_signed)
            .collect();
        for (k, q) in q.iter().enumerate() {
            assert_eq!(
                f32::from(*q),
                (x[k] * (127.0 / 16.0)).round_ties_even(),
                "element {k}"
            );
        }
        let sum = |range: std::ops::Range<usize>| {
            -i32::from(q[range].iter().map(|&q| i16::from(q)).sum::<i16>())
        };
        assert_eq!(
            (block.neg_sum, block.neg_half_sums),
            (sum(0..32), [sum(0..16), sum(16..32)])
        );
    }

    #[test]
    fn zeros_and_vanishing_values_become_zero() {
        assert_eq!(quantize(&[0.0; BLOCK]), XBlock::default());
        assert_eq!(quantize(&[1e-45; BLOCK]), XBlock::default());
    }

    #[test]
    fn what_is_not_finite_makes_the_block_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            let mut x = [1.0; BLOCK];
            x[29] = bad;
            assert!(quantize(&x).d.is_nan(), "{bad}");
        }
    }

    #[test]
    fn rows_come_from_where_the_caller_says() {
        let x: Vec<f32> = (0..5 * 128).map(|i| (i as f32 * 0.37).sin()).collect();
        let order = [4, 0, 4, 2, 1, 3, 0];
        // The second half of each listed row, by a copy and without.
        let row = |t: usize| &x[order[t] * 128 + 64..][..64];
        let copy: Vec<f32> = (0..order.len()).flat_map(row).copied().collect();
        let mut whole = Activations::new();
        whole.fill(Isa::best(), ActivationForm::Both, &copy, 7, 64);
        for each in [1, 3, 7] {
            let mut gathered = Activations::new();
            gathered.resize(ActivationForm::Both, 7, 64);
            for mut part in gathered.parts(each) {
                part.fill_from(Isa::Scalar, row);
            }
            for t in 0..7 {
                assert_eq!(gathered.blocks(t), whole.blocks(t));
                assert_eq!(gathered.floats(t), whole.floats(t));
            }
        }
    }

    #[test]
    fn parts_equal_the_whole() {
        let x: Vec<f32> = (0..7 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut whole = Activations::new();
        whole.fill(Isa::best(), ActivationForm::Both, &x, 7, 64);
        for each in 1..8 {
            let mut parts = Activations::new();
            parts.resize(ActivationForm::Both, 7, 64);
            for mut part in parts.parts(each) {
                part.fill(Isa::Scalar, &x);
            }
            for t in 0..7 {
                assert_eq!(parts.blocks(t), whole.blocks(t));
                assert_eq!(parts.floats(t), whole.floats(t));
            }
        }
    }
}
