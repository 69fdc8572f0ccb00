//! Random weights of every type.

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_kernels_cpu::reference::half_floats;
use rocmforge_ops::WeightType;

/// Random blocks; scales are up to `size`.
pub(crate) fn random_matrix(
    rng: &mut StdRng,
    ty: WeightType,
    rows: u64,
    cols: u64,
    size: f32,
) -> Vec<u8> {
    let n = (rows * cols) as usize / ty.block_size() * ty.block_bytes();
    let mut bytes = vec![0u8; n];
    rng.fill(bytes.as_mut_slice());
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let value = rng.random_range(-1.0f32..1.0) * size * 50.0;
        for &at in half_floats(ty) {
            let scale = half::f16::from_f32(rng.random_range(-size..size));
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        match ty {
            WeightType::F32 => block.copy_from_slice(&value.to_le_bytes()),
            WeightType::F16 => block.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
            WeightType::MXFP4 => block[0] = rng.random_range(118..126),
            WeightType::NVFP4 => block[..4].fill_with(|| rng.random_range(0x10..0x30)),
            WeightType::IQ1M => block[55] = (block[55] & 0x8f) | 0x20,
            _ => {}
        }
    }
    bytes
}
