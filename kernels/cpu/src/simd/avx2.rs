//! AVX2 with FMA and F16C, with and without AVX-VNNI: half a line in a register.

use std::arch::x86_64::*;

use super::{Job, Line, ROWS, Simd};

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, if the CPU and the operating system support these features.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

impl Avx2 {
    /// Word `w` of row `r` becomes word `r` of line `w`.
    ///
    /// # Panics
    /// If a row has not as many words as there are lines, or these are no multiple of 8.
    pub(crate) fn transpose(self, rows: &[&[u8]; ROWS], lines: &mut [Line]) {
        assert!(
            lines.len().is_multiple_of(8) && rows.iter().all(|row| row.len() == 4 * lines.len()),
            "16 rows of as many words as there are lines"
        );
        // SAFETY: the proof says that the CPU has AVX2; the lengths are checked above.
        unsafe { transpose(rows, lines) }
    }
}

/// 8 words of 8 rows at a time.
///
/// # Safety
/// The CPU has AVX2; there are a multiple of 8 lines, and each row has as many words.
#[target_feature(enable = "avx2")]
unsafe fn transpose(rows: &[&[u8]; ROWS], lines: &mut [Line]) {
    for (i, lines) in lines.chunks_exact_mut(8).enumerate() {
        for half in 0..2 {
            // SAFETY: 32 bytes from 32 i on are inside of each row, which has 4 bytes for each
            // line.
            let row = |r: usize| unsafe {
                _mm256_loadu_si256(rows[8 * half + r].as_ptr().add(32 * i).cast())
            };
            // Pairs of words of neighbouring rows, then fours, then eights.
            let pair = |r: usize| {
                let (a, b) = (row(r), row(r + 1));
                [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)]
            };
            let four = |r: usize| {
                let ([a, c], [b, d]) = (pair(r), pair(r + 2));
                [
                    _mm256_unpacklo_epi64(a, b),
                    _mm256_unpackhi_epi64(a, b),
                    _mm256_unpacklo_epi64(c, d),
                    _mm256_unpackhi_epi64(c, d),
                ]
            };
            let (low, high) = (four(0), four(4));
            for w in 0..4 {
                let first = _mm256_permute2x128_si256::<0x20>(low[w], high[w]);
                let later = _mm256_permute2x128_si256::<0x31>(low[w], high[w]);
                for (line, words) in [(w, first), (w + 4, later)] {
                    // SAFETY: half a line is 32 bytes.
                    unsafe {
                        _mm256_storeu_si256(lines[line].as_mut_ptr().add(32 * half).cast(), words);
                    }
                }
            }
        }
    }
}

/// Proof that the CPU has AVX2, FMA, F16C and AVX-VNNI.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvxVnni(());

impl AvxVnni {
    /// The proof, if the CPU and the operating system support these features.
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some() && is_x86_feature_detected!("avxvnni")).then_some(AvxVnni(()))
    }
}

/// One intrinsic without memory operands.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: an `Avx2` or `AvxVnni` exists only where `detect` found the features
        // of every intrinsic it uses.
        unsafe { $e }
    };
}

/// Dot products through sums of pairs in 16 bits, which saturate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PairSums {
    acc: __m256i,
    /// Not yet in `acc`.
    pairs: __m256i,
}

/// Dot products whose pairs may be added up in 16 bits: a pair is at most 2 *
/// (2^bits - 1) * 127, 7874 for 5 bits.
const fn pairs_together(bits: u32) -> usize {
    match bits {
        0..=5 => 4,
        6 => 2,
        _ => 1,
    }
}

const _: () = {
    let mut bits = 1;
    while bits <= 7 {
        let pair = 2 * ((1 << bits) - 1) * 127;
        assert!(
            pairs_together(bits) as i32 * pair <= 32767,
            "it would saturate"
        );
        assert!(super::DOTS.is_multiple_of(pairs_together(bits)));
        bits += 1;
    }
};

#[inline(always)]
fn avx2_dot(sum: PairSums, j: usize, w: __m256i, x: __m256i, bits: u32) -> PairSums {
    let pairs = if bits == 8 {
        // The sign goes to x: |w - 128| is at most 128, and a pair at most 2 * 128 * 127 = 32512.
        let code = op!(_mm256_xor_si256(w, _mm256_set1_epi8(-128)));
        op!(_mm256_maddubs_epi16(
            _mm256_abs_epi8(code),
            _mm256_sign_epi8(x, code)
        ))
    } else {
        op!(_mm256_maddubs_epi16(w, x))
    };
    let together = pairs_together(bits);
    let pairs = if j.is_multiple_of(together) {
        pairs
    } else {
        op!(_mm256_add_epi16(sum.pairs, pairs))
    };
    let acc = if (j + 1).is_multiple_of(together) {
        op!(_mm256_add_epi32(
            sum.acc,
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        ))
    } else {
        sum.acc
    };
    PairSums { acc, pairs }
}

#[inline(always)]
fn avx2_begin(acc: __m256i) -> PairSums {
    PairSums { acc, pairs: acc }
}

#[inline(always)]
fn avx2_end(sum: PairSums) -> __m256i {
    sum.acc
}

#[inline(always)]
fn vnni_dot(sum: __m256i, _j: usize, w: __m256i, x: __m256i, _bits: u32) -> __m256i {
    op!(_mm256_dpbusd_avx_epi32(sum, w, x))
}

macro_rules! eight_lanes {
    ($name:ident, $features:literal, $dots:ty, $are_pairs:literal, $begin:expr, $dot:expr, $end:expr) => {
        impl Simd for $name {
            type I = __m256i;
            type F = __m256;
            type Dots = $dots;
            const PAIRS: bool = $are_pairs;
            const LANES: usize = 8;
            const TOKENS: usize = 4;

            #[inline(always)]
            fn vectorize<J: Job>(self, job: J) -> J::Output {
                #[target_feature(enable = $features)]
                fn enabled<J: Job>(s: $name, job: J) -> J::Output {
                    job.run(s)
                }
                op!(enabled(self, job))
            }

            #[inline(always)]
            fn line(self, line: &Line, half: usize) -> __m256i {
                let (halves, _) = line.as_chunks::<32>();
                // SAFETY: the features as in `op!`; the reference covers the 32 bytes that
                // are read, at any alignment.
                unsafe { _mm256_loadu_si256(halves[half].as_ptr().cast()) }
            }

            #[inline(always)]
            fn store_line(self, line: &mut Line, half: usize, v: __m256i) {
                let (halves, _) = line.as_chunks_mut::<32>();
                // SAFETY: the features as in `op!`; the reference covers the 32 bytes that are
                // written.
                unsafe { _mm256_storeu_si256(halves[half].as_mut_ptr().cast(), v) }
            }

            #[inline(always)]
            fn floats(self, v: &[f32; ROWS], half: usize) -> __m256 {
                let (halves, _) = v.as_chunks::<8>();
                // SAFETY: the features as in `op!`; the reference covers the 8 floats that are
                // read.
                unsafe { _mm256_loadu_ps(halves[half].as_ptr()) }
            }

            #[inline(always)]
            fn store_floats(self, out: &mut [f32; ROWS], half: usize, v: __m256) {
                let (halves, _) = out.as_chunks_mut::<8>();
                // SAFETY: the features as in `op!`; the reference covers the 8 floats that are
                // written.
                unsafe { _mm256_storeu_ps(halves[half].as_mut_ptr(), v) }
            }

            #[inline(always)]
            fn f16(self, bytes: &[u8; 32], half: usize) -> __m256 {
                let (halves, _) = bytes.as_chunks::<16>();
                // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
                // are read, at any alignment.
                let words = unsafe { _mm_loadu_si128(halves[half].as_ptr().cast()) };
                op!(_mm256_cvtph_ps(words))
            }

            #[inline(always)]
            fn bf16(self, bytes: &[u8; 32], half: usize) -> __m256 {
                let (halves, _) = bytes.as_chunks::<16>();
                // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
                // are read, at any alignment.
                let words = unsafe { _mm_loadu_si128(halves[half].as_ptr().cast()) };
                op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(
                    _mm256_cvtepu16_epi32(words)
                )))
            }

            #[inline(always)]
            fn words(self, bytes: &[u8; 32], half: usize) -> __m256i {
                let (halves, _) = bytes.as_chunks::<16>();
                // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
                // are read, at any alignment.
                let words = unsafe { _mm_loadu_si128(halves[half].as_ptr().cast()) };
                op!(_mm256_cvtepu16_epi32(words))
            }

            #[inline(always)]
            fn e8m0_half(self, bytes: &[u8; 16], half: usize) -> __m256 {
                let (halves, _) = bytes.as_chunks::<8>();
                // SAFETY: the features as in `op!`; the reference covers the 8 bytes that
                // are read, at any alignment.
                let bytes = unsafe { _mm_loadl_epi64(halves[half].as_ptr().cast()) };
                let e = op!(_mm256_cvtepu8_epi32(bytes));
                let normal = op!(_mm256_slli_epi32::<23>(_mm256_sub_epi32(
                    e,
                    _mm256_set1_epi32(1)
                )));
                // 2^-128 and 2^-127 are subnormal.
                let subnormal = op!(_mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e));
                let is_subnormal = op!(_mm256_cmpgt_epi32(_mm256_set1_epi32(2), e));
                op!(_mm256_castsi256_ps(_mm256_blendv_epi8(
                    normal,
                    subnormal,
                    is_subnormal
                )))
            }

            #[inline(always)]
            fn bits_to_floats(self, v: __m256i) -> __m256 {
                op!(_mm256_castsi256_ps(v))
            }

            #[inline(always)]
            fn splat(self, v: i32) -> __m256i {
                op!(_mm256_set1_epi32(v))
            }

            #[inline(always)]
            fn splat_f(self, v: f32) -> __m256 {
                op!(_mm256_set1_ps(v))
            }

            #[inline(always)]
            fn and(self, a: __m256i, b: __m256i) -> __m256i {
                op!(_mm256_and_si256(a, b))
            }

            #[inline(always)]
            fn or(self, a: __m256i, b: __m256i) -> __m256i {
                op!(_mm256_or_si256(a, b))
            }

            #[inline(always)]
            fn xor(self, a: __m256i, b: __m256i) -> __m256i {
                op!(_mm256_xor_si256(a, b))
            }

            #[inline(always)]
            fn add(self, a: __m256i, b: __m256i) -> __m256i {
                op!(_mm256_add_epi32(a, b))
            }

            #[inline(always)]
            fn shr(self, v: __m256i, n: u32) -> __m256i {
                op!(_mm256_srl_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
            }

            #[inline(always)]
            fn shl(self, v: __m256i, n: u32) -> __m256i {
                op!(_mm256_sll_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
            }

            #[inline(always)]
            fn sar(self, v: __m256i, n: u32) -> __m256i {
                op!(_mm256_sra_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
            }

            #[inline(always)]
            fn look_up(self, table: &[u8; 16], index: __m256i) -> __m256i {
                // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
                // are read, at any alignment.
                let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
                op!(_mm256_shuffle_epi8(
                    _mm256_broadcastsi128_si256(table),
                    index
                ))
            }

            #[inline(always)]
            fn gather<const N: usize>(self, table: &[i32; N], index: __m256i) -> __m256i {
                const { assert!(N.is_power_of_two(), "an index is masked") };
                let index = self.and(index, self.splat((N - 1) as i32));
                // SAFETY: the features as in `op!`; every masked index is below N, the table's
                // length.
                unsafe { _mm256_i32gather_epi32::<4>(table.as_ptr(), index) }
            }

            #[inline(always)]
            fn begin(self, acc: __m256i) -> $dots {
                $begin(acc)
            }

            #[inline(always)]
            fn dot(self, sum: $dots, j: usize, w: __m256i, x: __m256i, bits: u32) -> $dots {
                $dot(sum, j, w, x, bits)
            }

            #[inline(always)]
            fn end(self, sum: $dots) -> __m256i {
                $end(sum)
            }

            #[inline(always)]
            fn to_f(self, v: __m256i) -> __m256 {
                op!(_mm256_cvtepi32_ps(v))
            }

            #[inline(always)]
            fn mul(self, a: __m256, b: __m256) -> __m256 {
                op!(_mm256_mul_ps(a, b))
            }

            #[inline(always)]
            fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
                op!(_mm256_fmadd_ps(a, b, c))
            }

            #[inline(always)]
            fn prefetch(self, at: &[u8], ahead: usize) {
                op!(_mm_prefetch::<_MM_HINT_T0>(
                    at.as_ptr().wrapping_add(ahead).cast()
                ))
            }
        }
    };
}

eight_lanes!(
    Avx2,
    "avx2,fma,f16c",
    PairSums,
    true,
    avx2_begin,
    avx2_dot,
    avx2_end
);
eight_lanes!(
    AvxVnni,
    "avx2,fma,f16c,avxvnni",
    __m256i,
    false,
    std::convert::identity,
    vnni_dot,
    std::convert::identity
);
