//! Packs the formats with blocks of 32 weights.

use super::super::WeightType;
use super::{put, put_half};

/// Packs the `n` blocks that row `r` has in a tile; false if a scale is not finite.
pub(super) fn pack(ty: WeightType, src: &[u8], n: usize, r: usize, dst: &mut [u8]) -> bool {
    let mut finite = true;
    for (b, block) in src.chunks_exact(ty.block_bytes()).enumerate() {
        let half = |at: usize| [block[at], block[at + 1]];
        let word = |at: usize| [block[at], block[at + 1], block[at + 2], block[at + 3]];
        if ty == WeightType::Q8_0 {
            finite &= put_half(dst, 512 * n + 32 * b, r, half(0));
            for j in 0..8 {
                put(dst, 512 * b, j, r, word(2 + 4 * j).map(|code| code ^ 0x80));
            }
            continue;
        }
        let nibbles = block.len() - 16;
        for j in 0..4 {
            put(dst, 256 * b, j, r, word(nibbles + 4 * j));
        }
        match ty {
            WeightType::Q4_0 => finite &= put_half(dst, 256 * n + 32 * b, r, half(0)),
            WeightType::Q4_1 => {
                finite &= put_half(dst, 256 * n + 32 * b, r, half(0));
                finite &= put_half(dst, 288 * n + 32 * b, r, half(2));
            }
            WeightType::Q5_0 => {
                finite &= put_half(dst, 320 * n + 32 * b, r, half(0));
                put(
                    dst,
                    256 * n + 64 * b,
                    0,
                    r,
                    bits_by_column(u32::from_le_bytes(word(2))),
                );
            }
            WeightType::Q5_1 => {
                finite &= put_half(dst, 320 * n + 32 * b, r, half(0));
                finite &= put_half(dst, 352 * n + 32 * b, r, half(2));
                put(
                    dst,
                    256 * n + 64 * b,
                    0,
                    r,
                    bits_by_column(u32::from_le_bytes(word(4))),
                );
            }
            _ => {
                dst[256 * n + 16 * b + r] = block[0];
                // E8M0 has no infinity; 255 is its NaN.
                finite &= block[0] != 255;
            }
        }
    }
    finite
}

/// Bit i of byte b is bit 4i + b of `bits`.
fn bits_by_column(bits: u32) -> [u8; 4] {
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
