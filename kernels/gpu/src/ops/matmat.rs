//! Products for a few tokens (`hip/matmat.hip`, `hip/matmat_f16.h`): 2 to 128, right for any
//! number.
//!
//! Quantized weights, input rows as f16:
//!
//! | target | tokens | kernel |
//! |---|---|---|
//! | NVIDIA from sm_80 on | 2 to 16 | `matmat_few.h` |
//! | sm_90, columns a multiple of 256 | 17 to 128 | `matmat_wgmma.h` |
//! | NVIDIA from sm_80 on, otherwise | any | `matmat_mma.h` |
//! | AMD with WMMA or MFMA | any | `matmat_wmma.h` |
//!
//! Weights of f16 by 4 to 16 rows of f32 have matrix instructions on NVIDIA, too
//! (`matmat_floats.h`).

mod floats;
mod shape;

#[cfg(test)]
pub(crate) use floats::{FloatMatrix, MatmatFloatsArgs};
pub use floats::{matmat_floats, takes_floats};
#[cfg(test)]
pub(crate) use shape::PARTS_MAX;
use shape::{FewShape, MmaShape, WgmmaShape};
pub(super) use shape::{few_wave_bytes, few_waves, routed_tile};

use super::matvec::{Matrix, float_tokens};
use super::per_type;
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch};

const THREADS: u32 = 256;
const ROWS: u32 = 2;
const COLUMNS: u32 = 8;

/// Matrices of a launch of [`matmat_f16`].
const MATRICES_MAX: usize = 4;

arg_struct! {
    /// Arguments of `matmat_<type>`.
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
    /// One of the matrices of `matmat_mma_<tokens>x<rows>_<type>` or `matmat_wmma_<tokens>_<type>`.
    MmaMatrix: 32 {
        weights: u64,
        out: u64,
        bias: u64,
        rows: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `matmat_mma_<tokens>x<rows>_<type>` and `matmat_wmma_<tokens>_<type>`.
    MatmatMmaArgs: 176 {
        x: u64,
        partials: u64,
        counters: u64,
        cols: u32,
        n_tokens: u32,
        epilogue: u32,
        n_matrices: u32,
        factor: f32,
        parts: u32,
        matrices: [MmaMatrix; MATRICES_MAX],
    }
}

arg_struct! {
    /// Arguments of `matmat_few_<tokens>_<type>`.
    MatmatFewArgs: 192 {
        x: u64,
        partials: u64,
        counters: u64,
        cols: u32,
        n_tokens: u32,
        epilogue: u32,
        n_matrices: u32,
        factor: f32,
        parts: u32,
        slices: u32,
        groups: u32,
        n_blocks: u32,
        reserved: u32,
        matrices: [MmaMatrix; MATRICES_MAX],
    }
}

/// How input rows lie as f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfLayout {
    /// `[n_tokens][cols]`.
    Rows,
    /// `[cols / 128][16][n_tokens rounded up to 8][8]`, as `hip/matmat_wgmma.h` says.
    Columns,
}

/// How [`matmat_f16`] reads input rows.
#[must_use]
pub fn half_layout(target: &GpuTarget, cols: u64, n_tokens: u64) -> HalfLayout {
    match WgmmaShape::tokens(target, cols, n_tokens) {
        Some(_) => HalfLayout::Columns,
        None => HalfLayout::Rows,
    }
}

/// Input rows as f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HalfInputs {
    /// f16, aligned to 16.
    pub x: Address,
    /// Order of the inputs.
    pub layout: HalfLayout,
    /// Elements a row.
    pub cols: u64,
    /// Rows.
    pub n_tokens: u64,
    /// What products are multiplied by.
    pub factor: f32,
}

/// From how many rows on quantized products read them as f16, on a target that [multiplies
/// so](GpuTarget::multiplies_f16). By counting: for NVIDIA it is always less work; AMD's
/// instructions take 16 rows at once, as long as 8 to 32 rows take by products of four bytes. On
/// gfx11, where both halves of a wave unpack the same weights, that pays beyond 16 rows, elsewhere
/// beyond the 8 of one block.
#[must_use]
pub fn f16_from(target: &GpuTarget) -> Option<u64> {
    match target.has_wmma() {
        true if target.arch.starts_with("gfx11") => Some(17),
        true => Some(9),
        false => target.has_mma().then_some(2),
    }
}

/// Where blocks that share a matrix's rows leave their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartsRoom {
    /// Aligned to 16.
    pub partials: Address,
    /// Bytes there.
    pub bytes: u64,
    /// u32, zero before and after.
    pub counters: Address,
    /// Number of counters.
    pub n_counters: u64,
}

/// Matrices of one type that share an input and a launch.
struct Alike {
    ty: WeightType,
    of: [MmaMatrix; MATRICES_MAX],
    rows: Vec<u32>,
    cols: u32,
    n_tokens: u32,
}

impl Alike {
    /// The launches' matrices: those of one type that follow each other, so many at a time.
    fn all(matrices: &[Matrix], cols: u64, n_tokens: u64) -> Result<Vec<Self>, Error> {
        matrices
            .chunk_by(|a, b| a.ty == b.ty)
            .flat_map(|alike| alike.chunks(MATRICES_MAX))
            .map(|alike| {
                let mut of = [MmaMatrix::default(); MATRICES_MAX];
                for (to, matrix) in of.iter_mut().zip(alike) {
                    crate::device_bytes(matrix.ty, matrix.rows, cols)?;
                    *to = MmaMatrix {
                        weights: matrix.weights,
                        out: matrix.out,
                        bias: matrix.bias.unwrap_or(0),
                        rows: count("the number of a matrix's rows", matrix.rows)?,
                        reserved: 0,
                    };
                }
                Ok(Self {
                    ty: alike[0].ty,
                    of,
                    rows: of[..alike.len()].iter().map(|m| m.rows).collect(),
                    cols: count("the number of a matrix's columns", cols)?,
                    n_tokens: count("the number of tokens", n_tokens)?,
                })
            })
            .collect()
    }

    fn few(
        &self,
        target: &GpuTarget,
        shape: FewShape,
        inputs: HalfInputs,
        add: bool,
        room: PartsRoom,
    ) -> Launch {
        let args = MatmatFewArgs {
            x: inputs.x,
            partials: room.partials,
            counters: room.counters,
            cols: self.cols,
            n_tokens: self.n_tokens,
            epilogue: u32::from(add),
            n_matrices: self.rows.len() as u32,
            factor: inputs.factor,
            parts: shape.parts,
            slices: shape.slices,
            groups: shape.groups,
            n_blocks: shape.n_blocks,
            reserved: 0,
            matrices: self.of,
        };
        Launch {
            kernel: match shape.tokens {
                8 => per_type!(self.ty, "matmat_", ".matmat_few_8_"),
                _ => per_type!(self.ty, "matmat_", ".matmat_few_16_"),
            },
            grid: [shape.n_blocks, 1, shape.parts],
            block: [shape.slices * shape.groups * 32, 1, 1],
            // The same for all launches of a kernel, since it is asked for once.
            shared_bytes: FewShape::waves(target, shape.tokens)
                * FewShape::wave_bytes(shape.tokens),
            args: ArgBytes::of(&args),
            overlaps: true,
        }
    }

    fn mma_args(
        &self,
        inputs: HalfInputs,
        add: bool,
        room: PartsRoom,
        parts: u32,
    ) -> MatmatMmaArgs {
        MatmatMmaArgs {
            x: inputs.x,
            partials: room.partials,
            counters: room.counters,
            cols: self.cols,
            n_tokens: self.n_tokens,
            epilogue: u32::from(add),
            n_matrices: self.rows.len() as u32,
            factor: inputs.factor,
            parts,
            matrices: self.of,
        }
    }

    fn by_columns(
        &self,
        inputs: HalfInputs,
        add: bool,
        room: PartsRoom,
        shape: WgmmaShape,
    ) -> Launch {
        let args = self.mma_args(inputs, add, room, shape.parts);
        Launch {
            kernel: match shape.tokens {
                32 => per_type!(self.ty, "matmat_", ".matmat_wgmma_32_"),
                64 => per_type!(self.ty, "matmat_", ".matmat_wgmma_64_"),
                _ => per_type!(self.ty, "matmat_", ".matmat_wgmma_128_"),
            },
            grid: [shape.tiles, 1, shape.parts],
            block: [THREADS, 1, 1],
            shared_bytes: WgmmaShape::shared_bytes(shape.tokens),
            args: ArgBytes::of(&args),
            overlaps: true,
        }
    }

    fn many(&self, target: &GpuTarget, inputs: HalfInputs, add: bool, room: PartsRoom) -> Launch {
        let shape = MmaShape::choose(target, &self.rows, self.cols, self.n_tokens, room);
        let args = self.mma_args(inputs, add, room, shape.parts);
        Launch {
            kernel: shape.kernel(self.ty),
            grid: [
                self.rows.iter().map(|r| r.div_ceil(shape.rows)).sum(),
                self.n_tokens.div_ceil(shape.tokens),
                shape.parts,
            ],
            block: [THREADS, 1, 1],
            shared_bytes: shape.shared_bytes(),
            args: ArgBytes::of(&args),
            overlaps: true,
        }
    }
}

/// [`matmat`] of f16 rows by matrix instructions: quantized weights, and a target that [has
/// them](GpuTarget::multiplies_f16). Matrices of one type that follow each other share a launch.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`]; [`Error::NoKernel`] for another target or floats.
///
/// # Panics
/// Where the rows do not lie as [`half_layout`] says.
pub fn matmat_f16(
    target: &GpuTarget,
    inputs: HalfInputs,
    matrices: &[Matrix],
    add: bool,
    room: PartsRoom,
) -> Result<Vec<Launch>, Error> {
    if let Some(matrix) = matrices
        .iter()
        .find(|m| !target.multiplies_f16() || !m.ty.is_quantized())
    {
        return Err(Error::NoKernel {
            what: format!("products of {} with f16 rows on {}", matrix.ty, target.arch),
            built: "quantized weights on NVIDIA GPUs from sm_80 on and AMD's with WMMA or MFMA",
        });
    }
    let alike = Alike::all(matrices, inputs.cols, inputs.n_tokens)?;
    let tokens = WgmmaShape::tokens(target, inputs.cols, inputs.n_tokens);
    let layout = half_layout(target, inputs.cols, inputs.n_tokens);
    assert_eq!(inputs.layout, layout, "rows lie as they are read");
    let launch = |alike: &Alike| {
        if let Some(tokens) = tokens {
            let shape = WgmmaShape::choose(target, &alike.rows, alike.cols, tokens, room);
            return alike.by_columns(inputs, add, room, shape);
        }
        let few = FewShape::choose(target, &alike.rows, alike.cols, alike.n_tokens, room);
        match few {
            Some(shape) => alike.few(target, shape, inputs, add, room),
            None => alike.many(target, inputs, add, room),
        }
    };
    Ok(alike.iter().map(launch).collect())
}

/// The input rows, in both forms that weights may want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// f32 `[n_tokens][cols]`, for float weights; may be 0 if there are none.
    pub x: Address,
    /// 8 bits, from `activations` with [`Sink::Q8`](super::activations::Sink): bytes and scales;
    /// may be 0 if all weights are floats.
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
    crate::device_bytes(matrix.ty, matrix.rows, inputs.cols)?;
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
