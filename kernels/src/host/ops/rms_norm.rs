//! Root-mean-square normalization: `out[r][i] = x[r][i] * weight[i] / sqrt(mean_i(x[r][i]^2) + eps)`.
//!
//! The per-head form (QK-norm) is the same operation with a row a head: `[rows * n_head][head_dim]`.
//! Bound by memory; a row is read twice, the second time from cache.

use super::{Simd, rows_of};

/// Normalizes each row of `x`, `[rows][width]`, into `out` of the same shape; `weight` is `[width]`.
///
/// # Panics
/// When `weight` is empty, its length does not divide that of `x`, or `out` differs in length from `x`.
pub fn rms_norm(simd: Simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rows_of(x.len(), weight.len());
    assert_eq!(x.len(), out.len(), "rms_norm: lengths differ");
    for (row, out) in x
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
        norm_row(simd, row, weight, eps, out);
    }
}

/// [`rms_norm`] with the result in the place of `x`.
///
/// # Panics
/// When `weight` is empty or its length does not divide that of `x`.
pub fn rms_norm_in_place(simd: Simd, x: &mut [f32], weight: &[f32], eps: f32) {
    rows_of(x.len(), weight.len());
    for row in x.chunks_exact_mut(weight.len()) {
        norm_row_in_place(simd, row, weight, eps);
    }
}

/// `x += delta`, then `out = rms_norm(x)`: the residual addition and the norm that follows it, in one go over
/// each row. `x`, `delta` and `out` are `[rows][width]`, `weight` is `[width]`.
///
/// # Panics
/// When `weight` is empty, its length does not divide that of `x`, or the other lengths differ from that of `x`.
pub fn add_rms_norm(
    simd: Simd,
    x: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    rows_of(x.len(), width);
    assert_eq!(x.len(), delta.len(), "add_rms_norm: lengths differ");
    assert_eq!(x.len(), out.len(), "add_rms_norm: lengths differ");
    let rows = x
        .chunks_exact_mut(width)
        .zip(delta.chunks_exact(width))
        .zip(out.chunks_exact_mut(width));
    for ((x, delta), out) in rows {
        super::add(simd, x, delta);
        norm_row(simd, x, weight, eps, out);
    }
}

fn norm_row(_simd: Simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = row_scale(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

fn norm_row_in_place(_simd: Simd, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = row_scale(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x *= scale * w;
    }
}

fn row_scale(x: &[f32], eps: f32) -> f32 {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}
