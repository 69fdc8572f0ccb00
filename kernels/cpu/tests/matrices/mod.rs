//! Random matrices in the file's form.

#![allow(unreachable_pub, reason = "a module of a test")]

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_kernels_cpu::reference::half_floats;
use rocmforge_kernels_cpu::{Isa, PackedMatrix, WeightType};

/// A printed seed: a failure can be run again.
pub fn rng(seed: u64) -> StdRng {
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

/// The instruction sets of this machine; says which are missing.
pub fn isas() -> Vec<Isa> {
    Isa::ALL
        .into_iter()
        .filter(|isa| {
            if !isa.is_available() {
                println!("skipped: this CPU lacks {}", isa.name());
            }
            isa.is_available()
        })
        .collect()
}

/// A value about as large as a weight.
pub fn small(rng: &mut StdRng) -> f32 {
    rng.random_range(-1.0f32..1.0)
}

/// `rows` by `cols` random weights as the file has them.
pub fn random_matrix(rng: &mut StdRng, ty: WeightType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; rows * cols / ty.block_size() * ty.block_bytes()];
    rng.fill(bytes.as_mut_slice());
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for &at in half_floats(ty) {
            let value = half::f16::from_f32(small(rng) * 0.02);
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        match ty {
            WeightType::F32 => block.copy_from_slice(&small(rng).to_le_bytes()),
            WeightType::F16 => {
                block.copy_from_slice(&half::f16::from_f32(small(rng)).to_le_bytes())
            }
            WeightType::BF16 => {
                block.copy_from_slice(&half::bf16::from_f32(small(rng)).to_le_bytes())
            }
            WeightType::MXFP4 => block[0] = rng.random_range(118..126),
            // E4M3 from 2^-5 to 2^-1; IQ1_M's f16 is in the upper nibbles of the last four words.
            WeightType::NVFP4 => block[..4].fill_with(|| rng.random_range(0x10..0x30)),
            WeightType::IQ1M => block[55] = (block[55] & 0x8f) | 0x20,
            _ => {}
        }
    }
    bytes
}

/// Activations, with an outlier now and then as real ones have.
pub fn random_activations(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| {
            small(rng)
                * if rng.random_range(0..200) == 0 {
                    20.0
                } else {
                    1.0
                }
        })
        .collect()
}

/// The whole matrix packed, into a buffer that was not zero before.
pub fn pack_all(w: &PackedMatrix, file: &[u8]) -> Vec<u8> {
    let mut packed = vec![0xa5; w.packed_bytes()];
    w.pack(file, 0..w.row_groups(), &mut packed)
        .expect("every scale is finite");
    packed
}
