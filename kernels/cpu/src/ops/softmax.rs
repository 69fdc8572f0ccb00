//! Softmax and log-softmax of rows, shifted by the row's maximum so that no finite input overflows.
//!
//! Minus infinity is a legal input (a token that was ruled out) and gets probability 0; a row of
//! nothing else, and a row with NaN or plus infinity, comes out as NaN. Sums are taken in f64 over
//! short blocks, so a vocabulary of any size loses no precision.

use super::argmax::largest;
use super::exp::exp;
use super::lanes::{Lanes, simd_fn};
use super::{Simd, rows_of};

/// Elements whose exponentials are summed in f32 before f64 takes over.
const BLOCK: usize = 256;

/// Replaces each row of `x`, `[rows][width]`, by its softmax.
///
/// # Panics
/// When `width` is zero or does not divide the length of `x`.
pub fn softmax(simd: Simd, x: &mut [f32], width: usize) {
    rows_of(x.len(), width);
    for row in x.chunks_exact_mut(width) {
        // Without NaN, which comes back in the exponentials.
        let max = largest(simd, row);
        let scale = (1.0 / exp_in_place(simd, row, max)) as f32;
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Replaces each row of `x`, `[rows][width]`, by its log-softmax (natural logarithm).
///
/// # Panics
/// When `width` is zero or does not divide the length of `x`.
pub fn log_softmax(simd: Simd, x: &mut [f32], width: usize) {
    rows_of(x.len(), width);
    for row in x.chunks_exact_mut(width) {
        let max = largest(simd, row);
        let log_sum = exp_sum(simd, row, max).ln() as f32;
        row.iter_mut().for_each(|x| *x = *x - max - log_sum);
    }
}

simd_fn! {
    fn exp_sum(x: &[f32], max: f32) -> f64;
    simd exp_sum_lanes;
    scalar exp_sum_scalar;
}

simd_fn! {
    fn exp_in_place(x: &mut [f32], max: f32) -> f64;
    simd exp_in_place_lanes;
    scalar exp_in_place_scalar;
}

#[inline(always)]
fn exp_sum_lanes<S: Lanes>(s: S, x: &[f32], max: f32) -> f64 {
    let shift = s.splat(max);
    let mut total = 0f64;
    for block in x.chunks(BLOCK) {
        let mut sum = s.splat(0.0);
        for x in block.chunks(S::N) {
            let x = if x.len() == S::N {
                s.load(x)
            } else {
                s.load_part(x, f32::NEG_INFINITY)
            };
            sum = s.add(sum, exp(s, s.sub(x, shift)));
        }
        total += f64::from(s.sum(sum));
    }
    total
}

#[inline(always)]
fn exp_in_place_lanes<S: Lanes>(s: S, x: &mut [f32], max: f32) -> f64 {
    let shift = s.splat(max);
    let mut total = 0f64;
    for block in x.chunks_mut(BLOCK) {
        let mut sum = s.splat(0.0);
        for x in block.chunks_mut(S::N) {
            if x.len() == S::N {
                let e = exp(s, s.sub(s.load(x), shift));
                s.store(x, e);
                sum = s.add(sum, e);
            } else {
                let e = exp(s, s.sub(s.load_part(x, f32::NEG_INFINITY), shift));
                s.store_part(x, e);
                sum = s.add(sum, e);
            }
        }
        total += f64::from(s.sum(sum));
    }
    total
}

fn exp_sum_scalar(x: &[f32], max: f32) -> f64 {
    x.iter().map(|&x| f64::from((x - max).exp())).sum()
}

fn exp_in_place_scalar(x: &mut [f32], max: f32) -> f64 {
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    x.iter().map(|&x| f64::from(x)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    /// A lane adds at most 32 exponentials in f32, each step rounding by 6e-8.
    const TOLERANCE: f64 = 2.5e-6;

    #[test]
    fn close_to_f64() {
        let mut source = Random::new("softmax");
        for width in [1, 3, 16, 77, 1024, 1025, 5000] {
            let x: Vec<f32> = source
                .normal(3 * width)
                .iter()
                .map(|x| x * 8.0 + 3e3)
                .collect();
            let (mut p, mut log_p) = (Vec::new(), Vec::new());
            for row in x.chunks(width) {
                let max = row.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
                p.extend(row.iter().map(|&x| f64::from(x - max).exp() / sum));
                log_p.extend(row.iter().map(|&x| f64::from(x - max) - sum.ln()));
            }
            for simd in Simd::available() {
                let mut out = x.clone();
                softmax(simd, &mut out, width);
                assert_close(&out, &p, TOLERANCE, &format!("{simd:?} softmax {width}"));
                let mut out = x.clone();
                log_softmax(simd, &mut out, width);
                assert_close(
                    &out,
                    &log_p,
                    TOLERANCE,
                    &format!("{simd:?} log_softmax {width}"),
                );
            }
        }
    }

    #[test]
    fn infinities_and_nan() {
        for simd in Simd::available() {
            for width in [5, 40] {
                let mut x = vec![f32::NEG_INFINITY; 4 * width];
                // Row 0: two candidates; row 1: none; row 2: NaN among numbers; row 3: plus
                // infinity.
                x[1] = 3.0;
                x[3] = 3.0;
                x[2 * width] = 1.0;
                x[2 * width + 4] = f32::NAN;
                x[3 * width + 2] = f32::INFINITY;
                let mut log_p = x.clone();
                log_softmax(simd, &mut log_p, width);
                softmax(simd, &mut x, width);
                assert_eq!(x[..5], [0.0, 0.5, 0.0, 0.5, 0.0], "{simd:?}");
                assert_eq!(log_p[0], f32::NEG_INFINITY, "{simd:?}");
                assert!((log_p[1] + std::f32::consts::LN_2).abs() < 1e-6, "{simd:?}");
                assert!(x[width..3 * width].iter().all(|x| x.is_nan()), "{simd:?}");
                assert!(
                    log_p[width..3 * width].iter().all(|x| x.is_nan()),
                    "{simd:?}"
                );
                assert!(
                    x[3 * width + 2].is_nan() && log_p[3 * width + 2].is_nan(),
                    "{simd:?}"
                );
            }
        }
    }
}
