//! What a GGUF file describes: hyperparameters, and how a pass runs.
//!
//! A [`Model`] is made from a checked header alone. Its [`Plan`] holds places in the file, indices
//! and buffers, never tensors: nothing is loaded until a step acquires its segment. Embedding rows
//! are not a segment: a pass needs a few rows of that matrix, and reads them from the file, so that
//! an untied embedding never takes room on the device.
//!
//! An architecture is a function in one file below [`arch`], and a line in its table.

#![forbid(unsafe_code)]

mod arch;
mod build;
mod error;
mod file_type;
mod hparams;
mod info;
mod keys;
mod tower;

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use rocmforge_gguf::Gguf;
use rocmforge_ops::{Input, InputRows, KvType, Plan, TensorDesc};

use tower::TowerTable;

pub use arch::supported_architectures;
pub use error::Error;
pub use hparams::{Hparams, N_PATCH_MAX, Pooling, Purpose};
pub use info::{ModelInfo, QuantizationShare, SegmentInfo};
pub use tower::{Filter, ImageSizes, LearnedGrid, Tiles, Tower};

/// A model: all that its header tells, ready to run.
#[derive(Debug, Clone)]
pub struct Model {
    hparams: Hparams,
    plan: Plan,
    info: ModelInfo,
    left_alone: Vec<String>,
    predictor: Option<Arc<Plan>>,
    unpredicted: Option<String>,
    tower: Option<TowerTable>,
    tolerated: Vec<String>,
}

/// Whether text models of this architecture can read images, with a projector.
pub fn reads_images(architecture: &str) -> bool {
    arch::vision::readers().any(|reader| reader == architecture)
}

impl Model {
    /// Makes the model that a header describes. Reads no tensor data.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`], [`Error::Unsupported`] and [`Error::UnsupportedType`] name
    /// what is not implemented; the others say what is wrong with the file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        Self::with_deepstack(gguf, 0)
    }

    /// As [`Model::from_gguf`], a text model that takes the rows of a vision tower.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`], and [`Error::Unsupported`] where it cannot take that tower's
    /// rows.
    pub fn reading_images(gguf: &Gguf, tower: &Tower) -> Result<Self, Error> {
        let deepstack = tower.deepstack.len();
        let model = Self::with_deepstack(gguf, deepstack)?;
        let h = &model.hparams;
        let takes = |input: &Input| matches!(input.rows, InputRows::Deepstack(_));
        let taken = model
            .plan
            .inputs
            .iter()
            .filter(|input| takes(input))
            .count();
        let key = format!("{}.n_deepstack_layers", h.arch);
        let said = gguf.u32(&key).ok().flatten().map(|n| n as usize);
        let readers = arch::vision::named(tower.projector).map_or(&[][..], |kind| kind.readers);
        let fits = readers.contains(&h.arch)
            && h.n_embd == tower.n_out
            && taken == deepstack
            && said.is_none_or(|n| n == deepstack);
        if fits {
            return Ok(model);
        }
        Err(Error::Unsupported(format!(
            "the projector ({}) gives rows of {} elements and rows for {deepstack} layers, for a model of {}; this \
             one is {} with rows of {}{}; give the projector that was made for it",
            tower.projector,
            tower.n_out,
            readers.join(", "),
            h.arch,
            h.n_embd,
            said.map_or_else(String::new, |n| format!(" and takes rows for {n} layers")),
        )))
    }

    /// Makes the vision tower that the header of a projector file describes.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`].
    pub fn tower_from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let remarks = RefCell::default();
        let keys = keys::Keys {
            gguf,
            arch: "clip.vision",
            remarks: &remarks,
        };
        let kind = arch::vision::kind(gguf)?;
        let (tower, hparams) = (kind.read)(keys)?;
        let mut builder = build::PlanBuilder::new(keys, hparams.n_embd, 0, hparams.norm_eps);
        builder.both_ways = true;
        let table = (kind.build)(&mut builder, &tower, &hparams)?;
        let (plan, left_alone) = builder.finish()?;
        let info = ModelInfo::new(gguf, &hparams, &plan, &left_alone);
        Ok(Self {
            hparams,
            plan,
            info,
            left_alone,
            predictor: None,
            unpredicted: None,
            tower: Some(TowerTable { tower, table }),
            tolerated: remarks.into_inner(),
        })
    }

    /// The vision tower, where it is one.
    pub fn tower(&self) -> Option<&Tower> {
        self.tower.as_ref().map(|t| &t.tower)
    }

    /// The table of a vision tower's learned positions, `[width, side * side]` in ggml's order,
    /// where it has one.
    pub fn tower_positions(&self) -> Option<&TensorDesc> {
        self.tower.as_ref()?.table.as_ref()
    }

    /// Whether this text model's rows of an image of a tower attend to all of the image, in the
    /// layers that do not say otherwise. Gemma 4's sizes with inputs for each layer (E2B, E4B) read
    /// images as they read text.
    pub fn reads_images_whole(&self, tower: &Tower) -> bool {
        let mut inputs = self.plan.inputs.iter();
        tower.both_ways && !inputs.any(|input| input.rows == InputRows::TextTokens)
    }

    fn with_deepstack(gguf: &Gguf, deepstack: usize) -> Result<Self, Error> {
        let arch = arch::find(gguf)?;
        let remarks = RefCell::default();
        let keys = keys::Keys {
            gguf,
            arch: arch.name,
            remarks: &remarks,
        };
        let hparams = Hparams::read(keys)?;
        let mut builder =
            build::PlanBuilder::new(keys, hparams.n_embd, hparams.n_vocab, hparams.norm_eps);
        builder.both_ways = hparams.both_ways;
        builder.takes_deepstack(deepstack);
        let predictor = predictor(arch, keys, &hparams);
        if let Some(Ok(_)) = &predictor {
            builder.keep_stream();
        }
        let built = (arch.build)(&mut builder, &hparams);
        // What came behind it may be no more than its consequence.
        builder.refuse_too_many()?;
        built?;
        let (plan, mut left_alone) = builder.finish()?;
        let (predictor, unpredicted) = match predictor {
            None => (None, None),
            Some(Ok((plan, used))) => {
                left_alone.retain(|name| !used.contains(name));
                (Some(Arc::new(plan)), None)
            }
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        let info = ModelInfo::new(gguf, &hparams, &plan, &left_alone);
        Ok(Self {
            hparams,
            plan,
            info,
            left_alone,
            predictor,
            unpredicted,
            tower: None,
            tolerated: remarks.into_inner(),
        })
    }

    /// Whether a file's architecture is one that works.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`], [`Error::MissingKey`], and that of its value.
    pub fn check_architecture(gguf: &Gguf) -> Result<(), Error> {
        arch::find(gguf).map(drop)
    }

    /// Has keys and values stored as `ty` by the layers whose heads fit it; the others keep f16, as
    /// all have at first. `None` is the plan's own, [`Plan::kv_type_default`].
    pub fn set_kv_type(&mut self, ty: Option<KvType>) {
        let ty = ty.unwrap_or_else(|| self.plan.kv_type_default());
        let predictor = self.predictor.as_mut().map(Arc::make_mut);
        for plan in std::iter::once(&mut self.plan).chain(predictor) {
            // What a pass does not keep takes little room: nothing is gained by fewer bits.
            let ty = match ty {
                KvType::Q8_0 if plan.both_ways => KvType::F16,
                ty => ty,
            };
            for group in &mut plan.kv {
                let fits = group.layout.fits(ty);
                group.layout.ty = if fits { ty } else { KvType::F16 };
            }
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

    /// How the block runs that predicts one token more than the model does (MTP), where the file
    /// has one that can be used.
    ///
    /// Its inputs are rows of the embedding and of the model's [`Plan::stream`]: its row for a
    /// position takes the token behind that position and the stream at it, and its logits are those
    /// of the token after. It has keys and values of its own.
    pub fn predictor(&self) -> Option<&Arc<Plan>> {
        self.predictor.as_ref()
    }

    /// Why a block that the file announces is not used; `None` where it is, or where there is none.
    pub fn unpredicted(&self) -> Option<&str> {
        self.unpredicted.as_deref()
    }

    /// What it is for.
    pub fn purpose(&self) -> Purpose {
        match (self.plan.both_ways, self.plan.logits == self.plan.hidden) {
            (false, _) => Purpose::Text,
            (true, true) => Purpose::Embedding,
            (true, false) => Purpose::Ranking,
        }
    }

    /// What clients are told.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// What is wrong with the file's numbers and does not keep the model from being used.
    pub fn tolerated(&self) -> &[String] {
        &self.tolerated
    }

    /// About how many bytes of memory its plans and its description take.
    pub fn memory_bytes(&self) -> usize {
        let named = |s: &SegmentInfo| size_of::<SegmentInfo>() + s.name.capacity();
        let info: usize = self.info.segments.iter().map(named).sum();
        let left: usize = self.left_alone.iter().map(String::capacity).sum();
        let predictor = self
            .predictor
            .as_ref()
            .map_or(0, |plan| plan.memory_bytes());
        self.plan.memory_bytes() + predictor + info + left
    }

    /// Names of tensors that are known and that a pass does without.
    pub fn left_alone(&self) -> &[String] {
        &self.left_alone
    }
}

/// A plan and the names of the tensors that it uses.
type Part = (Plan, HashSet<String>);

/// The plan of the first block that predicts a further token, or why it cannot be used; `None`
/// where the file announces none.
fn predictor(
    arch: &arch::Arch,
    keys: keys::Keys<'_>,
    hparams: &Hparams,
) -> Option<Result<Part, Error>> {
    if hparams.n_layer_nextn == 0 {
        return None;
    }
    let Some(predict) = arch.predict else {
        let name = arch.name;
        return Some(Err(Error::Unsupported(format!(
            "blocks that predict tokens ahead (MTP) are not implemented for '{name}'"
        ))));
    };
    let mut builder =
        build::PlanBuilder::new(keys, hparams.n_embd, hparams.n_vocab, hparams.norm_eps);
    let built = predict(&mut builder, hparams);
    Some(built.and_then(|()| builder.finish_part()))
}
