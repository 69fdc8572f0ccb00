//! Products for one token, with what comes before and after them
//! (`hip/matvec.hip`, `hip/matvec_float.hip`).

use super::activations::ActSpec;
use super::{per_type, type_name};
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch, Vendor};
use rocmforge_ops::Act;

/// Maximum number of tokens of a block for float products.
pub(crate) const COLUMNS_FLOAT: u64 = 8;

/// Threads of a block for float products.
const THREADS_FLOAT: u32 = 256;

/// Matrices of one launch.
pub const MATRICES_MAX: usize = 4;

/// Pairs of types that one launch can have, the second one's matrices last.
const PAIRS: [(WeightType, WeightType, &str); 5] = [
    (
        WeightType::Q4K,
        WeightType::Q6K,
        "matvec_q4_k_q6_k.matvec_q4_k_q6_k",
    ),
    (
        WeightType::Q5K,
        WeightType::Q6K,
        "matvec_q5_k_q6_k.matvec_q5_k_q6_k",
    ),
    (
        WeightType::Q3K,
        WeightType::Q4K,
        "matvec_q3_k_q4_k.matvec_q3_k_q4_k",
    ),
    (
        WeightType::Q3K,
        WeightType::Q5K,
        "matvec_q3_k_q5_k.matvec_q3_k_q5_k",
    ),
    (
        WeightType::Q2K,
        WeightType::Q4K,
        "matvec_q2_k_q4_k.matvec_q2_k_q4_k",
    ),
];

arg_struct! {
    /// One matrix of a `matvec` launch, as the kernel reads it.
    MatvecMatrix: 32 {
        weights: u64,
        out: u64,
        bias: u64,
        rows: u32,
        second: u32,
    }
}

arg_struct! {
    /// Arguments of `matvec_<type>`.
    MatvecArgs: 184 {
        x: u64,
        norm: u64,
        eps: f32,
        cols: u32,
        n_matrices: u32,
        epilogue: u32,
        n_blocks: u32,
        reserved: u32,
        act: ActSpec,
        matrices: [MatvecMatrix; MATRICES_MAX],
    }
}

arg_struct! {
    /// Arguments of `matvec_f32` and its like.
    MatvecFloatArgs: 56 {
        weights: u64,
        x: u64,
        out: u64,
        bias: u64,
        rows: u32,
        cols: u32,
        n_tokens: u32,
        epilogue: u32,
        n_blocks: u32,
        columns: u32,
    }
}

/// The input, f32 `[cols]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Input {
    /// Device address of the input row.
    pub x: Address,
    /// Elements.
    pub cols: u64,
    /// Weight `[cols]` and eps of an RMSNorm to apply first; only where [`fuses_norm`] says so.
    pub norm: Option<(Address, f32)>,
}

/// One matrix in the device's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Type.
    pub ty: WeightType,
    /// Device address of the matrix.
    pub weights: Address,
    /// Outputs.
    pub rows: u64,
    /// f32 `[rows]`.
    pub out: Address,
    /// f32 `[rows]`.
    pub bias: Option<Address>,
}

/// What happens to the products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Epilogue {
    /// `out = v`.
    Store,
    /// `out += v`: the residual stream.
    Add,
    /// `out of the first = act(first) * second`: two matrices of one type and shape; only
    /// where [`fuses_gate`] says so.
    Gate(Act),
}

/// Whether a product with this type can norm its input itself; the others need it normed before.
#[must_use]
pub const fn fuses_norm(ty: WeightType) -> bool {
    ty.is_quantized()
}

/// Whether a gate and an up matrix of these types can be one launch with the gated unit.
#[must_use]
pub fn fuses_gate(gate: WeightType, up: WeightType) -> bool {
    gate == up && gate.is_quantized()
}

/// The launches of products that share an input: one where the types allow, else one a type (or
/// pair of types, or [`MATRICES_MAX`] matrices). They may run in any order.
///
/// # Errors
/// [`Error::NoKernel`] for a norm or gated unit that is not fused, [`Error::TooLarge`] for an input
/// that does not fit shared memory (take [`matmat`](super::matmat) then), [`Error::Block`].
pub fn matvec(
    target: &GpuTarget,
    input: Input,
    matrices: &[Matrix],
    epilogue: Epilogue,
) -> Result<Vec<Launch>, Error> {
    if matches!(epilogue, Epilogue::Gate(_))
        && !matches!(matrices, [a, b] if fuses_gate(a.ty, b.ty) && a.rows == b.rows)
    {
        return Err(Error::NoKernel {
            what: format!("a gated unit of {} matrices", matrices.len()),
            built: "two quantized matrices of one type and shape",
        });
    }
    let mut launches = Vec::new();
    let (quantized, floats): (Vec<_>, Vec<_>) = matrices.iter().partition(|m| m.ty.is_quantized());
    for m in floats {
        launches.push(float(target, input, m, epilogue)?);
    }
    let mut types: Vec<WeightType> = Vec::new();
    for m in &quantized {
        if !types.contains(&m.ty) {
            types.push(m.ty);
        }
    }
    while let Some(first) = types.pop() {
        // A partner that is built with this type, on either side.
        let pair = PAIRS.iter().find_map(|&(a, b, kernel)| {
            let partner = types
                .iter()
                .position(|&t| (a, b) == (first, t) || (a, b) == (t, first))?;
            let fits = quantized.iter().filter(|m| m.ty == a || m.ty == b).count() <= MATRICES_MAX;
            fits.then_some((partner, a, b, kernel))
        });
        if let Some((partner, a, b, kernel)) = pair {
            types.swap_remove(partner);
            let of = |ty| quantized.iter().copied().filter(move |m| m.ty == ty);
            let list: Vec<_> = of(a).map(|m| (m, 0)).chain(of(b).map(|m| (m, 1))).collect();
            launches.push(quantized_launch(target, input, kernel, &list, epilogue)?);
        } else {
            let kernel = per_type!(first, "matvec_", ".matvec_");
            let list: Vec<_> = quantized
                .iter()
                .filter(|m| m.ty == first)
                .map(|&m| (m, 0))
                .collect();
            for list in list.chunks(MATRICES_MAX) {
                launches.push(quantized_launch(target, input, kernel, list, epilogue)?);
            }
        }
    }
    Ok(launches)
}

fn quantized_launch(
    target: &GpuTarget,
    input: Input,
    kernel: &'static str,
    list: &[(&Matrix, u32)],
    epilogue: Epilogue,
) -> Result<Launch, Error> {
    let shared = input.cols / 32 * 40;
    if shared > u64::from(target.shared_bytes_max) {
        return Err(Error::TooLarge {
            what: "the width of a product's input",
            value: input.cols,
            max: u64::from(target.shared_bytes_max) / 40 * 32,
        });
    }
    let mut args = MatvecArgs {
        x: input.x,
        norm: input.norm.map_or(0, |(weight, _)| weight),
        eps: input.norm.map_or(0.0, |(_, eps)| eps),
        cols: count("the number of a matrix's columns", input.cols)?,
        n_matrices: list.len() as u32,
        epilogue: match epilogue {
            Epilogue::Store => 0,
            Epilogue::Add => 1,
            Epilogue::Gate(_) => 2,
        },
        act: match epilogue {
            Epilogue::Gate(act) => ActSpec::new(act),
            Epilogue::Store | Epilogue::Add => ActSpec::default(),
        },
        ..MatvecArgs::default()
    };
    let mut rows = 0;
    for (to, &(m, second)) in args.matrices.iter_mut().zip(list) {
        crate::device_bytes(m.ty, m.rows, input.cols)?;
        *to = MatvecMatrix {
            weights: m.weights,
            out: m.out,
            bias: m.bias.unwrap_or(0),
            rows: count("the number of a matrix's rows", m.rows)?,
            second,
        };
        rows += m.rows;
    }
    let threads = threads(target, list.iter().any(|&(_, second)| second == 1));
    // Of few rows all multiprocessors have some, although not each wave of a block has one: what a
    // multiprocessor reads is bounded.
    let waves = u64::from(threads / target.wave).min(ROWS_A_BLOCK);
    let n_blocks = rows.div_ceil(waves).clamp(1, blocks_max(target));
    args.n_blocks = n_blocks as u32;
    Ok(Launch {
        kernel,
        grid: [args.n_blocks, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: shared as u32,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Rows that a block of quantized products is worth its input for.
const ROWS_A_BLOCK: u64 = 8;

/// Threads of a block for quantized products: as matvec.hip has it.
fn threads(target: &GpuTarget, two_types: bool) -> u32 {
    match target.vendor {
        Vendor::Nvidia if !two_types => 1024,
        Vendor::Nvidia | Vendor::Amd => 512,
    }
}

/// Blocks of the grid that fill the device once.
fn blocks_max(target: &GpuTarget) -> u64 {
    u64::from(target.compute_units.max(1))
}

fn float(
    target: &GpuTarget,
    input: Input,
    m: &Matrix,
    epilogue: Epilogue,
) -> Result<Launch, Error> {
    if input.norm.is_some() {
        return Err(Error::NoKernel {
            what: format!("a norm inside of a product with {}", type_name(m.ty)),
            built: "norms inside of products with quantized types",
        });
    }
    float_tokens(target, m, input.x, input.cols, 1, epilogue == Epilogue::Add)
}

/// The product of a float matrix with any number of tokens.
pub(crate) fn float_tokens(
    target: &GpuTarget,
    m: &Matrix,
    x: Address,
    cols: u64,
    n_tokens: u64,
    add: bool,
) -> Result<Launch, Error> {
    let waves = u64::from(THREADS_FLOAT / target.wave);
    let n_blocks = m
        .rows
        .div_ceil(waves)
        .clamp(1, 4 * u64::from(target.compute_units.max(1)));
    // Matrices of few rows, routers say, fill the device with few tokens a block. Of 128
    // rows and 2,048 columns of f32 by 8 and 16 tokens, an H200: 11.3 us with 8 tokens a
    // block, 4.0 us with one and two.
    let columns = (n_tokens * n_blocks).div_ceil(blocks_max(target));
    let columns = columns.clamp(1, COLUMNS_FLOAT);
    let args = MatvecFloatArgs {
        weights: m.weights,
        x,
        out: m.out,
        bias: m.bias.unwrap_or(0),
        rows: count("the number of a matrix's rows", m.rows)?,
        cols: count("the number of a matrix's columns", cols)?,
        n_tokens: count("the number of tokens", n_tokens)?,
        epilogue: u32::from(add),
        n_blocks: n_blocks as u32,
        columns: columns as u32,
    };
    Ok(Launch {
        kernel: per_type!(m.ty, "matvec_", ".matvec_"),
        grid: [args.n_blocks, args.n_tokens.div_ceil(args.columns), 1],
        block: [THREADS_FLOAT, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
