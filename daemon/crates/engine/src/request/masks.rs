//! Token masks of requests with a grammar, computed on threads beside the passes.
//!
//! ```text
//! engine:  choose - accept ---- pass ----- choose with the mask - accept ...
//!                        \               /
//! masks-N:                 mask of next -
//! ```
//!
//! A mask of 150k tokens takes microseconds to a millisecond, and 15 ms at most; a pass takes
//! milliseconds. A matcher is with the engine or with one of these threads, never with both.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rocmforge_grammar::{Error as GrammarError, Mask, Matcher};

use crate::api::error::Error;

/// Maximum number of threads that compute masks: one for every four processors, and at least one.
const THREADS_MAX: usize = 4;

/// Threads that compute masks; they end when the last clone is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Masks {
    /// Queue of masks to compute, at most one for each running request.
    jobs: Sender<Job>,
}

#[derive(Debug)]
struct Job {
    matcher: Box<Matcher>,
    reply: Sender<(Box<Matcher>, Result<Mask, GrammarError>)>,
}

impl Masks {
    /// Starts the threads; if none can be started, masks are computed when they are needed.
    pub(crate) fn start() -> Self {
        let (jobs, taken) = channel::<Job>();
        let taken = Arc::new(Mutex::new(taken));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        for i in 0..(processors / 4).clamp(1, THREADS_MAX) {
            let taken = Arc::clone(&taken);
            let work = move || {
                loop {
                    // Whoever waits for a job holds the lock, and nobody does anything else with
                    // it.
                    let job = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job { mut matcher, reply }) = job else {
                        return;
                    };
                    let mask = matcher.mask();
                    // The request may have ended meanwhile.
                    let _ = reply.send((matcher, mask));
                }
            };
            let thread = std::thread::Builder::new().name(format!("masks-{i}"));
            if let Err(error) = thread.spawn(work) {
                tracing::warn!(%error, "a thread for masks cannot be started");
            }
        }
        Self { jobs }
    }
}

/// The grammar state of one request, and the mask of its next token.
#[derive(Debug)]
pub(crate) struct Constraint {
    threads: Masks,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The next token is not restricted.
    Free(Box<Matcher>),
    /// The mask of the next token is not being computed yet.
    Behind(Box<Matcher>),
    /// The mask is being computed on another thread.
    Beside(Receiver<(Box<Matcher>, Result<Mask, GrammarError>)>),
    /// The mask is ready.
    Ready(Box<Matcher>, Mask),
    /// Computing the mask failed.
    Lost,
}

impl Constraint {
    pub(crate) fn new(matcher: Box<Matcher>, threads: Masks) -> Self {
        let mut held = Self {
            threads,
            state: State::Lost,
        };
        held.compute(matcher);
        held
    }

    fn compute(&mut self, matcher: Box<Matcher>) {
        if !matcher.restricts() {
            self.state = State::Free(matcher);
            return;
        }
        let (reply, result) = channel();
        self.state = match self.threads.jobs.send(Job { matcher, reply }) {
            Ok(()) => State::Beside(result),
            Err(job) => State::Behind(job.0.matcher),
        };
    }

    /// Whether the next token is restricted by a mask.
    pub(crate) fn restricts(&self) -> bool {
        !matches!(self.state, State::Free(_))
    }

    /// Whether no later token can be restricted any more.
    pub(crate) fn is_done(&self) -> bool {
        matches!(&self.state, State::Free(matcher) if matcher.is_done())
    }

    /// Returns the mask of the next token, and waits for it if necessary; unchanged until a token
    /// is accepted.
    pub(crate) fn mask(&mut self) -> Result<&Mask, Error> {
        let (matcher, mask) = match std::mem::replace(&mut self.state, State::Lost) {
            State::Free(mut matcher) => {
                let mask = matcher.mask();
                (matcher, mask)
            }
            State::Ready(matcher, mask) => (matcher, Ok(mask)),
            State::Behind(mut matcher) => {
                let mask = matcher.mask();
                (matcher, mask)
            }
            State::Beside(result) => result.recv().map_err(|_| lost())?,
            State::Lost => return Err(lost()),
        };
        self.state = State::Ready(matcher, mask.map_err(|error| stuck(&error))?);
        match &self.state {
            State::Ready(_, mask) => Ok(mask),
            _ => Err(lost()),
        }
    }

    /// Accepts the chosen token. Returns whether the output is complete with it.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, Error> {
        let mut matcher = match std::mem::replace(&mut self.state, State::Lost) {
            State::Ready(matcher, _) | State::Free(matcher) => matcher,
            State::Behind(_) | State::Beside(_) | State::Lost => return Err(lost()),
        };
        matcher.accept(token).map_err(|error| stuck(&error))?;
        let complete = matcher.is_complete();
        if !complete {
            self.compute(matcher);
        }
        Ok(complete)
    }
}

fn stuck(error: &GrammarError) -> Error {
    Error::InvalidArgument {
        field: "format",
        message: error.to_string(),
    }
}

fn lost() -> Error {
    Error::Internal("the state of a grammar was lost".to_owned())
}
