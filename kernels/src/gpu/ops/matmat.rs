//! Products for a few tokens (`hip/matmat.hip`, `hip/matmat_f16.h`): 2 to 128, right for any number.

use super::matvec::{Matrix, float_tokens};
use super::per_type;
use crate::gpu::error::count;
use crate::gpu::launch::{ArgBytes, arg_struct};
use crate::gpu::{Address, Error, GpuTarget, Launch};
use crate::host::WeightType;

const THREADS: u32 = 256;
const ROWS: u32 = 2;
const COLUMNS: u32 = 8;

/// Matrices of a launch of [`matmat_f16`].
const MATRICES_MAX: usize = 4;

/// Most blocks that share a matrix's rows: adding up takes longer the more there are.
const PARTS_MAX: u64 = 8;

/// Columns of a step of it, and steps that are under way.
const STEP: u32 = 128;
const STAGES: u32 = 3;

/// Threads that a block of `matmat_few.h` may have, columns of a wave's slice, rows of a tile.
const FEW_THREADS: u32 = 512;
const SLICE: u32 = 256;
const TILE_ROWS: u32 = 16;

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
    /// Of `matmat_mma_<tokens>x<rows>_<type>` and `matmat_wmma_<tokens>_<type>`.
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
    /// Of `matmat_few_<tokens>_<type>`.
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

/// Rows and bytes of dynamic shared memory of a block that takes a tile of 32 routed rows.
pub(super) fn routed_tile(target: &GpuTarget) -> (u32, u32) {
    match target.has_wmma() {
        true => (wmma_rows(target), 0),
        false => (128, 2 * STAGES * 32 * STEP * 2),
    }
}

/// Rows of a tile of AMD's matrix instructions: 32 a wave.
fn wmma_rows(target: &GpuTarget) -> u32 {
    THREADS / target.wave * 32
}

/// From how many rows on quantized products read them as f16, on a target that [multiplies so](GpuTarget::multiplies_f16). By
/// counting: for NVIDIA it is always less work; AMD's instructions take 16 rows at once, as long as 8 to 32 rows take by products of four
/// bytes. On gfx11, where both halves of a wave unpack the same weights, that pays beyond 16 rows, elsewhere beyond the 8 of one block.
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
    /// How many.
    pub n_counters: u64,
}

/// What a block of a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MmaShape {
    tokens: u32,
    rows: u32,
    parts: u32,
    /// Whether it is AMD's, whose blocks have no groups and declare their shared memory.
    wmma: bool,
}

impl MmaShape {
    /// For matrices of so many rows. On NVIDIA as measured on an H200: what reads x less often and unpacks weights less often is better as
    /// long as most multiprocessors have a block, and where they have not, parts of the columns make more blocks. On AMD, not
    /// measured: two blocks a compute unit.
    fn choose(target: &GpuTarget, rows: &[u32], cols: u32, n_tokens: u32, room: PartsRoom) -> Self {
        let units = target.compute_units.max(1);
        let tiles = |of: u32| rows.iter().map(|r| r.div_ceil(of)).sum::<u32>();
        let least = if target.has_wmma() { 16 } else { 8 };
        let tokens = [8, 16, 32]
            .into_iter()
            .find(|t| *t >= least && n_tokens <= *t)
            .unwrap_or(64);
        let rows = if target.has_wmma() {
            wmma_rows(target)
        } else if tokens >= 32 && tiles(256) * 5 >= units * 4 {
            256
        } else {
            128
        };
        let shape = Self {
            tokens,
            rows,
            parts: 1,
            wmma: target.has_wmma(),
        };
        let wanted = if shape.wmma { 2 * units } else { units };
        let tiles = u64::from(tiles(shape.rows)) * u64::from(n_tokens.div_ceil(tokens));
        let steps = u64::from(cols.div_ceil(STEP) / shape.groups());
        let bytes = tiles * u64::from(shape.rows * shape.tokens * 4);
        let parts = (u64::from(wanted) / tiles.max(1))
            .min(room.bytes / bytes.max(1))
            .min(steps)
            .min(PARTS_MAX);
        if tiles > room.n_counters || parts < 2 {
            return shape;
        }
        Self {
            parts: parts as u32,
            ..shape
        }
    }

    /// Groups of waves that take steps in turn.
    fn groups(self) -> u32 {
        match self.wmma {
            true => 1,
            false => THREADS / 32 / (self.rows / 32),
        }
    }

    /// Of dynamic shared memory.
    fn shared_bytes(self) -> u32 {
        if self.wmma {
            return 0;
        }
        let x = self.groups() * STAGES * self.tokens * STEP * 2;
        let sums = if self.groups() > 1 {
            THREADS / 32 * (self.tokens / 4) * 512
        } else {
            0
        };
        x.max(sums)
    }

    fn kernel(self, ty: WeightType) -> &'static str {
        if self.wmma {
            return match self.tokens {
                16 => per_type!(ty, "matmat_", ".matmat_wmma_16_"),
                32 => per_type!(ty, "matmat_", ".matmat_wmma_32_"),
                _ => per_type!(ty, "matmat_", ".matmat_wmma_64_"),
            };
        }
        match (self.tokens, self.rows) {
            (8, _) => per_type!(ty, "matmat_", ".matmat_mma_8x128_"),
            (16, _) => per_type!(ty, "matmat_", ".matmat_mma_16x128_"),
            (32, 128) => per_type!(ty, "matmat_", ".matmat_mma_32x128_"),
            (32, _) => per_type!(ty, "matmat_", ".matmat_mma_32x256_"),
            (_, 128) => per_type!(ty, "matmat_", ".matmat_mma_64x128_"),
            _ => per_type!(ty, "matmat_", ".matmat_mma_64x256_"),
        }
    }
}

/// How a launch of `matmat_few.h` is cut up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FewShape {
    tokens: u32,
    /// Waves of a block beside each other, a slice of the columns each.
    slices: u32,
    /// Such rows of waves a block.
    groups: u32,
    parts: u32,
    n_blocks: u32,
}

impl FewShape {
    /// For matrices of so many rows: one block a multiprocessor, since registers suffice for
    /// one; parts where a block has too few waves for all slices. `None` where [`MmaShape`] is
    /// to do it: on AMD, for more rows, and where sums of parts have no room (many rows of many
    /// columns: a vocabulary).
    fn choose(
        target: &GpuTarget,
        rows: &[u32],
        cols: u32,
        n_tokens: u32,
        room: PartsRoom,
    ) -> Option<Self> {
        let tokens = [8, 16].into_iter().find(|t| n_tokens <= *t)?;
        if !target.has_mma() {
            return None;
        }
        let waves = Self::waves(target, tokens);
        let all = cols.div_ceil(SLICE).max(1);
        let slices = all.div_ceil(all.div_ceil(waves));
        let parts = all.div_ceil(slices);
        let tiles: u32 = rows.iter().map(|r| r.div_ceil(TILE_ROWS)).sum();
        let blocks = (target.compute_units / parts).max(1);
        let groups = (waves / slices).min(tiles / blocks).max(1);
        let shape = Self {
            tokens,
            slices,
            groups,
            parts,
            n_blocks: blocks.min(tiles.div_ceil(groups)).max(1),
        };
        let bytes = u64::from(tiles) * u64::from(TILE_ROWS * tokens * 4 * parts);
        let fits = bytes <= room.bytes && u64::from(shape.n_blocks) <= room.n_counters;
        (parts == 1 || fits).then_some(shape)
    }

    /// Most waves of a block: as many as there are sums and parts of the input of.
    fn waves(target: &GpuTarget, tokens: u32) -> u32 {
        let each = Self::wave_bytes(tokens);
        (target.shared_bytes_asked / each).clamp(1, FEW_THREADS / 32)
    }

    /// Of dynamic shared memory a wave: sums of two tiles in two rooms, and the input.
    fn wave_bytes(tokens: u32) -> u32 {
        2 * 2 * TILE_ROWS * tokens * 4 + SLICE * tokens * 2
    }
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
                    crate::gpu::device_bytes(matrix.ty, matrix.rows, cols)?;
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

    fn many(&self, target: &GpuTarget, inputs: HalfInputs, add: bool, room: PartsRoom) -> Launch {
        let shape = MmaShape::choose(target, &self.rows, self.cols, self.n_tokens, room);
        let args = MatmatMmaArgs {
            x: inputs.x,
            partials: room.partials,
            counters: room.counters,
            cols: self.cols,
            n_tokens: self.n_tokens,
            epilogue: u32::from(add),
            n_matrices: self.rows.len() as u32,
            factor: inputs.factor,
            parts: shape.parts,
            matrices: self.of,
        };
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

/// [`matmat`] of f16 rows by matrix instructions: quantized weights, and a target that [has them](GpuTarget::multiplies_f16). Matrices of
/// one type that follow each other share a launch.
///
/// # Errors
/// [`Error::Block`], [`Error::TooLarge`]; [`Error::NoKernel`] for another target or floats.
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
    let launch = |alike: &Alike| {
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
