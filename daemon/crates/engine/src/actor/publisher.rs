//! Sends the published snapshots, and decides when one is due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_gpu_driver::Report;
use tokio::sync::watch;

use crate::api::Snapshot;

/// Minimum age of a snapshot before it is renewed between two passes. It is always renewed when a
/// request arrives, starts or ends, and before a command is answered: whoever has an event or a
/// reply reads a state that includes its cause.
const RENEWAL: Duration = Duration::from_millis(5);

/// Results of probing the drivers when the device was opened.
#[derive(Debug, Clone)]
pub(crate) struct DriverReports {
    pub(crate) drivers: Arc<[Report]>,
    pub(crate) passed_over: Arc<[String]>,
    /// Why the CPU computes although a GPU is on the bus; `None` if no GPU is unused.
    pub(crate) unused_gpu: Option<String>,
}

/// Publishes snapshots and holds what each of them contains unchanged.
pub(crate) struct Publisher {
    pub(crate) found: DriverReports,
    snapshot: watch::Sender<Arc<Snapshot>>,
    published_at: Instant,
}

impl Publisher {
    pub(crate) fn new(
        found: DriverReports,
        snapshot: watch::Sender<Arc<Snapshot>>,
        now: Instant,
    ) -> Self {
        Self {
            found,
            snapshot,
            published_at: now,
        }
    }

    /// Whether a snapshot has to be published now: `always`, or the last one is old enough.
    pub(crate) fn is_due(&mut self, now: Instant, always: bool) -> bool {
        let is_due = always || now.saturating_duration_since(self.published_at) >= RENEWAL;
        if is_due {
            self.published_at = now;
        }
        is_due
    }

    /// Publishes this snapshot.
    pub(crate) fn send(&self, mut snapshot: Snapshot) {
        self.snapshot.send_modify(|last| {
            snapshot.peak_bytes = snapshot.peak_bytes.max(last.peak_bytes);
            // The thread that looks at waits shows them.
            snapshot.waits_for = last.waits_for.clone();
            *last = Arc::new(snapshot);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_renewed_now_and_then_and_the_peak_and_a_silent_file_stay() {
        let start = Instant::now();
        let mut first = Snapshot::empty();
        first.peak_bytes = 7;
        let (sender, seen) = watch::channel(Arc::new(first));
        let found = DriverReports {
            drivers: Arc::new([]),
            passed_over: Arc::new([]),
            unused_gpu: None,
        };
        let mut publisher = Publisher::new(found, sender, start);
        assert!(!publisher.is_due(start + RENEWAL / 2, false));
        assert!(publisher.is_due(start + RENEWAL / 2, true));
        assert!(
            !publisher.is_due(start + RENEWAL, false),
            "since the last one"
        );
        assert!(publisher.is_due(start + 2 * RENEWAL, false));
        let mut next = Snapshot::empty();
        (next.peak_bytes, next.running) = (5, 1);
        publisher.send(next);
        assert_eq!((seen.borrow().peak_bytes, seen.borrow().running), (7, 1));
    }
}
