//! AVX-512 F, BW and VNNI: a line in one register, `vpdpbusd` for the dot product.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::{Job, Line, ROWS, Simd};

/// Proof that the CPU has AVX-512 F, BW and VNNI.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof, if the CPU and the operating system support these features.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx512(()))
    }
}

/// Whether this is a CPU of AMD's. Asked once: in a virtual machine `cpuid` takes microseconds.
fn is_amd() -> bool {
    static IS_AMD: OnceLock<bool> = OnceLock::new();
    *IS_AMD.get_or_init(|| {
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"AuthenticAMD"
    })
}

/// One intrinsic without memory operands.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: an `Avx512` exists only where `detect` found the features of
        // every intrinsic in this file.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type I = __m512i;
    type F = __m512;
    type Dots = __m512i;
    const PAIRS: bool = false;
    const LANES: usize = 16;
    const TOKENS: usize = 8;

    #[inline(always)]
    fn prefers_registers(self) -> bool {
        is_amd()
    }

    #[inline(always)]
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
        fn enabled<J: Job>(s: Avx512, job: J) -> J::Output {
            job.run(s)
        }
        op!(enabled(self, job))
    }

    #[inline(always)]
    fn line(self, line: &Line, _half: usize) -> __m512i {
        // SAFETY: the features as in `op!`; the reference covers the 64 bytes that
        // are read, at any alignment.
        unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_line(self, line: &mut Line, _half: usize, v: __m512i) {
        // SAFETY: the features as in `op!`; the reference covers the 64 bytes that are
        // written, at any alignment.
        unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), v) }
    }

    #[inline(always)]
    fn floats(self, v: &[f32; ROWS], _half: usize) -> __m512 {
        // SAFETY: the features as in `op!`; the reference covers the 16 floats that are read.
        unsafe { _mm512_loadu_ps(v.as_ptr()) }
    }

    #[inline(always)]
    fn store_floats(self, out: &mut [f32; ROWS], _half: usize, v: __m512) {
        // SAFETY: the features as in `op!`; the reference covers the 16 floats that are written.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32], _half: usize) -> __m512 {
        // SAFETY: the features as in `op!`; the reference covers the 32 bytes that
        // are read, at any alignment.
        let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        op!(_mm512_cvtph_ps(halves))
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32], _half: usize) -> __m512 {
        // SAFETY: the features as in `op!`; the reference covers the 32 bytes that
        // are read, at any alignment.
        let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(
            _mm512_cvtepu16_epi32(words)
        )))
    }

    #[inline(always)]
    fn words(self, bytes: &[u8; 32], _half: usize) -> __m512i {
        // SAFETY: the features as in `op!`; the reference covers the 32 bytes that
        // are read, at any alignment.
        let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        op!(_mm512_cvtepu16_epi32(words))
    }

    #[inline(always)]
    fn e8m0_half(self, bytes: &[u8; 16], _half: usize) -> __m512 {
        // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
        // are read, at any alignment.
        let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        let e = op!(_mm512_cvtepu8_epi32(bytes));
        let normal = op!(_mm512_slli_epi32::<23>(_mm512_sub_epi32(
            e,
            _mm512_set1_epi32(1)
        )));
        // 2^-128 and 2^-127 are subnormal.
        let subnormal = op!(_mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e));
        let is_subnormal = op!(_mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)));
        op!(_mm512_castsi512_ps(_mm512_mask_blend_epi32(
            is_subnormal,
            normal,
            subnormal
        )))
    }

    #[inline(always)]
    fn bits_to_floats(self, v: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(v))
    }

    #[inline(always)]
    fn splat(self, v: i32) -> __m512i {
        op!(_mm512_set1_epi32(v))
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> __m512 {
        op!(_mm512_set1_ps(v))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn add(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn shr(self, v: __m512i, n: u32) -> __m512i {
        op!(_mm512_srl_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn shl(self, v: __m512i, n: u32) -> __m512i {
        op!(_mm512_sll_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn sar(self, v: __m512i, n: u32) -> __m512i {
        op!(_mm512_sra_epi32(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], index: __m512i) -> __m512i {
        // SAFETY: the features as in `op!`; the reference covers the 16 bytes that
        // are read, at any alignment.
        let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        op!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index))
    }

    #[inline(always)]
    fn gather<const N: usize>(self, table: &[i32; N], index: __m512i) -> __m512i {
        const { assert!(N.is_power_of_two(), "an index is masked") };
        let index = self.and(index, self.splat((N - 1) as i32));
        // SAFETY: the features as in `op!`; every masked index is below N, the table's length.
        unsafe { _mm512_i32gather_epi32::<4>(index, table.as_ptr()) }
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
    fn dot(self, sum: __m512i, _j: usize, w: __m512i, x: __m512i, _bits: u32) -> __m512i {
        op!(_mm512_dpbusd_epi32(sum, w, x))
    }

    #[inline(always)]
    fn to_f(self, v: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(v))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn prefetch(self, at: &[u8], ahead: usize) {
        op!(_mm_prefetch::<_MM_HINT_T0>(
            at.as_ptr().wrapping_add(ahead).cast()
        ))
    }
}
