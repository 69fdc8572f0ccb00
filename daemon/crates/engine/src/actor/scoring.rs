//! Requests that process tokens and generate none: log-probabilities and embeddings.

use rocmforge_scheduler::Kind;
use tokio::sync::oneshot;

use crate::actor::commands::SchedulerRequest;
use crate::actor::engine::Engine;
use crate::api::error::Error;
use crate::api::{EmbedRequest, Embedding, ScoreRequest, Scores};
use crate::request::encode;
use crate::request::task::{Pooled, Scoring, Work};
use crate::request::time_account::TimeAccount;

impl Engine {
    /// Starts a request for log-probabilities of given tokens.
    pub(crate) fn score(
        &mut self,
        request: ScoreRequest,
        reply: oneshot::Sender<Result<Scores, Error>>,
        account: TimeAccount,
    ) {
        let checked = match request.ids.len() {
            0 | 1 => Err(Error::InvalidArgument {
                field: "ids",
                message: format!(
                    "{} tokens cannot be scored: at least 2 are needed",
                    request.ids.len()
                ),
            }),
            _ => encode::refuse_text(&request.model)
                .and_then(|()| self.check(&request.model, &request.ids, 1, None)),
        };
        let (model, n_ctx) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        let wanted = SchedulerRequest {
            kind: Kind::Score,
            positions_max: request.ids.len(),
            open_ended: false,
            // The logits of all of its rows are wanted.
            realm: None,
            adapters: request.adapters,
        };
        let scores = Vec::with_capacity(request.ids.len());
        let work = Work::Score(Scoring {
            reply,
            top_n: request.top_n as usize,
            scores,
        });
        self.enqueue(
            model,
            request.model,
            (request.ids, Vec::new()),
            n_ctx,
            wanted,
            account,
            (request.deadline, request.asker),
            work,
        );
    }

    /// Starts a request for an embedding, or for the outputs of a classification head.
    pub(crate) fn embed(
        &mut self,
        request: EmbedRequest,
        reply: oneshot::Sender<Result<Embedding, Error>>,
        account: TimeAccount,
    ) {
        let whole = request.model.model().plan().both_ways;
        let checked = self.check(&request.model, &request.ids, 0, None);
        let (model, n_ctx) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        // To the scheduler it is a scoring, which computes a row for each token but the last.
        let mut tokens = request.ids;
        tokens.push(0);
        let wanted = SchedulerRequest {
            kind: Kind::Score,
            positions_max: tokens.len(),
            open_ended: false,
            // The states of its rows are wanted.
            realm: None,
            adapters: request.adapters,
        };
        let work = Work::Embed(Pooled {
            reply,
            pooling: request.pooling,
            values: Vec::new(),
            rows: 0,
            whole,
            classes: request.classes,
        });
        self.enqueue(
            model,
            request.model,
            (tokens, Vec::new()),
            n_ctx,
            wanted,
            account,
            (request.deadline, request.asker),
            work,
        );
    }
}
