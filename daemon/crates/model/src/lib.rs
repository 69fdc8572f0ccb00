//! What a GGUF file describes: hyperparameters, and how a pass runs.
//!
//! A [`Model`] is made from a checked header alone. Its [`Plan`] holds places in the file, indices and buffers, never
//! tensors: nothing is loaded until a step acquires its segment. Embedding rows are not a segment: a pass needs a few rows
//! of that matrix, and reads them from the file, so that an untied embedding never takes room on the device.
//!
//! An architecture is a function in one file below [`arch`], and a line in its table.

#![forbid(unsafe_code)]

mod arch;
mod build;
mod error;
mod hparams;
mod info;
mod keys;

use rocmforge_gguf::Gguf;
use rocmforge_ops::{KvType, Plan};

pub use arch::supported_architectures;
pub use error::Error;
pub use hparams::{Hparams, Pooling};
pub use info::{ModelInfo, QuantizationShare, SegmentInfo};

/// A model: all that its header tells, ready to run.
#[derive(Debug, Clone)]
pub struct Model {
    hparams: Hparams,
    plan: Plan,
    info: ModelInfo,
    left_alone: Vec<String>,
}

impl Model {
    /// Makes the model that a header describes. Reads no tensor data.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`], [`Error::Unsupported`] and [`Error::UnsupportedType`] name what is not implemented;
    /// the others say what is wrong with the file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let arch = arch::find(gguf)?;
        let keys = keys::Keys {
            gguf,
            arch: arch.name,
        };
        let hparams = Hparams::read(keys)?;
        let mut builder =
            build::PlanBuilder::new(keys, hparams.n_embd, hparams.n_vocab, hparams.norm_eps);
        (arch.build)(&mut builder, &hparams)?;
        let (plan, left_alone) = builder.finish()?;
        let info = ModelInfo::new(gguf, &hparams, &plan, &left_alone);
        Ok(Self {
            hparams,
            plan,
            info,
            left_alone,
        })
    }

    /// Has keys and values stored as `ty` by the layers whose heads fit it; the others keep f16, as all have at first.
    pub fn set_kv_type(&mut self, ty: KvType) {
        for group in &mut self.plan.kv {
            let fits = group.layout.fits(ty);
            group.layout.ty = if fits { ty } else { KvType::F16 };
        }
        self.info.set_kv(&self.plan);
    }

    /// Hyperparameters.
    pub fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    /// How a pass runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What clients are told.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Names of tensors that are known and that a pass does without.
    pub fn left_alone(&self) -> &[String] {
        &self.left_alone
    }
}
