//! Packs the formats with blocks of 32 weights: the `n` blocks that row `r` has in a tile. Each
//! function yields false if a scale is not finite.

use super::{put_half, put_words};

/// Calls `pack` with each block and its number; false if any call returned false.
#[inline(always)]
pub(super) fn blocks<const BYTES: usize>(
    src: &[u8],
    mut pack: impl FnMut(usize, &[u8; BYTES]) -> bool,
) -> bool {
    src.as_chunks::<BYTES>()
        .0
        .iter()
        .enumerate()
        .fold(true, |finite, (b, block)| pack(b, block) & finite)
}

/// Q4_0: d, nibbles[16].
pub(super) fn q4_0(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<18>(src, |b, block| {
        put_words(&block[2..], dst, 256 * b, r);
        put_half(dst, 256 * n + 32 * b, r, [block[0], block[1]])
    })
}

/// Q4_1: d, m, nibbles[16].
pub(super) fn q4_1(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<20>(src, |b, block| {
        put_words(&block[4..], dst, 256 * b, r);
        put_half(dst, 256 * n + 32 * b, r, [block[0], block[1]])
            & put_half(dst, 288 * n + 32 * b, r, [block[2], block[3]])
    })
}

/// Q5_0: d, fifth bits[4], nibbles[16].
pub(super) fn q5_0(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<22>(src, |b, block| {
        let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        put_words(&block[6..], dst, 256 * b, r);
        put_words(&bits_by_column(fifth), dst, 256 * n + 64 * b, r);
        put_half(dst, 320 * n + 32 * b, r, [block[0], block[1]])
    })
}

/// Q5_1: d, m, fifth bits[4], nibbles[16].
pub(super) fn q5_1(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<24>(src, |b, block| {
        let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        put_words(&block[8..], dst, 256 * b, r);
        put_words(&bits_by_column(fifth), dst, 256 * n + 64 * b, r);
        put_half(dst, 320 * n + 32 * b, r, [block[0], block[1]])
            & put_half(dst, 352 * n + 32 * b, r, [block[2], block[3]])
    })
}

/// Q8_0: d, codes[32].
pub(super) fn q8_0(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<34>(src, |b, block| {
        let mut codes = [0; 32];
        for (code, signed) in codes.iter_mut().zip(&block[2..]) {
            *code = signed ^ 0x80;
        }
        put_words(&codes, dst, 512 * b, r);
        put_half(dst, 512 * n + 32 * b, r, [block[0], block[1]])
    })
}

/// MXFP4: exponent, nibbles[16]. E8M0 has no infinity; 255 is its NaN.
pub(super) fn mxfp4(src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    blocks::<17>(src, |b, block| {
        put_words(&block[1..], dst, 256 * b, r);
        dst[256 * n + 16 * b + r] = block[0];
        block[0] != 255
    })
}

/// Bit i of byte b is bit 4i + b of `bits`.
pub(super) fn bits_by_column(bits: u32) -> [u8; 4] {
    std::array::from_fn(|b| {
        let every_fourth = (bits >> b) & 0x1111_1111;
        // Gathers bits 0, 4, ..., 28 into the top byte: pairs, then fours, then eights.
        let pairs = (every_fourth | (every_fourth >> 3)) & 0x0303_0303;
        let fours = (pairs | (pairs >> 6)) & 0x000f_000f;
        ((fours | (fours >> 12)) & 0xff) as u8
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn fifth_bits_are_transposed() {
        for k in 0..32 {
            let bytes = super::bits_by_column(1 << k);
            let expected = std::array::from_fn(|b| if k % 4 == b { 1u8 << (k / 4) } else { 0 });
            assert_eq!(bytes, expected, "column {k}");
        }
    }
}
