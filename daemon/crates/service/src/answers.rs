//! Completions as they are generated: the engine's events of one or more choices, split into parts.
//!
//! ```text
//! engine's events -> Splitter -> parts, token ids and scores, by choice
//! ```

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rocmforge_chat::parts::splitter::Splitter;
use rocmforge_chat::parts::{Part, joined};
use rocmforge_chat::tool_calls::forms;
use rocmforge_engine::api::{FinishReason, GenerateEvent, GenerateSummary, TokenScore};
use rocmforge_engine::{AppliedAdapters, LoadedModel};
use rocmforge_failure::{self as failure, Failure};

use crate::arrival::Arrival;
use crate::check::SCORES_MAX;
use crate::generation::Running;
use crate::refusals;
use crate::request_log::RequestLog;

/// Maximum number of completions of one request.
pub const CHOICES_MAX: u32 = 8;
/// Error message if a completion has more scores than can be held until its end.
const TOO_MANY_SCORES: &str =
    "more scores than an answer holds; stream it, or ask for fewer of them or of tokens";
/// Message for too many choices where streams hold them, too.
const TOO_MANY_IN_STREAMS: &str =
    "more scores than an answer holds; ask for fewer of them or of tokens";

/// Checks the number of completions that a request asks for; 1 by default.
///
/// # Errors
/// INVALID_ARGUMENT with the range.
pub fn choices(n: Option<i64>) -> Result<u32, Failure> {
    let n = n.unwrap_or(1);
    match u32::try_from(n) {
        Ok(n) if (1..=CHOICES_MAX).contains(&n) => Ok(n),
        _ => Err(failure::invalid(
            "n",
            &format!("{n} is out of range: from 1 to {CHOICES_MAX}"),
        )),
    }
}

/// The end of a completion: reason, counts and times.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Why the generation ended.
    pub finish: FinishReason,
    /// The engine's summary of the generation.
    pub summary: GenerateSummary,
    /// The end of a completion: reason, token counts and times.
    pub seed: u64,
    /// The stop string that ended the generation.
    pub stop_string: Option<String>,
    /// Number of tool calls whose arguments are a JSON object.
    pub calls: usize,
    /// Tool calls that the choice began, whatever their arguments are.
    pub told_calls: usize,
    /// Whether the completion was cut inside of its last part.
    pub cuts_part: bool,
    /// Whether a tool call was incomplete when something other than the model ended the generation.
    pub cuts_call: bool,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// Number of prompt tokens that were reused from the prefix cache.
    pub reused_tokens: u32,
    /// Number of tokens that were generated.
    pub generated_tokens: u32,
    /// Token counts of all completions of the request that have ended so far, this one included.
    pub all: Generated,
    /// The score of each generated token, if scores are wanted and the completion was collected.
    pub scores: Vec<TokenScore>,
    /// With [`Generation::score_text_only`], in place of `scores`: the scores of each text part.
    pub text_scores: Vec<Vec<TokenScore>>,
    /// Times of the request: total, prompt, generation.
    pub times: Times,
}

/// Token counts of a request's completions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Generated {
    /// Number of generated tokens of all completions.
    pub tokens: u32,
    /// Approximate number of generated tokens that are reasoning.
    pub reasoning_tokens: u32,
}

/// Times of a request: total, prompt, generation.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Time from the request's arrival to its end.
    pub total: Duration,
    /// Time to the first token, without the wait in the queue.
    pub prompt: Duration,
    /// Time from the first token to the end.
    pub generation: Duration,
}

impl Ended {
    /// Whether the completion was cut, by `max_tokens` or a full context.
    pub fn is_cut(&self) -> bool {
        matches!(
            self.finish,
            FinishReason::MaxTokens | FinishReason::ContextFull
        )
    }
}

/// The generation of one or more completions, whose text is split into parts.
#[derive(Debug)]
pub struct Generation {
    choices: Vec<Choice>,
    log: RequestLog,
    started: std::time::Instant,
    all: Generated,
    text_only: bool,
    /// Whether scores are delayed until the text of their tokens is sent.
    holds_scores: bool,
    bound: Bound,
}

/// Counts scores that are held until the end, against a maximum.
#[derive(Debug, Default)]
struct Bound {
    so_far: u64,
    /// Error message for too many scores; `None` if none are held.
    refusal: Option<&'static str>,
}

impl Bound {
    /// Counts further scores.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if there are too many.
    fn count(&mut self, scores: &[TokenScore]) -> Result<(), Failure> {
        let more: u64 = scores.iter().map(|score| score.top.len() as u64 + 1).sum();
        self.so_far += more;
        match self.refusal {
            Some(refusal) if self.so_far > SCORES_MAX => Err(failure::invalid("logprobs", refusal)),
            _ => Ok(()),
        }
    }
}

/// One of the completions of a request.
#[derive(Debug)]
struct Choice {
    running: Running,
    splitter: Splitter,
    reasoning_tokens: u32,
    /// Scores of tokens whose text is still held back.
    waiting: Vec<TokenScore>,
    /// Whether the last part is text, so that more can be appended to it.
    says: bool,
    ended: bool,
}

/// The next event of a generation.
#[derive(Debug)]
pub enum Step {
    /// More output of a completion.
    More {
        /// Index of the choice.
        choice: usize,
        /// Parts of the output; empty while the text may be the beginning of a mark.
        parts: Vec<Part>,
        /// Ids of the tokens.
        ids: Vec<u32>,
        /// A score for each token, if the request asks for them.
        scores: Vec<TokenScore>,
        /// Whether the tokens are marks, or have no text: no later text belongs to them or to
        /// tokens before them.
        unsaid: bool,
    },
    /// The end of a completion.
    End {
        /// Index of the choice.
        choice: usize,
        /// Parts that were held back until the end.
        parts: Vec<Part>,
        /// Scores of tokens without any text, except those of a stop string.
        scores: Vec<TokenScore>,
        /// How the choice ended.
        ended: Box<Ended>,
        /// Whether this was the request's last completion to end.
        last: bool,
    },
    /// The whole generation failed; no event follows.
    Failed(Failure),
}

impl Generation {
    /// A generation of one or more completions.
    pub fn new(choices: Vec<(Running, Splitter)>, log: RequestLog, arrival: &Arrival) -> Self {
        let choice = |(running, splitter)| Choice {
            running,
            splitter,
            reasoning_tokens: 0,
            waiting: Vec::new(),
            says: false,
            ended: false,
        };
        Self {
            choices: choices.into_iter().map(choice).collect(),
            log,
            started: arrival.at,
            all: Generated::default(),
            text_only: false,
            holds_scores: false,
            bound: Bound::default(),
        }
    }

    /// Delays scores until the text of their tokens is sent: while that may begin a stop string
    /// they wait, and scores of a stop string are dropped.
    pub fn hold_scores(&mut self) {
        self.holds_scores = true;
    }

    /// Collects scores of text parts only, separately for each; scores of reasoning and tool calls
    /// are dropped.
    pub fn score_text_only(&mut self) {
        self.text_only = true;
    }

    /// Limits the number of scores also for a stream, for callers whose streams hold them until the
    /// end.
    pub fn bound_scores(&mut self) {
        self.bound.refusal = Some(TOO_MANY_IN_STREAMS);
    }

    /// Sends arguments of tool calls in pieces as they are generated, where the format of calls
    /// allows that.
    pub fn tell_pieces(&mut self) {
        let choices = self.choices.iter_mut();
        choices.for_each(|choice| choice.splitter.tell_pieces());
    }

    /// The model that generates.
    pub fn model(&self) -> Option<&Arc<LoadedModel>> {
        self.choices.first().map(|choice| &choice.running.model)
    }

    /// The request's LoRA adapters.
    pub fn adapters(&self) -> Option<&AppliedAdapters> {
        self.choices.first()?.running.adapters.as_deref()
    }

    /// Rejects the request if the model reasons although `field` has switched reasoning off.
    ///
    /// # Errors
    /// UNIMPLEMENTED.
    pub fn refuse_thoughts(&mut self, field: &str) -> Result<(), Failure> {
        let keeps = |choice: &Choice| {
            let model = &choice.running.model;
            let source = model.template().and_then(|template| template.source().ok());
            forms::keeps_from_thinking(source.unwrap_or_default(), &choice.running.tail.text)
        };
        if self.choices.iter().all(keeps) {
            return Ok(());
        }
        let failure = failure::unsupported_field(
            field,
            "this model's template has no enable_thinking, so that its thoughts cannot be switched off; leave it unset, or \
             ask for few by reasoning_effort",
        );
        self.fail(&failure);
        Err(failure)
    }

    /// Number of tokens of the prompt.
    pub fn prompt_tokens(&self) -> u32 {
        let first = self.choices.first();
        first.map_or(0, |choice| choice.running.prompt_tokens)
    }

    /// Waits for the next event of any completion. Dropping the future loses no event.
    pub async fn next(&mut self) -> Step {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`Generation::next`], for callers that poll.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Step> {
        let mut open = self.choices.iter_mut().enumerate();
        let found = open.find_map(|(at, choice)| match choice.running_event(cx) {
            Poll::Ready(event) => Some((at, event)),
            Poll::Pending => None,
        });
        match found {
            Some((at, event)) => Poll::Ready(self.step(at, event)),
            None => Poll::Pending,
        }
    }

    /// Turns an engine event of the choice with index `at` into an event of the generation.
    fn step(&mut self, at: usize, event: Option<GenerateEvent>) -> Step {
        let mut parts = Vec::new();
        let choice = &mut self.choices[at];
        match event {
            Some(GenerateEvent::Piece {
                text,
                ids,
                mut scores,
                held,
            }) => {
                let n = ids.len() as u32;
                self.log.generated_tokens = Some(self.log.generated_tokens.unwrap_or(0) + n);
                let before = choice.splitter.is_thinking();
                // Of thoughts none are held where texts alone are scored.
                if !(self.text_only && before)
                    && let Err(failure) = self.bound.count(&scores)
                {
                    return self.failed(failure);
                }
                if self.holds_scores {
                    choice.waiting.append(&mut scores);
                    let told = choice.waiting.len().saturating_sub(held);
                    scores.extend(choice.waiting.drain(..told));
                }
                choice.splitter.push(&text, &mut parts);
                let unsaid = is_unsaid(&text, &parts, &choice.splitter);
                if let Some(last) = parts.last() {
                    choice.says = matches!(last, Part::Text(_));
                }
                if before || choice.splitter.is_thinking() {
                    choice.reasoning_tokens += n;
                }
                Step::More {
                    choice: at,
                    parts,
                    ids,
                    scores,
                    unsaid,
                }
            }
            Some(GenerateEvent::Done(summary)) => self.done(at, &summary),
            Some(GenerateEvent::Failed(error)) => self.failed(refusals::from_engine(&error)),
            None => self.failed(failure::engine_gone()),
        }
    }

    /// Ends the choice with index `at`.
    fn done(&mut self, at: usize, summary: &GenerateSummary) -> Step {
        let mut parts = Vec::new();
        let choice = &mut self.choices[at];
        let thinks = choice.splitter.is_thinking();
        let calls = choice.splitter.is_calling();
        let stops = matches!(summary.finish, FinishReason::EndOfText);
        choice.splitter.finish(!stops, &mut parts);
        choice.ended = true;
        let is_open = match parts.last() {
            // A call comes this late where the mark behind it is missing.
            Some(Part::Text(_) | Part::Call(_) | Part::Arguments(_)) => true,
            Some(Part::Reasoning(_)) => thinks,
            None => thinks || calls || choice.says,
        };
        let reasoning_tokens = choice.reasoning_tokens.min(summary.generated_tokens);
        self.all.tokens += summary.generated_tokens;
        self.all.reasoning_tokens += reasoning_tokens;
        self.log.generated_tokens = Some(self.all.tokens);
        self.log.generated(summary);
        let last = self.choices.iter().all(|choice| choice.ended);
        if last {
            self.log.note(&Ok(()));
        }
        let mut scores = std::mem::take(&mut self.choices[at].waiting);
        let mut ended = self.ended(at, summary);
        if ended.stop_string.is_some() {
            scores.clear();
        }
        ended.cuts_part = is_open && ended.is_cut();
        ended.cuts_call = calls && !stops;
        Step::End {
            choice: at,
            parts,
            scores,
            ended: Box::new(ended),
            last,
        }
    }

    fn failed(&mut self, failure: Failure) -> Step {
        self.fail(&failure);
        Step::Failed(failure)
    }

    /// Records in the request's log that the generation ends with this failure, such as a passed
    /// deadline.
    pub fn fail(&mut self, failure: &Failure) {
        self.log.note(&Err::<(), _>(failure.clone()));
    }

    fn ended(&self, at: usize, summary: &GenerateSummary) -> Ended {
        let total = self.started.elapsed();
        let choice = &self.choices[at];
        let stop_string = choice.running.stop_string(summary.finish);
        Ended {
            finish: summary.finish,
            summary: *summary,
            seed: choice.running.seed,
            stop_string: stop_string.map(str::to_owned),
            calls: choice.splitter.calls(),
            told_calls: choice.splitter.told_calls(),
            cuts_part: false,
            cuts_call: false,
            prompt_tokens: summary.prompt_tokens,
            reused_tokens: summary.reused_tokens,
            generated_tokens: summary.generated_tokens,
            all: self.all,
            scores: Vec::new(),
            text_scores: Vec::new(),
            times: Times {
                total,
                prompt: summary.ttft.saturating_sub(summary.queued),
                generation: total.saturating_sub(summary.ttft),
            },
        }
    }

    /// Collects the single completion of a request. Dropping the future cancels the generation.
    ///
    /// # Errors
    /// The failure of the generation.
    pub async fn collect(self) -> Result<(Vec<Part>, Ended), Failure> {
        let mut answers = self.collect_all().await?;
        answers
            .pop()
            .ok_or_else(|| failure::bug("there is no answer"))
    }

    /// Collects all completions of a request, by index; each has the token counts of all of them.
    /// Dropping the future cancels the generation.
    ///
    /// # Errors
    /// The failure of any of them; INVALID_ARGUMENT for more scores than can be held.
    pub async fn collect_all(mut self) -> Result<Vec<(Vec<Part>, Ended)>, Failure> {
        let collected = || Collected {
            text_only: self.text_only,
            ..Collected::default()
        };
        let mut so_far: Vec<_> = self.choices.iter().map(|_| collected()).collect();
        let mut answers: Vec<Option<(Vec<Part>, Ended)>> = vec![None; self.choices.len()];
        self.bound.refusal.get_or_insert(TOO_MANY_SCORES);
        self.hold_scores();
        loop {
            match self.next().await {
                Step::More {
                    choice: at,
                    parts,
                    scores,
                    unsaid,
                    ..
                } => {
                    so_far[at].more(parts, scores);
                    if unsaid {
                        so_far[at].unsaid();
                    }
                }
                Step::End {
                    choice: at,
                    parts,
                    scores,
                    mut ended,
                    last,
                } => {
                    let mut whole = std::mem::take(&mut so_far[at]);
                    whole.more(parts, scores);
                    match self.text_only {
                        true => ended.text_scores = whole.of_texts,
                        false => ended.scores = whole.scores,
                    }
                    answers[at] = Some((joined(whole.parts), *ended));
                    if last {
                        let mut answers: Vec<_> = answers.into_iter().flatten().collect();
                        for (_, ended) in &mut answers {
                            ended.all = self.all;
                        }
                        return Ok(answers);
                    }
                }
                Step::Failed(failure) => return Err(failure),
            }
        }
    }
}

/// A completion's collected output so far.
#[derive(Debug, Default)]
struct Collected {
    text_only: bool,
    parts: Vec<Part>,
    /// Scores of tokens; if only text is scored, those of tokens whose text has not arrived yet.
    scores: Vec<TokenScore>,
    /// Log-probabilities of each text part, if only text is scored.
    of_texts: Vec<Vec<TokenScore>>,
}

impl Collected {
    fn more(&mut self, parts: Vec<Part>, scores: Vec<TokenScore>) {
        self.scores.extend(scores);
        for part in parts {
            self.part(part);
        }
    }

    /// Adds a part. Tokens of marks arrive before the part that they introduce.
    fn part(&mut self, part: Part) {
        if self.text_only {
            match (&part, self.parts.last()) {
                (Part::Text(_), Some(Part::Text(_))) => {}
                (Part::Text(_), _) => self.of_texts.push(Vec::new()),
                _ => self.scores.clear(),
            }
            if let (Part::Text(_), Some(text)) = (&part, self.of_texts.last_mut()) {
                text.append(&mut self.scores);
            }
        }
        self.parts.push(part);
    }

    /// Marks the tokens so far as belonging to no later text.
    fn unsaid(&mut self) {
        if self.text_only {
            self.scores.clear();
        }
    }
}

/// Whether no later part can contain `text`, which resulted in these parts. Text that the engine
/// holds back, as for a stop string, does not count yet.
fn is_unsaid(text: &str, parts: &[Part], splitter: &Splitter) -> bool {
    !text.is_empty() && parts.is_empty() && !splitter.holds_text()
}

impl Choice {
    /// Polls for the next event of the choice; pending for ever if it has ended.
    fn running_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        match self.ended {
            true => Poll::Pending,
            false => self.running.poll_next(cx),
        }
    }
}

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;
