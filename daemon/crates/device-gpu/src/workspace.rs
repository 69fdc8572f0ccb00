//! The workspace behind a pass's buffers: where what only this device needs
//! lies, and how large it is.
//!
//! ```text
//! pass data | input of products (8 bits, f16, or rotated queries)
//!     | partials of attention and products | [tile of weights | vendor's]
//! ```
//!
//! Everything is a function of the [`ScratchLayout`], so its size is known before and
//! its places need not be kept.

use rocmforge_device::ALIGNMENT;
use rocmforge_device::ops::{Rows, ScratchLayout};
use rocmforge_kernels_gpu::ops::experts;
use rocmforge_kernels_gpu::{GpuTarget, Vendor};

/// Most rows that the kernels for small batches are given; more go through f16 tiles,
/// but for those of wgmma's.
pub(super) const SMALL_BATCH: u64 = 64;

/// Rows of a product with float weights from which the vendor's library does it on NVIDIA, in a
/// pass that is recorded when it comes again ([`is_recorded`]). The kernels for fewer read each row
/// of the input once for every row of the weights: at 16 rows that is 16 times what the weights
/// take, where the library reads them twice.
const FLOAT_ROWS: u64 = 4;

/// [`FLOAT_ROWS`] of other passes: calling the library takes longer than launching a kernel. Before
/// an encoder's were recorded, one of 16 rows took 5.0 ms with it and 4.0 without.
const FLOAT_ROWS_UNRECORDED: u64 = 24;

/// Whether passes of such a layout are recorded when they come again: those with one row of each
/// sequence (`one_each`), and those of whole texts of few rows.
pub(super) fn is_recorded(layout: &ScratchLayout, one_each: bool) -> bool {
    one_each || (layout.both_ways && !layout.parts && layout.tokens <= SMALL_BATCH)
}

/// Fewest rows of a product that the vendor's library does, where there is one, in a pass that is
/// recorded when it comes again, or in another one. AMD's cannot be recorded with a pass, so few
/// rows stay with the kernels there.
pub(super) fn library_rows(layout: &ScratchLayout, target: &GpuTarget, recorded: bool) -> u64 {
    match (
        layout.float_weights && target.vendor == Vendor::Nvidia,
        recorded,
    ) {
        (true, true) => FLOAT_ROWS,
        (true, false) => FLOAT_ROWS_UNRECORDED,
        (false, _) => SMALL_BATCH + 1,
    }
}

/// Most rows of a pass that has a short chunk of a prompt beside tokens.
const SHARED_BATCH: u64 = 2 * SMALL_BATCH;

/// Most bytes of a tile of weights as f16.
const TILE_MAX: u64 = 128 << 20;

/// Bytes that the vendor's product library gets.
const VENDOR_BYTES: u64 = 32 << 20;

/// Most elements of a head that are rotated.
const ROT_MAX: u64 = 256;

/// Bytes of a sequence's place in the pass data.
pub(super) const PLACE_BYTES: u64 = 40;

/// Most experts of a layer: entries of their table.
pub(super) const EXPERTS_MAX: u64 = 512;

/// Offsets from the scratch block's start, and sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Workspace {
    /// u32 `[tokens]`.
    pub(super) positions: u64,
    /// u32 `[tokens]`.
    pub(super) sequences: u64,
    /// u32 `[outputs]`.
    pub(super) outputs: u64,
    /// u32 `[tokens][2]`.
    pub(super) tiles: u64,
    /// For each table f32 `[tokens][n_rot]`, cos and behind it sin; room for 2 *
    /// tokens * ROT_MAX a table.
    pub(super) rope: u64,
    /// `SequencePlace` `[spans]`; room for one a token.
    pub(super) places: u64,
    /// Of the parts of sequences, where a pass has any, as of the sequences.
    pub(super) of_parts: OfParts,
    /// One past the pass data.
    pub(super) pass_end: u64,
    /// Products' input: f16 `[rows][width]`, or 8 bits and behind them scales, or f32 rows of
    /// queries.
    pub(super) input: u64,
    pub(super) input_bytes: u64,
    pub(super) partials: u64,
    pub(super) partials_bytes: u64,
    /// f16 `[tile rows][cols]`.
    pub(super) tile: u64,
    pub(super) tile_bytes: u64,
    pub(super) vendor: u64,
    pub(super) vendor_bytes: u64,
    /// u64, one for each expert of each layer of a pass, or of the layer under way: where it is.
    pub(super) table: u64,
    pub(super) table_bytes: u64,
    /// Routed rows sorted by expert.
    pub(super) groups: u64,
    pub(super) groups_bytes: u64,
    /// One past everything.
    pub(super) end: u64,
}

/// Offsets of what tells of the parts of sequences; nothing has room where no pass has any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OfParts {
    pub(super) positions: u64,
    pub(super) sequences: u64,
    pub(super) tiles: u64,
    pub(super) places: u64,
}

impl Workspace {
    /// The places for a layout.
    pub(super) fn new(layout: &ScratchLayout, target: &GpuTarget) -> Self {
        let rows = layout.tokens.max(layout.outputs);
        let widest = layout
            .bufs
            .iter()
            .filter(|b| b.rows == Rows::Tokens)
            .map(|b| b.width)
            .max()
            .unwrap_or(0);
        let mut cursor = layout.bytes;
        let mut take = |bytes: u64| {
            let at = cursor;
            cursor = (cursor + bytes).next_multiple_of(ALIGNMENT);
            at
        };
        let positions = take(layout.tokens * 4);
        let sequences = take(layout.tokens * 4);
        let outputs = take(layout.outputs * 4);
        let tiles = take(layout.tokens * 8);
        let places = take(layout.tokens * PLACE_BYTES);
        let in_parts = if layout.parts { layout.tokens } else { 0 };
        let of_parts = OfParts {
            positions: take(in_parts * 4),
            sequences: take(in_parts * 4),
            tiles: take(in_parts * 8),
            places: take(in_parts * PLACE_BYTES),
        };
        let rope = take(2 * layout.tokens * ROT_MAX.min(widest) * 4 * layout.tables);
        let pass_end = take(0);
        // Routed rows, and bytes of such rows as f16, or as 8 bits with their scales.
        let (mut routed, mut routed_bytes) = (0, 0);
        for buf in &layout.bufs {
            if let Rows::Routed(n) = buf.rows {
                let rows = layout.tokens * u64::from(n);
                routed = routed.max(rows);
                routed_bytes = routed_bytes.max(rows * buf.width * 2);
            }
        }
        let input_bytes = (rows * (widest + 1) * 4).max(routed_bytes) + 2 * ALIGNMENT;
        let input = take(input_bytes);
        // Split attention and products in parts are for few rows: every block of a grid that fills
        // the card twice has its part. A longer pass may have some beside its prompts.
        let few = layout.tokens.min(SMALL_BATCH) + u64::from(2 * target.compute_units);
        let most = if layout.tokens <= SHARED_BATCH {
            // A chunk of a prompt beside tokens, whose positions are shared by up to 20 blocks.
            12 << 20
        } else {
            (layout.bytes / 16).min(4 << 20)
        };
        let partials_bytes = (widest * 5 * few).min(most);
        let partials = take(partials_bytes);
        let large = layout.tokens >= library_rows(layout, target, true);
        let tile_bytes = if large {
            // A quarter of what the buffers take, but room for some rows of the widest matrix.
            (layout.bytes * 2).clamp(widest * 2 * 128, TILE_MAX.max(widest * 2 * 128))
        } else {
            0
        };
        let tile = take(tile_bytes);
        let vendor_bytes = if large {
            VENDOR_BYTES.min(layout.bytes)
        } else {
            0
        };
        let vendor = take(vendor_bytes);
        let (table_bytes, groups_bytes) = match routed {
            0 => (0, 0),
            rows => (
                8 * EXPERTS_MAX.max(layout.experts),
                experts::groups_bytes(rows, EXPERTS_MAX),
            ),
        };
        let table = take(table_bytes);
        let groups = take(groups_bytes);
        Self {
            positions,
            sequences,
            outputs,
            tiles,
            rope,
            places,
            of_parts,
            pass_end,
            input,
            input_bytes,
            partials,
            partials_bytes,
            tile,
            tile_bytes,
            vendor,
            vendor_bytes,
            table,
            table_bytes,
            groups,
            groups_bytes,
            end: cursor,
        }
    }
}
