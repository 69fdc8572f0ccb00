//! Mamba-2 (Dao & Gu 2024, arXiv 2405.21060), row by row. For head `h` of group
//! `g = h / (n_head / n_group)`:
//!
//! ```text
//! d   = softplus(dt[t][h] + dt_bias[h])
//! S   = S * exp(d * a[h]) + d * x B[g]^T
//! out = S C[g] + skip[h] * x
//! ```
//!
//! Rows of the state do not depend on each other: some of them go through all rows of a chunk while
//! they are in the first-level cache.

use super::Simd;
use super::act::softplus;
use super::lanes::{Lanes, simd_fn};
use super::recurrent::{CHUNK_ROWS, StateSpan, rows, run_parts};
use crate::{Pool, SyncPtr};

/// Rows of the state that go through a chunk together.
const STATE_ROWS: usize = 16;

/// The heads of [`ssm`].
#[derive(Debug, Clone, Copy)]
pub struct SsmShape {
    /// Heads.
    pub n_head: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Groups of heads that share B and C; divides `n_head`.
    pub n_group: usize,
    /// Elements of B and C.
    pub n_state: usize,
}

/// What [`ssm`] reads.
#[derive(Debug, Clone, Copy)]
pub struct SsmInputs<'a> {
    /// `[rows][n_head * dim + 2 * n_group * n_state]`: x, B, C.
    pub xbc: &'a [f32],
    /// `[rows][n_head]`.
    pub dt: &'a [f32],
    /// `[n_head]`, negative.
    pub a: &'a [f32],
    /// `[n_head]`.
    pub skip: &'a [f32],
    /// `[n_head]`.
    pub dt_bias: &'a [f32],
}

/// Runs the rows of all `spans`, in order; a span's state is `[n_head][dim][n_state]`, `out` is
/// `[rows of all spans][n_head * dim]`.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn ssm(
    pool: &Pool,
    simd: Simd,
    shape: &SsmShape,
    inputs: &SsmInputs<'_>,
    spans: &mut [StateSpan<'_>],
    out: &mut [f32],
) {
    let &SsmShape {
        n_head,
        dim,
        n_group,
        n_state,
    } = shape;
    assert!(
        n_group > 0 && n_head.is_multiple_of(n_group) && dim > 0 && n_state > 0,
        "ssm: {n_head} heads in {n_group} groups"
    );
    let (out_row, bc) = (n_head * dim, n_group * n_state);
    let (n_rows, row) = (rows(spans), out_row + 2 * bc);
    assert!(
        inputs.xbc.len() == n_rows * row
            && inputs.dt.len() == n_rows * n_head
            && [inputs.a, inputs.skip, inputs.dt_bias]
                .iter()
                .all(|x| x.len() == n_head),
        "ssm: an input has another shape"
    );
    assert_eq!(out.len(), n_rows * out_row, "ssm: out has another shape");
    for span in &*spans {
        assert_eq!(
            span.state.len(),
            out_row * n_state,
            "ssm: state has another shape"
        );
    }
    let out = SyncPtr(out.as_mut_ptr());
    run_parts(pool, spans, n_head, 1, |item| {
        let h = item.part;
        let group = h / (n_head / n_group);
        // SAFETY: the state of this head, which is this item's.
        let state = unsafe { item.state(h * dim * n_state, dim * n_state) };
        let mut steps = [Step::default(); CHUNK_ROWS];
        let mut results = vec![0.0; item.n_rows.min(CHUNK_ROWS) * dim];
        for first in (0..item.n_rows).step_by(CHUNK_ROWS) {
            let steps = &mut steps[..CHUNK_ROWS.min(item.n_rows - first)];
            for (t, step) in steps.iter_mut().enumerate() {
                let row_index = item.first_row + first + t;
                let xbc = &inputs.xbc[row_index * row..][..row];
                let d = softplus(inputs.dt[row_index * n_head + h] + inputs.dt_bias[h]);
                *step = Step {
                    decay: (d * inputs.a[h]).exp(),
                    d,
                    x: &xbc[h * dim..][..dim],
                    b: &xbc[out_row + group * n_state..][..n_state],
                    c: &xbc[out_row + bc + group * n_state..][..n_state],
                };
            }
            run_steps(simd, steps, inputs.skip[h], state, &mut results);
            for t in 0..steps.len() {
                let at = (item.first_row + first + t) * out_row + h * dim;
                // SAFETY: a row of the span and this item's head, inside out, which stays borrowed
                // until the run ends; no other item has them.
                let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(at), dim) };
                out.copy_from_slice(&results[t * dim..][..dim]);
            }
        }
    });
}

/// One row of one head.
#[derive(Clone, Copy, Default)]
struct Step<'a> {
    decay: f32,
    d: f32,
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
}

simd_fn! {
    fn run_steps(steps: &[Step<'_>], skip: f32, state: &mut [f32], out: &mut [f32]);
    simd run_steps_lanes;
    scalar run_steps_scalar;
}

#[inline(always)]
fn run_steps_lanes<S: Lanes>(
    s: S,
    steps: &[Step<'_>],
    skip: f32,
    state: &mut [f32],
    out: &mut [f32],
) {
    let (dim, n_state) = (steps[0].x.len(), steps[0].b.len());
    for (block, state) in state.chunks_mut(STATE_ROWS * n_state).enumerate() {
        for (t, step) in steps.iter().enumerate() {
            for (i, state) in state.chunks_exact_mut(n_state).enumerate() {
                let i = block * STATE_ROWS + i;
                let sum = update(s, step, step.d * step.x[i], state);
                out[t * dim + i] = sum + skip * step.x[i];
            }
        }
    }
}

/// One row of the state, `state * decay + dx * B`; yields its product with C.
#[inline(always)]
fn update<S: Lanes>(s: S, step: &Step<'_>, dx: f32, state: &mut [f32]) -> f32 {
    let (decay, dx) = (s.splat(step.decay), s.splat(dx));
    // Two sums, so that an addition does not wait for the one before it.
    let mut sums = [s.splat(0.0); 2];
    let mut states = state.chunks_exact_mut(S::N);
    let mut bs = step.b.chunks_exact(S::N);
    let mut cs = step.c.chunks_exact(S::N);
    for (i, ((state, b), c)) in states
        .by_ref()
        .zip(bs.by_ref())
        .zip(cs.by_ref())
        .enumerate()
    {
        let new = s.fma(dx, s.load(b), s.mul(s.load(state), decay));
        s.store(state, new);
        sums[i % 2] = s.fma(new, s.load(c), sums[i % 2]);
    }
    let state = states.into_remainder();
    if !state.is_empty() {
        let (b, c) = (
            s.load_part(bs.remainder(), 0.0),
            s.load_part(cs.remainder(), 0.0),
        );
        let new = s.fma(dx, b, s.mul(s.load_part(state, 0.0), decay));
        s.store_part(state, new);
        sums[0] = s.fma(new, c, sums[0]);
    }
    s.sum(s.add(sums[0], sums[1]))
}

fn run_steps_scalar(steps: &[Step<'_>], skip: f32, state: &mut [f32], out: &mut [f32]) {
    let (dim, n_state) = (steps[0].x.len(), steps[0].b.len());
    for (t, step) in steps.iter().enumerate() {
        for (i, state) in state.chunks_exact_mut(n_state).enumerate() {
            let dx = step.d * step.x[i];
            let mut sum = 0.0;
            for ((state, b), c) in state.iter_mut().zip(step.b).zip(step.c) {
                *state = *state * step.decay + dx * b;
                sum += *state * c;
            }
            out[t * dim + i] = sum + skip * step.x[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close, pool};

    /// Output and state straight from the definition, in f64.
    fn reference(shape: &SsmShape, inputs: &SsmInputs<'_>, state: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let &SsmShape {
            n_head,
            dim,
            n_group,
            n_state,
        } = shape;
        let row = n_head * dim + 2 * n_group * n_state;
        let mut state: Vec<f64> = state.iter().map(|&x| f64::from(x)).collect();
        let mut out = Vec::new();
        for (t, xbc) in inputs.xbc.chunks(row).enumerate() {
            let xbc: Vec<f64> = xbc.iter().map(|&x| f64::from(x)).collect();
            for h in 0..n_head {
                let g = h * n_group / n_head;
                let b = &xbc[n_head * dim + g * n_state..][..n_state];
                let c = &xbc[n_head * dim + (n_group + g) * n_state..][..n_state];
                let dt = f64::from(inputs.dt[t * n_head + h]) + f64::from(inputs.dt_bias[h]);
                let d = dt.exp().ln_1p();
                let decay = (d * f64::from(inputs.a[h])).exp();
                for i in 0..dim {
                    let x = xbc[h * dim + i];
                    let state = &mut state[(h * dim + i) * n_state..][..n_state];
                    let mut sum = f64::from(inputs.skip[h]) * x;
                    for (j, state) in state.iter_mut().enumerate() {
                        *state = *state * decay + d * x * b[j];
                        sum += *state * c[j];
                    }
                    out.push(sum);
                }
            }
        }
        (out, state)
    }

    #[test]
    fn agrees_with_f64_however_the_rows_come() {
        let mut source = Random::new("ssm");
        let pool = pool(3);
        for (n_head, dim, n_group, n_state) in [
            (1, 3, 1, 5),
            (4, 64, 1, 128),
            (6, 20, 2, 16),
            (2, 33, 2, 75),
        ] {
            let shape = SsmShape {
                n_head,
                dim,
                n_group,
                n_state,
            };
            let n = 1 + source.below(80);
            let (row, out_row) = (n_head * dim + 2 * n_group * n_state, n_head * dim);
            let xbc = source.normal(n * row);
            let dt = source.normal(n * n_head);
            let mut a = source.normal(n_head);
            a.iter_mut().for_each(|a| *a = -0.1 - a.abs());
            let (skip, dt_bias) = (source.normal(n_head), source.normal(n_head));
            let first_state = source.normal(out_row * n_state);
            let inputs = SsmInputs {
                xbc: &xbc,
                dt: &dt,
                a: &a,
                skip: &skip,
                dt_bias: &dt_bias,
            };
            let (expected, expected_state) = reference(&shape, &inputs, &first_state);
            for simd in Simd::available() {
                let what = format!("{simd:?} {shape:?} {n} rows");
                let (mut out, mut state) = (vec![f32::NAN; n * out_row], first_state.clone());
                let mut span = [StateSpan {
                    n_rows: n,
                    state: &mut state,
                }];
                ssm(&pool, simd, &shape, &inputs, &mut span, &mut out);
                // Sums of up to 128 products of about 1.
                assert_close(&out, &expected, 3e-5, &what);
                assert_close(&state, &expected_state, 1e-5, &what);
                // In two calls, beside another sequence: the same bits.
                let cut = source.below(n + 1);
                let (mut parts, mut in_parts) = (Vec::new(), first_state.clone());
                let mut other = source.normal(out_row * n_state);
                for range in [0..cut, cut..n] {
                    let both = [
                        &source.normal(row),
                        &xbc[range.start * row..range.end * row],
                    ]
                    .concat();
                    let dts = [
                        &source.normal(n_head),
                        &dt[range.start * n_head..range.end * n_head],
                    ]
                    .concat();
                    let inputs = SsmInputs {
                        xbc: &both,
                        dt: &dts,
                        ..inputs
                    };
                    let mut spans = [
                        StateSpan {
                            n_rows: 1,
                            state: &mut other,
                        },
                        StateSpan {
                            n_rows: range.len(),
                            state: &mut in_parts,
                        },
                    ];
                    let mut out = vec![f32::NAN; (1 + range.len()) * out_row];
                    ssm(&pool, simd, &shape, &inputs, &mut spans, &mut out);
                    parts.extend_from_slice(&out[out_row..]);
                }
                assert_eq!(parts, out, "{what} cut at {cut}");
                assert_eq!(in_parts, state, "{what} cut at {cut}");
            }
        }
    }
}
