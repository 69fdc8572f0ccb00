//! State of speculative decoding by model: MTP head, draft model, spare recurrent states.

use std::collections::HashMap;
use std::sync::Arc;

use rocmforge_ops::Segment;
use rocmforge_tensor_cache::ModelId;

use crate::api::error::{Error, from_device};
use crate::features::context::Context;
use crate::features::speculation::draft_model::DraftModel;
use crate::features::speculation::mtp::MtpHead;
use crate::features::speculation::spare_states::SpareStates;
use crate::memory::Memory;
use crate::model::loaded::LoadedModel;
use crate::model::registry::Models;
use crate::pass::member::Member;
use crate::request::task::Task;
use crate::store::Source;

/// State of speculative decoding of one model.
#[derive(Default)]
struct Drafting {
    /// The model's MTP head, if the file has one and speculation is on.
    mtp: Option<MtpHead>,
    /// The model's draft model, if one was named and is loaded.
    draft: Option<DraftModel>,
    /// Name of the model's draft model; kept while no model of that name is loaded.
    draft_name: Option<String>,
    /// The model's spare states, if its sequences have recurrent states and speculation is on.
    states: Option<SpareStates>,
}

/// State of speculative decoding for all models.
pub(crate) struct Speculation {
    /// Whether n-grams and MTP heads draft tokens.
    pub(crate) is_on: bool,
    /// Whether draft models may draft tokens.
    pub(crate) takes_draft_models: bool,
    /// Number of draft tokens in the planned pass.
    pub(crate) planned: u32,
    models: HashMap<ModelId, Drafting>,
}

impl Speculation {
    /// `wanted` is the configured setting; by default n-grams and MTP heads draft on the CPU device
    /// only.
    pub(crate) fn new(wanted: Option<bool>, is_cpu: bool) -> Self {
        Self {
            is_on: wanted.unwrap_or(is_cpu),
            takes_draft_models: wanted != Some(false),
            planned: 0,
            models: HashMap::new(),
        }
    }

    /// Adds a registered model with its MTP head and its draft model.
    pub(crate) fn add(
        &mut self,
        model: ModelId,
        loaded: &LoadedModel,
        mtp: Option<MtpHead>,
        draft: Option<DraftModel>,
    ) {
        let drafts = self.is_on || draft.is_some();
        let drafting = Drafting {
            mtp,
            draft_name: draft.as_ref().map(|draft| draft.name.clone()),
            draft,
            states: SpareStates::of(loaded.model().plan()).filter(|_| drafts),
        };
        self.models.insert(model, drafting);
    }

    /// Removes a model. Models that it drafted for have no draft model until one of its name is
    /// loaded again. Returns the id of its MTP head, which the caller has to unregister.
    pub(crate) fn remove(&mut self, model: ModelId, models: &Models) -> Option<ModelId> {
        for (of, drafting) in &mut self.models {
            if let Some(draft) = drafting.draft.take_if(|d| d.id == model) {
                tracing::info!(
                    model = models.get(*of).map(|e| e.loaded.name()),
                    draft = draft.name,
                    "the draft model is unloaded: nothing is drafted with it"
                );
            }
        }
        self.models.remove(&model)?.mtp.map(|mtp| mtp.id)
    }

    /// The MTP head of a model, if sequences use it.
    pub(crate) fn mtp(&self, model: ModelId) -> Option<&MtpHead> {
        self.mtp_of(model).filter(|mtp| mtp.on)
    }

    /// The MTP head of a model, whether used or not.
    pub(crate) fn mtp_of(&self, model: ModelId) -> Option<&MtpHead> {
        self.models.get(&model)?.mtp.as_ref()
    }

    /// The MTP head of a model, mutable.
    pub(super) fn mtp_mut(&mut self, model: ModelId) -> Option<&mut MtpHead> {
        self.models.get_mut(&model)?.mtp.as_mut()
    }

    /// The draft model of a model, whether used or not.
    pub(crate) fn draft_model(&self, model: ModelId) -> Option<&DraftModel> {
        self.models.get(&model)?.draft.as_ref()
    }

    /// The draft model of a model, mutable.
    pub(crate) fn draft_model_mut(&mut self, model: ModelId) -> Option<&mut DraftModel> {
        self.models.get_mut(&model)?.draft.as_mut()
    }

    /// The draft model of a model, if it may draft now.
    pub(crate) fn used_draft_model(&self, model: ModelId) -> Option<&DraftModel> {
        self.draft_model(model).filter(|draft| draft.is_used())
    }

    /// Whether any model has a draft model.
    pub(crate) fn has_draft_models(&self) -> bool {
        self.models
            .values()
            .any(|drafting| drafting.draft.is_some())
    }

    /// Whether a model is the draft model of another one.
    pub(crate) fn is_draft_model(&self, model: ModelId) -> bool {
        let mut drafts = self.models.values().filter_map(|d| d.draft.as_ref());
        drafts.any(|draft| draft.id == model)
    }

    /// The spare states of a model, if it has any.
    pub(crate) fn states(&self, model: ModelId) -> Option<&SpareStates> {
        self.models.get(&model)?.states.as_ref()
    }

    /// Bytes of a model's spare states in a budget of `budget` bytes.
    pub(crate) fn state_bytes(&self, model: ModelId, budget: u64) -> u64 {
        self.states(model).map_or(0, |states| states.bytes(budget))
    }

    /// Maximum number of draft tokens in a pass of a model, in a budget of `budget` bytes.
    pub(crate) fn drafts_max(&self, model: ModelId, budget: u64) -> usize {
        self.states(model)
            .map_or(usize::MAX, |states| states.most(budget))
    }

    /// The models that draft for a model now (its MTP head and its draft model), whose weights its
    /// passes need, too.
    pub(crate) fn beside(&self, model: ModelId) -> impl Iterator<Item = ModelId> + use<> {
        let mtp = self.mtp(model).map(|mtp| mtp.id);
        let draft = self.used_draft_model(model).map(|draft| draft.id);
        [mtp, draft].into_iter().flatten()
    }

    /// Whether a model's speculation uses memory of its own now: for its MTP head or spare states.
    pub(crate) fn takes_memory(&self, model: ModelId) -> bool {
        self.mtp(model).is_some() || self.states(model).is_some_and(|states| states.on)
    }

    /// Sets the draft model of a model that is already loaded.
    pub(crate) fn attach(&mut self, of: &LoadedModel, model: ModelId, draft: DraftModel) {
        let drafting = self.models.entry(model).or_default();
        let has_it = drafting.draft.as_ref();
        if has_it.is_some_and(|there| there.id == draft.id && there.is_on()) {
            return;
        }
        drafting.draft_name = Some(draft.name.clone());
        drafting.draft = Some(draft);
        if drafting.states.is_none() {
            drafting.states = SpareStates::of(of.model().plan());
        }
    }

    /// The models for which a draft model of this name was named and is not loaded, in the order of
    /// their loading.
    pub(crate) fn lack(&self, name: &str) -> Vec<ModelId> {
        let lacks = |(_, drafting): &(&ModelId, &Drafting)| {
            drafting.draft.is_none() && drafting.draft_name.as_deref() == Some(name)
        };
        let mut models: Vec<ModelId> = self.models.iter().filter(lacks).map(|m| *m.0).collect();
        models.sort_unstable_by_key(|model| model.0);
        models
    }

    /// Registers the MTP head of a model that has one, if speculation is on.
    pub(crate) fn register_mtp(
        &self,
        memory: &mut Memory,
        models: &mut Models,
        loaded: &LoadedModel,
    ) -> Option<MtpHead> {
        if !self.is_on {
            return None;
        }
        if let Some(why) = loaded.model().unpredicted() {
            tracing::info!(
                model = loaded.name(),
                why,
                "the file's MTP head is not used"
            );
        }
        let plan = loaded.model().predictor()?;
        let id = models.next_id();
        let layout = |s: &Segment| memory.store.device.layout(&s.tensors).map(Arc::new);
        let layouts: Result<Vec<_>, _> = plan.segments.iter().map(layout).collect();
        let layouts = layouts.map_err(|e| from_device(Some((loaded.name(), loaded.path())), e));
        let registered = layouts.and_then(|layouts| {
            let kinds = plan.segments.iter().map(|s| s.kind).collect();
            memory
                .store
                .register(id, Source::new(loaded, layouts, kinds))?;
            memory.store.prepare(id, plan).map_err(|e| {
                let error = memory.store.device_error(Some(id), e);
                // Nothing of it was uploaded.
                let _ = memory.unregister(id);
                error
            })
        });
        if let Err(error) = registered {
            tracing::warn!(model = loaded.name(), %error, "the MTP head is not used");
            return None;
        }
        Some(MtpHead::new(id, plan))
    }

    /// Disables MTP heads and spare states for the models that `of` selects, and frees their
    /// memory. Returns the models that had used either.
    pub(crate) fn stop(
        &mut self,
        memory: &mut Memory,
        models: &Models,
        of: impl Fn(ModelId) -> bool,
    ) -> Vec<ModelId> {
        let mut stopped = Vec::new();
        for (&model, drafting) in self.models.iter_mut().filter(|(model, _)| of(**model)) {
            let name = models.get(model).map(|entry| entry.loaded.name());
            if let Some(mtp) = drafting.mtp.as_mut().filter(|mtp| mtp.on) {
                mtp.on = false;
                stopped.push(model);
                tracing::info!(
                    model = name,
                    "no room for the MTP head: it drafts no tokens"
                );
            }
            if let Some(states) = drafting.states.as_mut().filter(|s| s.on) {
                states.on = false;
                states.free(memory);
                stopped.push(model);
                tracing::info!(
                    model = name,
                    "no room for states behind drafts: none are made"
                );
            }
        }
        stopped
    }

    /// Enables MTP heads and spare states again for new requests, after the budget grew.
    pub(crate) fn resume(&mut self) {
        for drafting in self.models.values_mut() {
            if let Some(mtp) = &mut drafting.mtp {
                mtp.on = true;
            }
            if let Some(states) = &mut drafting.states {
                states.on = true;
            }
        }
    }

    /// Frees all spare states.
    pub(crate) fn free_states(&mut self, memory: &mut Memory) {
        for states in self.models.values_mut().filter_map(|d| d.states.as_mut()) {
            states.free(memory);
        }
    }

    /// Frees what was held for a model's drafts when its last request has ended. Returns its draft
    /// model, which may become idle.
    pub(crate) fn rest(&mut self, memory: &mut Memory, model: ModelId) -> Option<ModelId> {
        let drafting = self.models.get_mut(&model)?;
        if let Some(mtp) = &drafting.mtp {
            memory.store.cache.request_end(mtp.id);
        }
        if let Some(states) = &mut drafting.states {
            states.free(memory);
        }
        drafting.draft.as_ref().map(|draft| draft.id)
    }

    /// Lends the sequences of a pass spare states for their draft tokens.
    pub(crate) fn lend_states(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        members: &mut [Member],
    ) -> Result<(), Error> {
        let drafting = self.models.get_mut(&model);
        let Some(states) = drafting.and_then(|d| d.states.as_mut()) else {
            return Ok(());
        };
        let drafts: u32 = members.iter().map(Member::drafts).sum();
        states.ensure(memory, model, drafts as usize)?;
        for member in members {
            let lent = states.lend(member.drafts() as usize);
            member.task.memory.borrow_states(lent);
        }
        Ok(())
    }

    /// Takes back the states after a sequence's draft tokens, of which the first `right` were
    /// accepted in the pass.
    pub(crate) fn take_states_back(&mut self, memory: &mut Memory, task: &mut Task, right: u32) {
        let rest = task.memory.settle_states(right as usize);
        let drafting = self.models.get_mut(&task.model);
        if let Some(states) = drafting.and_then(|d| d.states.as_mut()) {
            states.take_back(memory, rest);
        }
    }

    /// Lets sequences draft their next tokens where that is worthwhile.
    pub(crate) fn before_pass(&mut self, cx: &mut Context<'_>) {
        // Others must have room, too.
        let most = cx.spans_max() as usize / 2;
        let mut spans_left = most;
        let budget = cx.memory.budget();
        let requests = &mut *cx.requests;
        for entry in cx.models.iter() {
            let mtp_seconds = self.mtp_of(entry.id).map_or(0.0, |mtp| mtp.seconds);
            let of_model = requests.tasks.values().filter(|t| t.model == entry.id);
            let decodes = |t: &&Task| t.begun && t.n_past + 1 == t.tokens.len();
            let mut rows = of_model.filter(decodes).count();
            let mut states_left = self.drafts_max(entry.id, budget);
            for task in requests.tasks.values_mut().filter(|t| t.model == entry.id) {
                let room = spans_left.min(states_left);
                let drafts = task.draft(rows, room, &entry.times, mtp_seconds, self.is_on);
                states_left -= drafts;
                rows += drafts;
                spans_left -= drafts;
                requests.scheduler.propose(task.seq, drafts as u32);
            }
        }
        self.planned = (most - spans_left) as u32;
    }
}
