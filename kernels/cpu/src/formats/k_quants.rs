//! The formats with blocks of 256 weights: Q2_K to Q6_K. A tile is one such block of each row.

use super::super::WeightType;
use super::super::simd::{Line, Simd};
use super::{
    Bias, Format, HalfBias, HalfOffset, Operands, TILE_BLOCKS, Tile, halves, lines, tile_bytes,
};

/// ggml's Q2_K, packed.
pub(crate) struct Q2K;
/// ggml's Q3_K, packed.
pub(crate) struct Q3K;
/// ggml's Q4_K, packed.
pub(crate) struct Q4K;
/// ggml's Q5_K, packed.
pub(crate) struct Q5K;
/// ggml's Q6_K, packed.
pub(crate) struct Q6K;

/// `(line >> shift) & mask` of 8 lines.
#[inline(always)]
pub(super) fn codes<S: Simd>(
    s: S,
    lines: &[Line; 8],
    shift: u32,
    mask: i32,
    half: usize,
) -> [S::I; 8] {
    let mask = s.splat(mask);
    let mut w = [mask; 8];
    for (w, line) in w.iter_mut().zip(lines) {
        *w = s.and(s.shr(s.line(line, half), shift), mask);
    }
    w
}

/// `w | ((line >> shift) << up) & mask` of 8 lines.
#[inline(always)]
fn upper_bits<S: Simd>(
    s: S,
    w: &mut [S::I; 8],
    lines: &[Line; 8],
    shift: u32,
    up: u32,
    mask: i32,
    half: usize,
) {
    let mask = s.splat(mask);
    for (w, line) in w.iter_mut().zip(lines) {
        let bits = s.shl(s.shr(s.line(line, half), shift), up);
        *w = s.or(*w, s.and(bits, mask));
    }
}

/// The regrouped 6-bit values: two a block, low nibbles in `first` and
/// `second`, upper bits in `upper`.
#[derive(Clone, Copy)]
pub(crate) struct SixBits<S: Simd> {
    first: S::I,
    second: S::I,
    upper: S::I,
}

impl<S: Simd> SixBits<S> {
    #[inline(always)]
    fn open(s: S, lines: &[Line; 3], half: usize) -> Self {
        let [first, second, upper] = lines;
        SixBits {
            first: s.line(first, half),
            second: s.line(second, half),
            upper: s.line(upper, half),
        }
    }

    /// The next block's two values.
    #[inline(always)]
    fn next(&mut self, s: S) -> [S::I; 2] {
        let (nibble, pair) = (s.splat(0x0f), s.splat(0x30));
        let first = s.or(s.and(self.first, nibble), s.and(s.shl(self.upper, 4), pair));
        let second = s.or(
            s.and(self.second, nibble),
            s.and(s.shl(self.upper, 2), pair),
        );
        self.first = s.shr(self.first, 4);
        self.second = s.shr(self.second, 4);
        self.upper = s.shr(self.upper, 4);
        [first, second]
    }
}

/// Scales and mins of Q4_K and Q5_K.
#[derive(Clone, Copy)]
pub(crate) struct ScaleMin<S: Simd> {
    d: S::F,
    dmin: S::F,
    values: SixBits<S>,
}

impl<S: Simd> ScaleMin<S> {
    /// From the lines at byte `at` of the tile.
    #[inline(always)]
    fn open(s: S, tile: Tile<'_>, at: usize, half: usize) -> Self {
        ScaleMin {
            d: halves(s, tile.bytes, at + 192, half),
            dmin: halves(s, tile.bytes, at + 224, half),
            values: SixBits::open(s, lines(tile.bytes, at), half),
        }
    }

    #[inline(always)]
    fn next(&mut self, s: S, w: [S::I; 8]) -> Operands<S> {
        let [scale, min] = self.values.next(s);
        let scale = s.mul(self.d, s.to_f(scale));
        let min = s.mul(self.dmin, s.to_f(min));
        Operands {
            w,
            scale: [scale; 2],
            bias: [min; 2],
        }
    }
}

impl Format for Q4K {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q4K, TILE_BLOCKS);
    type Kind = Bias;
    type State<S: Simd> = ScaleMin<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> ScaleMin<S> {
        ScaleMin::open(s, tile, 2048, half)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut ScaleMin<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let w = codes(
            s,
            lines(tile.bytes, b / 2 * 512),
            4 * (b as u32 % 2),
            0x0f0f_0f0f,
            half,
        );
        state.next(s, w)
    }
}

impl Format for Q5K {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q5K, TILE_BLOCKS);
    type Kind = Bias;
    type State<S: Simd> = ScaleMin<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> ScaleMin<S> {
        ScaleMin::open(s, tile, 2560, half)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut ScaleMin<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let mut w = codes(
            s,
            lines(tile.bytes, b / 2 * 512),
            4 * (b as u32 % 2),
            0x0f0f_0f0f,
            half,
        );
        upper_bits(
            s,
            &mut w,
            lines(tile.bytes, 2048),
            b as u32,
            4,
            0x1010_1010,
            half,
        );
        state.next(s, w)
    }
}

impl Format for Q6K {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q6K, TILE_BLOCKS);
    type Kind = HalfOffset<5>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        s.f16(tile.plane, half)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let (part, quarter) = (b / 4, b % 4);
        let at = part * 1024 + quarter % 2 * 512;
        let mut w = codes(
            s,
            lines(tile.bytes, at),
            4 * (quarter as u32 / 2),
            0x0f0f_0f0f,
            half,
        );
        upper_bits(
            s,
            &mut w,
            lines(tile.bytes, 2048 + part * 512),
            2 * quarter as u32,
            4,
            0x3030_3030,
            half,
        );
        // Two of the four signed bytes of this word are the block's.
        let scales = s.line(&lines::<1>(tile.bytes, 3072 + b / 2 * 64)[0], half);
        let scales = s.shr(scales, 16 * (b as u32 % 2));
        let first = s.sar(s.shl(scales, 24), 24);
        let second = s.sar(s.shl(scales, 16), 24);
        let zero = s.splat_f(0.0);
        Operands {
            w,
            scale: [s.mul(*d, s.to_f(first)), s.mul(*d, s.to_f(second))],
            bias: [zero; 2],
        }
    }
}

/// Scales of Q3_K.
#[derive(Clone, Copy)]
pub(crate) struct Q3Scales<S: Simd> {
    d: S::F,
    values: SixBits<S>,
}

impl Format for Q3K {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q3K, TILE_BLOCKS);
    type Kind = HalfOffset<2>;
    type State<S: Simd> = Q3Scales<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> Q3Scales<S> {
        Q3Scales {
            d: s.f16(tile.plane, half),
            values: SixBits::open(s, lines(tile.bytes, 1536), half),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut Q3Scales<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let (part, quarter) = (b / 4, b % 4);
        let mut w = codes(
            s,
            lines(tile.bytes, part * 512),
            2 * quarter as u32,
            0x0303_0303,
            half,
        );
        upper_bits(
            s,
            &mut w,
            lines(tile.bytes, 1024),
            b as u32,
            2,
            0x0404_0404,
            half,
        );
        let [first, second] = state.values.next(s);
        let lower = s.splat(-32);
        let first = s.mul(state.d, s.to_f(s.add(first, lower)));
        let second = s.mul(state.d, s.to_f(s.add(second, lower)));
        let zero = s.splat_f(0.0);
        Operands {
            w,
            scale: [first, second],
            bias: [zero; 2],
        }
    }
}

/// Scales and mins of Q2_K: four lines of nibbles, in the order in which `Operands` has them.
#[derive(Clone, Copy)]
pub(crate) struct Q2Scales<S: Simd> {
    d: S::F,
    dmin: S::F,
    nibbles: [S::I; 4],
}

impl Format for Q2K {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q2K, TILE_BLOCKS);
    type Kind = HalfBias;
    type State<S: Simd> = Q2Scales<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> Q2Scales<S> {
        let [a, b, c, d] = lines(tile.bytes, 1024);
        Q2Scales {
            d: halves(s, tile.bytes, 1280, half),
            dmin: halves(s, tile.bytes, 1312, half),
            nibbles: [
                s.line(a, half),
                s.line(b, half),
                s.line(c, half),
                s.line(d, half),
            ],
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut Q2Scales<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let (part, quarter) = (b / 4, b % 4);
        let w = codes(
            s,
            lines(tile.bytes, part * 512),
            2 * quarter as u32,
            0x0303_0303,
            half,
        );
        let mask = s.splat(0x0f);
        let mut values = [s.splat_f(0.0); 4];
        for (value, line) in values.iter_mut().zip(&mut state.nibbles) {
            *value = s.to_f(s.and(*line, mask));
            *line = s.shr(*line, 4);
        }
        let [scale_0, scale_1, min_0, min_1] = values;
        Operands {
            w,
            scale: [s.mul(state.d, scale_0), s.mul(state.d, scale_1)],
            bias: [s.mul(state.dmin, min_0), s.mul(state.dmin, min_1)],
        }
    }
}
