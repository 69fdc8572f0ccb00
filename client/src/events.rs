//! Server streams: a run of events, of which exactly the last one is final.
//!
//! ```text
//!          progress, piece              loaded, done              end of stream
//!   Running ---------------> Running .. -------------> Finished ---------------> Ended
//!      |               error, end of stream without a final event                 ^
//!      +--------------------------------------------------------------------------+
//! ```
//!
//! *Invariant:* `Ended` gives `None` for good (test `an_error_in_mid_stream_ends_it`). Who polls on
//! after the final event reads the stream's end, without which the daemon may take the request for
//! cancelled.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt};
use rocmforge_proto::v1;
use tonic::Streaming;

use crate::Error;

/// A message of a server stream: one event, or one that this client is too old
/// to know.
pub trait StreamEvent {
    /// What happened.
    type Event;
    /// The event in the message; `None` for a kind that this client does not
    /// know, which is skipped.
    fn into_event(self) -> Option<Self::Event>;
    /// Whether the stream ends with this event.
    fn is_final(event: &Self::Event) -> bool;
}

macro_rules! stream_event {
    ($message:ident, $module:ident, $last:ident) => {
        impl StreamEvent for v1::$message {
            type Event = v1::$module::Event;
            fn into_event(self) -> Option<Self::Event> {
                self.event
            }
            fn is_final(event: &Self::Event) -> bool {
                matches!(event, v1::$module::Event::$last(_))
            }
        }
    };
}

stream_event!(LoadEvent, load_event, Loaded);
stream_event!(PreloadEvent, preload_event, Done);

impl StreamEvent for v1::GenerateEvent {
    type Event = v1::generate_event::Event;
    fn into_event(self) -> Option<Self::Event> {
        self.event
    }
    fn is_final(event: &Self::Event) -> bool {
        matches!(event, v1::generate_event::Event::Done(done) if !done.others_go_on)
    }
}

/// Events of a load; the last is `Loaded`.
pub type LoadEvents = Events<v1::LoadEvent>;
/// Events of a preload; the last is `Done`.
pub type PreloadEvents = Events<v1::PreloadEvent>;
/// Events of a generation; the last is `Done`, of which each answer has one.
pub type GenerateEvents = Events<v1::GenerateEvent>;

/// A stream of events. Dropping it before its end cancels the request.
pub struct Events<M> {
    rpc: &'static str,
    state: State<M>,
}

enum State<M> {
    Running(Streaming<M>),
    Finished(Streaming<M>),
    Ended,
}

impl<M> Events<M> {
    pub(crate) fn new(rpc: &'static str, messages: Streaming<M>) -> Self {
        let state = State::Running(messages);
        Events { rpc, state }
    }
}

impl<M> std::fmt::Debug for Events<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match self.state {
            State::Running(_) => "running",
            State::Finished(_) => "finished",
            State::Ended => "ended",
        };
        f.debug_struct("Events")
            .field("rpc", &self.rpc)
            .field("state", &state)
            .finish()
    }
}

impl<M: StreamEvent> Stream for Events<M> {
    type Item = Result<M::Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let rpc = self.rpc;
        loop {
            let (messages, running) = match &mut self.state {
                State::Running(messages) => (messages, true),
                State::Finished(messages) => (messages, false),
                State::Ended => return Poll::Ready(None),
            };
            let last = match std::task::ready!(messages.poll_next_unpin(cx)) {
                Some(Ok(message)) => match message.into_event().filter(|_| running) {
                    Some(event) => {
                        if M::is_final(&event)
                            && let State::Running(messages) =
                                std::mem::replace(&mut self.state, State::Ended)
                        {
                            self.state = State::Finished(messages);
                        }
                        return Poll::Ready(Some(Ok(event)));
                    }
                    None => continue,
                },
                Some(Err(status)) => Some(Err(Error::from_status(rpc, status))),
                None if running => Some(Err(Error::Incomplete {
                    rpc,
                    missing: "its last event",
                })),
                None => None,
            };
            self.state = State::Ended;
            return Poll::Ready(last);
        }
    }
}
