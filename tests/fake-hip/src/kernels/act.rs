//! Functions of one element and of gates (`act.h`).

use rocmforge_kernels_cpu::ops::{self, Simd};
use rocmforge_kernels_gpu::ops::activations::ActSpec;
use rocmforge_ops::Act;

use crate::memory::Fault;

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn named(spec: &ActSpec) -> Result<Act, Fault> {
    spec.act()
        .ok_or_else(|| Fault(format!("no function {}", spec.kind)))
}

/// `x = act(x)`.
pub(super) fn activate(spec: &ActSpec, x: &mut [f32]) -> Result<(), Fault> {
    match named(spec)? {
        Act::SwigluClamped { .. } => Err(Fault("a clamped gate without its partner".to_owned())),
        act => {
            ops::activate(Simd::detect(), act, x);
            Ok(())
        }
    }
}

/// `gate = act(gate) * up`.
pub(super) fn gate(spec: &ActSpec, gate: &mut [f32], up: &[f32]) -> Result<(), Fault> {
    ops::gate(Simd::detect(), named(spec)?, gate, up);
    Ok(())
}
