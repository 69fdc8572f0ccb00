//! Checks that the engine responds, for health and for the service manager's watchdog.
//!
//! The engine is pinged, and replies between two turns of its work. A turn may be long: a large
//! model's pass over a long prompt, or an upload from a slow disk. After a turn longer than
//! [`STUCK_AFTER`] the engine counts as stuck, in a driver or on a file that does not respond:
//! health is NOT_SERVING until it goes on. The service manager gets no heartbeat meanwhile, and
//! restarts the daemon after its WatchdogSec=.

use std::time::Duration;

use rocmforge_engine::{EngineHandle, Error};
use rocmforge_grpc::Health;
use sd_notify::NotifyState;

/// Longest time that a turn may take before the engine counts as stuck.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(120);
/// Maximum pause between two pings.
const ASK_EVERY_MAX: Duration = Duration::from_secs(20);

/// Pings the engine for as long as it is polled, or until the engine is gone.
pub(crate) async fn follow(engine: &EngineHandle, health: &Health) {
    let watchdog = sd_notify::watchdog_enabled();
    let every = watchdog.map_or(ASK_EVERY_MAX, |limit| (limit / 4).min(ASK_EVERY_MAX));
    loop {
        let mut sign = std::pin::pin!(engine.ping());
        let mut outcome = tokio::time::timeout(STUCK_AFTER, &mut sign).await;
        if outcome.is_err() {
            let snapshot = engine.snapshot();
            let waits_for = snapshot.waits_for.as_ref().filter(|wait| wait.all_wait);
            let file = waits_for.map(|wait| wait.path.display());
            tracing::error!(
                seconds = STUCK_AFTER.as_secs(),
                waits_for = file.map(tracing::field::display),
                "the engine does not respond: health reports NOT_SERVING"
            );
            health.set(false).await;
            outcome = Ok(sign.await);
            if matches!(outcome, Ok(Ok(()))) {
                tracing::warn!("the engine responds again: health reports SERVING");
                health.set(true).await;
            }
        }
        match outcome {
            Ok(Ok(())) => {
                if watchdog.is_some()
                    && let Err(error) = sd_notify::notify(&[NotifyState::Watchdog])
                {
                    tracing::debug!(%error, "the service manager's watchdog cannot be notified");
                }
            }
            // Many commands wait, or the engine ends; whoever follows its end says so.
            Ok(Err(Error::Exhausted { .. })) | Err(_) => {}
            Ok(Err(_)) => return std::future::pending().await,
        }
        tokio::time::sleep(every).await;
    }
}
