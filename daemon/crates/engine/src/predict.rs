//! The block of a model that predicts one token more (MTP): what it drafts, and when it runs.
//!
//! It is a model of its own to the cache and the device: a plan, segments and a name among the
//! models', under the file of the model that it belongs to. So its segments come when somebody
//! drafts with it and go like those of a model that nobody asks for. It runs behind each pass, on
//! the rows of the pass that count, each with the token behind it, which is known then:
//!
//! ```text
//! pass:   rows of positions p..q  ->  stream of each row, tokens up to q
//! block:  the same rows, each with the stream and the token behind it
//!             ->  keys and values of p..q, a draft of token q + 1
//! ```
//!
//! Its keys and values lie in pages of the sequence beside those of the layers ([`crate::kv`]),
//! and are shared with them. A sequence whose rows it once missed is done with it, since the
//! stream of those rows is gone.
//!
//! What fails here fails no request: the sequence goes on without.
//!
//! *Invariant:* a sequence drafts with the block only while the block has the keys and values of
//! all its positions (`Engine::rows_to_predict`; test
//! `drafts_do_not_depend_on_how_a_prompt_was_computed`).

use std::sync::Arc;
use std::time::Instant;

use rocmforge_device::Span;
use rocmforge_ops::{Plan, RowCounts};
use rocmforge_scheduler::{PassPlan, SeqId};
use rocmforge_tensor_cache::ModelId;

use crate::actor::Engine;
use crate::api::RequestCacheUse;
use crate::embedding_rows;
use crate::error::Error;
use crate::loaded::LoadedModel;
use crate::member::{Member, Stepped};
use crate::pass::{self, Interest, Pass, RowOutput};
use crate::rotations::{self, Positions, Rotations};
use crate::task::{Task, Work};
use crate::weight_store::Source;

/// The block of a registered model.
pub(crate) struct Predictor {
    /// Its name in the cache.
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
    /// The plan's tables of rotations; made when it runs first.
    rope: Vec<Rotations>,
    /// Sequences use it: not where the budget has no room for its part.
    pub(crate) on: bool,
    /// Seconds that it takes behind a pass that only decodes, weighted towards the recent.
    pub(crate) seconds: f64,
}

/// A sequence's rows in a run of the block.
struct Rows {
    member: usize,
    /// The first of them in the pass.
    first: usize,
    n: usize,
    /// Whether the token behind the last one was chosen just now, so that the next one can be
    /// drafted.
    drafts: bool,
}

impl Engine {
    /// Registers the block of a model that has one, where tokens are drafted.
    pub(crate) fn register_predictor(&mut self, loaded: &LoadedModel) -> Option<Predictor> {
        if !self.speculates {
            return None;
        }
        if let Some(why) = loaded.model().unpredicted() {
            tracing::info!(
                model = loaded.name(),
                why,
                "the file's block that predicts a further token is left alone"
            );
        }
        let plan = loaded.model().predictor()?;
        let id = ModelId(self.next_model);
        self.next_model = self.next_model.wrapping_add(1);
        let registered = self.layouts(loaded, plan).and_then(|layouts| {
            let kinds = plan.segments.iter().map(|s| s.kind).collect();
            let source = Source::new(loaded, layouts, kinds);
            self.store.register(id, source)?;
            let prepared = self.store.prepare(id, plan);
            prepared.map_err(|e| {
                let error = self.store.device_error(Some(id), e);
                // Nothing of it was uploaded.
                let _ = self.store.unregister(id);
                error
            })
        });
        if let Err(error) = registered {
            tracing::warn!(model = loaded.name(), %error, "the block that predicts a further token is not used");
            return None;
        }
        Some(Predictor {
            id,
            plan: Arc::clone(plan),
            rope: Vec::new(),
            on: true,
            seconds: 0.0,
        })
    }

    /// Where a request that would fit without its block or its spare states does not fit with them,
    /// lets all of its model do without.
    pub(crate) fn spare_predictors(&mut self, budget: u64) {
        let takes_more = |t: &Task| t.predicts || (t.borrows_states() && self.drafts_with(t.model));
        let asks = |t: &&Task| (t.sized.0 != budget || t.tokens.len() > t.sized.1) && takes_more(t);
        let asking: Vec<(SeqId, ModelId)> = self
            .tasks
            .values()
            .filter(asks)
            .map(|t| (t.seq, t.model))
            .collect();
        for (seq, model) in asking {
            if !self.drafts_with(model) {
                continue;
            }
            let need = self.scheduling(budget, |scheduler, view| scheduler.needed_alone(seq, view));
            if need > budget {
                self.finish_passes();
                self.stop_predicting(|m| m == model);
            } else if let Some(task) = self.tasks.get_mut(&seq) {
                task.sized = (budget, task.fits_up_to(need, budget));
            }
        }
    }

    /// Whether a model's drafts take memory of their own just now: its block's, or spare states.
    fn drafts_with(&self, model: ModelId) -> bool {
        let entry = self.models.iter().find(|e| e.id == model);
        entry.is_some_and(|e| {
            e.predictor.as_ref().is_some_and(|p| p.on) || e.states.as_ref().is_some_and(|s| s.on)
        })
    }

    /// Models of these do without their blocks and without spare states, and give up what is held
    /// for them. Whether one had used either.
    pub(crate) fn stop_predicting(&mut self, of: impl Fn(ModelId) -> bool) -> bool {
        let mut stopped = Vec::new();
        for entry in self.models.iter_mut().filter(|e| of(e.id)) {
            if let Some(predictor) = entry.predictor.as_mut().filter(|p| p.on) {
                predictor.on = false;
                stopped.push(entry.id);
                tracing::info!(
                    model = entry.loaded.name(),
                    "no room for the block that predicts a further token: none is drafted with it"
                );
            }
            if let Some(states) = entry.states.as_mut().filter(|s| s.on) {
                states.on = false;
                states.free(&mut self.store);
                stopped.push(entry.id);
                tracing::info!(
                    model = entry.loaded.name(),
                    "no room for states behind drafts: none are made"
                );
            }
        }
        self.scratch_sizes
            .borrow_mut()
            .retain(|key, _| !stopped.contains(&key.0));
        for task in self.tasks.values_mut() {
            if stopped.contains(&task.model) {
                task.stop_predicting(&mut self.store);
            }
        }
        !stopped.is_empty()
    }

    /// A larger budget may have room for the blocks: requests that come from now on use
    /// them. So for spare states.
    pub(crate) fn predict_again(&mut self) {
        for predictor in self.models.iter_mut().filter_map(|e| e.predictor.as_mut()) {
            predictor.on = true;
        }
        for states in self.models.iter_mut().filter_map(|e| e.states.as_mut()) {
            states.on = true;
        }
        self.scratch_sizes.borrow_mut().clear();
    }

    /// Whether the pass's residual streams are wanted for the block.
    pub(crate) fn wants_stream(members: &[Member]) -> bool {
        members.iter().any(|m| m.task.predicts)
    }

    /// Runs the block behind a pass whose rows were taken by their requests.
    pub(crate) fn predict(&mut self, plan: &PassPlan, members: &mut [Member]) {
        if !Self::wants_stream(members) {
            return self.rest_predictor(plan);
        }
        let begun = Instant::now();
        let rows = self.rows_to_predict(members);
        if rows.is_empty() {
            return;
        }
        let decodes = plan.spans.len() == plan.decode_spans;
        let ran = self.run_predictor(plan, members, &rows);
        if let Err(error) = &ran {
            // The pass itself has all that it needs: a shortage here is no reason to do it again.
            let short = self.store.take_refused_bytes().is_some();
            tracing::debug!(%error, "the block that predicts failed");
            for of in &rows {
                members[of.member].task.stop_predicting(&mut self.store);
            }
            if short {
                let model = members[0].task.model;
                self.stop_predicting(|m| m == model);
            }
        }
        let entry = self.models.iter_mut().find(|e| e.id.0 == plan.model.0);
        if let Some(predictor) = entry.and_then(|e| e.predictor.as_mut())
            && decodes
            && ran.is_ok()
        {
            let took = begun.elapsed().as_secs_f64();
            predictor.seconds = match predictor.seconds {
                0.0 => took,
                known => known + (took.min(known * 2.0) - known) / 8.0,
            };
        }
    }

    /// Where no request drafts with a model's block any more, its segments are those of an idle
    /// model.
    fn rest_predictor(&mut self, plan: &PassPlan) {
        let entry = self.models.iter().find(|e| e.id.0 == plan.model.0);
        let Some((model, predictor)) = entry.and_then(|e| Some((e.id, e.predictor.as_ref()?)))
        else {
            return;
        };
        let drafts = |t: &Task| t.predicts && t.begun && t.model == model;
        if !self.all_tasks().any(drafts) {
            self.store.cache.request_end(predictor.id);
        }
    }

    /// The rows of a pass that the block computes; who cannot go on with it is done with it.
    fn rows_to_predict(&mut self, members: &mut [Member]) -> Vec<Rows> {
        let mut rows = Vec::with_capacity(members.len());
        let mut first = 0;
        for (i, member) in members.iter_mut().enumerate() {
            let (at, n) = (first, member.rows() as usize);
            first += member.span.rows as usize;
            let goes_on = matches!(member.stepped, Stepped::GoesOn | Stepped::Appended);
            let task = &mut member.task;
            if !task.predicts || !goes_on || n == 0 {
                continue;
            }
            if task.n_past == 0 {
                task.memory.set_predicted(0);
            }
            let drafts = matches!(member.stepped, Stepped::Appended);
            let tired = match &mut task.work {
                Work::Generate(g) => drafts && g.drafts.is_tired(),
                Work::Score(_) | Work::Embed(_) => true,
            };
            let complete = task.memory.predicted() == Some(task.n_past);
            if tired || !complete || task.tokens.len() <= task.n_past + n {
                task.stop_predicting(&mut self.store);
                continue;
            }
            rows.push(Rows {
                member: i,
                first: at,
                n,
                drafts,
            });
        }
        rows
    }

    fn run_predictor(
        &mut self,
        plan: &PassPlan,
        members: &mut [Member],
        rows: &[Rows],
    ) -> Result<(), Error> {
        let internal = |what: &str| Error::Internal(what.to_owned());
        let entry = self.models.iter_mut().find(|e| e.id.0 == plan.model.0);
        let entry = entry.ok_or_else(|| internal("a request keeps its model registered"))?;
        let (model, loaded) = (entry.id, Arc::clone(&entry.loaded));
        let predictor = entry.predictor.as_mut();
        let predictor = predictor.ok_or_else(|| internal("a model without the block"))?;
        let (id, of_block) = (predictor.id, Arc::clone(&predictor.plan));
        let n_tokens = rows.iter().map(|of| of.n).sum::<usize>();
        let layout = of_block.scratch(RowCounts {
            tokens: n_tokens as u64,
            outputs: u64::from(plan.outputs_at_a_time),
        });
        let bytes = layout.bytes + self.store.device.workspace_bytes(&layout);
        let (block, has) = self.scratch.ok_or_else(|| internal("a pass has scratch"))?;
        if bytes > has {
            return Err(internal("the pass's scratch is too small for the block"));
        }

        // Rotations and inputs.
        if predictor.rope.is_empty() {
            let _waiting = self.store.files.begin(loaded.name(), loaded.path());
            predictor.rope = rotations::tables(&loaded, &of_block)?;
        }
        let sequences = rows.iter().map(|of| Positions {
            first: members[of.member].task.n_past,
            n: of.n,
            reach: members[of.member].task.reach,
        });
        rotations::set_angles(&of_block, &predictor.rope, sequences, &mut self.angles);
        let width = loaded.model().hparams().n_embd as usize;
        self.ids.clear();
        self.inputs.resize_with(2, Vec::new);
        let [table, streams] = self.inputs.as_mut_slice() else {
            return Err(internal("the block has two inputs"));
        };
        streams.clear();
        for of in rows {
            let task = &members[of.member].task;
            let behind = task.n_past + 1..task.n_past + 1 + of.n;
            self.ids.extend_from_slice(&task.tokens[behind]);
            let of_rows = &self.stream[of.first * width..][..of.n * width];
            streams.extend(of_rows.iter().flat_map(|x| x.to_le_bytes()));
        }
        let waiting = self.store.files.begin(loaded.name(), loaded.path());
        embedding_rows::rows(&loaded, &of_block.inputs[0].table, &self.ids, table)?;
        drop(waiting);

        // Pages.
        for of in rows {
            let task = &mut members[of.member].task;
            let end = task.n_past + of.n;
            task.memory
                .prepare_predicting(&mut self.store, model, &of_block, end)?;
        }
        let mut pages: Vec<Vec<&[u64]>> = Vec::with_capacity(rows.len());
        pages.extend(
            rows.iter()
                .map(|of| members[of.member].task.memory.predicting_pages()),
        );
        let mut spans: Vec<Span<'_>> = Vec::with_capacity(rows.len());
        // The rows whose logits are wanted, and whose each of them is.
        let (mut outputs, mut owners) = (Vec::new(), Vec::new());
        let mut first_row = 0;
        for (of, pages) in rows.iter().zip(&pages) {
            spans.push(Span {
                first_row,
                n_rows: of.n,
                first_position: members[of.member].task.n_past as u32,
                kv_pages: pages,
                state: 0,
                state_out: 0,
                draft: false,
            });
            first_row += of.n;
            if of.drafts {
                outputs.push(first_row as u32 - 1);
                owners.push(of.member);
            }
        }
        let pass = Pass {
            model: id,
            plan: &of_block,
            angles: &self.angles,
            spans: &spans,
            n_tokens,
            outputs: &outputs,
            hidden: &[],
            expects_next_pass: plan.expects_next,
            scratch: &layout,
            scratch_at: self.store.cache.block(block).offset,
            prefetch: self.prefetch,
            interest: Interest::Best,
        };
        let mut counts = RequestCacheUse::default();
        let mut drafts: Vec<Option<u32>> = Vec::with_capacity(owners.len());
        let mut sink = |_, found: RowOutput<'_>| {
            drafts.push(best_of(&found));
            Ok(())
        };
        let store = &mut self.store;
        pass::run(
            store,
            &pass,
            &self.inputs,
            &mut counts,
            &|| None,
            &|| (),
            &mut sink,
        )?;
        drop(spans);
        drop(pages);
        for of in rows {
            let task = &mut members[of.member].task;
            task.memory.set_predicted(task.n_past + of.n);
            task.counts.hits += counts.hits;
            task.counts.misses += counts.misses;
            task.counts.uploaded_bytes += counts.uploaded_bytes;
            task.counts.host_bytes += counts.host_bytes;
        }
        for (owner, draft) in owners.into_iter().zip(drafts) {
            let task = &mut members[owner].task;
            let known = task.tokens.len();
            if let (Work::Generate(g), Some(draft)) = (&mut task.work, draft) {
                g.drafts.foretell(known, draft);
            }
        }
        Ok(())
    }
}

impl Task {
    /// Does without the block from now on.
    pub(crate) fn stop_predicting(&mut self, store: &mut crate::weight_store::WeightStore) {
        self.predicts = false;
        let plan = self.loaded.model().plan();
        self.memory.stop_predicting(store, plan);
    }

    /// Positions up to which it fits, since its tokens so far need `need` bytes; those
    /// of an open-ended one grow.
    fn fits_up_to(&self, need: u64, budget: u64) -> usize {
        match &self.work {
            Work::Generate(g) if g.max_tokens.is_none() => {
                // Twice the positions need no more than twice the bytes.
                let times = if need <= budget / 2 { 2 } else { 1 };
                self.tokens.len() * times
            }
            _ => usize::MAX,
        }
    }
}

/// The token of the largest logit, the lowest among equals.
pub(crate) fn best_of(found: &RowOutput<'_>) -> Option<u32> {
    match found {
        RowOutput::Best(best) => *best,
        RowOutput::Top(top) => top.and_then(|top| top.first()).map(|best| best.0),
        RowOutput::Logits(logits) => {
            let finite = logits.iter().enumerate().filter(|(_, x)| x.is_finite());
            let best = finite.reduce(|best, next| if next.1 > best.1 { next } else { best });
            best.map(|(token, _)| token as u32)
        }
        RowOutput::Hidden(_) => None,
    }
}
