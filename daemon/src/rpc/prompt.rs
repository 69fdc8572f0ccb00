//! From what a client wrote to the token ids of a request, within the room that its context has.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_tokenizer::{Error as TokenizerError, Message};
use tonic::Status;

use super::arrival::Arrival;
use super::{Context, status_code};

/// What to continue, before it is ids.
#[derive(Debug)]
pub(super) enum Prompt {
    Text {
        text: String,
        add_special: bool,
        parse_special: bool,
    },
    Ids(Vec<u32>),
    Chat(Vec<Message>),
}

impl Prompt {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } => text.len(),
            Self::Ids(ids) => size_of_val(ids.as_slice()),
            Self::Chat(messages) => messages
                .iter()
                .map(|m| m.role.len() + m.content.len())
                .sum(),
        }
    }

    /// The field that a refusal names.
    pub(super) fn field(&self) -> &'static str {
        match self {
            Self::Text { .. } => "text",
            Self::Ids(_) => "tokens.ids",
            Self::Chat(_) => "messages",
        }
    }

    /// The ids, of which there may be `room`; without, any number. CPU-bound: for a blocking thread.
    pub(super) fn into_ids(
        self,
        model: &LoadedModel,
        room: Option<Room>,
    ) -> Result<Vec<u32>, Status> {
        let tokenizer = model.tokenizer();
        let field = self.field();
        let most = room.map_or(usize::MAX, |room| room.tokens);
        let encoded = match self {
            Self::Ids(ids) => Ok(ids),
            Self::Text {
                text,
                add_special,
                parse_special,
            } => tokenizer.encode_at_most(most, &text, add_special, parse_special),
            Self::Chat(messages) => {
                let Some(template) = model.template() else {
                    return Err(no_template(model));
                };
                let text = template
                    .render(&messages, true)
                    .map_err(|error| status_code::invalid(field, &error.to_string()))?;
                tokenizer.encode_chat(most, &text)
            }
        };
        match (encoded, room) {
            (Ok(ids), Some(room)) if ids.len() > most => {
                Err(room.refuse(field, &format!("{} tokens", ids.len())))
            }
            (Ok(ids), _) => Ok(ids),
            (Err(TokenizerError::TooManyTokens { max }), Some(room)) => {
                Err(room.refuse(field, &format!("more than {max} tokens")))
            }
            (Err(error), _) => Err(status_code::invalid(field, &error.to_string())),
        }
    }
}

/// How many tokens a request may bring, and why no more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    tokens: usize,
    n_ctx: u32,
    n_ctx_train: u32,
    n_ctx_max: u32,
    purpose: &'static str,
}

impl Room {
    /// Room for a prompt: the context, less one token of the answer.
    pub(super) fn for_prompt(n_ctx: u32, context: &Context, model: &LoadedModel) -> Self {
        Self {
            tokens: n_ctx as usize - 1,
            n_ctx,
            n_ctx_train: model.model().info().n_ctx_train,
            n_ctx_max: context.limits.n_ctx_max,
            purpose: "prompt and answer together: shorten it, or raise n_ctx",
        }
    }

    /// Room for what is scored: the context.
    pub(super) fn for_scores(n_ctx: u32, context: &Context, model: &LoadedModel) -> Self {
        Self {
            tokens: n_ctx as usize,
            purpose: "score it in windows",
            ..Self::for_prompt(n_ctx, context, model)
        }
    }

    fn refuse(&self, field: &str, tokens: &str) -> Status {
        let Self {
            n_ctx,
            n_ctx_train,
            n_ctx_max,
            purpose,
            ..
        } = self;
        status_code::invalid(
            field,
            &format!(
                "it has {tokens}, but the context of this request has n_ctx = {n_ctx}, {purpose} (the model was trained \
                 with {n_ctx_train}, the daemon allows {n_ctx_max})"
            ),
        )
    }
}

/// FAILED_PRECONDITION: the model cannot Chat.
pub(super) fn no_template(model: &LoadedModel) -> Status {
    status_code::model_precondition(
        model.name(),
        &format!(
            "the file of model '{}' carries no chat template, so that it cannot Chat; use Generate with a prompt in the \
             model's own format",
            model.name()
        ),
    )
}

impl Context {
    /// The ids of a prompt, at most as many as there is room for; made on a blocking thread.
    pub(super) async fn ids(
        &self,
        model: Arc<LoadedModel>,
        prompt: Prompt,
        room: Room,
        arrival: Arrival,
    ) -> Result<Vec<u32>, Status> {
        let bytes = prompt.bytes();
        match prompt {
            Prompt::Ids(_) => prompt.into_ids(&model, Some(room)),
            prompt => {
                let work = move || prompt.into_ids(&model, Some(room));
                arrival.limit(self.text.run(bytes, work)).await
            }
        }
    }
}
