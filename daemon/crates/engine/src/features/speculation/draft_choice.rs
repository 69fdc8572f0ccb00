//! Chooses the sequences for which a draft model drafts after a pass, and how many tokens.

use std::sync::Arc;

use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::features::context::{Context, model_of};
use crate::features::speculation::draft_kv::DraftKv;
use crate::features::speculation::draft_model::DraftModel;
use crate::features::speculation::drafts::Chance;
use crate::features::speculation::state::Speculation;
use crate::model::loaded::LoadedModel;
use crate::pass::member::{Member, RowsOutcome};
use crate::pass::times::PassTimes;
use crate::request::kv::GivenUp;
use crate::request::task::{Task, Work};

/// Number of draft tokens of a model pair that are made regardless of their cost, to learn the
/// acceptance rate.
const TRIALS: u32 = 64;

/// Number of draft tokens that a sequence makes at a time during these trials.
const TRIAL_DRAFTS: usize = 3;

/// Minimum acceptance rate after the trials for drafts to be made at all, since pass times are
/// noisy.
const LIKELY_MIN: f64 = 0.1;

/// Maximum number of rows of a sequence that the draft model computes together with a draft; more
/// are computed before, in a catch-up pass.
pub(super) const FEW_ROWS: usize = 8;

/// Number of passes without drafts after draft KV caches were evicted for others, or a draft pass
/// failed for want of memory.
const REST_PASSES: u32 = 256;

/// Maximum share of the time of a sequence's remaining passes that the draft model's catch-up may
/// take.
const CATCH_UP_PART: f64 = 0.25;

/// Maximum number of tokens that a request without `max_tokens` is assumed to still generate.
const REMAINING_MAX: usize = 512;

/// A run of a draft model after a pass.
pub(super) struct Run {
    /// The model for which tokens are drafted.
    pub(super) model: ModelId,
    /// The draft model.
    pub(super) id: ModelId,
    pub(super) loaded: Arc<LoadedModel>,
    /// Rows of the model's next pass without drafts.
    pub(super) rows: usize,
}

/// A sequence in a run of a draft model.
pub(super) struct Ahead {
    pub(super) member: usize,
    pub(super) kv: DraftKv,
    /// Number of draft tokens that are wanted for the sequence.
    pub(super) wanted: usize,
    pub(super) drafts: Vec<u32>,
    /// The token ids that the draft model's next pass computes for this sequence, after those that
    /// it has computed.
    pub(super) ids: Vec<u32>,
}

impl Speculation {
    /// After a pass: lets the draft model draft for the sequences that go on, where that is
    /// worthwhile.
    pub(crate) fn draft_ahead(
        &mut self,
        cx: &mut Context<'_>,
        plan: &PassPlan,
        members: &mut [Member],
    ) {
        let Some(run) = self.draft_run(cx, plan, members) else {
            return;
        };
        let mut ahead = self.choose(cx, &run, members);
        if ahead.is_empty() {
            return rest_draft_model(cx, run.id);
        }
        let ran = self.catch_up(cx, &run, members, &mut ahead);
        let ran = ran.and_then(|()| self.draft_for(cx, &run, members, &mut ahead));
        if let Err(error) = &ran {
            // The pass itself has all that it needs: a shortage here is no reason to do it again.
            let passes = matches!(error, Error::Exhausted { .. } | Error::FileSilent { .. });
            let short = cx.memory.store.take_refused_bytes().is_some() || passes;
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
                of.kv.free(cx.memory);
            }
            if let Some(draft) = self.draft_model_mut(run.model) {
                draft.rest = REST_PASSES;
                draft.on = short;
            }
            return;
        }
        for of in ahead {
            let task = &mut members[of.member].task;
            task.memory.keep_draft_kv(cx.memory, of.kv);
            if let Work::Generate(g) = &mut task.work
                && !of.drafts.is_empty()
            {
                g.drafts.foretell_all(task.tokens.len(), of.drafts);
            }
        }
    }

    /// The run of the draft model after a pass; `None` if the model has no draft model in use.
    fn draft_run(&mut self, cx: &Context<'_>, plan: &PassPlan, members: &[Member]) -> Option<Run> {
        if !self.takes_draft_models {
            return None;
        }
        let model = model_of(plan);
        let draft = self.draft_model_mut(model)?;
        if draft.rest > 0 {
            draft.rest -= 1;
        }
        let (id, used) = (draft.id, draft.is_used());
        let loaded = Arc::clone(&cx.models.get(id)?.loaded);
        let goes_on = |m: &&Member| matches!(m.stepped, RowsOutcome::Appended);
        let here = members.iter().filter(goes_on).count();
        let decodes = |t: &&Task| t.model == model && t.begun && t.n_past + 1 == t.tokens.len();
        let others = cx.requests.tasks.values().filter(decodes).count();
        (used && here > 0).then_some(Run {
            model,
            id,
            loaded,
            rows: here + others,
        })
    }

    /// Chooses the sequences for which tokens are drafted after this pass, and how many.
    fn choose(&mut self, cx: &mut Context<'_>, run: &Run, members: &mut [Member]) -> Vec<Ahead> {
        // Its own requests need its weights in any case.
        let bytes = match cx.requests.any_begun(run.id) {
            true => 0,
            false => cx.memory.store.model_bytes(run.id),
        };
        let spare = self.drafts_max(run.model, cx.memory.budget());
        let by_text = self.is_on;
        let Some(pair) = self.draft_model_mut(run.model) else {
            return Vec::new();
        };
        if !cx.memory.leaves_room(bytes) {
            tracing::debug!(draft = pair.name, "no room for a draft model");
            pair.rest = REST_PASSES;
            for member in members {
                member.task.memory.stop_drafting(cx.memory);
            }
            return Vec::new();
        }
        let room = (cx.spans_max() as usize / 2).min(spare);
        let choice = Choice {
            trial: TRIALS.saturating_sub(pair.made) as usize,
            room,
            by_text,
        };
        let (chosen, resting) = choice.of(cx, pair, run, members);
        let ahead = take_draft_kv(cx, pair, run, members, chosen);
        for i in resting {
            let task = &mut members[i].task;
            if let Work::Generate(g) = &mut task.work
                && g.drafts.rest_model()
            {
                task.memory.stop_drafting(cx.memory);
            }
        }
        ahead
    }
}

/// Function that returns the seconds a draft model takes for a number of drafts of each of some
/// sequences.
type DraftingTime<'a> = &'a dyn Fn(&[Chance], usize) -> f64;

/// Inputs of the choice of sequences to draft for.
struct Choice {
    /// Number of draft tokens that are made regardless of their cost; 0 after the trials.
    trial: usize,
    /// Maximum number of draft tokens of all sequences together.
    room: usize,
    /// Whether n-gram speculation drafts, too.
    by_text: bool,
}

impl Choice {
    /// The members to draft for, each with its number of draft tokens, and those for which drafts
    /// are not worthwhile.
    fn of(
        &self,
        cx: &Context<'_>,
        pair: &mut DraftModel,
        run: &Run,
        members: &mut [Member],
    ) -> (Vec<(usize, usize)>, Vec<usize>) {
        let (Some(of), Some(draft)) = (cx.models.get(run.model), cx.models.get(run.id)) else {
            return (Vec::new(), Vec::new());
        };
        let drafting = |of: &[Chance], n: usize| {
            let known = |rows| draft.times.seconds(rows).unwrap_or(0.0);
            let first = of.iter().map(|c| c.unknown.min(FEW_ROWS)).sum();
            known(first) + n.saturating_sub(1) as f64 * known(of.len())
        };
        let mut candidates: Vec<(usize, Chance)> = Vec::new();
        let mut resting = Vec::new();
        for (i, member) in members.iter_mut().enumerate() {
            if !matches!(member.stepped, RowsOutcome::Appended) {
                continue;
            }
            match self.chance(cx, pair, run, &mut member.task, (&of.times, &drafting)) {
                Some(Some(chance)) => candidates.push((i, chance)),
                Some(None) => resting.push(i),
                None => {}
            }
        }
        candidates.sort_by(|a, b| b.1.likely.total_cmp(&a.1.likely));
        let chances: Vec<Chance> = candidates.iter().map(|(_, chance)| *chance).collect();
        let worth = of.times.worth_of_model(&chances, run.rows, &drafting);
        let (n, sequences) = match worth.drafts {
            0 => (TRIAL_DRAFTS, self.trial.div_ceil(TRIAL_DRAFTS)),
            n => (n, worth.sequences),
        };
        let mut room = self.room;
        let mut chosen = Vec::with_capacity(sequences.min(candidates.len()));
        for (k, (i, chance)) in candidates.into_iter().enumerate() {
            let wanted = n.min(chance.most).min(room);
            if k >= sequences || wanted == 0 {
                resting.push(i);
                continue;
            }
            room -= wanted;
            chosen.push((i, wanted));
        }
        (chosen, resting)
    }

    /// How likely drafts for a sequence are accepted; `Some(None)` if drafts are not worthwhile for
    /// it, `None` if it generates no tokens.
    fn chance(
        &self,
        cx: &Context<'_>,
        pair: &mut DraftModel,
        run: &Run,
        task: &mut Task,
        (times, drafting): (&PassTimes, DraftingTime<'_>),
    ) -> Option<Option<Chance>> {
        let n_ctx = run.loaded.model().hparams().n_ctx_train as usize;
        let known = task.tokens.len();
        let most = task.drafts_at_most().min(n_ctx.saturating_sub(known));
        let unknown = known - task.memory.draft_kv_past(cx.memory).min(known);
        let remaining = task.remaining().min(REMAINING_MAX) as f64;
        let Work::Generate(g) = &mut task.work else {
            return None;
        };
        let chance = Chance {
            likely: g.drafts.likely_of_model(|| pair.of_a_new_sequence()),
            most,
            unknown,
        };
        let pass_seconds = times.seconds(run.rows).unwrap_or(0.0);
        let too_far = self.trial == 0
            && unknown > FEW_ROWS
            && unknown as f64 * pair.row_seconds > remaining * pass_seconds * CATCH_UP_PART;
        let of_text = match self.by_text {
            true => g.drafts.gain_of_text(&task.tokens, most, run.rows, times),
            false => 1.0,
        };
        let alone = || times.worth_of_model(&[chance], run.rows, drafting).gain;
        let text_is_better = of_text > 1.0 && of_text >= alone();
        let unlikely = self.trial == 0 && chance.likely < LIKELY_MIN;
        let none = most == 0 || unlikely || !g.chooser.takes_drafts();
        Some((!(none || too_far || text_is_better)).then_some(chance))
    }
}

/// Takes the draft model's KV caches of the chosen members out of the cache.
fn take_draft_kv(
    cx: &mut Context<'_>,
    pair: &mut DraftModel,
    run: &Run,
    members: &mut [Member],
    chosen: Vec<(usize, usize)>,
) -> Vec<Ahead> {
    let mut ahead = Vec::with_capacity(chosen.len());
    for (i, wanted) in chosen {
        let task = &mut members[i].task;
        let mut kv = match task.memory.take_draft_kv(cx.memory) {
            Ok(Some(kv)) if kv.model == run.id => kv,
            Ok(other) => {
                // Another one drafted until now.
                other.into_iter().for_each(|kv| kv.free(cx.memory));
                DraftKv::new(run.id, Arc::clone(&run.loaded))
            }
            Err(GivenUp) => {
                pair.rest = REST_PASSES;
                continue;
            }
        };
        kv.settle(&task.tokens);
        ahead.push(Ahead {
            member: i,
            kv,
            wanted,
            drafts: Vec::new(),
            ids: Vec::new(),
        });
    }
    ahead
}

/// Marks a draft model as idle if it drafts for nobody and keeps no KV cache, so that its segments
/// can be evicted.
pub(crate) fn rest_draft_model(cx: &mut Context<'_>, id: ModelId) {
    if !cx.memory.draft_kv.has(id) && !cx.requests.any_begun(id) {
        cx.memory.store.cache.request_end(id);
    }
}
