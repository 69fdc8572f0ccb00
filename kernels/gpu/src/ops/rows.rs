//! Rows moved, biases added, layer norms (`hip/gather.hip`, `hip/add_bias.hip`,
//! `hip/layer_norm.hip`).

use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, Launch};

const THREADS: u32 = 256;

arg_struct! {
    /// Arguments of `gather`.
    GatherArgs: 32 {
        x: u64,
        out: u64,
        rows: u64,
        cols: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `gather_outputs`.
    GatherOutputsArgs: 48 {
        x: u64,
        out: u64,
        rows: u64,
        sequences: u64,
        places: u64,
        cols: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `add_bias`.
    AddBiasArgs: 24 {
        out: u64,
        bias: u64,
        rows: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `layer_norm`.
    LayerNormArgs: 48 {
        x: u64,
        weight: u64,
        bias: u64,
        out: u64,
        eps: f32,
        cols: u32,
        weight_rows: u32,
        reserved: u32,
    }
}

/// `out[i] = x[rows[i]]`, f32 rows of `cols`; `rows` is u32 `[n]`. `x` and `rows` lie in the
/// device's memory, or in pinned memory of the host.
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

/// Where a pass says of which span a row is, and which rows a span has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spans {
    /// u32, one a row.
    pub sequences: Address,
    /// [`SequencePlace`](super::recurrent::SequencePlace), one a span.
    pub places: Address,
}

/// As [`gather`], of rows of which one with [`MEAN_OF_SPAN`](rocmforge_ops::MEAN_OF_SPAN) stands
/// for the mean of its span's rows.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn gather_outputs(
    x: Address,
    rows: Address,
    n: u32,
    cols: u64,
    out: Address,
    spans: Spans,
) -> Result<Launch, Error> {
    let cols = count("the width of a row", cols)?;
    let args = GatherOutputsArgs {
        x,
        out,
        rows,
        sequences: spans.sequences,
        places: spans.places,
        cols,
        reserved: 0,
    };
    Ok(Launch {
        kernel: "gather.gather_outputs",
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

/// A layer norm over each group of a row, with a bias behind it or none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNorm {
    /// f32.
    pub weight: Address,
    /// f32, as `weight`.
    pub bias: Option<Address>,
    /// Whether `weight` has an element for each column; else it has one for each element of a
    /// group.
    pub weight_of_row: bool,
    /// Elements of a group; divides the row.
    pub group: u64,
    /// Added to the variance.
    pub eps: f32,
}

/// `out = (x - mean) / sqrt(var + eps) * weight + bias` of `rows` rows of `cols` f32.
///
/// # Errors
/// [`Error::NoKernel`] where groups do not divide a row, [`Error::TooLarge`].
pub fn layer_norm(
    x: Address,
    rows: u64,
    cols: u64,
    norm: &LayerNorm,
    out: Address,
) -> Result<Launch, Error> {
    if norm.group == 0 || !cols.is_multiple_of(norm.group) {
        return Err(Error::NoKernel {
            what: format!("a layer norm of groups of {} in rows of {cols}", norm.group),
            built: "groups that divide a row",
        });
    }
    let groups = cols / norm.group;
    let args = LayerNormArgs {
        x,
        weight: norm.weight,
        bias: norm.bias.unwrap_or(0),
        out,
        eps: norm.eps,
        cols: count("the width of a group", norm.group)?,
        weight_rows: match norm.weight_of_row {
            true => count("the groups of a row", groups)?,
            false => 1,
        },
        reserved: 0,
    };
    Ok(Launch {
        kernel: "layer_norm.layer_norm",
        grid: [count("the number of groups", rows * groups)?, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
