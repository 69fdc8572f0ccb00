//! IQ4_NL and IQ4_XS: 4-bit codes into a table of 16 values.

use super::super::WeightType;
use super::super::reference::IQ4_VALUES;
use super::super::simd::Simd;
use super::blocks32::nibbles;
use super::{Format, Offset, Operands, TILE_BLOCKS, Tile, halves, lines, tile_bytes};

/// ggml's IQ4_NL, packed.
pub(crate) struct Iq4Nl;
/// ggml's IQ4_XS, packed.
pub(crate) struct Iq4Xs;

/// The values plus 128.
const PLUS_128: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = IQ4_VALUES[i].cast_unsigned() ^ 0x80;
        i += 1;
    }
    table
};

/// The values of the block of nibbles at byte `at`, plus 128.
#[inline(always)]
fn values<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> [S::I; 8] {
    let mut w = nibbles(s, lines(bytes, at), half);
    for w in &mut w {
        *w = s.look_up(&PLUS_128, *w);
    }
    w
}

impl Format for Iq4Nl {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ4NL, TILE_BLOCKS);
    type Kind = Offset<7>;
    type State<S: Simd> = ();

    #[inline(always)]
    fn open<S: Simd>(_s: S, _tile: Tile<'_>, _half: usize) {}

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, (): &mut (), b: usize, half: usize) -> Operands<S> {
        Operands {
            w: values(s, tile.bytes, 256 * b, half),
            scale: [halves(s, tile.bytes, 256 * tile.blocks + 32 * b, half); 2],
            bias: [s.splat_f(0.0); 2],
        }
    }
}

/// A scale of 6 bits a block, in a line of nibbles and two more bits in 16; the
/// next block's are the lowest.
#[derive(Clone, Copy)]
pub(crate) struct NibbleScales<S: Simd> {
    /// The tile's scale.
    pub(super) d: S::F,
    lower: S::I,
    upper: S::I,
}

impl<S: Simd> NibbleScales<S> {
    /// From the line of nibbles at byte `at` of the tile; the other bits and
    /// then the tile's scale follow.
    #[inline(always)]
    pub(super) fn open(s: S, tile: Tile<'_>, at: usize, half: usize) -> Self {
        let upper = tile.bytes[at + 64..]
            .first_chunk()
            .expect("a tile holds the upper bits of its scales");
        NibbleScales {
            d: halves(s, tile.bytes, at + 96, half),
            lower: s.line(&lines::<1>(tile.bytes, at)[0], half),
            upper: s.words(upper, half),
        }
    }

    /// The next block's 6 bits.
    #[inline(always)]
    pub(super) fn next(&mut self, s: S) -> S::I {
        let lower = s.and(self.lower, s.splat(0x0f));
        let upper = s.and(s.shl(self.upper, 4), s.splat(0x30));
        self.lower = s.shr(self.lower, 4);
        self.upper = s.shr(self.upper, 2);
        s.or(lower, upper)
    }
}

impl Format for Iq4Xs {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ4XS, TILE_BLOCKS);
    type Kind = Offset<7>;
    type State<S: Simd> = NibbleScales<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> NibbleScales<S> {
        NibbleScales::open(s, tile, 2048, half)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut NibbleScales<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let scale = s.add(state.next(s), s.splat(-32));
        Operands {
            w: values(s, tile.bytes, 256 * b, half),
            scale: [s.mul(state.d, s.to_f(scale)); 2],
            bias: [s.splat_f(0.0); 2],
        }
    }
}
