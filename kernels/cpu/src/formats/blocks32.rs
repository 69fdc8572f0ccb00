//! The formats with blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4.

use super::super::WeightType;
use super::super::simd::{Line, Simd};
use super::{Bias, Format, Offset, Operands, TILE_BLOCKS, Tile, halves, lines, tile_bytes};

/// ggml's Q4_0, packed.
pub(crate) struct Q4_0;
/// ggml's Q4_1, packed.
pub(crate) struct Q4_1;
/// ggml's Q5_0, packed.
pub(crate) struct Q5_0;
/// ggml's Q5_1, packed.
pub(crate) struct Q5_1;
/// ggml's Q8_0, packed with 128 added to each code.
pub(crate) struct Q8_0;
/// OCP's MXFP4, packed.
pub(crate) struct MxFp4;

/// FP4 values, doubled, plus 16.
pub(super) const FP4_PLUS_16: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (super::super::reference::FP4_DOUBLED[i] + 16).cast_unsigned();
        i += 1;
    }
    table
};

/// Low nibbles are words 0 to 3, high ones words 4 to 7.
#[inline(always)]
pub(super) fn nibbles<S: Simd>(s: S, lines: &[Line; 4], half: usize) -> [S::I; 8] {
    let mask = s.splat(0x0f0f_0f0f);
    let mut w = [mask; 8];
    for j in 0..4 {
        let line = s.line(&lines[j], half);
        w[j] = s.and(line, mask);
        w[4 + j] = s.and(s.shr(line, 4), mask);
    }
    w
}

/// Adds bit i of each byte of `line` to word i as its fifth bit.
#[inline(always)]
fn fifth_bits<S: Simd>(s: S, w: &mut [S::I; 8], line: &Line, half: usize) {
    let bits = s.line(line, half);
    let mask = s.splat(0x1010_1010);
    for (i, w) in w.iter_mut().enumerate() {
        let bits = if i < 4 {
            s.shl(bits, 4 - i as u32)
        } else {
            s.shr(bits, i as u32 - 4)
        };
        *w = s.or(*w, s.and(bits, mask));
    }
}

/// Minus the file's `min`, which it adds.
#[inline(always)]
fn bias<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> S::F {
    s.mul(halves(s, bytes, at, half), s.splat_f(-1.0))
}

macro_rules! format {
    ($name:ident, $ty:ident, $kind:ty, |$s:ident, $bytes:ident, $n:ident, $b:ident, $half:ident| ($w:expr, $scale:expr, $bias:expr)) => {
        impl Format for $name {
            const TILE_BYTES: usize = tile_bytes(WeightType::$ty, TILE_BLOCKS);
            type Kind = $kind;
            type State<S: Simd> = ();

            #[inline(always)]
            fn open<S: Simd>(_s: S, _tile: Tile<'_>, _half: usize) {}

            #[inline(always)]
            fn block<S: Simd>(
                $s: S,
                tile: Tile<'_>,
                (): &mut (),
                $b: usize,
                $half: usize,
            ) -> Operands<S> {
                let ($bytes, $n) = (tile.bytes, tile.blocks);
                let (w, scale, bias) = ($w, $scale, $bias);
                Operands {
                    w,
                    scale: [scale; 2],
                    bias: [bias; 2],
                }
            }
        }
    };
}

format!(Q4_0, Q4_0, Offset<3>, |s, bytes, n, b, half| (
    nibbles(s, lines(bytes, 256 * b), half),
    halves(s, bytes, 256 * n + 32 * b, half),
    s.splat_f(0.0)
));

format!(Q4_1, Q4_1, Bias, |s, bytes, n, b, half| (
    nibbles(s, lines(bytes, 256 * b), half),
    halves(s, bytes, 256 * n + 32 * b, half),
    bias(s, bytes, 288 * n + 32 * b, half)
));

format!(Q5_0, Q5_0, Offset<4>, |s, bytes, n, b, half| (
    {
        let mut w = nibbles(s, lines(bytes, 256 * b), half);
        fifth_bits(s, &mut w, &lines::<1>(bytes, 256 * n + 64 * b)[0], half);
        w
    },
    halves(s, bytes, 320 * n + 32 * b, half),
    s.splat_f(0.0)
));

format!(Q5_1, Q5_1, Bias, |s, bytes, n, b, half| (
    {
        let mut w = nibbles(s, lines(bytes, 256 * b), half);
        fifth_bits(s, &mut w, &lines::<1>(bytes, 256 * n + 64 * b)[0], half);
        w
    },
    halves(s, bytes, 320 * n + 32 * b, half),
    bias(s, bytes, 352 * n + 32 * b, half)
));

format!(Q8_0, Q8_0, Offset<7>, |s, bytes, n, b, half| (
    {
        let lines: &[Line; 8] = lines(bytes, 512 * b);
        let mut w = [s.splat(0); 8];
        for (w, line) in w.iter_mut().zip(lines) {
            *w = s.line(line, half);
        }
        w
    },
    halves(s, bytes, 512 * n + 32 * b, half),
    s.splat_f(0.0)
));

format!(MxFp4, MXFP4, Offset<4>, |s, bytes, n, b, half| (
    {
        let mut w = nibbles(s, lines(bytes, 256 * b), half);
        for w in &mut w {
            *w = s.look_up(&FP4_PLUS_16, *w);
        }
        w
    },
    s.e8m0_half(
        bytes[256 * n + 16 * b..]
            .first_chunk()
            .expect("a tile holds whole rows of exponents"),
        half
    ),
    s.splat_f(0.0)
));
