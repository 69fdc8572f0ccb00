//! F32, F16 and BF16 weights with f32 activations. The default never rounds an activation.

#![expect(
    clippy::needless_range_loop,
    reason = "token t and group g index several arrays at once"
)]

use std::marker::PhantomData;

use super::super::simd::{Job, ROWS, Simd};
use super::Product;

/// How far ahead of the reads the prefetches go, in each of up to four groups
/// that are read side by side.
const PREFETCH_BYTES: usize = 4096;

/// An unquantized format.
pub(super) trait Float: Send + Sync + 'static {
    /// One column of 16 rows.
    type Column: Copy + Send + Sync + 'static;
    /// The columns of a packed group.
    fn columns(group: &[u8]) -> &[Self::Column];
    /// Hints that the columns some way ahead will be read.
    fn prefetch<S: Simd>(s: S, column: &Self::Column);
    /// Half a column as f32.
    fn load<S: Simd>(s: S, column: &Self::Column, half: usize) -> S::F;
}

/// IEEE single precision.
pub(super) struct F32;
/// IEEE half precision.
pub(super) struct F16;
/// bfloat16.
pub(super) struct BF16;

impl Float for F32 {
    type Column = [u8; 64];
    fn columns(group: &[u8]) -> &[[u8; 64]] {
        group.as_chunks().0
    }
    #[inline(always)]
    fn prefetch<S: Simd>(s: S, column: &[u8; 64]) {
        s.prefetch(column, PREFETCH_BYTES);
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, column: &[u8; 64], half: usize) -> S::F {
        s.bits_to_floats(s.line(column, half))
    }
}

impl Float for F16 {
    type Column = [u8; 32];
    fn columns(group: &[u8]) -> &[[u8; 32]] {
        group.as_chunks().0
    }
    #[inline(always)]
    fn prefetch<S: Simd>(s: S, column: &[u8; 32]) {
        s.prefetch(column, PREFETCH_BYTES);
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, column: &[u8; 32], half: usize) -> S::F {
        s.f16(column, half)
    }
}

impl Float for BF16 {
    type Column = [u8; 32];
    fn columns(group: &[u8]) -> &[[u8; 32]] {
        group.as_chunks().0
    }
    #[inline(always)]
    fn prefetch<S: Simd>(s: S, column: &[u8; 32]) {
        s.prefetch(column, PREFETCH_BYTES);
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, column: &[u8; 32], half: usize) -> S::F {
        s.bf16(column, half)
    }
}

/// Runs a product. One token takes four groups at once, since a row's sum is one
/// chain of dependent additions.
pub(super) fn run<F: Float, S: Simd>(s: S, p: &Product<'_>) {
    let tokens = p.x.tokens();
    let mut g = p.groups.start;
    while g < p.groups.end {
        let left = p.groups.end - g;
        let mut t = 0;
        let groups = match (tokens, left) {
            (1 | 2, 4..) => 4,
            (_, 2..) => 2,
            _ => 1,
        };
        while t < tokens {
            t += match (groups, tokens - t) {
                (4, 1) => part::<F, S, 4, 1>(s, p, g, t),
                (4, _) => part::<F, S, 4, 2>(s, p, g, t),
                (2, 1) => part::<F, S, 2, 1>(s, p, g, t),
                (2, 2 | 3) => part::<F, S, 2, 2>(s, p, g, t),
                (2, _) => part::<F, S, 2, 4>(s, p, g, t),
                (_, 1) => part::<F, S, 1, 1>(s, p, g, t),
                (_, 2 | 3) => part::<F, S, 1, 2>(s, p, g, t),
                _ => part::<F, S, 1, 4>(s, p, g, t),
            };
        }
        g += groups;
    }
}

/// `G` groups from `g` on times `NT` tokens from `t` on; yields `NT`.
fn part<F: Float, S: Simd, const G: usize, const NT: usize>(
    s: S,
    p: &Product<'_>,
    g: usize,
    t: usize,
) -> usize {
    let mut groups: [&[F::Column]; G] = [&[]; G];
    for (i, group) in groups.iter_mut().enumerate() {
        *group = &F::columns(p.group_bytes(g + i))[..p.w.cols()];
    }
    let mut x: [&[f32]; NT] = [&[]; NT];
    for (i, x) in x.iter_mut().enumerate() {
        *x = p.x.floats(t + i);
    }
    let y = s.vectorize(FloatProduct::<F, G, NT> {
        groups,
        x,
        format: PhantomData,
    });
    for (i, y) in y.iter().enumerate() {
        for (j, y) in y.iter().enumerate() {
            p.out.set(t + i, (g + j) * ROWS, y);
        }
    }
    NT
}

/// `16 * G` rows times `NT` tokens.
struct FloatProduct<'a, F: Float, const G: usize, const NT: usize> {
    groups: [&'a [F::Column]; G],
    x: [&'a [f32]; NT],
    format: PhantomData<F>,
}

impl<F: Float, const G: usize, const NT: usize> Job for FloatProduct<'_, F, G, NT> {
    type Output = [[[f32; ROWS]; G]; NT];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut out = [[[0.0; ROWS]; G]; NT];
        for half in 0..ROWS / S::LANES {
            let mut acc = [[s.splat_f(0.0); G]; NT];
            for k in 0..self.x[0].len() {
                let mut w = [s.splat_f(0.0); G];
                for g in 0..G {
                    w[g] = F::load(s, &self.groups[g][k], half);
                    F::prefetch(s, &self.groups[g][k]);
                }
                for t in 0..NT {
                    let x = s.splat_f(self.x[t][k]);
                    for g in 0..G {
                        acc[t][g] = s.fma(w[g], x, acc[t][g]);
                    }
                }
            }
            for t in 0..NT {
                for g in 0..G {
                    s.store_floats(&mut out[t][g], half, acc[t][g]);
                }
            }
        }
        out
    }
}
