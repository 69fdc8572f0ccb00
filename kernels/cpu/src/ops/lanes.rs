//! The vectors that the operations are written in: one trait, an implementation an instruction set.
//!
//! *Invariant:* a value of an implementing type is the proof that the CPU has the instruction
//! set: it is made only by `detect`. That is why the methods can be safe; the unsafe ones add
//! only what their pointers need. All methods and all code generic over [`Lanes`] are
//! `inline(always)`, so that they end up inside the function that [`simd_fn`] marks with
//! `target_feature`, where the intrinsics inline too.

use half::f16;

/// Registers of [`Lanes::N`] f32.
pub(super) trait Lanes: Copy {
    /// Lanes of a vector; a power of two, at most 16.
    const N: usize;
    /// The register.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// `from` is valid for reads of N f32; no alignment is needed.
    unsafe fn load_ptr(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` is valid for writes of N f32; no alignment is needed.
    unsafe fn store_ptr(self, to: *mut f32, v: Self::V);
    /// # Safety
    /// `from` is valid for reads of N f16; an alignment of 2 is enough.
    unsafe fn load_f16_ptr(self, from: *const f16) -> Self::V;
    /// Rounds to the nearest, ties to even.
    /// # Safety
    /// `to` is valid for writes of N f16; an alignment of 2 is enough.
    unsafe fn store_f16_ptr(self, to: *mut f16, v: Self::V);
    /// # Safety
    /// `from` is valid for reads of N i8.
    unsafe fn load_i8_ptr(self, from: *const i8) -> Self::V;

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`: `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integral `n` in -200..200; NaN in `a` stays.
    fn scale_exp2(self, a: Self::V, n: Self::V) -> Self::V;
    /// Exchanges lanes 0 and 1, 2 and 3, ...
    fn swap_pairs(self, a: Self::V) -> Self::V;
    /// `a` in the lanes `i` with `from <= base + i < to`, `other` in the rest.
    fn keep_between(self, a: Self::V, other: Self::V, base: i32, from: i32, to: i32) -> Self::V;
    /// Bit `i` is set where `a > b` in lane `i` (never for NaN).
    fn gt_bits(self, a: Self::V, b: Self::V) -> u32;
    fn sum(self, a: Self::V) -> f32;
    /// The largest lane; some lane if one is NaN.
    fn largest(self, a: Self::V) -> f32;

    /// Asks for the cache lines of `from`, without waiting for them.
    fn prefetch(self, from: &[u8]);

    /// The first N elements of `from`.
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::V {
        assert!(from.len() >= Self::N);
        // SAFETY: from holds N elements.
        unsafe { self.load_ptr(from.as_ptr()) }
    }

    /// Over the first N elements of `to`.
    #[inline(always)]
    fn store(self, to: &mut [f32], v: Self::V) {
        assert!(to.len() >= Self::N);
        // SAFETY: to holds N elements.
        unsafe { self.store_ptr(to.as_mut_ptr(), v) }
    }

    /// Fewer than N elements, `fill` in the lanes after them.
    #[inline(always)]
    fn load_part(self, from: &[f32], fill: f32) -> Self::V {
        let mut buffer = [fill; 16];
        buffer[..from.len()].copy_from_slice(from);
        self.load(&buffer)
    }

    /// The first lanes over all of `to`, which has fewer than N elements.
    #[inline(always)]
    fn store_part(self, to: &mut [f32], v: Self::V) {
        let mut buffer = [0.0; 16];
        self.store(&mut buffer, v);
        to.copy_from_slice(&buffer[..to.len()]);
    }

    /// The first N elements of `from`, widened.
    #[inline(always)]
    fn load_f16(self, from: &[f16]) -> Self::V {
        assert!(from.len() >= Self::N);
        // SAFETY: from holds N elements.
        unsafe { self.load_f16_ptr(from.as_ptr()) }
    }

    /// The first N elements of `from`, as f32.
    #[inline(always)]
    fn load_i8(self, from: &[i8]) -> Self::V {
        assert!(from.len() >= Self::N);
        // SAFETY: from holds N elements.
        unsafe { self.load_i8_ptr(from.as_ptr()) }
    }

    /// Over the first N elements of `to`, rounded.
    #[inline(always)]
    fn store_f16(self, to: &mut [f16], v: Self::V) {
        assert!(to.len() >= Self::N);
        // SAFETY: to holds N elements.
        unsafe { self.store_f16_ptr(to.as_mut_ptr(), v) }
    }
}

/// Defines `fn name(simd, args)`, which runs the generic `simd` function compiled for the chosen
/// instruction set with its token as the first argument, or the `scalar` one.
macro_rules! simd_fn {
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?; simd $kernel:ident; scalar $scalar:ident;) => {
        #[allow(clippy::too_many_arguments, reason = "those of the operation and the instruction set")]
        fn $name(simd: $crate::ops::Simd, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::ops::Simd;
                use $crate::ops::x86::{Avx2, Avx512};
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512(isa: Avx512, $($arg: $ty),*) $(-> $ret)? {
                    $kernel(isa, $($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2(isa: Avx2, $($arg: $ty),*) $(-> $ret)? {
                    $kernel(isa, $($arg),*)
                }
                if simd >= Simd::Avx512 && let Some(isa) = Avx512::detect() {
                    // SAFETY: an Avx512 exists only where the CPU has these features.
                    return unsafe { avx512(isa, $($arg),*) };
                }
                if simd >= Simd::Avx2 && let Some(isa) = Avx2::detect() {
                    // SAFETY: an Avx2 exists only where the CPU has these features.
                    return unsafe { avx2(isa, $($arg),*) };
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = simd;
            $scalar($($arg),*)
        }
    };
}
pub(super) use simd_fn;
