//! The settings, read anew because somebody asked: what was taken and what was not.
//!
//! Whoever reads them takes [`Service::reload_calls`]; every way of asking
//! calls [`Service::reload`].

use std::sync::OnceLock;
use std::time::Duration;

use rocmforge_failure::{self as failure, Failure};
use tokio::sync::{mpsc, oneshot};

use crate::Service;
use crate::arrival::Arrival;
use crate::refusals;

/// When to come back where others wait already: files are read in less.
const RETRY: Duration = Duration::from_secs(1);
/// Calls that may wait for their turn.
const CALLS_WAITING: usize = 4;

/// A setting whose value in the files is not what was in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// The setting's key.
    pub setting: String,
    /// Value before the reload, if it may be shown.
    pub before: String,
    /// What the files say, where it is shown.
    pub now: String,
    /// Why the change was not applied; empty if it was.
    pub reason: String,
}

/// What a reload did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Changes that are in force now.
    pub taken: Vec<Change>,
    /// Changes that are not in force.
    pub not_taken: Vec<Change>,
}

/// Where the answer to a call goes.
pub type Answer = oneshot::Sender<Result<Reloaded, Failure>>;

/// The channel to the task that reloads the settings.
#[derive(Debug, Default)]
pub(crate) struct Reader(OnceLock<mpsc::Sender<Answer>>);

impl Service {
    /// The calls that [`Service::reload`] makes from now on. `None` where
    /// somebody has them already.
    pub fn reload_calls(&self) -> Option<mpsc::Receiver<Answer>> {
        let (sender, receiver) = mpsc::channel(CALLS_WAITING);
        self.reader.0.set(sender).ok().map(|()| receiver)
    }

    /// Has the settings reloaded. A reload that has begun goes on when its caller goes.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for settings that cannot be used, which change nothing;
    /// UNAVAILABLE while the daemon drains; RESOURCE_EXHAUSTED where others wait;
    /// UNIMPLEMENTED where nobody reads any.
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
