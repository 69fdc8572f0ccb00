//! How far the pieces of an upload are, which staging threads take in order.
//!
//! ```text
//!   not taken --take()--> taken --end()--> ended
//! ```
//!
//! After the first error the pieces that are left are taken and skipped, so that an upload that
//! failed ends, too. A panic is an error like others: somebody waits for the piece's end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// The state of an upload's pieces.
#[derive(Debug)]
pub struct Progress {
    pieces: usize,
    next: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Progress {
    /// Of so many pieces, none taken.
    pub fn new(pieces: usize) -> Self {
        Self {
            pieces,
            next: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        }
    }

    /// The next piece that no thread has taken.
    pub fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.pieces).then_some(index)
    }

    /// Whether all pieces are taken.
    pub fn is_taken(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.pieces
    }

    /// Counts a piece as ended; whether it was the last.
    pub fn end(&self) -> bool {
        self.ended.fetch_add(1, Ordering::AcqRel) + 1 == self.pieces
    }

    /// Whether one piece is all that has not ended.
    pub fn is_at_last(&self) -> bool {
        self.ended.load(Ordering::Acquire) + 1 == self.pieces
    }

    /// Whether all pieces have ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) == self.pieces
    }

    /// Does the work of a piece that was taken, unless another one has failed.
    pub fn attempt(&self, work: impl FnOnce() -> Result<(), Error>) {
        if self.has_failed() {
            return;
        }
        // What a panic leaves half-made is the upload's slab, which goes with the upload.
        let done = catch_unwind(AssertUnwindSafe(work));
        let done = done.unwrap_or_else(|_| {
            Err(Error::Driver {
                operation: "an upload",
                message: "a thread panicked over it; standard error has the place".to_owned(),
            })
        });
        if let Err(error) = done {
            self.fail(error);
        }
    }

    /// Keeps the first error.
    pub fn fail(&self, error: Error) {
        self.failed.store(true, Ordering::Relaxed);
        self.error().get_or_insert(error);
    }

    /// Whether a piece has failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The first error, once.
    pub fn take_error(&self) -> Option<Error> {
        self.error().take()
    }

    fn error(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once a panic left whoever waited for the piece waiting.
    #[test]
    fn a_panic_ends_an_upload_with_an_error() {
        let progress = Progress::new(2);
        for _ in 0..2 {
            assert!(progress.take().is_some());
            progress.attempt(|| panic!("for the test"));
            progress.end();
        }
        assert!(progress.has_ended() && progress.has_failed());
        let error = progress.take_error().unwrap();
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}
