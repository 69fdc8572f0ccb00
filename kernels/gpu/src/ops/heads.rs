//! A product for each head (`hip/matmat_heads.hip`).

use super::matmat::MatmatArgs;
use super::matvec::MatvecFloatArgs;
use super::per_type;
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch};

const THREADS: u32 = 256;
const COLUMNS: u32 = 8;

arg_struct! {
    /// Arguments of `matmat_heads_<type>` for quantized types.
    MatmatHeadsArgs: 72 {
        product: MatmatArgs,
        n_head: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `matmat_heads_<type>` for floats.
    MatmatHeadsFloatArgs: 64 {
        product: MatvecFloatArgs,
        n_head: u32,
        reserved: u32,
    }
}

/// Matrices of all heads, one after another: `[n_head * rows][cols]` in the device's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadMatrices {
    /// Type.
    pub ty: WeightType,
    /// Device address of the weights.
    pub weights: Address,
    /// Heads.
    pub n_head: u32,
    /// Outputs of a head.
    pub rows: u64,
    /// Inputs of a head.
    pub cols: u64,
}

/// The input `[n_tokens][n_head][cols]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadInputs {
    /// f32, for float weights.
    pub x: Address,
    /// 8 bits for quantized weights: what `activations` makes of
    /// `n_tokens * n_head` rows of `cols`.
    pub q8: (Address, Address),
    /// Tokens.
    pub n_tokens: u32,
}

/// `out[t][h][r] = sum_k weights[h][r][k] * x[t][h][k]`.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`].
pub fn matmat_heads(
    target: &GpuTarget,
    inputs: HeadInputs,
    matrices: &HeadMatrices,
    out: Address,
) -> Result<Launch, Error> {
    let all_rows = matrices.rows * u64::from(matrices.n_head);
    crate::device_bytes(matrices.ty, all_rows, matrices.cols)?;
    count("the number of a matrix's rows", all_rows)?;
    let rows = count("the number of a matrix's rows", matrices.rows)?;
    let cols = count("the number of a matrix's columns", matrices.cols)?;
    let waves = THREADS / target.wave;
    let filling = (4 * target.compute_units.max(1)).div_ceil(matrices.n_head.max(1));
    let quantized = matrices.ty.is_quantized();
    let items = if quantized { rows.div_ceil(2) } else { rows };
    let n_blocks = items.div_ceil(waves).clamp(1, filling.max(1));
    let args = if quantized {
        ArgBytes::of(&MatmatHeadsArgs {
            product: MatmatArgs {
                weights: matrices.weights,
                x_bytes: inputs.q8.0,
                x_scales: inputs.q8.1,
                out,
                bias: 0,
                rows,
                cols,
                n_tokens: inputs.n_tokens,
                stride: rows,
                epilogue: 0,
                n_blocks,
            },
            n_head: matrices.n_head,
            reserved: 0,
        })
    } else {
        ArgBytes::of(&MatmatHeadsFloatArgs {
            product: MatvecFloatArgs {
                weights: matrices.weights,
                x: inputs.x,
                out,
                bias: 0,
                rows,
                cols,
                n_tokens: inputs.n_tokens,
                epilogue: 0,
                n_blocks,
                columns: COLUMNS,
            },
            n_head: matrices.n_head,
            reserved: 0,
        })
    };
    Ok(Launch {
        kernel: per_type!(matrices.ty, "matmat_heads_", ".matmat_heads_"),
        grid: [n_blocks, inputs.n_tokens.div_ceil(COLUMNS), matrices.n_head],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args,
        overlaps: true,
    })
}
