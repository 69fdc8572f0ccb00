//! Residual and bias additions: `x[i] += y[i]`, and `x[row][i] += bias[i]`. Bound by memory.

use super::{Simd, rows_of};

/// `x += y`, element by element; both of the same shape.
///
/// # Panics
/// When the lengths differ.
pub fn add(_simd: Simd, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "add: lengths differ");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Adds `bias`, `[width]`, to each row of `x`, `[rows][width]`.
///
/// # Panics
/// When `bias` is empty or its length does not divide that of `x`.
pub fn add_bias(simd: Simd, x: &mut [f32], bias: &[f32]) {
    rows_of(x.len(), bias.len());
    for row in x.chunks_exact_mut(bias.len()) {
        add(simd, row, bias);
    }
}
