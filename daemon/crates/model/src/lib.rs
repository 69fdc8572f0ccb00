//! What a GGUF file describes: hyperparameters, where each weight is, and how a pass runs.
//!
//! A [`Model`] is made from a checked header alone. Its plan holds handles (segment and tensor indices, buffers), never
//! tensors: nothing is loaded until a step acquires its segment. A pass runs the segments in order: three for each layer,
//! then the output head. Embedding rows are not a segment: a pass needs a few rows of that matrix, and reads them from
//! the file, so that an untied embedding never takes room on the device.
//!
//! *Invariant:* an architecture is one file below [`arch`], a row in its table, and nothing else.

#![forbid(unsafe_code)]

mod arch;
mod error;
mod hparams;
mod info;
mod plan;
mod weights;

use rocmforge_device::{BufSpec, Op, TensorDesc};
use rocmforge_gguf::Gguf;

pub use arch::supported_architectures;
pub use error::Error;
pub use hparams::{Hparams, RopeOrder, RopeScaling, RopeShape};
pub use info::{ModelInfo, QuantizationShare, SegmentInfo};
pub use plan::bufs;

/// The unit of residency: the weights of a layer's attention or of its gate and up, with the norm before them, or of its
/// down; or the output head with its norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// `blk.{i}.attn`, `blk.{i}.ffn_up`, `blk.{i}.ffn_down` or `output`.
    pub name: String,
    /// Its tensors, in the order that [`Segment::ops`] names them by index.
    pub tensors: Vec<TensorDesc>,
    /// What a pass runs while the segment is acquired.
    pub ops: Vec<Op>,
}

impl Segment {
    /// Bytes in the file.
    pub fn file_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// A model: all that its header tells, ready to run.
#[derive(Debug, Clone)]
pub struct Model {
    hparams: Hparams,
    embedding: TensorDesc,
    rope_factors: Option<TensorDesc>,
    segments: Vec<Segment>,
    bufs: Vec<BufSpec>,
    info: ModelInfo,
}

impl Model {
    /// Makes the model that a header describes. Reads no tensor data.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`] and [`Error::Unsupported`] name what is not implemented; the others say what is
    /// wrong with the file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let arch = arch::find(gguf)?;
        let hparams = Hparams::read(gguf, arch)?;
        let weights = weights::map(gguf, arch, &hparams)?;
        let (segments, bufs) = plan::make(&hparams, &weights);
        let info = ModelInfo::new(gguf, &hparams, weights.rope_factors.is_some(), &segments);
        Ok(Self {
            hparams,
            embedding: weights.embedding,
            rope_factors: weights.rope_factors,
            segments,
            bufs,
            info,
        })
    }

    /// Hyperparameters.
    pub fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    /// The embedding matrix, `[n_embd, n_vocab]` in ggml's order, of which a pass reads rows from the file.
    pub fn embedding(&self) -> &TensorDesc {
        &self.embedding
    }

    /// Divisors of the rotation frequencies, `n_rot / 2` of f32, where the file has them (Llama 3).
    pub fn rope_factors(&self) -> Option<&TensorDesc> {
        self.rope_factors.as_ref()
    }

    /// The segments in the order of a pass.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The activation buffers of the plan; [`bufs`] names them.
    pub fn bufs(&self) -> &[BufSpec] {
        &self.bufs
    }

    /// What clients are told.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }
}
