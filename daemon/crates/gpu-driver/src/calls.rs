//! When the uses of a driver began that are under way, so that another thread sees one that does
//! not come back.
//!
//! They outlive the context: opening a card and closing it are calls as well, and who watches goes
//! on when the card is closed and opened again.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Calls under way that are noted; there are fewer threads that make one.
const CALLS_MAX: usize = 64;

/// The calls under way.
pub struct Calls {
    begun: Instant,
    /// Start of each call under way, in nanoseconds after `begun`; 0 is no call.
    notes: [AtomicU64; CALLS_MAX],
    /// Contexts that these calls are made in, and that are open.
    contexts: AtomicU64,
}

/// Marks a driver call as under way until the value is dropped.
pub struct Note<'a>(Option<&'a AtomicU64>);

impl Drop for Note<'_> {
    fn drop(&mut self) {
        if let Some(note) = self.0 {
            note.store(0, Ordering::Release);
        }
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            notes: [const { AtomicU64::new(0) }; CALLS_MAX],
            contexts: AtomicU64::new(0),
        }
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls")
            .field("oldest", &self.oldest())
            .finish()
    }
}

impl Calls {
    /// How long the oldest call has been under way.
    pub fn oldest(&self) -> Option<Duration> {
        let now = self.begun.elapsed();
        let began = self.notes.iter().filter_map(|note| {
            let ns = note.load(Ordering::Acquire);
            (ns > 0).then(|| Duration::from_nanos(ns))
        });
        began.min().map(|began| now.saturating_sub(began))
    }

    /// A context was opened.
    pub(super) fn opened(&self) {
        self.contexts.fetch_add(1, Ordering::AcqRel);
    }

    /// A context was closed.
    pub(super) fn closed(&self) {
        self.contexts.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether any context is open: one of those that were opened one after another may be held
    /// still by a thread that hangs.
    pub fn have_context(&self) -> bool {
        self.contexts.load(Ordering::Acquire) > 0
    }

    /// Notes that a call begins, unless too many are under way.
    pub fn note(&self) -> Note<'_> {
        let now = u64::try_from(self.begun.elapsed().as_nanos())
            .unwrap_or(u64::MAX)
            .max(1);
        let free = |note: &&AtomicU64| {
            note.compare_exchange(0, now, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        Note(self.notes.iter().find(free))
    }
}
