//! Runs chunks of prompts a few steps at a time, with passes of decoding requests between; see
//! [`crate::pass::interleave`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::ALIGNMENT;
use rocmforge_scheduler::{PassPlan, SpanPlan};
use rocmforge_tensor_cache::ModelId;

use crate::actor::accounts::{account_behind, account_tokens, occupant};
use crate::actor::engine::Engine;
use crate::actor::step::Outcome;
use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::pass::interleave::{CHUNK_ROWS_MIN, Interleaved, LAST_PART};
use crate::pass::member::{Member, nobody_waits};
use crate::pass::prepared::PassRequests;
use crate::pass::share;
use crate::pass::stepwise::{StepProgress, Stepwise};
use crate::request::task::{Task, Work};
use crate::request::time_account::Occupant;
use crate::request::time_book::SpentSince;

/// State of the decode passes that run while a chunk of prompts is under way.
struct Tokens {
    /// The first pass of decoding requests, with all that may generate another token.
    all: PassPlan,
    /// The decode pass that runs next, and its requests; `None` if no request decodes any more.
    next: Option<(PassPlan, Vec<Member>)>,
    ended: Vec<(Task, Outcome)>,
    /// Requests whose decode pass failed, the error, and whether the pass had begun computing.
    failed: Option<(Vec<Member>, Error, bool)>,
    /// Time that the decode passes took together.
    took: Duration,
    /// Waits for uploads and CPU time of the chunk before the last decode pass.
    spent: SpentSince,
    /// Model and client that the chunk of prompts belongs to.
    prompts: Option<Occupant>,
}

impl Engine {
    /// Whether a model's prompts run in steps between decode passes: a MoE model that is fully
    /// resident, whose requests have no images, while no other model has requests in work.
    pub(crate) fn interleaves(&self, model: ModelId) -> bool {
        let wanted = self.config.interleave.unwrap_or(self.memory.store.records);
        let fits = self.memory.store.cache.fits(model) && !self.memory.cpu.is_always();
        if !wanted || !fits || self.speculation.is_on {
            return false;
        }
        let Some(entry) = self.models.get(model) else {
            return false;
        };
        let drafts = self.speculation.beside(model).next().is_some();
        let stats = self.memory.store.cache.model_stats(model);
        let mut others = self.requests.all().filter(|t| t.begun && t.model != model);
        let mut mine = self.requests.tasks.values().filter(|t| t.model == model);
        !self.interleaving.is_declined(model)
            && !drafts
            && entry.routes()
            && stats.usage.segments_resident == stats.segments
            && others.next().is_none()
            && mine.all(|t| matches!(t.work, Work::Generate(_)))
    }

    /// Splits a pass into a chunk of prompts and the decode passes that run between its steps;
    /// `None` if the pass runs as it is.
    pub(crate) fn interleaved(
        &mut self,
        plan: &PassPlan,
        members: &[Member],
    ) -> Option<Interleaved> {
        let (decode, prompts) = plan.spans.split_at(plan.decode_spans);
        let rows: u32 = prompts.iter().map(|s| s.rows).sum();
        let one_each = decode.iter().all(|s| s.rows == 1);
        let texts = members
            .iter()
            .all(|m| matches!(m.task.work, Work::Generate(_)));
        let model = ModelId(plan.model.0);
        if decode.is_empty() || rows < CHUNK_ROWS_MIN || !one_each || !texts {
            return None;
        }
        let chunk = members[plan.decode_spans..].iter();
        let ahead =
            chunk.map(|m| m.task.prompt_rows()).sum::<usize>() + self.requests.prompts(model).1;
        if !self.is_worth_stretching(ahead) || !self.interleaves(model) {
            return None;
        }
        let part = |spans: &[SpanPlan], decode_spans| {
            let of = |n: fn(&SpanPlan) -> u32| spans.iter().map(n).sum::<u32>();
            let rows = of(|s| s.rows);
            let outputs = plan.outputs_at_a_time.min(of(|s| s.outputs)).max(1);
            PassPlan {
                spans: spans.to_vec(),
                decode_spans,
                rows,
                outputs_at_a_time: outputs,
                scratch_bytes: self.sizes().scratch(model, rows, outputs),
                expects_next: true,
                ..plan.clone()
            }
        };
        let (tokens, prompts) = (part(decode, decode.len()), part(prompts, 0));
        let prompts_at = tokens.scratch_bytes.next_multiple_of(ALIGNMENT);
        if prompts_at + prompts.scratch_bytes > plan.scratch_bytes_max {
            self.interleaving.slice(model).declined = true;
            return None;
        }
        Some(Interleaved {
            tokens,
            prompts,
            prompts_at,
        })
    }

    /// Runs a chunk of prompts with decode passes between its steps, and handles its end.
    pub(crate) fn step_interleaved(
        &mut self,
        interleaved: Interleaved,
        members: Vec<Member>,
        begun: Instant,
    ) {
        let Interleaved {
            tokens,
            prompts,
            prompts_at,
        } = interleaved;
        let mut of_tokens = members;
        self.account_between(&mut of_tokens, begun);
        let mut of_prompts = of_tokens.split_off(tokens.decode_spans);
        let waiting = of_prompts.len() + self.requests.prompts(ModelId(tokens.model.0)).0;
        let whose = occupant(&of_tokens);
        let mut tokens = Tokens {
            all: tokens.clone(),
            next: Some((tokens, of_tokens)),
            ended: Vec::new(),
            failed: None,
            took: Duration::ZERO,
            spent: SpentSince::default(),
            prompts: occupant(&of_prompts),
        };
        let ran = self.run_chunk(&prompts, prompts_at, &mut of_prompts, &mut tokens, waiting);
        let took = self.now() - begun;
        self.charge(ModelId(prompts.model.0), took, true);
        let Tokens {
            next,
            mut ended,
            mut failed,
            took,
            spent,
            ..
        } = tokens;
        // Who was to go on when the chunk ended, or failed, has computed nothing.
        for member in next.into_iter().flat_map(|(_, members)| members) {
            self.requests.put_back(member.task);
        }
        self.account_chunk(&mut of_prompts, whose, (took, spent));
        match ran {
            Ok(()) => {
                self.requests.passes_before_admission =
                    self.requests.passes_before_admission.saturating_sub(1);
                ended.extend(self.take_back(of_prompts));
            }
            // Who reads is not concerned when nobody waits for the prompts any more.
            Err(error) if nobody_waits(&of_prompts).is_some() => {
                self.pass_failed(of_prompts, error);
            }
            Err(error) => {
                of_prompts.extend(failed.take().into_iter().flat_map(|(members, ..)| members));
                self.pass_failed(of_prompts, error);
            }
        }
        if let Some((members, error, computing)) = failed {
            self.space.computing = computing;
            self.pass_failed(members, error);
        }
        self.conclude(ended);
    }

    /// Runs a chunk of prompts with decode passes between its steps.
    fn run_chunk(
        &mut self,
        prompts: &PassPlan,
        prompts_at: u64,
        members: &mut [Member],
        tokens: &mut Tokens,
        waiting: usize,
    ) -> Result<(), Error> {
        self.space.computing = false;
        let model = ModelId(prompts.model.0);
        let both = PassPlan {
            scratch_bytes: prompts_at + prompts.scratch_bytes,
            ..prompts.clone()
        };
        let all = members.iter().chain(tokens.next.iter().flat_map(|n| &n.1));
        let anew = all.map(|m| m.task.compactions).max();
        self.ensure_scratch(model, &both, anew.unwrap_or(0))?;
        let scratch_at = self.space.scratch_at(&self.memory);
        let now = self.now();
        let prepared = self.prepare(prompts, members, now)?;
        let pages = prepared.pages(members);
        let rows = prepared.rows(members, prompts.decode_spans, &pages, &self.memory);
        let prompts_at = scratch_at + prompts_at;
        let pass = prepared.pass(prompts, &rows, prompts_at, self.space.prefetch);
        let mut counts = RequestCacheUse::default();
        let threads = Arc::clone(&self.space.row_threads);
        let mut client = PassRequests::new(&rows, members, None, &threads);
        let inputs = &prepared.inputs;
        let begun = Stepwise::begin(&mut self.memory, &pass, inputs, &mut counts, &mut client);
        let ran = begun.and_then(|chunk| self.run_steps(chunk, tokens, scratch_at, waiting));
        self.requests.times.sampling += client.sampling;
        self.memory.store.cache.pass_end(model);
        self.put_back(prepared, members, counts);
        ran
    }

    /// Runs a chunk's steps one after the other, with decode passes between them.
    fn run_steps(
        &mut self,
        mut chunk: Stepwise<'_, '_>,
        tokens: &mut Tokens,
        scratch_at: u64,
        waiting: usize,
    ) -> Result<(), Error> {
        let clock = self.memory.store.clock;
        let mut last = None;
        loop {
            let allowed = self.tokens_between(tokens, scratch_at, waiting, &mut last);
            let begun = clock.now();
            let mut longest = Duration::ZERO;
            self.space.computing = true;
            let goes_on = loop {
                let step = clock.now();
                if chunk.go_on(&mut self.memory)? == StepProgress::ToTheHead {
                    break false;
                }
                if longest.is_zero() {
                    self.requests.send_all();
                }
                let now = clock.now();
                longest = longest.max(now - step);
                let next = (now - begun + longest).as_secs_f64();
                if allowed.is_some_and(|allowed| next >= allowed) {
                    break true;
                }
            };
            if !goes_on {
                // What is between two chunks takes a while.
                let took = (clock.now() - begun).as_secs_f64();
                if allowed.is_some_and(|s| took > s * LAST_PART) {
                    self.tokens_between(tokens, scratch_at, waiting, &mut last);
                    self.requests.send_all();
                }
                self.space.computing = true;
                // It waits for its uploads, and so comes to its end.
                return chunk.end(&mut self.memory).map(|_| ());
            }
        }
    }

    /// Runs the next decode pass, and returns how many seconds the chunk may go on before the one
    /// after; `None` if no request decodes any more.
    fn tokens_between(
        &mut self,
        tokens: &mut Tokens,
        scratch_at: u64,
        waiting: usize,
        last: &mut Option<Instant>,
    ) -> Option<f64> {
        let (plan, mut members) = tokens.next.take()?;
        let begun = self.now();
        if let Some(whose) = tokens.prompts {
            account_behind(&mut members, whose, begun);
        }
        tokens.spent = tokens.spent.and(self.spent());
        self.space.computing = false;
        if let Err(error) = self.run_pass_in(scratch_at, &plan, &mut members) {
            tokens.failed = Some((members, error, self.space.computing));
            return None;
        }
        self.interleaving.passes += 1;
        let now = self.now();
        tokens.took += now - begun;
        account_tokens(&mut members, now, self.spent());
        let (model, rows) = (ModelId(plan.model.0), plan.rows as usize);
        let decoding = members.len();
        let ended = self.take_back(members);
        tokens
            .ended
            .extend(ended.into_iter().map(|(mut task, outcome)| {
                task.tell();
                (task, outcome)
            }));
        let entry = self.models.get(model)?;
        // Passes here may wait for what a chunk has queued.
        let alone = entry.times.recent(rows);
        let alone = alone.unwrap_or_else(|| (now - begun).as_secs_f64());
        let longer = alone * share::longer(waiting, decoding);
        if let Some(last) = last.replace(now) {
            let took = (now - last).as_secs_f64();
            let slice = self.interleaving.slice(model);
            slice.note(longer, alone + longer, took);
        }
        let seconds = self.interleaving.slice(model).seconds(longer);
        // A gap that is promised is held whatever pays.
        let seconds = self
            .own_slack(model)
            .map_or(seconds, |slack| seconds.min(slack));
        tokens.next = self.next_tokens(&tokens.all);
        tokens.next.is_some().then_some(seconds)
    }

    /// The decode pass of `plan` that runs next beside a chunk of prompts.
    fn next_tokens(&mut self, plan: &PassPlan) -> Option<(PassPlan, Vec<Member>)> {
        let now = self.now();
        for span in &plan.spans {
            if let Some(task) = self.requests.tasks.get(&span.seq) {
                let ready = task.reader_has_room() && task.ended(now).is_none();
                self.requests.scheduler.set_ready(span.seq, ready);
            }
        }
        let next = self.requests.scheduler.next_tokens(plan)?;
        let members = self.requests.take(&next.spans);
        Some((next, members))
    }
}
