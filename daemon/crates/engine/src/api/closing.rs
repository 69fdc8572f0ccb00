//! Closes a model from outside the engine, in several tries: callers that found the model in a
//! snapshot hold it for a moment.

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
    /// Forgets a model if nobody uses it: no request runs, waits or is about to be sent, it is
    /// not pinned, not preloaded, and drafts for no other model. Returns the last pointer to it,
    /// which unmaps the file when it is dropped: for a blocking thread. `None` where it stays.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], and those of sending.
    pub async fn close(&self, name: &str) -> Result<Option<Arc<LoadedModel>>, Error> {
        self.close_only(name, None).await
    }

    /// As [`EngineHandle::close`]. With `only`, a model that has taken the name of that one stays.
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
