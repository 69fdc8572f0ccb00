//! One pass: rows of the sequences that the scheduler chose, and what came of each of them.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use rocmforge_device::Scratch;
use rocmforge_scheduler::{Next, PassPlan, SeqId, SpanResult};
use rocmforge_tensor_cache::ModelId;

use crate::actor::Engine;
use crate::api::{
    Embedding, FinishReason, GenerateEvent, GenerateSummary, RequestCacheUse, Scores,
};
use crate::error::Error;
use crate::member::{Member, Stepped};
use crate::pass;
use crate::prepared::Prepared;
use crate::speculate::By;
use crate::stop::Checked;
use crate::task::{Generation, Task, Work};
use crate::under_way::{PassUnderWay, Until};

/// How a request ended.
pub(crate) type Outcome = Result<Option<FinishReason>, Error>;

impl Engine {
    /// Runs the next slice of a pass. Whether there was one.
    pub(crate) fn step(&mut self) -> bool {
        let plan = match self.next_slice() {
            Some(Next::Pass(plan)) => plan,
            Some(Next::GoOn(model)) => {
                self.store.take_refused_bytes();
                match self.under_way.take(ModelId(model.0)) {
                    Some(pass) => self.run_slice(pass, Until::ItsTime),
                    None => self.scheduler.pass_ended(model),
                }
                return true;
            }
            None if self.tell_all() => {
                // Whether readers have room is looked at again before the engine sleeps: they
                // wake it by what was sent.
                return true;
            }
            // Nobody who runs can go on: others need not wait for a pass.
            None => return std::mem::take(&mut self.passes_before_admission) > 0,
        };
        let members: Vec<Member> = plan
            .spans
            .iter()
            .map(|span| {
                let task = self.tasks.remove(&span.seq);
                Member::new(*span, task.expect("the scheduler knows the same requests"))
            })
            .collect();
        // What an upload ahead of need was refused is not this pass's affair.
        self.store.take_refused_bytes();
        if self.under_way.is_empty()
            && let Some(interleaved) = self.interleaved(&plan, &members)
        {
            let begun = Instant::now();
            let model = plan.model;
            self.step_interleaved(interleaved, members, begun);
            self.scheduler.pass_ended(model);
            return true;
        }
        self.begin_pass(plan, members);
        true
    }

    /// Runs the first slice of a pass.
    fn begin_pass(&mut self, plan: PassPlan, mut members: Vec<Member>) {
        let begun = Instant::now();
        match self.make_ready(&plan, &mut members) {
            Ok(prepared) => {
                tracing::trace!(plan.rows, sequences = members.len(), "a pass");
                let pass = PassUnderWay::new(plan, members, prepared);
                self.run_slice(pass, Until::ItsTime);
            }
            Err(error) => {
                self.charge(ModelId(plan.model.0), begun.elapsed(), true);
                self.scheduler.pass_ended(plan.model);
                self.pass_failed(members, error);
            }
        }
    }

    fn make_ready(&mut self, plan: &PassPlan, members: &mut [Member]) -> Result<Prepared, Error> {
        self.computing = false;
        let model = ModelId(plan.model.0);
        let anew = members.iter().map(|m| m.task.compactions).max();
        self.ensure_scratch(model, plan, anew.unwrap_or(0))?;
        self.prepare(plan, members)
    }

    /// What follows the last slice of a pass, which took so long and ended then.
    pub(crate) fn complete_pass(&mut self, pass: PassUnderWay, last: Duration, ended: Instant) {
        let model = pass.model();
        let PassUnderWay {
            plan,
            mut members,
            prepared,
            counts,
            took,
            ..
        } = pass;
        self.put_back(prepared, &mut members, counts);
        self.passes_before_admission = self.passes_before_admission.saturating_sub(1);
        self.note_pass(&plan, took);
        self.note_near(model);
        self.tell_before_drafts(&mut members);
        self.predict(&plan, &mut members);
        self.draft_ahead(&plan, &mut members);
        self.charge(model, last + ended.elapsed(), true);
        self.scheduler.pass_ended(plan.model);
        let ended = self.take_back(members);
        self.conclude(ended);
    }

    /// Arena offset of the scratch block.
    pub(crate) fn scratch_at(&self) -> u64 {
        let (block, _) = self.scratch.expect("scratch was ensured");
        self.store.cache.block(block).offset
    }

    /// Runs a pass whose scratch lies at an offset of the arena.
    pub(crate) fn run_pass_in(
        &mut self,
        scratch_at: u64,
        plan: &PassPlan,
        members: &mut [Member],
    ) -> Result<(), Error> {
        let n_tokens = plan.rows;
        tracing::trace!(n_tokens, sequences = members.len(), "a pass");
        let prepared = self.prepare(plan, members)?;
        let pages = prepared.pages();
        let rows = prepared.rows(members, plan.decode_spans, &pages, &self.store);
        let pass = prepared.pass(plan, members, &rows, scratch_at, self.prefetch);
        let mut counts = RequestCacheUse::default();
        let members = RefCell::new(members);
        // Beside the device's work: to wake the readers of a pass's rows takes the time of some
        // rows.
        let others = RefCell::new(&mut self.tasks);
        let begun = || {
            for member in members.borrow_mut().iter_mut() {
                member.task.tell();
            }
            for task in others.borrow_mut().values_mut() {
                task.tell();
            }
        };
        let ended = || nobody_waits(&members.borrow());
        self.computing = true;
        let ran = pass::run(
            &mut self.store,
            &pass,
            &prepared.inputs,
            &mut counts,
            &ended,
            &begun,
            &mut rows.sink(&members),
        );
        let members = members.into_inner();
        let kept = ran.and_then(|()| self.keep_stream(&prepared, scratch_at, members));
        self.put_back(prepared, members, counts);
        kept
    }

    /// Tells what a pass has found where others of the same requests come
    /// before the next pass begins.
    fn tell_before_drafts(&mut self, members: &mut [Member]) {
        let of_model = members.first().map(|m| m.task.model);
        let draft = of_model.and_then(|model| self.draft_entry(model));
        if draft.is_some_and(|d| d.is_used()) || members.iter().any(|m| m.task.predicts) {
            for member in members {
                member.task.tell();
            }
        }
    }

    /// Tells what passes have found and no later pass has told beside its own
    /// work. Whether there was any.
    pub(crate) fn tell_all(&mut self) -> bool {
        let told = self.tasks.values_mut().map(Task::tell);
        told.fold(false, |any, one| any | one)
    }

    /// Reads what the block that predicts needs of a pass: scratch is another's afterwards.
    pub(crate) fn keep_stream(
        &mut self,
        prepared: &Prepared,
        scratch_at: u64,
        members: &[Member],
    ) -> Result<(), Error> {
        let Some(stream) = prepared.plan().stream else {
            return Ok(());
        };
        if !Self::wants_stream(members) {
            return Ok(());
        }
        let layout = &prepared.layout;
        let width = layout.bufs[usize::from(stream.0)].width as usize;
        let rows: u32 = members.iter().map(|m| m.span.rows).sum();
        self.stream.resize(rows as usize * width, 0.0);
        let scratch = Scratch {
            layout,
            base: scratch_at,
        };
        let read = self.store.device.read(scratch, stream, &mut self.stream);
        read.map_err(|e| self.store.device_error(Some(prepared.model), e))
    }

    /// Puts requests whose rows were computed back, and returns those that are done,
    /// which hold nothing any more.
    pub(crate) fn take_back(&mut self, members: Vec<Member>) -> Vec<(Task, Outcome)> {
        let results: Vec<SpanResult> = members
            .iter()
            .map(|m| SpanResult {
                seq: m.span.seq,
                rows: m.rows(),
                appended: match m.stepped {
                    Stepped::Appended => m.told,
                    _ => 0,
                },
                ended: matches!(m.stepped, Stepped::Done(_) | Stepped::Failed(_)),
            })
            .collect();
        self.scheduler.computed(&results);
        let mut ended = Vec::new();
        let (now, model) = (Instant::now(), members.first().map(|m| m.task.model));
        let spent = model.map(|model| self.spent(model)).unwrap_or_default();
        for member in members {
            let rows = member.rows() as usize;
            let (made, right) = (member.drafts(), member.right());
            let Member {
                span,
                mut task,
                stepped,
                told,
                ..
            } = member;
            if let Work::Generate(g) = &mut task.work
                && told > 0
            {
                g.gaps.note(now, spent);
            }
            if let Work::Generate(g) = &mut task.work
                && told > 0
                && made > 0
            {
                if g.drafts.by() == By::Model
                    && let Some(pair) = self.draft_entry(task.model)
                {
                    pair.note(made as usize, right as usize);
                }
                g.drafts.note(made as usize, right as usize);
                g.drafted = (g.drafted.0 + made, g.drafted.1 + right);
            }
            task.n_past += rows;
            if let Stepped::Failed(_) = stepped {
                // Nobody is to begin with what may be wrong.
                self.store.forget_prefixes(task.model);
            } else {
                let (model, past) = (task.loaded.model(), task.n_past);
                let (store, tokens) = (&mut self.store, &task.tokens);
                task.memory
                    .hand_over(store, model, tokens, past, right as usize);
            }
            self.take_states_back(&mut task, right);
            let outcome = match stepped {
                Stepped::GoesOn | Stepped::Appended => {
                    self.tasks.insert(span.seq, task);
                    continue;
                }
                Stepped::Done(finish) => Ok(finish),
                Stepped::Failed(error) => Err(error),
            };
            let plan = task.loaded.model().plan();
            task.memory.free(&mut self.store, plan);
            ended.push((task, outcome));
        }
        ended
    }

    pub(crate) fn conclude(&mut self, ended: Vec<(Task, Outcome)>) {
        for (task, outcome) in ended {
            match outcome {
                Ok(finish) => self.complete(task, finish),
                Err(error) => self.finish(task, Some(error)),
            }
        }
    }

    /// A pass that failed: it is done again with less memory, or its requests fail, but for
    /// those that have their token.
    pub(crate) fn pass_failed(&mut self, members: Vec<Member>, error: Error) {
        let (told, failed): (Vec<Member>, Vec<Member>) = members
            .into_iter()
            .partition(|m| !matches!(m.stepped, Stepped::GoesOn));
        let ended = self.take_back(told);
        let seqs: Vec<SeqId> = failed.iter().map(|m| m.span.seq).collect();
        let nobody_waits = failed.iter().all(|m| m.task.ended().is_some());
        for mut member in failed {
            self.take_states_back(&mut member.task, 0);
            self.tasks.insert(member.span.seq, member.task);
        }
        // The next look at the requests ends those that nobody waits for, each with its own reason.
        if !nobody_waits {
            self.do_again(&seqs, error);
        }
        self.conclude(ended);
    }

    /// Ends a text without a length of its own where the budget has no room for more of it: its
    /// context is as long as that.
    pub(crate) fn end_for_room(&mut self, task: Task) {
        tracing::info!(
            model = task.loaded.name(),
            positions = task.tokens.len(),
            "a text ends where the budget has no more room for its KV"
        );
        self.complete(task, Some(FinishReason::ContextFull));
    }

    /// Ends a request that came to its end.
    fn complete(&mut self, mut task: Task, finish: Option<FinishReason>) {
        task.tell();
        let plan = task.loaded.model().plan();
        task.memory.free(&mut self.store, plan);
        let (loaded, counts, received) = (
            std::sync::Arc::clone(&task.loaded),
            task.counts,
            task.received,
        );
        let generated = task.generated();
        self.release_rest(task.model);
        match task.work {
            Work::Generate(g) => {
                let ended = summary(&g, finish, counts, received);
                let Generation {
                    events,
                    decoder,
                    mut stops,
                    ..
                } = *g;
                // Behind a stop string nothing is said; else what was held back is due now.
                let text = match finish {
                    Some(FinishReason::StopString { .. }) => String::new(),
                    _ => match stops.push(&decoder.finish()) {
                        Checked {
                            text,
                            stopped: Some(_),
                            ..
                        } => text,
                        Checked {
                            text,
                            stopped: None,
                            ..
                        } => text + &stops.finish(),
                    },
                };
                if !text.is_empty() {
                    // Places are free: a pass has rows of a request only if three are.
                    let _ = events.try_send(GenerateEvent::Piece {
                        text,
                        ids: Vec::new(),
                        scores: Vec::new(),
                        held: 0,
                    });
                }
                let _ = events.try_send(GenerateEvent::Done(ended));
            }
            Work::Score(s) => {
                let _ = s.reply.send(Ok(Scores {
                    tokens: s.scores,
                    cache: counts,
                }));
            }
            Work::Embed(mut e) => {
                let values = e.pooled();
                let _ = e.reply.send(Ok(Embedding {
                    values,
                    cache: counts,
                }));
            }
        }
        tracing::debug!(model = loaded.name(), generated, "a request is done");
    }

    /// Gives back what only running requests need, and publishes, so that a client that reads the
    /// end of its request and then asks for the status sees a state after it.
    pub(crate) fn release_rest(&mut self, model: ModelId) {
        if !self.all_tasks().any(|t| t.model == model && t.begun) {
            self.store.cache.request_end(model);
            let entry = self.models.iter_mut().find(|e| e.id == model);
            if let Some(entry) = entry {
                if let Some(predictor) = &entry.predictor {
                    self.store.cache.request_end(predictor.id);
                }
                if let Some(states) = &mut entry.states {
                    states.free(&mut self.store);
                }
                if let Some(id) = entry.draft.as_ref().map(|d| d.id) {
                    self.rest_draft_model(id);
                }
            }
        }
        self.note_wanted_weights();
        self.free_idle_scratch();
        self.finish_shrink();
        self.publish(true);
    }

    /// Whether a request outside of the pass under way has more than a token to compute.
    pub(crate) fn prompts_go_on(&self) -> bool {
        let begun = self.all_tasks().filter(|t| t.begun);
        begun.into_iter().any(|t| !t.is_complete_at(t.n_past + 1))
    }
}

/// Why a pass is to end: nobody waits for any of it any more.
pub(crate) fn nobody_waits(members: &[Member]) -> Option<Error> {
    let mut reasons = members.iter().map(|m| m.task.ended());
    reasons.try_fold(None, |_, reason| reason.map(Some))?
}

fn summary(
    g: &Generation,
    finish: Option<FinishReason>,
    cache: RequestCacheUse,
    received: Instant,
) -> GenerateSummary {
    let first = g.first_token.unwrap_or(received);
    let decoding = g
        .last_token
        .unwrap_or(first)
        .duration_since(first)
        .as_secs_f64();
    let after_first = f64::from(g.generated.saturating_sub(1));
    GenerateSummary {
        finish: finish.unwrap_or(FinishReason::MaxTokens),
        prompt_tokens: g.n_prompt as u32,
        reused_tokens: g.reused,
        generated_tokens: g.generated,
        drafted_tokens: g.drafted.0,
        accepted_tokens: g.drafted.1,
        queued: g.started.unwrap_or(first).duration_since(received),
        ttft: first.duration_since(received),
        decode_tokens_per_s: if decoding > 0.0 {
            after_first / decoding
        } else {
            0.0
        },
        longest_gap: g.gaps.longest(),
        cache,
    }
}
