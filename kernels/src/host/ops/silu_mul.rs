//! The gate of SwiGLU: `out[i] = silu(gate[i]) * up[i]`, `silu(x) = x / (1 + exp(-x))`. Bound by memory.

use super::Simd;

/// `gate = silu(gate) * up`, element by element; both `[rows][n_ff]`. The result takes the place of `gate`.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(_simd: Simd, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "silu_mul: lengths differ");
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + (-*g).exp()) * u;
    }
}
