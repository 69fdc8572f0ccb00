//! Rows changed element by element, gathered by columns, and routed rows summed
//! (`hip/elements.hip`, `hip/clamp.hip`).

use crate::error::count;
use crate::launch::{ArgBytes, ArgField, arg_struct};
use crate::ops::activations::ActSpec;
use crate::{Address, Error, Launch};
use rocmforge_ops::Act;

const THREADS: u32 = 256;

/// Maximum number of parts of [`columns`].
pub const PARTS_MAX: usize = 4;

arg_struct! {
    /// Arguments of `scale`, `soft_cap`, `add_gated`, `add_weighted`, `gate_heads`,
    /// `position_scale` and `add_table`.
    ElementsArgs: 48 {
        x: u64,
        y: u64,
        by: u64,
        positions: u64,
        factor: f32,
        span: u32,
        cols: u32,
        act: u32,
    }
}

arg_struct! {
    /// A part of `columns`.
    ColumnPlace: 24 {
        x: u64,
        cols: u32,
        first: u32,
        stride: u32,
        width: u32,
    }
}

arg_struct! {
    /// Arguments of `columns`.
    ColumnsArgs: 112 {
        out: u64,
        n_group: u32,
        group_width: u32,
        parts: [ColumnPlace; PARTS_MAX],
    }
}

arg_struct! {
    /// Arguments of `combine`.
    CombineArgs: 40 {
        y: u64,
        weights: u64,
        out: u64,
        cols: u32,
        n_used: u32,
        add: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `product_transposed`.
    ProductTransposedArgs: 40 {
        x: u64,
        weight: u64,
        out: u64,
        n_in: u32,
        cols: u32,
        rows: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `clamp`.
    ClampArgs: 40 {
        x: u64,
        out: u64,
        low: u64,
        high: u64,
        cols: u32,
        reserved: u32,
    }
}

/// What is done to the rows `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// `x *= factor`.
    Scale(f32),
    /// `x *= by[0]`.
    ScaleBy(Address),
    /// `x = cap * tanh(x / cap)`.
    SoftCap(f32),
    /// `x[t] += sigmoid(gate[t]) * y[t]`.
    AddGated {
        /// f32 rows.
        y: Address,
        /// f32 `[rows]`.
        gate: Address,
    },
    /// `x[t] += weight * y[t]`, element by element.
    AddWeighted {
        /// f32 rows.
        y: Address,
        /// f32 `[cols]`.
        weight: Address,
    },
    /// `x[t][h] *= act(gate[t][h])` for heads of `head_dim` elements.
    GateHeads {
        /// f32 `[rows][cols / head_dim]`.
        gate: Address,
        /// Elements of a head; divides `cols`.
        head_dim: u32,
        /// A function of one element.
        act: Act,
    },
    /// `x[t] += table[positions[t]]`, or `x[t] += table[0]`.
    AddTable {
        /// f32 rows of `cols`.
        table: Address,
        /// u32 `[rows]`; `None` for the table's first row.
        positions: Option<Address>,
    },
    /// `x[t] *= 1 + beta * ln(1 + floor(positions[t] / span))`.
    PositionScale {
        /// u32 `[rows]`.
        positions: Address,
        /// Strength.
        beta: f32,
        /// Positions of a step; at least 1.
        span: u32,
    },
}

/// Changes `rows` rows of `cols` elements at `x` in place.
///
/// # Errors
/// [`Error::NoKernel`] for a function of two elements, or heads that do not divide a
/// row; [`Error::TooLarge`].
pub fn change(x: Address, rows: u64, cols: u64, what: Change) -> Result<Launch, Error> {
    let mut args = ElementsArgs {
        x,
        factor: 1.0,
        span: 1,
        cols: count("the width of a row", cols)?,
        ..ElementsArgs::default()
    };
    let kernel = match what {
        Change::Scale(factor) => {
            args.factor = factor;
            "elements.scale"
        }
        Change::ScaleBy(by) => {
            args.by = by;
            "elements.scale"
        }
        Change::SoftCap(cap) => {
            args.factor = cap;
            "elements.soft_cap"
        }
        Change::AddGated { y, gate } => {
            (args.y, args.by) = (y, gate);
            "elements.add_gated"
        }
        Change::AddWeighted { y, weight } => {
            (args.y, args.by) = (y, weight);
            "elements.add_weighted"
        }
        Change::GateHeads {
            gate,
            head_dim,
            act,
        } => {
            let alone = !matches!(act, Act::SwigluClamped { .. });
            if !alone || head_dim == 0 || !args.cols.is_multiple_of(head_dim) {
                return Err(Error::NoKernel {
                    what: format!("{act:?} of heads of {head_dim} in rows of {cols}"),
                    built: "functions of one element, heads that divide a row",
                });
            }
            (args.by, args.span, args.act) = (gate, head_dim, ActSpec::new(act).kind);
            "elements.gate_heads"
        }
        Change::AddTable { table, positions } => {
            (args.y, args.positions) = (table, positions.unwrap_or(0));
            "elements.add_table"
        }
        Change::PositionScale {
            positions,
            beta,
            span,
        } => {
            (args.positions, args.factor, args.span) = (positions, beta, span.max(1));
            "elements.position_scale"
        }
    };
    launch(kernel, args.cols, rows, &args)
}

/// `out = min(max(x, low[0]), high[0])` of `rows` rows of `cols` elements; `out` may be `x`.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn clamp(
    x: Address,
    rows: u64,
    cols: u64,
    [low, high]: [Address; 2],
    out: Address,
) -> Result<Launch, Error> {
    let args = ClampArgs {
        x,
        out,
        low,
        high,
        cols: count("the width of a row", cols)?,
        reserved: 0,
    };
    launch("clamp.clamp", args.cols, rows, &args)
}

/// A part of [`columns`]: `width` elements for each group, from rows of `cols` at `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// f32 rows.
    pub x: Address,
    /// Elements a row of theirs.
    pub cols: u64,
    /// The first group's first element.
    pub first: u32,
    /// Elements from one group's first to the next one's.
    pub stride: u32,
    /// Elements a group.
    pub width: u32,
}

/// Row `t` of `out` has for each of `n_group` groups its parts one after another.
///
/// # Errors
/// [`Error::NoKernel`] for no part, more than [`PARTS_MAX`], or one that reaches past its
/// rows; [`Error::TooLarge`].
pub fn columns(parts: &[Part], n_group: u32, rows: u64, out: Address) -> Result<Launch, Error> {
    let reach = |p: &Part| {
        u64::from(p.first)
            + u64::from(n_group.saturating_sub(1)) * u64::from(p.stride)
            + u64::from(p.width)
    };
    let width: u64 = parts.iter().map(|p| u64::from(p.width)).sum();
    let fits = parts.iter().all(|p| reach(p) <= p.cols);
    if parts.len() > PARTS_MAX || n_group == 0 || width == 0 || !fits {
        return Err(Error::NoKernel {
            what: format!("a gather of {n_group} groups of {parts:?}"),
            built: "1 to 4 parts within their rows",
        });
    }
    let mut args = ColumnsArgs {
        out,
        n_group,
        group_width: count("the width of a group", width)?,
        ..ColumnsArgs::default()
    };
    for (to, part) in args.parts.iter_mut().zip(parts) {
        *to = ColumnPlace {
            x: part.x,
            cols: count("the width of a row", part.cols)?,
            first: part.first,
            stride: part.stride,
            width: part.width,
        };
    }
    let cols = count("the width of a row", u64::from(n_group) * width)?;
    launch("elements.columns", cols, rows, &args)
}

/// `out[t] = sum_s weights[t][s] * y[t * n_used + s]` for `rows` rows `t` of `cols` elements;
/// with `add`, `out[t] +=` that.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn combine(
    y: Address,
    weights: Address,
    n_used: u32,
    rows: u64,
    cols: u64,
    out: Address,
    add: bool,
) -> Result<Launch, Error> {
    let args = CombineArgs {
        y,
        weights,
        out,
        cols: count("the width of a row", cols)?,
        n_used,
        add: u32::from(add),
        reserved: 0,
    };
    launch("elements.combine", args.cols, rows, &args)
}

/// Rows of a block of [`product_transposed`].
const TRANSPOSED_ROWS: u32 = 8;

/// `out[t][r] = sum_k x[t][k] * weight[k][r]` for `rows` rows `t` of `cols` elements; `x` is where
/// rows of so many elements are, `weight` f32.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn product_transposed(
    (x, n_in): (Address, u64),
    weight: Address,
    rows: u64,
    cols: u64,
    out: Address,
) -> Result<Launch, Error> {
    let args = ProductTransposedArgs {
        x,
        weight,
        out,
        n_in: count("the width of a row", n_in)?,
        cols: count("the width of a row", cols)?,
        rows: count("the number of rows", rows)?,
        reserved: 0,
    };
    let blocks = u64::from(args.rows.div_ceil(TRANSPOSED_ROWS));
    launch("elements.product_transposed", args.cols, blocks, &args)
}

fn launch<T: ArgField>(
    kernel: &'static str,
    cols: u32,
    rows: u64,
    args: &T,
) -> Result<Launch, Error> {
    Ok(Launch {
        kernel,
        grid: [
            cols.div_ceil(THREADS),
            count("the number of rows", rows)?,
            1,
        ],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(args),
        overlaps: true,
    })
}
