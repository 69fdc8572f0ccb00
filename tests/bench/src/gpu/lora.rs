//! Random LoRA adapters for a model's layers, so that clients with adapters can be measured.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_gguf::write::GgufWriter;
use rocmforge_gguf::{Gguf, MappedFile, TensorInfo, TensorType};

/// The rank of each adapter.
pub(crate) const RANK: u64 = 16;

/// Most that an element is: what is added stays small beside the products.
const SIZE: f32 = 0.01;

/// The linear matrices of a layer.
const MATRICES: [&str; 7] = [
    ".attn_q.weight",
    ".attn_k.weight",
    ".attn_v.weight",
    ".attn_output.weight",
    ".ffn_gate.weight",
    ".ffn_up.weight",
    ".ffn_down.weight",
];

/// Writes `n` adapters in f16 for all linear matrices of a model's layers into a folder.
///
/// # Errors
/// The model cannot be read, or the folder not written.
pub(crate) fn write(dir: &Path, model: &Path, n: u16, seed: u64) -> Result<Vec<PathBuf>> {
    let gguf = Gguf::open(&MappedFile::open_model(model)?)?;
    let arch = gguf.str("general.architecture")?.unwrap_or_default();
    let takes = |t: &&TensorInfo| MATRICES.iter().any(|end| t.name.ends_with(end));
    let mut rng = StdRng::seed_from_u64(seed);
    let mut random = |n: u64| -> Vec<u8> {
        let value = |_| f16::from_f32(rng.random_range(-SIZE..SIZE)).to_le_bytes();
        (0..n).flat_map(value).collect()
    };
    let mut paths = Vec::new();
    for i in 0..n {
        let mut writer = GgufWriter::new()
            .key("general.type", "adapter")
            .key("general.architecture", arch)
            .key("adapter.type", "lora")
            .key("adapter.lora.alpha", RANK as f32);
        for tensor in gguf.tensors().iter().filter(takes) {
            let [cols, rows, ..] = tensor.dims;
            for (half, dims) in [("lora_a", [cols, RANK]), ("lora_b", [RANK, rows])] {
                let name = format!("{}.{half}", tensor.name);
                let bytes = random(dims[0] * dims[1]);
                writer = writer.tensor(&name, &dims, TensorType::F16, bytes);
            }
        }
        let path = dir.join(format!("adapter-{i}.gguf"));
        let written = writer.write_to(&path);
        written.with_context(|| format!("writing {}", path.display()))?;
        paths.push(path);
    }
    Ok(paths)
}
