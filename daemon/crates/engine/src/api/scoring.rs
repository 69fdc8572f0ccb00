//! Calls that compute log-probabilities and embeddings of texts.

use tokio::sync::oneshot;

use crate::api::error::Error;
use crate::api::handle::EngineHandle;
use crate::api::times::TimesSlot;
use crate::api::{Command, EmbedRequest, Embedding, ScoreRequest, Scores, Timed};
use crate::clock::Clock;

impl EngineHandle {
    /// Computes log-probabilities of tokens. Dropping the future cancels the request.
    ///
    /// # Errors
    ///
    /// Any error of a pass, or the command could not be sent.
    pub async fn score(&self, request: ScoreRequest) -> Result<Scores, Error> {
        self.score_timed(request, None).await
    }

    /// As [`EngineHandle::score`]; when the request has ended, its time account is put into
    /// `times`.
    ///
    /// # Errors
    ///
    /// As [`EngineHandle::score`].
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

    /// Computes an embedding. Dropping the future cancels the request.
    ///
    /// # Errors
    ///
    /// Any error of a pass, or the command could not be sent.
    pub async fn embed(&self, request: EmbedRequest) -> Result<Embedding, Error> {
        self.embed_timed(request, None).await
    }

    /// As [`EngineHandle::embed`]; when the request has ended, its time account is put into
    /// `times`.
    ///
    /// # Errors
    ///
    /// As [`EngineHandle::embed`].
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
