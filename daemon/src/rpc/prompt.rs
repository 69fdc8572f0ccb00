//! From what a client wrote to the token ids of a request, within the room that its context has.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_tokenizer::{Chat, Error as TokenizerError, Renderer};
use tonic::Status;

use super::arrival::Arrival;
use super::text_work::Unwanted;
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
    Chat(Chat),
}

impl Prompt {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } => text.len(),
            Self::Ids(ids) => size_of_val(ids.as_slice()),
            Self::Chat(chat) => chat.messages.iter().map(|m| m.byte_len()).sum(),
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

    /// The ids, of which there may be `room`; without, any number. CPU-bound: for a blocking thread. A chat needs what
    /// renders its template.
    pub(super) fn into_ids(
        self,
        model: &LoadedModel,
        room: Option<Room>,
        templates: Option<(&Renderer, &Unwanted)>,
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
            Self::Chat(chat) => {
                let (Some(template), Some((renderer, unwanted))) = (model.template(), templates)
                else {
                    return Err(no_template(model));
                };
                let rendered =
                    renderer.render(template, Some(tokenizer), &chat, &|| unwanted.get());
                let rendered = rendered.map_err(|error| from_template(model, &error))?;
                tokenizer.encode_rendered(most, &rendered)
            }
        };
        match (encoded, room) {
            (Ok(ids), Some(room)) if ids.len() > most => {
                Err(room.refuse(field, &format!("{} tokens", ids.len())))
            }
            (Ok(ids), _) => Ok(ids),
            // For an answer one place has to stay free, so that nothing fits where n_ctx is 1.
            (Err(TokenizerError::TooManyTokens { max: 0 }), Some(room)) => {
                Err(room.refuse(field, "tokens"))
            }
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
    /// Whether an answer has to fit, too.
    answer: bool,
}

impl Room {
    /// Room for a prompt: the context, less one token of the answer.
    pub(super) fn for_prompt(n_ctx: u32, context: &Context, model: &LoadedModel) -> Self {
        Self {
            tokens: n_ctx as usize - 1,
            n_ctx,
            n_ctx_train: model.model().info().n_ctx_train,
            n_ctx_max: context.limits.n_ctx_max,
            answer: true,
        }
    }

    /// Room for what is scored: the context.
    pub(super) fn for_scores(n_ctx: u32, context: &Context, model: &LoadedModel) -> Self {
        Self {
            tokens: n_ctx as usize,
            answer: false,
            ..Self::for_prompt(n_ctx, context, model)
        }
    }

    fn refuse(&self, field: &str, tokens: &str) -> Status {
        let Self {
            n_ctx,
            n_ctx_train,
            n_ctx_max,
            ..
        } = *self;
        let raise = match n_ctx {
            n if n < n_ctx_train.min(n_ctx_max) => ", or raise n_ctx",
            n if n < n_ctx_train => ", or start the daemon with a larger --n-ctx-max",
            _ => "",
        };
        let what = if self.answer {
            format!("prompt and answer together: shorten it{raise}")
        } else {
            format!("score it in windows{raise}")
        };
        status_code::invalid(
            field,
            &format!(
                "it has {tokens}, but the context of this request has n_ctx = {n_ctx}, {what} (the model was trained with \
                 {n_ctx_train}, the daemon allows {n_ctx_max})"
            ),
        )
    }
}

/// FAILED_PRECONDITION: the model cannot Chat.
pub(super) fn no_template(model: &LoadedModel) -> Status {
    status_code::model_precondition(
        "NO_CHAT_TEMPLATE",
        model.name(),
        &format!(
            "the file of model '{}' carries no chat template, so that it cannot Chat; use Generate with a prompt in the \
             model's own format",
            model.name()
        ),
    )
}

/// What a chat fails with whose template gave no text: the template's own words are about the messages; that it does
/// not parse, crashes or takes too much is about the model.
fn from_template(model: &LoadedModel, error: &TokenizerError) -> Status {
    match error {
        TokenizerError::Renderer { error: cause, .. } => {
            tracing::error!(%error, %cause, "no chat can be rendered");
            status_code::bug(&format!("{error}: {cause}"))
        }
        TokenizerError::Cancelled => status_code::deadline(),
        TokenizerError::TemplateSyntax { .. }
        | TokenizerError::TemplateCrashed { .. }
        | TokenizerError::Size { .. }
        | TokenizerError::Gguf(_) => {
            if let TokenizerError::TemplateCrashed { words, .. } = error {
                tracing::warn!(model = model.name(), words, "a chat template crashed");
            }
            let message = format!("model '{}' cannot Chat: {error}", model.name());
            status_code::model_precondition("CHAT_TEMPLATE_UNUSABLE", model.name(), &message)
        }
        TokenizerError::TemplateLimit { .. } => {
            tracing::warn!(model = model.name(), %error, "a chat template was stopped");
            status_code::invalid("messages", &error.to_string())
        }
        _ => status_code::invalid("messages", &error.to_string()),
    }
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
            Prompt::Ids(_) => prompt.into_ids(&model, Some(room), None),
            prompt => {
                let templates = self.templates.clone();
                let work = move |unwanted: &Unwanted| {
                    prompt.into_ids(&model, Some(room), Some((&templates, unwanted)))
                };
                arrival.limit(self.text.run(bytes, work)).await
            }
        }
    }
}
