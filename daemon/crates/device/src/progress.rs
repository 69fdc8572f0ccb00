//! How far the pieces of an upload are, which staging threads take in order.
//!
//! ```text
//!   not taken --take()--> taken --end()--> ended
//! ```
//!
//! After the first error the pieces that are left are taken and skipped, so that an upload that failed ends, too.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// The state of an upload's pieces.
#[derive(Debug)]
pub(crate) struct Progress {
    pieces: usize,
    next: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Progress {
    pub(crate) fn new(pieces: usize) -> Self {
        Self {
            pieces,
            next: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        }
    }

    /// The next piece that no thread has taken.
    pub(crate) fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.pieces).then_some(index)
    }

    /// Whether all pieces are taken.
    pub(crate) fn is_taken(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.pieces
    }

    /// Counts a piece as ended; whether it was the last.
    pub(crate) fn end(&self) -> bool {
        self.ended.fetch_add(1, Ordering::AcqRel) + 1 == self.pieces
    }

    /// Whether one piece is all that has not ended.
    pub(crate) fn is_at_last(&self) -> bool {
        self.ended.load(Ordering::Acquire) + 1 == self.pieces
    }

    /// Whether all pieces have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) == self.pieces
    }

    /// Keeps the first error.
    pub(crate) fn fail(&self, error: Error) {
        self.failed.store(true, Ordering::Relaxed);
        self.error().get_or_insert(error);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The first error, once.
    pub(crate) fn take_error(&self) -> Option<Error> {
        self.error().take()
    }

    fn error(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
