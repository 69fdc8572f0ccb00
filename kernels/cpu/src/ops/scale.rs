//! Factors and bounds of whole rows. Bound by memory.

use super::exp::tanh;
use super::lanes::{Lanes, simd_fn};
use super::{Simd, rows_of};

/// `x *= factor`.
pub fn scale(simd: Simd, x: &mut [f32], factor: f32) {
    scale_all(simd, x, factor);
}

/// `x = min(max(x, low), high)`; NaN stays NaN.
pub fn clamp(x: &mut [f32], low: f32, high: f32) {
    for x in x {
        let bounded = if *x < low { low } else { *x };
        *x = if bounded > high { high } else { bounded };
    }
}

/// `x = cap * tanh(x / cap)`.
pub fn soft_cap(simd: Simd, x: &mut [f32], cap: f32) {
    soft_cap_all(simd, x, cap);
}

/// `x[t] *= 1 + beta * ln(1 + floor(position / span))` for each row of `x`,
/// `[rows][width]`, and its position.
///
/// # Panics
/// When `width` does not divide the length of `x`, there is not one position a row, or `span` is
/// zero.
pub fn position_scale(
    simd: Simd,
    x: &mut [f32],
    width: usize,
    positions: impl IntoIterator<Item = u32>,
    beta: f32,
    span: u32,
) {
    let rows = rows_of(x.len(), width);
    let mut positions = positions.into_iter();
    for (row, x) in x.chunks_exact_mut(width).enumerate() {
        let Some(position) = positions.next() else {
            panic!("position_scale: {row} positions for {rows} rows");
        };
        let steps = f64::from(position / span);
        scale_all(simd, x, (1.0 + f64::from(beta) * steps.ln_1p()) as f32);
    }
    assert!(
        positions.next().is_none(),
        "position_scale: more positions than {rows} rows"
    );
}

simd_fn! {
    fn scale_all(x: &mut [f32], factor: f32);
    simd scale_lanes;
    scalar scale_scalar;
}

simd_fn! {
    fn soft_cap_all(x: &mut [f32], cap: f32);
    simd soft_cap_lanes;
    scalar soft_cap_scalar;
}

#[inline(always)]
pub(super) fn scale_lanes<S: Lanes>(s: S, x: &mut [f32], factor: f32) {
    let mut xs = x.chunks_exact_mut(S::N);
    for x in xs.by_ref() {
        s.store(x, s.mul(s.load(x), s.splat(factor)));
    }
    scale_scalar(xs.into_remainder(), factor);
}

fn scale_scalar(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

#[inline(always)]
pub(super) fn soft_cap_lanes<S: Lanes>(s: S, x: &mut [f32], cap: f32) {
    let step = |x| s.mul(s.splat(cap), tanh(s, s.div(x, s.splat(cap))));
    let mut xs = x.chunks_exact_mut(S::N);
    for x in xs.by_ref() {
        s.store(x, step(s.load(x)));
    }
    let x = xs.into_remainder();
    if !x.is_empty() {
        s.store_part(x, step(s.load_part(x, 0.0)));
    }
}

pub(super) fn soft_cap_scalar(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    #[test]
    fn scaled_rows_agree_with_f64() {
        let mut source = Random::new("scale");
        for width in [1, 7, 16, 33, 129] {
            let x = source.normal(4 * width);
            let positions = [0, 8191, 8192, 1_000_000];
            let by_position: Vec<f64> = x
                .iter()
                .enumerate()
                .map(|(i, &x)| {
                    let steps = f64::from(positions[i / width] / 8192);
                    f64::from(x) * (1.0 + f64::from(0.1f32) * (1.0 + steps).ln())
                })
                .collect();
            for simd in Simd::available() {
                let mut out = x.clone();
                scale(simd, &mut out, 0.3);
                for (out, x) in out.iter().zip(&x) {
                    assert_eq!(*out, x * 0.3, "{simd:?} {width}");
                }
                let mut out = x.clone();
                position_scale(simd, &mut out, width, positions, 0.1, 8192);
                assert_close(&out, &by_position, 1e-6, &format!("{simd:?} {width}"));
                assert_eq!(out[..2 * width], x[..2 * width], "before the first step");
            }
        }
    }

    #[test]
    fn capped_elements_agree_with_f64_and_stay_below_the_cap() {
        let mut source = Random::new("soft_cap");
        for n in [1, 16, 37, 5000] {
            let mut x = source.normal(n);
            for (i, x) in x.iter_mut().enumerate() {
                *x *= [1e-6, 1e-2, 1.0, 30.0, 1e4][i % 5];
            }
            for cap in [1f32, 30.0, 50.0] {
                let expected: Vec<f64> = x
                    .iter()
                    .map(|&x| f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh())
                    .collect();
                for simd in Simd::available() {
                    let mut out = x.clone();
                    soft_cap(simd, &mut out, cap);
                    for (i, (&out, &expected)) in out.iter().zip(&expected).enumerate() {
                        let error = (f64::from(out) - expected).abs();
                        assert!(
                            error <= 5e-7 * expected.abs(),
                            "{simd:?} cap {cap}: {out} of {}, expected {expected}",
                            x[i]
                        );
                        assert!(out.abs() <= cap, "{simd:?} {out} beyond {cap}");
                    }
                }
            }
        }
        for simd in Simd::available() {
            let mut x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0];
            soft_cap(simd, &mut x, 30.0);
            assert!(x[0].is_nan(), "{simd:?}");
            assert_eq!(x[1..], [30.0, -30.0, 0.0], "{simd:?}");
        }
    }
}
