//! Products of many rows: by the vendor's library, on tiles of the weights as f16, or on the weights where they are f16.

use rocmforge_kernels::gpu::ops::matmat::HalfInputs;
use rocmforge_kernels::gpu::ops::matvec::Matrix;
use rocmforge_kernels::gpu::ops::rows;
use rocmforge_kernels::gpu::ops::weights::{self, Weights};
use rocmforge_ops::WeightType;

use crate::Bound;
use crate::gpu::blas::Gemm;

use super::{Input, Lowered, Lowering, Work};

impl Lowering<'_> {
    /// Queues products of one input.
    pub(super) fn tiled(
        &mut self,
        input: Input,
        matrices: &[Matrix],
        add: bool,
        bound: Bound<'_>,
    ) -> Lowered {
        let HalfInputs {
            x: half,
            cols,
            n_tokens: tokens,
            factor,
        } = self.half(input, bound)?;
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
            x: half,
            out: m.out,
            rows: m.rows,
            cols,
            tokens,
            stride: m.rows,
            batch: 1,
            out_step: 0,
            factor,
            add,
        };
        let mut rest = matrices;
        while let Some((first, others)) = rest.split_first() {
            if first.ty == WeightType::F16 {
                self.work.push(Work::Gemm(Gemm {
                    weights: first.weights,
                    ..product(first)
                }));
                rest = others;
                continue;
            }
            // Small matrices of one shape side by side: each by itself would leave much of the card idle.
            let batch = same_steps(first, others).min(tile_rows / first.rows.max(1));
            if batch > 1 {
                let (these, others) = rest.split_at(batch as usize);
                for (i, m) in (0..).zip(these) {
                    let to = tile + i * m.rows * cols * 2;
                    self.push(weights::dequantize_f16(of(m, cols), 0, m.rows, to))?;
                }
                self.work.push(Work::Gemm(Gemm {
                    batch,
                    out_step: these[1].out - first.out,
                    ..product(first)
                }));
                rest = others;
                continue;
            }
            let mut row = 0;
            while row < first.rows {
                let n = step.min(first.rows - row);
                self.push(weights::dequantize_f16(of(first, cols), row, n, tile))?;
                self.work.push(Work::Gemm(Gemm {
                    out: first.out + row * 4,
                    rows: n,
                    ..product(first)
                }));
                row += n;
            }
            rest = others;
        }
        for m in matrices {
            if let Some(bias) = m.bias {
                self.push(rows::add_bias(m.out, bias, m.rows, tokens as u32))?;
            }
        }
        Ok(())
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
        m.rows == first.rows && m.ty != WeightType::F16 && m.out == first.out + i * step
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
