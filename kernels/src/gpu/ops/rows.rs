//! Rows moved and biases added (`hip/gather.hip`, `hip/add_bias.hip`).

use crate::gpu::error::count;
use crate::gpu::launch::{ArgBytes, arg_struct};
use crate::gpu::{Address, Error, Launch};

const THREADS: u32 = 256;

arg_struct! {
    /// Of `gather`.
    GatherArgs: 32 {
        x: u64,
        out: u64,
        rows: u64,
        cols: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Of `add_bias`.
    AddBiasArgs: 24 {
        out: u64,
        bias: u64,
        rows: u32,
        reserved: u32,
    }
}

/// `out[i] = x[rows[i]]`, f32 rows of `cols`; `rows` is u32 `[n]` in device memory.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn gather(x: Address, rows: Address, n: u32, cols: u64, out: Address) -> Result<Launch, Error> {
    let cols = count("the width of a row", cols)?;
    let args = GatherArgs {
        x,
        out,
        rows,
        cols,
        reserved: 0,
    };
    Ok(Launch {
        kernel: "gather.gather",
        grid: [cols.div_ceil(4 * THREADS), n, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// `out[t][r] += bias[r]`, f32 `[tokens][rows]`.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn add_bias(out: Address, bias: Address, rows: u64, tokens: u32) -> Result<Launch, Error> {
    let rows = count("the number of a matrix's rows", rows)?;
    let args = AddBiasArgs {
        out,
        bias,
        rows,
        reserved: 0,
    };
    Ok(Launch {
        kernel: "add_bias.add_bias",
        grid: [rows.div_ceil(THREADS), tokens, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
