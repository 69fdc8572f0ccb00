//! One step of one request: a chunk of its prompt, or one token.

use std::sync::Arc;
use std::time::Instant;

use rocmforge_kernels::host::ops::{self, RopeAngles, RopeParams, RopeTable, Simd};
use rocmforge_ops::{RopeSpec, RowCounts};
use rocmforge_tensor_cache::{BlockKind, ModelId, SegmentId};

use crate::actor::Engine;
use crate::api::{
    FinishReason, GenerateEvent, GenerateSummary, PreloadEvent, RequestCacheUse, Scores, TokenScore,
};
use crate::embed;
use crate::error::Error;
use crate::loaded::LoadedModel;
use crate::pass::{self, Interest, Pass, RowOutput, Wanted};
use crate::stop::Checked;
use crate::task::{Generation, Scoring, Task, Work};

/// What a step did to its request.
enum Stepped {
    GoesOn,
    Done(Option<FinishReason>),
}

impl Engine {
    /// Runs a step of the next request whose reader has room. Whether there was one.
    pub(crate) fn step(&mut self) -> bool {
        let Some(at) = self.running.iter().position(Task::reader_has_room) else {
            return false;
        };
        let mut task = self
            .running
            .remove(at)
            .expect("the index was just looked at");
        // What an upload ahead of need was refused is not this step's affair.
        self.residency.take_refused();
        match self.step_of(&mut task) {
            Ok(Stepped::GoesOn) => self.running.push_back(task),
            Ok(Stepped::Done(finish)) => self.complete(task, finish),
            Err(error) => match self.shrink_for(&mut task, error) {
                Ok(()) => {
                    // A recurrent state may have taken in a part of the step: the sequence is computed anew.
                    if task.loaded.model().plan().state_elements > 0 {
                        task.memory.free(&mut self.residency);
                        task.n_past = 0;
                    }
                    self.running.push_front(task);
                }
                Err(error) => self.finish(task, Some(error)),
            },
        }
        true
    }

    fn step_of(&mut self, task: &mut Task) -> Result<Stepped, Error> {
        // The request itself is out of the queue now.
        let (n_tokens, outputs) = self.rows_of_step(task);
        let end = task.n_past + n_tokens;
        tracing::trace!(n_tokens, position = task.n_past, "a step");
        self.extend_promise(task, end)?;
        self.ensure_scratch(task.model, n_tokens, outputs)?;
        let plan = task.loaded.model().plan();
        let layout = plan.scratch(RowCounts {
            tokens: n_tokens as u64,
            outputs,
        });
        task.memory
            .prepare(&mut self.residency, task.model, plan, task.n_past, end)?;
        let held = crate::kv::bytes_for(plan, end, n_tokens);
        let blocks = held + self.scratch.map_or(0, |s| s.1);
        task.counts.block_bytes = task.counts.block_bytes.max(blocks);
        self.set_angles(task.model, task.n_past as u32, n_tokens)?;
        self.inputs.resize_with(plan.inputs.len(), Vec::new);
        for (input, rows) in plan.inputs.iter().zip(&mut self.inputs) {
            let ids = &task.tokens[task.n_past..end];
            embed::rows(&task.loaded, &input.table, ids, rows)?;
        }

        let complete = n_tokens == task.ahead();
        let wanted = match &task.work {
            Work::Generate(_) if complete => Wanted::Last,
            Work::Generate(_) => Wanted::None,
            Work::Score(_) => Wanted::All,
        };
        let last_pass = match &task.work {
            Work::Generate(g) => complete && g.max_tokens.is_some_and(|max| g.generated + 1 >= max),
            Work::Score(_) => complete,
        };
        let others = self.running.iter().any(|t| t.model == task.model);
        let loaded = Arc::clone(&task.loaded);
        let state = task.memory.state_offset(&self.residency);
        let (block, _) = self.scratch.expect("ensured above");
        let kv_pages = task.memory.pages();
        let pass = Pass {
            model: task.model,
            plan: loaded.model().plan(),
            angles: &self.angles,
            kv_pages: &kv_pages,
            state,
            first_position: task.n_past as u32,
            n_tokens,
            wanted,
            more: !last_pass || others,
            scratch: &layout,
            scratch_at: self.residency.cache.block(block).offset,
            prefetch: self.prefetch,
            interest: match &task.work {
                Work::Generate(g) if g.sampler.takes_best() => Interest::Best,
                Work::Generate(g) => g
                    .sampler
                    .takes_top()
                    .map_or(Interest::Logits, Interest::Top),
                Work::Score(_) => Interest::Logits,
            },
        };
        let Task {
            work,
            tokens,
            loaded,
            counts,
            n_past,
            n_ctx,
            deadline,
            ..
        } = task;
        let expired = || deadline.is_some_and(|d| Instant::now() >= d);
        let (residency, rows) = (&mut self.residency, &self.inputs);
        match work {
            Work::Generate(g) => {
                g.started.get_or_insert_with(Instant::now);
                let Generation {
                    events,
                    sampler,
                    generated,
                    ..
                } = &mut **g;
                let ended = || match events.is_closed() {
                    true => Some(Error::Cancelled),
                    false => expired().then_some(Error::DeadlineExceeded {
                        generated: *generated,
                    }),
                };
                let mut chosen = None;
                let mut choose = |_: usize, found: RowOutput<'_>| {
                    let token = match found {
                        RowOutput::Logits(logits) => sampler.sample(logits).ok(),
                        RowOutput::Best(best) => best,
                        RowOutput::Top(top) => top.and_then(|top| sampler.sample_from(top).ok()),
                    };
                    chosen = Some(token.ok_or_else(|| not_finite(loaded))?);
                    Ok(())
                };
                pass::run(residency, &pass, rows, counts, &ended, &mut choose)?;
                *n_past = end;
                Ok(chosen.map_or(Stepped::GoesOn, |token| {
                    accept(g, tokens, *n_ctx, loaded, token)
                }))
            }
            Work::Score(s) => {
                let Scoring {
                    reply,
                    scores,
                    top_n,
                } = s;
                let ended = || match reply.is_closed() {
                    true => Some(Error::Cancelled),
                    false => expired().then_some(Error::DeadlineExceeded { generated: 0 }),
                };
                let first = *n_past;
                // A step that is done again begins where the last one that ended left off.
                scores.truncate(first);
                let mut keep = |row: usize, found: RowOutput<'_>| {
                    let RowOutput::Logits(logits) = found else {
                        return Err(Error::Internal("scores need logits".to_owned()));
                    };
                    let scored = score(logits, tokens[first + row + 1], *top_n);
                    scores.push(scored.ok_or_else(|| not_finite(loaded))?);
                    Ok(())
                };
                pass::run(residency, &pass, rows, counts, &ended, &mut keep)?;
                *n_past = end;
                Ok(if complete {
                    Stepped::Done(None)
                } else {
                    Stepped::GoesOn
                })
            }
        }
    }

    /// Ends a request that came to its end.
    fn complete(&mut self, mut task: Task, finish: Option<FinishReason>) {
        task.memory.free(&mut self.residency);
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
                    // Places are free: a step runs only if three are.
                    let _ = events.try_send(GenerateEvent::Piece {
                        text,
                        ids: Vec::new(),
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
        }
        tracing::debug!(model = loaded.name(), generated, "a request is done");
    }

    /// Gives back what only running requests need, and publishes, so that a client that reads the end of its request
    /// and then asks for the status sees a state after it.
    pub(crate) fn release_rest(&mut self, model: ModelId) {
        if !self.running.iter().any(|t| t.model == model) {
            self.residency.cache.request_end(model);
        }
        self.free_idle_scratch();
        self.settle();
        self.publish(true);
    }

    fn ensure_scratch(&mut self, model: ModelId, rows: usize, outputs: u64) -> Result<(), Error> {
        let bytes = self.scratch_bytes(model, rows, outputs);
        if let Some((_, has)) = self.scratch {
            // What a long prompt took would be uploaded again for every token of a model that does not fit.
            let spare =
                has / 2 > bytes && !self.residency.cache.fits(model) && !self.prompts_go_on();
            if has >= bytes && !spare {
                return Ok(());
            }
            self.free_scratch();
        }
        let (block, _) = self.residency.reserve(BlockKind::Scratch, None, bytes)?;
        self.scratch = Some((block, bytes));
        Ok(())
    }

    /// Whether a request other than the one under way has more than a token to compute.
    fn prompts_go_on(&self) -> bool {
        self.running.iter().any(|t| t.ahead() > 1)
    }

    fn set_angles(&mut self, model: ModelId, first: u32, n_tokens: usize) -> Result<(), Error> {
        let entry = self
            .models
            .iter_mut()
            .find(|e| e.id == model)
            .expect("a request keeps its model registered");
        let specs = &entry.loaded.model().plan().ropes;
        if entry.rope.is_empty() {
            let tables = specs.iter().map(|spec| rope_table(&entry.loaded, spec));
            entry.rope = tables.collect::<Result<_, _>>()?;
        }
        self.angles.clear();
        for (spec, table) in specs.iter().zip(&entry.rope) {
            let mut angles = RopeAngles::new(spec.order);
            angles.set(table, (first..).take(n_tokens));
            self.angles.push(angles);
        }
        Ok(())
    }

    /// Uploads the next segment of the first preload. Whether there was one.
    pub(crate) fn preload_step(&mut self) -> bool {
        let Some(mut preload) = self.preloads.pop_front() else {
            return false;
        };
        if preload.events.is_closed() {
            return true;
        }
        let Some(index) = preload.segments.pop_front() else {
            self.publish(true);
            let _ = preload.events.try_send(PreloadEvent::Done {
                uploaded_bytes: preload.uploaded_bytes,
            });
            return true;
        };
        let mut counts = RequestCacheUse::default();
        let id = SegmentId {
            model: preload.model,
            index,
        };
        match self.residency.acquire(id, &mut counts) {
            Ok(slab) => {
                self.residency.release(id);
                preload.done_bytes += slab.bytes;
                preload.uploaded_bytes += counts.uploaded_bytes;
                if preload.events.capacity() >= 2 {
                    // A slow reader misses steps of the progress and nothing else.
                    let (done_bytes, total_bytes) = (preload.done_bytes, preload.total_bytes);
                    let _ = preload.events.try_send(PreloadEvent::Progress {
                        done_bytes,
                        total_bytes,
                    });
                }
                // Others' preloads go on in turn.
                self.preloads.push_back(preload);
            }
            Err(error) => match self.shrink_for_preload(error) {
                Ok(()) => {
                    preload.segments.push_front(index);
                    self.preloads.push_front(preload);
                }
                Err(error) => {
                    self.publish(true);
                    let _ = preload.events.try_send(PreloadEvent::Failed(error));
                }
            },
        }
        true
    }
}

/// Takes a chosen token into a generation.
fn accept(
    g: &mut Generation,
    tokens: &mut Vec<u32>,
    n_ctx: usize,
    loaded: &LoadedModel,
    token: u32,
) -> Stepped {
    let now = Instant::now();
    if g.first_token.is_none() {
        tracing::debug!(model = loaded.name(), "a first token");
    }
    g.first_token.get_or_insert(now);
    g.last_token = Some(now);
    if g.max_tokens == Some(0) {
        return Stepped::Done(Some(FinishReason::MaxTokens));
    }
    let tokenizer = loaded.tokenizer();
    if tokenizer.is_end_of_generation(token) {
        return Stepped::Done(Some(FinishReason::EndOfText));
    }
    g.generated += 1;
    g.sampler.accept(token);
    tokens.push(token);
    let checked = g.stops.push(&g.decoder.push(tokenizer, token));
    let piece = GenerateEvent::Piece {
        text: checked.text,
        ids: vec![token],
    };
    // The step ran because three places were free; if the reader is gone the next look ends the request.
    let _ = g.events.try_send(piece);
    if let Some(index) = checked.stopped {
        return Stepped::Done(Some(FinishReason::StopString { index }));
    }
    if g.max_tokens.is_some_and(|max| g.generated >= max) {
        return Stepped::Done(Some(FinishReason::MaxTokens));
    }
    // The last position can be generated but not continued from.
    if tokens.len() >= n_ctx {
        return Stepped::Done(Some(FinishReason::ContextFull));
    }
    Stepped::GoesOn
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
        generated_tokens: g.generated,
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

/// The score of `next` in `logits`, which become log-probabilities. `None` if they are not finite.
fn score(logits: &mut [f32], next: u32, top_n: usize) -> Option<TokenScore> {
    if logits.iter().any(|l| l.is_nan() || *l == f32::INFINITY) {
        return None;
    }
    let width = logits.len();
    ops::log_softmax(Simd::detect(), logits, width);
    let mut top = Vec::new();
    if top_n > 0 {
        ops::top_k(Simd::detect(), logits, top_n, &mut top);
    }
    Some(TokenScore {
        id: next,
        logprob: logits[next as usize],
        top,
    })
}

fn not_finite(loaded: &LoadedModel) -> Error {
    Error::BadModel {
        path: loaded.path().to_owned(),
        message:
            "the logits are not finite; a weight of the file is damaged, or the model overflows f32"
                .to_owned(),
    }
}

fn rope_table(loaded: &LoadedModel, spec: &RopeSpec) -> Result<RopeTable, Error> {
    let factors = spec.factors.as_ref();
    let params = RopeParams {
        n_rot: spec.n_rot as usize,
        freq_base: spec.freq_base,
        scaling: spec.scaling,
        freq_factors: factors.map(|t| embed::vector(loaded, t)).transpose()?,
        magnitude: spec.magnitude,
    };
    RopeTable::new(&params).map_err(|e| Error::BadModel {
        path: loaded.path().to_owned(),
        message: e.to_string(),
    })
}
