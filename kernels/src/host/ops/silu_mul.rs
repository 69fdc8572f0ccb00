//! The gate of SwiGLU: `out[i] = silu(gate[i]) * up[i]`, `silu(x) = x / (1 + exp(-x))`. Bound by memory.

use super::Simd;
use super::exp::exp;
use super::lanes::{Lanes, simd_fn};

/// `gate = silu(gate) * up`, element by element; both `[rows][n_ff]`. The result takes the place of `gate`.
/// A gate of minus infinity gives NaN.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(simd: Simd, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "silu_mul: lengths differ");
    silu_mul_all(simd, gate, up);
}

simd_fn! {
    fn silu_mul_all(gate: &mut [f32], up: &[f32]);
    simd silu_mul_lanes;
    scalar silu_mul_scalar;
}

#[inline(always)]
fn silu_mul_lanes<S: Lanes>(s: S, gate: &mut [f32], up: &[f32]) {
    let mut gates = gate.chunks_exact_mut(S::N);
    let mut ups = up.chunks_exact(S::N);
    for (gate, up) in gates.by_ref().zip(ups.by_ref()) {
        s.store(gate, step(s, s.load(gate), s.load(up)));
    }
    let gate = gates.into_remainder();
    let (g, u) = (s.load_part(gate, 0.0), s.load_part(ups.remainder(), 0.0));
    s.store_part(gate, step(s, g, u));
}

#[inline(always)]
fn step<S: Lanes>(s: S, gate: S::V, up: S::V) -> S::V {
    let e = exp(s, s.sub(s.splat(0.0), gate));
    s.mul(s.div(gate, s.add(s.splat(1.0), e)), up)
}

fn silu_mul_scalar(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + (-*g).exp()) * u;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ops::testing::{Source, assert_close};

    #[test]
    fn close_to_f64() {
        let mut source = Source::new("silu_mul");
        for n in [1, 15, 16, 17, 100, 8192] {
            let mut gate = source.normal(n);
            gate.iter_mut()
                .enumerate()
                .filter(|(i, _)| i % 3 == 0)
                .for_each(|(_, g)| *g *= 40.0);
            let up = source.normal(n);
            let expected: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(&g, &u)| f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u))
                .collect();
            for simd in Simd::available() {
                let mut out = gate.clone();
                silu_mul(simd, &mut out, &up);
                assert_close(&out, &expected, 5e-7, &format!("{simd:?} {n}"));
            }
        }
    }

    #[test]
    fn nan_propagates_and_large_gates_saturate() {
        for simd in Simd::available() {
            let mut gate = vec![1e30f32; 19];
            gate[3] = f32::NAN;
            gate[4] = -1e4;
            let mut up = vec![1f32; 19];
            up[18] = f32::NAN;
            silu_mul(simd, &mut gate, &up);
            assert!(gate[3].is_nan() && gate[18].is_nan(), "{simd:?}");
            assert_eq!((gate[0], gate[4]), (1e30, 0.0), "{simd:?}");
        }
    }
}
