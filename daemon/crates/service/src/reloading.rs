//! Reloads the settings at a client's call: which changes were applied and which were not.
//!
//! The task that reads the settings takes [`Service::reload_calls`]; all protocols call
//! [`Service::reload`].

use std::sync::OnceLock;
use std::time::Duration;

use rocmforge_failure::{self as failure, Failure};
use tokio::sync::{mpsc, oneshot};

use crate::Service;
use crate::arrival::Arrival;
use crate::refusals;

/// Delay after which a client should retry if too many calls wait; a reload takes less.
const RETRY: Duration = Duration::from_secs(1);
/// Maximum number of waiting calls.
const CALLS_WAITING: usize = 4;

/// A setting whose value in the configuration differs from the one in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// The setting's key.
    pub setting: String,
    /// Value before the reload, if it may be shown.
    pub before: String,
    /// Value in the configuration, if it may be shown.
    pub now: String,
    /// Why the change was not applied; empty if it was.
    pub reason: String,
}

/// The result of a reload of the settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Changes that were applied.
    pub taken: Vec<Change>,
    /// Changes that were not applied, each with the reason.
    pub not_taken: Vec<Change>,
}

/// Channel for the result of a reload.
pub type Answer = oneshot::Sender<Result<Reloaded, Failure>>;

/// The channel to the task that reloads the settings.
#[derive(Debug, Default)]
pub(crate) struct Reader(OnceLock<mpsc::Sender<Answer>>);

impl Service {
    /// The receiver of the calls that [`Service::reload`] makes. `None` if it was taken before.
    pub fn reload_calls(&self) -> Option<mpsc::Receiver<Answer>> {
        let (sender, receiver) = mpsc::channel(CALLS_WAITING);
        self.reader.0.set(sender).ok().map(|()| receiver)
    }

    /// Reloads the settings. A reload that has begun continues if its caller goes away.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for settings that cannot be used, which change nothing;
    /// UNAVAILABLE while the daemon drains; RESOURCE_EXHAUSTED if too many calls wait;
    /// UNIMPLEMENTED if there is no configuration to read.
    pub async fn reload(&self, arrival: &Arrival) -> Result<Reloaded, Failure> {
        self.admit()?;
        let reader = self.reader.0.get().ok_or_else(refusals::no_settings)?;
        let (answer, answered) = oneshot::channel();
        reader.try_send(answer).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => {
                let message =
                    "other calls for a reload wait already; try again when they have ended";
                failure::exhausted(message, RETRY)
            }
            mpsc::error::TrySendError::Closed(_) => self.reader_gone(),
        })?;
        let read = async { answered.await.unwrap_or_else(|_| Err(self.reader_gone())) };
        arrival.limit(read).await
    }

    fn reader_gone(&self) -> Failure {
        match self.admit() {
            Ok(()) => failure::bug("the settings are not read any more; the log says why"),
            Err(draining) => draining,
        }
    }
}
