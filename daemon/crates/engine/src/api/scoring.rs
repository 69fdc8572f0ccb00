//! Calls that compute numbers of texts: scores and embeddings.

use tokio::sync::oneshot;

use crate::api::error::Error;
use crate::api::handle::EngineHandle;
use crate::api::times::TimesSlot;
use crate::api::{Command, EmbedRequest, Embedding, ScoreRequest, Scores, Timed};
use crate::clock::Clock;

impl EngineHandle {
    /// Scores tokens. Dropping the future cancels it.
    ///
    /// # Errors
    /// Whatever a pass can meet, and those of sending.
    pub async fn score(&self, request: ScoreRequest) -> Result<Scores, Error> {
        self.score_timed(request, None).await
    }

    /// As [`EngineHandle::score`]; where its time went is put there when it has ended.
    ///
    /// # Errors
    /// Those of [`EngineHandle::score`].
    pub async fn score_timed(
        &self,
        request: ScoreRequest,
        times: Option<TimesSlot>,
    ) -> Result<Scores, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Score {
            request: Box::new(request),
            reply,
            timed: Timed {
                sent: Clock.now(),
                times,
            },
        })?;
        self.answered(answer).await?
    }

    /// Computes an embedding. Dropping the future cancels it.
    ///
    /// # Errors
    /// Whatever a pass can meet, and those of sending.
    pub async fn embed(&self, request: EmbedRequest) -> Result<Embedding, Error> {
        self.embed_timed(request, None).await
    }

    /// As [`EngineHandle::embed`]; where its time went is put there when it has ended.
    ///
    /// # Errors
    /// Those of [`EngineHandle::embed`].
    pub async fn embed_timed(
        &self,
        request: EmbedRequest,
        times: Option<TimesSlot>,
    ) -> Result<Embedding, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Embed {
            request: Box::new(request),
            reply,
            timed: Timed {
                sent: Clock.now(),
                times,
            },
        })?;
        self.answered(answer).await?
    }
}
