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

/// A model: hyperparameters and plan, made from the header alone.
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
    /// [`Error::UnknownArchitecture`], [`Error::Unsupported`] and [`Error::UnsupportedType`] name
    /// what is not implemented; the others say what is wrong with the file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        Self::with_deepstack(gguf, 0, None)
    }

    /// As [`Model::from_gguf`], a model with adapters, and with a vision tower if there is one.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`] and [`Model::reading_images`], and [`Error::Adapter`] where no
    /// product of the model takes a part of the adapters.
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

    /// As [`Model::from_gguf`], a text model that takes the rows of a vision tower.
    ///
    /// # Errors
    /// Those of [`Model::from_gguf`], and [`Error::Unsupported`] where it cannot take that tower's
    /// rows.
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

    /// The vision tower, where it is one.
    pub fn tower(&self) -> Option<&Tower> {
        self.tower.as_ref().map(|t| &t.tower)
    }

    /// The table of a vision tower's learned positions, `[width, side * side]` in ggml's order,
    /// where it has one.
    pub fn tower_positions(&self) -> Option<&TensorDesc> {
        self.tower.as_ref()?.table.as_ref()
    }

    /// The row of the class of a vision tower, where it has one.
    pub fn tower_class(&self) -> Option<&ClassRow> {
        self.tower.as_ref()?.class.as_ref()
    }

    /// Whether this text model's rows of an image of a tower attend to all of the image, in the
    /// layers that do not say otherwise. Gemma 4's sizes with inputs for each layer (E2B, E4B) read
    /// images as they read text.
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

    /// Hyperparameters.
    pub fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    /// The plan of the model's forward pass.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How a pass runs in which a row has an adapter, where the model has any: as [`Model::plan`]
    /// and on the same segments, KV groups and states, with operations and an input more.
    pub fn adapted_plan(&self) -> Option<&Plan> {
        self.adapted.as_deref()
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

    /// About how many bytes of memory its plans and its description take.
    pub fn memory_bytes(&self) -> usize {
        let named = |s: &SegmentInfo| size_of::<SegmentInfo>() + s.name.capacity();
        let info: usize = self.info.segments.iter().map(named).sum();
        let left: usize = self.left_alone.iter().map(String::capacity).sum();
        let others = [&self.predictor, &self.adapted];
        let others = others.into_iter().flatten();
        let others: usize = others.map(|plan| plan.memory_bytes()).sum();
        self.plan.memory_bytes() + others + info + left
    }

    /// Names of tensors that are known and that a pass does without.
    pub fn left_alone(&self) -> &[String] {
        &self.left_alone
    }
}

/// What the plan of a text model is built of.
struct TextPlan<'a> {
    arch: &'static arch::Arch,
    hparams: &'a Hparams,
    /// Layers that rows of an image's tower are added behind.
    deepstack: usize,
    /// Whether the plan's residual stream is another plan's input.
    keeps_stream: bool,
}

impl TextPlan<'_> {
    /// The plan, with the adapters' tensors in its segments and, where it applies them, their
    /// operations; and the names of tensors that were left alone.
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
