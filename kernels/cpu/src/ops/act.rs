//! Functions of one element, and gated units: `gate[i] = act(gate[i]) * up[i]`. Bound by memory, or
//! by the exponential where the data is in cache.

use rocmforge_ops::Act;

use super::exp::exp;
use super::lanes::{Lanes, simd_fn};
use super::{Simd, rows_of, scale};

/// `gate = act(gate) * up`, element by element; both of the same shape.
/// [`Act::SwigluClamped`] has its own formula of both.
///
/// With [`Act::Silu`] a gate of minus infinity gives NaN.
///
/// # Panics
/// When the lengths differ.
pub fn gate(simd: Simd, act: Act, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate: lengths differ");
    gate_all(simd, act, gate, up);
}

/// `x = act(x)`, element by element.
///
/// # Panics
/// With [`Act::SwigluClamped`], which is a function of two elements.
pub fn activate(simd: Simd, act: Act, x: &mut [f32]) {
    match act {
        Act::Identity => {}
        Act::SwigluClamped { .. } => panic!("activate: {act:?} is for gates only"),
        _ => activate_all(simd, act, x),
    }
}

/// `x[h] *= act(gate[h])` for heads of `head_dim` consecutive elements of `x`,
/// `[rows][n_head][head_dim]`; `gate` is `[rows][n_head]`.
///
/// # Panics
/// When there is not one gate a head, or with [`Act::SwigluClamped`].
pub fn gate_heads(simd: Simd, act: Act, x: &mut [f32], gate: &[f32], head_dim: usize) {
    assert_eq!(
        rows_of(x.len(), head_dim),
        gate.len(),
        "gate_heads: not one gate a head"
    );
    for (x, gate) in x.chunks_exact_mut(head_dim).zip(gate) {
        let mut factor = [*gate];
        activate(simd, act, &mut factor);
        scale(simd, x, factor[0]);
    }
}

/// [`gate`] with [`Act::Silu`].
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(simd: Simd, gate: &mut [f32], up: &[f32]) {
    self::gate(simd, Act::Silu, gate, up);
}

simd_fn! {
    fn gate_all(act: Act, gate: &mut [f32], up: &[f32]);
    simd gate_lanes;
    scalar gate_scalar;
}

simd_fn! {
    fn activate_all(act: Act, x: &mut [f32]);
    simd activate_lanes;
    scalar activate_scalar;
}

#[inline(always)]
fn gate_lanes<S: Lanes>(s: S, act: Act, gate: &mut [f32], up: &[f32]) {
    let mut gates = gate.chunks_exact_mut(S::N);
    let mut ups = up.chunks_exact(S::N);
    for (gate, up) in gates.by_ref().zip(ups.by_ref()) {
        s.store(gate, gated(s, act, s.load(gate), s.load(up)));
    }
    let gate = gates.into_remainder();
    let (g, u) = (s.load_part(gate, 0.0), s.load_part(ups.remainder(), 0.0));
    s.store_part(gate, gated(s, act, g, u));
}

#[inline(always)]
fn activate_lanes<S: Lanes>(s: S, act: Act, x: &mut [f32]) {
    let mut xs = x.chunks_exact_mut(S::N);
    for x in xs.by_ref() {
        s.store(x, value(s, act, s.load(x)));
    }
    let x = xs.into_remainder();
    s.store_part(x, value(s, act, s.load_part(x, 0.0)));
}

#[inline(always)]
fn gated<S: Lanes>(s: S, act: Act, gate: S::V, up: S::V) -> S::V {
    if let Act::SwigluClamped { alpha, limit } = act {
        // The bound comes first: min and max return their second operand for NaN.
        let g = s.min(s.splat(limit), gate);
        let u = s.max(s.splat(-limit), s.min(s.splat(limit), up));
        let e = exp(s, s.sub(s.splat(0.0), s.mul(s.splat(alpha), g)));
        let swish = s.div(g, s.add(s.splat(1.0), e));
        return s.mul(swish, s.add(u, s.splat(1.0)));
    }
    s.mul(value(s, act, gate), up)
}

#[inline(always)]
pub(super) fn value<S: Lanes>(s: S, act: Act, x: S::V) -> S::V {
    match act {
        Act::Identity | Act::SwigluClamped { .. } => x,
        Act::Silu => s.div(x, one_and_exp_of_minus(s, x)),
        Act::GeluTanh => {
            let cube = s.mul(s.mul(x, x), x);
            let y = s.mul(
                s.splat(GELU_FACTOR),
                s.add(x, s.mul(s.splat(GELU_CUBE), cube)),
            );
            s.div(x, one_and_exp_of_minus(s, y))
        }
        Act::GeluErf => {
            let size = s.max(x, s.sub(s.splat(0.0), x));
            let z = s.mul(size, s.splat(std::f32::consts::FRAC_1_SQRT_2));
            let t = s.div(s.splat(1.0), s.fma(z, s.splat(0.5), s.splat(1.0)));
            let mut p = s.splat(ERFC[0]);
            for factor in &ERFC[1..] {
                p = s.fma(p, t, s.splat(*factor));
            }
            let e = exp(s, s.sub(p, s.mul(z, z)));
            let tail = s.mul(s.mul(s.splat(0.5), size), s.mul(t, e));
            s.sub(s.max(s.splat(0.0), x), tail)
        }
        Act::ReluSquared => {
            let x = s.max(s.splat(0.0), x);
            s.mul(x, x)
        }
        Act::Sigmoid => s.div(s.splat(1.0), one_and_exp_of_minus(s, x)),
        Act::Softplus => {
            // The logarithm has no vector form: softplus is for a handful of elements a row.
            let mut lanes = [0.0; 16];
            s.store(&mut lanes, x);
            lanes[..S::N].iter_mut().for_each(|x| *x = softplus(*x));
            s.load(&lanes)
        }
    }
}

/// `1 + exp(-x)`.
#[inline(always)]
fn one_and_exp_of_minus<S: Lanes>(s: S, x: S::V) -> S::V {
    s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x)))
}

/// `2 sqrt(2 / pi)`: `(1 + tanh(y)) / 2` is the logistic function of `2 y`.
const GELU_FACTOR: f32 = 1.595_769;
const GELU_CUBE: f32 = 0.044_715;

/// `erfc(z) = t exp(p(t) - z^2)` with `t = 1 / (1 + z / 2)` for `z >= 0`, to 1.2e-7 of it (Press et
/// al., Numerical Recipes, 6.2): the factors of `p`, the highest power's first.
const ERFC: [f32; 10] = [
    0.170_872_77,
    -0.822_152_2,
    1.488_515_9,
    -1.135_204,
    0.278_868_07,
    -0.186_288_06,
    0.096_784_18,
    0.374_091_96,
    1.000_023_7,
    -1.265_512_2,
];

/// `ln(1 + exp(x))`, for large arguments too.
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn gate_scalar(act: Act, gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = if let Act::SwigluClamped { alpha, limit } = act {
            let clamped = if *g > limit { limit } else { *g };
            clamped / (1.0 + (-alpha * clamped).exp()) * (u.clamp(-limit, limit) + 1.0)
        } else {
            value_scalar(act, *g) * u
        };
    }
}

fn activate_scalar(act: Act, x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = value_scalar(act, *x));
}

pub(super) fn value_scalar(act: Act, x: f32) -> f32 {
    match act {
        Act::Identity | Act::SwigluClamped { .. } => x,
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::GeluTanh => x / (1.0 + (-GELU_FACTOR * (x + GELU_CUBE * (x * x * x))).exp()),
        Act::GeluErf => {
            let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
            let t = 1.0 / (1.0 + 0.5 * z);
            let p = ERFC.iter().fold(0.0, |p, factor| p * t + factor);
            x.max(0.0) - 0.5 * x.abs() * t * (p - z * z).exp()
        }
        Act::ReluSquared if x < 0.0 => 0.0,
        Act::ReluSquared => x * x,
        Act::Sigmoid => sigmoid(x),
        Act::Softplus => softplus(x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    const CLAMPED: Act = Act::SwigluClamped {
        alpha: 1.702,
        limit: 7.0,
    };
    const ACTS: [Act; 7] = [
        Act::Identity,
        Act::Silu,
        Act::GeluTanh,
        Act::GeluErf,
        Act::ReluSquared,
        Act::Sigmoid,
        Act::Softplus,
    ];

    /// By its series, or for large arguments its continued fraction (Abramowitz & Stegun 7.1.5 and
    /// 7.1.14).
    fn erfc(z: f64) -> f64 {
        let root = std::f64::consts::PI.sqrt();
        if z.abs() < 3.0 {
            let (mut term, mut sum) = (z, z);
            for n in 1..200 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return 1.0 - 2.0 / root * sum;
        }
        let size = z.abs();
        let fraction = (1..100)
            .rev()
            .fold(size, |f, n| size + f64::from(n) / 2.0 / f);
        let tail = (-size * size).exp() / (root * fraction);
        if z > 0.0 { tail } else { 2.0 - tail }
    }

    fn exact(act: Act, x: f64) -> f64 {
        match act {
            Act::Identity | Act::SwigluClamped { .. } => x,
            Act::Silu => x / (1.0 + (-x).exp()),
            Act::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                x / 2.0 * (1.0 + inner.tanh())
            }
            Act::GeluErf => x / 2.0 * erfc(-x / std::f64::consts::SQRT_2),
            Act::ReluSquared => x.max(0.0).powi(2),
            Act::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Act::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        }
    }

    fn exact_gate(act: Act, g: f64, u: f64) -> f64 {
        match act {
            Act::SwigluClamped { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                g / (1.0 + (-alpha * g).exp()) * (u + 1.0)
            }
            _ => exact(act, g) * u,
        }
    }

    /// Every third element is large.
    fn input(source: &mut Random, n: usize) -> Vec<f32> {
        let mut x = source.normal(n);
        let large = x.iter_mut().step_by(3);
        large.for_each(|x| *x *= 40.0);
        x
    }

    #[test]
    fn close_to_f64_and_the_same_bits_in_any_division() {
        let mut source = Random::new("act");
        for n in [1, 15, 16, 17, 100, 3000] {
            let (x, up) = (input(&mut source, n), input(&mut source, n));
            let cut = source.below(n + 1);
            for act in ACTS.into_iter().chain([CLAMPED]) {
                let expected: Vec<f64> = x
                    .iter()
                    .zip(&up)
                    .map(|(&g, &u)| exact_gate(act, f64::from(g), f64::from(u)))
                    .collect();
                for simd in Simd::available() {
                    let what = format!("{simd:?} {act:?} {n}");
                    let mut out = x.clone();
                    gate(simd, act, &mut out, &up);
                    assert_close(&out, &expected, 1e-6, &what);
                    let mut parts = x.clone();
                    let (a, b) = parts.split_at_mut(cut);
                    gate(simd, act, a, &up[..cut]);
                    gate(simd, act, b, &up[cut..]);
                    assert_eq!(parts, out, "{what}");
                    if act == CLAMPED {
                        continue;
                    }
                    let expected: Vec<f64> = x.iter().map(|&x| exact(act, x.into())).collect();
                    let mut out = x.clone();
                    activate(simd, act, &mut out);
                    assert_close(&out, &expected, 1e-6, &what);
                    // A gate is the product of the function's value and the other factor.
                    out.iter_mut().zip(&up).for_each(|(x, u)| *x *= u);
                    assert_eq!(out, parts, "{what}");
                }
            }
        }
    }

    #[test]
    fn nan_propagates_and_large_elements_saturate() {
        for simd in Simd::available() {
            for act in ACTS.into_iter().chain([CLAMPED]) {
                let mut g = vec![1.0f32; 19];
                g[3] = f32::NAN;
                let mut up = vec![1f32; 19];
                up[18] = f32::NAN;
                gate(simd, act, &mut g, &up);
                for (i, g) in g.iter().enumerate() {
                    assert_eq!(g.is_nan(), i == 3 || i == 18, "{simd:?} {act:?} {i}");
                }
            }
            let saturated = |act, x| {
                let mut x = [x; 17];
                activate(simd, act, &mut x);
                (x[0], x[16])
            };
            assert_eq!(saturated(Act::Silu, 1e30), (1e30, 1e30), "{simd:?}");
            assert_eq!(saturated(Act::Silu, -1e4), (0.0, 0.0), "{simd:?}");
            assert_eq!(saturated(Act::GeluTanh, 1e4), (1e4, 1e4), "{simd:?}");
            assert_eq!(saturated(Act::GeluTanh, -1e4), (0.0, 0.0), "{simd:?}");
            assert_eq!(saturated(Act::Sigmoid, -1e4), (0.0, 0.0), "{simd:?}");
            assert_eq!(saturated(Act::Softplus, 1e30), (1e30, 1e30), "{simd:?}");
        }
    }
}
