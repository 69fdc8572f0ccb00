//! The types of at most 3.5 bits a weight beside the K-quants: codebooks with
//! signs, ternary and binary ones.

use super::super::WeightType;
use super::super::codebook::{
    IQ1_CODES, IQ2_S_CODES, IQ2_VALUES, IQ2_XS_CODES, IQ2_XXS_CODES, IQ3_S_CODES, IQ3_XXS_CODES,
    IQ3_XXS_VALUES,
};
use super::half_at;
use half::f16;

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Nibble `i` of the bytes from `at` on, the low one of a byte first.
fn nibble(block: &[u8], at: usize, i: usize) -> f32 {
    f32::from((block[at + i / 2] >> (4 * (i % 2))) & 15)
}

/// Value `i` of entry `index` of IQ2's codebooks.
fn iq2(codes: &[u16], index: usize, i: usize) -> f32 {
    f32::from(IQ2_VALUES[usize::from((codes[index] >> (2 * i)) & 3)])
}

/// 1 or -1 by bit `i` of 7; the eighth sign makes the number of negative ones even.
fn sign_of_7(bits: u32, i: usize) -> f32 {
    let bits = bits & 127;
    let negative = if i < 7 {
        (bits >> i) & 1
    } else {
        bits.count_ones() & 1
    };
    if negative == 1 { -1.0 } else { 1.0 }
}

/// 1 or -1 by bit `i` of 8.
fn sign_of_8(bits: u8, i: usize) -> f32 {
    if (bits >> i) & 1 == 1 { -1.0 } else { 1.0 }
}

/// The f16 whose four nibbles are the upper ones of IQ1_M's four 16-bit scales.
pub(super) fn iq1_m_scale(block: &[u8]) -> f32 {
    let bits = (0..4).fold(0, |bits, i| {
        bits | ((u16_at(block, 48 + 2 * i) >> 12) << (4 * i))
    });
    f16::from_bits(bits).to_f32()
}

/// IQ1's value, with the eighth that all of its group is moved by.
fn iq1(index: usize, i: usize, down: bool) -> f32 {
    let value = f32::from((IQ1_CODES[index] >> (2 * i)) & 3) - 1.0;
    value + if down { -0.125 } else { 0.125 }
}

/// Weight k of a 256-weight block.
pub(super) fn weight(ty: WeightType, block: &[u8], k: usize) -> f32 {
    // Block of 32, group of 8 in it, half of it, weight of the group.
    let (b, g, half, i) = (k / 32, k / 8 % 4, k / 16 % 2, k % 8);
    match ty {
        // d, then for each 32: indices[4], 4 x 7 signs and a scale of 4 bits
        WeightType::IQ2XXS => {
            let packed = u32_at(block, 6 + 8 * b);
            let d = half_at(block, 0) * (0.5 + (packed >> 28) as f32) * 0.25;
            let value = iq2(&IQ2_XXS_CODES, usize::from(block[2 + 8 * b + g]), i);
            d * value * sign_of_7(packed >> (7 * g), i)
        }
        // d, 32 x (9 bits of index, 7 signs), scales of 4 bits[16]
        WeightType::IQ2XS => {
            let packed = u16_at(block, 2 + 2 * (k / 8));
            let d = half_at(block, 0) * (0.5 + nibble(block, 66, k / 16)) * 0.25;
            let value = iq2(&IQ2_XS_CODES, usize::from(packed & 511), i);
            d * value * sign_of_7(u32::from(packed >> 9), i)
        }
        // d, lower bits of indices[32], signs[32], upper 2 bits of indices[32], scales of 4
        // bits[16]
        WeightType::IQ2S => {
            let upper = (usize::from(block[66 + b]) >> (2 * g)) & 3;
            let index = usize::from(block[2 + k / 8]) | (upper << 8);
            let d = half_at(block, 0) * (0.5 + nibble(block, 74, k / 16)) * 0.25;
            d * iq2(&IQ2_S_CODES, index, i) * sign_of_8(block[34 + k / 8], i)
        }
        // d, indices[64], for each 32: 4 x 7 signs and a scale of 4 bits
        WeightType::IQ3XXS => {
            let packed = u32_at(block, 66 + 4 * b);
            let d = half_at(block, 0) * (0.5 + (packed >> 28) as f32) * 0.5;
            let codes = IQ3_XXS_CODES[usize::from(block[2 + k / 4])];
            let value = IQ3_XXS_VALUES[usize::from((codes >> (4 * (k % 4))) & 15)];
            d * f32::from(value) * sign_of_7(packed >> (7 * g), i)
        }
        // d, lower bits of indices[64], upper bit of indices[64], signs[32], scales of 4 bits[8]
        WeightType::IQ3S => {
            let upper = (usize::from(block[66 + b]) >> (k / 4 % 8)) & 1;
            let codes = IQ3_S_CODES[usize::from(block[2 + k / 4]) | (upper << 8)];
            let value = 2 * ((codes >> (4 * (k % 4))) & 15) + 1;
            let d = half_at(block, 0) * (1.0 + 2.0 * nibble(block, 106, b));
            d * f32::from(value) * sign_of_8(block[74 + k / 8], i)
        }
        // d, lower bits of indices[32], for each 32: 4 x upper 3 bits, a scale
        // of 3 bits, the shift's sign
        WeightType::IQ1S => {
            let packed = u16_at(block, 34 + 2 * b);
            let upper = usize::from(packed >> (3 * g)) & 7;
            let d = half_at(block, 0) * f32::from(2 * ((packed >> 12) & 7) + 1);
            let index = usize::from(block[2 + k / 8]) | (upper << 8);
            d * iq1(index, i, packed >> 15 == 1)
        }
        // lower bits of indices[32], for each 16: 2 x (upper 3 bits, the shift's sign),
        // scales[4] of 4 x 3 bits and 4 of d
        WeightType::IQ1M => {
            let packed = usize::from(block[32 + k / 16] >> (4 * (g % 2)));
            let scale = (u16_at(block, 48 + 2 * (b / 2)) >> (6 * (b % 2) + 3 * half)) & 7;
            let d = iq1_m_scale(block) * f32::from(2 * scale + 1);
            let index = usize::from(block[k / 8]) | ((packed & 7) << 8);
            d * iq1(index, i, packed & 8 != 0)
        }
        // 5 x 32 in 32 bytes, 5 x 16 in 16, 4 x 4 in 4: digits of base 3; d
        WeightType::TQ1_0 => {
            let (byte, digit) = match k {
                0..160 => (k % 32, k / 32),
                160..240 => (32 + k % 16, (k - 160) / 16),
                _ => (48 + k % 4, (k - 240) / 4),
            };
            let rest = block[byte].wrapping_mul([1, 3, 9, 27, 81][digit]);
            (f32::from((u16::from(rest) * 3) >> 8) - 1.0) * half_at(block, 52)
        }
        // qs[64], d
        _ => {
            let q = (block[32 * (k / 128) + k % 32] >> (2 * (k / 32 % 4))) & 3;
            (f32::from(q) - 1.0) * half_at(block, 64)
        }
    }
}

/// Half of what the byte of an unsigned E4M3 scale means: FP4's table here is doubled. 0x7f,
/// its NaN, is zero in ggml.
pub(super) fn e4m3_half(e: u8) -> f32 {
    let (exponent, mantissa) = ((e >> 3) & 15, f32::from(e & 7));
    match e {
        0x7f => 0.0,
        _ if exponent == 0 => mantissa / 1024.0,
        // 2^(exponent - 8)
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 127 - 8) << 23),
    }
}
