//! Converts a request's prompt to token ids, within the context length.

mod room;

use rocmforge_failure::{self as failure, Failure, Reason};
use rocmforge_tokenizer::{Chat, Error as TokenizerError, RenderedChat, Renderer, Tokenizer};

use crate::adapted::{self, Way};
use crate::images::{self, Placed, UnreadImage};
use crate::model::ChatModel;
use crate::tail::Tail;
use crate::tool_calls::forms::Headers;
pub use room::{Lengths, Room};

/// The renderer of templates, and a function that returns whether the prompt is no longer wanted.
pub type Rendering<'a> = (&'a Renderer, &'a dyn Fn() -> bool);

/// The prompt of a request before tokenization: text, token ids or a conversation.
#[derive(Debug)]
pub enum Prompt {
    /// A text.
    Text {
        /// The text.
        text: String,
        /// Whether to add the tokens that the vocabulary puts before every text.
        add_special: bool,
        /// Whether names of control tokens in the text become these tokens.
        parse_special: bool,
    },
    /// Token ids, which were checked against the vocabulary.
    Ids(Vec<u32>),
    /// A conversation; made by [`Prompt::chat`].
    Chat(Chat),
}

/// A tokenized prompt.
#[derive(Debug, Default)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<u32>,
    /// The end of the rendered chat.
    pub tail: Tail,
    /// The images that are among the ids, in the order of their places.
    pub images: Vec<UnreadImage>,
}

impl Encoded {
    /// The ids of a prompt that must not have images.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if there are images; `field` names the prompt in the message.
    pub fn without_images(self, field: &str) -> Result<Vec<u32>, Failure> {
        match self.images.len() {
            0 => Ok(self.ids),
            n => {
                let message = format!(
                    "it has images ({n}), and only answers are generated from images; send text alone"
                );
                Err(failure::invalid(field, &message))
            }
        }
    }
}

/// Maximum length in bytes of a too long text whose tokens are all counted, so that the error tells
/// a client how much to shorten it. For a longer text the count stops where the tokenizer gave up.
const COUNTED_MAX_BYTES: usize = 2 << 20;

impl Prompt {
    /// A prompt from a conversation. If the model reads text only, images are removed, so that they
    /// do not count.
    pub fn chat(mut chat: Chat, model: &ChatModel<'_>) -> Self {
        if model.tower.is_none() {
            chat.leave_images_out();
        }
        Self::Chat(chat)
    }

    /// Size of the prompt in bytes, for the choice of the thread that tokenizes it.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } => text.len(),
            Self::Ids(ids) => size_of_val(ids.as_slice()),
            Self::Chat(chat) => chat.byte_len(),
        }
    }

    /// Name of the field in error messages, if the caller has no other name for it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Text { .. } => "text",
            Self::Ids(_) => "tokens.ids",
            Self::Chat(_) => "messages",
        }
    }

    /// Tokenizes the prompt, to at most `room` ids, if given. CPU-bound: call it on a blocking
    /// thread. A chat needs `templates` to be rendered. `field` names the prompt in error messages.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if it is too long or the template rejects it, FAILED_PRECONDITION
    /// for an unusable template.
    pub fn encode(
        self,
        field: &str,
        model: &ChatModel<'_>,
        room: Option<Room>,
        templates: Option<Rendering<'_>>,
    ) -> Result<Encoded, Failure> {
        let tokenizer = model.tokenizer;
        let (mut tail, mut spans) = (Tail::default(), Vec::new());
        let most = room.map_or(usize::MAX, |room| room.tokens);
        let cuts = room.is_some_and(|room| room.cuts);
        let mut count = most.saturating_add(1);
        let counts =
            |bytes: usize| room.is_some_and(|room| room.counts) && bytes <= COUNTED_MAX_BYTES;
        let encoded = match self {
            Self::Ids(ids) if cuts => Ok(cut(ids, most, tokenizer)),
            Self::Ids(ids) => Ok(ids),
            Self::Text {
                text,
                add_special,
                parse_special,
            } => match cuts {
                true => tokenizer.encode_beginning(most, &text, add_special, parse_special),
                false => {
                    let encode =
                        |max| tokenizer.encode_at_most(max, &text, add_special, parse_special);
                    let encoded = encode(most);
                    if is_too_long(&encoded) && counts(text.len()) {
                        count = encode(usize::MAX).map_or(count, |ids| ids.len());
                    }
                    encoded
                }
            },
            Self::Chat(chat) => {
                let of_chat = encode_chat(chat, field, model, (most, &counts), templates)?;
                (tail, spans) = (of_chat.tail, of_chat.images);
                count = of_chat.n_all.unwrap_or(count);
                of_chat.ids
            }
        };
        match (encoded, room) {
            (Ok(ids), Some(room)) if ids.len() > most => Err(room.refuse(field, ids.len())),
            (Ok(ids), _) => Ok(Encoded {
                ids,
                tail,
                images: spans,
            }),
            (Err(TokenizerError::TooManyTokens { .. }), Some(room)) => {
                Err(room.refuse(field, count))
            }
            (Err(error), _) => Err(failure::invalid(field, &error.to_string())),
        }
    }
}

/// The ids of a rendered chat.
struct OfChat {
    ids: Result<Vec<u32>, TokenizerError>,
    /// The number of all ids, if there are too many and they were counted.
    n_all: Option<usize>,
    tail: Tail,
    images: Vec<UnreadImage>,
}

/// Tokenizes a chat with its images to at most `most` ids; if there are more, they are counted if
/// `counts` returns true for the text's bytes.
fn encode_chat(
    mut chat: Chat,
    field: &str,
    model: &ChatModel<'_>,
    (most, counts): (usize, &dyn Fn(usize) -> bool),
    templates: Option<Rendering<'_>>,
) -> Result<OfChat, Failure> {
    let tokenizer = model.tokenizer;
    let images = images::taken(&mut chat, model)?;
    let mut rendered = rendered(&chat, field, model, templates)?;
    images::written(&mut rendered, &images, model)?;
    let source = model.template_source();
    let with_headers = source.is_some_and(|source| Headers::of(source).is_some());
    let mut of_chat = OfChat {
        ids: tokenizer.encode_rendered(most, &rendered),
        n_all: None,
        tail: Tail::of(&rendered.text(), with_headers, chat.ending),
        images: Vec::new(),
    };
    match std::mem::replace(&mut of_chat.ids, Ok(Vec::new())) {
        Ok(ids) => {
            let unwanted = templates.map(|(_, unwanted)| unwanted);
            match images::placed(ids, images, model, most, unwanted)? {
                Placed::Whole(ids, spans) => (of_chat.ids, of_chat.images) = (Ok(ids), spans),
                Placed::TooMany => {
                    of_chat.ids = Err(TokenizerError::TooManyTokens { max: most });
                }
            }
        }
        too_many => {
            if is_too_long(&too_many) && counts(rendered.text().len()) {
                let all = tokenizer.encode_rendered(usize::MAX, &rendered);
                of_chat.n_all = all.ok().map(|ids| ids.len());
            }
            of_chat.ids = too_many;
        }
    }
    Ok(of_chat)
}

fn is_too_long(encoded: &Result<Vec<u32>, TokenizerError>) -> bool {
    matches!(encoded, Err(TokenizerError::TooManyTokens { .. }))
}

impl Prompt {
    /// The rendered text of the prompt, and its ids, however many. CPU-bound: call it on a blocking
    /// thread.
    ///
    /// # Errors
    /// As [`Prompt::encode`].
    pub fn render(
        self,
        field: &str,
        model: &ChatModel<'_>,
        templates: Rendering<'_>,
    ) -> Result<(String, Vec<u32>), Failure> {
        let tokenizer = model.tokenizer;
        let invalid = |error: TokenizerError| failure::invalid(field, &error.to_string());
        match self {
            Self::Chat(mut chat) => {
                let images = images::taken(&mut chat, model)?;
                let mut rendered = rendered(&chat, field, model, Some(templates))?;
                images::written(&mut rendered, &images, model)?;
                let ids = tokenizer.encode_rendered(usize::MAX, &rendered);
                let (ids, most) = (ids.map_err(invalid)?, usize::MAX);
                let placed = images::placed(ids, images, model, most, Some(templates.1))?;
                match placed {
                    Placed::Whole(ids, _) => Ok((rendered.into_text(), ids)),
                    Placed::TooMany => Err(failure::bug("more ids than memory has places")),
                }
            }
            Self::Text { ref text, .. } => {
                let text = text.clone();
                let encoded = self.encode(field, model, None, Some(templates))?;
                Ok((text, encoded.ids))
            }
            Self::Ids(ids) => Ok((tokenizer.decode(&ids).map_err(invalid)?, ids)),
        }
    }
}

/// Renders a chat as the model gets it, adapted to its template if necessary.
fn rendered(
    chat: &Chat,
    field: &str,
    model: &ChatModel<'_>,
    templates: Option<Rendering<'_>>,
) -> Result<RenderedChat, Failure> {
    let mut rendered = by_template(chat, field, model, templates)?;
    adapted::close_thoughts(chat, &mut rendered);
    Ok(rendered)
}

/// Renders a chat with the model's template.
fn by_template(
    chat: &Chat,
    field: &str,
    model: &ChatModel<'_>,
    templates: Option<Rendering<'_>>,
) -> Result<RenderedChat, Failure> {
    let (Some(template), Some((renderer, unwanted))) = (model.template, templates) else {
        return Err(no_template(model));
    };
    let tokenizer = Some(model.tokenizer);
    let render = |chat: &Chat| renderer.render(template, tokenizer, chat, unwanted);
    let is_whole =
        |rendered: &RenderedChat| adapted::is_whole(chat, &|| rendered.text().into_owned());
    let leaves_out =
        |rendered: &RenderedChat| adapted::leaves_out(chat, &|| rendered.text().into_owned());
    let mut outcome = render(chat);
    let mut told = None;
    if let Ok(rendered) = &outcome
        && let Some(again) = adapted::without_none(chat, &rendered.text())
        && let Ok(other) = render(&again)
        && adapted::spells_none(&rendered.text(), &other.text())
    {
        (outcome, told) = (Ok(other), Some(again));
    }
    let ways: &[Way] = match &outcome {
        Ok(rendered) if leaves_out(rendered) => &adapted::WAYS_OF_SYSTEM,
        Ok(_) => &[],
        Err(TokenizerError::TemplateRaised { .. } | TokenizerError::TemplateRender { .. }) => {
            &adapted::WAYS
        }
        Err(_) => &[],
    };
    for way in ways {
        let Some(again) = way(told.as_ref().unwrap_or(chat)) else {
            continue;
        };
        match render(&again) {
            Ok(rendered) if is_whole(&rendered) => return Ok(rendered),
            Ok(rendered) if outcome.is_err() => outcome = Ok(rendered),
            _ => {}
        }
        told = Some(again);
    }
    outcome.map_err(|error| from_template(field, model, &error))
}

/// The first `most` ids of a list. Tokens that the vocabulary puts at the end of every text stay
/// there, since embeddings may be pooled from them.
fn cut(mut ids: Vec<u32>, most: usize, tokenizer: &Tokenizer) -> Vec<u32> {
    if ids.len() <= most {
        return ids;
    }
    let last = ids.last().copied().filter(|id| tokenizer.is_special(*id));
    ids.truncate(most);
    if let (Some(id), Some(place)) = (last, ids.last_mut()) {
        *place = id;
    }
    ids
}

/// Text for error messages: where a template can be configured for a model.
const TEMPLATE_SETTING: &str = "(`template` of [[model]], a file or a name such as chatml)";

/// FAILED_PRECONDITION: the model cannot chat.
pub fn no_template(model: &ChatModel<'_>) -> Failure {
    if model.is_encoder {
        let message = format!(
            "'{}' is an encoder ({}), which makes embeddings or rankings and no text; use /v1/embeddings or /v1/rerank, \
             or ask a model that generates text",
            model.name, model.architecture,
        );
        return failure::unsupported_field("model", &message);
    }
    failure::model_precondition(
        Reason::NoChatTemplate,
        model.name,
        &format!(
            "the file of model '{}' carries no chat template, so that it cannot chat; give the model one {TEMPLATE_SETTING}, or \
             generate from a prompt in the model's own format",
            model.name
        ),
    )
}

/// Converts an error of rendering a chat: messages of the template concern the request; a template
/// that does not parse, crashes or takes too much concerns the model.
fn from_template(field: &str, model: &ChatModel<'_>, error: &TokenizerError) -> Failure {
    match error {
        TokenizerError::Renderer { error: cause, .. } => {
            tracing::error!(%error, %cause, "no chat can be rendered");
            failure::bug(&format!("{error}: {cause}"))
        }
        TokenizerError::Cancelled => failure::deadline(),
        TokenizerError::TemplateKilled { .. } => {
            tracing::warn!(model = model.name, %error, "a chat could not be rendered");
            failure::renderer_killed(&error.to_string())
        }
        TokenizerError::TemplateSyntax { .. }
        | TokenizerError::TemplateName { .. }
        | TokenizerError::TemplateCrashed { .. }
        | TokenizerError::Size { .. }
        | TokenizerError::Gguf(_) => {
            if let TokenizerError::TemplateCrashed { words, .. } = error {
                tracing::warn!(model = model.name, words, "a chat template crashed");
            }
            let mut message = format!("model '{}' cannot chat: {error}", model.name);
            if let TokenizerError::Gguf(cause) = error {
                message += &format!(": {cause}");
            }
            message += &format!(
                "; give the model another template {TEMPLATE_SETTING}, or generate from a prompt"
            );
            failure::model_precondition(Reason::ChatTemplateUnusable, model.name, &message)
        }
        TokenizerError::TemplateLimit { .. } => {
            tracing::warn!(model = model.name, %error, "a chat template was stopped");
            failure::invalid(field, &error.to_string())
        }
        _ => failure::invalid(field, &error.to_string()),
    }
}
