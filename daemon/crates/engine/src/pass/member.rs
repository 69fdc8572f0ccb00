//! A request in a pass, which takes the tokens and scores of its rows in the rows' order.

use rocmforge_scheduler::{SpanPlan, SpanResult};

use crate::api::error::Error;
use crate::api::{FinishReason, GenerateEvent, Pooling};
use crate::clock::Clock;
use crate::model::loaded::LoadedModel;
use crate::pass::spec::{Interest, RowOutput};
use crate::request::decoding::{Chosen, Ends, not_finite, score};
use crate::request::images::TowerWork;
use crate::request::task::{Generation, Task, Work};

/// What a request did with the result of one of its rows.
pub(crate) enum RowsOutcome {
    GoesOn,
    /// The request has a further token.
    Appended,
    Done(Option<FinishReason>),
    Failed(Error),
}

/// A request that takes part in a pass.
pub(crate) struct Member {
    pub(crate) span: SpanPlan,
    pub(crate) task: Task,
    pub(crate) stepped: RowsOutcome,
    /// Number of rows whose tokens were taken, up to the first rejected draft token.
    pub(crate) told: u32,
    /// Whether a draft token was rejected: the results of the rows after it are discarded.
    wrong: bool,
}

impl Member {
    pub(crate) fn new(span: SpanPlan, task: Task) -> Self {
        Self {
            span,
            task,
            stepped: RowsOutcome::GoesOn,
            told: 0,
            wrong: false,
        }
    }

    /// The position after the request's last row.
    pub(crate) fn end(&self) -> usize {
        (self.span.first_position + self.span.rows) as usize
    }

    /// Takes the result of the request's row `row`.
    pub(crate) fn take(&mut self, row: usize, found: RowOutput<'_>) {
        if self.wrong || matches!(self.stepped, RowsOutcome::Failed(_) | RowsOutcome::Done(_)) {
            return;
        }
        self.told += 1;
        self.stepped = take_row(&mut self.task, row, found);
        if let (RowsOutcome::Appended, Work::Generate(g)) = (&self.stepped, &self.task.work) {
            let draft = g.drafts.next.get(self.told as usize - 1);
            self.wrong = draft.is_some() && draft != self.task.tokens.last();
        }
    }

    /// Number of drafts among the request's rows.
    pub(crate) fn drafts(&self) -> u32 {
        match &self.task.work {
            // Its own token, if it has come to it, is the only other one whose successor is wanted.
            Work::Generate(_) => self.span.outputs.saturating_sub(1),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => 0,
        }
    }

    /// Number of drafts that were accepted.
    pub(crate) fn right(&self) -> u32 {
        (self.rows() + self.drafts()).saturating_sub(self.span.rows)
    }

    /// How much of the logits of each wanted row the request needs.
    pub(crate) fn interest(&self) -> Interest {
        let g = match &self.task.work {
            Work::Generate(g) => g,
            // Of an embedding all classes; hidden states are of no concern here.
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => return Interest::Logits,
        };
        let sampler = &g.chooser.sampler;
        match sampler.takes_top() {
            _ if g.chooser.looks_at_all(g.generated) => Interest::Logits,
            _ if sampler.takes_best() => Interest::Best,
            Some(k) => Interest::Top(k),
            None => Interest::Logits,
        }
    }

    /// The result of the request's rows for the scheduler.
    pub(crate) fn result(&self) -> SpanResult {
        SpanResult {
            seq: self.span.seq,
            rows: self.rows(),
            appended: match self.stepped {
                RowsOutcome::Appended => self.told,
                _ => 0,
            },
            ended: matches!(self.stepped, RowsOutcome::Done(_) | RowsOutcome::Failed(_)),
        }
    }

    /// Number of rows whose K and V are valid: those of draft tokens only if they were accepted.
    pub(crate) fn rows(&self) -> u32 {
        match (&self.task.work, &self.stepped) {
            // Nothing of it was told: all of it is done again, or there was nothing to tell.
            (_, RowsOutcome::GoesOn) | (Work::Score(_) | Work::Embed(_) | Work::Tower(_), _) => {
                self.span.rows
            }
            (Work::Generate(_), _) => self.span.rows - (self.span.outputs - self.told),
        }
    }
}

/// Processes the result of one row of a request in a pass.
fn take_row(task: &mut Task, row: usize, found: RowOutput<'_>) -> RowsOutcome {
    match &mut task.work {
        Work::Generate(g) => match g.chooser.choose(found, g.generated, &task.loaded) {
            Ok(chosen) => accept(g, &mut task.tokens, task.n_ctx, &task.loaded, chosen),
            Err(error) => RowsOutcome::Failed(error),
        },
        Work::Score(s) => {
            let at = task.n_past + row;
            // A pass that is done again begins where the last one that ended left off.
            s.scores.truncate(at);
            let scored = match found {
                RowOutput::Logits(logits) => score(logits, task.tokens[at + 1], s.top_n),
                RowOutput::Best(_) | RowOutput::Top(_) | RowOutput::Hidden(_) => {
                    return RowsOutcome::Failed(Error::Internal("scores need logits".to_owned()));
                }
            };
            let Some(scored) = scored else {
                return RowsOutcome::Failed(not_finite(&task.loaded));
            };
            s.scores.push(scored);
            match task.is_complete_at(at + 1) {
                true => RowsOutcome::Done(None),
                false => RowsOutcome::GoesOn,
            }
        }
        Work::Embed(e) => {
            let at = task.n_past + row;
            let state: &[f32] = match found {
                RowOutput::Hidden(state) => state,
                RowOutput::Logits(classes) if e.classes => classes,
                RowOutput::Best(_) | RowOutput::Top(_) | RowOutput::Logits(_) => {
                    let message = "embeddings need states".to_owned();
                    return RowsOutcome::Failed(Error::Internal(message));
                }
            };
            if state.iter().any(|v| !v.is_finite()) {
                return RowsOutcome::Failed(not_finite(&task.loaded));
            }
            e.take(at, task.tokens.len() - 1, state);
            // Behind the first row nothing counts where that is the one.
            match e.pooling == Pooling::First || task.is_complete_at(at + 1) {
                true => RowsOutcome::Done(None),
                false => RowsOutcome::GoesOn,
            }
        }
        Work::Tower(work) => take_image(work, row, found)
            .unwrap_or_else(|| RowsOutcome::Failed(not_finite(&task.loaded))),
    }
}

/// Takes an output row of a vision tower.
fn take_image(work: &mut TowerWork, row: usize, found: RowOutput<'_>) -> Option<RowsOutcome> {
    let RowOutput::Hidden(values) = found else {
        let message = "a tower's rows are states".to_owned();
        return Some(RowsOutcome::Failed(Error::Internal(message)));
    };
    // Without an early end several are looked at at a time.
    if !values.iter().fold(true, |all, v| all & v.is_finite()) {
        return None;
    }
    Some(match work.take(row, values) {
        true => RowsOutcome::Done(None),
        false => RowsOutcome::GoesOn,
    })
}

/// Appends a chosen token to a generation, and checks whether it ends.
fn accept(
    g: &mut Generation,
    tokens: &mut Vec<u32>,
    n_ctx: usize,
    loaded: &LoadedModel,
    chosen: Chosen,
) -> RowsOutcome {
    let Chosen { token, score } = chosen;
    let now = Clock.now();
    if g.first_token.is_none() {
        tracing::debug!(model = loaded.name(), "a first token");
    }
    g.first_token.get_or_insert(now);
    g.last_token = Some(now);
    if g.max_tokens == Some(0) {
        return RowsOutcome::Done(Some(FinishReason::MaxTokens));
    }
    let tokenizer = loaded.tokenizer();
    match g.chooser.ends(loaded, token) {
        Some(Ends::Text) => return RowsOutcome::Done(Some(FinishReason::EndOfText)),
        Some(Ends::Stop) => return RowsOutcome::Done(Some(FinishReason::StopToken { id: token })),
        None => {}
    }
    g.generated += 1;
    let complete = match g.chooser.accept(token) {
        Ok(complete) => complete,
        Err(error) => return RowsOutcome::Failed(error),
    };
    tokens.push(token);
    let checked = g.stops.push(&g.decoder.push(tokenizer, token));
    let piece = GenerateEvent::Piece {
        text: checked.text,
        ids: vec![token],
        scores: score.into_iter().collect(),
        held: checked.held,
    };
    g.due.push(piece);
    if let Some(index) = checked.stopped {
        return RowsOutcome::Done(Some(FinishReason::StopString { index }));
    }
    if complete {
        return RowsOutcome::Done(Some(FinishReason::EndOfText));
    }
    if g.max_tokens.is_some_and(|max| g.generated >= max) {
        return RowsOutcome::Done(Some(FinishReason::MaxTokens));
    }
    // The last position can be generated but not continued from.
    if tokens.len() >= n_ctx {
        return RowsOutcome::Done(Some(FinishReason::ContextFull));
    }
    RowsOutcome::Appended
}

/// The error that ends a pass, if all of its clients have gone.
pub(crate) fn nobody_waits(members: &[Member]) -> Option<Error> {
    let now = Clock.now();
    let mut reasons = members.iter().map(|m| m.task.ended(now));
    reasons.try_fold(None, |_, reason| reason.map(Some))?
}
