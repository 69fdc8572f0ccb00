//! Operations with a state, on the host.
//!
//! A draft goes on from the state of the row before it and leaves its own elsewhere
//! ([`Span::follows`]). Spans of one call are computed at once, so a span that follows
//! another one is of the next call.

use rocmforge_device::{Batch, Span};
use rocmforge_kernels_cpu::ops::{
    self, ConvWeights, DeltaNetInputs, DeltaNetShape, SsmInputs, SsmShape, StateSpan,
};
use rocmforge_ops::Op;

use super::context::OpContext;

/// Runs an operation with a state.
pub(super) fn run(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    match op {
        Op::Conv { .. } => conv(on, op, batch),
        Op::DeltaNet { .. } => delta_net(on, op, batch),
        Op::Ssm { .. } => ssm(on, op, batch),
        other => unreachable!("{} has no state", other.name()),
    }
}

/// A short convolution.
fn conv(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    let Op::Conv {
        x,
        weight,
        bias,
        kernel,
        act,
        state,
        out,
    } = op
    else {
        unreachable!("called with its operation");
    };
    let (pool, simd) = (&on.device.pool, on.device.simd);
    let kernel = *kernel as usize;
    let weights = ConvWeights {
        weight: on.floats(*weight),
        bias: bias.map(|b| on.floats(b)),
        kernel,
        act: *act,
    };
    let place = (*state, (kernel - 1) * on.width(*x));
    each_call(on, batch, place, |call, spans| {
        let out = on.rows_mut(*out);
        let (x, out) = (call.of(on.rows(*x)), call.of_mut(out));
        ops::conv(pool, simd, &weights, x, spans, out);
    });
}

/// A gated delta net.
fn delta_net(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    let Op::DeltaNet {
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
    } = op
    else {
        unreachable!("called with its operation");
    };
    let (pool, simd) = (&on.device.pool, on.device.simd);
    let shape = DeltaNetShape {
        n_head_k: *n_head_k as usize,
        n_head_v: *n_head_v as usize,
        dim_k: *dim_k as usize,
        dim_v: *dim_v as usize,
        interleaved: *interleaved,
        eps: *eps,
    };
    let place = (*state, shape.n_head_v * shape.dim_k * shape.dim_v);
    each_call(on, batch, place, |call, spans| {
        let inputs = DeltaNetInputs {
            qkv: call.of(on.rows(*qkv)),
            alpha: call.of(on.rows(*alpha)),
            beta: call.of(on.rows(*beta)),
            a: on.floats(*a),
            dt_bias: on.floats(*dt_bias),
        };
        let out = call.of_mut(on.rows_mut(*out));
        ops::delta_net(pool, simd, &shape, &inputs, spans, out);
    });
}

/// A state space recurrence.
fn ssm(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    let Op::Ssm {
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
    } = op
    else {
        unreachable!("called with its operation");
    };
    let (pool, simd) = (&on.device.pool, on.device.simd);
    let shape = SsmShape {
        n_head: *n_head as usize,
        dim: *dim as usize,
        n_group: *n_group as usize,
        n_state: *n_state as usize,
    };
    let place = (*state, shape.n_head * shape.dim * shape.n_state);
    each_call(on, batch, place, |call, spans| {
        let inputs = SsmInputs {
            xbc: call.of(on.rows(*xbc)),
            dt: call.of(on.rows(*dt)),
            a: on.floats(*a),
            skip: on.floats(*skip),
            dt_bias: on.floats(*dt_bias),
        };
        let out = call.of_mut(on.rows_mut(*out));
        ops::ssm(pool, simd, &shape, &inputs, spans, out);
    });
}

/// The rows of one call, of all rows of a batch.
#[derive(Clone, Copy)]
struct Call {
    first_row: usize,
    n_rows: usize,
    all: usize,
}

impl Call {
    /// The call's rows of a buffer.
    fn of(self, rows: &[f32]) -> &[f32] {
        let width = rows.len() / self.all;
        &rows[self.first_row * width..][..self.n_rows * width]
    }

    fn of_mut(self, rows: &mut [f32]) -> &mut [f32] {
        let width = rows.len() / self.all;
        &mut rows[self.first_row * width..][..self.n_rows * width]
    }
}

/// Calls `f` with the spans' states of one operation, `len` elements from `first` on, in calls of
/// which none has a span that goes on from another one of it.
fn each_call(
    on: &OpContext<'_>,
    batch: &Batch<'_>,
    (first, len): (u64, usize),
    mut f: impl FnMut(Call, &mut [StateSpan<'_>]),
) {
    let mut call = Call {
        first_row: 0,
        n_rows: 0,
        all: batch.n_tokens,
    };
    for spans in batch.spans.chunk_by(|_, next| !next.draft) {
        call.n_rows = spans.iter().map(|s| s.n_rows).sum();
        let mut states: Vec<_> = spans
            .iter()
            .map(|span| StateSpan {
                n_rows: span.n_rows,
                state: state(on, span, first * 4, len),
            })
            .collect();
        f(call, &mut states);
        call.first_row += call.n_rows;
    }
}

/// A span's state of one operation where it is to be left: zero where the span begins its sequence.
fn state<'a>(on: &OpContext<'a>, span: &Span<'_>, at: u64, len: usize) -> &'a mut [f32] {
    let arena = &on.device.arena;
    let state = arena.floats_mut(span.state_out + at, len);
    if span.first_position == 0 {
        state.fill(0.0);
    } else if span.draft {
        state.copy_from_slice(arena.floats(span.state + at, len));
    }
    state
}
