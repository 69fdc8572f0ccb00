//! What adapters (LoRA) add to products of one input (`hip/adapters.hip`), in two launches:
//! [`down`] for the first matrices of all products, [`up`] for the second ones.
//!
//! Both read only the ranks that one of their rows has a scale for. So a row costs the bytes of its
//! own adapters, however many adapters a model has, and rows of one adapter share its bytes.

use super::activations::ActSpec;
use super::matmat::{HalfInputs, HalfLayout};
use super::type_name;
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, Launch};
use rocmforge_ops::Act;

/// First matrices of a launch, and products.
pub const MATRICES_MAX: usize = 4;

/// Maximum number of parts of the columns, each summed up by blocks of their own.
pub const PARTS_MAX: u64 = 4;

/// What the width of matrices is a multiple of.
pub const WIDTH_STEP: u64 = 32;

/// Threads of a block of [`down`].
const THREADS: u32 = 256;

/// Threads of a block of [`up`], and rows.
const UP_THREADS: u32 = 128;

/// Tokens of a block, but of [`up`] for few.
const TOKENS: u32 = 32;

/// Rows of a first matrix that a block of [`down`] takes.
const RANKS: u64 = 4;

/// Rows of a block that uses matrix instructions (`hip/adapters_mma.h`), and columns that such a
/// block has under way at once.
const TILE: u64 = 16;
const TILE_SLICE: u64 = 1024;

/// Columns that a block of [`down`] has under way at once.
const SLICE: u64 = 4096;

/// Up to so many tokens each has blocks of [`up`] of its own. By counting: of 64 tokens with 8
/// adapters of rank 16, blocks for one token ask the second-level cache for 88 MB a layer of
/// Llama-8B, blocks for 32 for 22 MB; of 8 tokens both ask for the same.
const SINGLE_MAX: u64 = 16;

arg_struct! {
    /// One product of `adapters_up_*`.
    AdapterMatrix: 24 {
        weights: u64,
        out: u64,
        rows: u32,
        low: u32,
    }
}

arg_struct! {
    /// Arguments of `adapters_down_*`.
    AdaptersDownArgs: 96 {
        x: u64,
        norm: u64,
        scales: u64,
        low: u64,
        eps: f32,
        factor: f32,
        cols: u32,
        width: u32,
        n_tokens: u32,
        n_matrices: u32,
        n_parts: u32,
        early: u32,
        weights: [u64; MATRICES_MAX],
    }
}

arg_struct! {
    /// Arguments of `adapters_up_*`.
    AdaptersUpArgs: 152 {
        scales: u64,
        low: u64,
        width: u32,
        n_tokens: u32,
        n_matrices: u32,
        n_low: u32,
        n_parts: u32,
        early: u32,
        act: ActSpec,
        matrices: [AdapterMatrix; MATRICES_MAX],
    }
}

/// The scales of a pass's rows, f32 `[n_tokens][width]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scales {
    /// Device address of the rows, aligned to 16.
    pub at: Address,
    /// Ranks of all adapters; a multiple of [`WIDTH_STEP`].
    pub width: u64,
    /// Rows.
    pub n_tokens: u64,
    /// Whether no launch of the pass writes them, so that they are read before the launch before
    /// has ended.
    pub early: bool,
}

/// The rows that first matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rows {
    /// f32 `[n_tokens][cols]`, with the weight `[cols]` and eps of an RMSNorm on them.
    Floats {
        /// Device address of the rows, aligned to 16.
        x: Address,
        /// The norm.
        norm: Option<(Address, f32)>,
    },
    /// As products read them; columns are a multiple of 8, or of 128 in the order of
    /// [`HalfLayout::Columns`].
    Halves(HalfInputs),
}

/// Where [`down`] leaves what [`up`] reads: f32 `[parts][matrices][n_tokens][width]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Low {
    /// Aligned to 16.
    pub at: Address,
    /// First matrices.
    pub n: u64,
    /// Parts of the columns, at most what [`parts`] says.
    pub parts: u64,
}

impl Low {
    /// Bytes of it.
    #[must_use]
    pub fn bytes(n: u64, parts: u64, scales: Scales) -> u64 {
        n * parts * scales.n_tokens * scales.width * 4
    }
}

/// One product: what is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Second {
    /// `[width, rows]` in ggml's order; `None` adds nothing.
    pub weights: Option<Address>,
    /// f32 `[n_tokens][rows]`, changed in place.
    pub out: Address,
    /// Outputs.
    pub rows: u64,
    /// Which of the first matrices is its.
    pub low: u64,
}

/// Into how many parts columns may go. A norm wants whole rows.
#[must_use]
pub fn parts(ty: WeightType, cols: u64, rows: Rows) -> u64 {
    let slice = match rows {
        Rows::Floats { norm: Some(_), .. } => return 1,
        _ if is_by_tiles(ty, rows) => TILE_SLICE,
        _ => SLICE,
    };
    cols.div_ceil(slice).clamp(1, PARTS_MAX)
}

fn is_by_columns(rows: Rows) -> bool {
    matches!(rows, Rows::Halves(half) if half.layout == HalfLayout::Columns)
}

/// Whether [`down`] is by matrix instructions: rows in Hopper's order are where there are some.
fn is_by_tiles(ty: WeightType, rows: Rows) -> bool {
    ty == WeightType::F16 && is_by_columns(rows)
}

fn check(ty: WeightType, n: usize, width: u64) -> Result<(), Error> {
    let floats = matches!(ty, WeightType::F32 | WeightType::F16);
    if floats && (1..=MATRICES_MAX).contains(&n) && width > 0 && width.is_multiple_of(WIDTH_STEP) {
        return Ok(());
    }
    Err(Error::NoKernel {
        what: format!(
            "{n} adapted products of {} and width {width}",
            type_name(ty)
        ),
        built: "1 to 4 of F32 and F16, widths that are multiples of 32",
    })
}

/// `low[m][t] = scales[t] * (weights_m x[t])` for matrices `[cols, width]` in ggml's order; what
/// has no scale is not written.
///
/// # Errors
/// [`Error::NoKernel`] for other types, no matrix or more than [`MATRICES_MAX`], and more parts
/// than [`parts`]; [`Error::TooLarge`].
pub fn down(
    ty: WeightType,
    rows: Rows,
    cols: u64,
    weights: &[Address],
    scales: Scales,
    low: Low,
) -> Result<Launch, Error> {
    check(ty, weights.len(), scales.width)?;
    let (halves, by_columns) = (matches!(rows, Rows::Halves(_)), is_by_columns(rows));
    if low.n != weights.len() as u64
        || !(1..=parts(ty, cols, rows)).contains(&low.parts)
        || halves && !cols.is_multiple_of(if by_columns { 128 } else { 8 })
    {
        return Err(Error::NoKernel {
            what: format!(
                "{} of {} parts of {cols} columns for {} matrices",
                low.n,
                low.parts,
                weights.len()
            ),
            built: "whole rows with a norm, else 4,096 columns a part; f16 rows by 8 columns or 128",
        });
    }
    let mut args = AdaptersDownArgs {
        scales: scales.at,
        low: low.at,
        factor: 1.0,
        cols: count("the number of a matrix's columns", cols)?,
        width: count("the width of adapters", scales.width)?,
        n_tokens: count("the number of tokens", scales.n_tokens)?,
        n_matrices: weights.len() as u32,
        n_parts: low.parts as u32,
        early: u32::from(scales.early),
        ..AdaptersDownArgs::default()
    };
    match rows {
        Rows::Floats { x, norm } => {
            args.x = x;
            (args.norm, args.eps) = norm.unwrap_or((0, 0.0));
        }
        Rows::Halves(half) => {
            args.x = half.x;
            args.factor = half.factor;
        }
    }
    args.weights[..weights.len()].copy_from_slice(weights);
    let ranks = if is_by_tiles(ty, rows) { TILE } else { RANKS };
    let groups = weights.len() as u64 * (scales.width / ranks);
    Ok(Launch {
        kernel: match (ty, halves, by_columns) {
            (WeightType::F32, false, _) => "adapters_f32.adapters_down_f32",
            (WeightType::F32, true, false) => "adapters_f32.adapters_down_half_f32",
            (WeightType::F32, true, true) => "adapters_f32.adapters_down_columns_f32",
            (_, false, _) => "adapters_f16.adapters_down_f16",
            (_, true, false) => "adapters_f16.adapters_down_half_f16",
            (_, true, true) => "adapters_f16.adapters_down_columns_f16",
        },
        grid: [
            count("the ranks of adapters", groups)?,
            args.n_tokens.div_ceil(TOKENS),
            args.n_parts,
        ],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// `out[t] += weights low[t]` for each product, what has no scale left out. With `gate`, of two
/// products and one token: `out_0 = gate(out_0 + ..) * (out_1 + ..)`.
///
/// # Errors
/// [`Error::NoKernel`] for other types, no product or more than [`MATRICES_MAX`], and other gated
/// units; [`Error::TooLarge`].
pub fn up(
    ty: WeightType,
    scales: Scales,
    low: Low,
    products: &[Second],
    gate: Option<Act>,
) -> Result<Launch, Error> {
    check(ty, products.len(), scales.width)?;
    let is_unit = matches!(products, [a, b] if a.rows == b.rows) && scales.n_tokens == 1;
    let are_there = products.iter().all(|p| p.weights.is_some());
    let has_low = products.iter().all(|p| p.low < low.n) && low.parts <= PARTS_MAX;
    if !has_low || gate.is_some() && !is_unit || gate.is_none() && !are_there {
        return Err(Error::NoKernel {
            what: format!("what adapters add to {} products", products.len()),
            built: "products of rows that were made, gated units of one token and two products",
        });
    }
    let mut args = AdaptersUpArgs {
        scales: scales.at,
        low: low.at,
        width: count("the width of adapters", scales.width)?,
        n_tokens: count("the number of tokens", scales.n_tokens)?,
        n_matrices: products.len() as u32,
        n_low: count("the number of matrices", low.n)?,
        n_parts: low.parts as u32,
        early: u32::from(scales.early),
        act: gate.map_or_else(ActSpec::default, ActSpec::new),
        ..AdaptersUpArgs::default()
    };
    let mut blocks = 0;
    for (i, (to, product)) in args.matrices.iter_mut().zip(products).enumerate() {
        *to = AdapterMatrix {
            weights: product.weights.unwrap_or(0),
            out: product.out,
            rows: count("the number of a matrix's rows", product.rows)?,
            low: product.low as u32,
        };
        if i == 0 || gate.is_none() {
            blocks += to.rows.div_ceil(UP_THREADS);
        }
    }
    let tokens = if scales.n_tokens <= SINGLE_MAX {
        1
    } else {
        TOKENS
    };
    Ok(Launch {
        kernel: match (ty, gate.is_some(), tokens) {
            (WeightType::F32, true, _) => "adapters_f32.adapters_up_gated_f32",
            (WeightType::F32, false, 1) => "adapters_f32.adapters_up_1_f32",
            (WeightType::F32, false, _) => "adapters_f32.adapters_up_32_f32",
            (_, true, _) => "adapters_f16.adapters_up_gated_f16",
            (_, false, 1) => "adapters_f16.adapters_up_1_f16",
            (_, false, _) => "adapters_f16.adapters_up_32_f16",
        },
        grid: [blocks, args.n_tokens.div_ceil(tokens), 1],
        block: [UP_THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
