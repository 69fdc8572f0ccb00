//! Products of many rows: by the vendor's library, on tiles of the weights as f16, or on the
//! weights where they are f16.
//!
//! A plan of floats has them as sums of up to three products, `w x = w1 x1 + w1 x2 + w2 x1` with
//! `w = w1 + w2`, `x = x1 + x2` of f16: f16 alone would round a row's elements to 11 bits. There is
//! a `w2` of F32 alone: BF16 has 8 bits, which f16 holds down to 6e-5, and smaller weights to 3e-8.

use rocmforge_gpu_driver::blas::Gemm;
use rocmforge_kernels_gpu::ops::activations::F16_LOW_SCALE;
use rocmforge_kernels_gpu::ops::matmat::HalfInputs;
use rocmforge_kernels_gpu::ops::matvec::Matrix;
use rocmforge_kernels_gpu::ops::rows;
use rocmforge_kernels_gpu::ops::weights::{self, Weights};
use rocmforge_ops::WeightType;

use super::{Lowered, Lowering, Queued};
use crate::launch_error;

/// The input of products: f16, and what that leaves.
#[derive(Clone, Copy)]
pub(super) struct Halves {
    pub(super) first: HalfInputs,
    /// f16 `[n_tokens][cols]` at this address, [`F16_LOW_SCALE`] times what the first
    /// leaves; of plans of floats.
    pub(super) second: Option<u64>,
}

impl Halves {
    /// The products that sum up to one with weights of a type: whether they read what f16 leaves of
    /// the weights, their input, their factor.
    fn terms(self, ty: WeightType) -> impl Iterator<Item = (bool, u64, f32)> {
        let HalfInputs { x, factor, .. } = self.first;
        let low = factor / F16_LOW_SCALE;
        let both = self.second.map(|second| (false, second, low));
        let left = self.second.filter(|_| ty == WeightType::F32);
        [(false, x, factor)]
            .into_iter()
            .chain(both)
            .chain(left.map(|_| (true, x, low)))
    }
}

impl Lowering<'_> {
    /// Queues products of one input.
    pub(super) fn tiled(&mut self, halves: Halves, matrices: &[Matrix], add: bool) -> Lowered {
        let HalfInputs { cols, n_tokens, .. } = halves.first;
        let tile = self.scratch_base + self.workspace.tile;
        let tile_rows = (self.workspace.tile_bytes / (cols * 2)).max(1);
        // Whole blocks of the library's kernels.
        let step = if tile_rows > 256 {
            tile_rows - tile_rows % 256
        } else {
            tile_rows
        };
        let product = |m: &Matrix| Gemm {
            weights: tile,
            x: halves.first.x,
            out: m.out,
            rows: m.rows,
            cols,
            tokens: n_tokens,
            stride: m.rows,
            batch: 1,
            out_step: 0,
            factor: halves.first.factor,
            add,
            bias: None,
        };
        let mut rest = matrices;
        while let Some((first, others)) = rest.split_first() {
            if first.ty == WeightType::F16 {
                let gemm = Gemm {
                    weights: first.weights,
                    bias: first.bias,
                    ..product(first)
                };
                self.sum(halves, first.ty, gemm, |_, _| Ok(()))?;
                rest = others;
                continue;
            }
            // Small matrices of one shape side by side: each by itself would
            // leave much of the card idle.
            let batch = same_steps(first, others).min(tile_rows / first.rows.max(1));
            if batch > 1 {
                let (these, others) = rest.split_at(batch as usize);
                let gemm = Gemm {
                    batch,
                    out_step: these[1].out - first.out,
                    ..product(first)
                };
                self.sum(halves, first.ty, gemm, |lowering, left| {
                    (0..).zip(these).try_for_each(|(i, m)| {
                        let to = tile + i * m.rows * cols * 2;
                        lowering.unpack(of(m, cols), 0, m.rows, left, to)
                    })
                })?;
                these.iter().try_for_each(|m| self.add_bias(m, n_tokens))?;
                rest = others;
                continue;
            }
            if first.rows <= step {
                let gemm = Gemm {
                    bias: first.bias,
                    ..product(first)
                };
                self.sum(halves, first.ty, gemm, |lowering, left| {
                    lowering.unpack(of(first, cols), 0, first.rows, left, tile)
                })?;
                rest = others;
                continue;
            }
            let mut row = 0;
            while row < first.rows {
                let n = step.min(first.rows - row);
                let gemm = Gemm {
                    out: first.out + row * 4,
                    rows: n,
                    ..product(first)
                };
                self.sum(halves, first.ty, gemm, |lowering, left| {
                    lowering.unpack(of(first, cols), row, n, left, tile)
                })?;
                row += n;
            }
            self.add_bias(first, n_tokens)?;
            rest = others;
        }
        Ok(())
    }

    /// Queues what adds the bias of a matrix, if it has one, to a product of several launches.
    fn add_bias(&mut self, m: &Matrix, n_tokens: u64) -> Lowered {
        m.bias.map_or(Ok(()), |bias| {
            self.push(rows::add_bias(m.out, bias, m.rows, n_tokens as u32))
        })
    }

    /// Queues the products that sum up to one; the bias is added with the last. `unpack` brings
    /// its weights to where it reads them: as f16, or what that leaves.
    fn sum(
        &mut self,
        halves: Halves,
        ty: WeightType,
        gemm: Gemm,
        mut unpack: impl FnMut(&mut Self, bool) -> Lowered,
    ) -> Lowered {
        let mut terms = halves.terms(ty).enumerate().peekable();
        while let Some((i, (left, x, factor))) = terms.next() {
            if i == 0 || left {
                unpack(self, left)?;
            }
            let bias = gemm.bias.filter(|_| terms.peek().is_none());
            let adds_bias =
                bias.map(|bias| rows::add_bias(gemm.out, bias, gemm.rows, gemm.tokens as u32));
            let adds_bias = adds_bias.transpose().map_err(|e| launch_error(&e))?;
            let term = Gemm {
                x,
                factor,
                add: gemm.add || i > 0,
                bias,
                ..gemm
            };
            self.work.push(Queued::Gemm(term, adds_bias));
        }
        Ok(())
    }

    /// Queues `n` rows of a matrix from one on as f16, or what that leaves of them.
    fn unpack(&mut self, weights: Weights, row: u64, n: u64, left: bool, to: u64) -> Lowered {
        self.push(match left {
            false => weights::dequantize_f16(weights, row, n, to),
            true => weights::dequantize_low(weights, row, n, to),
        })
    }
}

/// How many of a matrix and those behind it have its shape and results at equal distances.
fn same_steps(first: &Matrix, others: &[Matrix]) -> u64 {
    let step = others
        .first()
        .map_or(0, |m| m.out.saturating_sub(first.out));
    if step == 0 {
        return 1;
    }
    let like = (1..).zip(others).take_while(|(i, m)| {
        // What is a sum of three products is not one of two.
        let alike = (m.ty == WeightType::F32) == (first.ty == WeightType::F32);
        alike && m.rows == first.rows && m.ty != WeightType::F16 && m.out == first.out + i * step
    });
    1 + like.count() as u64
}

/// A matrix as the kernels for weights take it.
fn of(m: &Matrix, cols: u64) -> Weights {
    Weights {
        ty: m.ty,
        at: m.weights,
        rows: m.rows,
        cols,
    }
}
