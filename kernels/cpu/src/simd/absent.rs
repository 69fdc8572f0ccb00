//! The x86 instruction sets on other architectures: types without values.

use std::convert::Infallible;

use super::{Job, Line, ROWS, Simd};

macro_rules! absent {
    ($($name:ident),*) => {$(
        /// An instruction set that this architecture lacks.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $name(Infallible);

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
            type Dots = ();
            const PAIRS: bool = false;
            const LANES: usize = ROWS;
            const TOKENS: usize = 1;
            fn vectorize<J: Job>(self, _: J) -> J::Output { match self.0 {} }
            fn line(self, _: &Line, _: usize) { match self.0 {} }
            fn store_line(self, _: &mut Line, _: usize, (): ()) { match self.0 {} }
            fn floats(self, _: &[f32; ROWS], _: usize) { match self.0 {} }
            fn store_floats(self, _: &mut [f32; ROWS], _: usize, (): ()) { match self.0 {} }
            fn f16(self, _: &[u8; 32], _: usize) { match self.0 {} }
            fn bf16(self, _: &[u8; 32], _: usize) { match self.0 {} }
            fn words(self, _: &[u8; 32], _: usize) { match self.0 {} }
            fn e8m0_half(self, _: &[u8; 16], _: usize) { match self.0 {} }
            fn bits_to_floats(self, (): ()) { match self.0 {} }
            fn splat(self, _: i32) { match self.0 {} }
            fn splat_f(self, _: f32) { match self.0 {} }
            fn and(self, (): (), (): ()) { match self.0 {} }
            fn or(self, (): (), (): ()) { match self.0 {} }
            fn xor(self, (): (), (): ()) { match self.0 {} }
            fn add(self, (): (), (): ()) { match self.0 {} }
            fn shr(self, (): (), _: u32) { match self.0 {} }
            fn shl(self, (): (), _: u32) { match self.0 {} }
            fn sar(self, (): (), _: u32) { match self.0 {} }
            fn look_up(self, _: &[u8; 16], (): ()) { match self.0 {} }
            fn gather<const N: usize>(self, _: &[i32; N], (): ()) { match self.0 {} }
            fn begin(self, (): ()) { match self.0 {} }
            fn dot(self, (): (), _: usize, (): (), (): (), _: u32) { match self.0 {} }
            fn end(self, (): ()) { match self.0 {} }
            fn to_f(self, (): ()) { match self.0 {} }
            fn mul(self, (): (), (): ()) { match self.0 {} }
            fn fma(self, (): (), (): (), (): ()) { match self.0 {} }
            fn prefetch(self, _: &[u8], _: usize) { match self.0 {} }
        }
    )*};
}

absent!(Avx2, AvxVnni, Avx512);

impl Avx2 {
    /// Never called.
    pub(crate) fn transpose(self, _: &[&[u8]; ROWS], _: &mut [Line]) {
        match self.0 {}
    }
}
