//! `out[t][row] = sum over k of W[row][k] * x[t][k]`.
//!
//! The arithmetic, the same for every instruction set, every T and every division of the rows. For
//! a quantized type, one row and one token, over the blocks of 32 columns in ascending order:
//!
//! ```text
//! i   = sum of code * q, minus the format's offset times the sum of q; exact, i32
//!       (per 16 columns: i0, i1)
//! p   = f32(i) * scale, or f32(i0) * scale0, then fma(f32(i1), scale1, p)
//! p   = fma(bias, f32(-(sum of q)), p)        only formats with mins
//! acc = fma(p, d, acc)                        d: the activations' scale
//! ```
//!
//! For F32, F16 and BF16: `acc = fma(w, x, acc)` over the columns in ascending order. So
//! every output is bit-identical however it is computed: decode, batched and chunked
//! prefill give the same logits.
//!
//! Few tokens go `direct`: packed bytes to registers to dot products, bound by memory in decode.
//! Many tokens go through a `panel`: some columns of two groups unpacked to 8-bit codes in the L1
//! cache, then used for every token.

mod direct;
pub(crate) mod dispatch;
mod floats;
mod panel;

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{ActivationRows, Activations};
use super::formats::{Format, Kind};
use super::simd::{ROWS, Simd};
use super::{PackedMatrix, WeightType};
use dispatch::{WithFormat, WithIsa, with_format, with_isa};

/// From this many tokens on, unpacking to a panel pays: without one each block is unpacked again
/// for every 8 tokens, or 4 where vectors have 8 lanes. Formats with mins, with a scale for 16
/// columns or with a table of codes cost more to unpack than Q4_0 or Q8_0. With AVX-512 on an Intel
/// Xeon Q2_K, Q4_K and Q6_K were 1.3 to 1.5 times as fast in a panel with 12 tokens and 1.6 to 2.1
/// times with 31, when blocks were unpacked for every 4. On a Zen 4, Q4_K and Q6_K are 1.5 to 1.8
/// times as fast without one with 12, and about as fast with 24; on a Zen 5, Q4_0 is 1.2 times as
/// fast even with 24. With AVX2 (an EPYC), Q4_K is as fast and Q6_K 1.1 times as fast in one with
/// 12, 1.1 and 1.25 times with 16; codes of 8 bits, whose signs are taken for every token there,
/// are slower. Where products are compiled for one token at a time, two are unpacked once; how that
/// compares was not measured.
fn panel_tokens<F: Format, S: Simd>(s: S) -> usize {
    if S::TOKENS == 1 {
        2
    } else if F::LOOKS_UP {
        12
    } else if F::Kind::BIAS || F::Kind::HALVES {
        if s.prefers_registers() { 24 } else { 12 }
    } else if S::PAIRS && F::Kind::BITS < 8 {
        12
    } else {
        32
    }
}

/// The output of a product, `[tokens][stride]` f32, open to several workers at once.
#[derive(Debug, Clone, Copy)]
pub struct RowsOut<'a> {
    out: *mut f32,
    tokens: usize,
    rows: usize,
    stride: usize,
    /// The output row of each token, where that is not the token itself.
    places: Option<&'a [u32]>,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a `&mut [f32]`, which is Send.
unsafe impl Send for RowsOut<'_> {}
// SAFETY: writing through a shared one is confined to `mat_mul`, and `RowsOut::new`'s caller
// promised that concurrent calls write different columns.
unsafe impl Sync for RowsOut<'_> {}

impl<'a> RowsOut<'a> {
    /// Token t's row r is `out[t * stride + r]`, for r below `rows`.
    ///
    /// # Safety
    /// As long as this value, a copy of it or a view of some of its tokens is in use, calls
    /// of [`mat_mul`] with them that run at the same time must be given row groups, or
    /// tokens, that do not overlap.
    ///
    /// # Panics
    /// If `rows` is more than `stride`, or `out` too short for the last token's rows.
    pub unsafe fn new(
        out: &'a mut [f32],
        tokens: usize,
        rows: usize,
        stride: usize,
    ) -> RowsOut<'a> {
        assert!(
            rows <= stride,
            "{rows} rows do not fit a stride of {stride}"
        );
        let needed = tokens
            .checked_sub(1)
            .map_or(Some(0), |t| t.checked_mul(stride)?.checked_add(rows));
        assert!(
            needed.is_some_and(|needed| needed <= out.len()),
            "the output is too short for {tokens} tokens"
        );
        RowsOut {
            out: out.as_mut_ptr(),
            tokens,
            rows,
            stride,
            places: None,
            borrow: PhantomData,
        }
    }

    /// Of the same output, some tokens in another order: token t is this one's token `places[t]`.
    ///
    /// # Panics
    /// If a place is none of this one's tokens, or this one has places already.
    #[must_use]
    pub fn placed(self, places: &'a [u32]) -> RowsOut<'a> {
        assert!(
            self.places.is_none() && places.iter().all(|&place| (place as usize) < self.tokens),
            "places beyond the output's {} tokens",
            self.tokens
        );
        RowsOut {
            tokens: places.len(),
            places: Some(places),
            ..self
        }
    }

    /// Of the same output, `rows` of each token's rows from `first` on: the output of a product
    /// with these rows of the matrix.
    ///
    /// # Panics
    /// If there are not so many.
    #[must_use]
    pub fn of_rows(self, first: usize, rows: usize) -> RowsOut<'a> {
        assert!(
            first <= self.rows && rows <= self.rows - first,
            "rows {first}..{first}+{rows} of {}",
            self.rows
        );
        RowsOut {
            // SAFETY: a token's row `first` lies inside of the output, or one past the
            // end of the last one's rows.
            out: unsafe { self.out.add(first) },
            rows,
            ..self
        }
    }

    /// Sets up to 16 rows of token `t` from row `row` on; those past the last row are dropped.
    #[inline(always)]
    fn set(&self, t: usize, row: usize, values: &[f32; ROWS]) {
        assert!(
            t < self.tokens && row < self.rows,
            "output element out of range"
        );
        let n = ROWS.min(self.rows - row);
        let place = self.places.map_or(t, |places| places[t] as usize);
        // SAFETY: `new` checked that `tokens * stride` elements, less the last token's unused ones,
        // are there; row is in range, and so is the place: `placed` checked it, or it is t.
        let at = unsafe { self.out.add(place * self.stride + row) };
        // SAFETY: n elements from `at` are of one token's rows; nobody else reads or writes them,
        // because `new`'s caller gave this group to one call; `values` is a local of that call.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), at, n) }
    }
}

/// Multiplies `row_groups` of the matrix with every token of `x`; writes the columns of `out` that
/// belong to these rows, `[t][16 * row_groups.start ..]`, and no others.
///
/// # Panics
/// If `packed` is not [`PackedMatrix::packed_bytes`] long, the shapes of `w`, `x` and
/// `out` do not agree, `x` was not prepared in the form that the weight type needs, or
/// the groups are out of range.
pub fn mat_mul(
    w: &PackedMatrix,
    packed: &[u8],
    x: &Activations,
    row_groups: Range<usize>,
    out: RowsOut<'_>,
) {
    mat_mul_tokens(w, packed, x, 0..x.tokens(), row_groups, out);
}

/// [`mat_mul`] with some of the tokens of `x`; the first of them is the first of `out`.
///
/// # Panics
/// As [`mat_mul`], or if `x` has fewer tokens.
pub fn mat_mul_tokens(
    w: &PackedMatrix,
    packed: &[u8],
    x: &Activations,
    tokens: Range<usize>,
    row_groups: Range<usize>,
    out: RowsOut<'_>,
) {
    assert_eq!(
        packed.len(),
        w.packed_bytes(),
        "the packed matrix has another size"
    );
    assert_eq!(
        x.cols(),
        w.cols(),
        "activations and weights differ in columns"
    );
    assert!(
        x.suits(w.ty()),
        "activations for {} weights are not in the form that they need",
        w.ty()
    );
    let x = ActivationRows::new(x, tokens);
    assert!(
        out.tokens == x.tokens() && out.rows == w.rows(),
        "the output's shape is not that of the product"
    );
    assert!(row_groups.end <= w.row_groups(), "row groups out of range");
    if row_groups.is_empty() || x.tokens() == 0 {
        return;
    }
    let product = Product {
        w,
        packed,
        x,
        groups: row_groups,
        out,
    };
    if w.ty().is_quantized() {
        with_format(w.ty(), w.isa(), product);
    } else {
        with_isa(w.isa(), product);
    }
}

/// The whole product on the caller's thread; `out` is `[tokens][rows]`.
///
/// # Panics
/// As [`mat_mul`], or if `out` has another length.
pub fn mat_mul_all(w: &PackedMatrix, packed: &[u8], x: &Activations, out: &mut [f32]) {
    assert_eq!(
        out.len(),
        x.tokens() * w.rows(),
        "the output's shape is not that of the product"
    );
    // SAFETY: the view goes to one call only.
    let out = unsafe { RowsOut::new(out, x.tokens(), w.rows(), w.rows()) };
    mat_mul(w, packed, x, 0..w.row_groups(), out);
}

/// One call of [`mat_mul`], its arguments checked.
struct Product<'a> {
    w: &'a PackedMatrix,
    packed: &'a [u8],
    x: ActivationRows<'a>,
    groups: Range<usize>,
    out: RowsOut<'a>,
}

impl<'a> Product<'a> {
    fn group_bytes(&self, group: usize) -> &'a [u8] {
        &self.packed[self.w.packed_range(group..group + 1)]
    }
}

impl WithFormat for Product<'_> {
    fn run<F: Format, S: Simd>(self, s: S) {
        if self.x.tokens() < panel_tokens::<F, S>(s) {
            direct::run::<F, S>(s, &self);
        } else {
            panel::run::<F, S>(s, &self);
        }
    }
}

impl WithIsa for Product<'_> {
    fn run<S: Simd>(self, s: S) {
        match self.w.ty() {
            WeightType::F32 => floats::run::<floats::F32, S>(s, &self),
            WeightType::F16 => floats::run::<floats::F16, S>(s, &self),
            _ => floats::run::<floats::BF16, S>(s, &self),
        }
    }
}
