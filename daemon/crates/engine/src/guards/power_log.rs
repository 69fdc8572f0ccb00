//! Logs a GPU's power draw when its memory is released and taken again. A thread of its own reads
//! it: a vendor's library may take long to open, and no request waits for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rocmforge_gpu_driver::others::{Card, Places, Power};

/// Time after a release at which the GPU's power is read: its clocks take seconds to fall.
pub(crate) const BEHIND_RELEASE: Duration = Duration::from_secs(10);

/// Logs the GPU's power draw when the device is released or opened.
#[derive(Debug)]
pub(crate) struct PowerLog {
    /// The GPU; `None` if the device is the CPU.
    card: Option<Card>,
    /// Number of releases and openings so far; a reading that was planned before a newer one is
    /// dropped.
    changes: Arc<AtomicU64>,
}

impl PowerLog {
    pub(crate) fn new(card: Option<Card>) -> Self {
        Self {
            card,
            changes: Arc::default(),
        }
    }

    /// Records that the GPU is released or opened now, and has its power read and logged after the
    /// time `after`.
    pub(crate) fn note(&self, places: &Places, after: Duration, words: &'static str) {
        let Some(card) = self.card.clone() else {
            return;
        };
        let places = places.clone();
        let changes = Arc::clone(&self.changes);
        let now = changes.fetch_add(1, Ordering::Relaxed) + 1;
        let thread = std::thread::Builder::new().name("power-log".to_owned());
        let started = thread.spawn(move || {
            std::thread::sleep(after);
            if changes.load(Ordering::Relaxed) == now || after.is_zero() {
                let Power { state, watts } = card.power(&places);
                tracing::info!(target: "memory", power_state = state, watts, "{words}");
            }
        });
        if let Err(error) = started {
            tracing::debug!(%error, "the GPU's power is not logged: the thread cannot be started");
        }
    }
}
