//! F32, F16 and BF16: one column of 16 rows after the other.

use super::super::WeightType;
use super::super::simd::ROWS;

/// Packs row `r`; false if a weight is not finite.
pub(super) fn pack(ty: WeightType, row: &[u8], r: usize, dst: &mut [u8]) -> bool {
    match ty {
        WeightType::F32 => spread::<4>(row, r, dst, |w| {
            u32::from_le_bytes(w) & 0x7f80_0000 != 0x7f80_0000
        }),
        WeightType::F16 => spread::<2>(row, r, dst, |w| u16::from_le_bytes(w) & 0x7c00 != 0x7c00),
        _ => spread::<2>(row, r, dst, |w| u16::from_le_bytes(w) & 0x7f80 != 0x7f80),
    }
}

fn spread<const N: usize>(
    row: &[u8],
    r: usize,
    dst: &mut [u8],
    is_finite: impl Fn([u8; N]) -> bool,
) -> bool {
    let (weights, _) = row.as_chunks::<N>();
    let mut finite = true;
    for (column, weight) in dst.chunks_exact_mut(N * ROWS).zip(weights) {
        column[N * r..][..N].copy_from_slice(weight);
        finite &= is_finite(*weight);
    }
    finite
}

/// Row `r` of a packed group as f32.
pub(super) fn unpack(ty: WeightType, group: &[u8], r: usize, out: &mut [f32]) {
    let bytes = ty.block_bytes();
    for (column, out) in group.chunks_exact(bytes * ROWS).zip(out) {
        let w = &column[bytes * r..][..bytes];
        *out = match ty {
            WeightType::F32 => f32::from_le_bytes([w[0], w[1], w[2], w[3]]),
            WeightType::F16 => half::f16::from_le_bytes([w[0], w[1]]).to_f32(),
            _ => half::bf16::from_le_bytes([w[0], w[1]]).to_f32(),
        };
    }
}
