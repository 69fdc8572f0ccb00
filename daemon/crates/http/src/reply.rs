//! Converts the engine's events to a response: as a whole, or as a stream of a dialect's events.
//!
//! ```text
//! engine's events -> Splitter -> parts -+-> whole: collected, then one JSON document
//!                                       +-> stream: a task writes the dialect's events into a
//!                                           bounded channel, from which the connection takes them
//! ```
//!
//! *Invariants:* the generation ends when its client goes, or has not read for ten seconds and
//! others wait at their end; a stream that is silent for fifteen seconds says that it lives
//! ([`PATIENCE`]; tests below, and `a_client_that_goes_ends_its_generation`). A body ends cleanly
//! only after the dialect's last events or its failure ([`Last`]); otherwise the connection is
//! reset, so that a partial response never looks complete.
//!
//! A failure before the first event and within [`FIRST_WAIT`] gets an HTTP status, not an event of
//! a stream.

use std::pin::{Pin, pin};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use rocmforge_chat::parts::Part;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::answers::{Ended, Generation, Step};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::call::{Call, with_type};
use super::sending::Streamed;
pub(super) use super::sse::{SSE, data_event, event};

/// Time limits of a stream.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Interval after which a silent stream sends a comment.
    heartbeat: Duration,
    /// How long a stream may be unread while other requests wait.
    unread: Duration,
}

const PATIENCE: Patience = Patience {
    heartbeat: Duration::from_secs(15),
    unread: Duration::from_secs(10),
};
/// How long the first event is awaited before the head of a stream is sent: failures until then get
/// an HTTP status.
const FIRST_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of chunks that wait for the connection; the engine has its own queue.
const CHUNKS_WAITING: usize = 8;

/// Writer of a dialect's stream events. Each method appends to the output.
pub(super) trait Events: Send + 'static {
    /// Content type of the stream.
    const CONTENT_TYPE: &'static str;

    /// Appends the first events.
    fn begin(&mut self, out: &mut String);
    /// Sets the index of the completion that the next events concern.
    fn choice(&mut self, _: usize) {}
    /// Notes that tokens were generated; their text may follow later.
    fn tokens(&mut self, _: usize) {}
    /// Takes the scores of tokens whose text follows; called only if scores are wanted.
    fn scores(&mut self, _: Vec<TokenScore>) {}
    /// The tokens whose scores were taken have no text, such as those of marks.
    fn unsaid(&mut self) {}
    /// Appends more output of the completion.
    fn part(&mut self, part: Part, out: &mut String);
    /// Appends a heartbeat.
    fn heartbeat(&mut self, out: &mut String);
    /// Appends the last events of a completion while others go on.
    fn choice_end(&mut self, _: &Ended, _: &mut String) {}
    /// Appends the last events of the stream.
    fn end(&mut self, ended: &Ended, out: &mut String);
    /// Appends the last events of a failed stream.
    fn failed(&mut self, failure: &Failure, out: &mut String);
}

/// Heartbeat of a silent stream: a comment, which readers of server-sent events ignore.
pub(super) const SSE_HEARTBEAT: &str = ": still computing\n\n";

/// Sends a generation as a stream.
///
/// # Errors
/// A failure before the first event.
pub(super) async fn stream<E: Events>(
    mut generation: Generation,
    events: E,
    call: &Call,
) -> Result<Response, Failure> {
    generation.hold_scores();
    let first = tokio::time::timeout(FIRST_WAIT, generation.next()).await;
    if let Ok(Step::Failed(failure)) = first {
        return Err(failure);
    }
    let (chunks, taken) = channel(CHUNKS_WAITING);
    let engine = call.service.engine.clone();
    let others_wait = move || engine.snapshot().others_wait();
    call.sockets.spawn(any(write(
        generation,
        events,
        first.ok(),
        chunks,
        others_wait,
        PATIENCE,
    )));
    Ok(streamed::<E>(Body::from_stream(taken)))
}

/// Erases a task's type: the runtime's code is generated for each type that is spawned.
pub(super) fn any(
    work: impl Future<Output = ()> + Send + 'static,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(work)
}

/// The error of a body whose writer stopped before its end.
#[derive(Debug, thiserror::Error)]
#[error("the stream broke off")]
pub(super) struct BrokenOff;

/// The sending end of a stream's chunks.
pub(super) struct Chunks {
    pub(super) waiting: mpsc::Sender<Bytes>,
    pub(super) last: Last,
}

/// Marks a stream as complete, with a final chunk for which there is always room. If it is dropped
/// unused, the stream breaks off.
pub(super) struct Last(oneshot::Sender<Bytes>);

impl Last {
    pub(super) fn says(self, bytes: Bytes) {
        // The client may be gone.
        let _ = self.0.send(bytes);
    }
}

/// A channel for a stream's chunks, of which a limited number may wait.
pub(super) fn channel(
    chunks_waiting: usize,
) -> (
    Chunks,
    impl Stream<Item = Result<Bytes, BrokenOff>> + Send + 'static,
) {
    let (waiting, taken) = mpsc::channel::<Bytes>(chunks_waiting);
    let (last, behind) = oneshot::channel();
    let behind = async { behind.await.map_err(|_| BrokenOff) };
    let all = ReceiverStream::new(taken)
        .map(Ok)
        .chain(futures_util::stream::once(behind));
    let last = Last(last);
    (Chunks { waiting, last }, all)
}

/// A stream that consists of a failure only.
pub(super) fn failed_stream<E: Events>(mut events: E, failure: &Failure) -> Response {
    let mut out = String::new();
    events.begin(&mut out);
    events.failed(failure, &mut out);
    streamed::<E>(Body::from(out))
}

fn streamed<E: Events>(body: Body) -> Response {
    let mut response = with_type(E::CONTENT_TYPE, body);
    response.extensions_mut().insert(Streamed);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies would hold small pieces back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Source of generation steps; tests have their own.
trait Steps: Send {
    /// Waits for the next step. Dropping the future loses nothing.
    fn next(&mut self) -> impl Future<Output = Step> + Send;
}

impl Steps for Generation {
    fn next(&mut self) -> impl Future<Output = Step> + Send {
        Generation::next(self)
    }
}

/// Writes events until the last, or until the client is gone or does not read. Dropping the source
/// ends it.
///
/// A token sets no timer: one timer for silence is set, and checked when it fires.
async fn write<E: Events>(
    mut source: impl Steps,
    mut events: E,
    first: Option<Step>,
    chunks: Chunks,
    others_wait: impl Fn() -> bool,
    patience: Patience,
) {
    let Chunks { waiting, last } = chunks;
    let mut out = String::new();
    events.begin(&mut out);
    let mut step = first;
    let mut said = Instant::now();
    let mut silence = pin!(tokio::time::sleep_until(said + patience.heartbeat));
    let mut gone = pin!(waiting.closed());
    loop {
        let ended = match step.take() {
            Some(step) => take(step, &mut events, &mut out),
            None => false,
        };
        if !out.is_empty() {
            // As large as the last one was: most are alike.
            let next = String::with_capacity(out.len());
            let chunk = Bytes::from(std::mem::replace(&mut out, next));
            match send(&waiting, chunk, &others_wait, patience.unread).await {
                Sent::Taken => said = Instant::now(),
                Sent::Gone => return,
                Sent::Unread => {
                    let failure = failure::unread(patience.unread);
                    events.failed(&failure, &mut out);
                    return last.says(Bytes::from(out));
                }
            }
        }
        if ended {
            return last.says(Bytes::new());
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

/// Writes a step. Returns whether it was the last.
fn take<E: Events>(step: Step, events: &mut E, out: &mut String) -> bool {
    match step {
        Step::More {
            choice: at,
            parts,
            ids,
            scores,
            unsaid,
        } => {
            events.choice(at);
            events.tokens(ids.len());
            if !scores.is_empty() {
                events.scores(scores);
            }
            parts.into_iter().for_each(|part| events.part(part, out));
            if unsaid {
                events.unsaid();
            }
            false
        }
        Step::End {
            choice: at,
            parts,
            scores,
            ended,
            last,
        } => {
            events.choice(at);
            if !scores.is_empty() {
                events.scores(scores);
            }
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

/// Result of sending a chunk.
enum Sent {
    /// The chunk was accepted for the connection.
    Taken,
    /// The client is gone.
    Gone,
    /// The client does not read, and others wait.
    Unread,
}

/// Passes a chunk to the connection.
async fn send(
    chunks: &mpsc::Sender<Bytes>,
    chunk: Bytes,
    others_wait: &impl Fn() -> bool,
    unread: Duration,
) -> Sent {
    let chunk = match chunks.try_send(chunk) {
        Ok(()) => return Sent::Taken,
        Err(TrySendError::Closed(_)) => return Sent::Gone,
        Err(TrySendError::Full(chunk)) => chunk,
    };
    loop {
        match tokio::time::timeout(unread, chunks.reserve()).await {
            Ok(Ok(place)) => {
                place.send(chunk);
                return Sent::Taken;
            }
            Ok(Err(_)) => return Sent::Gone,
            Err(_) if others_wait() => {
                tracing::info!("a stream is ended: its client does not read it while others wait");
                return Sent::Unread;
            }
            Err(_) => {}
        }
    }
}

/// Collects the rest of a stream, and whether it ended cleanly.
#[cfg(test)]
pub(super) async fn collected(
    taken: impl Stream<Item = Result<Bytes, BrokenOff>>,
) -> (Vec<String>, Result<(), BrokenOff>) {
    let mut taken = pin!(taken);
    let mut chunks = Vec::new();
    while let Some(chunk) = taken.next().await {
        match chunk {
            Ok(chunk) if chunk.is_empty() => {}
            Ok(chunk) => chunks.push(String::from_utf8_lossy(&chunk).into_owned()),
            Err(error) => return (chunks, Err(error)),
        }
    }
    (chunks, Ok(()))
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
            out.push_str(failure.reason().name());
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
                        unsaid: false,
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

    #[tokio::test]
    async fn a_silent_stream_says_that_it_lives_and_ends_with_its_reader() {
        let (chunks, taken) = channel(CHUNKS_WAITING);
        let source = Slow(vec![0, 0]);
        tokio::spawn(write(source, Words, None, chunks, || false, PATIENCE));
        let (said, end) = collected(taken).await;
        assert_eq!(said, ["begin", "step", "step", "NOT_SERVING"]);
        assert!(end.is_ok());

        let (chunks, taken) = channel(CHUNKS_WAITING);
        let mut taken = Box::pin(taken);
        let begun = Instant::now();
        let writing = tokio::spawn(write(Never, Words, None, chunks, || false, SHORT));
        for expected in ["begin", "alive", "alive"] {
            assert_eq!(taken.next().await.unwrap().unwrap(), expected);
        }
        assert!(begun.elapsed() >= 2 * SHORT.heartbeat);
        drop(taken);
        writing.await.unwrap();
    }

    #[tokio::test]
    async fn a_stream_that_is_not_read_ends_when_others_wait_and_only_then() {
        for others_wait in [true, false] {
            let (chunks, taken) = channel(CHUNKS_WAITING);
            let source = Slow(vec![0; 100]);
            let wait = move || others_wait;
            let writing = tokio::spawn(write(source, Words, None, chunks, wait, SHORT));
            if others_wait {
                // It ends although nothing was read.
                writing.await.unwrap();
                let (said, end) = collected(taken).await;
                assert_eq!(said.len(), CHUNKS_WAITING + 1);
                // Whoever reads what is left learns that it is not all.
                assert_eq!(said.last().unwrap(), "UNREAD");
                assert!(end.is_ok());
            } else {
                tokio::time::sleep(10 * SHORT.unread).await;
                assert_eq!(collected(taken).await.0.len(), 102);
                writing.await.unwrap();
            }
        }
    }

    #[tokio::test]
    async fn a_stream_whose_writer_stops_in_the_middle_has_no_clean_end() {
        let (chunks, taken) = channel(CHUNKS_WAITING);
        let writing = tokio::spawn(write(Never, Words, None, chunks, || false, PATIENCE));
        let mut taken = Box::pin(taken);
        assert_eq!(taken.next().await.unwrap().unwrap(), "begin");
        writing.abort();
        let (said, end) = collected(taken).await;
        assert!(said.is_empty() && end.is_err(), "{said:?}");
    }
}
