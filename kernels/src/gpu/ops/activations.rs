//! Rows of f32 made ready for what reads them next (`hip/activations.hip`): RMSNorm, residual sum, SwiGLU on the way in; f32, f16
//! or 8 bits on the way out.

use crate::gpu::error::count;
use crate::gpu::launch::{ArgBytes, arg_struct};
use crate::gpu::{Address, Error, Launch};

const THREADS: u32 = 256;

/// Elements of a row that a block takes where there is no norm.
const SPAN: u64 = THREADS as u64 * 8;

/// What [`Source::Silu`], and [`Source::Plain`], which may be its result, are multiplied by on their way to [`Sink::F16`]: they may go
/// beyond f16's range. A power of two; a product of such rows is to be divided by it.
pub const SWIGLU_F16_SCALE: f32 = 1.0 / 64.0;

arg_struct! {
    /// Of all its entries.
    ActivationsArgs: 48 {
        x: u64,
        other: u64,
        weight: u64,
        out: u64,
        scales: u64,
        eps: f32,
        cols: u32,
    }
}

/// What is computed of the rows `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// `x`.
    Plain,
    /// `x / sqrt(mean(x^2) + eps) * weight`.
    Norm {
        /// f32 `[cols]`.
        weight: Address,
        /// Added to the mean of squares.
        eps: f32,
    },
    /// `x += other`, stored, then the norm.
    AddNorm {
        /// f32 rows.
        other: Address,
        /// f32 `[cols]`.
        weight: Address,
        /// Added to the mean of squares.
        eps: f32,
    },
    /// `silu(x) * other`.
    Silu {
        /// f32 rows.
        other: Address,
    },
    /// `x += other`, stored.
    Add {
        /// f32 rows.
        other: Address,
    },
}

/// Where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sink {
    /// f32 `[rows][cols]`; may be `x` itself.
    F32(Address),
    /// f16 `[rows][cols]`, not over `x`; [`Source::Silu`] and [`Source::Plain`] times [`SWIGLU_F16_SCALE`]. Finite values beyond the
    /// range become the largest.
    F16(Address),
    /// 8 bits for products: [`q8_bytes`] bytes and [`q8_scale_bytes`] bytes of scales, both aligned to 16.
    Q8(Address, Address),
    /// Nowhere: only [`Source::Add`], the residual sum.
    Stored,
}

/// Bytes of the 8-bit form of `rows` rows, without the scales.
#[must_use]
pub const fn q8_bytes(rows: u64, cols: u64) -> u64 {
    rows * cols
}

/// Bytes of its scales.
#[must_use]
pub const fn q8_scale_bytes(rows: u64, cols: u64) -> u64 {
    rows * (cols / 32) * 8
}

/// One launch over `rows` rows of `cols` elements at `x`.
///
/// # Errors
/// [`Error::NoKernel`] for [`Sink::Stored`] of anything but a sum, or 8 bits of rows that are no whole number of 32.
pub fn activations(
    x: Address,
    rows: u64,
    cols: u64,
    source: Source,
    sink: Sink,
) -> Result<Launch, Error> {
    macro_rules! entries {
        ($name:literal) => {
            match sink {
                Sink::F32(_) => concat!("activations.activations_", $name, "_f32"),
                Sink::F16(_) => concat!("activations.activations_", $name, "_f16"),
                Sink::Q8(..) => concat!("activations.activations_", $name, "_q8"),
                Sink::Stored => "",
            }
        };
    }
    let (kernel, other, weight, eps) = match source {
        Source::Plain => (entries!("plain"), 0, 0, 0.0),
        Source::Norm { weight, eps } => (entries!("norm"), 0, weight, eps),
        Source::AddNorm { other, weight, eps } => (entries!("add_norm"), other, weight, eps),
        Source::Silu { other } => (entries!("silu"), other, 0, 0.0),
        Source::Add { other } if sink == Sink::Stored => {
            ("activations.activations_add_none", other, 0, 0.0)
        }
        Source::Add { other } => (entries!("add"), other, 0, 0.0),
    };
    if kernel.is_empty() || matches!(sink, Sink::Q8(..)) && !cols.is_multiple_of(32) {
        return Err(Error::NoKernel {
            what: format!("{source:?} of rows of {cols} to {sink:?}"),
            built: "8 bits of rows of a multiple of 32, and sums without an output",
        });
    }
    let (out, scales) = match sink {
        Sink::F32(out) | Sink::F16(out) => (out, 0),
        Sink::Q8(bytes, scales) => (bytes, scales),
        Sink::Stored => (0, 0),
    };
    let args = ActivationsArgs {
        x,
        other,
        weight,
        out,
        scales,
        eps,
        cols: count("the width of a row", cols)?,
    };
    let normed = matches!(source, Source::Norm { .. } | Source::AddNorm { .. });
    let parts = if normed { 1 } else { cols.div_ceil(SPAN) };
    Ok(Launch {
        kernel,
        grid: [
            count("the number of rows", rows)?,
            count("the parts of a row", parts)?,
            1,
        ],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
