//! Closes a model from outside the engine, in several attempts, since callers that found the model
//! in a snapshot may hold it for a moment.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::api::error::Error;
use crate::api::handle::EngineHandle;
use crate::api::{Closing, Command};
use crate::model::loaded::LoadedModel;

/// Pauses between attempts to close a model that is still referenced.
const CLOSE_WAITS: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];

impl EngineHandle {
    /// Forgets a model if nobody uses it: no request runs, waits or is about to be sent, it is not
    /// pinned, not preloaded, and is no model's draft model. Returns the last pointer to it;
    /// dropping it unmaps the file, which a blocking thread should do. `None` if the model stays.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], or the command could not be sent.
    pub async fn close(&self, name: &str) -> Result<Option<Arc<LoadedModel>>, Error> {
        self.close_only(name, None).await
    }

    /// As [`EngineHandle::close`], but if `only` is given, another model that has taken its name
    /// since stays loaded.
    ///
    /// # Errors
    /// As [`EngineHandle::close`].
    pub async fn close_only(
        &self,
        name: &str,
        only: Option<Weak<LoadedModel>>,
    ) -> Result<Option<Arc<LoadedModel>>, Error> {
        for wait in CLOSE_WAITS {
            let (reply, answer) = oneshot::channel();
            let (name, only) = (name.to_owned(), only.clone());
            self.send(Command::Close { name, only, reply })?;
            match self.answered(answer).await?? {
                Closing::Closed(model) => return Ok(Some(model)),
                Closing::Used => return Ok(None),
                Closing::Held => tokio::time::sleep(wait).await,
            }
        }
        let (reply, answer) = oneshot::channel();
        let name = name.to_owned();
        self.send(Command::Reopen { name, reply })?;
        self.answered(answer).await??;
        Ok(None)
    }
}
