//! From the engine's events to an answer: whole, or a stream of a dialect's events.
//!
//! ```text
//! engine's events -> Splitter -> parts -+-> whole: collected, then one JSON document
//!                                       +-> stream: a task writes the dialect's events into a
//!                                           bounded channel, from which the connection takes them
//! ```
//!
//! *Invariants:* the generation ends when its client goes, or does not read for ten seconds while
//! others wait; a stream that is silent for fifteen says that it lives ([`PATIENCE`]). What fails
//! before the first event is answered with a status, not inside of a stream.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{FinishReason, GenerateEvent, GenerateSummary, TokenScore};
use rocmforge_service::check::SCORES_MAX;
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::generation::Running;
use rocmforge_service::request_log::RequestLog;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::call::{Call, with_type};
use super::parts::{Part, Splitter, joined};
pub(super) use super::sse::{data_event, event};

/// How long a stream waits, for either side.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// How long it may be silent.
    heartbeat: Duration,
    /// How long it may be unread while others wait.
    unread: Duration,
}

const PATIENCE: Patience = Patience {
    heartbeat: Duration::from_secs(15),
    unread: Duration::from_secs(10),
};
/// How long the first event is waited for before the header of a stream is sent: what is refused by
/// then gets a status.
const FIRST_WAIT: Duration = Duration::from_secs(2);
/// Chunks that may wait for the connection; the engine has a queue of its own.
const CHUNKS_WAITING: usize = 8;
/// What an answer is refused with whose scores are too many to be held until its end.
const TOO_MANY_SCORES: &str =
    "more scores than an answer holds; stream it, or ask for fewer of them or of tokens";

/// How an answer ended.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub(super) finish: FinishReason,
    /// The stop string that ended it.
    pub(super) stop_string: Option<String>,
    pub(super) calls: usize,
    pub(super) prompt_tokens: u32,
    /// Of them those that were not computed.
    pub(super) reused_tokens: u32,
    pub(super) generated_tokens: u32,
    /// Of all answers that have ended, this one with them.
    pub(super) all: Generated,
    /// The scores of the generated tokens, where they are wanted and the answer was collected.
    pub(super) scores: Vec<TokenScore>,
    pub(super) times: Times,
}

/// How much was generated.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Generated {
    pub(super) tokens: u32,
    /// Those of them that the model thought, about.
    pub(super) reasoning_tokens: u32,
}

/// Where the time went.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) total: Duration,
    pub(super) prompt: Duration,
    pub(super) generation: Duration,
}

impl Ended {
    /// Whether it was cut: `max_tokens`, or the context is full.
    pub(super) fn is_cut(&self) -> bool {
        matches!(
            self.finish,
            FinishReason::MaxTokens | FinishReason::ContextFull
        )
    }
}

/// A generation of one answer or several, taken apart.
#[derive(Debug)]
pub(super) struct Generation {
    choices: Vec<Choice>,
    log: RequestLog,
    started: std::time::Instant,
    all: Generated,
}

/// One of the answers.
#[derive(Debug)]
struct Choice {
    running: Running,
    splitter: Splitter,
    reasoning_tokens: u32,
    ended: bool,
}

/// What comes next.
enum Step {
    /// More of an answer, by its index.
    Parts(usize, Vec<Part>, Vec<TokenScore>),
    /// The end of an answer, and whether it is the last that ends.
    End(usize, Vec<Part>, Box<Ended>, bool),
    Failed(Failure),
}

impl Generation {
    /// Of at least one answer.
    pub(super) fn new(choices: Vec<(Running, Splitter)>, log: RequestLog, call: &Call) -> Self {
        let choice = |(running, splitter)| Choice {
            running,
            splitter,
            reasoning_tokens: 0,
            ended: false,
        };
        Self {
            choices: choices.into_iter().map(choice).collect(),
            log,
            started: call.arrival.at,
            all: Generated::default(),
        }
    }

    /// The model that answers.
    pub(super) fn model(&self) -> Option<&Arc<LoadedModel>> {
        self.choices.first().map(|choice| &choice.running.model)
    }

    /// Tokens of the prompt.
    pub(super) fn prompt_tokens(&self) -> u32 {
        let first = self.choices.first();
        first.map_or(0, |choice| choice.running.prompt_tokens)
    }

    /// The next step of whichever answer has one. Cancelling it loses nothing.
    async fn next(&mut self) -> Step {
        let (at, event) = match self.choices.as_mut_slice() {
            [one] => (0, one.running.next().await),
            several => next_of(several).await,
        };
        let mut parts = Vec::new();
        let choice = &mut self.choices[at];
        match event {
            Some(GenerateEvent::Piece { text, ids, scores }) => {
                let n = ids.len() as u32;
                self.log.generated_tokens = Some(self.log.generated_tokens.unwrap_or(0) + n);
                let before = choice.splitter.is_thinking();
                choice.splitter.push(&text, &mut parts);
                if before || choice.splitter.is_thinking() {
                    choice.reasoning_tokens += n;
                }
                Step::Parts(at, parts, scores)
            }
            Some(GenerateEvent::Done(summary)) => {
                choice.splitter.finish(&mut parts);
                choice.ended = true;
                let reasoning_tokens = choice.reasoning_tokens.min(summary.generated_tokens);
                self.all.tokens += summary.generated_tokens;
                self.all.reasoning_tokens += reasoning_tokens;
                self.log.generated_tokens = Some(self.all.tokens);
                self.log.tokens_per_s = Some(summary.decode_tokens_per_s);
                self.log.uploaded_bytes = Some(summary.cache.uploaded_bytes);
                let last = self.choices.iter().all(|choice| choice.ended);
                if last {
                    self.log.note(&Ok(()));
                }
                let ended = self.ended(at, &summary);
                Step::End(at, parts, Box::new(ended), last)
            }
            Some(GenerateEvent::Failed(error)) => self.failed(failure::from_engine(&error)),
            None => self.failed(failure::engine_gone()),
        }
    }

    fn failed(&mut self, failure: Failure) -> Step {
        self.log.note(&Err::<(), _>(failure.clone()));
        Step::Failed(failure)
    }

    fn ended(&self, at: usize, summary: &GenerateSummary) -> Ended {
        let total = self.started.elapsed();
        let choice = &self.choices[at];
        let stop_string = choice.running.stop_string(summary.finish);
        Ended {
            finish: summary.finish,
            stop_string: stop_string.map(str::to_owned),
            calls: choice.splitter.calls(),
            prompt_tokens: summary.prompt_tokens,
            reused_tokens: summary.reused_tokens,
            generated_tokens: summary.generated_tokens,
            all: self.all,
            scores: Vec::new(),
            times: Times {
                total,
                prompt: summary.ttft.saturating_sub(summary.queued),
                generation: total.saturating_sub(summary.ttft),
            },
        }
    }

    /// The whole answer, of one. Dropping the future cancels the generation.
    pub(super) async fn collect(self) -> Result<(Vec<Part>, Ended), Failure> {
        let mut answers = self.collect_all().await?;
        answers
            .pop()
            .ok_or_else(|| failure::bug("there is no answer"))
    }

    /// All answers, by index; each tells what all of them generated. Dropping the future cancels
    /// the generation.
    pub(super) async fn collect_all(mut self) -> Result<Vec<(Vec<Part>, Ended)>, Failure> {
        let mut so_far = vec![(Vec::new(), Vec::new()); self.choices.len()];
        let mut answers: Vec<Option<(Vec<Part>, Ended)>> = vec![None; self.choices.len()];
        let mut n_scores = 0;
        loop {
            match self.next().await {
                Step::Parts(at, more, scored) => {
                    n_scores += scored.iter().map(|s| s.top.len() as u64 + 1).sum::<u64>();
                    if n_scores > SCORES_MAX {
                        return Err(failure::invalid("logprobs", TOO_MANY_SCORES));
                    }
                    let (parts, scores) = &mut so_far[at];
                    parts.extend(more);
                    scores.extend(scored);
                }
                Step::End(at, more, mut ended, last) => {
                    let (mut parts, scores) = std::mem::take(&mut so_far[at]);
                    parts.extend(more);
                    ended.scores = scores;
                    answers[at] = Some((joined(parts), *ended));
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

/// The next event of whichever answer has one, with its index.
async fn next_of(choices: &mut [Choice]) -> (usize, Option<GenerateEvent>) {
    let open = choices.iter_mut().enumerate();
    let mut open: Vec<_> = open
        .filter(|(_, choice)| !choice.ended)
        .map(|(i, choice)| Box::pin(async move { (i, choice.running.next().await) }))
        .collect();
    std::future::poll_fn(|context| {
        for next in &mut open {
            if let Poll::Ready(event) = next.as_mut().poll(context) {
                return Poll::Ready(event);
            }
        }
        Poll::Pending
    })
    .await
}

/// A dialect's events. Each method appends what is sent.
pub(super) trait Events: Send + 'static {
    /// The type of the stream's content.
    const CONTENT_TYPE: &'static str;

    /// The first events.
    fn begin(&mut self, out: &mut String);
    /// The index of the answer that what follows is about.
    fn choice(&mut self, _: usize) {}
    /// The scores of tokens whose text comes next; called only where they are wanted.
    fn scores(&mut self, _: Vec<TokenScore>) {}
    /// More of the answer.
    fn part(&mut self, part: Part, out: &mut String);
    /// A sign of life.
    fn heartbeat(&mut self, out: &mut String);
    /// The last events of an answer that others go on behind.
    fn choice_end(&mut self, _: &Ended, _: &mut String) {}
    /// The last events.
    fn end(&mut self, ended: &Ended, out: &mut String);
    /// The last events of a stream that failed.
    fn failed(&mut self, failure: &Failure, out: &mut String);
}

/// The content type of server-sent events.
pub(super) const SSE: &str = "text/event-stream; charset=utf-8";
/// The sign of life that readers of server-sent events leave out.
pub(super) const SSE_HEARTBEAT: &str = ": still computing\n\n";

/// The answer as a stream.
///
/// # Errors
/// What failed before the first event.
pub(super) async fn stream<E: Events>(
    mut generation: Generation,
    events: E,
    call: &Call,
) -> Result<Response, Failure> {
    let first = tokio::time::timeout(FIRST_WAIT, generation.next()).await;
    if let Ok(Step::Failed(failure)) = first {
        return Err(failure);
    }
    let (chunks, taken) = mpsc::channel::<Bytes>(CHUNKS_WAITING);
    let engine = call.service.engine.clone();
    let others_wait = move || engine.snapshot().queued > 0;
    tokio::spawn(write(
        generation,
        events,
        first.ok(),
        chunks,
        others_wait,
        PATIENCE,
    ));
    let chunks = ReceiverStream::new(taken).map(Ok::<_, Infallible>);
    Ok(streamed::<E>(Body::from_stream(chunks)))
}

/// A stream that says nothing but that it failed.
pub(super) fn failed_stream<E: Events>(mut events: E, failure: &Failure) -> Response {
    let mut out = String::new();
    events.begin(&mut out);
    events.failed(failure, &mut out);
    streamed::<E>(Body::from(out))
}

fn streamed<E: Events>(body: Body) -> Response {
    let mut response = with_type(E::CONTENT_TYPE, body);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies would hold small pieces back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Where steps come from: the engine, by way of [`Generation`].
trait Source: Send {
    /// The next step. Cancelling it loses nothing.
    fn next(&mut self) -> impl Future<Output = Step> + Send;
}

impl Source for Generation {
    fn next(&mut self) -> impl Future<Output = Step> + Send {
        Generation::next(self)
    }
}

/// Writes events until the last, or until nobody takes them. Dropping the source ends it.
///
/// A token costs no timer: one is set for the silence, and looked at anew when it fires.
async fn write<E: Events>(
    mut source: impl Source,
    mut events: E,
    first: Option<Step>,
    chunks: mpsc::Sender<Bytes>,
    others_wait: impl Fn() -> bool,
    patience: Patience,
) {
    let mut out = String::new();
    events.begin(&mut out);
    let mut step = first;
    let mut said = Instant::now();
    let mut silence = pin!(tokio::time::sleep_until(said + patience.heartbeat));
    let mut gone = pin!(chunks.closed());
    loop {
        let ended = match step.take() {
            Some(step) => take(step, &mut events, &mut out),
            None => false,
        };
        if !out.is_empty() {
            // As large as the last one was: most are alike.
            let next = String::with_capacity(out.len());
            let chunk = Bytes::from(std::mem::replace(&mut out, next));
            if !send(&chunks, chunk, &others_wait, patience.unread).await {
                return;
            }
            said = Instant::now();
        }
        if ended {
            return;
        }
        tokio::select! {
            biased;
            next = source.next() => step = Some(next),
            () = &mut gone => return,
            () = &mut silence => {
                let until = said + patience.heartbeat;
                if Instant::now() < until {
                    silence.as_mut().reset(until);
                } else {
                    events.heartbeat(&mut out);
                    silence.as_mut().reset(Instant::now() + patience.heartbeat);
                }
            }
        }
    }
}

/// Writes a step; whether it was the last.
fn take<E: Events>(step: Step, events: &mut E, out: &mut String) -> bool {
    match step {
        Step::Parts(at, parts, scores) => {
            events.choice(at);
            if !scores.is_empty() {
                events.scores(scores);
            }
            parts.into_iter().for_each(|part| events.part(part, out));
            false
        }
        Step::End(at, parts, ended, last) => {
            events.choice(at);
            parts.into_iter().for_each(|part| events.part(part, out));
            match last {
                true => events.end(&ended, out),
                false => events.choice_end(&ended, out),
            }
            last
        }
        Step::Failed(failure) => {
            events.failed(&failure, out);
            true
        }
    }
}

/// Hands a chunk to the connection. False where the client is gone, or does not read while others
/// wait.
async fn send(
    chunks: &mpsc::Sender<Bytes>,
    chunk: Bytes,
    others_wait: &impl Fn() -> bool,
    unread: Duration,
) -> bool {
    let chunk = match chunks.try_send(chunk) {
        Ok(()) => return true,
        Err(TrySendError::Closed(_)) => return false,
        Err(TrySendError::Full(chunk)) => chunk,
    };
    loop {
        match tokio::time::timeout(unread, chunks.reserve()).await {
            Ok(Ok(place)) => {
                place.send(chunk);
                return true;
            }
            Ok(Err(_)) => return false,
            Err(_) if others_wait() => {
                tracing::info!("a stream is ended: its client does not read it while others wait");
                return false;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says what happens, a word each.
    struct Words;

    impl Events for Words {
        const CONTENT_TYPE: &'static str = "text/plain";

        fn begin(&mut self, out: &mut String) {
            out.push_str("begin");
        }

        fn part(&mut self, part: Part, out: &mut String) {
            if let Part::Text(text) = part {
                out.push_str(&text);
            }
        }

        fn heartbeat(&mut self, out: &mut String) {
            out.push_str("alive");
        }

        fn end(&mut self, _: &Ended, out: &mut String) {
            out.push_str("end");
        }

        fn failed(&mut self, failure: &Failure, out: &mut String) {
            out.push_str(failure.reason());
        }
    }

    /// A step after so many milliseconds each, and then the end of the engine.
    struct Slow(Vec<u64>);

    impl Source for Slow {
        async fn next(&mut self) -> Step {
            match self.0.first().copied() {
                Some(ms) => {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    self.0.remove(0);
                    Step::Parts(0, vec![Part::Text("step".to_owned())], Vec::new())
                }
                None => Step::Failed(failure::engine_gone()),
            }
        }
    }

    /// A step that never comes.
    struct Never;

    impl Source for Never {
        async fn next(&mut self) -> Step {
            std::future::pending().await
        }
    }

    const SHORT: Patience = Patience {
        heartbeat: Duration::from_millis(20),
        unread: Duration::from_millis(20),
    };

    async fn rest(mut taken: mpsc::Receiver<Bytes>) -> Vec<String> {
        let mut chunks = Vec::new();
        while let Some(chunk) = taken.recv().await {
            chunks.push(String::from_utf8(chunk.to_vec()).unwrap());
        }
        chunks
    }

    #[tokio::test]
    async fn a_silent_stream_says_that_it_lives_and_ends_with_its_reader() {
        let (chunks, taken) = mpsc::channel(CHUNKS_WAITING);
        let source = Slow(vec![0, 0]);
        tokio::spawn(write(source, Words, None, chunks, || false, PATIENCE));
        assert_eq!(rest(taken).await, ["begin", "step", "step", "NOT_SERVING"]);

        let (chunks, mut taken) = mpsc::channel(CHUNKS_WAITING);
        let begun = Instant::now();
        let writing = tokio::spawn(write(Never, Words, None, chunks, || false, SHORT));
        for expected in ["begin", "alive", "alive"] {
            assert_eq!(taken.recv().await.unwrap(), expected);
        }
        assert!(begun.elapsed() >= 2 * SHORT.heartbeat);
        drop(taken);
        writing.await.unwrap();
    }

    #[tokio::test]
    async fn a_stream_that_is_not_read_ends_when_others_wait_and_only_then() {
        for others_wait in [true, false] {
            let (chunks, taken) = mpsc::channel(CHUNKS_WAITING);
            let source = Slow(vec![0; 100]);
            let wait = move || others_wait;
            let writing = tokio::spawn(write(source, Words, None, chunks, wait, SHORT));
            if others_wait {
                // It ends although nothing was read.
                writing.await.unwrap();
                assert_eq!(rest(taken).await.len(), CHUNKS_WAITING);
            } else {
                tokio::time::sleep(10 * SHORT.unread).await;
                assert_eq!(rest(taken).await.len(), 102);
                writing.await.unwrap();
            }
        }
    }
}
