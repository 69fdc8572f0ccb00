//! Tokenizing and rendering, off the async workers and bounded in number.
//!
//! Short texts, long ones and grammars wait in separate lanes, so that a chat message never stands
//! behind an eight-megabyte prompt or a grammar that takes minutes. Each lane runs a few at a time
//! and lets a named number wait; more are refused with RESOURCE_EXHAUSTED.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::failure::{self, Failure};

/// Texts up to this many bytes are short: a few milliseconds of work.
const SHORT_MAX_BYTES: usize = 64 << 10;
/// Short texts that are worked on at once.
pub const SHORT_AT_ONCE: usize = 4;
/// Short texts that may wait; a client that sends more is not waiting for answers.
const SHORT_WAITING_MAX: usize = 1024;
/// Long texts that are worked on at once.
pub const LONG_AT_ONCE: usize = 2;
/// Grammars that are compiled at once. Few are slow, but no time bounds those: whoever asks for no
/// grammar does not wait for one.
pub const GRAMMARS_AT_ONCE: usize = 2;
/// Grammars that may wait.
const GRAMMARS_WAITING_MAX: usize = 256;
/// Long texts that may wait: at the largest message size, half a gigabyte.
const LONG_WAITING_MAX: usize = 32;

/// Tells work that nobody waits for it any more.
#[derive(Debug, Clone, Default)]
pub struct Unwanted(Arc<AtomicBool>);

impl Unwanted {
    /// Whether nobody waits.
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

/// The lanes.
#[derive(Debug)]
pub struct TextWork {
    short: Lane,
    long: Lane,
    grammars: Lane,
}

#[derive(Debug)]
struct Lane {
    /// What is said where no more may wait.
    full: &'static str,
    admitted: Arc<Semaphore>,
    running: Arc<Semaphore>,
}

impl Lane {
    fn new(full: &'static str, at_once: usize, waiting: usize) -> Self {
        Self {
            full,
            admitted: Arc::new(Semaphore::new(at_once + waiting)),
            running: Arc::new(Semaphore::new(at_once)),
        }
    }
}

impl Default for TextWork {
    fn default() -> Self {
        const TEXTS: &str = "too many texts wait to be tokenized already; try again in a second";
        const GRAMMARS: &str =
            "too many grammars wait to be compiled already; try again in a second";
        Self {
            short: Lane::new(TEXTS, SHORT_AT_ONCE, SHORT_WAITING_MAX),
            long: Lane::new(TEXTS, LONG_AT_ONCE, LONG_WAITING_MAX),
            grammars: Lane::new(GRAMMARS, GRAMMARS_AT_ONCE, GRAMMARS_WAITING_MAX),
        }
    }
}

impl TextWork {
    /// Runs `work` on a blocking thread. `bytes` is the size of the text. Dropping the future while
    /// it waits takes it out of the lane. Once begun, work keeps its place until it ends; it is
    /// told that the future was dropped, so that what may take long (a template) ends then. What
    /// does not ask takes time in proportion to its text.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED where too many texts wait, INTERNAL for a panic, and those of `work`.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Unwanted) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let lane = if bytes <= SHORT_MAX_BYTES {
            &self.short
        } else {
            &self.long
        };
        Self::run_in(lane, work).await
    }

    /// The same for a grammar, whose compilation does not ask whether it is wanted.
    ///
    /// # Errors
    /// As [`TextWork::run`].
    pub async fn compile<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        Self::run_in(&self.grammars, |_: &_| work()).await
    }

    async fn run_in<T: Send + 'static>(
        lane: &Lane,
        work: impl FnOnce(&Unwanted) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let Ok(admitted) = Arc::clone(&lane.admitted).try_acquire_owned() else {
            return Err(failure::exhausted(lane.full, Duration::from_millis(500)));
        };
        let Ok(running) = Arc::clone(&lane.running).acquire_owned().await else {
            return Err(failure::bug("a lane of text work was closed"));
        };
        let unwanted = Unwanted::default();
        let guard = DropGuard(unwanted.clone());
        let job = tokio::task::spawn_blocking(move || {
            let result = work(&unwanted);
            drop((running, admitted));
            result
        });
        let ended = job.await;
        drop(guard);
        match ended {
            Ok(result) => result,
            Err(error) if error.is_panic() => {
                Err(failure::bug("the tokenizer or the template panicked"))
            }
            Err(_) => Err(failure::draining()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let call = lanes.run(1, endless);
            let cut = tokio::time::timeout(Duration::from_millis(20), call).await;
            assert!(cut.is_err());
        }
        // Hangs here if a place stays taken.
        assert_eq!(lanes.run(1, |_| Ok(7)).await.ok(), Some(7));
    }
}
