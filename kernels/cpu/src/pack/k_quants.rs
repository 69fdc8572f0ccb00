//! Packs the formats with blocks of 256 weights: one block of a row is its share of a tile.

use std::ops::Range;

use super::super::WeightType;
use super::super::reference::{k_scale_min, q3_scale};
use super::{put_half, put_words};

fn half(src: &[u8], at: usize) -> [u8; 2] {
    [src[at], src[at + 1]]
}

/// Regroups 8 pairs of 6-bit values as `formats` describes.
fn put_six_bits(pairs: impl Fn(usize) -> (u8, u8), dst: &mut [u8], at: usize, r: usize) {
    let (mut first, mut second, mut upper) = (0u32, 0u32, 0u32);
    for s in 0..8 {
        let (a, b) = pairs(s);
        let (a, b) = (u32::from(a), u32::from(b));
        first |= (a & 15) << (4 * s);
        second |= (b & 15) << (4 * s);
        upper |= ((a >> 4) | ((b >> 4) << 2)) << (4 * s);
    }
    for (line, word) in [first, second, upper].into_iter().enumerate() {
        put_words(&word.to_le_bytes(), dst, at + 64 * line, r);
    }
}

/// Q2_K: scales[16], qs[64], d, dmin.
pub(super) fn q2(src: &[u8], r: usize, dst: &mut [u8]) -> bool {
    put_words(&src[16..80], dst, 0, r);
    let nibbles = |first: usize, shift: u32| {
        (0..8).fold(0u32, |word, s| {
            word | (u32::from((src[2 * s + first] >> shift) & 15) << (4 * s))
        })
    };
    let words = [nibbles(0, 0), nibbles(1, 0), nibbles(0, 4), nibbles(1, 4)];
    for (line, word) in words.into_iter().enumerate() {
        put_words(&word.to_le_bytes(), dst, 1024 + 64 * line, r);
    }
    put_half(dst, 1280, r, half(src, 80)) & put_half(dst, 1312, r, half(src, 82))
}

/// Q3_K: hmask[32], qs[64], scales[12], d.
pub(super) fn q3(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[32..96], dst, 0, r);
    put_words(&src[..32], dst, 1024, r);
    put_six_bits(
        |s| {
            (
                q3_scale(&src[96..108], 2 * s),
                q3_scale(&src[96..108], 2 * s + 1),
            )
        },
        dst,
        1536,
        r,
    );
    put_half(plane, 0, r, half(src, 108))
}

/// Words of a block that go to lines as they are, and the byte where their lines begin; the
/// functions below leave them out.
pub(super) fn plain_words(ty: WeightType) -> &'static [(Range<usize>, usize)] {
    match ty {
        WeightType::Q4K => &[(16..144, 0)],
        WeightType::Q5K => &[(48..176, 0), (16..48, 2048)],
        WeightType::Q6K => &[(0..128, 0), (128..192, 2048)],
        _ => &[],
    }
}

/// Q4_K: d, dmin, scales[12], qs[128].
pub(super) fn q4(src: &[u8], r: usize, dst: &mut [u8]) -> bool {
    put_six_bits(|s| k_scale_min(&src[4..16], s), dst, 2048, r);
    put_half(dst, 2240, r, half(src, 0)) & put_half(dst, 2272, r, half(src, 2))
}

/// Q5_K: d, dmin, scales[12], qh[32], qs[128].
pub(super) fn q5(src: &[u8], r: usize, dst: &mut [u8]) -> bool {
    put_six_bits(|s| k_scale_min(&src[4..16], s), dst, 2560, r);
    put_half(dst, 2752, r, half(src, 0)) & put_half(dst, 2784, r, half(src, 2))
}

/// Q6_K: ql[128], qh[64], scales[16], d.
pub(super) fn q6(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[192..208], dst, 3072, r);
    put_half(plane, 0, r, half(src, 208))
}
