//! Random weights: blocks of every type with zero mean and the variance of a usual initialisation.
//!
//! A tensor's elements have the standard deviation `1 / sqrt(n_inputs)`, so that
//! activations keep their size through the layers. Codes are uniform, block scales are set
//! so that the variance comes out right, and a block whose codes have no symmetric range
//! gets a scale of random sign instead.

use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use rocmforge_gguf::TensorType;

/// Blocks of a pool. A prime, so that the rows that repeat the pool do not repeat one another.
pub(crate) const POOL_BLOCKS: usize = 65_521;

/// Elements of a pool of unquantized values; prime as well.
const POOL_ELEMENTS: usize = 4_194_301;

/// Root mean square of the codes `-8..=7`.
const RMS_Q4_0: f32 = 4.637;

/// Root mean square of the codes `-127..=127`.
const RMS_Q8_0: f32 = 73.32;

/// Standard deviation of the codes `0..=15`, whose mean is 7.5.
const RMS_Q4_K: f32 = 4.610;

/// Root mean square of the codes `-32..=31`.
const RMS_Q6_K: f32 = 18.48;

/// Root mean square of the sixteen values of E2M1.
const RMS_MXFP4: f32 = 2.926;

/// Mean of the sub-block scales of the K types, which are drawn from 24 to 40.
const SUB_SCALE: f32 = 32.0;

/// Random blocks of a type, as a file holds them; `n_inputs` is the length of the rows that they
/// will fill, which are `times` as large as usual.
///
/// # Panics
/// If no preset has matrices of that type.
pub(crate) fn pool(ty: TensorType, n_inputs: u64, times: f32, rng: &mut StdRng) -> Vec<u8> {
    let std = (n_inputs as f32).sqrt().recip() * times;
    if ty == TensorType::F16 {
        let values =
            (0..POOL_ELEMENTS).flat_map(|_| f16::from_f32(normal(rng) * std).to_le_bytes());
        return values.collect();
    }
    if ty == TensorType::F32 {
        let values = (0..POOL_ELEMENTS).flat_map(|_| (normal(rng) * std).to_le_bytes());
        return values.collect();
    }
    let size = ty.block_bytes() as usize;
    let mut pool = vec![0; POOL_BLOCKS * size];
    rng.fill_bytes(&mut pool);
    for block in pool.chunks_exact_mut(size) {
        let sign = if rng.random() { 1.0 } else { -1.0 };
        match ty {
            TensorType::Q4_0 => put(block, 0, sign * std / RMS_Q4_0),
            TensorType::Q8_0 => {
                put(block, 0, std / RMS_Q8_0);
                // Quantizers never write -128.
                for code in block[2..].iter_mut().filter(|code| **code == 0x80) {
                    *code = 0;
                }
            }
            TensorType::Q4K => {
                let d = std / RMS_Q4_K / SUB_SCALE;
                put(block, 0, d);
                put(block, 2, 7.5 * d);
                // A sub-block's minimum has the factor of its scale, so
                // `d * s * q - 7.5 * d * s` has zero mean.
                let scales = std::array::from_fn(|_| rng.random_range(24..=40));
                block[4..16].copy_from_slice(&pack_scales(scales, scales));
            }
            TensorType::Q6K => {
                for scale in &mut block[192..208] {
                    *scale = rng.random_range(24u8..=40);
                }
                put(block, 208, sign * std / RMS_Q6_K / SUB_SCALE);
            }
            // The nearest power of two; a code of 127 is 1.
            TensorType::MXFP4 => block[0] = (127.0 + (std / RMS_MXFP4).log2().round()) as u8,
            other => panic!("no preset has matrices of type {}", other.name()),
        }
    }
    pool
}

/// A matrix of f32, `[inputs, rows]` in ggml's order, whose rows are of different sizes: times
/// `exp(z)` of a normal `z` of this standard deviation.
pub(crate) fn skewed(dims: &[u64], deviation: f32, rng: &mut StdRng) -> Vec<u8> {
    let std = (dims[0] as f32).sqrt().recip();
    let mut bytes = Vec::with_capacity((dims.iter().product::<u64>() * 4) as usize);
    for _ in 0..dims[1] {
        let size = std * (deviation * normal(rng)).exp();
        bytes.extend((0..dims[0]).flat_map(|_| (size * normal(rng)).to_le_bytes()));
    }
    bytes
}

/// The 12 bytes in which Q4_K keeps eight scales and eight minimums of 6 bits.
///
/// Bytes 0..4 hold scales 0..4 and bytes 4..8 minimums 0..4, each with the upper two bits of
/// the one four further on in its own upper bits; bytes 8..12 hold the lower halves of
/// scales and minimums 4..8.
fn pack_scales(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    std::array::from_fn(|i| match i / 4 {
        0 => scales[i] | (scales[i + 4] >> 4) << 6,
        1 => mins[i - 4] | (mins[i] >> 4) << 6,
        _ => (scales[i - 4] & 15) | (mins[i - 4] & 15) << 4,
    })
}

fn put(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Nearly normal, mean 0, variance 1: the sum of four uniform draws.
fn normal(rng: &mut StdRng) -> f32 {
    let bits: u64 = rng.random();
    let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xFFFF).sum();
    (sum as f32 / 65_535.0 - 2.0) * 3.0f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    /// Values of the first blocks of a pool, by the formats' definitions.
    fn values(ty: TensorType, pool: &[u8]) -> Vec<f32> {
        let at = |b: &[u8], i: usize| f16::from_le_bytes([b[i], b[i + 1]]).to_f32();
        let mut out = Vec::new();
        for b in pool.chunks_exact(ty.block_bytes() as usize).take(20_000) {
            match ty {
                TensorType::F16 => out.push(at(b, 0)),
                TensorType::Q4_0 => {
                    for byte in &b[2..] {
                        out.push(at(b, 0) * (f32::from(byte & 15) - 8.0));
                        out.push(at(b, 0) * (f32::from(byte >> 4) - 8.0));
                    }
                }
                TensorType::Q8_0 => {
                    out.extend(b[2..].iter().map(|c| at(b, 0) * f32::from(*c as i8)));
                }
                TensorType::Q4K => {
                    for i in 0..256 {
                        let sub = i / 32;
                        let s = &b[4..16];
                        let (scale, min) = if sub < 4 {
                            (s[sub] & 63, s[sub + 4] & 63)
                        } else {
                            (
                                s[sub + 4] & 15 | (s[sub - 4] >> 6) << 4,
                                s[sub + 4] >> 4 | (s[sub] >> 6) << 4,
                            )
                        };
                        let byte = b[16 + i / 64 * 32 + i % 32];
                        let code = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
                        out.push(
                            at(b, 0) * f32::from(scale) * f32::from(code)
                                - at(b, 2) * f32::from(min),
                        );
                    }
                }
                TensorType::Q6K => {
                    for i in 0..256 {
                        // Which code meets which scale does not matter: both are independent.
                        let low = b[i / 2] >> (4 * (i % 2)) & 15;
                        let high = b[128 + i / 4] >> (2 * (i % 4)) & 3;
                        let code = f32::from(low | high << 4) - 32.0;
                        out.push(at(b, 208) * f32::from(b[192 + i / 16] as i8) * code);
                    }
                }
                TensorType::MXFP4 => {
                    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
                    let scale = (f32::from(b[0]) - 127.0).exp2();
                    for code in b[1..].iter().flat_map(|byte| [byte & 15, byte >> 4]) {
                        let value = scale * e2m1[usize::from(code & 7)];
                        out.push(if code & 8 == 0 { value } else { -value });
                    }
                }
                _ => unreachable!("not a type of the presets"),
            }
        }
        out
    }

    #[test]
    fn weights_have_zero_mean_and_the_variance_of_an_initialisation() {
        let seed = 7;
        println!("seed {seed}");
        for ty in [
            TensorType::F16,
            TensorType::Q4_0,
            TensorType::Q8_0,
            TensorType::Q4K,
            TensorType::Q6K,
            TensorType::MXFP4,
        ] {
            // Scales of MXFP4 are powers of two.
            let near = if ty == TensorType::MXFP4 { 0.42 } else { 0.03 };
            let pool = pool(ty, 2048, 1.0, &mut StdRng::seed_from_u64(seed));
            assert_eq!(pool.len() % ty.block_bytes() as usize, 0);
            let values = values(ty, &pool);
            let n = values.len() as f64;
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let rms = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n).sqrt();
            let std = 1.0 / 2048f64.sqrt();
            assert!(mean.abs() < 0.02 * std, "{}: mean {mean}", ty.name());
            assert!(
                (rms / std - 1.0).abs() < near,
                "{}: rms {rms}, wanted {std}",
                ty.name()
            );
        }
    }

    #[test]
    fn six_bits_come_back_from_the_packed_scales() {
        let scales = [1, 63, 17, 32, 48, 63, 0, 33];
        let mins = [63, 0, 16, 15, 47, 1, 62, 31];
        let packed = pack_scales(scales, mins);
        for i in 0..4 {
            assert_eq!((packed[i] & 63, packed[i + 4] & 63), (scales[i], mins[i]));
            let low = packed[i + 8];
            assert_eq!(low & 15 | packed[i] >> 6 << 4, scales[i + 4]);
            assert_eq!(low >> 4 | packed[i + 4] >> 6 << 4, mins[i + 4]);
        }
    }
}
