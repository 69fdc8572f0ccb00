//! What a card says of its power when its memory is released and taken again, for the log. A thread
//! of its own reads it: a vendor's library may take long to open, and no request waits for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rocmforge_gpu_driver::others::{Card, Places, Power};

/// Time after a release at which the GPU's power is read: its clocks take seconds to fall.
pub(crate) const BEHIND_RELEASE: Duration = Duration::from_secs(10);

/// Logs the power of the card.
#[derive(Debug)]
pub(crate) struct PowerLog {
    /// `None` for a device that is no card.
    card: Option<Card>,
    /// Releases and openings so far: what was to be logged behind an earlier one is not.
    changes: Arc<AtomicU64>,
}

impl PowerLog {
    pub(crate) fn new(card: Option<Card>) -> Self {
        Self {
            card,
            changes: Arc::default(),
        }
    }

    /// The card is released or opened now, and is to be asked `after` that.
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
