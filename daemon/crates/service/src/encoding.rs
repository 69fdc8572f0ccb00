//! Renders and tokenizes prompts, off the async threads.

use std::sync::Arc;

use rocmforge_chat::prompt::{Encoded, Lengths, Prompt, Room};
use rocmforge_engine::LoadedModel;
use rocmforge_failure::Failure;

use crate::Service;
use crate::arrival::Arrival;
use crate::chat_model::chat_model;
use crate::text_work::Unwanted;

impl Service {
    /// Limits of a prompt's length for a model, if the request's context length is `n_ctx`.
    pub fn lengths(&self, n_ctx: u32, model: &LoadedModel) -> Lengths {
        Lengths {
            n_ctx,
            n_ctx_train: model.model().info().n_ctx_train,
            n_ctx_max: self.limits.n_ctx_max,
        }
    }

    /// Tokenizes a prompt on a blocking thread, and checks that the tokens fit `room`. `field`
    /// names the prompt in error messages.
    ///
    /// # Errors
    /// Those of [`Prompt::encode`], DEADLINE_EXCEEDED, and RESOURCE_EXHAUSTED if too many
    /// texts wait.
    pub async fn encode(
        &self,
        model: Arc<LoadedModel>,
        prompt: Prompt,
        field: &'static str,
        room: Room,
        arrival: Arrival,
    ) -> Result<Encoded, Failure> {
        let bytes = prompt.bytes();
        match prompt {
            Prompt::Ids(_) => prompt.encode(field, &chat_model(&model), Some(room), None),
            prompt => {
                let templates = self.templates.clone();
                let work = move |unwanted: &Unwanted| {
                    let model = chat_model(&model);
                    let is_unwanted = || unwanted.get();
                    prompt.encode(field, &model, Some(room), Some((&templates, &is_unwanted)))
                };
                let work = self.text.run(arrival.peer(), bytes, work);
                arrival.limit(work).await
            }
        }
    }

    /// Tokenizes a prompt on a blocking thread, without a limit on its tokens.
    ///
    /// # Errors
    ///
    /// As [`Service::encode`].
    pub async fn ids(
        &self,
        model: Arc<LoadedModel>,
        prompt: Prompt,
        field: &'static str,
        arrival: Arrival,
    ) -> Result<Box<[u32]>, Failure> {
        let bytes = prompt.bytes();
        let templates = self.templates.clone();
        let work = move |unwanted: &Unwanted| {
            let (model, is_unwanted) = (chat_model(&model), || unwanted.get());
            let encoded = prompt.encode(field, &model, None, Some((&templates, &is_unwanted)))?;
            // Their spare room would be held until the answer is read.
            Ok(encoded.ids.into_boxed_slice())
        };
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }
}
