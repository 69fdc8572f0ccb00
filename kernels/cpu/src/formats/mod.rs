//! How sixteen packed rows become dot-product operands: the one place that knows what the
//! bytes of a packed group mean.
//!
//! A *group* is 16 rows; a *tile* is 256 columns of a group (the last tile of a row of 32-weight
//! blocks may be shorter); a *block* is 32 columns of a tile. Word j of a block's 8 words is
//! columns 4j to 4j + 3. Groups follow each other; within a group the tiles follow each other,
//! then, for some types, comes the plane of the tiles' scales (it would misalign every other tile).
//! Sizes are exactly the file's: 16 rows of blocks.
//!
//! ```text
//! tile of n blocks; L = line: 4 bytes of each row; H = 16 half floats, one a row
//! Q4_0   4n L nibbles | n H scale         nibbles: byte j holds column j (low), j + 16 (high)
//! Q4_1   4n L nibbles | n H scale | n H min
//! Q5_0   4n L nibbles | n L fifth bits | n H scale      bit i of a row's byte b: column 4i + b
//! Q5_1   4n L nibbles | n L fifth bits | n H scale | n H min
//! Q8_0   8n L codes + 128 | n H scale
//! MXFP4  4n L nibbles | n x 16 exponents
//! IQ4_NL 4n L nibbles | n H scale
//! IQ4_XS 32 L nibbles | L lower 4 bits of the scales | H upper 2 bits | H d
//! IQ3_S  16 L indices | 8 L signs | 2 L ninth bits of indices | L scales | (plane: H d)
//! IQ3_XXS  16 L indices | 8 L signs and scales | (plane: H d)
//! IQ2_S  8 x (L indices | L signs) | 2 L upper bits of indices | 2 L scales | (plane: H d)
//! IQ2_XS  8 x (L indices | L signs and ninth bits) | 2 L scales | (plane: H d)
//! IQ2_XXS  8 x (L indices | L signs and scales) | (plane: H d)
//! IQ1_S  8 L indices | 4 L upper bits, scales, shifts | (plane: H d)
//! IQ1_M  8 L indices | 4 L upper bits, shifts | L lower 4 bits of the scales
//!        | H upper 2 bits | H d
//! TQ1_0  13 L digits of base 3 | (plane: H d)
//! TQ2_0  16 L codes | (plane: H d)
//! NVFP4  4n L nibbles | n/2 L scales
//! Q1_0   n L bits | n/4 H d
//! Q2_0   2n L codes | n/2 H d            two bits 2(w % 4) of word w / 4, byte b: column 4w + b
//! Q2_K  16 L codes | 4 L scales, mins | H d | H dmin             codes and bits as in the file,
//! Q3_K  16 L codes | 8 L third bits | 3 L scales | (plane: H d)  4 bytes of a row a word
//! Q4_K  32 L codes | 3 L scales, mins | H d | H dmin
//! Q5_K  32 L codes | 8 L fifth bits | 3 L scales, mins | H d | H dmin
//! Q6_K  32 L codes | 16 L upper bits | 4 L scales | (plane: H d)
//! F32, F16, BF16: one column of 16 rows after the other
//! ```
//!
//! The 6-bit scales of Q3_K to Q5_K are regrouped: nibble s of the first line is the low half of
//! block s's scale (Q3_K: of its first 16 columns), nibble s of the second line that of its min
//! (Q3_K: of its last 16 columns), bits 4s to 4s + 3 of the third line the upper bits of both.
//! Q2_K's 4-bit values are four such lines of nibbles.

mod blocks32;
mod codebooks;
mod few_bits;
mod iq4;
mod k_quants;

pub(crate) use blocks32::{MxFp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(crate) use codebooks::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
pub(crate) use few_bits::{NvFp4, Q1_0, Q2_0, Tq1_0, Tq2_0};
pub(crate) use iq4::{Iq4Nl, Iq4Xs};
pub(crate) use k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K};

use super::WeightType;
use super::simd::{Line, ROWS, Simd};

/// Blocks of 32 columns in a full tile.
pub(crate) const TILE_BLOCKS: usize = 8;
/// Bytes of a tile's entry in the plane of scales.
pub(crate) const PLANE_ENTRY: usize = 32;

/// Bytes of a tile of `blocks` blocks of 32 columns, the plane's entry not counted.
pub(crate) const fn tile_bytes(ty: WeightType, blocks: usize) -> usize {
    let row = ty.block_bytes() * blocks * 32 / ty.block_size();
    row * ROWS - if has_plane(ty) { PLANE_ENTRY } else { 0 }
}

/// Whether the tiles' scales are in a plane of their own.
pub(crate) const fn has_plane(ty: WeightType) -> bool {
    matches!(
        ty,
        WeightType::Q3K
            | WeightType::Q6K
            | WeightType::IQ3S
            | WeightType::IQ3XXS
            | WeightType::IQ2S
            | WeightType::IQ2XS
            | WeightType::IQ2XXS
            | WeightType::IQ1S
            | WeightType::TQ1_0
            | WeightType::TQ2_0
    )
}

const _: () = assert!(
    tile_bytes(WeightType::Q4_0, 8).is_multiple_of(64)
        && tile_bytes(WeightType::Q4_1, 8).is_multiple_of(64)
        && tile_bytes(WeightType::Q5_0, 8).is_multiple_of(64)
        && tile_bytes(WeightType::Q5_1, 8).is_multiple_of(64)
        && tile_bytes(WeightType::Q8_0, 8).is_multiple_of(64)
        && tile_bytes(WeightType::MXFP4, 8).is_multiple_of(64)
        && tile_bytes(WeightType::IQ4NL, 8).is_multiple_of(64)
        && tile_bytes(WeightType::IQ4XS, 8) == (32 + 1 + 1) * 64
        && tile_bytes(WeightType::IQ3S, 8) == (16 + 8 + 2 + 1) * 64
        && tile_bytes(WeightType::IQ3XXS, 8) == (16 + 8) * 64
        && tile_bytes(WeightType::IQ2S, 8) == (16 + 2 + 2) * 64
        && tile_bytes(WeightType::IQ2XS, 8) == (16 + 2) * 64
        && tile_bytes(WeightType::IQ2XXS, 8) == 16 * 64
        && tile_bytes(WeightType::IQ1S, 8) == (8 + 4) * 64
        && tile_bytes(WeightType::IQ1M, 8) == (8 + 4 + 1 + 1) * 64
        && tile_bytes(WeightType::TQ1_0, 8) == 13 * 64
        && tile_bytes(WeightType::TQ2_0, 8) == 16 * 64
        && tile_bytes(WeightType::NVFP4, 8) == (32 + 4) * 64
        && tile_bytes(WeightType::Q1_0, 8) == (8 + 1) * 64
        && tile_bytes(WeightType::Q2_0, 8) == (16 + 2) * 64
        && tile_bytes(WeightType::Q2K, 8) == (16 + 4 + 1) * 64
        && tile_bytes(WeightType::Q3K, 8) == (16 + 8 + 3) * 64
        && tile_bytes(WeightType::Q4K, 8) == (32 + 3 + 1) * 64
        && tile_bytes(WeightType::Q5K, 8) == (32 + 8 + 3 + 1) * 64
        && tile_bytes(WeightType::Q6K, 8) == (32 + 16 + 4) * 64,
    "tiles keep the lines aligned"
);

/// One tile of a packed group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// The tile's bytes.
    pub(crate) bytes: &'a [u8],
    /// The tile's blocks of 32 columns, 1 to 8.
    pub(crate) blocks: usize,
    /// The tile's entry in the plane of scales; zeros for types without one.
    pub(crate) plane: &'a [u8; PLANE_ENTRY],
}

/// The tiles of one packed group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group<'a> {
    bytes: &'a [u8],
    /// Blocks of 32 columns in a row.
    blocks: usize,
    tile_bytes: usize,
    plane: &'a [[u8; PLANE_ENTRY]],
}

impl<'a> Group<'a> {
    /// `bytes`: one packed group of rows of `blocks` blocks of 32 columns.
    pub(crate) fn new(ty: WeightType, bytes: &'a [u8], blocks: usize) -> Group<'a> {
        let tile_bytes = tile_bytes(ty, TILE_BLOCKS);
        let plane = if has_plane(ty) {
            bytes[blocks / TILE_BLOCKS * tile_bytes..].as_chunks().0
        } else {
            &[]
        };
        Group {
            bytes,
            blocks,
            tile_bytes,
            plane,
        }
    }

    /// Blocks of 32 columns in a row.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Number of tiles.
    #[inline(always)]
    pub(crate) fn tiles(&self) -> usize {
        self.blocks.div_ceil(TILE_BLOCKS)
    }

    /// One tile.
    #[inline(always)]
    pub(crate) fn tile(&self, index: usize) -> Tile<'a> {
        Tile {
            bytes: &self.bytes[index * self.tile_bytes..],
            blocks: TILE_BLOCKS.min(self.blocks - index * TILE_BLOCKS),
            plane: self.plane.get(index).unwrap_or(&[0; PLANE_ENTRY]),
        }
    }
}

/// A block of 32 columns of 16 rows (or of this half of them), ready for the dot product.
#[derive(Clone, Copy)]
pub(crate) struct Operands<S: Simd> {
    /// Codes without sign, 4 columns of each row a vector.
    pub(crate) w: [S::I; 8],
    /// Scale of each row; of the first and the last 16 columns if the format distinguishes.
    pub(crate) scale: [S::F; 2],
    /// What is subtracted from `scale * code`; likewise.
    pub(crate) bias: [S::F; 2],
}

/// What a product needs to know of a format besides its operands.
pub(crate) trait Kind: Send + Sync + 'static {
    /// Scales (and biases) change every 16 columns, not every 32.
    const HALVES: bool;
    /// Weights are `scale * code - bias`; otherwise `scale * (code - 2^OFFSET_LOG2)`.
    const BIAS: bool;
    /// See `BIAS`; 0 with it.
    const OFFSET_LOG2: u32;
    /// Bits of a code, at most: 8 for codes beyond 127.
    const BITS: u32;
}

/// `scale * (code - 2^LOG2)`, a scale for 32 columns.
pub(crate) struct Offset<const LOG2: u32>;
/// `scale * (code - 2^LOG2)`, a scale for 16 columns.
pub(crate) struct HalfOffset<const LOG2: u32>;
/// `scale * code - bias`, both for 32 columns.
pub(crate) struct Bias;
/// `scale * code - bias`, both for 16 columns.
pub(crate) struct HalfBias;

/// Bits of the codes around an offset: TQ1_0, TQ2_0 and Q2_0 have codes to 3 around 1.
const fn bits(offset_log2: u32) -> u32 {
    if offset_log2 == 0 { 2 } else { offset_log2 + 1 }
}

impl<const LOG2: u32> Kind for Offset<LOG2> {
    const HALVES: bool = false;
    const BIAS: bool = false;
    const OFFSET_LOG2: u32 = LOG2;
    const BITS: u32 = bits(LOG2);
}

impl<const LOG2: u32> Kind for HalfOffset<LOG2> {
    const HALVES: bool = true;
    const BIAS: bool = false;
    const OFFSET_LOG2: u32 = LOG2;
    const BITS: u32 = bits(LOG2);
}

impl Kind for Bias {
    const HALVES: bool = false;
    const BIAS: bool = true;
    const OFFSET_LOG2: u32 = 0;
    const BITS: u32 = 5;
}

impl Kind for HalfBias {
    const HALVES: bool = true;
    const BIAS: bool = true;
    const OFFSET_LOG2: u32 = 0;
    const BITS: u32 = 2;
}

/// A packed format.
pub(crate) trait Format: Send + Sync + 'static {
    /// Kind of the format's weights.
    type Kind: Kind;
    /// Bytes of a full tile.
    const TILE_BYTES: usize;
    /// Codes are looked up in a table, which costs more than the products of a few tokens.
    const LOOKS_UP: bool = false;
    /// What is read once a tile. Advances from block to block.
    type State<S: Simd>: Copy;

    /// Opens a tile.
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> Self::State<S>;
    /// The operands of block `b`; blocks are asked for in ascending order from 0.
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut Self::State<S>,
        b: usize,
        half: usize,
    ) -> Operands<S>;
}

/// Lines `at / 64 ..` of a tile; `at` is in bytes.
#[inline(always)]
fn lines<const N: usize>(bytes: &[u8], at: usize) -> &[Line; N] {
    let (lines, _) = bytes[at..at + 64 * N].as_chunks::<64>();
    lines.try_into().expect("the slice has N lines")
}

/// 16 half floats at byte `at`.
#[inline(always)]
fn halves<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> S::F {
    s.f16(
        bytes[at..]
            .first_chunk()
            .expect("a tile holds whole rows of half floats"),
        half,
    )
}
