//! Ternary and binary types, and NVFP4: codes of at most 4 bits that need no codebook.

use super::super::WeightType;
use super::super::simd::Simd;
use super::blocks32::FP4_PLUS_16;
use super::k_quants::codes;
use super::{Format, HalfOffset, Offset, Operands, TILE_BLOCKS, Tile, halves, lines, tile_bytes};

/// ggml's TQ1_0, packed.
pub(crate) struct Tq1_0;
/// ggml's TQ2_0, packed.
pub(crate) struct Tq2_0;
/// ggml's Q1_0, packed.
pub(crate) struct Q1_0;
/// ggml's Q2_0, packed.
pub(crate) struct Q2_0;
/// ggml's NVFP4, packed.
pub(crate) struct NvFp4;

#[inline(always)]
fn operands<S: Simd>(s: S, w: [S::I; 8], scale: S::F) -> Operands<S> {
    Operands {
        w,
        scale: [scale; 2],
        bias: [s.splat_f(0.0); 2],
    }
}

/// Three times each of two bytes in 16 bits each.
#[inline(always)]
fn three_times<S: Simd>(s: S, v: S::I) -> S::I {
    s.add(v, s.shl(v, 1))
}

/// Digit `digit` (0 to 4) of base 3 of each byte, as TQ1_0 has them: a byte is a fraction, and a
/// digit what its multiple by 3 carries.
#[inline(always)]
fn digits<S: Simd>(s: S, bytes: S::I, digit: usize) -> S::I {
    let mask = s.splat(0x00ff_00ff);
    let mut parts = [s.and(bytes, mask), s.and(s.shr(bytes, 8), mask)];
    for _ in 0..digit {
        parts = parts.map(|part| s.and(three_times(s, part), mask));
    }
    let [even, odd] = parts.map(|part| s.and(s.shr(three_times(s, part), 8), mask));
    s.or(even, s.shl(odd, 8))
}

impl Format for Tq1_0 {
    const TILE_BYTES: usize = tile_bytes(WeightType::TQ1_0, TILE_BLOCKS);
    type Kind = Offset<0>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        s.f16(tile.plane, half)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let mut w = [s.splat(0); 8];
        for (j, w) in w.iter_mut().enumerate() {
            // Five digits of 32 bytes, five of 16, four of 4.
            let (line, digit) = match (b, j) {
                (0..5, _) => (j, b),
                (5.., _) if 8 * b + j < 60 => (8 + j % 4, 2 * (b - 5) + j / 4),
                _ => (12, j - 4),
            };
            let bytes = s.line(&lines::<1>(tile.bytes, 64 * line)[0], half);
            *w = digits(s, bytes, digit);
        }
        operands(s, w, *d)
    }
}

impl Format for Tq2_0 {
    const TILE_BYTES: usize = tile_bytes(WeightType::TQ2_0, TILE_BLOCKS);
    type Kind = Offset<0>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        s.f16(tile.plane, half)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let lines = lines(tile.bytes, b / 4 * 512);
        let w = codes(s, lines, 2 * (b as u32 % 4), 0x0303_0303, half);
        operands(s, w, *d)
    }
}

impl Format for Q1_0 {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q1_0, TILE_BLOCKS);
    type Kind = Offset<0>;
    type State<S: Simd> = ();

    #[inline(always)]
    fn open<S: Simd>(_s: S, _tile: Tile<'_>, _half: usize) {}

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, (): &mut (), b: usize, half: usize) -> Operands<S> {
        let bits = s.line(&lines::<1>(tile.bytes, 64 * b)[0], half);
        let mut w = [bits; 8];
        for (j, w) in w.iter_mut().enumerate() {
            // 0 or 2, to be lowered by 1.
            let one = s.and(s.shr(bits, j as u32), s.splat(0x0101_0101));
            *w = s.shl(one, 1);
        }
        operands(
            s,
            w,
            halves(s, tile.bytes, 64 * tile.blocks + 32 * (b / 4), half),
        )
    }
}

impl Format for Q2_0 {
    const TILE_BYTES: usize = tile_bytes(WeightType::Q2_0, TILE_BLOCKS);
    type Kind = Offset<0>;
    type State<S: Simd> = ();

    #[inline(always)]
    fn open<S: Simd>(_s: S, _tile: Tile<'_>, _half: usize) {}

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, (): &mut (), b: usize, half: usize) -> Operands<S> {
        let two = lines::<2>(tile.bytes, 128 * b);
        let mut w = [s.splat(0x0303_0303); 8];
        for (j, w) in w.iter_mut().enumerate() {
            *w = s.and(s.shr(s.line(&two[j / 4], half), 2 * (j as u32 % 4)), *w);
        }
        operands(
            s,
            w,
            halves(s, tile.bytes, 128 * tile.blocks + 32 * (b / 2), half),
        )
    }
}

impl Format for NvFp4 {
    const TILE_BYTES: usize = tile_bytes(WeightType::NVFP4, TILE_BLOCKS);
    type Kind = HalfOffset<4>;
    type State<S: Simd> = ();

    #[inline(always)]
    fn open<S: Simd>(_s: S, _tile: Tile<'_>, _half: usize) {}

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, (): &mut (), b: usize, half: usize) -> Operands<S> {
        let lines_of_codes = lines::<4>(tile.bytes, 256 * b);
        let mask = s.splat(0x0f0f_0f0f);
        let mut w = [mask; 8];
        for (j, line) in lines_of_codes.iter().enumerate() {
            // Of 16 columns, the first 8 are low nibbles and the last 8 high ones.
            let at = j / 2 * 4 + j % 2;
            let codes = s.line(line, half);
            w[at] = s.look_up(&FP4_PLUS_16, s.and(codes, mask));
            w[at + 2] = s.look_up(&FP4_PLUS_16, s.and(s.shr(codes, 4), mask));
        }
        let scales = lines::<1>(tile.bytes, 256 * tile.blocks + b / 2 * 64);
        let scales = s.shr(s.line(&scales[0], half), 16 * (b as u32 % 2));
        let scale = [0, 8].map(|shift| {
            // E4M3 moved to where f32 has exponent and mantissa is 2^-120 of what it means,
            // and half of it is wanted.
            let e = s.and(s.shr(scales, shift), s.splat(0x7f));
            s.mul(s.bits_to_floats(s.shl(e, 20)), s.splat_f(TWO_TO_119))
        });
        Operands {
            w,
            scale,
            bias: [s.splat_f(0.0); 2],
        }
    }
}

const TWO_TO_119: f32 = f32::from_bits((127 + 119) << 23);
