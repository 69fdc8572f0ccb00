//! A request that runs or waits to run: its tokens, its KV pages, and what it has produced.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;
use rocmforge_tokenizer::StreamDecoder;
use tokio::sync::{mpsc, oneshot};

use crate::api::error::Error;
use crate::api::{
    Asker, Embedding, GenerateEvent, Pooling, RequestCacheUse, STEP_EVENTS, Scores, TokenScore,
};
use crate::features::prefix_cache::Realm;
use crate::features::speculation::drafts::Drafts;
use crate::memory::Memory;
use crate::model::adapters::AppliedAdapters;
use crate::model::loaded::LoadedModel;
use crate::pass::times::PassTimes;
use crate::request::decoding::Chooser;
use crate::request::gaps::{Gaps, Spent};
use crate::request::images::{PlacedImage, TowerWork};
use crate::request::kv::SequenceMemory;
use crate::request::stop::StopStrings;
use crate::request::time_account::TimeAccount;

/// One request in the engine: tokens, sampler, KV cache, events and time account.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) seq: SeqId,
    pub(crate) model: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// Client and class of the request.
    pub(crate) asker: Asker,
    /// Token ids: the prompt, then the generated tokens. Position `i` holds token `i`.
    pub(crate) tokens: Vec<u32>,
    /// Number of computed positions: their K and V are in the pages, and the recurrent state is the
    /// one after them.
    pub(crate) n_past: usize,
    /// Whether the request has no `max_tokens`: it ends when the model ends it, or when there is no
    /// more memory for it.
    pub(crate) open_ended: bool,
    /// Maximum number of positions (context length).
    pub(crate) n_ctx: usize,
    /// Number of positions that the request may reach by its parameters, which choose its RoPE
    /// divisors.
    pub(crate) reach: usize,
    pub(crate) memory: SequenceMemory,
    /// Number of times that the request was recomputed because memory was not contiguous.
    pub(crate) compactions: u32,
    /// The farthest position at which its pass found no contiguous memory, and how often that
    /// happened since without getting farther.
    pub(crate) no_room: (usize, u32),
    /// Number of positions that were computed when the request was preempted, until it is resumed.
    pub(crate) yielded_at: usize,
    /// Whether the request was admitted before, and so may have produced output.
    pub(crate) begun: bool,
    /// Whether the request waits for another one that computes their common prefix.
    pub(crate) follows: bool,
    /// Whether the request's prefix is read from disk, and it waits for that.
    pub(crate) reads: bool,
    /// The realm in which the request shares its prefix cache; `None` if it does not.
    pub(crate) realm: Option<Realm>,
    /// The model's LoRA adapters that the request uses, with their scales.
    pub(crate) adapters: Option<Arc<AppliedAdapters>>,
    /// The request's images, in the order of its tokens.
    pub(crate) images: Vec<PlacedImage>,
    /// Whether the request drafts with the MTP head, which so far has K and V of all positions.
    pub(crate) predicts: bool,
    /// The budget and number of positions for which the request was found to fit with the MTP head.
    pub(crate) sized: (u64, usize),
    pub(crate) counts: RequestCacheUse,
    /// Time at which the engine received the request.
    pub(crate) received: Instant,
    /// The request's time account.
    pub(crate) times: TimeAccount,
    pub(crate) deadline: Option<Instant>,
    pub(crate) work: Work,
}

/// The kind of work that a request asks for.
#[derive(Debug)]
pub(crate) enum Work {
    /// Generate text.
    Generate(Box<Generation>),
    /// Compute log-probabilities of given tokens.
    Score(Scoring),
    /// Compute an embedding.
    Embed(Pooled),
    /// Compute the rows of an image with a vision tower.
    Tower(TowerWork),
}

impl Work {
    /// Whether tokens can be drafted for the request: a draft token needs a token after it.
    pub(crate) fn takes_drafts(&self) -> bool {
        match self {
            Work::Generate(g) => g.chooser.takes_drafts() && g.max_tokens.is_none_or(|max| max > 2),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => false,
        }
    }
}

/// State of a request that generates text.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) events: mpsc::Sender<GenerateEvent>,
    /// Events that were produced and not sent yet ([`Task::tell`]).
    pub(crate) due: Vec<GenerateEvent>,
    pub(crate) chooser: Chooser,
    pub(crate) drafts: Drafts,
    /// Numbers of computed and of accepted draft tokens.
    pub(crate) drafted: (u32, u32),
    pub(crate) decoder: StreamDecoder,
    pub(crate) stops: StopStrings,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) n_prompt: usize,
    /// Number of prompt tokens that were cached when the request was first admitted.
    pub(crate) reused: u32,
    pub(crate) generated: u32,
    /// Start of the request's first pass.
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
    pub(crate) gaps: Gaps,
}

impl Generation {
    /// Number of events for which the client's channel has room besides those in `due`.
    fn room(&self) -> usize {
        self.events.capacity().saturating_sub(self.due.len())
    }
}

/// State of a request for log-probabilities.
#[derive(Debug)]
pub(crate) struct Scoring {
    pub(crate) reply: oneshot::Sender<Result<Scores, Error>>,
    pub(crate) top_n: usize,
    pub(crate) scores: Vec<TokenScore>,
}

/// State of a request for an embedding.
#[derive(Debug)]
pub(crate) struct Pooled {
    pub(crate) reply: oneshot::Sender<Result<Embedding, Error>>,
    pub(crate) pooling: Pooling,
    /// The sum of the first `rows` rows, or the single pooled row, or all rows one after the other.
    pub(crate) values: Vec<f32>,
    pub(crate) rows: usize,
    /// Whether the device pools all rows of a pass, so that one row arrives.
    pub(crate) whole: bool,
    /// Whether the outputs of the classification head are wanted.
    pub(crate) classes: bool,
}

impl Pooled {
    /// Positions among `n_past..end` whose hidden states are needed, for a text of `n` tokens.
    pub(crate) fn wanted(&self, n_past: usize, end: usize, n: usize) -> std::ops::Range<usize> {
        let counts = match self.pooling {
            Pooling::Mean | Pooling::None => 0..n,
            Pooling::First => 0..1,
            Pooling::Last => n - 1..n,
        };
        counts.start.max(n_past)..counts.end.min(end).max(counts.start.max(n_past))
    }

    /// Takes the hidden state of the row at `position`, of a text of `n` tokens; a repeated pass
    /// reports some rows twice.
    pub(crate) fn take(&mut self, position: usize, n: usize, state: &[f32]) {
        if self.pooling == Pooling::None {
            let at = position * state.len();
            self.values.truncate(at);
            // No more than they take in the end, which is counted before the engine is asked.
            self.values
                .reserve_exact((n * state.len()).saturating_sub(at));
            self.values.extend_from_slice(state);
        } else if self.whole || self.pooling != Pooling::Mean {
            self.values = state.to_vec();
        } else if position == self.rows {
            self.values.resize(state.len(), 0.0);
            self.values.iter_mut().zip(state).for_each(|(v, s)| *v += s);
            self.rows += 1;
        }
    }

    /// The pooled embedding of the rows.
    pub(crate) fn pooled(&mut self) -> Vec<f32> {
        let mut values = std::mem::take(&mut self.values);
        if !self.whole && self.pooling == Pooling::Mean {
            let n = self.rows.max(1) as f32;
            values.iter_mut().for_each(|v| *v /= n);
        }
        values
    }
}

impl Task {
    /// The error that ends the request now, if any: its client is gone, or its deadline has passed.
    pub(crate) fn ended(&self, now: Instant) -> Option<Error> {
        let (closed, generated) = match &self.work {
            Work::Generate(g) => (g.events.is_closed(), g.generated),
            Work::Score(s) => (s.reply.is_closed(), 0),
            Work::Embed(e) => (e.reply.is_closed(), 0),
            Work::Tower(t) => (t.reply.is_closed(), 0),
        };
        if closed {
            return Some(Error::Cancelled);
        }
        self.deadline
            .filter(|d| now >= *d)
            .map(|_| Error::DeadlineExceeded { generated })
    }

    /// Whether the request is done once `n_past` positions are computed; the last token of a
    /// scoring is only looked up, and an embedding generates none.
    pub(crate) fn is_complete_at(&self, n_past: usize) -> bool {
        match &self.work {
            Work::Generate(_) => n_past == self.tokens.len(),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => n_past + 1 == self.tokens.len(),
        }
    }

    /// Ranges of the request's tokens that attend to each other in both directions, so that one
    /// pass must have all of a range.
    pub(crate) fn wholes(&self) -> Vec<std::ops::Range<u32>> {
        let whole = self.images.iter().filter(|image| image.whole);
        let tokens = whole.map(PlacedImage::tokens);
        tokens.map(|at| at.start as u32..at.end as u32).collect()
    }

    /// Whether a pass that begins with this token contains only tokens that attend to each other in
    /// both directions.
    pub(crate) fn is_whole_at(&self, token: usize) -> bool {
        let mut images = self.images.iter();
        images.any(|image| image.whole && image.tokens().contains(&token))
    }

    /// Number of rows of each part of an image in a vision tower's request; empty if it has no
    /// parts.
    pub(crate) fn parts(&self) -> &[usize] {
        match &self.work {
            Work::Tower(work) => &work.parts,
            _ => &[],
        }
    }

    /// Discards what was computed, so that it is recomputed.
    pub(crate) fn start_over(&mut self, memory: &mut Memory) {
        self.memory.free(memory, self.loaded.model().plan());
        self.yielded_at = self.yielded_at.max(self.n_past);
        self.n_past = 0;
        self.follows = false;
        self.reads = false;
    }

    /// Whether the request may end early if there is no room for more tokens: one without a maximum
    /// length.
    pub(crate) fn may_end_here(&self) -> bool {
        self.open_ended && self.generated() > 0
    }

    /// The longest gap between tokens that the request is promised.
    pub(crate) fn promised_gap(&self) -> Option<Duration> {
        match &self.work {
            Work::Generate(g) => g.gaps.promised(),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => None,
        }
    }

    /// Time at which the next tokens are due by the promised gap.
    pub(crate) fn due(&self) -> Option<Instant> {
        match &self.work {
            Work::Generate(g) => g.gaps.due(),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => None,
        }
    }

    /// Whether the request has a promised gap that is running now or will begin.
    pub(crate) fn has_promise_now(&self) -> bool {
        match &self.work {
            Work::Generate(g) => g.gaps.promised().is_some() && !g.gaps.is_paused(),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => false,
        }
    }

    /// Records whether the client reads; while it does not, a promised gap does not run.
    pub(crate) fn note_reader(&mut self, now: Instant, spent: Spent) {
        let has_room = self.reader_has_room();
        if let Work::Generate(g) = &mut self.work {
            g.gaps.note_reader(has_room, now, spent);
        }
    }

    /// Number of tokens generated so far.
    pub(crate) fn generated(&self) -> u32 {
        match &self.work {
            Work::Generate(g) => g.generated,
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => 0,
        }
    }

    /// Number of rows that have to be computed before the first result.
    pub(crate) fn prompt_rows(&self) -> usize {
        let reused = match &self.work {
            Work::Generate(g) => g.reused as usize,
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => 0,
        };
        self.tokens.len().saturating_sub(reused)
    }

    /// Whether the client's channel has room for all events that a pass may produce: a piece, the
    /// rest of the text, and the end.
    pub(crate) fn reader_has_room(&self) -> bool {
        match &self.work {
            Work::Generate(g) => g.room() >= STEP_EVENTS,
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => true,
        }
    }

    /// Whether draft tokens of the request need spare states.
    pub(crate) fn borrows_states(&self) -> bool {
        self.loaded.model().plan().state_elements > 0 && self.work.takes_drafts()
    }

    /// Drafts tokens for the next pass, which has `rows` rows without them, if the request decodes
    /// in it. N-grams and the MTP head only draft with `texts`. Returns the number of drafts.
    pub(crate) fn draft(
        &mut self,
        rows: usize,
        room: usize,
        times: &PassTimes,
        block_seconds: f64,
        texts: bool,
    ) -> usize {
        let decodes = self.begun && self.n_past + 1 == self.tokens.len();
        let most = self.drafts_at_most().min(room);
        let Work::Generate(g) = &mut self.work else {
            return 0;
        };
        g.drafts.next.clear();
        if !decodes || !g.chooser.takes_drafts() {
            return 0;
        }
        let known = self.tokens.len();
        match g.drafts.take_foretold(known, most) {
            0 if texts => {}
            n => return n,
        }
        match g.drafts.draft(&self.tokens, most, rows, times) {
            0 if self.predicts && most > 0 => g.drafts.foretold(known, rows, times, block_seconds),
            n => n,
        }
    }

    /// Maximum number of draft tokens: each accepted one is a token within the limits, and an
    /// event.
    pub(crate) fn drafts_at_most(&self) -> usize {
        let Work::Generate(g) = &self.work else {
            return 0;
        };
        let wanted = g
            .max_tokens
            .map_or(usize::MAX, |max| max.saturating_sub(g.generated) as usize);
        wanted
            .min(self.n_ctx.saturating_sub(self.tokens.len()) + 1)
            .min((g.room() + 1).saturating_sub(STEP_EVENTS))
            .saturating_sub(1)
    }

    /// Number of tokens that the request may still generate.
    pub(crate) fn remaining(&self) -> usize {
        let wanted = match &self.work {
            Work::Generate(g) => g.max_tokens.map(|max| max.saturating_sub(g.generated)),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => Some(0),
        };
        let room = self.n_ctx.saturating_sub(self.tokens.len());
        wanted.map_or(room, |wanted| room.min(wanted as usize))
    }

    /// The token ids of the next `rows` rows: known tokens, then draft tokens.
    pub(crate) fn row_ids(&self, rows: usize) -> impl Iterator<Item = u32> {
        let drafts: &[u32] = match &self.work {
            Work::Generate(g) => &g.drafts.next,
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => &[],
        };
        let known = self.tokens[self.n_past..].iter();
        known.chain(drafts).copied().take(rows)
    }

    /// Sends the events in `due`. Called by the next pass once the device is busy, or when there is
    /// no next pass. Returns whether there were any.
    pub(crate) fn tell(&mut self) -> bool {
        let Work::Generate(g) = &mut self.work else {
            return false;
        };
        let any = !g.due.is_empty();
        for event in g.due.drain(..) {
            // The pass had its rows because places for all of them were free, those of what was due
            // counted; if the reader is gone the next look ends the request.
            let _ = g.events.try_send(event);
        }
        any
    }

    /// Fails the request, and sends the error to its client.
    pub(crate) fn fail(mut self, error: Error) {
        self.tell();
        match self.work {
            Work::Generate(g) => {
                // There is room for the last event unless the reader is gone.
                let _ = g.events.try_send(GenerateEvent::Failed(error));
            }
            Work::Score(s) => {
                let _ = s.reply.send(Err(error));
            }
            Work::Embed(e) => {
                let _ = e.reply.send(Err(error));
            }
            Work::Tower(t) => {
                let _ = t.reply.send(Err(error));
            }
        }
    }

    /// Stops using the MTP head for this request.
    pub(crate) fn stop_predicting(&mut self, memory: &mut Memory) {
        self.predicts = false;
        let plan = self.loaded.model().plan();
        self.memory.stop_predicting(memory, plan);
    }

    /// Number of positions up to which the request is known to fit, if its tokens so far need
    /// `need` bytes; more for one without `max_tokens`.
    pub(crate) fn fits_up_to(&self, need: u64, budget: u64) -> usize {
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
