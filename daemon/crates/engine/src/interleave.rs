//! Prompts of a mixture that go through the layers a few steps at a time, between passes of tokens.
//!
//! A pass that has rows of prompts beside tokens reads a dense model's weights once for both. A
//! mixture's rows go to experts of their own: beside 8 tokens, 8 rows of a prompt have a layer of
//! 128 experts read 82 of them where the tokens alone need 52, and so a pass has few rows of
//! prompts if tokens are not to wait long. Many rows read all experts once. So such a chunk is a
//! pass of its own, which stops between two steps whenever the tokens' next pass is due:
//!
//! ```text
//! tokens |####|      |####|      |####|      |####|
//! prompt |    |000111|    |223344|    |455667|    |88..   (layers of one chunk)
//! ```
//!
//! All that a pass has between two steps lies in its scratch. The two have parts of one block,
//! tokens the first one, as in passes of their own: their recordings stay valid.
//!
//! While a chunk is under way nobody is admitted and no command is taken, as in any pass; each
//! slice has a step at least, so it ends. Of a text that ends meanwhile the last tokens are told at
//! once, and its memory is given back; its end is told with the chunk's. Nor are tokens drafted.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use rocmforge_device::ALIGNMENT;
use rocmforge_ops::Step;
use rocmforge_scheduler::{PassPlan, SpanPlan};
use rocmforge_tensor_cache::ModelId;

use crate::actor::Engine;
use crate::api::RequestCacheUse;
use crate::error::Error;
use crate::member::Member;
use crate::pass::{Stepwise, Went};
use crate::share::TOLERANCE;
use crate::step::{Outcome, nobody_waits};
use crate::task::{Task, Work};

/// Rows of a chunk: each expert of 128 of which a row goes to 8 has 32, what the kernels for
/// many rows take at a time.
pub(crate) const CHUNK_ROWS: u32 = 512;

/// With fewer rows prompts go beside tokens.
const CHUNK_ROWS_MIN: u32 = 16;

/// A slice at first, in parts of what tokens may wait longer.
const SLICE_FIRST: f64 = 0.75;

/// What a slice loses, in such parts, when tokens took longer than they may, and what it gains when
/// they did not: so one of thirty may take longer. A slice ends with a layer, and layers of many
/// rows far into a text take a third of it: what tokens take in the mean says little of the
/// longest.
const TOO_LONG: f64 = 0.06;
const SHORT: f64 = 0.002;

/// The same when they took much less, by more than such a part.
const FAR_TOO_SHORT: f64 = 0.45;
const MUCH: f64 = 0.02;

/// Tokens have a pass at a chunk's end too if its last slice was longer than this part of one.
const LAST_PART: f64 = 0.125;

/// A pass taken apart.
pub(crate) struct Interleaved {
    tokens: PassPlan,
    prompts: PassPlan,
    /// Where the prompts' scratch begins in the block.
    prompts_at: u64,
}

/// How long a chunk goes on between two passes of tokens. It learns from the time that tokens
/// took from pass to pass: a device has work queued when a chunk stops.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slice {
    /// Seconds of the slice, in parts of those that tokens may wait longer.
    part: Option<f64>,
    /// There was no room for two scratches: prompts share passes until tokens have one alone.
    pub(crate) declined: bool,
}

impl Slice {
    /// Seconds of the next slice, where tokens may wait `longer` seconds longer than alone.
    fn seconds(self, longer: f64) -> f64 {
        self.part.unwrap_or(SLICE_FIRST) * longer
    }

    /// With such a slice tokens took `took` seconds from pass to pass, of `allowed`.
    fn note(&mut self, longer: f64, allowed: f64, took: f64) {
        let change = match (allowed * TOLERANCE - took) / longer {
            left if left < 0.0 => -TOO_LONG,
            left if left > FAR_TOO_SHORT => MUCH,
            _ => SHORT,
        };
        let part = self.part.unwrap_or(SLICE_FIRST) + change;
        self.part = Some(part.clamp(0.0, 1.0));
    }
}

/// The passes of tokens while a chunk is under way.
struct Tokens {
    /// The first of them, which has all that may have another.
    all: PassPlan,
    /// Who goes on.
    next: Option<(PassPlan, Vec<Member>)>,
    ended: Vec<(Task, Outcome)>,
    /// Whose pass failed, why, and whether it had come to computing.
    failed: Option<(Vec<Member>, Error, bool)>,
}

impl Engine {
    /// Whether a model's prompts are such chunks while others wait for tokens: a mixture of which
    /// all is resident, whose requests are texts, and nobody of another model waits for a pass.
    pub(crate) fn interleaves(&self, model: ModelId) -> bool {
        let wanted = self.config.interleave.unwrap_or(self.store.records);
        let fits = self.store.cache.fits(model) && !self.store.offload.is_always();
        if !wanted || !fits || self.speculates {
            return false;
        }
        let Some(entry) = self.models.iter().find(|e| e.id == model) else {
            return false;
        };
        let predicts = entry.predictor.as_ref().is_some_and(|p| p.on);
        let drafts = entry.draft.as_ref().is_some_and(|d| d.is_used());
        let mut steps = entry.loaded.model().plan().steps.iter();
        let stats = self.store.cache.model_stats(model);
        let mut others = self.all_tasks().filter(|t| t.begun && t.model != model);
        let mut mine = self.tasks.values().filter(|t| t.model == model);
        !entry.slice.declined
            && !predicts
            && !drafts
            && steps.any(|step| matches!(step, Step::Experts { .. }))
            && stats.usage.segments_resident == stats.segments
            && others.next().is_none()
            && mine.all(|t| matches!(t.work, Work::Generate(_)))
    }

    /// A pass taken apart, if its prompts are to be a chunk between passes of its tokens.
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
        let ahead = chunk.map(|m| m.task.prompt_rows()).sum::<usize>() + self.prompts(model).1;
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
                scratch_bytes: self.scratch_bytes(model, rows as usize, outputs as usize),
                expects_next: true,
                ..plan.clone()
            }
        };
        let (tokens, prompts) = (part(decode, decode.len()), part(prompts, 0));
        let prompts_at = tokens.scratch_bytes.next_multiple_of(ALIGNMENT);
        if prompts_at + prompts.scratch_bytes > plan.scratch_bytes_max {
            let entry = self.models.iter_mut().find(|e| e.id == model)?;
            entry.slice.declined = true;
            return None;
        }
        Some(Interleaved {
            tokens,
            prompts,
            prompts_at,
        })
    }

    /// Runs a chunk of prompts and, between its steps, passes of tokens.
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
        let mut of_prompts = of_tokens.split_off(tokens.decode_spans);
        let waiting = of_prompts.len() + self.prompts(ModelId(tokens.model.0)).0;
        let mut tokens = Tokens {
            all: tokens.clone(),
            next: Some((tokens, of_tokens)),
            ended: Vec::new(),
            failed: None,
        };
        let ran = self.run_chunk(&prompts, prompts_at, &mut of_prompts, &mut tokens, waiting);
        self.charge(ModelId(prompts.model.0), begun.elapsed(), true);
        let Tokens {
            next,
            mut ended,
            mut failed,
            ..
        } = tokens;
        // Who was to go on when the chunk ended, or failed, has computed nothing.
        for member in next.into_iter().flat_map(|(_, members)| members) {
            self.tasks.insert(member.span.seq, member.task);
        }
        match ran {
            Ok(()) => {
                self.passes_before_admission = self.passes_before_admission.saturating_sub(1);
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
            self.computing = computing;
            self.pass_failed(members, error);
        }
        self.conclude(ended);
    }

    /// Runs a chunk, and passes of tokens between its steps.
    fn run_chunk(
        &mut self,
        prompts: &PassPlan,
        prompts_at: u64,
        members: &mut [Member],
        tokens: &mut Tokens,
        waiting: usize,
    ) -> Result<(), Error> {
        self.computing = false;
        let model = ModelId(prompts.model.0);
        let both = PassPlan {
            scratch_bytes: prompts_at + prompts.scratch_bytes,
            ..prompts.clone()
        };
        let all = members.iter().chain(tokens.next.iter().flat_map(|n| &n.1));
        let anew = all.map(|m| m.task.compactions).max();
        self.ensure_scratch(model, &both, anew.unwrap_or(0))?;
        let scratch_at = self.scratch_at();
        let prepared = self.prepare(prompts, members)?;
        let pages = prepared.pages();
        let rows = prepared.rows(members, prompts.decode_spans, &pages, &self.store);
        let prompts_at = scratch_at + prompts_at;
        let pass = prepared.pass(prompts, members, &rows, prompts_at, self.prefetch);
        let mut counts = RequestCacheUse::default();
        let members = RefCell::new(members);
        let ended = || nobody_waits(&members.borrow());
        let mut run = || {
            let inputs = &prepared.inputs;
            let mut chunk = Stepwise::begin(&mut self.store, &pass, inputs, &mut counts, &ended)?;
            let mut last = None;
            loop {
                let allowed = self.tokens_between(tokens, scratch_at, waiting, &mut last);
                let begun = Instant::now();
                let mut longest = Duration::ZERO;
                self.computing = true;
                let goes_on = loop {
                    let step = Instant::now();
                    if chunk.go_on(&mut self.store)? == Went::ToTheHead {
                        break false;
                    }
                    if longest.is_zero() {
                        self.tell_all();
                    }
                    longest = longest.max(step.elapsed());
                    let next = (begun.elapsed() + longest).as_secs_f64();
                    if allowed.is_some_and(|allowed| next >= allowed) {
                        break true;
                    }
                };
                if !goes_on {
                    // What is between two chunks takes a while.
                    if allowed.is_some_and(|s| begun.elapsed().as_secs_f64() > s * LAST_PART) {
                        self.tokens_between(tokens, scratch_at, waiting, &mut last);
                        self.tell_all();
                    }
                    self.computing = true;
                    // It waits for its uploads, and so comes to its end.
                    return chunk
                        .end(&mut self.store, &mut rows.sink(&members))
                        .map(|_| ());
                }
            }
        };
        let ran = run();
        self.store.cache.pass_end(model);
        self.put_back(prepared, members.into_inner(), counts);
        ran
    }

    /// Runs the next pass of the tokens, and tells how many seconds the chunk may go on; `None` if
    /// nobody waits for the next token.
    fn tokens_between(
        &mut self,
        tokens: &mut Tokens,
        scratch_at: u64,
        waiting: usize,
        last: &mut Option<Instant>,
    ) -> Option<f64> {
        let (plan, mut members) = tokens.next.take()?;
        let begun = Instant::now();
        self.computing = false;
        if let Err(error) = self.run_pass_in(scratch_at, &plan, &mut members) {
            tokens.failed = Some((members, error, self.computing));
            return None;
        }
        self.interleaved_passes += 1;
        let now = Instant::now();
        let (model, rows) = (ModelId(plan.model.0), plan.rows as usize);
        let decoding = members.len();
        let ended = self.take_back(members);
        tokens
            .ended
            .extend(ended.into_iter().map(|(mut task, outcome)| {
                task.tell();
                (task, outcome)
            }));
        let entry = self.models.iter_mut().find(|e| e.id == model)?;
        // Passes here may wait for what a chunk has queued.
        let alone = entry.times.recent(rows);
        let alone = alone.unwrap_or_else(|| (now - begun).as_secs_f64());
        let longer = alone * crate::share::longer(waiting, decoding);
        if let Some(last) = last.replace(now) {
            let took = (now - last).as_secs_f64();
            entry.slice.note(longer, alone + longer, took);
        }
        let seconds = entry.slice.seconds(longer);
        tokens.next = self.next_tokens(&tokens.all);
        tokens.next.is_some().then_some(seconds)
    }

    /// The next pass of tokens beside a chunk.
    fn next_tokens(&mut self, plan: &PassPlan) -> Option<(PassPlan, Vec<Member>)> {
        for span in &plan.spans {
            if let Some(task) = self.tasks.get(&span.seq) {
                let ready = task.reader_has_room() && task.ended().is_none();
                self.scheduler.set_ready(span.seq, ready);
            }
        }
        let next = self.scheduler.next_tokens(plan)?;
        let members = next.spans.iter().map(|span| {
            let task = self.tasks.remove(&span.seq);
            Member::new(*span, task.expect("the scheduler knows the same requests"))
        });
        let members = members.collect();
        Some((next, members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens take 4 ms alone, and layers of a chunk `layer` seconds, of which `queued` of one is
    /// behind when a slice stops. What they take from pass to pass once that is learned.
    fn passes(layer: f64, queued: f64) -> Vec<f64> {
        let (alone, longer) = (4e-3, 4e-3);
        let mut slice = Slice::default();
        let mut passes = Vec::new();
        for pass in 0..2000 {
            let seconds = slice.seconds(longer);
            // As `run_chunk` does: one at least.
            let mut layers = 1;
            while f64::from(layers + 1) * layer < seconds {
                layers += 1;
            }
            // Some vary a little.
            let took = alone + f64::from(layers) * layer + queued + f64::from(pass % 7) * 2e-5;
            slice.note(longer, alone + longer, took);
            passes.push(took);
        }
        passes.split_off(200)
    }

    #[test]
    fn few_tokens_wait_longer_than_they_may_and_most_wait_nearly_as_long() {
        for layer in [0.1e-3, 0.4e-3, 0.9e-3, 1.3e-3] {
            for queued in [0.0, 0.3e-3, 1e-3] {
                let passes = passes(layer, queued);
                let long = passes
                    .iter()
                    .filter(|took| **took > 8e-3 * TOLERANCE)
                    .count();
                assert!(long * 20 <= passes.len(), "{layer} {queued}: {long}");
                let mean = passes.iter().sum::<f64>() / passes.len() as f64;
                assert!(mean >= 7.5e-3 - 1.3 * layer, "{layer} {queued}: {mean}");
            }
        }
    }

    #[test]
    fn what_held_up_one_pass_changes_little() {
        let mut slice = Slice::default();
        let before = slice.seconds(4e-3);
        slice.note(4e-3, 8e-3, 1.0);
        assert!(slice.seconds(4e-3) >= before * 0.8);
    }
}
