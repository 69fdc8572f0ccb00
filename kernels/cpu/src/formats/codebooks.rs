//! IQ1, IQ2 and IQ3: indices into codebooks of 4 or 8 values, with signs or a shift beside them.
//!
//! Signs lie as bits lie everywhere here: bit w of a row's byte b is column 4w + b's. Where the
//! file has seven of eight, the eighth making their product positive, bits 1, 3, 5 and 7 of byte 3
//! (columns 7, 15, 23 and 31) hold four other bits.

use super::super::WeightType;
use super::super::codebook::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use super::super::simd::Simd;
use super::iq4::NibbleScales;
use super::{Format, HalfOffset, Offset, Operands, TILE_BLOCKS, Tile, lines, tile_bytes};

/// ggml's IQ2_XXS, packed.
pub(crate) struct Iq2Xxs;
/// ggml's IQ2_XS, packed.
pub(crate) struct Iq2Xs;
/// ggml's IQ2_S, packed.
pub(crate) struct Iq2S;
/// ggml's IQ3_XXS, packed.
pub(crate) struct Iq3Xxs;
/// ggml's IQ3_S, packed.
pub(crate) struct Iq3S;
/// ggml's IQ1_S, packed.
pub(crate) struct Iq1S;
/// ggml's IQ1_M, packed.
pub(crate) struct Iq1M;

/// The line at byte `at`.
#[inline(always)]
fn line<S: Simd>(s: S, tile: Tile<'_>, at: usize, half: usize) -> S::I {
    s.line(&lines::<1>(tile.bytes, at)[0], half)
}

/// `(v >> shift) & mask`.
#[inline(always)]
fn bits<S: Simd>(s: S, v: S::I, shift: u32, mask: i32) -> S::I {
    s.and(s.shr(v, shift), s.splat(mask))
}

/// Entry `index` of a codebook of eight values, as words 2g and 2g + 1.
#[inline(always)]
fn entry<S: Simd, const N: usize>(
    s: S,
    w: &mut [S::I; 8],
    g: usize,
    codebook: &[i32; N],
    index: S::I,
) {
    let at = s.shl(index, 1);
    w[2 * g] = s.gather(codebook, at);
    w[2 * g + 1] = s.gather(codebook, s.or(at, s.splat(1)));
}

/// Turns values plus 64 of negative sign: 64 + v becomes 64 - v.
#[inline(always)]
fn turn<S: Simd>(s: S, w: &mut [S::I; 8], signs: S::I) {
    const SEVEN_BITS: [u8; 16] = {
        let mut table = [0; 16];
        table[1] = 0x7f;
        table
    };
    for (i, w) in w.iter_mut().enumerate() {
        // 127 less what it is, and 1: no byte overflows.
        let one = bits(s, signs, i as u32, 0x0101_0101);
        *w = s.add(s.xor(*w, s.look_up(&SEVEN_BITS, one)), one);
    }
}

/// Signs of which every eighth (bits 1, 3, 5 and 7 of byte 3) is to be found: so that the number
/// of negative ones is even.
#[inline(always)]
fn with_eighths<S: Simd>(s: S, seven: S::I) -> S::I {
    let seven = s.and(seven, s.splat(0x55ff_ffff));
    // Bits 2g and 2g + 1 of the four bytes are group g's: their sum modulo 2
    // comes to bit 2g of the lowest.
    let pairs = s.xor(seven, s.shr(seven, 16));
    let bytes = s.xor(pairs, s.shr(pairs, 8));
    let odd = s.and(s.xor(bytes, s.shr(bytes, 1)), s.splat(0x55));
    s.or(seven, s.shl(odd, 25))
}

/// The four bits in the place of the eighths, as a number.
#[inline(always)]
fn number_in_eighths<S: Simd>(s: S, signs: S::I) -> S::I {
    let spread = bits(s, signs, 25, 0x55);
    let pairs = s.and(s.or(spread, s.shr(spread, 1)), s.splat(0x33));
    s.and(s.or(pairs, s.shr(pairs, 2)), s.splat(0x0f))
}

/// `(2 * n + 1) * d`.
#[inline(always)]
fn odd_scale<S: Simd>(s: S, d: S::F, n: S::I) -> S::F {
    s.mul(d, s.to_f(s.or(s.shl(n, 1), s.splat(1))))
}

/// The tiles' scales with a factor that the format's scales have in common.
#[inline(always)]
fn plane<S: Simd>(s: S, tile: Tile<'_>, half: usize, factor: f32) -> S::F {
    s.mul(s.f16(tile.plane, half), s.splat_f(factor))
}

#[inline(always)]
fn operands<S: Simd>(s: S, w: [S::I; 8], scale: [S::F; 2]) -> Operands<S> {
    Operands {
        w,
        scale,
        bias: [s.splat_f(0.0); 2],
    }
}

/// Two scales of 4 bits: byte b of the row's eight from byte `at` on.
#[inline(always)]
fn two_scales<S: Simd>(
    s: S,
    tile: Tile<'_>,
    at: usize,
    d: S::F,
    b: usize,
    half: usize,
) -> [S::F; 2] {
    let packed = line(s, tile, at + b / 4 * 64, half);
    let shift = 8 * (b as u32 % 4);
    [shift, shift + 4].map(|shift| odd_scale(s, d, bits(s, packed, shift, 0x0f)))
}

impl Format for Iq2Xxs {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ2XXS, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = Offset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 0.125)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = line(s, tile, 128 * b, half);
        let signs = line(s, tile, 128 * b + 64, half);
        let mut w = [indices; 8];
        for g in 0..4 {
            entry(s, &mut w, g, &IQ2_XXS, bits(s, indices, 8 * g as u32, 0xff));
        }
        turn(s, &mut w, with_eighths(s, signs));
        operands(s, w, [odd_scale(s, *d, number_in_eighths(s, signs)); 2])
    }
}

impl Format for Iq2Xs {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ2XS, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = HalfOffset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 0.125)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = line(s, tile, 128 * b, half);
        let signs = line(s, tile, 128 * b + 64, half);
        let mut w = [indices; 8];
        for g in 0..4 {
            let lower = bits(s, indices, 8 * g as u32, 0xff);
            let ninth = s.shl(bits(s, signs, 25 + 2 * g as u32, 1), 8);
            entry(s, &mut w, g, &IQ2_XS, s.or(lower, ninth));
        }
        turn(s, &mut w, with_eighths(s, signs));
        operands(s, w, two_scales(s, tile, 1024, *d, b, half))
    }
}

impl Format for Iq2S {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ2S, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = HalfOffset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 0.125)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = line(s, tile, 128 * b, half);
        let signs = line(s, tile, 128 * b + 64, half);
        let upper = s.shr(line(s, tile, 1024 + b / 4 * 64, half), 8 * (b as u32 % 4));
        let mut w = [indices; 8];
        for g in 0..4 {
            let lower = bits(s, indices, 8 * g as u32, 0xff);
            let upper = s.shl(bits(s, upper, 2 * g as u32, 3), 8);
            entry(s, &mut w, g, &IQ2_S, s.or(lower, upper));
        }
        turn(s, &mut w, signs);
        operands(s, w, two_scales(s, tile, 1152, *d, b, half))
    }
}

impl Format for Iq3Xxs {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ3XXS, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = Offset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 0.25)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = [0, 64].map(|at| line(s, tile, 128 * b + at, half));
        let signs = line(s, tile, 1024 + 64 * b, half);
        let mut w = [signs; 8];
        for (i, w) in w.iter_mut().enumerate() {
            let index = bits(s, indices[i / 4], 8 * (i as u32 % 4), 0xff);
            *w = s.gather(&IQ3_XXS, index);
        }
        turn(s, &mut w, with_eighths(s, signs));
        operands(s, w, [odd_scale(s, *d, number_in_eighths(s, signs)); 2])
    }
}

impl Format for Iq3S {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ3S, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = Offset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 1.0)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = [0, 64].map(|at| line(s, tile, 128 * b + at, half));
        let signs = line(s, tile, 1024 + 64 * b, half);
        let ninths = s.shr(line(s, tile, 1536 + b / 4 * 64, half), 8 * (b as u32 % 4));
        let mut w = [signs; 8];
        for (i, w) in w.iter_mut().enumerate() {
            let lower = bits(s, indices[i / 4], 8 * (i as u32 % 4), 0xff);
            let ninth = s.shl(bits(s, ninths, i as u32, 1), 8);
            *w = s.gather(&IQ3_S, s.or(lower, ninth));
        }
        turn(s, &mut w, signs);
        let scale = bits(s, line(s, tile, 1664, half), 4 * b as u32, 0x0f);
        operands(s, w, [odd_scale(s, *d, scale); 2])
    }
}

/// Eight times IQ1's values, plus 64 and 1 or, where `down` is all ones, less 1.
#[inline(always)]
fn iq1_entry<S: Simd>(s: S, w: &mut [S::I; 8], g: usize, index: S::I, down: S::I) {
    entry(s, w, g, &IQ1, index);
    // Bytes are above 2, so nothing is borrowed.
    let less = s.and(down, s.splat(-0x0202_0202));
    w[2 * g] = s.add(w[2 * g], less);
    w[2 * g + 1] = s.add(w[2 * g + 1], less);
}

/// Bit `bit` of each lane as all ones or none.
#[inline(always)]
fn all_ones<S: Simd>(s: S, v: S::I, bit: u32) -> S::I {
    s.sar(s.shl(v, 31 - bit), 31)
}

impl Format for Iq1S {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ1S, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = Offset<6>;
    type State<S: Simd> = S::F;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> S::F {
        plane(s, tile, half, 0.125)
    }

    #[inline(always)]
    fn block<S: Simd>(s: S, tile: Tile<'_>, d: &mut S::F, b: usize, half: usize) -> Operands<S> {
        let indices = line(s, tile, 64 * b, half);
        let upper = s.shr(line(s, tile, 512 + b / 2 * 64, half), 16 * (b as u32 % 2));
        let down = all_ones(s, upper, 15);
        let mut w = [indices; 8];
        for g in 0..4 {
            let lower = bits(s, indices, 8 * g as u32, 0xff);
            let upper = s.shl(bits(s, upper, 3 * g as u32, 7), 8);
            iq1_entry(s, &mut w, g, s.or(lower, upper), down);
        }
        operands(s, w, [odd_scale(s, *d, bits(s, upper, 12, 7)); 2])
    }
}

impl Format for Iq1M {
    const TILE_BYTES: usize = tile_bytes(WeightType::IQ1M, TILE_BLOCKS);
    const LOOKS_UP: bool = true;
    type Kind = HalfOffset<6>;
    type State<S: Simd> = NibbleScales<S>;

    #[inline(always)]
    fn open<S: Simd>(s: S, tile: Tile<'_>, half: usize) -> NibbleScales<S> {
        NibbleScales::open(s, tile, 768, half)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: Tile<'_>,
        state: &mut NibbleScales<S>,
        b: usize,
        half: usize,
    ) -> Operands<S> {
        let indices = line(s, tile, 64 * b, half);
        let upper = s.shr(line(s, tile, 512 + b / 2 * 64, half), 16 * (b as u32 % 2));
        let mut w = [indices; 8];
        for g in 0..4 {
            let at = 4 * g as u32;
            let lower = bits(s, indices, 8 * g as u32, 0xff);
            let index = s.or(lower, s.shl(bits(s, upper, at, 7), 8));
            iq1_entry(s, &mut w, g, index, all_ones(s, upper, at + 3));
        }
        let both = state.next(s);
        let d = s.mul(state.d, s.splat_f(0.125));
        let scale = [0, 3].map(|shift| odd_scale(s, d, bits(s, both, shift, 7)));
        operands(s, w, scale)
    }
}
