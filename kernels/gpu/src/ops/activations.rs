//! Rows of f32 made ready for what reads them next (`hip/activations.hip`): RMSNorm, residual sum,
//! gated unit on the way in; f32, f16 or 8 bits on the way out.

use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, Launch};
use rocmforge_ops::Act;

const THREADS: u32 = 256;

/// Elements of a row that a block takes where there is no norm.
const SPAN: u64 = THREADS as u64 * 8;

/// What [`Transform::Gate`], and [`Transform::Plain`], which may be its result, are multiplied by
/// on their way to [`Sink::F16`]: they may go beyond f16's range. A power of two; a product of such
/// rows is to be divided by it.
pub const GATED_F16_SCALE: f32 = 1.0 / 64.0;

/// What the second of two f16 is multiplied by, for products and weights alike: see
/// `hip/f16_pair.h`.
pub const F16_LOW_SCALE: f32 = 2048.0;

arg_struct! {
    /// `ActSpec` of act.h.
    ActSpec: 16 {
        kind: u32,
        alpha: f32,
        limit: f32,
        reserved: u32,
    }
}

impl ActSpec {
    pub(super) fn new(act: Act) -> ActSpec {
        let plain = |kind| ActSpec {
            kind,
            ..ActSpec::default()
        };
        match act {
            Act::Identity => plain(0),
            Act::Silu => plain(1),
            Act::GeluTanh => plain(2),
            Act::ReluSquared => plain(3),
            Act::Sigmoid => plain(4),
            Act::Softplus => plain(5),
            Act::SwigluClamped { alpha, limit } => ActSpec {
                kind: 6,
                alpha,
                limit,
                reserved: 0,
            },
            Act::GeluErf => plain(7),
        }
    }

    /// The function that it stands for; `None` for none.
    #[must_use]
    pub fn act(&self) -> Option<Act> {
        Some(match self.kind {
            0 => Act::Identity,
            1 => Act::Silu,
            2 => Act::GeluTanh,
            3 => Act::ReluSquared,
            4 => Act::Sigmoid,
            5 => Act::Softplus,
            6 => Act::SwigluClamped {
                alpha: self.alpha,
                limit: self.limit,
            },
            7 => Act::GeluErf,
            _ => return None,
        })
    }
}

arg_struct! {
    /// Arguments of all entries of `activations.hip`.
    ActivationsArgs: 80 {
        x: u64,
        other: u64,
        weight: u64,
        out: u64,
        scales: u64,
        eps: f32,
        cols: u32,
        factor: f32,
        weight_rows: u32,
        act: ActSpec,
        rows: u32,
        reserved: u32,
    }
}

/// An RMSNorm: `x / sqrt(mean(x^2) + eps) * weight` over each group of elements of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// f32; `None` for 1.
    pub weight: Option<Address>,
    /// Whether `weight` has an element for each column; else it has one for each element of a
    /// group.
    pub weight_of_row: bool,
    /// Elements of a group; divides the row. Smaller than the row only to
    /// [`Sink::F32`] and [`Sink::F16`].
    pub group: u64,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl Norm {
    /// Of whole rows of `cols`, with one weight a column.
    #[must_use]
    pub const fn of_row(weight: Address, cols: u64, eps: f32) -> Norm {
        Norm {
            weight: Some(weight),
            weight_of_row: true,
            group: cols,
            eps,
        }
    }
}

/// The function that is computed of the rows `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Transform {
    /// `x`.
    Plain,
    /// The norm of `x`.
    Norm(Norm),
    /// `x += scale * other`, stored, then the norm.
    AddNorm {
        /// f32 rows.
        other: Address,
        /// Factor on them.
        scale: f32,
        /// The norm that is applied to the sum.
        norm: Norm,
    },
    /// `act(x) * other`, or `act(x)` where there is no other.
    Gate {
        /// f32 rows.
        other: Option<Address>,
        /// The function.
        act: Act,
    },
    /// `x += scale * other`, stored.
    Add {
        /// f32 rows.
        other: Address,
        /// Factor on them.
        scale: f32,
    },
}

/// Destination of the transformed rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sink {
    /// f32 `[rows][cols]`; may be `x` itself.
    F32(Address),
    /// f16 `[rows][cols]`, not over `x`; [`Transform::Gate`] and [`Transform::Plain`] times
    /// [`GATED_F16_SCALE`]. Finite values beyond the range become the largest.
    F16(Address),
    /// As [`Sink::F16`], and at the second address f16 `[rows][cols]` with what that leaves,
    /// times [`F16_LOW_SCALE`]: together exact to 22 bits. Of [`Transform::Plain`],
    /// [`Transform::Norm`] and [`Transform::Gate`].
    F16Pair(Address, Address),
    /// As [`Sink::F16`], in the order in which `hip/matmat_wgmma.h` reads them: f16
    /// `[cols / 128][16][rows rounded up to 8][8]`, of rows of a multiple of 128. Of
    /// [`Transform::Plain`], [`Transform::Norm`] and [`Transform::Gate`].
    F16Columns(Address),
    /// 8 bits for products: [`q8_bytes`] bytes and [`q8_scale_bytes`] bytes of
    /// scales, both aligned to 16.
    Q8(Address, Address),
    /// Nowhere: only [`Transform::Add`], the residual sum.
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

/// Whether rows of so many columns, in so many groups, have a kernel of this form.
fn is_built(transform: Transform, sink: Sink, cols: u64, groups: u64) -> bool {
    let unpaired = matches!(
        transform,
        Transform::Gate {
            other: None,
            act: Act::SwigluClamped { .. }
        }
    );
    // These forms are laid out by whole rows.
    let fits = match sink {
        Sink::Q8(..) => groups == 1 && cols.is_multiple_of(32),
        Sink::F16Columns(_) => groups == 1 && cols.is_multiple_of(128),
        _ => true,
    };
    fits && !unpaired
}

/// One launch over `rows` rows of `cols` elements at `x`.
///
/// # Errors
/// [`Error::NoKernel`] for [`Sink::Stored`] of anything but a sum, 8 bits of rows that are no whole
/// number of 32, or [`Sink::F16Columns`] of rows that are no whole number of 128.
pub fn activations(
    x: Address,
    rows: u64,
    cols: u64,
    transform: Transform,
    sink: Sink,
) -> Result<Launch, Error> {
    let (kernel, other, factor) = entry_of(transform, sink);
    let (norm, act) = match transform {
        Transform::Norm(norm) | Transform::AddNorm { norm, .. } => (Some(norm), Act::Identity),
        Transform::Gate { act, .. } => (None, act),
        Transform::Plain | Transform::Add { .. } => (None, Act::Identity),
    };
    let group = norm.map_or(cols, |n| n.group);
    if group == 0 || !cols.is_multiple_of(group) {
        return Err(Error::NoKernel {
            what: format!("norms of groups of {group} in rows of {cols}"),
            built: "groups that divide the row",
        });
    }
    let groups = cols / group;
    if kernel.is_empty() || !is_built(transform, sink, cols, groups) {
        return Err(Error::NoKernel {
            what: format!("{transform:?} of rows of {cols} to {sink:?}"),
            built: "8 bits of rows of a multiple of 32, and f16 by columns of a multiple of 128, that are normed as a \
                    whole, sums without an output, and clamped gates with their partner",
        });
    }
    let (out, scales) = match sink {
        Sink::F32(out) | Sink::F16(out) | Sink::F16Columns(out) => (out, 0),
        Sink::F16Pair(first, second) => (first, second),
        Sink::Q8(bytes, scales) => (bytes, scales),
        Sink::Stored => (0, 0),
    };
    let weight_rows = norm.map_or(1, |n| if n.weight_of_row { groups } else { 1 });
    let args = ActivationsArgs {
        x,
        other,
        weight: norm.and_then(|n| n.weight).unwrap_or(0),
        out,
        scales,
        eps: norm.map_or(0.0, |n| n.eps),
        cols: count("the width of a row", group)?,
        factor,
        weight_rows: count("the groups of a row", weight_rows)?,
        act: ActSpec::new(act),
        rows: count("the number of rows", rows)?,
        reserved: 0,
    };
    let parts = if norm.is_some() {
        1
    } else {
        cols.div_ceil(SPAN)
    };
    Ok(Launch {
        kernel,
        grid: [
            count("the number of rows", rows * groups)?,
            count("the parts of a row", parts)?,
            1,
        ],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// The kernel's name, empty where there is none; the address of the second operand, 0 without; and
/// the factor of a sum.
fn entry_of(transform: Transform, sink: Sink) -> (&'static str, Address, f32) {
    macro_rules! entries {
        ($name:literal) => {
            match sink {
                Sink::F32(_) => concat!("activations.activations_", $name, "_f32"),
                Sink::F16(_) => concat!("activations.activations_", $name, "_f16"),
                Sink::Q8(..) => concat!("activations.activations_", $name, "_q8"),
                Sink::F16Pair(..) | Sink::F16Columns(_) | Sink::Stored => "",
            }
        };
    }
    let (kernel, other, factor) = match transform {
        Transform::Plain => (entries!("plain"), 0, 0.0),
        Transform::Norm(_) => (entries!("norm"), 0, 0.0),
        Transform::AddNorm { other, scale, .. } => (entries!("add_norm"), other, scale),
        Transform::Gate { other, .. } => (entries!("gate"), other.unwrap_or(0), 0.0),
        Transform::Add { other, scale } if sink == Sink::Stored => {
            ("activations.activations_add_none", other, scale)
        }
        Transform::Add { other, scale } => (entries!("add"), other, scale),
    };
    let entry = match (transform, sink) {
        (Transform::Plain, Sink::F16Pair(..)) => "activations.activations_plain_f16_pair",
        (Transform::Norm(_), Sink::F16Pair(..)) => "activations.activations_norm_f16_pair",
        (Transform::Gate { .. }, Sink::F16Pair(..)) => "activations.activations_gate_f16_pair",
        (Transform::Plain, Sink::F16Columns(_)) => "activations.activations_plain_f16_columns",
        (Transform::Norm(_), Sink::F16Columns(_)) => "activations.activations_norm_f16_columns",
        (Transform::Gate { .. }, Sink::F16Columns(_)) => "activations.activations_gate_f16_columns",
        _ => kernel,
    };
    (entry, other, factor)
}
