//! Softmax and log-softmax of rows, shifted by the row's maximum so that no finite input overflows.
//!
//! Minus infinity is a legal input (a token that was ruled out) and gets probability 0; a row of nothing
//! else, and a row with NaN or plus infinity, comes out as NaN.

use super::{Simd, rows_of};

/// Replaces each row of `x`, `[rows][width]`, by its softmax.
///
/// # Panics
/// When `width` is zero or does not divide the length of `x`.
pub fn softmax(_simd: Simd, x: &mut [f32], width: usize) {
    rows_of(x.len(), width);
    for row in x.chunks_exact_mut(width) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0f64;
        for x in row.iter_mut() {
            *x = (*x - max).exp();
            sum += f64::from(*x);
        }
        let scale = reciprocal(sum);
        for x in row {
            *x *= scale;
        }
    }
}

/// Replaces each row of `x`, `[rows][width]`, by its log-softmax (natural logarithm).
///
/// # Panics
/// When `width` is zero or does not divide the length of `x`.
pub fn log_softmax(_simd: Simd, x: &mut [f32], width: usize) {
    rows_of(x.len(), width);
    for row in x.chunks_exact_mut(width) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from((x - max).exp())).sum();
        let log_sum = logarithm(sum);
        for x in row {
            *x = *x - max - log_sum;
        }
    }
}

fn reciprocal(sum: f64) -> f32 {
    (1.0 / sum) as f32
}

fn logarithm(sum: f64) -> f32 {
    sum.ln() as f32
}
