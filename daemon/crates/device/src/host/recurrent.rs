//! Operations with a state, on the host.

use rocmforge_kernels::host::ops::{
    self, ConvWeights, DeltaNetInputs, DeltaNetShape, SsmInputs, SsmShape, StateSpan,
};
use rocmforge_ops::Op;

use super::run::On;
use crate::Batch;

/// Runs an operation with a state.
pub(super) fn run(on: &On<'_>, op: &Op, batch: &Batch<'_>) {
    let (pool, simd) = (&on.device.pool, on.device.simd);
    match op {
        Op::Conv {
            x,
            weight,
            bias,
            kernel,
            act,
            state,
            out,
        } => {
            let kernel = *kernel as usize;
            let mut spans = states(on, batch, *state, (kernel - 1) * on.width(*x));
            let weights = ConvWeights {
                weight: on.floats(*weight),
                bias: bias.map(|b| on.floats(b)),
                kernel,
                act: *act,
            };
            ops::conv(
                pool,
                simd,
                &weights,
                on.rows(*x),
                &mut spans,
                on.rows_mut(*out),
            );
        }
        Op::DeltaNet {
            qkv,
            alpha,
            beta,
            a,
            dt_bias,
            n_head_k,
            n_head_v,
            dim_k,
            dim_v,
            interleaved,
            eps,
            state,
            out,
        } => {
            let shape = DeltaNetShape {
                n_head_k: *n_head_k as usize,
                n_head_v: *n_head_v as usize,
                dim_k: *dim_k as usize,
                dim_v: *dim_v as usize,
                interleaved: *interleaved,
                eps: *eps,
            };
            let mut spans = states(
                on,
                batch,
                *state,
                shape.n_head_v * shape.dim_k * shape.dim_v,
            );
            let inputs = DeltaNetInputs {
                qkv: on.rows(*qkv),
                alpha: on.rows(*alpha),
                beta: on.rows(*beta),
                a: on.floats(*a),
                dt_bias: on.floats(*dt_bias),
            };
            ops::delta_net(pool, simd, &shape, &inputs, &mut spans, on.rows_mut(*out));
        }
        Op::Ssm {
            xbc,
            dt,
            a,
            skip,
            dt_bias,
            n_head,
            dim,
            n_group,
            n_state,
            state,
            out,
        } => {
            let shape = SsmShape {
                n_head: *n_head as usize,
                dim: *dim as usize,
                n_group: *n_group as usize,
                n_state: *n_state as usize,
            };
            let mut spans = states(on, batch, *state, shape.n_head * shape.dim * shape.n_state);
            let inputs = SsmInputs {
                xbc: on.rows(*xbc),
                dt: on.rows(*dt),
                a: on.floats(*a),
                skip: on.floats(*skip),
                dt_bias: on.floats(*dt_bias),
            };
            ops::ssm(pool, simd, &shape, &inputs, &mut spans, on.rows_mut(*out));
        }
        other => unreachable!("{} has no state", other.name()),
    }
}

/// Each span's state of one operation: zero where the span begins its sequence.
fn states<'a>(on: &On<'a>, batch: &Batch<'_>, first: u64, len: usize) -> Vec<StateSpan<'a>> {
    batch
        .spans
        .iter()
        .map(|span| {
            let state = on.device.arena.floats_mut(span.state + first * 4, len);
            if span.first_position == 0 {
                state.fill(0.0);
            }
            StateSpan {
                n_rows: span.n_rows,
                state,
            }
        })
        .collect()
}
