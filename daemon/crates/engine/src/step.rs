//! One pass: rows of the sequences that the scheduler chose, and what came of each of them.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_device::{ALIGNMENT, Scratch, ScratchLayout, Span};
use rocmforge_ops::{Plan, RowCounts};
use rocmforge_scheduler::{PassPlan, SeqId, SpanResult};
use rocmforge_tensor_cache::{BlockKind, ModelId};

use crate::actor::Engine;
use crate::api::{
    Embedding, FinishReason, GenerateEvent, GenerateSummary, RequestCacheUse, Scores,
};
use crate::embedding_rows;
use crate::error::Error;
use crate::kv::SequenceMemory;
use crate::member::{Member, Stepped, interest};
use crate::pass::{self, Pass, RowOutput};
use crate::rotations::{self, Positions};
use crate::speculate::By;
use crate::stop::Checked;
use crate::task::{Generation, Task, Work};

/// How a request ended.
type Outcome = Result<Option<FinishReason>, Error>;

impl Engine {
    /// Runs the next pass. Whether there was one.
    pub(crate) fn step(&mut self) -> bool {
        let Some(plan) = self.next_pass() else {
            if self.tell_all() {
                // Whether readers have room is looked at again before the engine sleeps: they
                // wake it by what was sent.
                return true;
            }
            // Nobody who runs can go on: others need not wait for a pass.
            return std::mem::take(&mut self.passes_before_admission) > 0;
        };
        let mut members: Vec<Member> = plan
            .spans
            .iter()
            .map(|span| {
                let task = self.tasks.remove(&span.seq);
                Member::new(*span, task.expect("the scheduler knows the same requests"))
            })
            .collect();
        // What an upload ahead of need was refused is not this pass's affair.
        self.store.take_refused_bytes();
        let begun = Instant::now();
        match self.run_pass(&plan, &mut members) {
            Ok(()) => {
                self.passes_before_admission = self.passes_before_admission.saturating_sub(1);
                self.note_pass(&plan, begun.elapsed());
                self.tell_before_drafts(&mut members);
                self.predict(&plan, &mut members);
                self.draft_ahead(&plan, &mut members);
                let ended = self.take_back(members);
                self.conclude(ended);
            }
            Err(error) => self.pass_failed(members, error),
        }
        true
    }

    fn run_pass(&mut self, plan: &PassPlan, members: &mut [Member]) -> Result<(), Error> {
        let first = members.first().ok_or_else(|| {
            Error::Internal("the scheduler planned a pass without rows".to_owned())
        })?;
        let (model, loaded) = (first.task.model, Arc::clone(&first.task.loaded));
        self.computing = false;
        let n_tokens = plan.rows as usize;
        tracing::trace!(n_tokens, sequences = members.len(), "a pass");
        let anew = members.iter().map(|m| m.task.compactions).max();
        let anew = anew.unwrap_or(0);
        self.ensure_scratch(model, plan, anew)?;
        self.lend_states(model, members)?;
        let of_model = loaded.model().plan();
        let layout = of_model.scratch(RowCounts {
            tokens: n_tokens as u64,
            outputs: u64::from(plan.outputs_at_a_time),
        });
        let scratch_bytes = self.scratch.map_or(0, |s| s.1);
        for Member { span, task, .. } in &mut *members {
            let end = task.n_past + span.rows as usize;
            // One that found no room in one piece has its blocks side by side from the beginning.
            let ahead = match task.compactions {
                0 | 1 => end,
                _ => self
                    .scheduler
                    .sequence(task.seq)
                    .map_or(end, |s| s.promised as usize),
            };
            let (of, rows) = ((model, of_model), (task.n_past, end));
            task.memory.prepare(&mut self.store, of, rows, ahead)?;
            let held = crate::kv::bytes_for(of_model, end, span.rows as usize);
            task.counts.block_bytes = task.counts.block_bytes.max(held + scratch_bytes);
            if let Work::Generate(g) = &mut task.work {
                g.started.get_or_insert_with(Instant::now);
            }
        }
        self.set_angles(model, &*members)?;
        self.inputs.resize_with(of_model.inputs.len(), Vec::new);
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        for Member { span, task, .. } in &*members {
            ids.extend(task.row_ids(span.rows as usize));
        }
        let waiting = self.store.files.begin(loaded.name(), loaded.path());
        for (input, rows) in of_model.inputs.iter().zip(&mut self.inputs) {
            embedding_rows::rows(&loaded, &input.table, &ids, rows)?;
        }
        drop(waiting);
        self.ids = ids;

        // Behind this the requests change with each row that comes, their memory does not.
        let memories: Vec<SequenceMemory> = members
            .iter_mut()
            .map(|m| std::mem::take(&mut m.task.memory))
            .collect();
        let pages: Vec<Vec<&[u64]>> = memories.iter().map(SequenceMemory::pages).collect();
        let mut spans: Vec<Span<'_>> = Vec::with_capacity(members.len());
        // Of each member.
        let mut first_rows = Vec::with_capacity(members.len());
        // The wanted rows, and whose each of them is.
        let (mut outputs, mut owners) = (Vec::new(), Vec::new());
        let (mut hidden, mut hidden_owners) = (Vec::new(), Vec::new());
        let mut first_row = 0;
        for (i, member) in members.iter().enumerate() {
            let n_rows = member.span.rows as usize;
            let span = Span {
                first_row,
                n_rows,
                first_position: member.task.n_past as u32,
                kv_pages: &pages[i],
                state: memories[i].state_offset(&self.store, 0),
                state_out: memories[i].state_offset(&self.store, 0),
                draft: false,
            };
            if i < plan.decode_spans {
                let state = |drafts| memories[i].state_offset(&self.store, drafts);
                spans.extend((0..n_rows).map(|row| Span {
                    first_row: first_row + row,
                    n_rows: 1,
                    first_position: span.first_position + row as u32,
                    state: state(row.saturating_sub(1)),
                    state_out: state(row),
                    draft: row > 0,
                    ..span
                }));
            } else {
                spans.push(span);
            }
            first_rows.push(first_row);
            first_row += n_rows;
            if let Work::Embed(e) = &member.task.work {
                let (task, begin) = (&member.task, first_row - n_rows);
                let end = task.n_past + n_rows;
                let wanted = e.wanted(task.n_past, end, task.tokens.len() - 1);
                hidden_owners.extend(wanted.clone().map(|_| i));
                hidden.extend(wanted.map(|position| (begin + position - task.n_past) as u32));
                continue;
            }
            let wanted = (first_row as u32 - member.span.outputs)..first_row as u32;
            owners.extend(wanted.clone().map(|_| i));
            outputs.extend(wanted);
        }
        owners.extend(hidden_owners);
        let (block, _) = self.scratch.expect("ensured above");
        let pass = Pass {
            model,
            plan: of_model,
            angles: &self.angles,
            spans: &spans,
            n_tokens,
            outputs: &outputs,
            hidden: &hidden,
            expects_next_pass: plan.expects_next,
            scratch: &layout,
            scratch_at: self.store.cache.block(block).offset,
            prefetch: self.prefetch,
            interest: interest(members),
        };
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
        // A pass goes on while somebody waits for any of it.
        let ended = || {
            let reasons = members.borrow();
            let mut reasons = reasons.iter().map(|m| m.task.ended());
            reasons.try_fold(None, |_, reason| reason.map(Some))?
        };
        let mut told = 0;
        let mut sink = |row: usize, found: RowOutput<'_>| {
            let owner: usize = owners[told];
            told += 1;
            members.borrow_mut()[owner].take(row - first_rows[owner], found);
            Ok(())
        };
        self.computing = true;
        let ran = pass::run(
            &mut self.store,
            &pass,
            &self.inputs,
            &mut counts,
            &ended,
            &begun,
            &mut sink,
        );
        let members = members.into_inner();
        for (member, memory) in members.iter_mut().zip(memories) {
            let task = &mut member.task;
            task.memory = memory;
            task.counts.hits += counts.hits;
            task.counts.misses += counts.misses;
            task.counts.uploaded_bytes += counts.uploaded_bytes;
            task.counts.host_bytes += counts.host_bytes;
        }
        ran?;
        self.keep_stream(model, of_model, &layout, members)
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
    fn tell_all(&mut self) -> bool {
        let told = self.tasks.values_mut().map(Task::tell);
        told.fold(false, |any, one| any | one)
    }

    /// Reads what the block that predicts needs of a pass: scratch is another's afterwards.
    fn keep_stream(
        &mut self,
        model: ModelId,
        plan: &Plan,
        layout: &ScratchLayout,
        members: &[Member],
    ) -> Result<(), Error> {
        let (Some(stream), Some((block, _))) = (plan.stream, self.scratch) else {
            return Ok(());
        };
        if !Self::wants_stream(members) {
            return Ok(());
        }
        let width = layout.bufs[usize::from(stream.0)].width as usize;
        let rows: u32 = members.iter().map(|m| m.span.rows).sum();
        self.stream.resize(rows as usize * width, 0.0);
        let base = self.store.cache.block(block).offset;
        let scratch = Scratch { layout, base };
        let read = self.store.device.read(scratch, stream, &mut self.stream);
        read.map_err(|e| self.store.device_error(Some(model), e))
    }

    /// Puts requests whose rows were computed back, and returns those that are done,
    /// which hold nothing any more.
    fn take_back(&mut self, members: Vec<Member>) -> Vec<(Task, Outcome)> {
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

    fn conclude(&mut self, ended: Vec<(Task, Outcome)>) {
        for (task, outcome) in ended {
            match outcome {
                Ok(finish) => self.complete(task, finish),
                Err(error) => self.finish(task, Some(error)),
            }
        }
    }

    /// A pass that failed: it is done again with less memory, or its requests fail, but for
    /// those that have their token.
    fn pass_failed(&mut self, members: Vec<Member>, error: Error) {
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

    /// Ends a request that came to its end.
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
                        } => text,
                        Checked {
                            text,
                            stopped: None,
                        } => text + &stops.finish(),
                    },
                };
                if !text.is_empty() {
                    // Places are free: a pass has rows of a request only if three are.
                    let _ = events.try_send(GenerateEvent::Piece {
                        text,
                        ids: Vec::new(),
                        scores: Vec::new(),
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
        if !self.tasks.values().any(|t| t.model == model && t.begun) {
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

    /// Has scratch for a pass. Of a request that is computed `anew`, since its blocks left no room
    /// in one piece, scratch takes all that it may have from the beginning: were it to grow behind
    /// pages, what it leaves would be lost to a segment again.
    fn ensure_scratch(&mut self, model: ModelId, plan: &PassPlan, anew: u32) -> Result<(), Error> {
        // The draft model's passes run behind, if there is room for theirs.
        let draft = self.draft_entry(model).filter(|d| d.is_used());
        let of_draft = draft.map(|d| d.id).map_or(0, |id| {
            let (rows, outputs) = (plan.rows as usize, plan.outputs_at_a_time as usize);
            self.scratch_bytes(id, rows, outputs)
        });
        let mut bytes = plan.scratch_bytes.max(of_draft.min(plan.scratch_bytes_max));
        // Of one that is computed anew in an empty arena the model may seem to fit.
        if anew > 1 || (anew > 0 && !self.store.cache.fits(model)) {
            bytes = bytes.max(plan.scratch_bytes_max / ALIGNMENT * ALIGNMENT);
        }
        if let Some((_, has)) = self.scratch {
            // What a long prompt took would be uploaded again for every token of
            // a model that does not fit.
            let spare = has / 2 > bytes && !self.store.cache.fits(model) && !self.prompts_go_on();
            if (bytes..=plan.scratch_bytes_max).contains(&has) && !spare {
                return Ok(());
            }
            self.free_scratch();
        }
        let (block, _) = self.store.reserve(BlockKind::Scratch, None, bytes)?;
        self.scratch = Some((block, bytes));
        Ok(())
    }

    /// Whether a request outside of the pass under way has more than a token to compute.
    fn prompts_go_on(&self) -> bool {
        let begun = self.tasks.values().filter(|t| t.begun);
        begun.into_iter().any(|t| !t.is_complete_at(t.n_past + 1))
    }

    /// Sets the rotations of a pass's rows.
    fn set_angles(&mut self, model: ModelId, members: &[Member]) -> Result<(), Error> {
        let entry = self
            .models
            .iter_mut()
            .find(|e| e.id == model)
            .expect("a request keeps its model registered");
        let plan = entry.loaded.model().plan();
        if entry.rope.is_empty() {
            let (name, path) = (entry.loaded.name(), entry.loaded.path());
            let _waiting = self.store.files.begin(name, path);
            entry.rope = rotations::tables(&entry.loaded, plan)?;
        }
        let sequences = members.iter().map(|m| Positions {
            first: m.task.n_past,
            n: m.span.rows as usize,
            reach: m.task.reach,
        });
        rotations::set_angles(plan, &entry.rope, sequences, &mut self.angles);
        Ok(())
    }
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
        cache,
    }
}
