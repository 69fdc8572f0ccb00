//! The x86 instruction sets on other architectures: types without values.

use super::{Job, Line, ROWS, Simd};

macro_rules! absent {
    ($($name:ident),*) => {$(
        /// An instruction set that this architecture lacks.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum $name {}

        impl $name {
            /// Never there.
            pub(crate) fn detect() -> Option<Self> {
                None
            }
        }

        #[rustfmt::skip]
        impl Simd for $name {
            type I = ();
            type F = ();
            const LANES: usize = ROWS;
            fn vectorize<J: Job>(self, _: J) -> J::Output { match self {} }
            fn line(self, _: &Line, _: usize) { match self {} }
            fn store_line(self, _: &mut Line, _: usize, (): ()) { match self {} }
            fn floats(self, _: &[f32; ROWS], _: usize) { match self {} }
            fn store_floats(self, _: &mut [f32; ROWS], _: usize, (): ()) { match self {} }
            fn f16(self, _: &[u8; 32], _: usize) { match self {} }
            fn bf16(self, _: &[u8; 32], _: usize) { match self {} }
            fn e8m0_half(self, _: &[u8; 16], _: usize) { match self {} }
            fn bits_to_floats(self, (): ()) { match self {} }
            fn splat(self, _: i32) { match self {} }
            fn splat_f(self, _: f32) { match self {} }
            fn and(self, (): (), (): ()) { match self {} }
            fn or(self, (): (), (): ()) { match self {} }
            fn add(self, (): (), (): ()) { match self {} }
            fn shr(self, (): (), _: u32) { match self {} }
            fn shl(self, (): (), _: u32) { match self {} }
            fn sar(self, (): (), _: u32) { match self {} }
            fn look_up(self, _: &[u8; 16], (): ()) { match self {} }
            fn dot<const WIDE: bool>(self, (): (), (): (), (): ()) { match self {} }
            fn to_f(self, (): ()) { match self {} }
            fn mul(self, (): (), (): ()) { match self {} }
            fn fma(self, (): (), (): (), (): ()) { match self {} }
            fn prefetch(self, _: &[u8], _: usize) { match self {} }
        }
    )*};
}

absent!(Avx2, AvxVnni, Avx512);
