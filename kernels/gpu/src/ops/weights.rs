//! Weights: from the file's layout to the device's, and from that to f16 or f32
//! (`hip/repack.hip`, `hip/dequantize.hip`).

use super::per_type;
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, Launch, device_bytes};

const THREADS: u64 = 256;

arg_struct! {
    /// Arguments of `repack_<type>`.
    RepackArgs: 40 {
        from: u64,
        to: u64,
        flag: u64,
        first_row: u32,
        rows: u32,
        total_rows: u32,
        cols: u32,
    }
}

arg_struct! {
    /// Arguments of `dequantize_<type>` and `rows_<type>`.
    DequantizeArgs: 40 {
        weights: u64,
        out: u64,
        ids: u64,
        first_row: u32,
        rows: u32,
        total_rows: u32,
        cols: u32,
    }
}

/// A matrix on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Type.
    pub ty: WeightType,
    /// Device address of the matrix: [`device_bytes`] long, aligned to 256.
    pub at: Address,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

fn grid(items: u64) -> Result<[u32; 3], Error> {
    Ok([
        count("the number of blocks", items.div_ceil(THREADS))?,
        1,
        1,
    ])
}

/// Repacks `n_rows` rows from `first_row` on, which lie at `from` as in the file (any alignment to
/// 4 bytes for F32, 2 for others), into their places in `to`. A scale (for floats: a weight) that
/// is NaN or infinite sets bit 0 of the u32 at `flag`.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`].
pub fn repack(
    to: Weights,
    from: Address,
    first_row: u64,
    n_rows: u64,
    flag: Address,
) -> Result<Launch, Error> {
    device_bytes(to.ty, to.rows, to.cols)?;
    let args = RepackArgs {
        from,
        to: to.at,
        flag,
        first_row: count("the number of a row", first_row)?,
        rows: count("the number of rows", n_rows)?,
        total_rows: count("the number of rows", to.rows)?,
        cols: count("the number of columns", to.cols)?,
    };
    let items = if to.ty.is_quantized() {
        n_rows * (to.cols / 32)
    } else {
        (n_rows * to.cols).div_ceil(32)
    };
    Ok(Launch {
        kernel: per_type!(to.ty, "repack.repack_"),
        grid: grid(items)?,
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: false,
    })
}

/// `n_rows` rows from `first_row` on as f16 `[n_rows][cols]` at `out`.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`].
pub fn dequantize_f16(
    weights: Weights,
    first_row: u64,
    n_rows: u64,
    out: Address,
) -> Result<Launch, Error> {
    let args = DequantizeArgs {
        first_row: count("the number of a row", first_row)?,
        ..arguments(weights, n_rows, out)?
    };
    launch(
        per_type!(weights.ty, "dequantize_", ".dequantize_"),
        &args,
        weights,
        n_rows,
    )
}

/// What [`dequantize_f16`] leaves of the same rows of an F32 matrix, times
/// [`F16_LOW_SCALE`](super::activations::F16_LOW_SCALE), as f16 `[n_rows][cols]` at `out`.
///
/// # Errors
/// As [`dequantize_f16`]; [`Error::NoKernel`] for another type, of which f16
/// leaves nothing that counts.
pub fn dequantize_low(
    weights: Weights,
    first_row: u64,
    n_rows: u64,
    out: Address,
) -> Result<Launch, Error> {
    if weights.ty != WeightType::F32 {
        return Err(Error::NoKernel {
            what: format!("what f16 leaves of {}", weights.ty),
            built: "F32",
        });
    }
    let args = DequantizeArgs {
        first_row: count("the number of a row", first_row)?,
        ..arguments(weights, n_rows, out)?
    };
    launch("dequantize_f32.dequantize_low_f32", &args, weights, n_rows)
}

/// `out[i] = W[ids[i]]` as f32 `[n][cols]`; `ids` is u32 `[n]` in device memory. Embedding rows.
///
/// # Errors
/// As [`dequantize_f16`].
pub fn rows_f32(weights: Weights, ids: Address, n: u64, out: Address) -> Result<Launch, Error> {
    let args = DequantizeArgs {
        ids,
        ..arguments(weights, n, out)?
    };
    let kernel = per_type!(weights.ty, "dequantize_", ".rows_");
    Ok(Launch {
        overlaps: true,
        ..launch(kernel, &args, weights, n)?
    })
}

fn arguments(weights: Weights, rows: u64, out: Address) -> Result<DequantizeArgs, Error> {
    device_bytes(weights.ty, weights.rows, weights.cols)?;
    Ok(DequantizeArgs {
        weights: weights.at,
        out,
        ids: 0,
        first_row: 0,
        rows: count("the number of rows", rows)?,
        total_rows: count("the number of rows", weights.rows)?,
        cols: count("the number of columns", weights.cols)?,
    })
}

fn launch(
    kernel: &'static str,
    args: &DequantizeArgs,
    weights: Weights,
    rows: u64,
) -> Result<Launch, Error> {
    Ok(Launch {
        kernel,
        grid: grid(rows * weights.cols.div_ceil(32))?,
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(args),
        overlaps: false,
    })
}
