//! [`Lanes`] for AVX2 (with FMA and F16C) and AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::*;

use half::f16;

use super::Simd;
use super::lanes::Lanes;

/// 8 lanes. Exists only on a CPU with AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// 16 lanes. Exists only on a CPU with AVX-512 F, BW, DQ and VL, and all of [`Avx2`].
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx2 {
    /// The proof that this CPU has it.
    #[inline]
    pub(super) fn detect() -> Option<Avx2> {
        (Simd::detect() >= Simd::Avx2).then_some(Avx2(()))
    }
}

impl Avx512 {
    /// The proof that this CPU has it.
    #[inline]
    pub(super) fn detect() -> Option<Avx512> {
        (Simd::detect() >= Simd::Avx512).then_some(Avx512(()))
    }
}

#[inline(always)]
fn prefetch(from: &[u8]) {
    for line in from.chunks(64) {
        // SAFETY: a prefetch reads nothing, and every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
}

/// An intrinsic whose only precondition is its instruction set.
macro_rules! isa {
    ($call:expr) => {
        // SAFETY: `self` exists only on a CPU with the instruction set of its type.
        unsafe { $call }
    };
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn prefetch(self, from: &[u8]) {
        prefetch(from);
    }

    const N: usize = 8;
    type V = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        isa!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> __m256 {
        // SAFETY: the caller's: 8 readable f32; the instruction set by `self`.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: __m256) {
        // SAFETY: the caller's: 8 writable f32; the instruction set by `self`.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const f16) -> __m256 {
        // SAFETY: the caller's: 8 readable f16 are 16 bytes; the instruction set by `self`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut f16, v: __m256) {
        // SAFETY: the caller's: 8 writable f16 are 16 bytes; the instruction set by `self`.
        unsafe {
            _mm_storeu_si128(
                to.cast(),
                _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8_ptr(self, from: *const i8) -> __m256 {
        // SAFETY: the caller's: 8 readable bytes; the instruction set by `self`.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        isa!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        isa!(_mm256_round_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(a))
    }

    #[inline(always)]
    fn scale_exp2(self, a: __m256, n: __m256) -> __m256 {
        // In two steps, so that each exponent is that of a normal number.
        let n = isa!(_mm256_cvtps_epi32(n));
        let first = isa!(_mm256_srai_epi32::<1>(n));
        let second = isa!(_mm256_sub_epi32(n, first));
        let bias = isa!(_mm256_set1_epi32(127));
        let first = isa!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(
            _mm256_add_epi32(first, bias)
        )));
        let second = isa!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(
            _mm256_add_epi32(second, bias)
        )));
        self.mul(self.mul(a, first), second)
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m256) -> __m256 {
        isa!(_mm256_permute_ps::<0b10_11_00_01>(a))
    }

    #[inline(always)]
    fn keep_between(self, a: __m256, other: __m256, base: i32, from: i32, to: i32) -> __m256 {
        let lane = isa!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        let before = isa!(_mm256_cmpgt_epi32(_mm256_set1_epi32(from - base), lane));
        let inside = isa!(_mm256_cmpgt_epi32(_mm256_set1_epi32(to - base), lane));
        let keep = isa!(_mm256_castsi256_ps(_mm256_andnot_si256(before, inside)));
        isa!(_mm256_blendv_ps(other, a, keep))
    }

    #[inline(always)]
    fn gt_bits(self, a: __m256, b: __m256) -> u32 {
        isa!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b))) as u32
    }

    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        let four = isa!(_mm_add_ps(
            _mm256_castps256_ps128(a),
            _mm256_extractf128_ps::<1>(a)
        ));
        let two = isa!(_mm_add_ps(four, _mm_movehl_ps(four, four)));
        isa!(_mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))))
    }

    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        let four = isa!(_mm_max_ps(
            _mm256_castps256_ps128(a),
            _mm256_extractf128_ps::<1>(a)
        ));
        let two = isa!(_mm_max_ps(four, _mm_movehl_ps(four, four)));
        isa!(_mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two))))
    }
}

impl Lanes for Avx512 {
    #[inline(always)]
    fn prefetch(self, from: &[u8]) {
        prefetch(from);
    }

    const N: usize = 16;
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        isa!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's: 16 readable f32; the instruction set by `self`.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: __m512) {
        // SAFETY: the caller's: 16 writable f32; the instruction set by `self`.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const f16) -> __m512 {
        // SAFETY: the caller's: 16 readable f16 are 32 bytes; the instruction set by `self`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut f16, v: __m512) {
        // SAFETY: the caller's: 16 writable f16 are 32 bytes; the instruction set by `self`.
        unsafe {
            _mm256_storeu_si256(
                to.cast(),
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v),
            );
        }
    }

    #[inline(always)]
    unsafe fn load_i8_ptr(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's: 16 readable bytes; the instruction set by `self`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        isa!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        isa!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(a))
    }

    #[inline(always)]
    fn scale_exp2(self, a: __m512, n: __m512) -> __m512 {
        isa!(_mm512_scalef_ps(a, n))
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m512) -> __m512 {
        isa!(_mm512_permute_ps::<0b10_11_00_01>(a))
    }

    #[inline(always)]
    fn keep_between(self, a: __m512, other: __m512, base: i32, from: i32, to: i32) -> __m512 {
        let below = |end: i32| (1u32 << (end - base).clamp(0, 16)) - 1;
        isa!(_mm512_mask_mov_ps(
            other,
            (below(to) & !below(from)) as __mmask16,
            a
        ))
    }

    #[inline(always)]
    fn gt_bits(self, a: __m512, b: __m512) -> u32 {
        u32::from(isa!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b)))
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        isa!(_mm512_reduce_add_ps(a))
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        isa!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn load_part(self, from: &[f32], fill: f32) -> __m512 {
        let mask = ((1u32 << from.len().min(16)) - 1) as __mmask16;
        // SAFETY: only the lanes of the mask are read, and `from` holds them; the
        // instruction set by `self`.
        unsafe { _mm512_mask_loadu_ps(self.splat(fill), mask, from.as_ptr()) }
    }

    #[inline(always)]
    fn store_part(self, to: &mut [f32], v: __m512) {
        let mask = ((1u32 << to.len().min(16)) - 1) as __mmask16;
        // SAFETY: only the lanes of the mask are written, and `to` holds them; the
        // instruction set by `self`.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, v) }
    }
}
