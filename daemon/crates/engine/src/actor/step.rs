//! Runs passes: rows of the sequences that the scheduler chose, and the outcome of each sequence.

use std::time::{Duration, Instant};

use rocmforge_device::Scratch;
use rocmforge_scheduler::{Next, PassPlan, SeqId, SpanResult};
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::api::error::Error;
use crate::api::{
    Embedding, FinishReason, GenerateEvent, GenerateSummary, RequestCacheUse, Scores,
};
use crate::features::speculation::draft_choice::rest_draft_model;
use crate::features::speculation::drafts::By;
use crate::features::speculation::mtp_pass::wants_stream;
use crate::pass::member::{Member, RowsOutcome};
use crate::pass::prepared::{PassRequests, Prepared};
use crate::pass::slices;
use crate::pass::suspended::PassUnderWay;
use crate::request::stop::Checked;
use crate::request::task::{Generation, Task, Work};

/// When a slice of a pass stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// Stop at the first step after the slice's time is used up.
    ItsTime,
    /// Run to the end of the pass, without a stop between its steps.
    TheEnd,
}

/// Result of one attempt to run a slice of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stepped {
    /// A slice ran, or requests got events.
    Ran,
    /// All passes wait for the device; nothing ran.
    Looked,
    /// No pass was ready to run.
    Nothing,
}

/// How a request left a pass: `Some` reason if it is complete, `None` if it goes on, or the error
/// that ends it.
pub(crate) type Outcome = Result<Option<FinishReason>, Error>;

impl Engine {
    /// Runs the next slice of a pass, or completes passes whose results have been read.
    pub(crate) fn step(&mut self) -> Stepped {
        self.look_at_timed();
        if self.end_read_passes() {
            return Stepped::Ran;
        }
        let is_full = match self.requests.promises.any {
            // A promised pass begins when it has to, behind as little as possible.
            true => self.device_is_full(),
            false => self.device_is_ahead(),
        };
        if is_full {
            return Stepped::Looked;
        }
        let plan = match self.next_slice() {
            Some(Next::Pass(mut plan)) => {
                // Others' slices come between, and not whole turns.
                let model = ModelId(plan.model.0);
                plan.expects_next = plan.expects_next || self.stays_among_asked(model);
                plan
            }
            Some(Next::GoOn(model)) => {
                let waits = self.requests.suspended.of(ModelId(model.0));
                if waits.is_some_and(|pass| pass.waits(&self.memory)) && self.all_wait() {
                    return Stepped::Looked;
                }
                self.memory.store.take_refused_bytes();
                match self.requests.suspended.take(ModelId(model.0)) {
                    Some(pass) => self.run_slice(pass, Until::ItsTime),
                    None => self.requests.scheduler.pass_ended(model),
                }
                return Stepped::Ran;
            }
            None if self.requests.send_all() => {
                // Whether readers have room is looked at again before the engine sleeps: they
                // wake it by what was sent.
                return Stepped::Ran;
            }
            // Nobody who runs can go on: others need not wait for a pass.
            None => {
                return match std::mem::take(&mut self.requests.passes_before_admission) {
                    0 => Stepped::Nothing,
                    _ => Stepped::Ran,
                };
            }
        };
        let members = self.requests.take(&plan.spans);
        let alone = Self::runs_alone(&members);
        if alone && !self.requests.suspended.is_empty() {
            // What comes to its end meanwhile may take memory from requests, but not from those
            // that were taken: so they are put back, and taken again behind it.
            for member in members {
                self.requests.put_back(member.task);
            }
            self.requests.scheduler.pass_ended(plan.model);
            self.finish_passes();
            return Stepped::Ran;
        }
        // What an upload ahead of need was refused is not this pass's affair.
        self.memory.store.take_refused_bytes();
        if !alone
            && self.requests.suspended.is_empty()
            && let Some(interleaved) = self.interleaved(&plan, &members)
        {
            let begun = self.now();
            let model = plan.model;
            self.step_interleaved(interleaved, members, begun);
            self.requests.scheduler.pass_ended(model);
            return Stepped::Ran;
        }
        self.begin_pass(plan, members);
        Stepped::Ran
    }

    /// Runs the first slice of a pass.
    fn begin_pass(&mut self, plan: PassPlan, mut members: Vec<Member>) {
        let alone = Self::runs_alone(&members);
        if alone {
            self.gather(&mut members);
            self.memory.store.take_refused_bytes();
        }
        let begun = self.now();
        match self.make_ready(&plan, &mut members) {
            Ok(prepared) => {
                tracing::trace!(plan.rows, sequences = members.len(), "a pass");
                let pass = PassUnderWay::new(plan, members, prepared);
                let until = match alone {
                    true => Until::TheEnd,
                    false => Until::ItsTime,
                };
                self.run_slice(pass, until);
            }
            Err(error) => {
                let took = self.now() - begun;
                self.charge(ModelId(plan.model.0), took, true);
                self.requests.scheduler.pass_ended(plan.model);
                self.pass_failed(members, error);
            }
        }
    }

    fn make_ready(&mut self, plan: &PassPlan, members: &mut [Member]) -> Result<Prepared, Error> {
        self.space.computing = false;
        let model = ModelId(plan.model.0);
        let anew = members.iter().map(|m| m.task.compactions).max();
        self.ensure_scratch(model, plan, anew.unwrap_or(0))?;
        self.space.note_last(model);
        let now = self.now();
        self.prepare(plan, members, now)
    }

    /// Completes a pass after its last slice, which took `last` and ended at `ended`.
    pub(crate) fn complete_pass(&mut self, mut pass: PassUnderWay, last: Duration, ended: Instant) {
        let model = pass.model();
        self.account_pass(&mut pass);
        let PassUnderWay {
            plan,
            mut members,
            prepared,
            counts,
            took,
            ..
        } = pass;
        let missed = counts.misses > 0;
        self.put_back(prepared, &mut members, counts);
        self.requests.passes_before_admission =
            self.requests.passes_before_admission.saturating_sub(1);
        self.note_pass(&plan, took);
        if !missed {
            self.note_resident_pass(&plan, took);
        }
        self.background.note_read(model, ended);
        self.draft_behind(&plan, &mut members);
        let behind = self.now() - ended;
        self.charge(model, last + behind, true);
        self.requests.scheduler.pass_ended(plan.model);
        let ended = self.take_back(members);
        self.conclude(ended);
    }

    /// Runs a whole pass whose scratch lies at the arena's offset `scratch_at`.
    pub(crate) fn run_pass_in(
        &mut self,
        scratch_at: u64,
        plan: &PassPlan,
        members: &mut [Member],
    ) -> Result<(), Error> {
        let n_tokens = plan.rows;
        tracing::trace!(n_tokens, sequences = members.len(), "a pass");
        let now = self.now();
        let prepared = self.prepare(plan, members, now)?;
        let pages = prepared.pages(members);
        let rows = prepared.rows(members, plan.decode_spans, &pages, &self.memory);
        let pass = prepared.pass(plan, &rows, scratch_at, self.space.prefetch);
        let mut counts = RequestCacheUse::default();
        self.space.computing = true;
        let others = Some(&mut self.requests.tasks);
        let mut client = PassRequests::new(&rows, members, others, &self.space.row_threads);
        let inputs = &prepared.inputs;
        let ran = slices::run(&mut self.memory, &pass, inputs, &mut counts, &mut client);
        self.requests.times.sampling += client.sampling;
        let kept = ran.and_then(|()| self.keep_stream(&prepared, scratch_at, members));
        self.put_back(prepared, members, counts);
        kept
    }

    /// Drafts the next tokens of a pass's requests. Sends the pass's own tokens first, so that they
    /// do not wait for the drafts.
    fn draft_behind(&mut self, plan: &PassPlan, members: &mut [Member]) {
        let draft = self.speculation.used_draft_model(ModelId(plan.model.0));
        if draft.is_some() || members.iter().any(|m| m.task.predicts) {
            for member in &mut *members {
                member.task.tell();
            }
        }
        let begun = self.now();
        let (speculation, mut cx) = self.speculation();
        if speculation.predict(&mut cx, plan, members, begun) {
            self.stop_drafting(|model| model.0 == plan.model.0);
        }
        let (speculation, mut cx) = self.speculation();
        speculation.draft_ahead(&mut cx, plan, members);
    }

    /// Copies from scratch the hidden states that the MTP head needs, before another pass
    /// overwrites them.
    pub(crate) fn keep_stream(
        &mut self,
        prepared: &Prepared,
        scratch_at: u64,
        members: &[Member],
    ) -> Result<(), Error> {
        let Some(stream) = prepared.plan().stream else {
            return Ok(());
        };
        if !wants_stream(members) {
            return Ok(());
        }
        let layout = &prepared.layout;
        let width = layout.bufs[usize::from(stream.0)].width as usize;
        let rows: u32 = members.iter().map(|m| m.span.rows).sum();
        let read_into = &mut self.space.stream;
        read_into.resize(rows as usize * width, 0.0);
        let scratch = Scratch {
            layout,
            base: scratch_at,
        };
        let read = self.memory.store.device.read(scratch, stream, read_into);
        read.map_err(|e| self.memory.store.device_error(Some(prepared.model), e))
    }

    /// Returns requests whose rows were computed to the engine. Those that are complete have freed
    /// their memory and are returned here with their outcome.
    pub(crate) fn take_back(&mut self, members: Vec<Member>) -> Vec<(Task, Outcome)> {
        let results: Vec<SpanResult> = members.iter().map(Member::result).collect();
        self.requests.scheduler.computed(&results);
        let mut ended = Vec::new();
        let now = self.now();
        for mut member in members {
            self.note_tokens(&mut member, now);
            let (rows, right) = (member.rows() as usize, member.right());
            let Member {
                mut task, stepped, ..
            } = member;
            task.n_past += rows;
            if !matches!(stepped, RowsOutcome::Failed(_)) {
                let (model, past) = (task.loaded.model(), task.n_past);
                let (memory, tokens) = (&mut self.memory, &task.tokens);
                task.memory
                    .hand_over(memory, model, tokens, past, right as usize);
            }
            self.speculation
                .take_states_back(&mut self.memory, &mut task, right);
            let is_bad = matches!(&stepped, RowsOutcome::Failed(Error::BadModel { .. }));
            let overflows = is_bad && task.adapters.is_some();
            let outcome = match stepped {
                RowsOutcome::GoesOn | RowsOutcome::Appended => {
                    self.requests.put_back(task);
                    continue;
                }
                RowsOutcome::Done(finish) => Ok(finish),
                RowsOutcome::Failed(_) if overflows => Err(overflow_of_adapters(&task)),
                RowsOutcome::Failed(error) => Err(error),
            };
            let plan = task.loaded.model().plan();
            task.memory.free(&mut self.memory, plan);
            // Nobody is to begin with what may be wrong, what this one had among it.
            match &outcome {
                Ok(_) => {}
                // Only requests with the same adapters at the same scales have such pages.
                Err(_) if overflows => {}
                Err(Error::BadModel { .. } | Error::DataLoss { .. }) => {
                    self.memory.distrust_prefixes(task.model);
                }
                // What a client can cause costs nothing on disk.
                Err(_) => {
                    self.memory.forget_prefixes(task.model);
                }
            }
            ended.push((task, outcome));
        }
        ended
    }

    /// Records the gap before a generation's new tokens, and how many of its draft tokens were
    /// accepted.
    fn note_tokens(&mut self, member: &mut Member, now: Instant) {
        let (made, right) = (member.drafts(), member.right());
        let (model, told) = (member.task.model, member.told);
        let class = member.task.asker.class;
        let Work::Generate(g) = &mut member.task.work else {
            return;
        };
        if told == 0 {
            return;
        }
        let (counts, reasons) = (&member.task.counts, &self.memory.store.reasons);
        let uploaded = reasons.uploaded_bytes(model);
        member.task.times.note_token(uploaded, counts.host_bytes);
        let uploads = self.memory.store.reasons.waited.all;
        let spent = self.requests.suspended.spent(model, uploads);
        if let Some(gap) = g.gaps.note(now, spent) {
            tracing::debug!(model = model.0, took = ?gap.took, cause = gap.cause.name(), "a broken promise");
            self.requests.promises.broken.count(class, gap.cause);
        }
        if made == 0 {
            return;
        }
        if g.drafts.by() == By::Model
            && let Some(pair) = self.speculation.draft_model_mut(model)
        {
            pair.note(made as usize, right as usize);
        }
        g.drafts.note(made as usize, right as usize);
        g.drafted = (g.drafted.0 + made, g.drafted.1 + right);
    }

    pub(crate) fn conclude(&mut self, ended: Vec<(Task, Outcome)>) {
        for (task, outcome) in ended {
            match outcome {
                Ok(finish) => self.complete(task, finish),
                Err(error) => self.finish(task, Some(error)),
            }
        }
    }

    /// Handles a failed pass: repeats it with less memory, or fails its requests, except those that
    /// have their token already.
    pub(crate) fn pass_failed(&mut self, members: Vec<Member>, error: Error) {
        let (told, failed): (Vec<Member>, Vec<Member>) = members
            .into_iter()
            .partition(|m| !matches!(m.stepped, RowsOutcome::GoesOn));
        let ended = self.take_back(told);
        let seqs: Vec<SeqId> = failed.iter().map(|m| m.span.seq).collect();
        let now = self.now();
        let nobody_waits = failed.iter().all(|m| m.task.ended(now).is_some());
        for mut member in failed {
            let task = &mut member.task;
            self.speculation.take_states_back(&mut self.memory, task, 0);
            self.requests.put_back(member.task);
        }
        // The next look at the requests ends those that nobody waits for, each with its own reason.
        if !nobody_waits {
            self.do_again(&seqs, error);
        }
        self.conclude(ended);
    }

    /// Ends a generation without `max_tokens` if the budget has no room for more of its KV cache:
    /// its context is full.
    pub(crate) fn end_for_room(&mut self, task: Task) {
        tracing::info!(
            model = task.loaded.name(),
            positions = task.tokens.len(),
            "a text ends where the budget has no more room for its KV"
        );
        self.complete(task, Some(FinishReason::ContextFull));
    }

    /// Completes a request that has ended: frees its memory and sends its summary.
    fn complete(&mut self, mut task: Task, finish: Option<FinishReason>) {
        task.tell();
        self.close_account(&mut task);
        let plan = task.loaded.model().plan();
        task.memory.free(&mut self.memory, plan);
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
                send_end(*g, finish, ended);
            }
            Work::Score(s) => {
                let _ = s.reply.send(Ok(Scores {
                    tokens: s.scores,
                    cache: counts,
                }));
            }
            Work::Tower(t) => {
                let (reply, rows) = t.into_rows();
                let _ = reply.send(Ok(rows));
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

    /// Frees what only running requests of the model need, and publishes, so that a client that
    /// asks for the status after the end of its request sees the state after it.
    pub(crate) fn release_rest(&mut self, model: ModelId) {
        if !self.requests.any_begun(model) {
            self.memory.store.cache.request_end(model);
            let (speculation, mut cx) = self.speculation();
            if let Some(draft) = speculation.rest(cx.memory, model) {
                rest_draft_model(&mut cx, draft);
            }
        }
        self.note_wanted_weights();
        self.free_idle_scratch();
        self.finish_shrink();
        self.publish(true);
    }
}

/// The error of a request whose logits overflow because of its LoRA adapters (the client chooses
/// their scales), not because of the model's file.
fn overflow_of_adapters(task: &Task) -> Error {
    Error::InvalidArgument {
        field: "lora",
        message: format!(
            "the logits of model '{}' are not finite with these adapters; give smaller scales",
            task.loaded.name()
        ),
    }
}

/// Sends the rest of a generation's text, and the event that ends it.
fn send_end(g: Generation, finish: Option<FinishReason>, ended: GenerateSummary) {
    let Generation {
        events,
        decoder,
        mut stops,
        ..
    } = g;
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
        promised_gap: g.gaps.told(),
        cache,
    }
}
