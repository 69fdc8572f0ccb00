//! Products for a few tokens (`hip/matmat.hip`, `hip/matmat_staged.h`): 2 to 128, right for any number.

use super::matvec::{Matrix, float_tokens};
use super::per_type;
use crate::gpu::error::count;
use crate::gpu::launch::{ArgBytes, arg_struct};
use crate::gpu::{Address, Error, GpuTarget, Launch};

const THREADS: u32 = 256;
const ROWS: u32 = 2;
const COLUMNS: u32 = 8;

/// Rows of a block of `matmat_f16_<tokens>_<type>`.
const F16_ROWS: u32 = 32;

/// Dynamic shared memory of such a block for each of its tokens: 8 waves, 3 steps, 32 f16.
const F16_SHARED_TOKEN: u32 = 8 * 3 * 64;

arg_struct! {
    /// Of `matmat_<type>`.
    MatmatArgs: 64 {
        weights: u64,
        x_bytes: u64,
        x_scales: u64,
        out: u64,
        bias: u64,
        rows: u32,
        cols: u32,
        n_tokens: u32,
        stride: u32,
        epilogue: u32,
        n_blocks: u32,
    }
}

arg_struct! {
    /// Of `matmat_f16_<tokens>_<type>`.
    MatmatF16Args: 56 {
        weights: u64,
        x: u64,
        out: u64,
        bias: u64,
        rows: u32,
        cols: u32,
        n_tokens: u32,
        stride: u32,
        epilogue: u32,
        factor: f32,
    }
}

/// Input rows as f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HalfInputs {
    /// f16 `[n_tokens][cols]`, aligned to 16.
    pub x: Address,
    /// Elements a row.
    pub cols: u64,
    /// Rows.
    pub n_tokens: u64,
    /// What products are multiplied by.
    pub factor: f32,
}

/// [`matmat`] of f16 rows by matrix instructions: quantized weights, and a target that [has them](GpuTarget::has_mma).
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`]; [`Error::NoKernel`] for another target or floats.
pub fn matmat_f16(
    target: &GpuTarget,
    inputs: HalfInputs,
    matrix: &Matrix,
    add: bool,
) -> Result<Launch, Error> {
    if !target.has_mma() || !matrix.ty.is_quantized() {
        return Err(Error::NoKernel {
            what: format!("products of {} with f16 rows on {}", matrix.ty, target.arch),
            built: "quantized weights on NVIDIA GPUs from sm_80 on",
        });
    }
    crate::gpu::device_bytes(matrix.ty, matrix.rows, inputs.cols)?;
    let rows = count("the number of a matrix's rows", matrix.rows)?;
    let args = MatmatF16Args {
        weights: matrix.weights,
        x: inputs.x,
        out: matrix.out,
        bias: matrix.bias.unwrap_or(0),
        rows,
        cols: count("the number of a matrix's columns", inputs.cols)?,
        n_tokens: count("the number of tokens", inputs.n_tokens)?,
        stride: rows,
        epilogue: u32::from(add),
        factor: inputs.factor,
    };
    // More tokens a block unpack each weight less often; fewer leave room for two blocks at a time.
    let (tokens, kernel) = match args.n_tokens {
        ..=32 => (32, per_type!(matrix.ty, "matmat_", ".matmat_f16_32_")),
        _ => (64, per_type!(matrix.ty, "matmat_", ".matmat_f16_64_")),
    };
    Ok(Launch {
        kernel,
        grid: [rows.div_ceil(F16_ROWS), args.n_tokens.div_ceil(tokens), 1],
        block: [THREADS, 1, 1],
        shared_bytes: tokens * F16_SHARED_TOKEN,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// The input rows, in both forms that weights may want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// f32 `[n_tokens][cols]`, for float weights; may be 0 if there are none.
    pub x: Address,
    /// 8 bits, from `activations` with [`Sink::Q8`](super::activations::Sink): bytes and scales; may be 0 if all weights are floats.
    pub q8: (Address, Address),
    /// Elements a row.
    pub cols: u64,
    /// Rows.
    pub n_tokens: u64,
}

/// `out[t][r] = sum_k W[r][k] x[t][k] (+ bias)`, or added to out: `out` is f32 `[n_tokens][rows]`.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`].
pub fn matmat(
    target: &GpuTarget,
    inputs: Inputs,
    matrix: &Matrix,
    add: bool,
) -> Result<Launch, Error> {
    if !matrix.ty.is_quantized() {
        return float_tokens(target, matrix, inputs.x, inputs.cols, inputs.n_tokens, add);
    }
    crate::gpu::device_bytes(matrix.ty, matrix.rows, inputs.cols)?;
    let rows = count("the number of a matrix's rows", matrix.rows)?;
    let groups = rows.div_ceil(ROWS);
    let n_blocks = groups
        .div_ceil(THREADS / target.wave)
        .clamp(1, 4 * target.compute_units.max(1));
    let args = MatmatArgs {
        weights: matrix.weights,
        x_bytes: inputs.q8.0,
        x_scales: inputs.q8.1,
        out: matrix.out,
        bias: matrix.bias.unwrap_or(0),
        rows,
        cols: count("the number of a matrix's columns", inputs.cols)?,
        n_tokens: count("the number of tokens", inputs.n_tokens)?,
        stride: rows,
        epilogue: u32::from(add),
        n_blocks,
    };
    Ok(Launch {
        kernel: per_type!(matrix.ty, "matmat_", ".matmat_"),
        grid: [n_blocks, args.n_tokens.div_ceil(COLUMNS), 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
