//! The gated delta rule (Yang et al. 2024, arXiv 2412.06464), row by row. For value head
//! `h` with key head `g(h)`:
//!
//! ```text
//! q, k   = l2norm(q) / sqrt(dim_k), l2norm(k)            (l2norm(x) = x / sqrt(sum x^2 + eps))
//! S      = S * exp(a[h] * softplus(alpha[t][h] + dt_bias[h]))
//! S     += k (sigmoid(beta[t][h]) * (v - S^T k))^T
//! out    = S^T q
//! ```
//!
//! Columns of the state do not depend on each other: some of them go through all rows of a chunk
//! while they are in the first-level cache.

use super::Simd;
use super::act::{sigmoid, softplus};
use super::lanes::{Lanes, simd_fn};
use super::recurrent::{CHUNK_ROWS, StateSpan, rows, run_parts};
use super::rms_norm::{sum_squares, sum_squares_scalar};
use crate::{Pool, SyncPtr};

/// The heads of [`delta_net`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetShape {
    /// Heads of queries and keys.
    pub n_head_k: usize,
    /// Heads of values; a multiple of `n_head_k`.
    pub n_head_v: usize,
    /// Elements of a query or key head.
    pub dim_k: usize,
    /// Elements of a value head.
    pub dim_v: usize,
    /// Whether value head `h` has key head `h % n_head_k`; else `h / (n_head_v / n_head_k)`.
    pub interleaved: bool,
    /// Added to the sum of squares in the norm of queries and keys.
    pub eps: f32,
}

/// What [`delta_net`] reads.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetInputs<'a> {
    /// `[rows][2 * n_head_k * dim_k + n_head_v * dim_v]`: queries, keys, values.
    pub qkv: &'a [f32],
    /// `[rows][n_head_v]`.
    pub alpha: &'a [f32],
    /// `[rows][n_head_v]`.
    pub beta: &'a [f32],
    /// `[n_head_v]`, negative.
    pub a: &'a [f32],
    /// `[n_head_v]`.
    pub dt_bias: &'a [f32],
}

/// Runs the rows of all `spans`, in order; a span's state is `[n_head_v][dim_k][dim_v]`, `out` is
/// `[rows of all spans][n_head_v * dim_v]`.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn delta_net(
    pool: &Pool,
    simd: Simd,
    shape: &DeltaNetShape,
    inputs: &DeltaNetInputs<'_>,
    spans: &mut [StateSpan<'_>],
    out: &mut [f32],
) {
    let &DeltaNetShape {
        n_head_k,
        n_head_v,
        dim_k,
        dim_v,
        ..
    } = shape;
    assert!(
        n_head_k > 0 && n_head_v.is_multiple_of(n_head_k) && dim_k > 0 && dim_v > 0,
        "delta_net: {n_head_v} value heads over {n_head_k} key heads"
    );
    let (keys, out_row) = (n_head_k * dim_k, n_head_v * dim_v);
    let (n_rows, row) = (rows(spans), 2 * keys + out_row);
    let per_head = n_rows * n_head_v;
    assert!(
        inputs.qkv.len() == n_rows * row
            && inputs.alpha.len() == per_head
            && inputs.beta.len() == per_head
            && inputs.a.len() == n_head_v
            && inputs.dt_bias.len() == n_head_v,
        "delta_net: an input has another shape"
    );
    assert_eq!(
        out.len(),
        n_rows * out_row,
        "delta_net: out has another shape"
    );
    for span in &*spans {
        assert_eq!(
            span.state.len(),
            dim_k * out_row,
            "delta_net: state has another shape"
        );
    }
    let out = SyncPtr(out.as_mut_ptr());
    run_parts(pool, spans, n_head_v, 1, |item| {
        let h = item.part;
        let head_k = if shape.interleaved {
            h % n_head_k
        } else {
            h / (n_head_v / n_head_k)
        };
        // SAFETY: the state of this head, which is this item's.
        let state = unsafe { item.state(h * dim_k * dim_v, dim_k * dim_v) };
        let mut chunk = Chunk::new(dim_k, dim_v, item.n_rows.min(CHUNK_ROWS));
        for first in (0..item.n_rows).step_by(CHUNK_ROWS) {
            chunk.n_rows = CHUNK_ROWS.min(item.n_rows - first);
            for t in 0..chunk.n_rows {
                let row_index = item.first_row + first + t;
                let qkv = &inputs.qkv[row_index * row..][..row];
                let at = row_index * n_head_v + h;
                let dt = softplus(inputs.alpha[at] + inputs.dt_bias[h]);
                chunk.decay[t] = (inputs.a[h] * dt).exp();
                chunk.beta[t] = sigmoid(inputs.beta[at]);
                chunk.q[t * dim_k..][..dim_k].copy_from_slice(&qkv[head_k * dim_k..][..dim_k]);
                chunk.k[t * dim_k..][..dim_k]
                    .copy_from_slice(&qkv[keys + head_k * dim_k..][..dim_k]);
                chunk.v[t * dim_v..][..dim_v]
                    .copy_from_slice(&qkv[2 * keys + h * dim_v..][..dim_v]);
            }
            run_chunk(simd, &mut chunk, shape.eps, state);
            for t in 0..chunk.n_rows {
                let at = (item.first_row + first + t) * out_row + h * dim_v;
                // SAFETY: a row of the span and this item's head, inside out, which stays borrowed
                // until the run ends; no other item has them.
                let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(at), dim_v) };
                out.copy_from_slice(&chunk.v[t * dim_v..][..dim_v]);
            }
        }
    });
}

/// Some rows of one head.
struct Chunk {
    dim_k: usize,
    dim_v: usize,
    n_rows: usize,
    /// `[rows][dim_k]`.
    q: Vec<f32>,
    /// `[rows][dim_k]`.
    k: Vec<f32>,
    /// `[rows][dim_v]`: values, then the results.
    v: Vec<f32>,
    /// `[rows]`: what the state is multiplied by.
    decay: Vec<f32>,
    /// `[rows]`: what the correction is multiplied by.
    beta: Vec<f32>,
}

impl Chunk {
    fn new(dim_k: usize, dim_v: usize, rows: usize) -> Chunk {
        Chunk {
            dim_k,
            dim_v,
            n_rows: 0,
            q: vec![0.0; rows * dim_k],
            k: vec![0.0; rows * dim_k],
            v: vec![0.0; rows * dim_v],
            decay: vec![0.0; rows],
            beta: vec![0.0; rows],
        }
    }

    /// Norms the queries and keys, given a sum of squares.
    #[inline(always)]
    fn norm(&mut self, eps: f32, squares: impl Fn(&[f32]) -> f64) {
        let (n, dim_k) = (self.n_rows, self.dim_k);
        for (rows, scale) in [
            (&mut self.q, 1.0 / (dim_k as f64).sqrt()),
            (&mut self.k, 1.0),
        ] {
            for x in rows.chunks_exact_mut(dim_k).take(n) {
                let scale = (scale / (squares(x) + f64::from(eps)).sqrt()) as f32;
                x.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }
}

simd_fn! {
    fn run_chunk(chunk: &mut Chunk, eps: f32, state: &mut [f32]);
    simd run_chunk_lanes;
    scalar run_chunk_scalar;
}

#[inline(always)]
fn run_chunk_lanes<S: Lanes>(s: S, chunk: &mut Chunk, eps: f32, state: &mut [f32]) {
    chunk.norm(eps, |x| sum_squares(s, x));
    let mut column = 0;
    while column + 4 * S::N <= chunk.dim_v {
        columns::<S, 4>(s, chunk, column, state);
        column += 4 * S::N;
    }
    while column + S::N <= chunk.dim_v {
        columns::<S, 1>(s, chunk, column, state);
        column += S::N;
    }
    while column < chunk.dim_v {
        one_column(chunk, column, state);
        column += 1;
    }
}

/// W vectors of columns through all rows of the chunk.
#[inline(always)]
fn columns<S: Lanes, const W: usize>(s: S, chunk: &mut Chunk, column: usize, state: &mut [f32]) {
    let (dim_k, dim_v) = (chunk.dim_k, chunk.dim_v);
    for t in 0..chunk.n_rows {
        let k = &chunk.k[t * dim_k..][..dim_k];
        let q = &chunk.q[t * dim_k..][..dim_k];
        let v = &mut chunk.v[t * dim_v + column..][..W * S::N];
        let (decay, beta) = (s.splat(chunk.decay[t]), s.splat(chunk.beta[t]));
        // Two sums, so that an addition does not wait for the one before it.
        let mut sums = [[s.splat(0.0); W]; 2];
        for (i, (k, state)) in k.iter().zip(state.chunks_exact(dim_v)).enumerate() {
            let state = &state[column..column + W * S::N];
            for (w, sum) in sums[i % 2].iter_mut().enumerate() {
                *sum = s.fma(s.splat(*k), s.load(&state[w * S::N..]), *sum);
            }
        }
        let mut delta = [s.splat(0.0); W];
        for (w, delta) in delta.iter_mut().enumerate() {
            let known = s.mul(s.add(sums[0][w], sums[1][w]), decay);
            *delta = s.mul(beta, s.sub(s.load(&v[w * S::N..]), known));
        }
        let mut out = [s.splat(0.0); W];
        for ((k, q), state) in k.iter().zip(q).zip(state.chunks_exact_mut(dim_v)) {
            let state = &mut state[column..column + W * S::N];
            let (k, q) = (s.splat(*k), s.splat(*q));
            for w in 0..W {
                let state = &mut state[w * S::N..];
                let new = s.fma(k, delta[w], s.mul(s.load(state), decay));
                s.store(state, new);
                out[w] = s.fma(q, new, out[w]);
            }
        }
        for (w, out) in out.iter().enumerate() {
            s.store(&mut v[w * S::N..], *out);
        }
    }
}

/// One column through all rows of the chunk.
fn one_column(chunk: &mut Chunk, column: usize, state: &mut [f32]) {
    let (dim_k, dim_v) = (chunk.dim_k, chunk.dim_v);
    for t in 0..chunk.n_rows {
        let k = &chunk.k[t * dim_k..][..dim_k];
        let q = &chunk.q[t * dim_k..][..dim_k];
        let v = &mut chunk.v[t * dim_v + column];
        let old = state.iter().skip(column).step_by(dim_v);
        let known = k.iter().zip(old).map(|(k, state)| k * state).sum::<f32>() * chunk.decay[t];
        let delta = chunk.beta[t] * (*v - known);
        *v = 0.0;
        for ((k, q), state) in k
            .iter()
            .zip(q)
            .zip(state.iter_mut().skip(column).step_by(dim_v))
        {
            *state = *state * chunk.decay[t] + k * delta;
            *v += q * *state;
        }
    }
}

fn run_chunk_scalar(chunk: &mut Chunk, eps: f32, state: &mut [f32]) {
    chunk.norm(eps, sum_squares_scalar);
    for column in 0..chunk.dim_v {
        one_column(chunk, column, state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close, pool};

    /// Output and state straight from the definition, in f64.
    fn reference(
        shape: &DeltaNetShape,
        inputs: &DeltaNetInputs<'_>,
        state: &[f32],
    ) -> (Vec<f64>, Vec<f64>) {
        let &DeltaNetShape {
            n_head_k,
            n_head_v,
            dim_k,
            dim_v,
            ..
        } = shape;
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
        let l2norm = |x: &[f32]| -> Vec<f64> {
            let x = wide(x);
            let norm = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(shape.eps)).sqrt();
            x.iter().map(|x| x / norm).collect()
        };
        let mut state = wide(state);
        let row = 2 * n_head_k * dim_k + n_head_v * dim_v;
        let mut out = Vec::new();
        for (t, qkv) in inputs.qkv.chunks(row).enumerate() {
            for h in 0..n_head_v {
                let g = if shape.interleaved {
                    h % n_head_k
                } else {
                    h * n_head_k / n_head_v
                };
                let q = l2norm(&qkv[g * dim_k..][..dim_k]);
                let k = l2norm(&qkv[(n_head_k + g) * dim_k..][..dim_k]);
                let v = wide(&qkv[2 * n_head_k * dim_k + h * dim_v..][..dim_v]);
                let at = t * n_head_v + h;
                let dt = f64::from(inputs.alpha[at]) + f64::from(inputs.dt_bias[h]);
                let decay = (f64::from(inputs.a[h]) * dt.exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-f64::from(inputs.beta[at])).exp());
                let state = &mut state[h * dim_k * dim_v..][..dim_k * dim_v];
                state.iter_mut().for_each(|s| *s *= decay);
                for c in 0..dim_v {
                    let known: f64 = (0..dim_k).map(|i| state[i * dim_v + c] * k[i]).sum();
                    let mut result = 0.0;
                    for i in 0..dim_k {
                        state[i * dim_v + c] += k[i] * beta * (v[c] - known);
                        result += state[i * dim_v + c] * q[i] / (dim_k as f64).sqrt();
                    }
                    out.push(result);
                }
            }
        }
        (out, state)
    }

    #[test]
    fn agrees_with_f64_however_the_rows_come() {
        let mut source = Random::new("delta_net");
        let pool = pool(3);
        for (n_head_k, n_head_v, dim_k, dim_v) in [
            (1, 1, 3, 5),
            (2, 4, 16, 64),
            (2, 2, 128, 128),
            (2, 6, 24, 75),
            (3, 3, 64, 40),
        ] {
            let shape = DeltaNetShape {
                n_head_k,
                n_head_v,
                dim_k,
                dim_v,
                interleaved: source.below(2) == 0,
                eps: 1e-6,
            };
            let n = 1 + source.below(80);
            let (row, out_row) = (2 * n_head_k * dim_k + n_head_v * dim_v, n_head_v * dim_v);
            let qkv = source.normal(n * row);
            let (alpha, beta) = (source.normal(n * n_head_v), source.normal(n * n_head_v));
            let mut a = source.normal(n_head_v);
            a.iter_mut().for_each(|a| *a = -0.5 * a.abs());
            let dt_bias = source.normal(n_head_v);
            let first_state = source.normal(dim_k * out_row);
            let inputs = DeltaNetInputs {
                qkv: &qkv,
                alpha: &alpha,
                beta: &beta,
                a: &a,
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
                delta_net(&pool, simd, &shape, &inputs, &mut span, &mut out);
                assert_close(&out, &expected, 1e-5, &what);
                assert_close(&state, &expected_state, 1e-5, &what);
                // One row at a time, beside another sequence: the same bits.
                let (mut rows, mut state_by_row) = (Vec::new(), first_state.clone());
                let mut other = source.normal(dim_k * out_row);
                for t in 0..n {
                    let both = [source.normal(row), qkv[t * row..][..row].to_vec()].concat();
                    let twice = |x: &[f32]| {
                        let x = &x[t * n_head_v..][..n_head_v];
                        [x, x].concat()
                    };
                    let inputs = DeltaNetInputs {
                        qkv: &both,
                        alpha: &twice(&alpha),
                        beta: &twice(&beta),
                        ..inputs
                    };
                    let mut spans =
                        [&mut other, &mut state_by_row].map(|state| StateSpan { n_rows: 1, state });
                    let mut out = vec![f32::NAN; 2 * out_row];
                    delta_net(&pool, simd, &shape, &inputs, &mut spans, &mut out);
                    rows.extend_from_slice(&out[out_row..]);
                }
                assert_eq!(rows, out, "{what}");
                assert_eq!(state_by_row, state, "{what}");
            }
        }
    }
}
