//! The registry of loaded models, with the measured times of their passes.

use std::sync::Arc;

use rocmforge_ops::Step;
use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::model::loaded::LoadedModel;
use crate::model::rotations::Rotations;
use crate::pass::pieces::Pieces;
use crate::pass::price::RowPrice;
use crate::pass::share::PromptShare;
use crate::pass::times::PassTimes;
use crate::pass::work::AttentionCosts;

/// A registered model.
pub(crate) struct Entry {
    pub(crate) id: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// RoPE tables of the model's plan; made at the first request, since they may need a tensor of
    /// the file.
    pub(crate) rope: Vec<Rotations>,
    /// Measured times of the model's passes that only decode.
    pub(crate) times: PassTimes,
    /// Measured times of passes with all weights resident. Promised gaps of models that fit are
    /// planned with these: the first pass, which uploads the weights, is not representative.
    pub(crate) resident_times: PassTimes,
    /// Number of prompt rows that the model's passes take beside other requests' tokens.
    pub(crate) share: PromptShare,
    /// Measured cost of prompt rows beside tokens.
    pub(crate) price: RowPrice,
    /// Measured times of the steps of the model's passes.
    pub(crate) pieces: Pieces,
    /// Measured costs of attention in the model's passes.
    pub(crate) attention: AttentionCosts,
    /// Whether the model is left out of snapshots, to be closed once its last reference is dropped.
    pub(crate) is_withdrawn: bool,
    /// The text model that this vision tower reads images for; `None` for a text model. A tower has
    /// no public name.
    pub(crate) reads_for: Option<ModelId>,
}

impl Entry {
    /// Whether the model is an MoE model, whose rows are routed to experts.
    pub(crate) fn routes(&self) -> bool {
        let mut steps = self.loaded.model().plan().steps.iter();
        steps.any(|step| matches!(step, Step::Experts { .. }))
    }
}

/// The registered models, in the order of their loading.
#[derive(Default)]
pub(crate) struct Models {
    entries: Vec<Entry>,
    next: u32,
}

impl Models {
    /// A model id that was never used before.
    pub(crate) fn next_id(&mut self) -> ModelId {
        let id = ModelId(self.next);
        self.next = self.next.wrapping_add(1);
        id
    }

    /// Registers a model under this id.
    pub(crate) fn add(&mut self, id: ModelId, loaded: Arc<LoadedModel>) {
        self.entries.push(Entry {
            id,
            loaded,
            rope: Vec::new(),
            times: PassTimes::default(),
            resident_times: PassTimes::default(),
            share: PromptShare::default(),
            price: RowPrice::default(),
            pieces: Pieces::default(),
            attention: AttentionCosts::default(),
            is_withdrawn: false,
            reads_for: None,
        });
    }

    /// Registers the vision tower of the model `of` under the id `id`.
    pub(crate) fn add_tower(&mut self, id: ModelId, tower: Arc<LoadedModel>, of: ModelId) {
        self.add(id, tower);
        if let Some(entry) = self.get_mut(id) {
            entry.reads_for = Some(of);
        }
    }

    /// The vision tower of a model, if it has one.
    pub(crate) fn tower_of(&self, id: ModelId) -> Option<&Entry> {
        self.entries
            .iter()
            .find(|entry| entry.reads_for == Some(id))
    }

    /// The models that clients can name, which excludes vision towers.
    pub(crate) fn named_ones(&self) -> impl Iterator<Item = &Entry> {
        self.entries
            .iter()
            .filter(|entry| entry.reads_for.is_none())
    }

    /// Removes a model from the registry.
    pub(crate) fn remove(&mut self, id: ModelId) {
        self.entries.retain(|entry| entry.id != id);
    }

    /// Number of registered models.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All registered models.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Entry> {
        self.entries.iter()
    }

    /// The model with this id, if it is registered.
    pub(crate) fn get(&self, id: ModelId) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    /// The model with this id, mutable, if it is registered.
    pub(crate) fn get_mut(&mut self, id: ModelId) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// The model of this name, if there is one.
    pub(crate) fn named(&mut self, name: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|e| e.loaded.name() == name)
    }

    /// The model with this name.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the names that exist.
    pub(crate) fn find(&self, name: &str) -> Result<&Entry, Error> {
        let found = self.entries.iter().find(|e| e.loaded.name() == name);
        found.ok_or_else(|| Error::UnknownModel {
            name: name.to_owned(),
            known: self
                .named_ones()
                .map(|e| e.loaded.name().to_owned())
                .collect(),
        })
    }
}
