//! Causal convolution of each channel over its sequence:
//! `out[t][c] = act(bias[c] + sum_j weight[c][j] * in[t - (kernel - 1) + j][c])`.

use rocmforge_ops::Act;

use super::Simd;
use super::act::{value, value_scalar};
use super::lanes::{Lanes, simd_fn};
use super::recurrent::{StateSpan, rows, run_parts};
use crate::{Pool, SyncPtr};

/// Maximum number of inputs that a row sees.
pub const CONV_KERNEL_MAX: usize = 16;

/// Channels of a work item.
const BLOCK: usize = 256;

/// Products of an item that are worth handing out by themselves.
const SHARE: usize = 8 << 10;

/// The weights of [`conv`].
#[derive(Debug, Clone, Copy)]
pub struct ConvWeights<'a> {
    /// `[channels][kernel]`, the newest input's weight last.
    pub weight: &'a [f32],
    /// `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// Inputs that a row sees, its own included; from 2 to [`CONV_KERNEL_MAX`].
    pub kernel: usize,
    /// The function of the sum.
    pub act: Act,
}

/// Convolves the rows of all `spans`, in order: `x` and `out` are `[rows of all spans][channels]`,
/// a span's state is `[kernel - 1][channels]`, the inputs before its first row, oldest first.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn conv(
    pool: &Pool,
    simd: Simd,
    weights: &ConvWeights<'_>,
    x: &[f32],
    spans: &mut [StateSpan<'_>],
    out: &mut [f32],
) {
    let kernel = weights.kernel;
    assert!(
        (2..=CONV_KERNEL_MAX).contains(&kernel) && weights.weight.len().is_multiple_of(kernel),
        "conv: {} weights of {kernel} inputs",
        weights.weight.len()
    );
    let channels = weights.weight.len() / kernel;
    let n_rows = rows(spans);
    assert!(
        weights.bias.is_none_or(|bias| bias.len() == channels),
        "conv: bias has another shape"
    );
    assert!(
        x.len() == n_rows * channels && out.len() == x.len(),
        "conv: {} elements for {n_rows} rows of {channels}",
        x.len()
    );
    for span in &*spans {
        assert_eq!(
            span.state.len(),
            (kernel - 1) * channels,
            "conv: state has another shape"
        );
    }
    let mean_rows = n_rows.div_ceil(spans.len().max(1)).max(1);
    let chunk = (SHARE / (BLOCK * kernel * mean_rows)).max(1);
    let out = SyncPtr(out.as_mut_ptr());
    run_parts(pool, spans, channels.div_ceil(BLOCK), chunk, |item| {
        let from = item.part * BLOCK;
        let n = BLOCK.min(channels - from);
        let mut by_tap = vec![0.0; kernel * n];
        for (c, weight) in weights.weight[from * kernel..][..n * kernel]
            .chunks_exact(kernel)
            .enumerate()
        {
            for (j, weight) in weight.iter().enumerate() {
                by_tap[j * n + c] = *weight;
            }
        }
        let mut before = Vec::with_capacity((kernel - 1) * n);
        for j in 0..kernel - 1 {
            // SAFETY: the channels of this item, of which no other has any; not in use beyond this
            // line.
            before.extend_from_slice(unsafe { item.state(j * channels + from, n) });
        }
        // The input that is `row` rows behind the oldest one of the state.
        let input = |row: usize| match row.checked_sub(kernel - 1) {
            None => &before[row * n..][..n],
            Some(t) => &x[(item.first_row + t) * channels + from..][..n],
        };
        for t in 0..item.n_rows {
            let mut taps = [&[][..]; CONV_KERNEL_MAX];
            for (j, tap) in taps[..kernel].iter_mut().enumerate() {
                *tap = input(t + j);
            }
            let at = (item.first_row + t) * channels + from;
            // SAFETY: a row of the span and the channels of this item, inside out, which stays
            // borrowed until the run ends; no other item has them.
            let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(at), n) };
            match weights.bias {
                Some(bias) => out.copy_from_slice(&bias[from..][..n]),
                None => out.fill(0.0),
            }
            conv_row(simd, &taps[..kernel], &by_tap, weights.act, out);
        }
        for j in 0..kernel - 1 {
            // SAFETY: as above.
            let state = unsafe { item.state(j * channels + from, n) };
            state.copy_from_slice(input(item.n_rows + j));
        }
    });
}

simd_fn! {
    fn conv_row(taps: &[&[f32]], weights: &[f32], act: Act, out: &mut [f32]);
    simd conv_row_lanes;
    scalar conv_row_scalar;
}

#[inline(always)]
fn conv_row_lanes<S: Lanes>(s: S, taps: &[&[f32]], weights: &[f32], act: Act, out: &mut [f32]) {
    let n = out.len();
    for (tap, weights) in taps.iter().zip(weights.chunks_exact(n)) {
        let mut outs = out.chunks_exact_mut(S::N);
        let mut xs = tap.chunks_exact(S::N);
        let mut ws = weights.chunks_exact(S::N);
        for ((out, x), w) in outs.by_ref().zip(xs.by_ref()).zip(ws.by_ref()) {
            s.store(out, s.fma(s.load(x), s.load(w), s.load(out)));
        }
        for ((out, x), w) in outs
            .into_remainder()
            .iter_mut()
            .zip(xs.remainder())
            .zip(ws.remainder())
        {
            *out += x * w;
        }
    }
    let mut outs = out.chunks_exact_mut(S::N);
    for out in outs.by_ref() {
        s.store(out, value(s, act, s.load(out)));
    }
    let out = outs.into_remainder();
    if !out.is_empty() {
        s.store_part(out, value(s, act, s.load_part(out, 0.0)));
    }
}

fn conv_row_scalar(taps: &[&[f32]], weights: &[f32], act: Act, out: &mut [f32]) {
    let n = out.len();
    for (tap, weights) in taps.iter().zip(weights.chunks_exact(n)) {
        for ((out, x), w) in out.iter_mut().zip(*tap).zip(weights) {
            *out += x * w;
        }
    }
    out.iter_mut()
        .for_each(|out| *out = value_scalar(act, *out));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close, pool};

    #[test]
    fn agrees_with_f64_however_the_rows_come() {
        let mut source = Random::new("conv");
        let pool = pool(3);
        for (channels, kernel, act) in [
            (1, 2, Act::Identity),
            (5, 4, Act::Silu),
            (64, 3, Act::Identity),
            (300, 4, Act::Silu),
            (513, 16, Act::Silu),
        ] {
            let n = 1 + source.below(40);
            let x = source.normal(n * channels);
            let weight = source.normal(channels * kernel);
            let biases = source.normal(channels);
            let first_state = source.normal((kernel - 1) * channels);
            let bias = (source.below(2) == 0).then_some(&biases[..]);
            let weights = ConvWeights {
                weight: &weight,
                bias,
                kernel,
                act,
            };
            let inputs: Vec<f32> = first_state.iter().chain(&x).copied().collect();
            let expected: Vec<f64> = (0..n * channels)
                .map(|i| {
                    let (t, c) = (i / channels, i % channels);
                    let mut sum = bias.map_or(0.0, |b| f64::from(b[c]));
                    for j in 0..kernel {
                        sum += f64::from(weight[c * kernel + j])
                            * f64::from(inputs[(t + j) * channels + c]);
                    }
                    match act {
                        Act::Silu => sum / (1.0 + (-sum).exp()),
                        _ => sum,
                    }
                })
                .collect();
            for simd in Simd::available() {
                let what = format!("{simd:?} {n}x{channels} kernel {kernel}");
                let (mut out, mut state) = (vec![f32::NAN; n * channels], first_state.clone());
                let mut span = [StateSpan {
                    n_rows: n,
                    state: &mut state,
                }];
                conv(&pool, simd, &weights, &x, &mut span, &mut out);
                assert_close(&out, &expected, 3e-6, &what);
                assert_eq!(state, inputs[n * channels..], "{what}: state");
                // In two calls, with another sequence before it: the same bits.
                let cut = source.below(n + 1);
                let (mut parts, mut state) = (Vec::new(), first_state.clone());
                for range in [0..cut, cut..n] {
                    let mut other = source.normal((kernel - 1) * channels);
                    let rows = source.below(3);
                    let mut both = source.normal(rows * channels);
                    both.extend_from_slice(&x[range.start * channels..range.end * channels]);
                    let mut out = vec![f32::NAN; both.len()];
                    let mut spans = [
                        StateSpan {
                            n_rows: rows,
                            state: &mut other,
                        },
                        StateSpan {
                            n_rows: range.len(),
                            state: &mut state,
                        },
                    ];
                    conv(&pool, simd, &weights, &both, &mut spans, &mut out);
                    parts.extend_from_slice(&out[rows * channels..]);
                }
                assert_eq!(parts, out, "{what} cut at {cut}");
                assert_eq!(state, inputs[n * channels..], "{what}: state in two calls");
            }
        }
    }
}
