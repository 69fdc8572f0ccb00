//! Replies that are being sent, over gRPC and HTTP.
//!
//! The transport takes a frame of a reply, and comes for the next when that one has been sent as
//! far as the client lets it. A client that does not read makes it never come. What the reply then
//! holds (a generation with its place and its KV, or megabytes of encoded answer) is freed by
//! [`Replies::watch`], with its count; the client learns of it when it reads on.
//!
//! ```text
//!            taken: a frame              taken again: nothing there yet
//! fresh --------------------> unread ----------------------------------> waiting for its handler
//!                               ^  |  too long                                   |
//!                               |  +---------> ended (body and rest dropped)     | a frame
//!                               |                |  room is short                |
//!                               |                +---------> connection closed   |
//!                               +------------------------------------------------+
//! ```
//!
//! *Invariant:* an ended reply only holds what the transport had taken of it: of a large frame
//! copies of [`PIECE_BYTES`] each, which are counted for as long as they are there (tests below).
//! The transport frees them when the client reads, or when the connection ends.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};
use rocmforge_service::sum::{Held, Sum};

use crate::peer::{Call, Peer};

/// Maximum time for which a reply may be unread.
pub const UNREAD_MAX: Duration = Duration::from_secs(60);
/// Maximum time for which a reply may be unread while memory for replies is short.
const UNREAD_WHILE_SHORT: Duration = Duration::from_secs(10);
/// Frames larger than this are counted, and passed on in copies of this many bytes: a slice that
/// shares the frame's memory would keep all of it.
const PIECE_BYTES: usize = 16 << 10;
/// How long other requests have to wait before an unread reply is ended for their sake.
const OTHERS_WAIT_MIN: Duration = Duration::from_secs(5);
/// Interval of checks for unread replies.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// Rule by which unread replies are ended.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Maximum time for which a reply may be unread while there is memory for replies.
    pub unread_max: Duration,
    /// Whether unread replies are ended only while other requests wait, for the engine or for
    /// memory.
    pub only_while_others_wait: bool,
    /// Whether the connection carries nothing else and ends with the reply.
    pub ends_connection: bool,
}

/// All replies that are being sent.
#[derive(Debug)]
pub struct Replies {
    sum: Arc<Sum>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    replies: HashMap<u64, Weak<dyn Watched>>,
}

/// A reply, as the periodic check sees it.
trait Watched: Send + Sync {
    /// Ends the reply if it has been unread for too long.
    fn look(&self, now: Instant, others_wait: bool);
}

/// State of a reply, shared by the transport that sends it and the check that may end it.
struct Reply<B> {
    sum: Arc<Sum>,
    rule: Rule,
    peer: Arc<Peer>,
    state: Mutex<State<B>>,
}

struct State<B> {
    /// The handler's body, and the call that it belongs to; `None` once the reply has ended.
    body: Option<(B, Call)>,
    /// The part of a large frame that was not passed to the transport yet.
    rest: Bytes,
    /// Counts the large frame until the body makes another one, which may share its memory.
    held: Held,
    /// Time at which the transport last took a frame; `None` while the handler is waited for.
    unread_since: Option<Instant>,
    /// How the reply ended, until the transport takes it.
    end: Option<Ended>,
}

/// A reply that was ended because its client did not read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The time for which the reply was unread.
    pub unread_max: Duration,
    /// Whether what was sent ends inside of a frame, or of a message that spans several.
    pub inside: bool,
}

/// What the transport takes from a reply.
#[derive(Debug)]
pub enum Taken<E> {
    /// The next frame of the reply.
    Frame(Frame<Bytes>),
    /// The handler's body failed.
    Failed(E),
    /// The reply was ended; returned once, and nothing follows.
    Ended(Ended),
}

impl Replies {
    /// An empty set of replies, whose bytes are counted in `sum`.
    pub fn new(sum: &Arc<Sum>) -> Arc<Self> {
        Arc::new(Self {
            sum: Arc::clone(sum),
            open: Mutex::default(),
        })
    }

    /// Wraps the body of a reply for the transport.
    pub fn wrap<B>(self: &Arc<Self>, body: B, rule: Rule, call: Call) -> Outgoing<B>
    where
        B: Body<Data = Bytes> + Send + 'static,
    {
        let peer = Arc::clone(call.peer());
        let reply = Arc::new(Reply {
            sum: Arc::clone(&self.sum),
            rule,
            state: Mutex::new(State {
                body: Some((body, call)),
                rest: Bytes::new(),
                held: self.sum.hold(peer.caller.uid),
                unread_since: Some(Instant::now()),
                end: None,
            }),
            peer,
        });
        let watched: Weak<Reply<B>> = Arc::downgrade(&reply);
        let id = {
            let mut open = lock(&self.open);
            let id = open.next;
            open.next += 1;
            open.replies.insert(id, watched);
            id
        };
        Outgoing {
            replies: Arc::clone(self),
            id,
            reply,
        }
    }

    /// Ends replies that are unread for too long; runs for as long as it is polled.
    pub async fn watch(&self, others_wait: impl Fn() -> bool) {
        let mut waiting_since: Option<Instant> = None;
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            // A request waits for a moment before it runs, which is no reason to end another.
            waiting_since = others_wait().then(|| waiting_since.unwrap_or_else(Instant::now));
            let others_wait = waiting_since.is_some_and(|at| at.elapsed() >= OTHERS_WAIT_MIN);
            let replies: Vec<_> = lock(&self.open)
                .replies
                .values()
                .filter_map(Weak::upgrade)
                .collect();
            for reply in replies {
                reply.look(Instant::now(), others_wait);
            }
        }
    }
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open")
            .field("replies", &self.replies.len())
            .finish_non_exhaustive()
    }
}

impl<B: Body + Send> Watched for Reply<B> {
    fn look(&self, now: Instant, others_wait: bool) {
        let is_short = self.sum.is_full(self.peer.caller.uid);
        let mut state = lock(&self.state);
        if state.body.is_none() {
            drop(state);
            // Its transport has some of it, which nothing else takes from there.
            if is_short && self.peer.close() {
                tracing::info!(
                    uid = self.peer.caller.uid,
                    "a connection is closed: its client does not read, and room for replies is short"
                );
            }
            return;
        }
        let Some(since) = state.unread_since else {
            return;
        };
        let may_end = others_wait || is_short || !self.rule.only_while_others_wait;
        let unread_max = match is_short {
            true => self.rule.unread_max.min(UNREAD_WHILE_SHORT),
            false => self.rule.unread_max,
        };
        if !may_end || now.duration_since(since) < unread_max {
            return;
        }
        // A message that is written as it is taken says so while more of it is to come.
        let goes_on = |(body, _): &(B, Call)| body.size_hint().lower() > 0;
        let inside = !state.rest.is_empty() || state.body.as_ref().is_some_and(goes_on);
        state.end = Some(Ended { unread_max, inside });
        state.held.clear();
        let dropped = (state.body.take(), std::mem::take(&mut state.rest));
        drop(state);
        // Outside of the lock: this cancels what the handler does.
        drop(dropped);
        if self.rule.ends_connection {
            self.peer.close();
        }
        tracing::info!(
            unread_s = now.duration_since(since).as_secs(),
            "a reply is ended: its client does not read it"
        );
    }
}

/// Locks a mutex. A poisoned lock is used: the values are valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of a reply as the transport takes it.
pub struct Outgoing<B> {
    replies: Arc<Replies>,
    id: u64,
    reply: Arc<Reply<B>>,
}

impl<B> Drop for Outgoing<B> {
    fn drop(&mut self) {
        lock(&self.replies.open).replies.remove(&self.id);
    }
}

impl<B: Body<Data = Bytes> + Unpin> Outgoing<B> {
    /// Polls for the next item of the reply.
    pub fn poll_taken(&self, cx: &mut Context<'_>) -> Poll<Option<Taken<B::Error>>> {
        let mut state = lock(&self.reply.state);
        if let Some(piece) = self.piece(&mut state) {
            return Poll::Ready(Some(Taken::Frame(piece)));
        }
        let Some((body, _)) = &mut state.body else {
            return Poll::Ready(state.end.take().map(Taken::Ended));
        };
        let frame = match Pin::new(body).poll_frame(cx) {
            Poll::Pending => {
                state.unread_since = None;
                return Poll::Pending;
            }
            Poll::Ready(frame) => frame,
        };
        state.held.clear();
        let frame = match frame {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Taken::Failed(error))),
            None => return Poll::Ready(None),
        };
        state.unread_since = Some(Instant::now());
        let frame = match frame.into_data() {
            Ok(data) if data.len() > PIECE_BYTES => {
                state.held.add(data.len() as u64);
                state.rest = data;
                return Poll::Ready(self.piece(&mut state).map(Taken::Frame));
            }
            Ok(data) => Frame::data(data),
            Err(frame) => frame,
        };
        Poll::Ready(Some(Taken::Frame(frame)))
    }

    /// The next copied piece of a large frame.
    fn piece(&self, state: &mut State<B>) -> Option<Frame<Bytes>> {
        if state.rest.is_empty() {
            return None;
        }
        let n = PIECE_BYTES.min(state.rest.len());
        let mut held = self.replies.sum.hold(self.reply.peer.caller.uid);
        held.add(n as u64);
        let data = state.rest[..n].into();
        state.rest.advance(n);
        if state.rest.is_empty() {
            // An empty rest keeps the memory, too.
            state.rest = Bytes::new();
        }
        state.unread_since = Some(Instant::now());
        Some(Frame::data(Bytes::from_owner(Counted {
            data,
            _held: held,
        })))
    }

    /// Whether no more data follows.
    pub fn is_end_stream(&self) -> bool {
        let state = lock(&self.reply.state);
        match &state.body {
            Some((body, _)) => state.rest.is_empty() && body.is_end_stream(),
            None => state.end.is_none(),
        }
    }

    /// Number of bytes that are still to come, if known.
    pub fn size_hint(&self) -> SizeHint {
        let state = lock(&self.reply.state);
        let Some((body, _)) = &state.body else {
            return SizeHint::default();
        };
        let (of_body, rest) = (body.size_hint(), state.rest.len() as u64);
        let mut hint = SizeHint::default();
        hint.set_lower(of_body.lower() + rest);
        if let Some(upper) = of_body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// Bytes of memory that are counted until the last copy is dropped.
struct Counted {
    data: Box<[u8]>,
    _held: Held,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rocmforge_service::arrival::Caller;
    use tokio::sync::oneshot;

    use super::*;
    use crate::table::Table;

    const RULE: Rule = Rule {
        unread_max: UNREAD_MAX,
        only_while_others_wait: false,
        ends_connection: false,
    };

    /// Memory that says when it is gone.
    struct Buffer(Vec<u8>, Arc<AtomicBool>);

    impl AsRef<[u8]> for Buffer {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Buffer {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }

    /// Frames, and then nothing for good.
    struct Stalling(Vec<Bytes>);

    impl Body for Stalling {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            match self.0.pop() {
                Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
                None => Poll::Pending,
            }
        }
    }

    /// A reply of a megabyte and a word under a sum, the word that its memory is gone, and its
    /// connection's.
    struct Case {
        sum: Arc<Sum>,
        reply: Outgoing<Stalling>,
        is_gone: Arc<AtomicBool>,
        closed: oneshot::Receiver<()>,
    }

    fn case(sum: u64, rule: Rule) -> Case {
        let sum = Sum::new(sum);
        let is_gone = Arc::new(AtomicBool::new(false));
        let buffer = Buffer(vec![7; 1 << 20], Arc::clone(&is_gone));
        let (peer, closed) = Peer::enter(Caller::unknown(), &Table::new(4));
        let body = Stalling(vec![Bytes::from_static(b"end"), Bytes::from_owner(buffer)]);
        let reply = Replies::new(&sum).wrap(body, rule, peer.call());
        Case {
            sum,
            reply,
            is_gone,
            closed,
        }
    }

    impl Case {
        fn take(&self) -> Poll<Option<Taken<std::convert::Infallible>>> {
            let waker = std::task::Waker::noop();
            self.reply.poll_taken(&mut Context::from_waker(waker))
        }

        fn piece(&self) -> Bytes {
            match self.take() {
                Poll::Ready(Some(Taken::Frame(frame))) => frame.into_data().unwrap(),
                other => panic!("{other:?}"),
            }
        }

        fn look_after(&self, passed: Duration, others_wait: bool) {
            let later = Instant::now() + passed;
            self.reply.reply.look(later, others_wait);
        }

        fn is_full(&self) -> bool {
            self.sum.is_full(Caller::NOBODY)
        }

        fn is_gone(&self) -> bool {
            self.is_gone.load(Ordering::Relaxed)
        }

        fn is_closed(&mut self) -> bool {
            self.closed.try_recv().is_ok()
        }
    }

    #[test]
    fn an_ended_reply_keeps_no_more_than_the_transport_has_of_it() {
        let mut case = case(1 << 20, RULE);
        let piece = case.piece();
        assert_eq!(piece.len(), PIECE_BYTES);
        case.look_after(UNREAD_WHILE_SHORT / 2, true);
        assert!(case.is_full() && !case.is_gone());
        case.look_after(UNREAD_MAX * 2, false);
        assert!(!case.is_full() && case.is_gone());
        assert_eq!(piece, vec![7; PIECE_BYTES]);
        let Poll::Ready(Some(Taken::Ended(ended))) = case.take() else {
            panic!("its client is told");
        };
        assert!(ended.inside);
        assert!(matches!(case.take(), Poll::Ready(None)));
        assert!(case.reply.is_end_stream() && !case.is_closed());
    }

    #[test]
    fn a_reply_that_is_read_is_whole_and_counts_until_the_last_piece_is_gone() {
        let case = case(1 << 20, RULE);
        let n = (1 << 20) / PIECE_BYTES;
        let pieces: Vec<_> = (0..n).map(|_| case.piece()).collect();
        assert!(pieces.iter().all(|piece| piece.len() == PIECE_BYTES));
        assert!(case.is_gone());
        assert_eq!(case.piece(), "end");
        assert!(matches!(case.take(), Poll::Pending));
        // What the transport has is counted.
        assert!(case.is_full());
        drop(pieces);
        assert!(!case.is_full());
        // It waits for its handler, not for its reader.
        case.look_after(UNREAD_MAX * 2, true);
        assert!(matches!(case.take(), Poll::Pending));
    }

    #[test]
    fn a_connection_of_an_ended_reply_is_closed_where_room_is_short() {
        let mut case = case(2 * PIECE_BYTES as u64, RULE);
        let taken = [case.piece(), case.piece()];
        case.look_after(UNREAD_MAX * 2, false);
        assert!(case.is_gone() && case.is_full() && !case.is_closed());
        case.look_after(UNREAD_MAX * 2, false);
        assert!(case.is_closed());
        drop(taken);
        assert!(!case.is_full());
    }

    #[test]
    fn a_reply_alone_on_its_connection_ends_it() {
        let rule = Rule {
            ends_connection: true,
            ..RULE
        };
        let mut case = case(8 << 20, rule);
        case.piece();
        case.look_after(UNREAD_MAX * 2, false);
        assert!(case.is_gone() && case.is_closed());
    }

    #[test]
    fn a_reply_may_be_unread_for_less_long_where_room_is_short() {
        for (sum, ends) in [(8 << 20, false), (1 << 20, true)] {
            let case = case(sum, RULE);
            case.piece();
            case.look_after(UNREAD_WHILE_SHORT * 2, false);
            assert_eq!(case.is_gone(), ends);
        }
    }

    #[test]
    fn a_stream_may_be_unread_until_others_wait_or_room_is_short() {
        let rule = Rule {
            only_while_others_wait: true,
            ..RULE
        };
        for (sum, others_wait, ends) in [
            (8 << 20, false, false),
            (8 << 20, true, true),
            (1 << 20, false, true),
        ] {
            let case = case(sum, rule);
            case.piece();
            case.look_after(UNREAD_MAX * 2, others_wait);
            assert_eq!(case.is_gone(), ends);
        }
    }
}
