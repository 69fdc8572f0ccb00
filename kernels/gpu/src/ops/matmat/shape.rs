//! How launches of products with f16 rows are cut up: tiles, parts of the columns, shared memory.

use super::{PartsRoom, THREADS};
use crate::GpuTarget;
use crate::WeightType;
use crate::ops::per_type;

/// Maximum number of blocks that share a matrix's rows: adding up takes longer the more there are.
pub(crate) const PARTS_MAX: u64 = 8;

/// Columns of a step of `matmat_mma.h`, and steps that are under way.
const STEP: u32 = 128;
const STAGES: u32 = 3;

/// Threads that a block of `matmat_few.h` may have, columns of a wave's slice, rows of a tile.
const FEW_THREADS: u32 = 512;
const SLICE: u32 = 256;
const TILE_ROWS: u32 = 16;

/// Rows of a tile of `matmat_wgmma.h`, its places of the input, and columns of a step.
const WGMMA_ROWS: u32 = 128;
const STAGES_OF_X: u32 = 4;
const WGMMA_STEP: u32 = 256;

/// Rows and bytes of dynamic shared memory of a block that takes a tile of 32 routed rows.
pub(in crate::ops) fn routed_tile(target: &GpuTarget) -> (u32, u32) {
    match target.has_wmma() {
        true => (wmma_rows(target), 0),
        false => (128, 2 * STAGES * 32 * STEP * 2),
    }
}

/// Columns of a wave's slice in `matmat_few.h`, and the most waves of a block for so many tokens.
pub(in crate::ops) fn few_waves(target: &GpuTarget, tokens: u32) -> (u32, u32) {
    (SLICE, FewShape::waves(target, tokens))
}

/// Bytes of dynamic shared memory for each wave of the kernel for few tokens.
pub(in crate::ops) fn few_wave_bytes(tokens: u32) -> u32 {
    FewShape::wave_bytes(tokens)
}

/// Rows of a tile of AMD's matrix instructions: 32 a wave.
fn wmma_rows(target: &GpuTarget) -> u32 {
    THREADS / target.wave * 32
}

/// Parts of the columns for which so many blocks run at once, of `tiles` whose sums of one part
/// have so many bytes: a step each at least, and as many as there is room for.
fn parts(blocks: u32, tiles: u64, bytes: u64, steps: u64, room: PartsRoom) -> u32 {
    let parts = (u64::from(blocks) / tiles.max(1))
        .min(room.bytes / bytes.max(1))
        .min(steps)
        .min(PARTS_MAX);
    match tiles <= room.n_counters {
        true => parts.max(1) as u32,
        false => 1,
    }
}

/// What a block of a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MmaShape {
    pub(super) tokens: u32,
    pub(super) rows: u32,
    pub(super) parts: u32,
    /// Whether the kernel is AMD's (WMMA), whose blocks have no groups and declare their shared
    /// memory.
    pub(super) wmma: bool,
}

impl MmaShape {
    /// For matrices of so many rows. On NVIDIA as measured on an H200: what reads x less often
    /// and unpacks weights less often is better as long as most multiprocessors have a block,
    /// and where they have not, parts of the columns make more blocks. On AMD, not measured:
    /// two blocks a compute unit.
    pub(super) fn choose(
        target: &GpuTarget,
        rows: &[u32],
        cols: u32,
        n_tokens: u32,
        room: PartsRoom,
    ) -> Self {
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
        Self {
            parts: parts(wanted, tiles, bytes, steps, room),
            ..shape
        }
    }

    /// Groups of waves that take steps in turn.
    pub(super) fn groups(self) -> u32 {
        match self.wmma {
            true => 1,
            false => THREADS / 32 / (self.rows / 32),
        }
    }

    /// Of dynamic shared memory.
    pub(super) fn shared_bytes(self) -> u32 {
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

    pub(super) fn kernel(self, ty: WeightType) -> &'static str {
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
pub(super) struct FewShape {
    pub(super) tokens: u32,
    /// Waves of a block beside each other, a slice of the columns each.
    pub(super) slices: u32,
    /// Number of such rows of waves in a block.
    pub(super) groups: u32,
    pub(super) parts: u32,
    pub(super) n_blocks: u32,
}

impl FewShape {
    /// For matrices of so many rows: one block a multiprocessor, since registers suffice for
    /// one; parts where a block has too few waves for all slices. `None` where [`MmaShape`] is
    /// to do it: on AMD, for more rows, and where sums of parts have no room (many rows of many
    /// columns: a vocabulary).
    pub(super) fn choose(
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

    /// Maximum number of waves of a block: as many as there are sums and parts of the input of.
    pub(super) fn waves(target: &GpuTarget, tokens: u32) -> u32 {
        let each = Self::wave_bytes(tokens);
        (target.shared_bytes_asked / each).clamp(1, FEW_THREADS / 32)
    }

    /// Of dynamic shared memory a wave: sums of two tiles in two rooms, and the input.
    pub(super) fn wave_bytes(tokens: u32) -> u32 {
        2 * 2 * TILE_ROWS * tokens * 4 + SLICE * tokens * 2
    }
}

/// How a launch of `matmat_wgmma.h` is cut up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WgmmaShape {
    pub(super) tokens: u32,
    pub(super) tiles: u32,
    pub(super) parts: u32,
}

impl WgmmaShape {
    /// Maximum number of tokens of the entry for `n_tokens`; `None` where other kernels do it.
    pub(super) fn tokens(target: &GpuTarget, cols: u64, n_tokens: u64) -> Option<u32> {
        let tokens = match n_tokens {
            17..=32 => 32,
            33..=64 => 64,
            65..=128 => 128,
            _ => return None,
        };
        let fits = Self::shared_bytes(tokens) <= target.shared_bytes_asked;
        let whole = cols > 0 && cols.is_multiple_of(u64::from(WGMMA_STEP));
        (target.has_wgmma() && whole && fits).then_some(tokens)
    }

    /// For matrices of so many rows: parts of the columns where their tiles are fewer than
    /// blocks that run at once, two a multiprocessor, or one of 128 tokens.
    pub(super) fn choose(
        target: &GpuTarget,
        rows: &[u32],
        cols: u32,
        tokens: u32,
        room: PartsRoom,
    ) -> Self {
        let tiles = rows.iter().map(|r| r.div_ceil(WGMMA_ROWS)).sum::<u32>();
        let blocks = target.compute_units * if tokens > 64 { 1 } else { 2 };
        let bytes = u64::from(tiles) * u64::from(WGMMA_ROWS * tokens * 4);
        let steps = u64::from(cols / WGMMA_STEP);
        Self {
            tokens,
            tiles,
            parts: parts(blocks, u64::from(tiles), bytes, steps, room),
        }
    }

    /// Of dynamic shared memory: places of the input, two barriers for each.
    pub(super) fn shared_bytes(tokens: u32) -> u32 {
        STAGES_OF_X * (128 * tokens * 2 + 16)
    }
}
