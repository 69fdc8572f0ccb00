//! How likely the tokens of a row are, each as a quotient to the likeliest one at a temperature:
//! what a draw sums over a whole vocabulary.

use super::Simd;
use super::exp::exp;
use super::lanes::{Lanes, simd_fn};

/// Elements whose quotients are summed in f32 before f64 takes over.
const BLOCK: usize = 256;

/// The sum of `exp((x - best) * scale)` over logits, none of which is above `best`: to 3e-6 of the
/// exact sum. Minus infinity adds nothing. `scale` is one divided by the temperature, between
/// 1e-30 and 1e30.
///
/// # Panics
/// When `scale` is out of its range.
pub fn likelihood_sum(simd: Simd, x: &[f32], best: f32, scale: f32) -> f64 {
    check(scale);
    x.chunks(BLOCK)
        .map(|block| sum_of(simd, block, best, scale))
        .sum()
}

/// Writes `exp((x - best) * scale)` of each logit to its place in `out`; see [`likelihood_sum`].
///
/// # Panics
/// When `scale` is out of its range, or `out` has another length.
pub fn likelihoods(simd: Simd, x: &[f32], best: f32, scale: f32, out: &mut [f32]) {
    check(scale);
    assert_eq!(x.len(), out.len(), "a place for each logit");
    fill(simd, x, best, scale, out);
}

fn check(scale: f32) {
    assert!((1e-30..=1e30).contains(&scale), "a scale of {scale}");
}

simd_fn! {
    fn sum_of(x: &[f32], best: f32, scale: f32) -> f64;
    simd sum_lanes;
    scalar sum_scalar;
}

simd_fn! {
    fn fill(x: &[f32], best: f32, scale: f32, out: &mut [f32]);
    simd fill_lanes;
    scalar fill_scalar;
}

#[inline(always)]
fn sum_lanes<S: Lanes>(s: S, x: &[f32], best: f32, scale: f32) -> f64 {
    let (best, scale) = (s.splat(best), s.splat(scale));
    let mut sum = s.splat(0.0);
    let (whole, rest) = x.split_at(x.len() - x.len() % S::N);
    for x in whole.chunks_exact(S::N) {
        sum = s.add(sum, exp(s, s.mul(s.sub(s.load(x), best), scale)));
    }
    if !rest.is_empty() {
        let x = s.load_part(rest, f32::NEG_INFINITY);
        sum = s.add(sum, exp(s, s.mul(s.sub(x, best), scale)));
    }
    f64::from(s.sum(sum))
}

#[inline(always)]
fn fill_lanes<S: Lanes>(s: S, x: &[f32], best: f32, scale: f32, out: &mut [f32]) {
    let (best, scale) = (s.splat(best), s.splat(scale));
    let whole = x.len() - x.len() % S::N;
    let (x, rest) = x.split_at(whole);
    let (out, rest_out) = out.split_at_mut(whole);
    for (x, out) in x.chunks_exact(S::N).zip(out.chunks_exact_mut(S::N)) {
        s.store(out, exp(s, s.mul(s.sub(s.load(x), best), scale)));
    }
    if !rest.is_empty() {
        let x = s.load_part(rest, f32::NEG_INFINITY);
        s.store_part(rest_out, exp(s, s.mul(s.sub(x, best), scale)));
    }
}

fn sum_scalar(x: &[f32], best: f32, scale: f32) -> f64 {
    let each = x.iter().map(|x| ((x - best) * scale).exp());
    each.map(f64::from).sum()
}

fn fill_scalar(x: &[f32], best: f32, scale: f32, out: &mut [f32]) {
    for (x, out) in x.iter().zip(out) {
        *out = ((x - best) * scale).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::Random;

    #[test]
    fn close_to_f64() {
        let mut source = Random::new("likelihoods");
        for (width, scale) in [
            (1, 1.0),
            (77, 1.25),
            (1024, 0.5),
            (5001, 1e-30),
            (5001, 3.0),
        ] {
            let mut x: Vec<f32> = source.normal(width).iter().map(|x| x * 4.0 - 7.0).collect();
            let best = x.iter().copied().fold(f32::MIN, f32::max);
            if width > 8 {
                (x[3], x[5]) = (f32::NEG_INFINITY, f32::MIN);
            }
            let exact: Vec<f64> = x
                .iter()
                .map(|x| ((f64::from(*x) - f64::from(best)) * f64::from(scale)).exp())
                .collect();
            let sum: f64 = exact.iter().sum();
            for simd in Simd::available() {
                let found = likelihood_sum(simd, &x, best, scale);
                assert!(
                    (found - sum).abs() <= 3e-6 * sum,
                    "{simd:?} {width}: {found} {sum}"
                );
                let mut each = vec![f32::NAN; width];
                likelihoods(simd, &x, best, scale, &mut each);
                for (found, exact) in each.iter().zip(&exact) {
                    // The difference is rounded before it is scaled.
                    let near = 1e-5 * exact + 1e-37;
                    assert!(
                        (f64::from(*found) - exact).abs() <= near,
                        "{simd:?}: {found} {exact}"
                    );
                }
            }
        }
    }
}
