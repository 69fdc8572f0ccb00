//! What a GGUF file describes: hyperparameters, and how a pass runs.
//!
//! A [`Model`] is made from a checked header alone. Its [`Plan`] holds places in the file, indices
//! and buffers, never tensors: nothing is loaded until a step acquires its segment. Embedding rows
//! are not a segment: a pass needs a few rows of that matrix, and reads them from the file, so that
//! an untied embedding never takes room on the device.
//!
//! An architecture is a function in one file below [`arch`], and a line in its table.

#![forbid(unsafe_code)]

mod adapter;
mod arch;
mod build;
mod error;
mod file_type;
mod hparams;
mod info;
mod keys;
mod tower;
mod weight_shares;

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use rocmforge_gguf::Gguf;
use rocmforge_ops::{Input, InputRows, KvType, Plan, TensorDesc};

use tower::TowerTable;

pub use adapter::{
    ADAPTERS_MAX, Adapter, AdapterMatrices, AdapterPair, AdapterRange, AdapterSet, RANK_SUM_MAX,
};
pub use arch::supported_architectures;
pub use error::Error;
pub use hparams::{Hparams, N_PATCH_MAX, Pooling, Purpose};
pub use info::{ModelInfo, QuantizationShare, SegmentInfo};
pub use tower::{Blend, ClassRow, Filter, ImageSizes, LearnedGrid, Parts, Tiles, Tower};
pub use weight_shares::{WeightShare, WeightShares};

/// A model: its hyperparameters and plan, made from the header alone.
#[derive(Debug, Clone)]
pub struct Model {
    hparams: Hparams,
    plan: Plan,
    /// The plan of passes with adapters, on the same segments.
    adapted: Option<Arc<Plan>>,
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
    /// [`Error::UnknownArchitecture`], [`Error::Unsupported`] and
    /// [`Error::UnsupportedType`] name what is not supported; the others say what is wrong with the
    /// file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        Self::with_deepstack(gguf, 0, None)
    }

    /// As [`Model::from_gguf`], for a model with adapters, and a vision tower if there is one.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`] and [`Model::reading_images`], and [`Error::Adapter`]
    /// if no product of the model uses a part of the adapters.
    pub fn with_adapters(
        gguf: &Gguf,
        tower: Option<&Tower>,
        adapters: &AdapterSet,
    ) -> Result<Self, Error> {
        match tower {
            Some(tower) => Self::with_tower(gguf, tower, Some(adapters)),
            None => Self::with_deepstack(gguf, 0, Some(adapters)),
        }
    }

    /// As [`Model::from_gguf`], for a text model that takes the rows of a vision tower.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`], and [`Error::Unsupported`] if it cannot take that
    /// tower's rows.
    pub fn reading_images(gguf: &Gguf, tower: &Tower) -> Result<Self, Error> {
        Self::with_tower(gguf, tower, None)
    }

    fn with_tower(
        gguf: &Gguf,
        tower: &Tower,
        adapters: Option<&AdapterSet>,
    ) -> Result<Self, Error> {
        let deepstack = tower.deepstack.len();
        let model = Self::with_deepstack(gguf, deepstack, adapters)?;
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
        let class = arch::vision::class_row(&mut builder, &tower)?;
        let (plan, left_alone) = builder.finish()?;
        let info = ModelInfo::new(gguf, &hparams, &plan, &left_alone);
        Ok(Self {
            hparams,
            plan,
            adapted: None,
            info,
            left_alone,
            predictor: None,
            unpredicted: None,
            tower: Some(TowerTable {
                tower,
                table,
                class,
            }),
            tolerated: remarks.into_inner(),
        })
    }

    /// Description of the vision tower; `None` for a text model.
    pub fn tower(&self) -> Option<&Tower> {
        self.tower.as_ref().map(|t| &t.tower)
    }

    /// Tensor of the tower's learned positions, `[width, side * side]` in ggml's order; `None` if
    /// it has none.
    pub fn tower_positions(&self) -> Option<&TensorDesc> {
        self.tower.as_ref()?.table.as_ref()
    }

    /// The class row of the vision tower, if it has one.
    pub fn tower_class(&self) -> Option<&ClassRow> {
        self.tower.as_ref()?.class.as_ref()
    }

    /// Whether the rows of an image attend to all of the image in this text model, except in layers
    /// that stay causal. Gemma 4's sizes with inputs for each layer (E2B, E4B) read images like
    /// text.
    pub fn reads_images_whole(&self, tower: &Tower) -> bool {
        let mut inputs = self.plan.inputs.iter();
        tower.both_ways && !inputs.any(|input| input.rows == InputRows::TextTokens)
    }

    fn with_deepstack(
        gguf: &Gguf,
        deepstack: usize,
        adapters: Option<&AdapterSet>,
    ) -> Result<Self, Error> {
        let arch = arch::find(gguf)?;
        let remarks = RefCell::default();
        let keys = keys::Keys {
            gguf,
            arch: arch.name,
            remarks: &remarks,
        };
        let hparams = Hparams::read(keys)?;
        let predictor = predictor(arch, keys, &hparams);
        let of = TextPlan {
            arch,
            hparams: &hparams,
            deepstack,
            keeps_stream: matches!(predictor, Some(Ok(_))),
        };
        let (plan, mut left_alone) = of.build(keys, adapters.map(|set| (set, false)))?;
        let adapted = adapters.map(|set| {
            // What is wrong with values was noted above.
            let remarks = RefCell::default();
            let keys = keys::Keys {
                remarks: &remarks,
                ..keys
            };
            of.build(keys, Some((set, true)))
        });
        let adapted = adapted.transpose()?.map(|(plan, _)| Arc::new(plan));
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
            adapted,
            info,
            left_alone,
            predictor,
            unpredicted,
            tower: None,
            tolerated: remarks.into_inner(),
        })
    }

    /// Checks that a file's architecture is supported.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`], [`Error::MissingKey`], or the key has a wrong type.
    pub fn check_architecture(gguf: &Gguf) -> Result<(), Error> {
        arch::find(gguf).map(drop)
    }

    /// Sets the KV element type to `ty` for layers whose head sizes allow it; others keep f16.
    /// `None` chooses the plan's default, [`Plan::kv_type_default`].
    pub fn set_kv_type(&mut self, ty: Option<KvType>) {
        let ty = ty.unwrap_or_else(|| self.plan.kv_type_default());
        let others = [&mut self.predictor, &mut self.adapted];
        let others = others.into_iter().flatten().map(Arc::make_mut);
        for plan in std::iter::once(&mut self.plan).chain(others) {
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

    /// The model's hyperparameters.
    pub fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    /// The plan of the model's forward pass.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan of passes in which a row uses an adapter, if the model has adapters: as
    /// [`Model::plan`], with additional operations and an input, on the same segments, KV groups
    /// and states.
    pub fn adapted_plan(&self) -> Option<&Plan> {
        self.adapted.as_deref()
    }

    /// The plan of the MTP head, which predicts one token more than the model, if the file has a
    /// usable one.
    ///
    /// Its inputs are rows of the embedding and of the model's [`Plan::stream`]: its row for a
    /// position takes the token after that position and the stream at it, and its logits are those
    /// of the next token but one. It has a separate KV cache.
    pub fn predictor(&self) -> Option<&Arc<Plan>> {
        self.predictor.as_ref()
    }

    /// Why the file's MTP head is not used; `None` if it is, or there is none.
    pub fn unpredicted(&self) -> Option<&str> {
        self.unpredicted.as_deref()
    }

    /// Purpose of the model: text, embedding or ranking.
    pub fn purpose(&self) -> Purpose {
        match (self.plan.both_ways, self.plan.logits == self.plan.hidden) {
            (false, _) => Purpose::Text,
            (true, true) => Purpose::Embedding,
            (true, false) => Purpose::Ranking,
        }
    }

    /// The description of the model for clients.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Defects of the file that were tolerated, as text.
    pub fn tolerated(&self) -> &[String] {
        &self.tolerated
    }

    /// Approximate bytes of host memory of the model's plans and description.
    pub fn memory_bytes(&self) -> usize {
        let named = |s: &SegmentInfo| size_of::<SegmentInfo>() + s.name.capacity();
        let info: usize = self.info.segments.iter().map(named).sum();
        let left: usize = self.left_alone.iter().map(String::capacity).sum();
        let others = [&self.predictor, &self.adapted];
        let others = others.into_iter().flatten();
        let others: usize = others.map(|plan| plan.memory_bytes()).sum();
        self.plan.memory_bytes() + others + info + left
    }

    /// Names of known tensors that passes do not use.
    pub fn left_alone(&self) -> &[String] {
        &self.left_alone
    }
}

/// Inputs for building the plan of a text model.
struct TextPlan<'a> {
    arch: &'static arch::Arch,
    hparams: &'a Hparams,
    /// Number of first layers after which image rows are added (deepstack).
    deepstack: usize,
    /// Whether the plan's residual stream is another plan's input.
    keeps_stream: bool,
}

impl TextPlan<'_> {
    /// Builds the plan, with the adapters' tensors in its segments and, with adapters applied,
    /// their operations. Also returns the names of unused known tensors.
    fn build(
        &self,
        keys: keys::Keys<'_>,
        adapters: Option<(&AdapterSet, bool)>,
    ) -> Result<(Plan, Vec<String>), Error> {
        let hparams = self.hparams;
        let mut builder =
            build::PlanBuilder::new(keys, hparams.n_embd, hparams.n_vocab, hparams.norm_eps);
        builder.both_ways = hparams.both_ways;
        builder.adapting = adapters.map(|(set, applies)| build::Adapting::new(set, applies));
        builder.takes_deepstack(self.deepstack);
        if self.keeps_stream {
            builder.keep_stream();
        }
        let built = (self.arch.build)(&mut builder, hparams);
        // What came behind it may be no more than its consequence.
        builder.refuse_too_many()?;
        built?;
        if let Some((adapting, (set, _))) = builder.adapting.as_ref().zip(adapters) {
            set.refuse_unused(|name| adapting.is_used(name))?;
        }
        builder.finish()
    }
}

/// A plan and the names of the tensors that it uses.
type Part = (Plan, HashSet<String>);

/// The plan of the first MTP block, or why it cannot be used; `None` if the file has none.
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
