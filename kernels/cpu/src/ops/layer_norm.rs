//! Layer normalization (Ba et al. 2016): `out[r][i] = (x[r][i] - mean_i(x[r])) / sqrt(var_i(x[r]) +
//! eps) * weight[i] + bias[i]`.
//!
//! Bound by memory; a row is read several times, all but the first from cache. The variance is that
//! of the differences from the mean, not a difference of two large sums. The mean of a row that
//! lies far from 0 is rounded by more than the deviations may be worth: the mean of the
//! differences, which is what rounding left, is taken off too.

use super::lanes::{Lanes, simd_fn};
use super::rms_norm::{sum_squares, sum_squares_scalar};
use super::{Simd, rows_of};

/// Normalizes each `group` of consecutive elements of `x` by itself, in place. `weight`
/// has a group's elements, the same for all groups, or those of a row of several groups;
/// `bias` as many, or it is none.
///
/// # Panics
/// When `group` is zero or does not divide the length of `weight`, that does not divide the length
/// of `x`, or `bias` has another length.
pub fn layer_norm_in_place(
    simd: Simd,
    x: &mut [f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f32,
    group: usize,
) {
    let width = weight.len();
    rows_of(x.len(), width);
    rows_of(width, group);
    if let Some(bias) = bias {
        assert_eq!(bias.len(), width, "layer_norm: weight and bias differ");
    }
    for x in x.chunks_exact_mut(width) {
        for (i, x) in x.chunks_exact_mut(group).enumerate() {
            let part = i * group..(i + 1) * group;
            let bias = bias.map(|b| &b[part.clone()]);
            norm_row(simd, x, &weight[part], bias, eps);
        }
    }
}

simd_fn! {
    fn norm_row(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32);
    simd norm_row_lanes;
    scalar norm_row_scalar;
}

#[inline(always)]
fn norm_row_lanes<S: Lanes>(s: S, x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) {
    let n = x.len();
    for _ in 0..2 {
        let mean = (sum(s, x) / n as f64) as f32;
        let means = s.splat(mean);
        let mut xs = x.chunks_exact_mut(S::N);
        for x in xs.by_ref() {
            s.store(x, s.sub(s.load(x), means));
        }
        xs.into_remainder().iter_mut().for_each(|x| *x -= mean);
    }
    let scale = (1.0 / (sum_squares(s, x) / n as f64 + f64::from(eps)).sqrt()) as f32;
    let scales = s.splat(scale);
    let mut xs = x.chunks_exact_mut(S::N);
    let mut weights = weight.chunks_exact(S::N);
    for (x, w) in xs.by_ref().zip(weights.by_ref()) {
        s.store(x, s.mul(s.mul(s.load(x), scales), s.load(w)));
    }
    let rest = xs.into_remainder().iter_mut().zip(weights.remainder());
    rest.for_each(|(x, w)| *x = *x * scale * w);
    if let Some(bias) = bias {
        let mut xs = x.chunks_exact_mut(S::N);
        let mut biases = bias.chunks_exact(S::N);
        for (x, b) in xs.by_ref().zip(biases.by_ref()) {
            s.store(x, s.add(s.load(x), s.load(b)));
        }
        let rest = xs.into_remainder().iter_mut().zip(biases.remainder());
        rest.for_each(|(x, b)| *x += b);
    }
}

#[inline(always)]
fn sum<S: Lanes>(s: S, x: &[f32]) -> f64 {
    let mut sums = [s.splat(0.0); 4];
    let mut blocks = x.chunks_exact(4 * S::N);
    for block in blocks.by_ref() {
        for (sum, x) in sums.iter_mut().zip(block.chunks_exact(S::N)) {
            *sum = s.add(s.load(x), *sum);
        }
    }
    let mut rest = blocks.remainder().chunks_exact(S::N);
    for x in rest.by_ref() {
        sums[0] = s.add(s.load(x), sums[0]);
    }
    sums[1] = s.add(s.load_part(rest.remainder(), 0.0), sums[1]);
    f64::from(s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))))
}

fn norm_row_scalar(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) {
    let n = x.len() as f64;
    for _ in 0..2 {
        let mean = (x.iter().map(|&x| f64::from(x)).sum::<f64>() / n) as f32;
        x.iter_mut().for_each(|x| *x -= mean);
    }
    let scale = (1.0 / (sum_squares_scalar(x) / n + f64::from(eps)).sqrt()) as f32;
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
    if let Some(bias) = bias {
        x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    fn reference(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = x
            .iter()
            .map(|&x| (f64::from(x) - mean).powi(2))
            .sum::<f64>()
            / n;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        let factors = weight.iter().zip(bias);
        x.iter()
            .zip(factors)
            .map(|(&x, (&w, &b))| (f64::from(x) - mean) * scale * f64::from(w) + f64::from(b))
            .collect()
    }

    #[test]
    fn rows_and_groups_agree_with_f64() {
        let mut source = Random::new("layer_norm");
        for group in [2, 5, 16, 31, 64, 65, 127, 128, 500, 2048] {
            let (rows, n_group) = (1 + source.below(3), 1 + source.below(4));
            // Far from 0, where a difference of sums would have lost its digits.
            let x: Vec<f32> = source
                .normal(rows * n_group * group)
                .into_iter()
                .map(|x| x + 30.0)
                .collect();
            let (weights, biases) = (
                source.normal(n_group * group),
                source.normal(n_group * group),
            );
            for (width, bias) in [(group, None), (n_group * group, Some(&biases[..]))] {
                let zeros = vec![0.0; width];
                let (weight, b) = (&weights[..width], bias.unwrap_or(&zeros));
                let expected: Vec<f64> = x
                    .chunks(group)
                    .enumerate()
                    .flat_map(|(i, x)| {
                        let at = i * group % width;
                        reference(x, &weight[at..at + group], &b[at..at + group], 1e-5)
                    })
                    .collect();
                for simd in Simd::available() {
                    let mut out = x.clone();
                    layer_norm_in_place(simd, &mut out, weight, bias, 1e-5, group);
                    let what = format!("{simd:?} {rows}x{n_group}x{group}");
                    assert_close(&out, &expected, 1e-5, &what);
                }
            }
        }
    }

    #[test]
    fn neighbours_far_from_zero_keep_their_difference() {
        // Their mean is no f32: rounded, it is one of the two.
        let x = [30.0_f32, 30.0_f32.next_up()];
        let expected = reference(&x, &[1.0; 2], &[0.0; 2], 1e-5);
        assert!(expected[1] > 2e-4);
        for simd in Simd::available() {
            let mut out = x;
            layer_norm_in_place(simd, &mut out, &[1.0; 2], None, 1e-5, 2);
            assert_close(&out, &expected, 1e-6, &format!("{simd:?}"));
        }
    }

    #[test]
    fn nan_spoils_its_row_only() {
        for simd in Simd::available() {
            let mut x: Vec<f32> = (0..3 * 40).map(|i| (i % 7) as f32).collect();
            x[40 + 39] = f32::NAN;
            layer_norm_in_place(simd, &mut x, &[1.0; 40], Some(&[0.5; 40]), 1e-6, 40);
            assert!(x[40..80].iter().all(|x| x.is_nan()), "{simd:?}");
            let others = x[..40].iter().chain(&x[80..]);
            assert!(others.into_iter().all(|x| x.is_finite()), "{simd:?}");
        }
    }
}
