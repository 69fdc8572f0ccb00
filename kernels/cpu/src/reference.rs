//! What each format means, written from its definition, one weight at a time: the
//! yardstick of everything else here.
//!
//! A quantized weight is `scale * (code - offset)` or `scale * code + min`, evaluated in f32 in the
//! order in which ggml's definition gives it. Sources: ggml's block structures and the GGUF
//! specification; FP4 from OCP Microscaling 1.0.

mod low_bits;

use half::f16;

use super::{Error, WeightType};

/// FP4 (E2M1) values doubled, so that they are integers; the exponent's bias is
/// one less to make up for it.
pub(crate) const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 2^(e - 128): half of what the E8M0 byte `e` means.
pub(crate) fn e8m0_half(e: u8) -> f32 {
    let e = u32::from(e);
    // Below 2 the result is subnormal.
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        (e - 1) << 23
    })
}

/// The values of IQ4_NL's and IQ4_XS's 4-bit codes.
pub(crate) const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Where a block of this type has half floats: scales first, then mins.
pub const fn half_floats(ty: WeightType) -> &'static [usize] {
    match ty {
        WeightType::F16
        | WeightType::Q4_0
        | WeightType::Q5_0
        | WeightType::Q8_0
        | WeightType::IQ4NL
        | WeightType::IQ4XS
        | WeightType::IQ3S
        | WeightType::IQ3XXS
        | WeightType::IQ2S
        | WeightType::IQ2XS
        | WeightType::IQ2XXS
        | WeightType::IQ1S
        | WeightType::Q1_0
        | WeightType::Q2_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q2K => &[80, 82],
        WeightType::Q3K => &[108],
        WeightType::Q6K => &[208],
        WeightType::TQ1_0 => &[52],
        WeightType::TQ2_0 => &[64],
        // IQ1_M has one, spread over four places.
        WeightType::IQ1M
        | WeightType::MXFP4
        | WeightType::NVFP4
        | WeightType::F32
        | WeightType::BF16 => &[],
    }
}

/// Whether a block's scales, or the weight of an unquantized type, are numbers: not NaN and not
/// infinite. (NVFP4's are unsigned; a byte with a sign is none of them.)
pub fn is_finite(ty: WeightType, block: &[u8]) -> bool {
    match ty {
        WeightType::MXFP4 => block[0] != 255,
        WeightType::NVFP4 => block[..4].iter().all(|scale| scale & 0x80 == 0),
        WeightType::IQ1M => low_bits::iq1_m_scale(block).is_finite(),
        WeightType::F32 => f32::from_le_bytes([block[0], block[1], block[2], block[3]]).is_finite(),
        WeightType::BF16 => half::bf16::from_le_bytes([block[0], block[1]]).is_finite(),
        _ => half_floats(ty)
            .iter()
            .all(|&at| half_at(block, at).is_finite()),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale `i` and min `i` (6 bits each) of the 12 bytes that Q4_K and Q5_K use for 8 pairs.
pub(crate) fn k_scale_min(scales: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        (scales[i] & 63, scales[i + 4] & 63)
    } else {
        let scale = (scales[i + 4] & 15) | ((scales[i - 4] >> 6) << 4);
        let min = (scales[i + 4] >> 4) | ((scales[i] >> 6) << 4);
        (scale, min)
    }
}

/// Scale `i` of 16 (6 bits, to be lowered by 32) of the 12 bytes that Q3_K uses.
pub(crate) fn q3_scale(scales: &[u8], i: usize) -> u8 {
    let low = (scales[i % 8] >> (4 * (i / 8))) & 15;
    let high = (scales[8 + i % 4] >> (2 * (i / 4))) & 3;
    low | (high << 4)
}

/// Dequantizes whole blocks: `bytes` as they are in the file, `out` one f32 per
/// weight in the file's order.
///
/// # Errors
/// [`Error::Length`] if `bytes` is not a whole number of blocks or `out` has
/// another number of weights.
pub fn dequantize(ty: WeightType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = out.len() / ty.block_size() * ty.block_bytes();
    if !out.len().is_multiple_of(ty.block_size()) || bytes.len() != expected {
        return Err(Error::Length {
            what: "the file's row data",
            ty,
            expected,
            actual: bytes.len(),
        });
    }
    for (block, out) in bytes
        .chunks_exact(ty.block_bytes())
        .zip(out.chunks_exact_mut(ty.block_size()))
    {
        dequantize_block(ty, block, out);
    }
    Ok(())
}

fn dequantize_block(ty: WeightType, block: &[u8], out: &mut [f32]) {
    match ty {
        WeightType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        WeightType::F16 => out[0] = half_at(block, 0),
        WeightType::BF16 => {
            out[0] = f32::from_bits(u32::from(u16::from_le_bytes([block[0], block[1]])) << 16)
        }
        WeightType::Q8_0 => {
            let d = half_at(block, 0);
            for (k, y) in out.iter_mut().enumerate() {
                *y = f32::from(block[2 + k].cast_signed()) * d;
            }
        }
        WeightType::Q4_0
        | WeightType::Q4_1
        | WeightType::Q5_0
        | WeightType::Q5_1
        | WeightType::MXFP4
        | WeightType::IQ4NL => {
            dequantize_32(ty, block, out);
        }
        // d, signs[128]
        WeightType::Q1_0 => {
            let d = half_at(block, 0);
            for (k, y) in out.iter_mut().enumerate() {
                *y = if (block[2 + k / 8] >> (k % 8)) & 1 == 1 {
                    d
                } else {
                    -d
                };
            }
        }
        // d, codes[64]
        WeightType::Q2_0 => {
            let d = half_at(block, 0);
            for (k, y) in out.iter_mut().enumerate() {
                *y = (f32::from((block[2 + k / 4] >> (2 * (k % 4))) & 3) - 1.0) * d;
            }
        }
        // scales[4], for each 16: codes[8], of weights k and k + 8
        WeightType::NVFP4 => {
            for (k, y) in out.iter_mut().enumerate() {
                let code = (block[4 + 8 * (k / 16) + k % 8] >> (4 * (k / 8 % 2))) & 15;
                let value = f32::from(FP4_DOUBLED[usize::from(code)]);
                *y = value * low_bits::e4m3_half(block[k / 16]);
            }
        }
        WeightType::IQ3S
        | WeightType::IQ3XXS
        | WeightType::IQ2S
        | WeightType::IQ2XS
        | WeightType::IQ2XXS
        | WeightType::IQ1S
        | WeightType::IQ1M
        | WeightType::TQ1_0
        | WeightType::TQ2_0 => {
            for (k, y) in out.iter_mut().enumerate() {
                *y = low_bits::weight(ty, block, k);
            }
        }
        WeightType::Q2K
        | WeightType::Q3K
        | WeightType::Q4K
        | WeightType::Q5K
        | WeightType::Q6K
        | WeightType::IQ4XS => {
            for (k, y) in out.iter_mut().enumerate() {
                *y = k_quant(ty, block, k);
            }
        }
    }
}

/// The 32-weight formats of 4 and 5 bits: weight k is in the low nibble of byte k,
/// weight k + 16 in the high one.
fn dequantize_32(ty: WeightType, block: &[u8], out: &mut [f32]) {
    let quants = &block[block.len() - 16..];
    for (k, y) in out.iter_mut().enumerate() {
        let nibble = (quants[k % 16] >> (4 * (k / 16))) & 15;
        let fifth = |at: usize| ((block[at + k / 8] >> (k % 8)) & 1) << 4;
        *y = match ty {
            WeightType::Q4_0 => (f32::from(nibble) - 8.0) * half_at(block, 0),
            WeightType::Q4_1 => f32::from(nibble) * half_at(block, 0) + half_at(block, 2),
            WeightType::Q5_0 => (f32::from(nibble | fifth(2)) - 16.0) * half_at(block, 0),
            WeightType::Q5_1 => {
                f32::from(nibble | fifth(4)) * half_at(block, 0) + half_at(block, 2)
            }
            WeightType::IQ4NL => f32::from(IQ4_VALUES[usize::from(nibble)]) * half_at(block, 0),
            _ => f32::from(FP4_DOUBLED[usize::from(nibble)]) * e8m0_half(block[0]),
        };
    }
}

/// Weight k of a 256-weight block.
fn k_quant(ty: WeightType, block: &[u8], k: usize) -> f32 {
    let (half, quarter, l) = (k / 128, k / 32 % 4, k % 32);
    match ty {
        // scales[16], qs[64], d, dmin
        WeightType::Q2K => {
            let (d, dmin) = (half_at(block, 80), half_at(block, 82));
            let packed = block[k / 16];
            let q = (block[16 + 32 * half + l] >> (2 * quarter)) & 3;
            d * f32::from(packed & 15) * f32::from(q) - dmin * f32::from(packed >> 4)
        }
        // hmask[32], qs[64], scales[12], d
        WeightType::Q3K => {
            let d = half_at(block, 108);
            let scale = f32::from(q3_scale(&block[96..108], k / 16)) - 32.0;
            let q = (block[32 + 32 * half + l] >> (2 * quarter)) & 3;
            let high = (block[l] >> (4 * half + quarter)) & 1;
            d * scale * (f32::from(q | (high << 2)) - 4.0)
        }
        // d, dmin, scales[12], qs[128]
        WeightType::Q4K => {
            let (scale, min) = k_scale_min(&block[4..16], k / 32);
            let q = (block[16 + 32 * (k / 64) + l] >> (4 * (k / 32 % 2))) & 15;
            half_at(block, 0) * f32::from(scale) * f32::from(q) - half_at(block, 2) * f32::from(min)
        }
        // d, dmin, scales[12], qh[32], qs[128]
        WeightType::Q5K => {
            let (scale, min) = k_scale_min(&block[4..16], k / 32);
            let low = (block[48 + 32 * (k / 64) + l] >> (4 * (k / 32 % 2))) & 15;
            let q = low | (((block[16 + l] >> (k / 32)) & 1) << 4);
            half_at(block, 0) * f32::from(scale) * f32::from(q) - half_at(block, 2) * f32::from(min)
        }
        // d, upper 2 bits of 8 scales[2], lower 4 bits[4], codes[8][16]
        WeightType::IQ4XS => {
            let j = k / 32;
            let upper = (u16::from_le_bytes([block[2], block[3]]) >> (2 * j)) & 3;
            let lower = (block[4 + j / 2] >> (4 * (j % 2))) & 15;
            let scale = f32::from(upper << 4 | u16::from(lower)) - 32.0;
            let code = (block[8 + 16 * j + l % 16] >> (4 * (l / 16))) & 15;
            half_at(block, 0) * scale * f32::from(IQ4_VALUES[usize::from(code)])
        }
        // ql[128], qh[64], scales[16] signed, d
        _ => {
            let scale = f32::from(block[192 + k / 16].cast_signed());
            let low = (block[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2))) & 15;
            let high = (block[128 + 32 * half + l] >> (2 * quarter)) & 3;
            half_at(block, 208) * scale * (f32::from(low | (high << 4)) - 32.0)
        }
    }
}

/// `y[t][row] = sum over k of W[row][k] * x[t][k]` in f64 over the dequantized weights
/// and unrounded activations.
///
/// `bytes`: the matrix as in the file, `x`: `[tokens][cols]`, result: `[tokens][rows]`.
///
/// # Errors
/// [`Error::Length`] as [`dequantize`].
pub fn mat_mul(
    ty: WeightType,
    bytes: &[u8],
    rows: usize,
    cols: usize,
    x: &[f32],
) -> Result<Vec<f64>, Error> {
    let tokens = x.len() / cols;
    let mut weights = vec![0.0f32; rows * cols];
    dequantize(ty, bytes, &mut weights)?;
    let mut y = vec![0.0; tokens * rows];
    for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(rows)) {
        for (w, y) in weights.chunks_exact(cols).zip(y) {
            *y = w
                .iter()
                .zip(x)
                .map(|(&w, &x)| f64::from(w) * f64::from(x))
                .sum();
        }
    }
    Ok(y)
}
