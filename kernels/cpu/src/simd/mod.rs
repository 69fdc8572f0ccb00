//! The vectors that the kernels are written in: sixteen rows of a group side by
//! side, one 32-bit lane each.
//!
//! A *line* is 64 bytes: for each of the 16 rows, 4 consecutive bytes. AVX-512 holds a line in one
//! register; the 8-lane instruction sets work through the lower half (rows 0 to 7) and the upper
//! half (rows 8 to 15) one after the other.
//!
//! *Invariant:* a value of an instruction set's type exists only after the CPU was asked for every
//! feature that its methods use. That is what makes the methods safe to call. (Fields are private;
//! `detect` makes the values.)

mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(not(target_arch = "x86_64"))]
mod absent;

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::{Avx2, Avx512, AvxVnni};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::{Avx2, AvxVnni};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// Rows that advance together, whatever the instruction set: the layout does not depend on the CPU.
pub(crate) const ROWS: usize = 16;

/// A sum of dot products has so many, or a multiple of them.
pub(crate) const DOTS: usize = 4;

/// Four bytes of each of the 16 rows of a group.
pub(crate) type Line = [u8; 64];

/// Work to run with an instruction set's features enabled.
pub(crate) trait Job {
    /// What the work yields.
    type Output;
    /// Implementations are `#[inline(always)]`, so that they compile inside the function
    /// that enables the features.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Vectors of `LANES` 32-bit integers (`I`) and floats (`F`). `half` selects rows
/// `half * LANES ..` of a 16-row operand.
///
/// Arithmetic is IEEE single precision with one rounding an operation, so that every
/// implementation gives the same bits.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Integers, or packed bytes.
    type I: Copy;
    /// Floats.
    type F: Copy;
    /// Dot products that are being summed.
    type Dots: Copy;
    /// Whether dot products go through sums of pairs in 16 bits; those of 8-bit codes
    /// are of `code - 128` then.
    const PAIRS: bool;
    /// Lanes of a vector: 8 or 16.
    const LANES: usize;
    /// Tokens whose sums have room in registers, with the operands: products are
    /// compiled for no more at once.
    const TOKENS: usize;

    /// Whether what some tokens multiply is better unpacked again for each 8 of them than stored
    /// and read again: measured, by vendor.
    fn prefers_registers(self) -> bool {
        false
    }

    /// Runs `job` with the features enabled.
    fn vectorize<J: Job>(self, job: J) -> J::Output;

    /// This half of a line.
    fn line(self, line: &Line, half: usize) -> Self::I;
    /// Stores this half of a line.
    fn store_line(self, line: &mut Line, half: usize, v: Self::I);
    /// This half of 16 floats.
    fn floats(self, v: &[f32; ROWS], half: usize) -> Self::F;
    /// Stores this half of 16 floats.
    fn store_floats(self, out: &mut [f32; ROWS], half: usize, v: Self::F);
    /// This half of 16 little-endian IEEE halves.
    fn f16(self, bytes: &[u8; 32], half: usize) -> Self::F;
    /// This half of 16 little-endian bfloat16.
    fn bf16(self, bytes: &[u8; 32], half: usize) -> Self::F;
    /// This half of 16 little-endian 16-bit words, without sign.
    fn words(self, bytes: &[u8; 32], half: usize) -> Self::I;
    /// This half of 16 exponent bytes `e`, as 2^(e - 128): half of what E8M0 means, as
    /// ggml's doubled FP4 table wants.
    fn e8m0_half(self, bytes: &[u8; 16], half: usize) -> Self::F;
    /// The bits of an integer vector as floats.
    fn bits_to_floats(self, v: Self::I) -> Self::F;

    /// `v` in every lane.
    fn splat(self, v: i32) -> Self::I;
    /// `v` in every lane.
    fn splat_f(self, v: f32) -> Self::F;
    /// Bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Lane-wise sum.
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// Lane-wise logical shift right by `n` < 32.
    fn shr(self, v: Self::I, n: u32) -> Self::I;
    /// Lane-wise shift left by `n` < 32.
    fn shl(self, v: Self::I, n: u32) -> Self::I;
    /// Lane-wise arithmetic shift right by `n` < 32.
    fn sar(self, v: Self::I, n: u32) -> Self::I;
    /// Each byte of `index`, which is below 16, replaced by that byte of `table`.
    fn look_up(self, table: &[u8; 16], index: Self::I) -> Self::I;

    /// Entry `index` of a table, the index taken modulo N, which is a power of two.
    fn gather<const N: usize>(self, table: &[i32; N], index: Self::I) -> Self::I;

    /// Begins a sum of dot products, with `acc`.
    fn begin(self, acc: Self::I) -> Self::Dots;
    /// Adds, per lane, the sum of the 4 products of unsigned bytes of `w` with signed bytes of `x`:
    /// dot product `j` of a sum, from 0 on. Exact for `w` below 2^`bits` and `x` from -127 to 127.
    /// If `bits` is 8 and [`PAIRS`](Self::PAIRS) the products are those of `w` - 128. `j` and
    /// `bits` are constants where it is inlined.
    fn dot(self, sum: Self::Dots, j: usize, w: Self::I, x: Self::I, bits: u32) -> Self::Dots;
    /// The sum of [`DOTS`] dot products, or a multiple of them.
    fn end(self, sum: Self::Dots) -> Self::I;
    /// Integers to floats.
    fn to_f(self, v: Self::I) -> Self::F;
    /// Product.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// Hints that the line `ahead` bytes after the start of `at` will be read. May point past the
    /// end.
    fn prefetch(self, at: &[u8], ahead: usize);
}
