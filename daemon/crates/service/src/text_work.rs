//! Tokenizes and renders texts off the async threads, with bounded concurrency.
//!
//! Short texts, long ones and grammars wait in separate lanes, so that a chat message never waits
//! behind an eight-megabyte prompt or a grammar that takes minutes. Each lane runs a few at a time
//! and has a bounded queue; more are rejected with RESOURCE_EXHAUSTED. Clients take turns in each,
//! and one client cannot take all places ([`crate::lane`]): slow templates of one client only hold
//! up its own texts.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rocmforge_failure::{self as failure, Failure};

use crate::lane::Lane;
use crate::peer::Peer;

/// Texts up to this many bytes are short: a few milliseconds of work.
const SHORT_MAX_BYTES: usize = 64 << 10;
/// Number of short texts that are processed at once; one client may have all but one of them.
pub const SHORT_AT_ONCE: usize = 4;
/// Maximum number of waiting short texts.
const SHORT_WAITING_MAX: usize = 1024;
/// Number of long texts that are processed at once; one client may have all but one of them.
pub const LONG_AT_ONCE: usize = 3;
/// Number of chats that are rendered at once: each has a text's place, so none waits here.
pub const RENDERED_AT_ONCE: usize = SHORT_AT_ONCE + LONG_AT_ONCE;
/// Maximum number of grammars that are compiled at once, all but one of them for one client. A few
/// grammars take long without a bound, so they have places of their own: requests without a grammar
/// never wait for one.
pub const GRAMMARS_AT_ONCE: usize = 3;
/// Maximum number of waiting grammars.
const GRAMMARS_WAITING_MAX: usize = 256;
/// Maximum number of waiting long texts: at the largest message size, half a gigabyte.
const LONG_WAITING_MAX: usize = 32;

/// Flag that tells running work that its caller is gone.
#[derive(Debug, Clone, Default)]
pub struct Unwanted(Arc<AtomicBool>);

impl Unwanted {
    /// Whether the caller is gone.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Sets the flag when the future that waits for the work is dropped.
#[derive(Debug)]
struct DropGuard(Unwanted);

impl Drop for DropGuard {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// The lanes for short texts, long texts and grammars.
#[derive(Debug)]
pub struct TextWork {
    short: Arc<Lane>,
    long: Arc<Lane>,
    grammars: Arc<Lane>,
}

/// Messages about work of a lane that cannot be done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneWords {
    /// The lane's queue is full.
    pub(crate) full: &'static str,
    /// Delay after which the request may be sent again, as the message says.
    pub(crate) retry: Duration,
    /// The work panicked (a bug).
    pub(crate) panicked: &'static str,
}

const TEXTS: LaneWords = LaneWords {
    full: "too many texts wait to be tokenized already; try again in a second",
    retry: Duration::from_secs(1),
    panicked: "the tokenizer or the template panicked",
};
const GRAMMARS: LaneWords = LaneWords {
    full: "too many grammars wait to be compiled already; try again in a second",
    retry: Duration::from_secs(1),
    panicked: "the compiler of grammars panicked",
};

impl Default for TextWork {
    fn default() -> Self {
        Self {
            short: Lane::new(SHORT_AT_ONCE, SHORT_WAITING_MAX),
            long: Lane::new(LONG_AT_ONCE, LONG_WAITING_MAX),
            grammars: Lane::new(GRAMMARS_AT_ONCE, GRAMMARS_WAITING_MAX),
        }
    }
}

impl TextWork {
    /// Runs `work` on a blocking thread. `bytes` is the size of the text. Dropping the future while
    /// it waits takes it out of the lane. Once begun, work keeps its place until it ends;
    /// [`Unwanted`] tells it that the future was dropped, so that long work (a template) can end.
    /// Work that does not check it takes time in proportion to its text.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if too many texts wait, INTERNAL for a panic, and those of
    /// `work`.
    pub async fn run<T: Send + 'static>(
        &self,
        peer: Peer,
        bytes: usize,
        work: impl FnOnce(&Unwanted) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let lane = if bytes <= SHORT_MAX_BYTES {
            &self.short
        } else {
            &self.long
        };
        Self::run_in(lane, (peer, TEXTS), work).await
    }

    /// Compiles a grammar; its compilation cannot be cancelled.
    ///
    /// # Errors
    /// As [`TextWork::run`].
    pub async fn compile<T: Send + 'static>(
        &self,
        peer: Peer,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        Self::run_in(&self.grammars, (peer, GRAMMARS), |_: &_| work()).await
    }

    /// Runs work on a blocking thread once it has a place in a lane; `words` are the error messages
    /// if it cannot run.
    ///
    /// # Errors
    ///
    /// As [`TextWork::run`].
    pub(crate) async fn run_in<T: Send + 'static>(
        lane: &Arc<Lane>,
        (peer, words): (Peer, LaneWords),
        work: impl FnOnce(&Unwanted) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let work = move |unwanted: &Unwanted| Box::new(work(unwanted)) as Given;
        let given = run_boxed(lane, (peer, words), Box::new(work)).await?;
        match given.downcast() {
            Ok(result) => *result,
            Err(_) => Err(failure::bug("work gave something of another type")),
        }
    }
}

/// The result of work, with its type erased.
type Given = Box<dyn Any + Send>;

/// As [`TextWork::run_in`], with the type of the work erased: there are dozens of types, and each
/// would have its own copy of a task's code.
async fn run_boxed(
    lane: &Arc<Lane>,
    (peer, words): (Peer, LaneWords),
    work: Box<dyn FnOnce(&Unwanted) -> Given + Send>,
) -> Result<Given, Failure> {
    let Ok(place) = lane.enter(peer).await else {
        return Err(failure::exhausted(words.full, words.retry));
    };
    let unwanted = Unwanted::default();
    let guard = DropGuard(unwanted.clone());
    let job = tokio::task::spawn_blocking(move || {
        let given = work(&unwanted);
        drop(place);
        given
    });
    let ended = job.await;
    drop(guard);
    match ended {
        Ok(given) => Ok(given),
        Err(error) if error.is_panic() => Err(failure::bug(words.panicked)),
        Err(_) => Err(failure::draining()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_of_one_client_that_takes_long_holds_up_no_other() {
        let lanes = Arc::new(TextWork::default());
        let (let_go, ends) = std::sync::mpsc::channel::<()>();
        let ends = Arc::new(std::sync::Mutex::new(ends));
        let long = (0..40).map(|_| {
            let (lanes, ends) = (Arc::clone(&lanes), Arc::clone(&ends));
            tokio::spawn(async move {
                let work = move |_: &_| Ok(_ = ends.lock().unwrap().recv());
                lanes.run(Peer::User(1), 1, work).await
            })
        });
        let long: Vec<_> = long.collect();
        tokio::task::yield_now().await;
        for n in 0..20 {
            // Hangs here if its client has no turn.
            let call = lanes.run(Peer::User(2), 1, move |_| Ok(n));
            assert_eq!(call.await.ok(), Some(n));
        }
        assert!(long.iter().all(|call| !call.is_finished()));
        drop(let_go);
        for call in long {
            call.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn work_that_cannot_be_done_is_told_in_the_words_of_its_lane() {
        let words = LaneWords {
            full: "full; try again in 2 seconds",
            retry: Duration::from_secs(2),
            panicked: "it panicked",
        };
        let run = |lane: Arc<Lane>, work: fn(&Unwanted) -> Result<(), Failure>| async move {
            TextWork::run_in(&lane, (Peer::Local, words), work)
                .await
                .unwrap_err()
        };
        let panicked = run(Lane::new(2, 1), |_| panic!("for the test")).await;
        assert!(panicked.message().contains("it panicked"), "{panicked:?}");
        let full = run(Lane::new(2, 0), |_| Ok(())).await;
        assert_eq!(full.retry_after(), Some(words.retry));
        assert!(full.message().contains("in 2 seconds"), "{full:?}");
    }

    #[test]
    fn a_chat_that_has_a_place_waits_for_no_child() {
        let children = rocmforge_tokenizer::RenderLimits::default().at_once;
        assert!(children >= RENDERED_AT_ONCE, "{children}");
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_told_so_and_frees_its_place() {
        let lanes = TextWork::default();
        let endless = |unwanted: &Unwanted| {
            while !unwanted.get() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        for _ in 0..SHORT_AT_ONCE {
            let call = lanes.run(Peer::Local, 1, endless);
            let cut = tokio::time::timeout(Duration::from_millis(20), call).await;
            assert!(cut.is_err());
        }
        // Hangs here if a place stays taken.
        let call = lanes.run(Peer::Local, 1, |_| Ok(7));
        assert_eq!(call.await.ok(), Some(7));
    }
}
