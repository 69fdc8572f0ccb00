//! The exponential of a vector, for softmax and SiLU, and the hyperbolic
//! tangent that is made of it.
//!
//! `exp(x) = 2^n exp(r)`, `n = round(x / ln 2)`, `|r| <= ln 2 / 2`;
//! `exp(r) = 1 + r + r^2 g(r)` with a polynomial g of degree 4 fitted for the least relative
//! error of the whole (3.2e-9 before rounding).
//!
//! Relative error at most 1e-7 (tested; 8.1e-8 found) where the result is a normal f32, gradual
//! underflow below, 0 for minus infinity, infinity from 88.73 up, NaN for NaN.

use super::lanes::Lanes;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has zeros at its end, so that `n * LN_2_HIGH` is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// g, from the highest power down.
const G: [f32; 5] = [
    1.381_388e-3,
    8.369_063e-3,
    4.166_842_3e-2,
    1.666_651_8e-1,
    0.499_999_94,
];
/// Beyond these the result is infinite or zero anyway.
const MOST: f32 = 100.0;
const LEAST: f32 = -110.0;

/// `exp(x)` in every lane.
#[inline(always)]
pub(super) fn exp<S: Lanes>(s: S, x: S::V) -> S::V {
    // The bound comes first: min and max return their second operand for NaN.
    let (n, tail) = parts(s, s.max(s.splat(LEAST), s.min(s.splat(MOST), x)));
    s.scale_exp2(s.add(tail, s.splat(1.0)), n)
}

/// `tanh(x)` in every lane, by `t / (t + 2)` with `t = exp(2 x) - 1`, which keeps the
/// digits of small arguments.
///
/// Relative error at most 5e-7 (tested, as `soft_cap`); NaN for NaN.
#[inline(always)]
pub(super) fn tanh<S: Lanes>(s: S, x: S::V) -> S::V {
    // Beyond this it is 1, and the quotient must not become one of infinities.
    let x = s.max(s.splat(-20.0), s.min(s.splat(20.0), x));
    let (n, tail) = parts(s, s.add(x, x));
    let one = s.splat(1.0);
    let t = s.add(s.scale_exp2(tail, n), s.sub(s.scale_exp2(one, n), one));
    s.div(t, s.add(t, s.splat(2.0)))
}

/// `n` and `exp(r) - 1`.
#[inline(always)]
fn parts<S: Lanes>(s: S, x: S::V) -> (S::V, S::V) {
    let n = s.round(s.mul(x, s.splat(LOG2_E)));
    let r = s.fma(n, s.splat(-LN_2_HIGH), x);
    let r = s.fma(n, s.splat(-LN_2_LOW), r);
    let mut g = s.splat(G[0]);
    for c in &G[1..] {
        g = s.fma(g, r, s.splat(*c));
    }
    (n, s.fma(s.mul(r, r), g, r))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Simd;
    use crate::ops::lanes::simd_fn;

    simd_fn! {
        fn exp_all(x: &[f32], out: &mut [f32]);
        simd exp_lanes;
        scalar exp_scalar;
    }

    #[inline(always)]
    fn exp_lanes<S: Lanes>(s: S, x: &[f32], out: &mut [f32]) {
        for (x, out) in x.chunks(S::N).zip(out.chunks_mut(S::N)) {
            s.store_part(out, exp(s, s.load_part(x, 0.0)));
        }
    }

    fn exp_scalar(x: &[f32], out: &mut [f32]) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = x.exp());
    }

    #[test]
    fn close_to_f64_over_the_whole_range() {
        // Every 1/4096 from underflow to overflow, and every step near zero.
        let mut x: Vec<f32> = (-110 * 4096..90 * 4096)
            .map(|i| i as f32 / 4096.0 + 1e-5)
            .collect();
        x.extend((0..4096).map(|i| i as f32 * 1e-7 - 2e-4));
        for simd in Simd::available() {
            let mut out = vec![f32::NAN; x.len()];
            exp_all(simd, &x, &mut out);
            let mut worst = 0f64;
            for (&x, &y) in x.iter().zip(&out) {
                let exact = f64::from(x).exp();
                if exact > f64::from(f32::MAX) {
                    assert!(
                        y == f32::INFINITY || y == f32::MAX,
                        "{simd:?}: exp({x}) = {y}"
                    );
                } else if exact >= f64::from(f32::MIN_POSITIVE) {
                    worst = worst.max((f64::from(y) - exact).abs() / exact);
                } else {
                    assert!(
                        (f64::from(y) - exact).abs() <= 2e-45,
                        "{simd:?}: exp({x}) = {y:e}, not {exact:e}"
                    );
                }
            }
            println!("{simd:?}: largest relative error {worst:.3e}");
            assert!(worst <= 1e-7, "{simd:?}: {worst:e}");
        }
    }

    #[test]
    fn special_values() {
        let x = [
            f32::NEG_INFINITY,
            f32::INFINITY,
            f32::NAN,
            0.0,
            -0.0,
            1e30,
            -1e30,
        ];
        for simd in Simd::available() {
            let mut out = [7f32; 7];
            exp_all(simd, &x, &mut out);
            assert_eq!(out[..2], [0.0, f32::INFINITY], "{simd:?}");
            assert!(out[2].is_nan(), "{simd:?}");
            assert_eq!(out[3..], [1.0, 1.0, f32::INFINITY, 0.0], "{simd:?}");
        }
    }
}
