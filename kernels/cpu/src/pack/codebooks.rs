//! Packs IQ1, IQ2 and IQ3: a block of 256 weights is a row's share of a tile,
//! its scale goes to the plane.

use super::blocks32::bits_by_column;
use super::{put_half, put_words};

fn half(src: &[u8]) -> [u8; 2] {
    [src[0], src[1]]
}

fn u16_at(src: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([src[at], src[at + 1]])
}

fn u32_at(src: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([src[at], src[at + 1], src[at + 2], src[at + 3]])
}

/// Four times seven signs (28 bits) by column, and four bits in the place of the eighths.
fn signs_and_number(sevens: u32, number: u32) -> [u8; 4] {
    let sevens = (0..4).fold(0, |bits, g| bits | (((sevens >> (7 * g)) & 127) << (8 * g)));
    let mut bytes = bits_by_column(sevens);
    bytes[3] |= (0..4).fold(0, |byte, g| {
        byte | ((((number >> g) & 1) as u8) << (2 * g + 1))
    });
    bytes
}

/// IQ2_XXS: d, 8 x (indices[4], signs and scale[4]).
pub(super) fn iq2_xxs(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    for b in 0..8 {
        let signs = u32_at(src, 6 + 8 * b);
        put_words(&src[2 + 8 * b..][..4], dst, 128 * b, r);
        put_words(&signs_and_number(signs, signs >> 28), dst, 128 * b + 64, r);
    }
    put_half(plane, 0, r, half(src))
}

/// IQ2_XS: d, 32 x (9 bits of index, 7 signs), scales[8].
pub(super) fn iq2_xs(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    for b in 0..8 {
        let (mut lower, mut signs, mut ninths) = ([0; 4], 0, 0);
        for (g, lower) in lower.iter_mut().enumerate() {
            let packed = u32::from(u16_at(src, 2 + 8 * b + 2 * g));
            *lower = (packed & 255) as u8;
            ninths |= ((packed >> 8) & 1) << g;
            signs |= (packed >> 9) << (7 * g);
        }
        put_words(&lower, dst, 128 * b, r);
        put_words(&signs_and_number(signs, ninths), dst, 128 * b + 64, r);
    }
    put_words(&src[66..74], dst, 1024, r);
    put_half(plane, 0, r, half(src))
}

/// IQ2_S: d, indices[32], signs[32], upper bits[8], scales[8].
pub(super) fn iq2_s(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    for b in 0..8 {
        put_words(&src[2 + 4 * b..][..4], dst, 128 * b, r);
        let signs = bits_by_column(u32_at(src, 34 + 4 * b));
        put_words(&signs, dst, 128 * b + 64, r);
    }
    put_words(&src[66..82], dst, 1024, r);
    put_half(plane, 0, r, half(src))
}

/// IQ3_XXS: d, indices[64], 8 x signs and scale[4].
pub(super) fn iq3_xxs(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[2..66], dst, 0, r);
    for b in 0..8 {
        let signs = u32_at(src, 66 + 4 * b);
        put_words(&signs_and_number(signs, signs >> 28), dst, 1024 + 64 * b, r);
    }
    put_half(plane, 0, r, half(src))
}

/// IQ3_S: d, indices[64], upper bits[8], signs[32], scales[4].
pub(super) fn iq3_s(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[2..66], dst, 0, r);
    for b in 0..8 {
        let signs = bits_by_column(u32_at(src, 74 + 4 * b));
        put_words(&signs, dst, 1024 + 64 * b, r);
    }
    put_words(&src[66..74], dst, 1536, r);
    put_words(&src[106..110], dst, 1664, r);
    put_half(plane, 0, r, half(src))
}

/// IQ1_S: d, indices[32], upper bits, scales and shifts[16].
pub(super) fn iq1_s(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[2..50], dst, 0, r);
    put_half(plane, 0, r, half(src))
}

/// IQ1_M: indices[32], upper bits and shifts[16], scales[8], whose upper nibbles are d.
pub(super) fn iq1_m(src: &[u8], r: usize, dst: &mut [u8]) -> bool {
    put_words(&src[..48], dst, 0, r);
    let (mut d, mut lower, mut upper) = (0u16, 0u32, 0u16);
    for b in 0..8 {
        let packed = u16_at(src, 48 + 2 * (b / 2));
        d |= (packed >> 12) << (4 * (b / 2));
        let two = (packed >> (6 * (b % 2))) & 63;
        lower |= u32::from(two & 15) << (4 * b);
        upper |= (two >> 4) << (2 * b);
    }
    put_words(&lower.to_le_bytes(), dst, 768, r);
    dst[832 + 2 * r..][..2].copy_from_slice(&upper.to_le_bytes());
    put_half(dst, 864, r, d.to_le_bytes())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_number_lies_where_the_eighths_would() {
        let bytes = super::signs_and_number(0, 0b1010);
        assert_eq!(bytes, [0, 0, 0, 0b1000_1000]);
        // Sign 7g + i of the file is column 8g + i's.
        let bytes = super::signs_and_number(1 << 13, 0);
        assert_eq!(bytes, [0, 0, 0b1000, 0], "column 14");
    }
}
