//! From the engine's events to an answer: whole, or a stream of a dialect's events.
//!
//! ```text
//! engine's events -> Splitter -> parts -+-> whole: collected, then one JSON document
//!                                       +-> stream: a task writes the dialect's events into a
//!                                           bounded channel, from which the connection takes them
//! ```
//!
//! *Invariants:* the generation ends when its client goes, or has not read for ten seconds and
//! others wait at their end; a stream that is silent for fifteen seconds says that it lives
//! ([`PATIENCE`]; tests below, and `a_client_that_goes_ends_its_generation`).
//!
//! What fails before the first event and within [`FIRST_WAIT`] is answered with a
//! status, not inside of a stream.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use rocmforge_engine::api::TokenScore;
use rocmforge_service::answers::{Ended, Generation, Step};
use rocmforge_service::failure::Failure;
use rocmforge_service::parts::Part;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::call::{Call, with_type};
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
    /// How the answer ends that is about to say its last parts.
    fn ends(&mut self, _: &Ended) {}
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
    call.sockets.spawn(write(
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
trait Steps: Send {
    /// The next step. Cancelling it loses nothing.
    fn next(&mut self) -> impl Future<Output = Step> + Send;
}

impl Steps for Generation {
    fn next(&mut self) -> impl Future<Output = Step> + Send {
        Generation::next(self)
    }
}

/// Writes events until the last, or until nobody takes them. Dropping the source ends it.
///
/// A token costs no timer: one is set for the silence, and looked at anew when it fires.
async fn write<E: Events>(
    mut source: impl Steps,
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
        Step::More {
            choice: at,
            parts,
            scores,
            ..
        } => {
            events.choice(at);
            if !scores.is_empty() {
                events.scores(scores);
            }
            parts.into_iter().for_each(|part| events.part(part, out));
            false
        }
        Step::End {
            choice: at,
            parts,
            ended,
            last,
        } => {
            events.choice(at);
            events.ends(&ended);
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
    use rocmforge_service::failure;

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

    impl Steps for Slow {
        async fn next(&mut self) -> Step {
            match self.0.first().copied() {
                Some(ms) => {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    self.0.remove(0);
                    Step::More {
                        choice: 0,
                        parts: vec![Part::Text("step".to_owned())],
                        ids: Vec::new(),
                        scores: Vec::new(),
                    }
                }
                None => Step::Failed(failure::engine_gone()),
            }
        }
    }

    /// A step that never comes.
    struct Never;

    impl Steps for Never {
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
