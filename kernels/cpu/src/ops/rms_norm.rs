//! Root-mean-square normalization: `out[r][i] = x[r][i] * weight[i] /
//! sqrt(mean_i(x[r][i]^2) + eps)`.
//!
//! The per-head form (QK-norm) is the same operation with a row a head:
//! `[rows * n_head][head_dim]`. Bound by memory; a row is read twice, the second time from cache.

use super::lanes::{Lanes, simd_fn};
use super::scale::scale_lanes;
use super::{Simd, rows_of};

/// Normalizes each row of `x`, `[rows][width]`, into `out` of the same shape; `weight` is
/// `[width]`.
///
/// # Panics
/// When `weight` is empty, its length does not divide that of `x`, or `out`
/// differs in length from `x`.
pub fn rms_norm(simd: Simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rms_norm_groups(simd, x, Some(weight), eps, weight.len(), out);
}

/// [`rms_norm`] with the result in the place of `x`.
///
/// # Panics
/// When `weight` is empty or its length does not divide that of `x`.
pub fn rms_norm_in_place(simd: Simd, x: &mut [f32], weight: &[f32], eps: f32) {
    rms_norm_groups_in_place(simd, x, Some(weight), eps, weight.len());
}

/// Normalizes each `group` of consecutive elements of `x` by itself. `weight` has a
/// group's elements, the same for all groups, or those of a row of several groups;
/// without it the factors are 1.
///
/// # Panics
/// When `group` is zero or does not divide the length of `weight`, that of `weight` (without it,
/// `group`) does not divide that of `x`, or `out` differs in length from `x`.
pub fn rms_norm_groups(
    simd: Simd,
    x: &[f32],
    weight: Option<&[f32]>,
    eps: f32,
    group: usize,
    out: &mut [f32],
) {
    let width = checked_width(x.len(), weight, group);
    assert_eq!(x.len(), out.len(), "rms_norm: lengths differ");
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let groups = x.chunks_exact(group).zip(out.chunks_exact_mut(group));
        for (i, (x, out)) in groups.enumerate() {
            norm_row(simd, x, weight.map(|w| &w[i * group..][..group]), eps, out);
        }
    }
}

/// [`rms_norm_groups`] with the result in the place of `x`, bit for bit the same.
///
/// # Panics
/// As [`rms_norm_groups`].
pub fn rms_norm_groups_in_place(
    simd: Simd,
    x: &mut [f32],
    weight: Option<&[f32]>,
    eps: f32,
    group: usize,
) {
    let width = checked_width(x.len(), weight, group);
    for x in x.chunks_exact_mut(width) {
        for (i, x) in x.chunks_exact_mut(group).enumerate() {
            norm_row_in_place(simd, x, weight.map(|w| &w[i * group..][..group]), eps);
        }
    }
}

/// Elements after which the weights begin again.
fn checked_width(len: usize, weight: Option<&[f32]>, group: usize) -> usize {
    let width = weight.map_or(group, <[f32]>::len);
    rows_of(len, width);
    rows_of(width, group);
    width
}

/// `x += delta`, then `out = rms_norm(x)`: the residual addition and the norm that follows it, in
/// one go over each row. `x`, `delta` and `out` are `[rows][width]`, `weight` is `[width]`.
///
/// # Panics
/// When `weight` is empty, its length does not divide that of `x`, or the other
/// lengths differ from that of `x`.
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
        add_norm_row(simd, x, delta, weight, eps, out);
    }
}

simd_fn! {
    fn norm_row(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]);
    simd norm_row_lanes;
    scalar norm_row_scalar;
}

simd_fn! {
    fn norm_row_in_place(x: &mut [f32], weight: Option<&[f32]>, eps: f32);
    simd norm_row_in_place_lanes;
    scalar norm_row_in_place_scalar;
}

simd_fn! {
    fn add_norm_row(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
    simd add_norm_row_lanes;
    scalar add_norm_row_scalar;
}

#[inline(always)]
fn norm_row_lanes<S: Lanes>(s: S, x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let scale = scale_of(sum_squares(s, x), x.len(), eps);
    match weight {
        Some(weight) => apply(s, x, scale, weight, out),
        None => {
            out.copy_from_slice(x);
            scale_lanes(s, out, scale);
        }
    }
}

#[inline(always)]
fn norm_row_in_place_lanes<S: Lanes>(s: S, x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let scale = scale_of(sum_squares(s, x), x.len(), eps);
    let Some(weight) = weight else {
        scale_lanes(s, x, scale);
        return;
    };
    let scales = s.splat(scale);
    let mut xs = x.chunks_exact_mut(S::N);
    let mut ws = weight.chunks_exact(S::N);
    for (x, w) in xs.by_ref().zip(ws.by_ref()) {
        s.store(x, s.mul(s.mul(s.load(x), scales), s.load(w)));
    }
    for (x, w) in xs.into_remainder().iter_mut().zip(ws.remainder()) {
        *x = *x * scale * w;
    }
}

#[inline(always)]
fn add_norm_row_lanes<S: Lanes>(
    s: S,
    x: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let mut xs = x.chunks_exact_mut(S::N);
    let mut deltas = delta.chunks_exact(S::N);
    for (x, delta) in xs.by_ref().zip(deltas.by_ref()) {
        s.store(x, s.add(s.load(x), s.load(delta)));
    }
    for (x, delta) in xs.into_remainder().iter_mut().zip(deltas.remainder()) {
        *x += delta;
    }
    // The row is in the first-level cache now.
    norm_row_lanes(s, x, Some(weight), eps, out);
}

#[inline(always)]
pub(super) fn sum_squares<S: Lanes>(s: S, x: &[f32]) -> f64 {
    // Four sums, so that an addition does not wait for the one before it.
    let mut sums = [s.splat(0.0); 4];
    let mut blocks = x.chunks_exact(4 * S::N);
    for block in blocks.by_ref() {
        for (sum, x) in sums.iter_mut().zip(block.chunks_exact(S::N)) {
            let x = s.load(x);
            *sum = s.fma(x, x, *sum);
        }
    }
    let mut rest = blocks.remainder().chunks_exact(S::N);
    for x in rest.by_ref() {
        let x = s.load(x);
        sums[0] = s.fma(x, x, sums[0]);
    }
    let x = s.load_part(rest.remainder(), 0.0);
    sums[1] = s.fma(x, x, sums[1]);
    f64::from(s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))))
}

#[inline(always)]
fn apply<S: Lanes>(s: S, x: &[f32], scale: f32, weight: &[f32], out: &mut [f32]) {
    let scales = s.splat(scale);
    let mut outs = out.chunks_exact_mut(S::N);
    let mut xs = x.chunks_exact(S::N);
    let mut ws = weight.chunks_exact(S::N);
    for ((out, x), w) in outs.by_ref().zip(xs.by_ref()).zip(ws.by_ref()) {
        s.store(out, s.mul(s.mul(s.load(x), scales), s.load(w)));
    }
    for ((out, x), w) in outs
        .into_remainder()
        .iter_mut()
        .zip(xs.remainder())
        .zip(ws.remainder())
    {
        *out = x * scale * w;
    }
}

fn norm_row_scalar(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    out.copy_from_slice(x);
    norm_row_in_place_scalar(out, weight, eps);
}

fn norm_row_in_place_scalar(x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let scale = scale_of(sum_squares_scalar(x), x.len(), eps);
    x.iter_mut().for_each(|x| *x *= scale);
    if let Some(weight) = weight {
        x.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
    }
}

fn add_norm_row_scalar(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    for (x, delta) in x.iter_mut().zip(delta) {
        *x += delta;
    }
    norm_row_scalar(x, Some(weight), eps, out);
}

pub(super) fn sum_squares_scalar(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

#[inline(always)]
fn scale_of(squares: f64, width: usize, eps: f32) -> f32 {
    (1.0 / (squares / width as f64 + f64::from(eps)).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    fn reference(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
        let mut out = Vec::new();
        for row in x.chunks(weight.len()) {
            let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            out.extend(
                row.iter()
                    .zip(weight)
                    .map(|(&x, &w)| f64::from(x) * scale * f64::from(w)),
            );
        }
        out
    }

    #[test]
    fn all_forms_agree_with_f64() {
        let mut source = Random::new("rms_norm");
        for width in [1, 5, 16, 31, 64, 65, 127, 128, 500, 2048] {
            let rows = 1 + source.below(4);
            let (x, delta) = (source.normal(rows * width), source.normal(rows * width));
            let weight = source.normal(width);
            let eps = 1e-5;
            let expected = reference(&x, &weight, eps);
            for simd in Simd::available() {
                let mut out = vec![f32::NAN; x.len()];
                rms_norm(simd, &x, &weight, eps, &mut out);
                assert_close(
                    &out,
                    &expected,
                    1e-6,
                    &format!("{simd:?} rms_norm {rows}x{width}"),
                );
                let mut in_place = x.clone();
                rms_norm_in_place(simd, &mut in_place, &weight, eps);
                assert_eq!(in_place, out, "{simd:?} in place {rows}x{width}");
                let mut sum = x.clone();
                let mut fused = vec![f32::NAN; x.len()];
                add_rms_norm(simd, &mut sum, &delta, &weight, eps, &mut fused);
                let mut plain = x.clone();
                super::super::add(simd, &mut plain, &delta);
                assert_eq!(sum, plain, "{simd:?} residual {rows}x{width}");
                rms_norm(simd, &plain, &weight, eps, &mut out);
                assert_eq!(fused, out, "{simd:?} fused {rows}x{width}");
            }
        }
    }

    #[test]
    fn groups_are_normed_by_themselves() {
        let mut source = Random::new("rms_norm groups");
        for group in [1, 5, 16, 64, 128, 200] {
            let (rows, n_group) = (1 + source.below(3), 1 + source.below(5));
            let x = source.normal(rows * n_group * group);
            let weights = source.normal(n_group * group);
            for weight in [None, Some(&weights[..group]), Some(&weights)] {
                let ones = vec![1.0; group];
                let weight_of = |g: usize| match weight {
                    None => &ones[..],
                    Some(w) if w.len() == group => w,
                    Some(w) => &w[g * group..][..group],
                };
                let expected: Vec<f64> = x
                    .chunks(group)
                    .enumerate()
                    .flat_map(|(i, x)| reference(x, weight_of(i % n_group), 1e-6))
                    .collect();
                for simd in Simd::available() {
                    let what = format!("{simd:?} {rows}x{n_group}x{group}");
                    let mut out = vec![f32::NAN; x.len()];
                    rms_norm_groups(simd, &x, weight, 1e-6, group, &mut out);
                    assert_close(&out, &expected, 1e-6, &what);
                    let mut in_place = x.clone();
                    rms_norm_groups_in_place(simd, &mut in_place, weight, 1e-6, group);
                    assert_eq!(in_place, out, "{what}");
                }
            }
        }
    }

    #[test]
    fn nan_spoils_its_row_only() {
        for simd in Simd::available() {
            let mut x = vec![1.0; 3 * 40];
            x[40 + 39] = f32::NAN;
            let mut out = vec![7.0; 3 * 40];
            rms_norm(simd, &x, &[1.0; 40], 1e-6, &mut out);
            assert!(out[40..80].iter().all(|x| x.is_nan()), "{simd:?}");
            assert!(
                out[..40]
                    .iter()
                    .chain(&out[80..])
                    .all(|&x| (x - 1.0).abs() < 1e-5),
                "{simd:?}"
            );
        }
    }
}
