//! Residual and bias additions: `x[i] += y[i]`, and `x[row][i] += bias[i]`. Bound by memory.

use super::lanes::{Lanes, simd_fn};
use super::{Simd, rows_of};

/// `x += y`, element by element; both of the same shape.
///
/// # Panics
/// When the lengths differ.
pub fn add(simd: Simd, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "add: lengths differ");
    add_row(simd, x, y);
}

/// Adds `bias`, `[width]`, to each row of `x`, `[rows][width]`.
///
/// # Panics
/// When `bias` is empty or its length does not divide that of `x`.
pub fn add_bias(simd: Simd, x: &mut [f32], bias: &[f32]) {
    rows_of(x.len(), bias.len());
    for row in x.chunks_exact_mut(bias.len()) {
        add_row(simd, row, bias);
    }
}

simd_fn! {
    fn add_row(x: &mut [f32], y: &[f32]);
    simd add_lanes;
    scalar add_scalar;
}

#[inline(always)]
fn add_lanes<S: Lanes>(s: S, x: &mut [f32], y: &[f32]) {
    let mut xs = x.chunks_exact_mut(S::N);
    let mut ys = y.chunks_exact(S::N);
    for (x, y) in xs.by_ref().zip(ys.by_ref()) {
        s.store(x, s.add(s.load(x), s.load(y)));
    }
    add_scalar(xs.into_remainder(), ys.remainder());
}

fn add_scalar(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ops::testing::Source;

    #[test]
    fn equals_the_scalar_sum() {
        let mut source = Source::new("add");
        for width in [1, 7, 16, 33, 64, 129] {
            let x = source.normal(3 * width);
            let (y, bias) = (source.normal(3 * width), source.normal(width));
            for simd in Simd::available() {
                let (mut sum, mut biased) = (x.clone(), x.clone());
                add(simd, &mut sum, &y);
                add_bias(simd, &mut biased, &bias);
                for i in 0..3 * width {
                    assert_eq!(sum[i], x[i] + y[i], "{simd:?} {width} {i}");
                    assert_eq!(biased[i], x[i] + bias[i % width], "{simd:?} {width} {i}");
                }
            }
        }
    }
}
