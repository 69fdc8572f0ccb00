//! Products of a few tokens with f16 weights (`hip/matmat_floats.h`).

use super::{MATRICES_MAX, THREADS};
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::ops::activations::GATED_F16_SCALE;
use crate::ops::matvec::Matrix;
use crate::{Address, Error, GpuTarget, Launch, WeightType};

/// Tokens of a block.
const TOKENS: u64 = 16;

/// Columns of a wave's step.
const STEP: u64 = 64;

/// Rows of the smallest block.
const ROWS: u64 = 8;

arg_struct! {
    /// One of the matrices of `matmat_floats_<tiles>_f16`.
    FloatMatrix: 32 {
        weights: u64,
        out: u64,
        bias: u64,
        rows: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `matmat_floats_<tiles>_f16`.
    MatmatFloatsArgs: 160 {
        x: u64,
        cols: u32,
        n_tokens: u32,
        epilogue: u32,
        n_matrices: u32,
        scale: f32,
        reserved: u32,
        matrices: [FloatMatrix; MATRICES_MAX],
    }
}

/// Whether [`matmat_floats`] does products of so many tokens: by counting, from as many on as read
/// the weights less often so than by [`super::matmat`], up to those of one block.
#[must_use]
pub fn takes_floats(target: &GpuTarget, matrices: &[Matrix], cols: u64, n_tokens: u64) -> bool {
    target.has_mma()
        && (4..=TOKENS).contains(&n_tokens)
        && cols.is_multiple_of(STEP)
        && matrices.iter().all(|m| m.ty == WeightType::F16)
}

/// `out[t][r] = sum_k W[r][k] x[t][k] (+ bias)`, or added to out, of f16 weights and f32 rows by
/// matrix instructions, where [`takes_floats`]: as exact as with 22 bits of each element of `x`
/// `[n_tokens][cols]`, and to 2^-30 of elements below 2^-8. Four matrices share a launch.
///
/// # Errors
/// [`Error::TooLarge`]; [`Error::NoKernel`] where it does not.
pub fn matmat_floats(
    target: &GpuTarget,
    x: Address,
    (cols, n_tokens): (u64, u64),
    matrices: &[Matrix],
    add: bool,
) -> Result<Vec<Launch>, Error> {
    if !takes_floats(target, matrices, cols, n_tokens) {
        return Err(Error::NoKernel {
            what: format!("products of {n_tokens} rows of {cols} on {}", target.arch),
            built: "4 to 16 rows, multiples of 64, with f16 weights on NVIDIA GPUs from sm_80 on",
        });
    }
    let launch = |some: &[Matrix]| {
        let mut of = [FloatMatrix::default(); MATRICES_MAX];
        for (to, matrix) in of.iter_mut().zip(some) {
            *to = FloatMatrix {
                weights: matrix.weights,
                out: matrix.out,
                bias: matrix.bias.unwrap_or(0),
                rows: count("the number of a matrix's rows", matrix.rows)?,
                reserved: 0,
            };
        }
        let blocks = |tiles: u64| -> u64 {
            let of = some.iter().map(|m| m.rows.div_ceil(ROWS * tiles));
            of.sum()
        };
        // A block reads all of x: few blocks read it less often, as long as most multiprocessors
        // have one.
        let enough = u64::from(target.compute_units) * 7 / 8;
        let tiles = [4, 2].into_iter().find(|&tiles| blocks(tiles) >= enough);
        let tiles = tiles.unwrap_or(1);
        let args = MatmatFloatsArgs {
            x,
            cols: count("the number of a matrix's columns", cols)?,
            n_tokens: count("the number of tokens", n_tokens)?,
            epilogue: u32::from(add),
            n_matrices: some.len() as u32,
            scale: GATED_F16_SCALE,
            reserved: 0,
            matrices: of,
        };
        Ok(Launch {
            kernel: match tiles {
                4 => "matvec_f16.matmat_floats_4_f16",
                2 => "matvec_f16.matmat_floats_2_f16",
                _ => "matvec_f16.matmat_floats_1_f16",
            },
            grid: [
                count("the number of blocks", blocks(tiles))?,
                n_tokens.div_ceil(TOKENS) as u32,
                1,
            ],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: ArgBytes::of(&args),
            overlaps: true,
        })
    };
    matrices.chunks(MATRICES_MAX).map(launch).collect()
}
