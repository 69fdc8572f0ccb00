//! Sixteen lanes in plain Rust: the yardstick of the other instruction sets, and
//! what a CPU without them runs.

use super::{Job, Line, ROWS, Simd};

/// Portable lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn map2<A: Copy, B: Copy, C>(a: [A; ROWS], b: [B; ROWS], f: impl Fn(A, B) -> C) -> [C; ROWS] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    type I = [i32; ROWS];
    type F = [f32; ROWS];
    type Dots = Self::I;
    const PAIRS: bool = false;
    const LANES: usize = ROWS;
    const TOKENS: usize = 1;

    #[inline(always)]
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn line(self, line: &Line, _half: usize) -> Self::I {
        let (words, _) = line.as_chunks::<4>();
        std::array::from_fn(|i| i32::from_le_bytes(words[i]))
    }

    #[inline(always)]
    fn store_line(self, line: &mut Line, _half: usize, v: Self::I) {
        let (words, _) = line.as_chunks_mut::<4>();
        for (word, lane) in words.iter_mut().zip(v) {
            *word = lane.to_le_bytes();
        }
    }

    #[inline(always)]
    fn floats(self, v: &[f32; ROWS], _half: usize) -> Self::F {
        *v
    }

    #[inline(always)]
    fn store_floats(self, out: &mut [f32; ROWS], _half: usize, v: Self::F) {
        *out = v;
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32], _half: usize) -> Self::F {
        let (words, _) = bytes.as_chunks::<2>();
        std::array::from_fn(|i| half::f16::from_le_bytes(words[i]).to_f32())
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32], _half: usize) -> Self::F {
        let (words, _) = bytes.as_chunks::<2>();
        std::array::from_fn(|i| f32::from_bits(u32::from(u16::from_le_bytes(words[i])) << 16))
    }

    #[inline(always)]
    fn words(self, bytes: &[u8; 32], _half: usize) -> Self::I {
        let (words, _) = bytes.as_chunks::<2>();
        std::array::from_fn(|i| i32::from(u16::from_le_bytes(words[i])))
    }

    #[inline(always)]
    fn e8m0_half(self, bytes: &[u8; 16], _half: usize) -> Self::F {
        std::array::from_fn(|i| super::super::reference::e8m0_half(bytes[i]))
    }

    #[inline(always)]
    fn bits_to_floats(self, v: Self::I) -> Self::F {
        v.map(|lane| f32::from_bits(lane.cast_unsigned()))
    }

    #[inline(always)]
    fn splat(self, v: i32) -> Self::I {
        [v; ROWS]
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> Self::F {
        [v; ROWS]
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        map2(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        map2(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, a: Self::I, b: Self::I) -> Self::I {
        map2(a, b, |a, b| a ^ b)
    }

    #[inline(always)]
    fn add(self, a: Self::I, b: Self::I) -> Self::I {
        map2(a, b, i32::wrapping_add)
    }

    #[inline(always)]
    fn shr(self, v: Self::I, n: u32) -> Self::I {
        v.map(|lane| (lane.cast_unsigned() >> n).cast_signed())
    }

    #[inline(always)]
    fn shl(self, v: Self::I, n: u32) -> Self::I {
        v.map(|lane| lane << n)
    }

    #[inline(always)]
    fn sar(self, v: Self::I, n: u32) -> Self::I {
        v.map(|lane| lane >> n)
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], index: Self::I) -> Self::I {
        index.map(|lane| {
            i32::from_le_bytes(lane.to_le_bytes().map(|byte| table[usize::from(byte & 15)]))
        })
    }

    #[inline(always)]
    fn gather<const N: usize>(self, table: &[i32; N], index: Self::I) -> Self::I {
        const { assert!(N.is_power_of_two(), "an index is masked") };
        index.map(|lane| table[lane.cast_unsigned() as usize & (N - 1)])
    }

    #[inline(always)]
    fn begin(self, acc: Self::I) -> Self::I {
        acc
    }

    #[inline(always)]
    fn end(self, sum: Self::I) -> Self::I {
        sum
    }

    #[inline(always)]
    fn dot(self, sum: Self::I, _j: usize, w: Self::I, x: Self::I, _bits: u32) -> Self::I {
        std::array::from_fn(|i| {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            (0..4).fold(sum[i], |sum, k| {
                sum + i32::from(w[k]) * i32::from(x[k].cast_signed())
            })
        })
    }

    #[inline(always)]
    fn to_f(self, v: Self::I) -> Self::F {
        v.map(|lane| lane as f32)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn prefetch(self, _at: &[u8], _ahead: usize) {}
}
