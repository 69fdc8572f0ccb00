//! Packs IQ4_XS. IQ4_NL has Q4_0's blocks.

use super::{put_half, put_words};

/// IQ4_XS: d, upper bits of scales[2], lower bits[4], nibbles[128].
pub(super) fn iq4_xs(src: &[u8], r: usize, dst: &mut [u8]) -> bool {
    put_words(&src[8..136], dst, 0, r);
    put_words(&src[4..8], dst, 2048, r);
    dst[2112 + 2 * r..][..2].copy_from_slice(&src[2..4]);
    put_half(dst, 2144, r, [src[0], src[1]])
}
