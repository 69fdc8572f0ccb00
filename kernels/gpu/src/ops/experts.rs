//! Products of routed rows with matrices of their experts (`hip/experts.h`): each for itself
//! (`hip/experts.hip`), and sorted by their experts (`hip/experts_group.hip`), a few an expert
//! (`hip/experts_few.h`) or many (`hip/experts_many.hip`).

use super::activations::{self, ActSpec};
use super::{matmat, per_type};
use crate::WeightType;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch, Vendor};
use rocmforge_ops::Act;

const THREADS: u32 = 256;

/// Lanes that take a row of quantized weights, as in `hip/experts.hip`.
const LANES: u32 = 8;

/// Rounds of blocks at most, but where each routed row has one block.
const ROUNDS_MAX: u32 = 4;

/// What bringing a block's input in takes, in turns of its waves.
const BEFORE: u32 = 2;

/// A tensor that is not there, where a place is expected.
const NO_TENSOR: u64 = u64::MAX;

arg_struct! {
    /// `ExpertTensors` of experts.h.
    ExpertTensors: 80 {
        table: u64,
        first: u64,
        second: u64,
        first_bias: u64,
        second_bias: u64,
        scale: u64,
        n_expert: u32,
        rows: u32,
        cols: u32,
        reserved: u32,
        act: ActSpec,
    }
}

arg_struct! {
    /// Arguments of `experts_<type>`.
    ExpertsArgs: 112 {
        x: u64,
        ids: u64,
        out: u64,
        tensors: ExpertTensors,
        share: u32,
        n_blocks: u32,
    }
}

/// Tensors of every expert, by their places in bytes from where the expert's tensors begin.
/// Matrices are of one type and shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tensors {
    /// u64 `[n_expert]` in device memory: where each expert's tensors begin; 0 for an
    /// expert that is not there.
    pub table: Address,
    /// Experts.
    pub n_expert: u32,
    /// Type of the matrices.
    pub ty: WeightType,
    /// Outputs.
    pub rows: u64,
    /// Inputs.
    pub cols: u64,
    /// The matrix, or the gate's.
    pub first: u64,
    /// The matrix that a gate's products are multiplied with.
    pub second: Option<u64>,
    /// f32 `[rows]`.
    pub first_bias: Option<u64>,
    /// f32 `[rows]`.
    pub second_bias: Option<u64>,
    /// The function of the first's products.
    pub act: Act,
    /// One f32 that all outputs are multiplied by at last.
    pub scale: Option<u64>,
}

impl Tensors {
    pub(super) fn args(&self) -> Result<ExpertTensors, Error> {
        crate::device_bytes(self.ty, self.rows, self.cols)?;
        let unpaired = self.second.is_none() && matches!(self.act, Act::SwigluClamped { .. });
        if unpaired {
            return Err(Error::NoKernel {
                what: "a clamped gate of one matrix".to_owned(),
                built: "clamped gates with their partner",
            });
        }
        Ok(ExpertTensors {
            table: self.table,
            first: self.first,
            second: self.second.unwrap_or(NO_TENSOR),
            first_bias: self.first_bias.unwrap_or(NO_TENSOR),
            second_bias: self.second_bias.unwrap_or(NO_TENSOR),
            scale: self.scale.unwrap_or(NO_TENSOR),
            n_expert: self.n_expert,
            rows: count("the number of a matrix's rows", self.rows)?,
            cols: count("the number of a matrix's columns", self.cols)?,
            reserved: 0,
            act: ActSpec::new(self.act),
        })
    }
}

impl ExpertTensors {
    /// A place, unless it is that of no tensor.
    #[must_use]
    pub fn place(at: u64) -> Option<u64> {
        (at != NO_TENSOR).then_some(at)
    }
}

/// Routed rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routed {
    /// f32 `[n / share][cols]`.
    pub x: Address,
    /// Routed rows that have the same row of `x`: the experts that a row goes to, or 1.
    pub share: u32,
    /// f32 `[n]`: each one's expert.
    pub ids: Address,
    /// Number of routed rows.
    pub n: u32,
    /// f32 `[n][rows]`.
    pub out: Address,
}

/// `out[i] = act(first[e] x[i / share]) * (second[e] x[i / share]) * scale[e]` with `e = ids[i]`,
/// biases added to the products; rows of experts that are not there are left alone.
///
/// # Errors
/// [`Error::TooLarge`] for an input that does not fit shared memory, [`Error::Block`].
pub fn experts(target: &GpuTarget, routed: Routed, tensors: &Tensors) -> Result<Launch, Error> {
    let args = tensors.args()?;
    let shared = match tensors.ty.is_quantized() {
        true => tensors.cols / 32 * 40,
        false => 0,
    };
    if shared > u64::from(target.shared_bytes_max) {
        return Err(Error::TooLarge {
            what: "the width of a product's input",
            value: tensors.cols,
            max: u64::from(target.shared_bytes_max) / 40 * 32,
        });
    }
    let items = match tensors.second {
        Some(_) => args.rows,
        None => args.rows.div_ceil(2),
    };
    let lanes = match tensors.ty.is_quantized() {
        true => LANES,
        false => target.wave,
    };
    let n_blocks = blocks_a_row(target, items.div_ceil(target.wave / lanes), routed.n.max(1));
    let args = ExpertsArgs {
        x: routed.x,
        ids: routed.ids,
        out: routed.out,
        tensors: args,
        share: routed.share.max(1),
        n_blocks,
    };
    Ok(Launch {
        kernel: per_type!(tensors.ty, "experts_", ".experts_"),
        grid: [n_blocks, routed.n, 1],
        block: [THREADS, 1, 1],
        shared_bytes: shared as u32,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// How many blocks share a routed row whose products are so many turns of a wave.
///
/// A block's turns begin when its input is there, which takes about as long as [`BEFORE`] turns,
/// and blocks that do not fit the device beside the others begin when those have ended. So the
/// fewest rounds of blocks times turns, and as many blocks as these rounds have places for, whose
/// waves are spread the most evenly.
fn blocks_a_row(target: &GpuTarget, turns: u32, n: u32) -> u32 {
    let at_once = target.compute_units.max(1) * blocks_at_once(target);
    let waves = THREADS / target.wave;
    // As many as fit in one round, in two and so on; more than a few rounds are never better.
    let of_rounds = |rounds: u32| {
        let blocks = (rounds * at_once / n).clamp(1, turns.max(1));
        let taken = (n * blocks).div_ceil(at_once);
        (taken * (BEFORE + turns.div_ceil(waves * blocks)), blocks)
    };
    let rounds = (1..=ROUNDS_MAX).map(of_rounds);
    rounds.min_by_key(|(cost, _)| *cost).map_or(1, |(_, b)| b)
}

/// Blocks of `experts_<type>` that a multiprocessor runs at once: two by the registers they may
/// have on NVIDIA. On AMD by counting registers; not measured on a card.
fn blocks_at_once(target: &GpuTarget) -> u32 {
    match target.vendor {
        Vendor::Nvidia => 2,
        Vendor::Amd => 4,
    }
}

/// Rows of a tile of [`group`] for [`experts_many`].
pub const TILE: u32 = 32;

/// Rows of a tile of [`group`] for [`experts_few`].
pub const FEW_TILE: u32 = 8;

/// Maximum number of experts that [`group`] sorts by.
pub const EXPERTS_MAX: u32 = 512;

arg_struct! {
    /// Arguments of `experts_group`.
    ExpertsGroupArgs: 48 {
        ids: u64,
        table: u64,
        list: u64,
        tiles: u64,
        n_routed: u32,
        n_expert: u32,
        tile: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `experts_few_<type>`.
    ExpertsFewArgs: 128 {
        x: u64,
        out: u64,
        list: u64,
        tiles: u64,
        tensors: ExpertTensors,
        share: u32,
        slices: u32,
        groups: u32,
        x_scale: f32,
    }
}

arg_struct! {
    /// Arguments of `experts_many_<type>`.
    ExpertsManyArgs: 136 {
        x: u64,
        x_scales: u64,
        out: u64,
        list: u64,
        tiles: u64,
        tensors: ExpertTensors,
        share: u32,
        n_blocks: u32,
        factor: f32,
        reserved: u32,
    }
}

/// Routed rows sorted by their experts, as [`group`] leaves them; good for all products of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// [`groups_bytes`] bytes in device memory, aligned to 16.
    pub at: Address,
    /// Routed rows.
    pub n: u32,
    /// Experts.
    pub n_expert: u32,
    /// Rows of a tile: [`TILE`] or [`FEW_TILE`].
    pub tile: u32,
}

impl Groups {
    /// Where the tiles are, behind the list of rows.
    fn tiles(&self) -> Address {
        self.at + (u64::from(self.n) * 4).next_multiple_of(16)
    }

    /// Tiles that there can be at most: the whole ones, and one that is begun for each expert.
    fn tiles_max(&self) -> u32 {
        self.n / self.tile + self.n_expert.min(self.n)
    }
}

/// Bytes of [`Groups`] of `n` routed rows, whatever their tiles.
#[must_use]
pub const fn groups_bytes(n: u64, n_expert: u64) -> u64 {
    (n * 4).next_multiple_of(16) + 16 * (1 + n / FEW_TILE as u64 + n_expert)
}

/// Sorts routed rows by their experts, `ids` f32 `[n]`; those of experts that
/// `table` has not are left out.
///
/// # Errors
/// [`Error::TooLarge`] for more than [`EXPERTS_MAX`] experts.
pub fn group(groups: Groups, ids: Address, table: Address) -> Result<Launch, Error> {
    if groups.n_expert > EXPERTS_MAX {
        return Err(Error::TooLarge {
            what: "the number of experts",
            value: u64::from(groups.n_expert),
            max: u64::from(EXPERTS_MAX),
        });
    }
    let args = ExpertsGroupArgs {
        ids,
        table,
        list: groups.at,
        tiles: groups.tiles(),
        n_routed: groups.n,
        n_expert: groups.n_expert,
        tile: groups.tile,
        reserved: 0,
    };
    Ok(Launch {
        kernel: "experts_group.experts_group",
        grid: [1, 1, 1],
        block: [512, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Waves of a block of which a multiprocessor has registers for two.
const WAVES_OF_TWO: u32 = 8;

/// Waves of a block of `experts_few_<type>` that are beside each other for all columns, and how
/// many times these; `None` where that kernel does not do it: floats, other targets than NVIDIA's
/// from sm_80 on, and wider inputs than a block has waves for.
fn few_shape(target: &GpuTarget, tensors: &Tensors) -> Option<(u32, u32)> {
    let (slice, waves) = matmat::few_waves(target, FEW_TILE);
    let slices = u32::try_from(tensors.cols.div_ceil(u64::from(slice))).ok()?;
    let is = tensors.ty.is_quantized() && target.has_mma() && (1..=waves).contains(&slices);
    is.then(|| (slices, (WAVES_OF_TWO / slices).max(1)))
}

/// Whether [`experts_few`] does products with these tensors.
#[must_use]
pub fn is_for_few(target: &GpuTarget, tensors: &Tensors) -> bool {
    few_shape(target, tensors).is_some()
}

/// As [`experts`], of rows that are sorted by their experts into tiles of [`FEW_TILE`]: an expert's
/// weights are read once a tile. `x` goes into the products as f16.
///
/// # Errors
/// [`Error::NoKernel`] where it [is not for that](is_for_few), [`Error::Block`].
pub fn experts_few(
    target: &GpuTarget,
    x: Address,
    groups: Groups,
    share: u32,
    tensors: &Tensors,
    out: Address,
) -> Result<Launch, Error> {
    let shape = few_shape(target, tensors).filter(|_| groups.tile == FEW_TILE);
    let Some((slices, n_groups)) = shape else {
        return Err(Error::NoKernel {
            what: format!(
                "products of tiles of {} rows with {} matrices of {} columns on {}",
                groups.tile, tensors.ty, tensors.cols, target.arch
            ),
            built: "tiles of 8 rows and quantized matrices of up to 4,096 columns on NVIDIA GPUs \
                    from sm_80 on",
        });
    };
    let args = ExpertsFewArgs {
        x,
        out,
        list: groups.at,
        tiles: groups.tiles(),
        tensors: tensors.args()?,
        share: share.max(1),
        slices,
        groups: n_groups,
        x_scale: activations::GATED_F16_SCALE,
    };
    let n_waves = slices * n_groups;
    let blocks = (2 * WAVES_OF_TWO / n_waves).max(1);
    let (_, waves) = matmat::few_waves(target, FEW_TILE);
    Ok(Launch {
        kernel: per_type!(tensors.ty, "experts_many_", ".experts_few_"),
        grid: [target.compute_units.max(1) * blocks, 1, 1],
        block: [n_waves * 32, 1, 1],
        // The same for all launches of a kernel, since it is asked for once.
        shared_bytes: waves * matmat::few_wave_bytes(FEW_TILE),
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// The input rows `[n / share][cols]` of [`experts_many`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ManyInputs {
    /// 8 bits, from `activations` with [`Sink::Q8`](super::activations::Sink): bytes and scales.
    Q8(Address, Address),
    /// f16, and what products are multiplied by; only on a target that [multiplies
    /// so](GpuTarget::multiplies_f16).
    F16(Address, f32),
}

/// `out[i] = (first[e] x[i / share] + bias[e]) * scale[e]` with `e` the expert of routed row `i`,
/// `[n][rows]`; rows of experts that are not there are left alone. For many rows: weights are read
/// once for the rows of a tile.
///
/// # Errors
/// [`Error::NoKernel`] for floats (take [`experts`]), two matrices or a function, or f16 without
/// matrix instructions; [`Error::Block`].
pub fn experts_many(
    target: &GpuTarget,
    inputs: ManyInputs,
    groups: Groups,
    share: u32,
    tensors: &Tensors,
    out: Address,
) -> Result<Launch, Error> {
    let single = tensors.second.is_none() && tensors.act == Act::Identity;
    let half = matches!(inputs, ManyInputs::F16(..));
    debug_assert_eq!(groups.tile, TILE, "tiles of another kernel");
    if !tensors.ty.is_quantized() || !single || half && !target.multiplies_f16() {
        return Err(Error::NoKernel {
            what: format!(
                "products of tiles of rows with {} matrices of experts on {}",
                tensors.ty, target.arch
            ),
            built: "one quantized matrix an expert, and f16 rows on NVIDIA GPUs from sm_80 on and AMD's \
                    with WMMA or MFMA",
        });
    }
    let args = tensors.args()?;
    let row_groups = args.rows.div_ceil(2).div_ceil(THREADS / target.wave);
    let (x, x_scales, factor) = match inputs {
        ManyInputs::Q8(bytes, scales) => (bytes, scales, 1.0),
        ManyInputs::F16(x, factor) => (x, 0, factor),
    };
    let (tile_rows, tile_shared) = matmat::routed_tile(target);
    // Tiles fill the device: few blocks each, so that what a block does not read again is little.
    let n_blocks = match half {
        true => args.rows.div_ceil(tile_rows),
        false => row_groups.clamp(1, 16),
    };
    let args = ExpertsManyArgs {
        x,
        x_scales,
        out,
        list: groups.at,
        tiles: groups.tiles(),
        tensors: args,
        share: share.max(1),
        n_blocks,
        factor,
        reserved: 0,
    };
    Ok(Launch {
        kernel: match half {
            true => per_type!(tensors.ty, "experts_many_", ".experts_many_f16_"),
            false => per_type!(tensors.ty, "experts_many_", ".experts_many_"),
        },
        grid: [
            n_blocks,
            groups.tiles_max().max(1),
            if half { 1 } else { TILE / 8 },
        ],
        block: [THREADS, 1, 1],
        shared_bytes: if half { tile_shared } else { 0 },
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
