//! The index of the largest element. Bound by memory.

use super::Simd;
use super::lanes::{Lanes, simd_fn};

/// Elements of a block: the largest value is found by blocks, its index only in the winning one.
const BLOCK: usize = 4096;

/// The index of the largest element of `x`, the lowest one of equals. NaN never wins; None when `x`
/// is empty or has nothing but NaN.
#[must_use]
pub fn argmax(simd: Simd, x: &[f32]) -> Option<usize> {
    let (mut best, mut start) = (f32::NEG_INFINITY, 0);
    for (index, block) in x.chunks(BLOCK).enumerate() {
        let most = largest(simd, block);
        if most > best {
            (best, start) = (most, index * BLOCK);
        }
    }
    // Where nothing beats minus infinity, the first element that is minus
    // infinity wins, if there is one.
    x[start..]
        .iter()
        .position(|&x| x == best)
        .map(|i| start + i)
}

/// The largest element but NaN; minus infinity if there is none.
pub(super) fn largest(simd: Simd, x: &[f32]) -> f32 {
    largest_in(simd, x)
}

simd_fn! {
    fn largest_in(x: &[f32]) -> f32;
    simd largest_lanes;
    scalar largest_scalar;
}

#[inline(always)]
fn largest_lanes<S: Lanes>(s: S, x: &[f32]) -> f32 {
    let mut most = [s.splat(f32::NEG_INFINITY); 4];
    let mut blocks = x.chunks_exact(4 * S::N);
    for block in blocks.by_ref() {
        for (most, x) in most.iter_mut().zip(block.chunks_exact(S::N)) {
            // The second operand stays where the first is NaN.
            *most = s.max(s.load(x), *most);
        }
    }
    for x in blocks.remainder().chunks(S::N) {
        most[0] = s.max(s.load_part(x, f32::NEG_INFINITY), most[0]);
    }
    s.largest(s.max(s.max(most[0], most[1]), s.max(most[2], most[3])))
}

fn largest_scalar(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::Random;

    fn naive(x: &[f32]) -> Option<usize> {
        let mut best: Option<usize> = None;
        for i in 0..x.len() {
            if !x[i].is_nan() && best.is_none_or(|b| x[i] > x[b]) {
                best = Some(i);
            }
        }
        best
    }

    #[test]
    fn agrees_with_the_naive_search() {
        let mut source = Random::new("argmax");
        for round in 0..400 {
            let n = 1 + source.below(if round % 10 == 0 { 20_000 } else { 100 });
            // Few distinct values, so that ties are common, and some NaN and infinities.
            let x: Vec<f32> = (0..n)
                .map(|_| match source.below(12) {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    v => (v as f32) - 20.0,
                })
                .collect();
            for simd in Simd::available() {
                assert_eq!(argmax(simd, &x), naive(&x), "{simd:?} {n}");
            }
        }
    }

    #[test]
    fn edges() {
        for simd in Simd::available() {
            assert_eq!(argmax(simd, &[]), None);
            assert_eq!(argmax(simd, &vec![f32::NAN; 5000]), None);
            let mut x = vec![f32::NAN; 9000];
            x[8888] = f32::NEG_INFINITY;
            assert_eq!(argmax(simd, &x), Some(8888), "{simd:?}");
            x[4000] = f32::INFINITY;
            assert_eq!(argmax(simd, &x), Some(4000), "{simd:?}");
            assert_eq!(argmax(simd, &[-0.0, 0.0]), Some(0), "{simd:?}");
        }
    }
}
