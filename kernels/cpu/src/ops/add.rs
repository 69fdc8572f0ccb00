//! Residual and bias additions, plain and with a factor. Bound by memory.

use super::act::sigmoid;
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

/// `x += scale * y`, element by element; both of the same shape. A scale of 1
/// gives the bits of [`add`].
///
/// # Panics
/// When the lengths differ.
pub fn add_scaled(simd: Simd, x: &mut [f32], y: &[f32], scale: f32) {
    assert_eq!(x.len(), y.len(), "add_scaled: lengths differ");
    add_scaled_row(simd, x, y, scale);
}

/// `x[t] += weight * y[t]`, element by element of rows as wide as `weight`.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn add_weighted(x: &mut [f32], y: &[f32], weight: &[f32]) {
    assert_eq!(x.len(), y.len(), "add_weighted: lengths differ");
    rows_of(x.len(), weight.len());
    let width = weight.len();
    for (x, y) in x.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
        let added = y.iter().zip(weight).map(|(y, weight)| weight * y);
        x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
    }
}

/// `x[t] += sigmoid(gate[t]) * y[t]` for rows of `width` elements; `gate` has one element a row.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn add_gated(simd: Simd, x: &mut [f32], y: &[f32], gate: &[f32], width: usize) {
    assert_eq!(x.len(), y.len(), "add_gated: lengths differ");
    assert_eq!(
        rows_of(x.len(), width),
        gate.len(),
        "add_gated: not one gate a row"
    );
    let rows = x.chunks_exact_mut(width).zip(y.chunks_exact(width));
    for ((x, y), gate) in rows.zip(gate) {
        add_scaled_row(simd, x, y, sigmoid(*gate));
    }
}

/// `out[t] = sum_s weights[t][s] * y[t * n_used + s]`, in the order of `s`; `weights` is
/// `[rows][n_used]` and `out` `[rows][width]`.
///
/// # Panics
/// When the shapes do not fit each other, or `n_used` is zero.
pub fn combine(
    simd: Simd,
    y: &[f32],
    weights: &[f32],
    n_used: usize,
    width: usize,
    out: &mut [f32],
) {
    let rows = rows_of(out.len(), width);
    assert!(
        n_used > 0 && weights.len() == rows * n_used && y.len() == rows * n_used * width,
        "combine: {} weights and {} elements are not {n_used} for each of {rows} rows",
        weights.len(),
        y.len()
    );
    let routed = y.chunks_exact(n_used * width);
    for ((out, y), weights) in out
        .chunks_exact_mut(width)
        .zip(routed)
        .zip(weights.chunks_exact(n_used))
    {
        out.fill(0.0);
        for (y, weight) in y.chunks_exact(width).zip(weights) {
            add_scaled_row(simd, out, y, *weight);
        }
    }
}

/// `out[t][r] = sum_k x[t][k] * weight[k][r]`, in the order of `k`; `weight` has rows of `width`,
/// one for each element of a row of `x`, and `out` is `[rows][width]`.
///
/// # Panics
/// When the shapes do not fit each other, or a row has no element.
pub fn mat_mul_transposed(simd: Simd, x: &[f32], weight: &[f32], width: usize, out: &mut [f32]) {
    let (rows, n_in) = (rows_of(out.len(), width), rows_of(weight.len(), width));
    assert_eq!(
        rows * n_in,
        x.len(),
        "mat_mul_transposed: not {n_in} elements a row"
    );
    out.fill(0.0);
    // A row of the matrix is read once for all rows.
    for (k, weights) in weight.chunks_exact(width).enumerate() {
        let inputs = x.iter().skip(k).step_by(n_in);
        for (out, x) in out.chunks_exact_mut(width).zip(inputs) {
            add_scaled_row(simd, out, weights, *x);
        }
    }
}

simd_fn! {
    fn add_scaled_row(x: &mut [f32], y: &[f32], scale: f32);
    simd add_scaled_lanes;
    scalar add_scaled_scalar;
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

// Rounded twice, as the plain addition is where the scale is 1.
#[inline(always)]
fn add_scaled_lanes<S: Lanes>(s: S, x: &mut [f32], y: &[f32], scale: f32) {
    let scales = s.splat(scale);
    let mut xs = x.chunks_exact_mut(S::N);
    let mut ys = y.chunks_exact(S::N);
    for (x, y) in xs.by_ref().zip(ys.by_ref()) {
        s.store(x, s.add(s.load(x), s.mul(scales, s.load(y))));
    }
    add_scaled_scalar(xs.into_remainder(), ys.remainder(), scale);
}

fn add_scaled_scalar(x: &mut [f32], y: &[f32], scale: f32) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += scale * y;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    #[test]
    fn sums_with_factors_agree_with_f64() {
        let mut source = Random::new("add_scaled");
        for width in [1, 7, 16, 33, 129] {
            let (rows, n_used) = (1 + source.below(4), 1 + source.below(5));
            let (x, y) = (source.normal(rows * width), source.normal(rows * width));
            let gate = source.normal(rows);
            let routed = source.normal(rows * n_used * width);
            let weights = source.normal(rows * n_used);
            let expected = |factor: &dyn Fn(usize) -> f64| -> Vec<f64> {
                (0..rows * width)
                    .map(|i| f64::from(x[i]) + factor(i / width) * f64::from(y[i]))
                    .collect()
            };
            let scaled = expected(&|_| f64::from(0.22f32));
            let factors = source.normal(width);
            let weighted: Vec<f64> = (0..rows * width)
                .map(|i| f64::from(x[i]) + f64::from(factors[i % width]) * f64::from(y[i]))
                .collect();
            let mut out = x.clone();
            add_weighted(&mut out, &y, &factors);
            assert_close(&out, &weighted, 1e-6, &format!("weighted {rows}x{width}"));
            let gated = expected(&|t| 1.0 / (1.0 + (-f64::from(gate[t])).exp()));
            let combined: Vec<f64> = (0..rows * width)
                .map(|i| {
                    let (t, c) = (i / width, i % width);
                    (t * n_used..(t + 1) * n_used)
                        .map(|r| f64::from(weights[r]) * f64::from(routed[r * width + c]))
                        .sum()
                })
                .collect();
            for simd in Simd::available() {
                let what = format!("{simd:?} {rows}x{width}");
                let mut out = x.clone();
                add_scaled(simd, &mut out, &y, 0.22);
                assert_close(&out, &scaled, 1e-6, &what);
                let mut out = x.clone();
                add_gated(simd, &mut out, &y, &gate, width);
                assert_close(&out, &gated, 1e-6, &what);
                let mut out = vec![f32::NAN; rows * width];
                combine(simd, &routed, &weights, n_used, width, &mut out);
                assert_close(&out, &combined, 3e-6, &what);
                let (mut plain, mut by_one) = (x.clone(), x.clone());
                add(simd, &mut plain, &y);
                add_scaled(simd, &mut by_one, &y, 1.0);
                assert_eq!(plain, by_one, "{what}");
            }
        }
    }

    #[test]
    fn equals_the_scalar_sum() {
        let mut source = Random::new("add");
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
