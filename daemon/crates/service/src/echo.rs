//! Repeats a prompt before its completion, with the log-probabilities of its tokens (`echo`).

use std::sync::Arc;

use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Class, ScoreRequest, TokenScore};
use rocmforge_failure::{self as failure, Failure};

use crate::Service;
use crate::adapters::AdapterChoice;
use crate::arrival::Arrival;
use crate::check;

/// A prompt to repeat before its completion.
#[derive(Debug)]
pub struct Echo {
    /// The prompt's text.
    pub text: String,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// The score of each token but the first, if scores are wanted.
    pub scores: Vec<TokenScore>,
}

impl Service {
    /// Tokenizes a prompt, and scores its tokens if `top_n` is given: each with that number of most
    /// likely tokens.
    ///
    /// # Errors
    /// Those of the prompt, INVALID_ARGUMENT for more scores than a response holds,
    /// RESOURCE_EXHAUSTED above a limit of the client, and those of the engine.
    pub async fn echo(
        &self,
        model: &Arc<LoadedModel>,
        prompt: Prompt,
        field: &'static str,
        n_ctx: u32,
        (top_n, class, adapters): (Option<u32>, Class, &AdapterChoice),
        arrival: Arrival,
    ) -> Result<Echo, Failure> {
        let given = match &prompt {
            Prompt::Text { text, .. } => Some(text.clone()),
            Prompt::Ids(ids) => {
                check::ids(field, ids, model.model().info().n_vocab)?;
                None
            }
            Prompt::Chat(_) => None,
        };
        let ticket = self.enter(&arrival, prompt.bytes()).await?;
        let room = Room::for_scores(self.lengths(n_ctx, model));
        let encoded = self.encode(Arc::clone(model), prompt, field, room, arrival);
        let ids = encoded.await?.without_images(field)?;
        let text = match given {
            Some(text) => text,
            None => {
                let decoded = model.tokenizer().decode(&ids);
                decoded.map_err(|error| failure::invalid(field, &error.to_string()))?
            }
        };
        let mut echo = Echo {
            text,
            ids,
            scores: Vec::new(),
        };
        let Some(top_n) = top_n.filter(|_| echo.ids.len() > 1) else {
            return Ok(echo);
        };
        check::score_length(field, echo.ids.len(), top_n)?;
        ticket.take_prompt(echo.ids.len() as u32)?;
        let request = ScoreRequest {
            model: Arc::clone(model),
            ids: echo.ids.clone(),
            top_n,
            deadline: arrival.deadline,
            asker: ticket.asker(class),
            adapters: self.adapters_for(adapters, model)?,
        };
        let scored = async {
            let scored = self.engine.score(request).await;
            scored.map_err(|error| ticket.failure(&error))
        };
        echo.scores = arrival.limit(scored).await?.tokens;
        Ok(echo)
    }
}
