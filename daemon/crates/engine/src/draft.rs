//! Draft models: a small model with the same vocabulary drafts what comes next, and the large one
//! checks several tokens at once.
//!
//! A draft model is a model like any other, named when the one it drafts for is loaded. It runs
//! behind a pass, for the sequences that have another token by it, with keys and values of its own
//! ([`crate::weight_store::DraftMemories`]):
//!
//! ```text
//! pass:     the last token, drafts -> the right ones, and a token behind them
//! catch up: a chunk of what the draft model does not know yet, where that is much;
//!           without drafts until it is done
//! draft:    the few tokens it does not know -> a draft; that draft -> the next one; ...
//!           of all sequences at once
//! ```
//!
//! Rows of wrong drafts are written over by the next run. How many are drafted, and for which
//! sequences, follows from how often drafts were right, from the number of sequences, and from the
//! measured times of both models' passes. The first [`TRIALS`] of a pair are made whatever they
//! cost, to know that. A sequence for which none are worth it for a while gives its part back, and
//! is tried again much later.
//!
//! It begins when a sequence has its first token, which so comes as early as without. Its memory is
//! nobody's need: admission does not count it, and whoever lacks room has it. What fails here fails
//! no request: the sequence goes on without.

mod run;

use std::sync::Arc;

use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::actor::{Engine, Entry};
use crate::error::Error;
use crate::kv::GivenUp;
use crate::loaded::LoadedModel;
use crate::member::{Member, Stepped};
use crate::speculate::{self, Chance, LIKELY_AT_FIRST};
use crate::states::SpareStates;
use crate::task::{Task, Work};
use crate::weight_store::DraftMemory;

/// Drafts of a pair of models that are made whatever they cost.
const TRIALS: u32 = 64;

/// How many a sequence makes at a time then.
const TRIAL_DRAFTS: usize = 3;

/// How likely a draft must be right behind the trials to be made at all: what passes
/// take is measured with noise.
const LIKELY_MIN: f64 = 0.1;

/// Rows of a sequence at most that are computed together with a draft; more are caught up with
/// before.
const FEW_ROWS: usize = 8;

/// Passes without drafts after what was computed for them was given up to others,
/// or failed for want of room.
const REST_PASSES: u32 = 256;

/// The part of the time of a sequence's remaining passes at most that catching up with it may take.
const CATCH_UP_PART: f64 = 0.25;

/// Tokens at most that an open-ended text is thought to go on for.
const REMAINING_MAX: usize = 512;

/// How fast a pair whose drafts were wrong comes to try again, a sequence.
const PAIR_RECOVERY: f64 = 1.0 / 32.0;

/// The draft model of a registered model.
#[derive(Debug)]
pub(crate) struct DraftModel {
    pub(crate) id: ModelId,
    pub(crate) name: String,
    /// Nothing failed but for want of room.
    on: bool,
    /// How likely a draft is right if those before it were, of all sequences.
    likely: f64,
    /// Drafts that were computed.
    made: u32,
    /// Passes that go by without.
    rest: u32,
    /// Seconds of a row of a long text; 0 before the first.
    row_seconds: f64,
}

impl DraftModel {
    fn new(id: ModelId, name: &str) -> Self {
        Self {
            id,
            name: name.to_owned(),
            on: true,
            likely: LIKELY_AT_FIRST,
            made: 0,
            rest: 0,
            row_seconds: 0.0,
        }
    }

    /// Whether it may be asked for drafts.
    pub(crate) fn is_used(&self) -> bool {
        self.on && self.rest == 0
    }

    /// Of so many drafts so many were right.
    pub(crate) fn note(&mut self, made: usize, right: usize) {
        self.made = self.made.saturating_add(made as u32);
        speculate::learn(&mut self.likely, made, right);
    }

    /// A sequence comes for which it has made none. How likely its drafts are thought to be right.
    fn of_a_new_sequence(&mut self) -> f64 {
        speculate::recover(&mut self.likely, PAIR_RECOVERY);
        self.likely
    }
}

/// A run of a draft model.
struct Run {
    /// Whose drafts are made.
    model: ModelId,
    /// The draft model.
    id: ModelId,
    loaded: Arc<LoadedModel>,
    /// Rows of the next pass without drafts.
    rows: usize,
}

/// A sequence in a run.
struct Ahead {
    member: usize,
    memory: DraftMemory,
    /// How many drafts are wanted of it.
    wanted: usize,
    drafts: Vec<u32>,
    /// What of it the draft model's next pass computes, behind what was computed.
    ids: Vec<u32>,
}

impl Engine {
    /// The model that is to draft for another one.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], and [`Error::InvalidArgument`] for one that cannot draft for it.
    pub(crate) fn draft_model(&self, of: &LoadedModel, name: &str) -> Result<DraftModel, Error> {
        let invalid = |message: String| Error::InvalidArgument {
            field: "draft",
            message,
        };
        let of_name = of.name();
        if name == of_name {
            return Err(invalid(format!(
                "'{name}' cannot draft for itself; name a smaller model with the same vocabulary"
            )));
        }
        let entry = self.find(name)?;
        if entry.loaded.model().plan().state_elements > 0 {
            return Err(invalid(format!(
                "'{name}' ({}) has recurrent states, which a draft model cannot have yet; name a model of attention alone",
                entry.loaded.model().hparams().arch
            )));
        }
        if let Some(difference) = of.vocabulary_differs(&entry.loaded) {
            return Err(invalid(format!(
                "'{name}' cannot draft for '{of_name}', whose vocabulary is another one: {difference}; name a model with the \
                 same vocabulary"
            )));
        }
        Ok(DraftModel::new(entry.id, name))
    }

    /// Lets a model that is loaded already have this draft model from now on.
    ///
    /// # Errors
    /// As [`Engine::draft_model`].
    pub(crate) fn attach_draft(
        &mut self,
        of: &LoadedModel,
        name: Option<&str>,
    ) -> Result<(), Error> {
        let Some(name) = name else {
            return Ok(());
        };
        let draft = self.draft_model(of, name)?;
        let entry = self
            .models
            .iter_mut()
            .find(|e| e.loaded.name() == of.name());
        let has_it = |e: &&mut Entry| e.draft.as_ref().is_some_and(|d| d.id == draft.id && d.on);
        if let Some(entry) = entry.filter(|e| !has_it(e)) {
            entry.draft_name = Some(draft.name.clone());
            entry.draft = Some(draft);
            if entry.states.is_none() {
                entry.states = SpareStates::of(of.model().plan());
            }
        }
        Ok(())
    }

    /// A model is loaded: it drafts for those for which its name was named, and which have none
    /// since one of that name was unloaded.
    pub(crate) fn drafts_again(&mut self, loaded: &LoadedModel) {
        let name = loaded.name();
        let lack = |e: &&Entry| e.draft.is_none() && e.draft_name.as_deref() == Some(name);
        let lack = self.models.iter().filter(lack);
        let lack: Vec<_> = lack.map(|e| Arc::clone(&e.loaded)).collect();
        for of in lack {
            let model = of.name();
            match self.attach_draft(&of, Some(name)) {
                Ok(()) => tracing::info!(model, draft = name, "the draft model is loaded again"),
                // It was another file, which is no reason to refuse this one.
                Err(error) => {
                    tracing::warn!(model, draft = name, %error, "the model that is loaded under its draft model's name cannot draft: nothing is drafted with it")
                }
            }
        }
    }

    /// A model is unloaded: it drafts for none until one of its name is loaded.
    pub(crate) fn drafts_no_more(&mut self, id: ModelId) {
        for entry in &mut self.models {
            if let Some(draft) = entry.draft.take_if(|d| d.id == id) {
                tracing::info!(
                    model = entry.loaded.name(),
                    draft = draft.name,
                    "the draft model is unloaded: nothing is drafted with it"
                );
            }
        }
    }

    /// Behind a pass: has the draft model draft for the sequences that go on, where that pays.
    pub(crate) fn draft_ahead(&mut self, plan: &PassPlan, members: &mut [Member]) {
        let Some(run) = self.draft_run(plan, members) else {
            return;
        };
        let mut ahead = self.choose(&run, members);
        if ahead.is_empty() {
            return self.rest_draft_model(run.id);
        }
        let ran = self.catch_up(&run, members, &mut ahead);
        let ran = ran.and_then(|()| self.draft_for(&run, members, &mut ahead));
        if let Err(error) = &ran {
            // The pass itself has all that it needs: a shortage here is no reason to do it again.
            let passes = matches!(error, Error::Exhausted { .. } | Error::FileSilent { .. });
            let short = self.store.take_refused_bytes().is_some() || passes;
            let (model, draft) = (members[0].task.loaded.name(), run.loaded.name());
            match short {
                true => {
                    tracing::debug!(model, draft, %error, "no room for drafts, or no answer of the file")
                }
                false => {
                    tracing::warn!(model, draft, %error, "a draft model failed and is not used any more")
                }
            }
            for of in ahead {
                of.memory.free(&mut self.store);
            }
            if let Some(draft) = self.draft_entry(run.model) {
                draft.rest = REST_PASSES;
                draft.on = short;
            }
            return;
        }
        for of in ahead {
            let task = &mut members[of.member].task;
            task.memory.keep_drafting(&mut self.store, of.memory);
            if let Work::Generate(g) = &mut task.work
                && !of.drafts.is_empty()
            {
                g.drafts.foretell_all(task.tokens.len(), of.drafts);
            }
        }
    }

    pub(crate) fn draft_entry(&mut self, model: ModelId) -> Option<&mut DraftModel> {
        let entry = self.models.iter_mut().find(|e| e.id == model);
        entry.and_then(|e| e.draft.as_mut())
    }

    /// What the draft model of a pass's model is to do, if it has one that is in use.
    fn draft_run(&mut self, plan: &PassPlan, members: &[Member]) -> Option<Run> {
        if self.config.speculate == Some(false) {
            return None;
        }
        let model = ModelId(plan.model.0);
        let draft = self.draft_entry(model)?;
        if draft.rest > 0 {
            draft.rest -= 1;
        }
        let (id, used) = (draft.id, draft.is_used());
        let loaded = Arc::clone(&self.models.iter().find(|e| e.id == id)?.loaded);
        let goes_on = |m: &&Member| matches!(m.stepped, Stepped::Appended);
        let here = members.iter().filter(goes_on).count();
        let decodes = |t: &&Task| t.model == model && t.begun && t.n_past + 1 == t.tokens.len();
        let others = self.tasks.values().filter(decodes).count();
        (used && here > 0).then_some(Run {
            model,
            id,
            loaded,
            rows: here + others,
        })
    }

    /// Nobody is drafted for just now: where nothing is kept for anybody, the draft model's
    /// segments are those of an idle model.
    pub(crate) fn rest_draft_model(&mut self, id: ModelId) {
        let runs = |t: &Task| t.begun && t.model == id;
        if !self.store.drafts_with(id) && !self.all_tasks().any(runs) {
            self.store.cache.request_end(id);
        }
    }

    /// For whom drafts are made behind this pass, and how many.
    fn choose(&mut self, run: &Run, members: &mut [Member]) -> Vec<Ahead> {
        let at = self.models.iter().position(|e| e.id == run.model);
        let Some((at, mut pair)) = at.and_then(|at| Some((at, self.models[at].draft.take()?)))
        else {
            return Vec::new();
        };
        let ahead = self.choose_by(&mut pair, run, members);
        self.models[at].draft = Some(pair);
        ahead
    }

    fn choose_by(
        &mut self,
        pair: &mut DraftModel,
        run: &Run,
        members: &mut [Member],
    ) -> Vec<Ahead> {
        // Its own requests need its weights in any case.
        let asked = self.all_tasks().any(|t| t.begun && t.model == run.id);
        let bytes = if asked {
            0
        } else {
            self.store.model_bytes(run.id)
        };
        if !self.store.leaves_room(bytes) {
            tracing::debug!(draft = pair.name, "no room for a draft model");
            pair.rest = REST_PASSES;
            for member in members {
                member.task.memory.stop_drafting(&mut self.store);
            }
            return Vec::new();
        }
        let entry = |id| self.models.iter().find(|e: &&Entry| e.id == id);
        let (Some(of), Some(draft)) = (entry(run.model), entry(run.id)) else {
            return Vec::new();
        };
        let spare = of.states.as_ref();
        let spare = spare.map_or(usize::MAX, |s| s.most(self.store.budget()));
        let mut room = (self.spans_max() as usize / 2).min(spare);
        let drafting = |of: &[Chance], n: usize| {
            let known = |rows| draft.times.seconds(rows).unwrap_or(0.0);
            let first = of.iter().map(|c| c.unknown.min(FEW_ROWS)).sum();
            known(first) + n.saturating_sub(1) as f64 * known(of.len())
        };
        let trial = TRIALS.saturating_sub(pair.made) as usize;
        let n_ctx = run.loaded.model().hparams().n_ctx_train as usize;
        let mut candidates: Vec<(usize, Chance)> = Vec::new();
        let mut resting = Vec::new();
        for (i, member) in members.iter_mut().enumerate() {
            if !matches!(member.stepped, Stepped::Appended) {
                continue;
            }
            let task = &mut member.task;
            let known = task.tokens.len();
            let most = task.drafts_at_most().min(n_ctx.saturating_sub(known));
            let unknown = known - task.memory.drafting_past(&self.store).min(known);
            let remaining = task.remaining().min(REMAINING_MAX) as f64;
            let Work::Generate(g) = &mut task.work else {
                continue;
            };
            let chance = Chance {
                likely: g.drafts.likely_of_model(|| pair.of_a_new_sequence()),
                most,
                unknown,
            };
            let pass_seconds = of.times.seconds(run.rows).unwrap_or(0.0);
            let too_far = trial == 0
                && unknown > FEW_ROWS
                && unknown as f64 * pair.row_seconds > remaining * pass_seconds * CATCH_UP_PART;
            let of_text = match self.speculates {
                true => g
                    .drafts
                    .gain_of_text(&task.tokens, most, run.rows, &of.times),
                false => 1.0,
            };
            let alone = || of.times.worth_of_model(&[chance], run.rows, &drafting).gain;
            let text_is_better = of_text > 1.0 && of_text >= alone();
            let unlikely = trial == 0 && chance.likely < LIKELY_MIN;
            let none = most == 0 || unlikely || !g.chooser.takes_drafts();
            match none || too_far || text_is_better {
                true => resting.push(i),
                false => candidates.push((i, chance)),
            }
        }
        candidates.sort_by(|a, b| b.1.likely.total_cmp(&a.1.likely));
        let chances: Vec<Chance> = candidates.iter().map(|(_, chance)| *chance).collect();
        let worth = of.times.worth_of_model(&chances, run.rows, &drafting);
        let (n, sequences) = match worth.drafts {
            0 => (TRIAL_DRAFTS, trial.div_ceil(TRIAL_DRAFTS)),
            n => (n, worth.sequences),
        };
        let mut ahead = Vec::with_capacity(sequences.min(candidates.len()));
        for (k, (i, chance)) in candidates.into_iter().enumerate() {
            let wanted = n.min(chance.most).min(room);
            if k >= sequences || wanted == 0 {
                resting.push(i);
                continue;
            }
            room -= wanted;
            let task = &mut members[i].task;
            let mut memory = match task.memory.take_drafting(&mut self.store) {
                Ok(Some(memory)) if memory.model == run.id => memory,
                Ok(other) => {
                    // Another one drafted until now.
                    other.into_iter().for_each(|m| m.free(&mut self.store));
                    DraftMemory::new(run.id, Arc::clone(&run.loaded))
                }
                Err(GivenUp) => {
                    pair.rest = REST_PASSES;
                    continue;
                }
            };
            memory.settle(&task.tokens);
            ahead.push(Ahead {
                member: i,
                memory,
                wanted,
                drafts: Vec::new(),
                ids: Vec::new(),
            });
        }
        for i in resting {
            let task = &mut members[i].task;
            if let Work::Generate(g) = &mut task.work
                && g.drafts.rest_model()
            {
                task.memory.stop_drafting(&mut self.store);
            }
        }
        ahead
    }
}
