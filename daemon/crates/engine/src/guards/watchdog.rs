//! The watchdog: a thread that checks whether the engine's device hangs so that a driver call never
//! returns.
//!
//! ```text
//!   looking --(the device says that it hangs)--> told: everyone who waits for the engine is let
//!                                                go; the daemon ends
//!      |
//!      +--(the engine ends)--> ended
//! ```
//!
//! Work that takes too long is detected by the engine thread while it waits. But a driver whose
//! queue is full, or whose GPU is gone, may block the engine thread itself; then only this thread
//! can report that.
//!
//! *Invariant:* it only looks and publishes; it never calls the device (it has a [`Watch`] and no
//! device).

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rocmforge_device::{Loss, Watch};
use tokio::sync::watch;

use crate::api::Snapshot;

/// Interval at which the watchdog checks the device.
const PERIOD: Duration = Duration::from_millis(500);

/// The device loss that ended the engine, shared with all that wait for it.
#[derive(Debug, Clone)]
pub(crate) struct DeviceLoss {
    /// The loss, once the device is lost.
    reason: Arc<watch::Sender<Option<Loss>>>,
    snapshot: watch::Sender<Arc<Snapshot>>,
}

impl DeviceLoss {
    pub(crate) fn new(snapshot: watch::Sender<Arc<Snapshot>>) -> Self {
        Self {
            reason: Arc::new(watch::Sender::new(None)),
            snapshot,
        }
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Loss>> {
        self.reason.subscribe()
    }

    /// Reports the loss to everyone, once: only the first reason counts.
    pub(crate) fn tell(&self, loss: &Loss) {
        self.snapshot.send_modify(|snapshot| {
            if snapshot.device_lost.is_none() {
                let mut last = Snapshot::clone(snapshot);
                last.device_lost = Some(loss.clone());
                last.running = 0;
                last.queued = 0;
                last.queued_and_read = 0;
                *snapshot = Arc::new(last);
            }
        });
        self.reason.send_if_modified(|told| {
            let first = told.is_none();
            if first {
                *told = Some(loss.clone());
            }
            first
        });
    }
}

/// Starts the watchdog of a device that can be watched. It ends when the returned sender is
/// dropped.
pub(crate) fn start(watch: Option<Watch>, loss: DeviceLoss) -> Option<Sender<()>> {
    let watch = watch?;
    let (alive, engine) = channel::<()>();
    let thread = std::thread::Builder::new().name("watchdog".to_owned());
    let started = thread.spawn(move || {
        while let Err(RecvTimeoutError::Timeout) = engine.recv_timeout(PERIOD) {
            if let Some(seen) = watch() {
                tracing::error!(kind = seen.kind.label(), reason = %seen, "the watchdog gives the device up");
                loss.tell(&seen);
                return;
            }
        }
    });
    match started {
        Ok(_) => Some(alive),
        Err(error) => {
            tracing::warn!(%error, "there is no watchdog: its thread could not be started");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rocmforge_device::LossKind;

    use super::*;

    #[test]
    fn a_device_that_hangs_is_told_once_and_an_engine_that_ends_takes_the_watchdog_along() {
        let hangs = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&hangs);
        let gone = Arc::new(());
        let kept = Arc::clone(&gone);
        let looks: Watch = Box::new(move || {
            let _ = &kept;
            let hangs = seen.load(Ordering::Relaxed);
            hangs.then(|| Loss::new(LossKind::Hang, "no end"))
        });
        let first = Snapshot::empty();
        let loss = DeviceLoss::new(watch::Sender::new(Arc::new(first)));
        let mut told = loss.subscribe();
        let alive = start(Some(looks), loss.clone()).expect("a thread");
        assert!(told.borrow_and_update().is_none());
        hangs.store(true, Ordering::Relaxed);
        while told.borrow().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        loss.tell(&Loss::unknown("another reason"));
        let first = Some(Loss::new(LossKind::Hang, "no end"));
        assert_eq!(*told.borrow(), first);
        assert_eq!(loss.snapshot.borrow().device_lost, first);
        drop(alive);
        while Arc::strong_count(&gone) > 1 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
