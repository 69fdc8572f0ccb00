//! Writes a projector file of a real tower's shape with random weights: kind qwen3vl_merger, F16.

use std::path::Path;

use anyhow::Result;
use rocmforge_gguf::TensorType;
use rocmforge_gguf::write::GgufWriter;

use crate::generate::{Written, write_file};
use crate::tensors::{Fill, TensorSpec};

/// Side of the block of patches that becomes one row of the text model.
pub(crate) const MERGE: u32 = 2;

/// A tower's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProjectorShape {
    pub(crate) n_layer: u32,
    pub(crate) width: u32,
    pub(crate) n_ff: u32,
    pub(crate) n_head: u32,
    /// Side of a patch, in pixels.
    pub(crate) patch: u32,
    /// Side of the square of learned positions, in patches.
    pub(crate) side: u32,
    /// Width of the text model's residual stream.
    pub(crate) n_out: u32,
}

impl ProjectorShape {
    /// Operations of the tower on an image of so many patches: two for each weight of the layers'
    /// and mergers' matrices and row, and the attention of all to all.
    pub(crate) fn operations(&self, patches: u64) -> f64 {
        let [width, n_ff, n_out] = [self.width, self.n_ff, self.n_out].map(f64::from);
        let (rows, merged) = (patches as f64, f64::from(MERGE * MERGE));
        let layer = 4.0 * width * width + 2.0 * width * n_ff;
        let attention = 2.0 * rows * width;
        let embedding = 6.0 * f64::from(self.patch * self.patch) * width;
        let merger = merged * width * (merged * width + n_out) / merged;
        let layers = f64::from(self.n_layer) * (layer + attention);
        2.0 * rows * (layers + embedding + merger)
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (width, merged) = (self.width, self.width * MERGE * MERGE);
        let mut all = vec![
            matrix("v.patch_embd.weight", &[self.patch, self.patch, 3, width]),
            matrix("v.patch_embd.weight.1", &[self.patch, self.patch, 3, width]),
            bias("v.patch_embd", width),
            TensorSpec {
                ty: TensorType::F32,
                ..matrix("v.position_embd.weight", &[width, self.side * self.side])
            },
        ];
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("v.blk.{layer}.{part}");
            for norm in ["ln1", "ln2"] {
                all.extend([scale(&name(norm), width), bias(&name(norm), width)]);
            }
            for (part, from, to) in [
                ("attn_qkv", width, 3 * width),
                ("attn_out", width, width),
                ("ffn_up", width, self.n_ff),
                ("ffn_down", self.n_ff, width),
            ] {
                let name = name(part);
                all.extend([
                    matrix(&format!("{name}.weight"), &[from, to]),
                    bias(&name, to),
                ]);
            }
        }
        all.extend([scale("v.post_ln", width), bias("v.post_ln", width)]);
        for (name, to) in [("mm.0", merged), ("mm.2", self.n_out)] {
            all.extend([
                matrix(&format!("{name}.weight"), &[merged, to]),
                bias(name, to),
            ]);
        }
        all
    }

    fn metadata(&self) -> GgufWriter {
        GgufWriter::new()
            .key("general.architecture", "clip")
            .key("general.type", "mmproj")
            .key("clip.projector_type", "qwen3vl_merger")
            .key("clip.has_vision_encoder", true)
            .key("clip.use_gelu", true)
            .key("clip.vision.image_size", self.side * self.patch)
            .key("clip.vision.patch_size", self.patch)
            .key("clip.vision.embedding_length", self.width)
            .key("clip.vision.feed_forward_length", self.n_ff)
            .key("clip.vision.projection_dim", self.n_out)
            .key("clip.vision.block_count", self.n_layer)
            .key("clip.vision.attention.head_count", self.n_head)
            .key("clip.vision.spatial_merge_size", MERGE)
            .key("clip.vision.attention.layer_norm_epsilon", 1e-6f32)
            .key("clip.vision.image_mean", [0.5f32; 3].as_slice())
            .key("clip.vision.image_std", [0.5f32; 3].as_slice())
    }
}

/// Writes the projector to `path`; a seed gives always the same bytes.
///
/// # Errors
/// What creating or writing the file gives; nothing is left under `path` then.
pub(crate) fn write(path: &Path, shape: &ProjectorShape, seed: u64) -> Result<Written> {
    write_file(path, shape.metadata(), &shape.tensors(), seed)
}

fn matrix(name: &str, dims: &[u32]) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dims: dims.iter().copied().map(u64::from).collect(),
        ty: TensorType::F16,
        fill: Fill::Random(1.0),
    }
}

fn vector(name: String, n: u32, value: f32) -> TensorSpec {
    TensorSpec {
        name,
        dims: vec![n.into()],
        ty: TensorType::F32,
        fill: Fill::All(value),
    }
}

fn scale(of: &str, n: u32) -> TensorSpec {
    vector(format!("{of}.weight"), n, 1.0)
}

fn bias(of: &str, n: u32) -> TensorSpec {
    vector(format!("{of}.bias"), n, 0.01)
}
