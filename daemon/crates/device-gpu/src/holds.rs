//! Calls that a driver keeps waiting: while it registers or pins memory, nothing is queued. Whoever
//! queues something holds, and whoever registers or pins waits for that, for a bounded time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long others' calls may keep a registration waiting.
const HOLD_MAX: Duration = Duration::from_millis(1);

/// The threads that have something to queue on the device.
#[derive(Debug, Default)]
pub(super) struct Holds {
    queueing: AtomicUsize,
    /// Times that a thread had.
    queued: AtomicU64,
}

/// See [`Holds::hold`].
pub(super) struct Held<'a>(&'a AtomicUsize);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Holds {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A number that changes whenever something was queued on the device.
    pub(super) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Lets registrations wait while what is returned lives. A driver keeps other calls
    /// waiting while it registers, and does not see to it that they have their turn
    /// between two registrations.
    pub(super) fn hold(&self) -> Held<'_> {
        self.queueing.fetch_add(1, Ordering::Relaxed);
        self.queued.fetch_add(1, Ordering::Relaxed);
        Held(&self.queueing)
    }

    /// Waits until nobody queues anything, for [`HOLD_MAX`] at the most.
    pub(super) fn wait(&self) {
        let begun = Instant::now();
        while self.queueing.load(Ordering::Relaxed) > 0 && begun.elapsed() < HOLD_MAX {
            std::thread::yield_now();
        }
    }
}
