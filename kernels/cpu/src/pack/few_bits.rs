//! Packs ternary and binary types, and NVFP4.

use super::blocks32::{bits_by_column, blocks};
use super::{put_half, put_words};

/// TQ1_0: 5 digits a byte[48], 4 digits a byte[4], d.
pub(super) fn tq1_0(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[..52], dst, 0, r);
    put_half(plane, 0, r, [src[52], src[53]])
}

/// TQ2_0: codes[64], d.
pub(super) fn tq2_0(src: &[u8], r: usize, dst: &mut [u8], plane: &mut [u8]) -> bool {
    put_words(&src[..64], dst, 0, r);
    put_half(plane, 0, r, [src[64], src[65]])
}

/// Q1_0: d, bits[16] of 128 weights.
pub(super) fn q1_0(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<18>(src, |i, block| {
        for (b, bits) in block[2..].as_chunks::<4>().0.iter().enumerate() {
            let bits = bits_by_column(u32::from_le_bytes(*bits));
            put_words(&bits, dst, 64 * (4 * i + b), r);
        }
        put_half(dst, 64 * n + 32 * i, r, [block[0], block[1]])
    })
}

/// Q2_0: d, codes[16] of 64 weights.
pub(super) fn q2_0(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<18>(src, |i, block| {
        for (line, codes) in block[2..].as_chunks::<4>().0.iter().enumerate() {
            let codes = turned(u32::from_le_bytes(*codes)).to_le_bytes();
            put_words(&codes, dst, 256 * i + 64 * line, r);
        }
        put_half(dst, 128 * n + 32 * i, r, [block[0], block[1]])
    })
}

/// Two bits j of byte i to two bits i of byte j.
fn turned(v: u32) -> u32 {
    let t = (v ^ (v >> 6)) & 0x00cc_00cc;
    let v = v ^ t ^ (t << 6);
    let t = (v ^ (v >> 12)) & 0x0000_f0f0;
    v ^ t ^ (t << 12)
}

/// NVFP4: scales[4], codes[32] of 64 weights. 0x7f is E4M3's NaN, which ggml takes for
/// zero; no scale has a sign.
pub(super) fn nvfp4(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<36>(src, |i, block| {
        let scales = [0, 1, 2, 3].map(|s| if block[s] == 0x7f { 0 } else { block[s] });
        put_words(&scales, dst, 256 * n + 64 * i, r);
        put_words(&block[4..], dst, 512 * i, r);
        scales.iter().all(|scale| scale & 0x80 == 0)
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_bits_are_transposed() {
        for i in 0..4 {
            for j in 0..4 {
                assert_eq!(super::turned(3 << (8 * i + 2 * j)), 3 << (8 * j + 2 * i));
            }
        }
    }
}
