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
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use rocmforge_engine::api::{FinishReason, GenerateEvent, GenerateSummary};
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::generation::Running;
use rocmforge_service::request_log::RequestLog;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::call::{Call, with_type};
use super::parts::{Part, Splitter, joined};

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
    /// Of the generated ones those that the model thought, about.
    pub(super) reasoning_tokens: u32,
    pub(super) times: Times,
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

/// A generation, taken apart.
#[derive(Debug)]
pub(super) struct Generation {
    running: Running,
    splitter: Splitter,
    log: RequestLog,
    started: std::time::Instant,
    reasoning_tokens: u32,
}

/// What comes next.
enum Step {
    Parts(Vec<Part>),
    End(Vec<Part>, Ended),
    Failed(Failure),
}

impl Generation {
    pub(super) fn new(running: Running, splitter: Splitter, log: RequestLog, call: &Call) -> Self {
        Self {
            running,
            splitter,
            log,
            started: call.arrival.at,
            reasoning_tokens: 0,
        }
    }

    /// Tokens of the prompt.
    pub(super) fn prompt_tokens(&self) -> u32 {
        self.running.prompt_tokens
    }

    /// The next step. Cancelling it loses nothing.
    async fn next(&mut self) -> Step {
        let mut parts = Vec::new();
        match self.running.next().await {
            Some(GenerateEvent::Piece { text, ids }) => {
                let n = ids.len() as u32;
                self.log.generated_tokens = Some(self.log.generated_tokens.unwrap_or(0) + n);
                let before = self.splitter.is_thinking();
                self.splitter.push(&text, &mut parts);
                if before || self.splitter.is_thinking() {
                    self.reasoning_tokens += n;
                }
                Step::Parts(parts)
            }
            Some(GenerateEvent::Done(summary)) => {
                self.splitter.finish(&mut parts);
                self.log.generated_tokens = Some(summary.generated_tokens);
                self.log.tokens_per_s = Some(summary.decode_tokens_per_s);
                self.log.uploaded_bytes = Some(summary.cache.uploaded_bytes);
                self.log.note(&Ok(()));
                Step::End(parts, self.ended(&summary))
            }
            Some(GenerateEvent::Failed(error)) => self.failed(failure::from_engine(&error)),
            None => self.failed(failure::engine_gone()),
        }
    }

    fn failed(&mut self, failure: Failure) -> Step {
        self.log.note(&Err::<(), _>(failure.clone()));
        Step::Failed(failure)
    }

    fn ended(&self, summary: &GenerateSummary) -> Ended {
        let total = self.started.elapsed();
        let stop_string = self.running.stop_string(summary.finish);
        Ended {
            finish: summary.finish,
            stop_string: stop_string.map(str::to_owned),
            calls: self.splitter.calls(),
            prompt_tokens: summary.prompt_tokens,
            reused_tokens: summary.reused_tokens,
            generated_tokens: summary.generated_tokens,
            reasoning_tokens: self.reasoning_tokens.min(summary.generated_tokens),
            times: Times {
                total,
                prompt: summary.ttft.saturating_sub(summary.queued),
                generation: total.saturating_sub(summary.ttft),
            },
        }
    }

    /// The whole answer. Dropping the future cancels the generation.
    pub(super) async fn collect(mut self) -> Result<(Vec<Part>, Ended), Failure> {
        let mut parts = Vec::new();
        loop {
            match self.next().await {
                Step::Parts(more) => parts.extend(more),
                Step::End(more, ended) => {
                    parts.extend(more);
                    return Ok((joined(parts), ended));
                }
                Step::Failed(failure) => return Err(failure),
            }
        }
    }
}

/// A dialect's events. Each method appends what is sent.
pub(super) trait Events: Send + 'static {
    /// The type of the stream's content.
    const CONTENT_TYPE: &'static str;

    /// The first events.
    fn begin(&mut self, out: &mut String);
    /// More of the answer.
    fn part(&mut self, part: Part, out: &mut String);
    /// A sign of life.
    fn heartbeat(&mut self, out: &mut String);
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
    loop {
        let ended = match step.take() {
            Some(step) => take(step, &mut events, &mut out),
            None => false,
        };
        if !out.is_empty() {
            let chunk = Bytes::from(std::mem::take(&mut out));
            if !send(&chunks, chunk, &others_wait, patience.unread).await {
                return;
            }
        }
        if ended {
            return;
        }
        tokio::select! {
            next = tokio::time::timeout(patience.heartbeat, source.next()) => match next {
                Ok(next) => step = Some(next),
                Err(_) => events.heartbeat(&mut out),
            },
            () = chunks.closed() => return,
        }
    }
}

/// Writes a step; whether it was the last.
fn take<E: Events>(step: Step, events: &mut E, out: &mut String) -> bool {
    match step {
        Step::Parts(parts) => {
            parts.into_iter().for_each(|part| events.part(part, out));
            false
        }
        Step::End(parts, ended) => {
            parts.into_iter().for_each(|part| events.part(part, out));
            events.end(&ended, out);
            true
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

/// Appends a server-sent event.
pub(super) fn event(name: Option<&str>, data: &serde_json::Value, out: &mut String) {
    if let Some(name) = name {
        out.push_str("event: ");
        out.push_str(name);
        out.push('\n');
    }
    out.push_str("data: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

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
                    Step::Parts(vec![Part::Text("step".to_owned())])
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
